//! Steps that can be captured: their numbers on any device, captures where there is a GPU, and errors
//! where there is none. A target of its own: while a graph is captured, no other test may use the GPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_graphs::{
    AccumulationConfig, CaptureOptions, CudaGraph, DecodeGraph, DecodeStep, DeviceLoss, Error,
    TrainGraph, TrainStep, static_cache_of,
};
use overdrive_kv_cache::KvCache;
use overdrive_optim::{
    AdamW, AdamWConfig, ClipOptions, Implementation, Optimizer, ParamGroup, clip_grad_norm,
};
use overdrive_profiling::HostReads;
use overdrive_sys::cuda::{self, CudaLibrary};
use overdrive_transformer::{
    CausalLm, Execution, ForwardInput, IGNORE_INDEX, InitOptions, LabelShift, LlamaConfig, Logits,
    causal_lm_loss,
};
use tch::{Cuda, Device, Kind, Tensor};

fn model(device: Device) -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 32,
        ..LlamaConfig::default()
    };
    let options = InitOptions {
        device,
        ..InitOptions::default()
    };
    CausalLm::new(&config.into(), &options).unwrap()
}

fn tokens(rows: i64, len: i64, device: Device) -> Tensor {
    let numbers = Tensor::arange(rows * len, (Kind::Int64, Device::Cpu));
    let numbers: Tensor = (numbers * 37 + 11).remainder(64);
    numbers.view([rows, len]).to_device(device)
}

fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn decode_steps_at_positions_on_the_device_give_the_logits_of_the_whole_sequence() {
    let model = model(Device::Cpu);
    let text = tokens(2, 9, Device::Cpu);
    let whole = tch::no_grad(|| model.forward(ForwardInput::new(&text))).unwrap();
    let mut step = DecodeStep::new(static_cache_of(&model, 3, 12).unwrap(), 2).unwrap();
    let first = step.prefill(&model, &text.narrow(1, 0, 5)).unwrap();
    // The same sums in another order: the kernels of one token and of many differ.
    assert!(furthest(&first, &whole.narrow(1, 4, 1)) < 1e-5);
    for place in 5..9 {
        let logits = step.step(&model, &text.narrow(1, place, 1)).unwrap();
        assert!(
            furthest(&logits, &whole.narrow(1, place, 1)) < 1e-5,
            "token {place}"
        );
    }
    assert_eq!(step.position(), 9);
}

#[test]
fn a_decode_step_reads_nothing_back() {
    let mut model = model(Device::Cpu);
    let text = tokens(2, 9, Device::Cpu);
    // On slices, as a CPU decodes, and by operators, as a GPU does.
    for fused_decoding in [true, false] {
        let mut execution = Execution::default();
        execution.fused_decoding = fused_decoding;
        model.set_execution(execution);
        let mut step = DecodeStep::new(static_cache_of(&model, 2, 12).unwrap(), 2).unwrap();
        let _logits = step.prefill(&model, &text.narrow(1, 0, 5)).unwrap();
        let reads = HostReads::of(Device::Cpu);
        for place in 5..9 {
            let _logits = step.step(&model, &text.narrow(1, place, 1)).unwrap();
        }
        assert!(reads.names().is_empty(), "{:?}", reads.names());
    }
}

#[test]
fn a_training_step_for_a_graph_reads_nothing_back() {
    let (mut step, _parameters) = train_step(Device::Cpu, 2, Some(0.2));
    for micro in 0..2 {
        step.load(micro as usize, &batch(0, micro, Device::Cpu))
            .unwrap();
    }
    let reads = HostReads::of(Device::Cpu);
    let _output = step.run().unwrap();
    assert!(reads.names().is_empty(), "{:?}", reads.names());
}

#[test]
fn a_decode_step_refuses_what_does_not_fit() {
    let model = model(Device::Cpu);
    let error = DecodeStep::new(static_cache_of(&model, 1, 4).unwrap(), 2).unwrap_err();
    assert!(error.to_string().contains("1 to 1"), "{error}");
    let mut step = DecodeStep::new(static_cache_of(&model, 2, 4).unwrap(), 2).unwrap();
    assert!(step.prefill(&model, &tokens(1, 3, Device::Cpu)).is_err());
    let _logits = step.prefill(&model, &tokens(2, 4, Device::Cpu)).unwrap();
    let error = step.step(&model, &tokens(2, 1, Device::Cpu)).unwrap_err();
    assert!(matches!(error, Error::Cache(_)), "{error:?}");
    let error = step.step(&model, &tokens(2, 2, Device::Cpu)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`tokens` has shape [2, 2]; it must be [2, 1]"
    );
    let floats = tokens(2, 1, Device::Cpu).to_kind(Kind::Float);
    let error = step.step(&model, &floats).unwrap_err();
    assert_eq!(error.to_string(), "`tokens` is Float; it must be Int64");
    assert_eq!(step.cache().len(), 4);
}

#[test]
fn graphs_on_a_cpu_say_that_they_need_cuda() {
    let work = || Ok::<_, Error>(Tensor::ones([1], (Kind::Float, Device::Cpu)));
    let error = CudaGraph::capture(Device::Cpu, CaptureOptions::default(), work).unwrap_err();
    assert!(matches!(error, Error::NeedsCuda { .. }), "{error:?}");
    assert!(
        error.to_string().contains("CUDA graphs need a CUDA device"),
        "{error}"
    );

    let model = model(Device::Cpu);
    let step = DecodeStep::new(static_cache_of(&model, 1, 4).unwrap(), 1).unwrap();
    let error = DecodeGraph::capture(&model, step, CaptureOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("CUDA graphs need a CUDA device"),
        "{error}"
    );

    let (step, _model) = train_step(Device::Cpu, 1, None);
    let error = TrainGraph::capture(step, CaptureOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("CUDA graphs need a CUDA device"),
        "{error}"
    );

    // Needs no GPU: libtorch's CUDA library has every function that a graph calls.
    if let CudaLibrary::Loaded { .. } = cuda::library().unwrap() {
        overdrive_sys::compiled::graph_functions().unwrap();
    }
    if !Cuda::is_available() {
        let error = CudaGraph::capture(Device::Cuda(0), CaptureOptions::default(), work);
        assert!(error.unwrap_err().to_string().contains("cuda:0"));
        let error = overdrive_sys::compiled::Graph::new(0)
            .unwrap_err()
            .to_string();
        assert!(error.contains("CUDA graphs need a CUDA device"), "{error}");
    }
}

fn capturable() -> AdamWConfig {
    AdamWConfig {
        capturable: true,
        ..AdamWConfig::default()
    }
}

/// The step counts of all parameters, which are equal.
fn steps(optimizer: &AdamW) -> f64 {
    let state = optimizer.state_dict().unwrap();
    let counts = state
        .tensors
        .iter()
        .filter(|(name, _)| name.ends_with("step"));
    let counts: Vec<f64> = counts.map(|(_, count)| count.double_value(&[])).collect();
    assert!(counts.iter().all(|count| *count == counts[0]));
    counts[0]
}

type Loss = Box<dyn FnMut(&[Tensor]) -> overdrive_graphs::Result<DeviceLoss>>;

/// A step over a model of its own, which comes along: the same numbers for every call.
fn train_step(
    device: Device,
    micro_batches: usize,
    max_grad_norm: Option<f64>,
) -> (TrainStep<Loss>, Vec<(String, Tensor)>) {
    let model = model(device);
    for (place, (_, tensor)) in model.named_parameters().iter().enumerate() {
        let numbers = Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu));
        let numbers = ((numbers + place as f64) * 0.37).sin() * 0.2;
        tensor
            .detach()
            .copy_(&numbers.view_as(&tensor.to_device(Device::Cpu)));
    }
    model.set_requires_grad(true).unwrap();
    let parameters = model.named_parameters();
    let group = ParamGroup::new("all", model.named_parameters()).with_weight_decay(0.1);
    let optimizer = AdamW::new(vec![group], capturable()).unwrap();
    let loss: Loss = Box::new(move |inputs| {
        let logits = model.forward(ForwardInput::new(&inputs[0]).with_logits(Logits::All))?;
        let loss = causal_lm_loss(&logits, &inputs[1], LabelShift::Shifted)?;
        Ok(DeviceLoss {
            sum: loss.sum,
            count: loss.count,
        })
    });
    let example = [tokens(2, 8, device), tokens(2, 8, device)];
    let config = AccumulationConfig {
        gradient_accumulation_steps: micro_batches,
        max_grad_norm,
    };
    let step = TrainStep::new(&example, loss, optimizer, config).unwrap();
    (step, parameters)
}

/// Inputs and targets of micro-batch `micro` of step `step`; the second has fewer tokens that count.
fn batch(step: i64, micro: i64, device: Device) -> [Tensor; 2] {
    let ids: Tensor = (tokens(2, 9, device) + step * 5 + micro * 3).remainder(64);
    let mut targets = ids.narrow(1, 1, 8).contiguous();
    if micro == 1 {
        let _same = targets.narrow(1, 0, 5).fill_(IGNORE_INDEX);
        targets = targets.contiguous();
    }
    [ids.narrow(1, 0, 8).contiguous(), targets]
}

#[test]
fn a_step_of_two_micro_batches_equals_adamw_on_the_token_weighted_mean() {
    let (mut step, ours) = train_step(Device::Cpu, 2, Some(0.2));
    // The reference: another model of the same numbers, our loss, our AdamW, one batch of both.
    let (_, theirs) = train_step(Device::Cpu, 1, None);
    let model = model(Device::Cpu);
    for ((_, to), (_, from)) in model.named_parameters().iter().zip(&theirs) {
        to.detach().copy_(&from.detach());
    }
    model.set_requires_grad(true).unwrap();
    let group = ParamGroup::new("all", model.named_parameters()).with_weight_decay(0.1);
    let mut adamw = AdamW::new(vec![group], AdamWConfig::default()).unwrap();

    for number in 0..3 {
        let batches = [batch(number, 0, Device::Cpu), batch(number, 1, Device::Cpu)];
        for (micro, tensors) in batches.iter().enumerate() {
            step.load(micro, tensors).unwrap();
        }
        let rate = 1e-3 * (number + 1) as f64;
        step.optimizer().set_learning_rate(rate).unwrap();
        let output = step.run().unwrap();

        let joined = |part: usize| Tensor::cat(&[&batches[0][part], &batches[1][part]], 0);
        let loss = model
            .loss(&joined(0), &joined(1), LabelShift::Shifted)
            .unwrap();
        let loss = loss.mean().unwrap();
        adamw.zero_grad().unwrap();
        loss.backward();
        let norm = clip_grad_norm(&adamw.parameters(), 0.2, ClipOptions::default()).unwrap();
        adamw.set_learning_rate(rate).unwrap();
        adamw.step().unwrap();

        // Sums over tokens in another order, in fp32.
        let (a, b) = (output.mean_loss.double_value(&[]), loss.double_value(&[]));
        assert!((a - b).abs() < 1e-5 * b, "step {number}: loss {a} and {b}");
        let (a, b) = (
            output.grad_norm.unwrap().double_value(&[]),
            norm.double_value(&[]),
        );
        assert!(
            b > 0.2 && (a - b).abs() < 1e-4 * b,
            "step {number}: norm {a} and {b}"
        );
    }
    assert_eq!(steps(step.optimizer()), 3.0);
    for ((name, a), (_, b)) in ours.iter().zip(model.named_parameters()) {
        // Where a gradient is near 0, AdamW's quotient turns a rounding into part of a step of 3e-3.
        let far = furthest(&a.detach(), &b.detach());
        assert!(far < 3e-4, "{name}: {far}");
        let mean = (a.detach() - b.detach())
            .abs()
            .mean(Kind::Float)
            .double_value(&[]);
        assert!(mean < 2e-6, "{name}: {mean} in the mean");
    }
}

#[test]
fn a_step_resumes_from_the_state_of_its_optimizer() {
    let (mut step, ours) = train_step(Device::Cpu, 1, None);
    step.load(0, &batch(0, 0, Device::Cpu)).unwrap();
    step.run().unwrap();
    let copied = |tensor: &Tensor| tensor.detach().copy();
    let parameters: Vec<Tensor> = ours.iter().map(|(_, tensor)| copied(tensor)).collect();
    let mut state = step.optimizer().state_dict().unwrap();
    for tensor in state.tensors.values_mut() {
        *tensor = copied(tensor);
    }
    step.run().unwrap();

    let (mut again, theirs) = train_step(Device::Cpu, 1, None);
    let memory = |step: &mut TrainStep<Loss>| -> Vec<usize> {
        let state = step.optimizer().state_dict().unwrap();
        let tensors = state.tensors.values();
        tensors.map(|tensor| tensor.data_ptr() as usize).collect()
    };
    let before = memory(&mut again);
    again.optimizer().load_state_dict(&state).unwrap();
    assert_eq!(
        memory(&mut again),
        before,
        "a graph would read the old state"
    );
    for ((_, to), from) in theirs.iter().zip(&parameters) {
        to.detach().copy_(from);
    }
    again.load(0, &batch(0, 0, Device::Cpu)).unwrap();
    again.run().unwrap();
    assert_eq!(steps(again.optimizer()), 2.0);
    for ((name, a), (_, b)) in ours.iter().zip(&theirs) {
        assert!(furthest(&a.detach(), &b.detach()) < 1e-6, "{name}");
    }
    let (missing, _) = state.tensors.pop_first().unwrap();
    let error = again.optimizer().load_state_dict(&state).unwrap_err();
    assert!(error.to_string().contains(&missing), "{error}");
}

#[test]
fn options_and_micro_batches_that_do_not_fit_are_refused() {
    let (mut step, ours) = train_step(Device::Cpu, 2, None);
    let fits = batch(0, 0, Device::Cpu);
    let error = step.load(2, &fits).unwrap_err();
    assert!(error.to_string().contains("below 2"), "{error}");
    let error = step.load(0, &fits[..1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`tensors` is 1; it must be 2, the number of tensors of the example"
    );
    let [ids, targets] = &fits;
    let error = step
        .load(1, &[ids.shallow_clone(), targets.narrow(1, 0, 7)])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "`tensor 1 of micro-batch 1` has shape [2, 7]; it must be [2, 8], as in the example"
    );
    let floats = ids.to_kind(Kind::Float);
    let error = step
        .load(0, &[floats, targets.shallow_clone()])
        .unwrap_err();
    assert!(error.to_string().contains("is Float"), "{error}");
    assert!(step.optimizer().set_learning_rate(-1.0).is_err());

    let plain = AdamWConfig {
        implementation: Implementation::Plain,
        ..capturable()
    };
    let error = AdamW::new(vec![ParamGroup::new("a", ours)], plain).unwrap_err();
    assert!(error.to_string().contains("`capturable`"), "{error}");

    let step_of = |tensors: Vec<(String, Tensor)>, config: AdamWConfig| {
        let used = tensors.first().map(|(_, tensor)| tensor.shallow_clone());
        let optimizer = AdamW::new(vec![ParamGroup::new("all", tensors)], config).unwrap();
        let loss: Loss = Box::new(move |_| {
            let sum = used.as_ref().unwrap().f_sum(Kind::Float)?;
            let count = sum.f_ones_like()?;
            Ok(DeviceLoss { sum, count })
        });
        TrainStep::new(&[], loss, optimizer, AccumulationConfig::default())
    };
    let leaf = |name: &str| {
        let tensor = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        (name.to_owned(), tensor)
    };
    let error = step_of(Vec::new(), capturable()).unwrap_err();
    assert!(error.to_string().contains("at least one"), "{error}");
    let error = step_of(vec![leaf("used")], AdamWConfig::default()).unwrap_err();
    assert!(
        error.to_string().contains("`capturable` is false"),
        "{error}"
    );
    let error = step_of(vec![leaf("used"), leaf("unused")], capturable())
        .unwrap()
        .run()
        .unwrap_err();
    assert!(matches!(error, Error::NoGradient { .. }), "{error:?}");
    assert!(error.to_string().contains("`unused`"), "{error}");
}

#[test]
fn a_capturable_step_keeps_the_largest_average_with_amsgrad() {
    let leaf = || Tensor::from_slice(&[1.0f32, -2.0]).set_requires_grad(true);
    let (captured, plain) = (leaf(), leaf());
    let amsgrad = |capturable: bool| AdamWConfig {
        amsgrad: true,
        capturable,
        ..AdamWConfig::default()
    };
    let group = |tensor: &Tensor| {
        vec![ParamGroup::new(
            "all",
            vec![("w".to_owned(), tensor.shallow_clone())],
        )]
    };
    let mut first = AdamW::new(group(&captured), amsgrad(true)).unwrap();
    let mut second = AdamW::new(group(&plain), amsgrad(false)).unwrap();
    for step in 1..=3 {
        for (tensor, optimizer) in [(&captured, &mut first), (&plain, &mut second)] {
            (tensor.square().sum(Kind::Float) / step).backward();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    // The learning rate is rounded to fp32 on the device.
    assert!(furthest(&captured.detach(), &plain.detach()) < 1e-6);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn on_a_gpu_replays_give_what_the_steps_give() {
    overdrive_sys::compiled::graph_functions().unwrap();
    let device = Device::Cuda(0);
    let model = model(device);
    let text = tokens(2, 9, device);
    let step = || {
        let mut step = DecodeStep::new(static_cache_of(&model, 2, 12).unwrap(), 2).unwrap();
        let _logits = step.prefill(&model, &text.narrow(1, 0, 5)).unwrap();
        step
    };
    let mut plain = step();
    let mut graph = DecodeGraph::capture(&model, step(), CaptureOptions::default()).unwrap();
    assert!(graph.pool_bytes() > 0);
    for place in 5..9 {
        let token = text.narrow(1, place, 1);
        let expected = plain.step(&model, &token).unwrap();
        assert!(
            furthest(graph.step(&token).unwrap(), &expected) < 1e-5,
            "token {place}"
        );
    }

    let (mut plain, a) = train_step(device, 2, Some(0.5));
    let (mut captured, b) = train_step(device, 2, Some(0.5));
    for micro in 0..2 {
        captured
            .load(micro as usize, &batch(0, micro, device))
            .unwrap();
    }
    let mut graph = TrainGraph::capture(captured, CaptureOptions::default()).unwrap();
    for number in 0..3 {
        for micro in 0..2 {
            let tensors = batch(number, micro, device);
            plain.load(micro as usize, &tensors).unwrap();
            graph.load(micro as usize, &tensors).unwrap();
        }
        let expected = plain.run().unwrap().mean_loss.double_value(&[]);
        let got = graph.step().unwrap().mean_loss.double_value(&[]);
        assert!(
            (got - expected).abs() < 1e-4 * expected,
            "{got} and {expected}"
        );
    }
    for ((name, a), (_, b)) in a.iter().zip(&b) {
        assert!(furthest(&a.detach(), &b.detach()) < 3e-4, "{name}");
    }

    let input = Tensor::ones([4], (Kind::Float, device));
    let reads = || Ok::<f64, Error>(input.f_sum(Kind::Float)?.f_double_value(&[])?);
    let error = CudaGraph::capture(device, CaptureOptions::default(), reads).unwrap_err();
    assert!(matches!(error, Error::CannotCapture { .. }), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("must not read values on the host"),
        "{error}"
    );
    // The process goes on: allocations, random numbers, and other captures.
    let noise = Tensor::rand([1 << 20], (Kind::Float, device));
    assert!(noise.max().double_value(&[]) <= 1.0);
    drop(noise);
    let reserved = overdrive_sys::memory::stats(device)
        .unwrap()
        .allocated_bytes;
    // Each of four elements is dropped or doubled twice.
    let dropped = || Ok::<Tensor, Error>((&input * 2.0).f_dropout(0.5, true)?);
    let graph = CudaGraph::capture(device, CaptureOptions::default(), dropped).unwrap();
    let sum = graph.replay().unwrap().sum(Kind::Float).double_value(&[]);
    assert_eq!(sum % 4.0, 0.0, "{sum}");
    drop(graph);
    assert!(
        overdrive_sys::memory::stats(device)
            .unwrap()
            .allocated_bytes
            <= reserved
    );
}
