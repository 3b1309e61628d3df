//! The expected tokens, against those that the host chooses.

use std::cell::Cell;

use tch::Tensor;

use super::{Forced, VOCABULARY, assert_same, exact_configs, logits, reads, sampled};
use crate::device_sampling::{DeviceStep, Expected};
use crate::{GenerationConfig, Sampler, generate};

thread_local! {
    static MISLED: Cell<bool> = const { Cell::new(false) };
    static FOUND: Cell<usize> = const { Cell::new(0) };
}

/// Makes the device of this thread expect token 0 everywhere, until the value is dropped.
pub(crate) struct Misled;

impl Misled {
    pub(crate) fn new() -> Misled {
        MISLED.set(true);
        Misled
    }
}

impl Drop for Misled {
    fn drop(&mut self) {
        MISLED.set(false);
    }
}

/// Returns the expected tokens, or others.
pub(in crate::device_sampling) fn believed(tokens: Tensor) -> Tensor {
    FOUND.set(FOUND.get() + 1);
    match MISLED.get() {
        true => tokens.zeros_like(),
        false => tokens,
    }
}

#[test]
fn the_device_expects_the_tokens_of_the_host_before_they_are_read() {
    let history: (&[i64], usize) = (&[5, 8, 3, 999, 3, 4, 3], 4);
    let mut configs = exact_configs();
    configs.extend([
        sampled(),
        GenerationConfig {
            top_p: 0.9,
            temperature: 0.6,
            ..sampled()
        },
        GenerationConfig {
            top_p: 1e-9,
            ..sampled()
        },
        GenerationConfig {
            top_k: 64,
            top_p: 0.95,
            min_p: Some(0.01),
            repetition_penalty: 1.2,
            ..sampled()
        },
    ]);
    let mut known = 0;
    for seed in 0..20 {
        for logprobs in [None, Some(3)] {
            let samplers = configs.iter().enumerate().map(|(row, config)| {
                let config = GenerationConfig {
                    logprobs,
                    ..config.clone()
                };
                Sampler::new(&config, seed, row).unwrap()
            });
            let mut samplers: Vec<Sampler> = samplers.collect();
            samplers.retain_mut(|sampler| {
                let plan = sampler.plan(0, VOCABULARY, history, None);
                plan.expected != Expected::Unknown
            });
            known = samplers.len();
            let count = samplers.len() as u64;
            let all: Vec<f32> = (0..count)
                .flat_map(|row| logits(100 * seed + row, false))
                .collect();
            let tensor = Tensor::from_slice(&all).view([-1, VOCABULARY as i64]);
            let mut others = samplers.clone();
            let plans = samplers.iter_mut().enumerate();
            let plans =
                plans.map(|(row, sampler)| Ok(sampler.plan(row, VOCABULARY, history, None)));
            let mut found = Vec::new();
            let mut ahead = |tokens: &Tensor| {
                found = Vec::<i64>::try_from(tokens.view(-1))?;
                // As the next step of a graph does.
                let _same = tensor.shallow_clone().fill_(f64::NAN);
                Ok(())
            };
            let plans = plans.collect();
            let step =
                DeviceStep::before_reading(&tensor, VOCABULARY, plans, Some(&mut ahead)).unwrap();
            assert_eq!(step.expected().unwrap(), found);
            let rows = all.chunks(VOCABULARY).zip(&mut others).zip(&mut samplers);
            for (row, ((scores, host), device)) in rows.enumerate() {
                let choice = device.choose_on(&step, row, history).unwrap();
                assert_eq!(found[row], choice.id, "{:?}", device.config());
                let mut scores = scores.to_vec();
                let host = host.choose(&mut scores, history.0, history.1, None);
                assert_same([host, Ok(choice)], device.config());
            }
        }
    }
    assert_eq!(known, 14);
}

#[test]
fn no_token_is_expected_where_no_step_can_begin_with_it() {
    let model = reads::model();
    let config = GenerationConfig {
        max_new_tokens: Some(12),
        seed: Some(3),
        top_k: 20,
        ..sampled()
    };
    // Logits stay on the device, and steps are not captured.
    let _forced = Forced::new();
    let output = generate(&model, &[vec![1, 2, 3]], &config).unwrap();
    assert_eq!((output.sequences[0].len(), FOUND.get()), (15, 0));
}
