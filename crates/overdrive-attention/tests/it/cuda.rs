//! Attention for decoding on a GPU against the CPU.

use overdrive_attention::{
    AttentionOptions, Backend, DeviceLengths, PagedLayout, Window, attention, attention_at_lengths,
    attention_decode, attention_paged,
};
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn numbers(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
    ((at.sin() * 43_758.545_3).frac() * 2.0).reshape(shape)
}

fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64, name: &str) {
    let got = got.to_device(Device::Cpu).to_kind(Kind::Double);
    let off = (got - expected.to_kind(Kind::Double)).abs().max();
    let off = off.double_value(&[]);
    assert!(off < tolerance, "{name} is off by {off}");
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn sequences_over_blocks_on_a_gpu_equal_those_of_the_cpu() {
    let queries: Vec<usize> = vec![1, 1, 1, 7, 40];
    let keys: Vec<usize> = vec![1, 17, 300, 60, 40];
    for decode in [true, false] {
        let count = if decode { 3 } else { 5 };
        let (queries, keys) = (queries[..count].to_vec(), keys[..count].to_vec());
        let mut order = (0..64_u32).rev();
        let tables: Vec<Vec<u32>> = keys
            .iter()
            .map(|keys| order.by_ref().take(keys.div_ceil(16)).collect())
            .collect();
        let total = queries.iter().sum::<usize>() as i64;
        for (kind, tolerance) in [
            (Kind::BFloat16, 4e-2),
            (Kind::Half, 5e-3),
            (Kind::Float, 1e-4),
        ] {
            let pool = |seed| numbers(&[64, 2, 16, 64], seed).to_kind(kind);
            let (key_blocks, value_blocks) = (pool(0.1), pool(0.2));
            let query = numbers(&[total, 8, 64], 0.3).to_kind(kind);
            for window in [Window::default(), Window::sliding(20)] {
                let options = AttentionOptions {
                    window,
                    ..AttentionOptions::causal()
                };
                let on = |device| {
                    let layout =
                        PagedLayout::new(tables.clone(), queries.clone(), keys.clone(), 16, device);
                    let [query, keys, values] =
                        [&query, &key_blocks, &value_blocks].map(|x| x.to_device(device));
                    attention_paged(&query, &keys, &values, &layout.unwrap(), &options).unwrap()
                };
                let (expected, expected_lse) = on(Device::Cpu);
                let (output, lse) = on(GPU);
                let name = format!("{kind:?} {window:?} {decode}");
                assert_close(&output, &expected, tolerance, &name);
                assert_close(&lse, &expected_lse, tolerance, &name);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn lengths_on_a_gpu_equal_lengths_on_the_host() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let cache = |seed| numbers(&[3, 2, 200, 64], seed).to_kind(kind);
        let (keys, values) = (cache(0.1), cache(0.2));
        let query = numbers(&[3, 8, 1, 64], 0.3).to_kind(kind);
        for window in [Window::default(), Window::sliding(20)] {
            let options = AttentionOptions {
                window,
                ..AttentionOptions::causal()
            };
            let (expected, _) =
                attention_decode(&query, &keys, &values, Some(&[7, 200, 1]), &options).unwrap();
            let [query, keys, values] = [&query, &keys, &values].map(|x| x.to_device(GPU));
            let counts = Tensor::from_slice(&[7_i64, 200, 1]).to_device(GPU);
            let lengths = DeviceLengths::new(&counts, &keys).unwrap();
            let output = attention_at_lengths(&query, &keys, &values, &lengths, &options);
            let name = format!("{kind:?} {window:?}");
            assert_close(&output.unwrap().unwrap().0, &expected, 4e-2, &name);
            let lengths = Some(&[7, 200, 1][..]);
            let (output, _) = attention_decode(&query, &keys, &values, lengths, &options).unwrap();
            assert_close(&output, &expected, 4e-2, &name);
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_mask_with_grouped_heads_on_a_gpu_runs_on_the_efficient_kernel() {
    for queries in [1, 5] {
        let query = numbers(&[2, 8, queries, 64], 0.1);
        let (key, value) = (numbers(&[2, 2, 50, 64], 0.2), numbers(&[2, 2, 50, 64], 0.3));
        let mask = numbers(&[2, 1, queries, 50], 0.4).gt(-0.5);
        for (kind, tolerance) in [(Kind::Float, 1e-4), (Kind::BFloat16, 4e-2)] {
            let on = |device, backend| {
                let [query, key, value] =
                    [&query, &key, &value].map(|x| x.to_kind(kind).to_device(device));
                let mask = mask.to_device(device);
                let options = AttentionOptions {
                    mask: Some(&mask),
                    backend,
                    ..AttentionOptions::default()
                };
                attention(&query, &key, &value, &options).unwrap()
            };
            let expected = on(Device::Cpu, Backend::Math);
            let output = on(GPU, Backend::Efficient);
            assert_close(
                &output,
                &expected,
                tolerance,
                &format!("{queries} {kind:?}"),
            );
        }
    }
}
