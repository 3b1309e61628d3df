//! The launches and reads of a step, counted by dispatch modes.

use std::cell::RefCell;
use std::rc::Rc;

use overdrive_profiling::HostReads;
use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, push_mode};
use overdrive_sys::transfer::is_copying_to_host;
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::{Device, Kind, Tensor};

use super::{Forced, sampled};
use crate::device_sampling::{Ahead, DeviceStep};
use crate::{Engine, EngineConfig, Event, GenerationConfig, Request, Sampler, generate_with};

/// Counts operators that launch kernels, and the bytes that come back.
#[derive(Default)]
struct Counter {
    launches: RefCell<Vec<String>>,
    bytes: RefCell<usize>,
}

impl DispatchMode for Counter {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        if is_copying_to_host() {
            let copied = call.tensors()?;
            let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
            *self.bytes.borrow_mut() += copied.first().map_or(0, bytes);
        } else if !call.aliases()? || call.mutates()? {
            // Views launch nothing, and neither do allocations and the host's lists before they are uploaded.
            let name = call.full_name();
            if !name.starts_with("aten::empty") && name != "aten::zeros" {
                self.launches.borrow_mut().push(name);
            }
        }
        Ok(())
    }
}

/// Returns the launches and the bytes of a step of `rows` rows.
fn counted(
    rows: usize,
    vocabulary: usize,
    configs: &[GenerationConfig],
    looks_ahead: bool,
) -> (Vec<String>, usize) {
    let logits = Tensor::randn([rows as i64, vocabulary as i64], (Kind::Float, Device::Cpu));
    let mut samplers: Vec<Sampler> = (0..rows)
        .map(|row| Sampler::new(&configs[row % configs.len()], 1, row).unwrap())
        .collect();
    let counter = Rc::new(Counter::default());
    let mode = push_mode(Rc::clone(&counter) as Rc<dyn DispatchMode>);
    let plans = samplers.iter_mut().enumerate();
    let plans =
        plans.map(|(row, sampler)| Ok(sampler.plan(row, vocabulary, (&[1, 2, 3], 1), None)));
    let mut nothing = |_: &Tensor| Ok(());
    let ahead: Option<Ahead<'_>> = looks_ahead.then_some(&mut nothing);
    let step = DeviceStep::before_reading(&logits, vocabulary, plans.collect(), ahead).unwrap();
    for (row, sampler) in samplers.iter_mut().enumerate() {
        sampler.choose_on(&step, row, (&[1, 2, 3], 1)).unwrap();
    }
    drop(mode);
    let bytes = *counter.bytes.borrow();
    (counter.launches.take(), bytes)
}

#[test]
fn the_launches_and_bytes_of_a_step_do_not_grow_with_the_vocabulary() {
    let greedy = GenerationConfig::default();
    let top_k = GenerationConfig {
        top_k: 50,
        top_p: 0.9,
        ..sampled()
    };
    let penalized = GenerationConfig {
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        logit_bias: [(3, 1.0)].into_iter().collect(),
        suppress_tokens: vec![9],
        ..top_k.clone()
    };
    for (name, config, most_launches, bytes_a_row) in [
        ("greedy", &greedy, 4, 8),
        ("top-k", &top_k, 6, 8 + 8 * 114),
        ("draw", &sampled(), 12, 12),
        ("penalties", &penalized, 18, 12 + 8 * 114),
    ] {
        let mut found = Vec::new();
        for vocabulary in [4_000, 128_000] {
            let (launches, bytes) = counted(64, vocabulary, std::slice::from_ref(config), false);
            println!(
                "{name}: {} launches and {bytes} bytes for 64 rows of {vocabulary}, before 0 and {} bytes",
                launches.len(),
                64 * 4 * vocabulary
            );
            assert!(launches.len() <= most_launches, "{name}: {launches:?}");
            assert_eq!(bytes, 64 * bytes_a_row, "{name}");
            found.push((launches, bytes));
        }
        assert_eq!(found[0], found[1], "{name}");
    }
    let mixed = [greedy, top_k, sampled(), penalized];
    for (looks_ahead, most) in [(false, 30), (true, 60)] {
        let (launches, _) = counted(64, 4_000, &mixed, looks_ahead);
        println!("mixed: {} launches, ahead: {looks_ahead}", launches.len());
        assert!(launches.len() <= most, "{launches:?}");
    }
}

pub(super) fn model() -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 500,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 256,
        initializer_range: 0.2,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

fn requests() -> Vec<GenerationConfig> {
    [
        GenerationConfig::default(),
        GenerationConfig {
            top_k: 50,
            ..sampled()
        },
        GenerationConfig {
            repetition_penalty: 1.2,
            logprobs: Some(3),
            ..GenerationConfig::default()
        },
        GenerationConfig {
            top_p: 0.9,
            num_return_sequences: 3,
            ..sampled()
        },
        sampled(),
    ]
    .into_iter()
    .map(|config| GenerationConfig {
        max_new_tokens: Some(6),
        seed: Some(3),
        ..config
    })
    .collect()
}

#[test]
fn a_generate_step_reads_one_tensor_and_gives_the_tokens_of_the_host() {
    let model = model();
    let prompts = [vec![1, 2, 3], vec![4, 5, 6]];
    for config in requests() {
        let host = generate_with(&model, &prompts, &config, |_| ops_continue()).unwrap();
        let _forced = Forced::new();
        let reads = HostReads::of(Device::Cpu);
        let mut seen = Vec::new();
        let device = generate_with(&model, &prompts, &config, |token| {
            // Each step hands out a token a row.
            if token.row == 0 {
                seen.push(reads.names());
            }
            ops_continue()
        })
        .unwrap();
        assert_eq!(host.sequences, device.sequences, "{config:?}");
        for (step, names) in seen.iter().enumerate() {
            let expected = vec!["aten::copy_"; step + 1];
            assert_eq!(names, &expected, "after step {step} of {config:?}");
        }
        assert_eq!(seen.len(), 6);
    }
}

fn ops_continue() -> std::ops::ControlFlow<()> {
    std::ops::ControlFlow::Continue(())
}

#[test]
fn an_engine_step_reads_one_tensor_and_gives_the_tokens_of_the_host() {
    let model = model();
    let run = |counted: bool| {
        let config = EngineConfig {
            num_blocks: Some(64),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, config).unwrap();
        for (length, config) in [3, 20, 7, 5, 2].into_iter().zip(requests()) {
            engine
                .submit(Request::new((0..length).collect::<Vec<i64>>(), config))
                .unwrap();
        }
        let mut tokens = Vec::new();
        while !engine.is_idle() {
            let reads = counted.then(|| HostReads::of(Device::Cpu));
            for event in engine.step().unwrap() {
                if let Event::Token {
                    request,
                    sample,
                    id,
                    logprobs,
                    ..
                } = event
                {
                    let rank = logprobs.map(|logprobs| logprobs.rank);
                    tokens.push((request.to_string(), sample, id, rank));
                }
            }
            if let Some(reads) = reads {
                // Reads of the model are counted by its own tests.
                let own = reads.names();
                let own = own.iter().filter(|name| *name == "aten::copy_");
                assert_eq!(own.count(), 1, "{:?}", reads.names());
            }
        }
        tokens
    };
    let host = run(false);
    let _forced = Forced::new();
    assert_eq!(run(true), host);
}
