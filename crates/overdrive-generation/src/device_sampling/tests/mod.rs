//! The device path on CPU tensors, against the host.

mod expected;
mod reads;

use std::cell::Cell;

use overdrive_core::random::Generator;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{DeviceStep, Draw};
use crate::processors::History;
use crate::{GenerationConfig, LogprobsMode, Result, Sampler, TokenMask};
pub(crate) use expected::Misled;
pub(super) use expected::believed;

thread_local! {
    static FORCED: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if this thread treats CPU tensors as tensors of a device.
pub(crate) fn is_forced() -> bool {
    FORCED.get() || crate::captured::is_forced()
}

/// Makes this thread treat CPU tensors as tensors of a device, until the value is dropped.
struct Forced;

impl Forced {
    fn new() -> Forced {
        FORCED.set(true);
        Forced
    }
}

impl Drop for Forced {
    fn drop(&mut self) {
        FORCED.set(false);
    }
}

const VOCABULARY: usize = 1000;

/// Returns logits in the spread of a language model's.
fn logits(seed: u64, coarse: bool) -> Vec<f32> {
    let mut random = Generator::new(seed, 0);
    let mut next = || 3.0 * random.normal() as f32;
    let all = (0..VOCABULARY).map(|_| next());
    // In steps as wide as those of bf16, so that many tokens have the same score.
    let round = |x: f32| if coarse { (x * 8.0).round() / 8.0 } else { x };
    all.map(round).collect()
}

fn sampled() -> GenerationConfig {
    GenerationConfig {
        do_sample: true,
        top_k: 0,
        ..GenerationConfig::default()
    }
}

/// Returns a token of each row, chosen on the host and on the device.
fn both(
    rows: &[Vec<f32>],
    configs: &[GenerationConfig],
    ids: &[i64],
    new: usize,
    masks: &[Option<TokenMask>],
) -> Vec<[Result<crate::Choice>; 2]> {
    let flat: Vec<f32> = rows.concat();
    let size = [rows.len() as i64, 1, rows[0].len() as i64];
    let tensor = Tensor::from_slice(&flat).view(size);
    let mut samplers: Vec<Sampler> = configs
        .iter()
        .enumerate()
        .map(|(row, config)| Sampler::new(config, 7, row).unwrap())
        .collect();
    let mut other = samplers.clone();
    let vocabulary = rows[0].len();
    let plans = other
        .iter_mut()
        .zip(masks)
        .enumerate()
        .map(|(row, (sampler, mask))| Ok(sampler.plan(row, vocabulary, (ids, new), mask.as_ref())))
        .collect();
    let step = DeviceStep::new(&tensor, vocabulary, plans).unwrap();
    let unchanged = Vec::<f32>::try_from(tensor.view(-1)).unwrap();
    assert_eq!(unchanged.len(), flat.len());
    for (before, after) in flat.iter().zip(&unchanged) {
        assert_eq!(before.to_bits(), after.to_bits(), "the model's logits stay");
    }
    samplers
        .iter_mut()
        .zip(rows)
        .zip(masks)
        .zip(other.iter_mut())
        .enumerate()
        .map(|(row, (((host, scores), mask), device))| {
            let mut scores = scores.clone();
            [
                host.choose(&mut scores, ids, new, mask.as_ref()),
                device.choose_on(&step, row, (ids, new)),
            ]
        })
        .collect()
}

/// Checks that host and device choose the same.
fn assert_same(found: [Result<crate::Choice>; 2], name: &dyn std::fmt::Debug) {
    match found {
        [Ok(host), Ok(device)] => {
            assert_eq!(host.id, device.id, "{name:?}");
            match (host.logprobs, device.logprobs) {
                (Some(host), Some(device)) => {
                    assert_eq!(host.rank, device.rank, "{name:?}");
                    assert!((host.logprob - device.logprob).abs() < 1e-5, "{name:?}");
                    assert_eq!(host.top.len(), device.top.len(), "{name:?}");
                    for (a, b) in host.top.iter().zip(&device.top) {
                        assert_eq!(a.0, b.0, "{name:?}");
                        assert!((a.1 - b.1).abs() < 1e-5, "{name:?}");
                    }
                }
                (None, None) => {}
                other => panic!("{name:?}: {other:?}"),
            }
        }
        [Err(host), Err(device)] => assert_eq!(host.to_string(), device.to_string(), "{name:?}"),
        other => panic!("{name:?}: {other:?}"),
    }
}

/// Returns the options with which device and host choose the same tokens regardless of the rounding of sums.
fn exact_configs() -> Vec<GenerationConfig> {
    let mut configs = vec![
        GenerationConfig::default(),
        GenerationConfig {
            top_k: 50,
            ..sampled()
        },
        GenerationConfig {
            top_k: 40,
            top_p: 0.8,
            temperature: 0.7,
            ..sampled()
        },
        GenerationConfig {
            min_p: Some(0.02),
            temperature: 1.3,
            ..sampled()
        },
        GenerationConfig {
            top_h: Some(0.6),
            ..sampled()
        },
        GenerationConfig {
            top_k: 100,
            typical_p: 0.7,
            ..sampled()
        },
        GenerationConfig {
            top_k: 100,
            epsilon_cutoff: 0.005,
            ..sampled()
        },
        GenerationConfig {
            top_k: 2000,
            eta_cutoff: 0.002,
            ..sampled()
        },
        // These need all scores.
        GenerationConfig {
            typical_p: 0.7,
            ..sampled()
        },
        GenerationConfig {
            remove_invalid_values: true,
            top_k: 20,
            ..sampled()
        },
        GenerationConfig {
            forced_eos_token_id: vec![3],
            max_new_tokens: Some(5),
            ..GenerationConfig::default()
        },
    ];
    let penalties = [
        GenerationConfig {
            repetition_penalty: 1.7,
            ..GenerationConfig::default()
        },
        GenerationConfig {
            presence_penalty: 1.5,
            frequency_penalty: 0.7,
            logit_bias: [(5, 3.0), (999, -2.0), (1000, 50.0)].into_iter().collect(),
            ..GenerationConfig::default()
        },
        GenerationConfig {
            repetition_penalty: 0.8,
            frequency_penalty: -0.3,
            no_repeat_ngram_size: 2,
            bad_words_ids: vec![vec![8], vec![3, 4]],
            suppress_tokens: vec![1, 2],
            min_new_tokens: 9,
            eos_token_id: vec![6],
            sequence_bias: vec![(vec![9], 4.0), (vec![3, 11], 5.0)],
            ..GenerationConfig::default()
        },
    ];
    for penalty in penalties {
        for top_k in [0, 30] {
            configs.push(GenerationConfig {
                do_sample: top_k > 0,
                top_k,
                ..penalty.clone()
            });
        }
    }
    configs
}

#[test]
fn exact_options_choose_the_tokens_of_the_host() {
    let (ids, new) = ([5, 8, 3, 999, 3, 4, 3], 4);
    for seed in 0..20 {
        for logprobs in [
            None,
            Some((0, LogprobsMode::RawLogprobs)),
            Some((5, LogprobsMode::RawLogprobs)),
            Some((5, LogprobsMode::ProcessedLogprobs)),
        ] {
            let configs: Vec<GenerationConfig> = exact_configs()
                .into_iter()
                .map(|config| GenerationConfig {
                    seed: Some(seed),
                    logprobs: logprobs.map(|(top, _)| top),
                    logprobs_mode: logprobs.map_or_else(Default::default, |(_, mode)| mode),
                    ..config
                })
                .collect();
            let coarse = seed % 2 == 1;
            let rows: Vec<_> = (0..configs.len() as u64)
                .map(|row| logits(100 * seed + row, coarse))
                .collect();
            let masks: Vec<Option<TokenMask>> = configs.iter().map(|_| None).collect();
            // In one step of mixed requests, and each alone.
            let mixed = both(&rows, &configs, &ids, new, &masks);
            for (found, config) in mixed.into_iter().zip(&configs) {
                assert_same(found, config);
            }
            for ((row, config), mask) in rows.iter().zip(&configs).zip(&masks) {
                let alone = both(
                    std::slice::from_ref(row),
                    std::slice::from_ref(config),
                    &ids,
                    new,
                    std::slice::from_ref(mask),
                );
                for found in alone {
                    assert_same(found, config);
                }
            }
        }
    }
}

/// Checks that `id` is the token that the random number of the row selects from `weights` in the order of
/// ids, up to the rounding of f32.
fn assert_law(config: &GenerationConfig, row: usize, weights: &[f64], id: i64) {
    let number = Generator::new(config.seed.unwrap_or(7), row as u32).uniform();
    let total: f64 = weights.iter().sum();
    let below: f64 = weights[..id as usize].iter().sum();
    let (low, high) = (below / total, (below + weights[id as usize]) / total);
    assert!(weights[id as usize] > 0.0, "an excluded token was drawn");
    let edge = 1e-6;
    assert!(
        (low - edge..high + edge).contains(&number),
        "{number} is not in {low}..{high}"
    );
}

#[test]
fn a_draw_from_all_tokens_inverts_their_distribution_at_the_number_of_the_host() {
    for seed in 0..50 {
        let configs: Vec<GenerationConfig> = [0.5, 1.0, 2.0]
            .into_iter()
            .map(|temperature| GenerationConfig {
                temperature,
                seed: Some(seed),
                repetition_penalty: 1.2,
                ..sampled()
            })
            .collect();
        let rows: Vec<_> = (0..3).map(|row| logits(seed + row, false)).collect();
        let ids = [5, 8, 5];
        let found = both(&rows, &configs, &ids, 2, &[None, None, None]);
        for (row, ([host, device], config)) in found.into_iter().zip(&configs).enumerate() {
            let mut scores = rows[row].clone();
            crate::processors::process(
                scores.as_mut_slice(),
                History { ids: &ids, new: 2 },
                None,
                config,
                &mut Default::default(),
            );
            let weights: Vec<f64> = scores
                .iter()
                .map(|x| (f64::from(*x) / config.temperature).exp())
                .collect();
            for choice in [host, device] {
                assert_law(config, row, &weights, choice.unwrap().id);
            }
        }
    }
}

#[test]
fn a_nucleus_is_that_of_the_whole_distribution() {
    for seed in 0..50 {
        let config = GenerationConfig {
            top_p: [0.3, 0.9, 0.95][seed as usize % 3],
            temperature: [0.5, 1.0][seed as usize % 2],
            seed: Some(seed),
            ..sampled()
        };
        let row = logits(seed, false);
        // The exact nucleus, in f64.
        let weight = |x: f32| (f64::from(x) / config.temperature).exp();
        let mut order: Vec<usize> = (0..VOCABULARY).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let total: f64 = row.iter().map(|x| weight(*x)).sum();
        let (mut mass, mut kept) = (0.0, vec![0.0; VOCABULARY]);
        for index in order {
            if mass >= config.top_p * total {
                break;
            }
            kept[index] = weight(row[index]);
            mass += kept[index];
        }
        let [[host, device]] = both(&[row], std::slice::from_ref(&config), &[1], 0, &[None])
            .try_into()
            .unwrap();
        for choice in [host, device] {
            assert_law(&config, 0, &kept, choice.unwrap().id);
        }
    }
}

#[test]
fn a_flat_distribution_whose_nucleus_is_not_among_the_candidates_is_read_whole() {
    let row: Vec<f32> = (0..VOCABULARY).map(|id| (id % 7) as f32 * 1e-3).collect();
    let configs = [
        GenerationConfig {
            top_p: 0.9,
            ..sampled()
        },
        // All tokens with the last score are kept, which are more than requested.
        GenerationConfig {
            top_k: 50,
            ..sampled()
        },
        GenerationConfig {
            min_p: Some(0.5),
            ..sampled()
        },
    ];
    for config in configs {
        let (rows, configs) = (std::slice::from_ref(&row), std::slice::from_ref(&config));
        let found = both(rows, configs, &[1], 0, &[None]);
        for found in found {
            assert_same(found, &config);
        }
    }
}

#[test]
fn constraints_hide_tokens_of_their_own_rows() {
    let mask = |allowed: &[i64]| {
        let mut mask = TokenMask::new(VOCABULARY);
        allowed.iter().for_each(|id| mask.allow(*id));
        Some(mask)
    };
    let mut most = TokenMask::new(VOCABULARY);
    most.allow_words(&[0xFFFF_0F0F; VOCABULARY.div_ceil(32)]);
    for greedy in [true, false] {
        let config = GenerationConfig {
            do_sample: !greedy,
            top_k: 10,
            repetition_penalty: 1.3,
            ..GenerationConfig::default()
        };
        let masks = [
            mask(&[999, 7]),
            None,
            Some(most.clone()),
            mask(&[]),
            mask(&[31]),
        ];
        let rows: Vec<_> = (0..5).map(|row| logits(row, false)).collect();
        let configs = vec![config.clone(); 5];
        let found = both(&rows, &configs, &[7, 31], 1, &masks);
        assert!(found[3][1].is_err(), "nothing is allowed");
        for found in found {
            assert_same(found, &config);
        }
        // All rows are constrained.
        let masks = [mask(&[1, 2]), Some(most.clone())];
        for found in both(&rows[..2], &configs[..2], &[7], 0, &masks) {
            assert_same(found, &config);
        }
    }
}

#[test]
fn logits_that_are_not_finite_are_errors_before_any_change_hides_them() {
    for wrong in [f32::NAN, f32::INFINITY] {
        for config in [
            GenerationConfig::default(),
            GenerationConfig {
                top_k: 5,
                ..sampled()
            },
            sampled(),
            GenerationConfig {
                suppress_tokens: vec![17],
                ..GenerationConfig::default()
            },
        ] {
            let mut row = logits(1, false);
            row[17] = wrong;
            let others = logits(2, false);
            let found = both(
                &[row, others],
                &[config.clone(), config.clone()],
                &[1],
                0,
                &[None, None],
            );
            let [first, second] = found.try_into().unwrap();
            assert!(first[1].is_err() && second[1].is_ok(), "{config:?}");
            assert_same(first, &config);
        }
    }
    let row = vec![f32::NEG_INFINITY; VOCABULARY];
    for found in both(&[row], &[GenerationConfig::default()], &[1], 0, &[None]) {
        assert_same(found, &"everything is excluded");
    }
}

/// The processors and the cuts of transformers, on tensors.
#[test]
fn processed_scores_equal_those_of_transformers_on_a_device_too() {
    let text = include_str!("../../../tests/fixtures/processors.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    let mut on_device = 0;
    for case in cases {
        let config = GenerationConfig::from_map(case["config"].as_object().unwrap()).unwrap();
        let scores: Vec<f32> = serde_json::from_value(case["scores"].clone()).unwrap();
        let ids: Vec<i64> = serde_json::from_value(case["present"].clone()).unwrap();
        let new = case["new"].as_u64().unwrap() as usize;
        let want: Vec<Option<f32>> = serde_json::from_value(case["processed"].clone()).unwrap();
        let mut sampler = Sampler::new(&config, 1, 0).unwrap();
        let plan = sampler.plan(0, scores.len(), (&ids, new), None);
        on_device += usize::from(plan.draw != Draw::OnHost);
        let tensor = Tensor::from_slice(&scores).unsqueeze(0);
        let step = DeviceStep::new(&tensor, scores.len(), vec![Ok(plan)]).unwrap();
        let chosen = sampler.choose_on(&step, 0, (&ids, new)).unwrap().id;
        let kept = want[chosen as usize];
        let kept = kept.unwrap_or_else(|| panic!("{chosen} is excluded: {}", case["config"]));
        if config.is_greedy() {
            let best = want.iter().flatten().copied().fold(f32::MIN, f32::max);
            assert!((best - kept).abs() < 1e-6, "{}", case["config"]);
        }
    }
    assert!(
        on_device > 50,
        "{on_device} cases were computed on the device"
    );
}

#[test]
fn half_precision_logits_choose_as_their_values_in_f32() {
    let row = logits(3, true);
    let tensor = Tensor::from_slice(&row).unsqueeze(0);
    let config = GenerationConfig {
        top_k: 20,
        repetition_penalty: 1.5,
        ..sampled()
    };
    for kind in [Kind::BFloat16, Kind::Half, Kind::Double] {
        let mut device = Sampler::new(&config, 1, 0).unwrap();
        let mut host = device.clone();
        let tensor = tensor.to_kind(kind);
        let mut scores = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).view(-1)).unwrap();
        let plan = device.plan(0, VOCABULARY, (&[4, 5], 1), None);
        let step = DeviceStep::new(&tensor, VOCABULARY, vec![Ok(plan)]).unwrap();
        let chosen = device.choose_on(&step, 0, (&[4, 5], 1)).unwrap();
        assert_eq!(chosen, host.choose(&mut scores, &[4, 5], 1, None).unwrap());
    }
}
