//! Generation on a GPU: the tokens of the CPU, and one read a step.

use std::ops::ControlFlow;

use overdrive_generation::{
    Engine, EngineConfig, GenerationConfig, Request, generate, generate_with,
};
use overdrive_profiling::HostReads;
use overdrive_transformer::{CausalLm, InitOptions};
use tch::{Device, Kind};

use crate::support::{greedy, random_model, random_model_on, sampled};

const GPU: Device = Device::Cuda(0);

fn on_gpu(kind: Kind) -> CausalLm {
    let options = InitOptions {
        device: GPU,
        kind,
        seed: 1,
    };
    random_model_on(500, 2, &options)
}

fn configs() -> Vec<GenerationConfig> {
    vec![
        greedy(8),
        GenerationConfig {
            top_k: 20,
            ..sampled(8, 3)
        },
        GenerationConfig {
            repetition_penalty: 1.3,
            presence_penalty: 0.2,
            logprobs: Some(3),
            ..greedy(8)
        },
        sampled(8, 5),
    ]
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn tokens_on_a_gpu_are_those_of_the_cpu_in_f32() {
    let (cpu, gpu) = (random_model(500, 2, 1), on_gpu(Kind::Float));
    for config in configs() {
        for prompts in [vec![vec![1, 2, 3]], vec![vec![4, 5, 6], vec![7]]] {
            let expected = generate(&cpu, &prompts, &config).unwrap();
            let got = generate(&gpu, &prompts, &config).unwrap();
            assert_eq!(got.sequences, expected.sequences, "{config:?}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_step_on_a_gpu_reads_one_tensor() {
    let model = on_gpu(Kind::BFloat16);
    for config in configs() {
        let reads = HostReads::of(GPU);
        let mut before = 0;
        generate_with(&model, &[vec![1, 2, 3], vec![4, 5, 6]], &config, |token| {
            if token.row == 0 {
                let names = reads.names();
                // The prompts are read in the first step.
                if before > 0 {
                    assert_eq!(names.len(), before + 1, "{config:?}: {names:?}");
                }
                before = names.len();
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    }
    let mut engine = Engine::new(&model, EngineConfig::default()).unwrap();
    for (length, config) in [3, 20, 7, 5].into_iter().zip(configs()) {
        engine
            .submit(Request::new((0..length).collect::<Vec<i64>>(), config))
            .unwrap();
    }
    engine.step().unwrap();
    while !engine.is_idle() {
        let reads = HostReads::of(GPU);
        engine.step().unwrap();
        assert_eq!(reads.names().len(), 1, "{:?}", reads.names());
    }
}
