//! The number of operators of a step by libtorch's operators, which is that of kernel launches on a GPU. On a CPU
//! parameters in float64 take the same path.

use overdrive_optim::{
    AdamW8bit, AdamW8bitConfig, Optimizer, PagedAdamW, PagedAdamWConfig, ParamGroup, StateBits,
};
use overdrive_profiling::OperatorCounts;
use tch::{Device, Kind, Tensor};

/// Returns parameters of different sizes with gradients; each sixth is too small for an 8-bit state.
fn parameters(count: usize) -> Vec<(String, Tensor)> {
    let one = |index: usize| {
        let len = if index % 6 == 5 {
            300
        } else {
            5000 + 37 * index
        };
        let values = Tensor::arange(len as i64, (Kind::Double, Device::Cpu)).sin();
        let parameter = values.set_requires_grad(true);
        parameter.square().sum(Kind::Double).backward();
        (format!("w{index}"), parameter)
    };
    (0..count).map(one).collect()
}

/// Returns the launches and bytes of the second step, which creates no states and no code books.
fn second_step(mut optimizer: impl Optimizer) -> (usize, u64) {
    optimizer.step().unwrap();
    let counts = OperatorCounts::new();
    optimizer.step().unwrap();
    // Each step count is on the CPU and is incremented there.
    let on_the_host = counts.by_name()["aten::add_.Scalar"];
    (counts.launches() - on_the_host, counts.bytes())
}

#[test]
fn a_step_of_many_8_bit_parameters_launches_what_a_step_of_one_does() {
    let of = |count| {
        let group = ParamGroup::new("all", parameters(count));
        let config = AdamW8bitConfig::default();
        second_step(AdamW8bit::new(vec![group], config).unwrap())
    };
    let (one, bytes_of_one) = of(1);
    let (thirty, _) = of(30);
    println!(
        "{one} and {thirty} launches, {} B an element",
        bytes_of_one / 5000
    );
    // 17 for parameters in float32, which need no copies. Before: 35 for every parameter, and four uploads.
    assert_eq!(one, 20);
    // Five of them have float64 states, for which there is one fused operator and its step count.
    assert_eq!(thirty, one + 2);
}

#[test]
fn paged_states_in_memory_are_updated_together_too() {
    for (state_bits, launches) in [(StateBits::Eight, 22), (StateBits::ThirtyTwo, 2)] {
        let config = PagedAdamWConfig {
            state_bits,
            ..PagedAdamWConfig::default()
        };
        let group = ParamGroup::new("all", parameters(30));
        let (found, _) = second_step(PagedAdamW::new(vec![group], config).unwrap());
        assert_eq!(found, launches, "{state_bits:?}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn eight_bit_states_on_a_gpu_are_those_of_the_cpu() {
    let start = (Tensor::arange(70_000, (Kind::Float, Device::Cpu)) * 0.37).sin();
    let run = |device| {
        // One that ends within a block, one of bf16, and one with a state in float32.
        let leaf = |first: i64, len: i64, kind| {
            let part = start.narrow(0, first, len).to_kind(kind).to_device(device);
            part.set_requires_grad(true)
        };
        let parameters = [
            leaf(0, 50_001, Kind::Float),
            leaf(50_001, 9000, Kind::BFloat16),
            leaf(60_000, 300, Kind::Float),
        ];
        let names = ["a", "b", "c"].map(String::from).into_iter();
        let named = names.zip(parameters.iter().map(Tensor::shallow_clone));
        let group = ParamGroup::new("all", named.collect());
        let config = AdamW8bitConfig {
            learning_rate: 1e-2,
            ..AdamW8bitConfig::default()
        };
        let mut optimizer = AdamW8bit::new(vec![group], config).unwrap();
        for _ in 0..5 {
            optimizer.zero_grad().unwrap();
            let losses = parameters
                .iter()
                .map(|p| p.to_kind(Kind::Float).square().sum(Kind::Float));
            losses.sum::<Tensor>().backward();
            optimizer.step().unwrap();
        }
        parameters.map(|p| p.detach().to_device(Device::Cpu).to_kind(Kind::Float))
    };
    let [here, there] = [Device::Cpu, Device::Cuda(0)].map(run);
    for ((here, there), tolerance) in here.iter().zip(&there).zip([1e-4, 1e-2, 1e-5]) {
        let difference = (here - there).abs().max().double_value(&[]);
        assert!(difference < tolerance, "{difference}");
    }
}
