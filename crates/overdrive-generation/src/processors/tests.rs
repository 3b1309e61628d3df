use serde_json::Value;

use super::{History, TokenCounts, process};
use crate::sampler::cuts::Candidates;
use crate::{GenerationConfig, Sampler, TokenMask};

/// Returns the scores after all processors, in the form of transformers' list of processors.
fn processed(mut scores: Vec<f32>, ids: &[i64], new: usize, config: &GenerationConfig) -> Vec<f32> {
    let history = History { ids, new };
    process(
        scores.as_mut_slice(),
        history,
        None,
        config,
        &mut TokenCounts::default(),
    );
    if !config.is_greedy() {
        Candidates::default().cut_all(&mut scores, config, 1);
    }
    scores
}

#[test]
fn processed_scores_equal_those_of_transformers() {
    let text = include_str!("../../tests/fixtures/processors.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 114);
    for case in cases {
        let config = GenerationConfig::from_map(case["config"].as_object().unwrap()).unwrap();
        let scores: Vec<f32> = serde_json::from_value(case["scores"].clone()).unwrap();
        let ids: Vec<i64> = serde_json::from_value(case["present"].clone()).unwrap();
        let new = case["new"].as_u64().unwrap() as usize;
        let scores = processed(scores, &ids, new, &config);
        let want: Vec<Option<f32>> = serde_json::from_value(case["processed"].clone()).unwrap();
        for (id, (got, want)) in scores.iter().zip(want).enumerate() {
            match want {
                None => assert_eq!(*got, f32::NEG_INFINITY, "token {id}: {}", case["config"]),
                Some(want) => {
                    let close = (got - want).abs() <= 1e-6 * want.abs().max(1.0);
                    assert!(close, "token {id}: {got} for {want}: {}", case["config"]);
                }
            }
        }
    }
}

#[test]
fn one_token_stays_whatever_the_cut() {
    let sampled = || GenerationConfig {
        do_sample: true,
        top_k: 0,
        ..Default::default()
    };
    for config in [
        GenerationConfig {
            top_p: 1e-9,
            ..sampled()
        },
        GenerationConfig {
            top_p: 0.0,
            ..sampled()
        },
        GenerationConfig {
            top_p: 0.0,
            top_k: 2,
            ..sampled()
        },
        GenerationConfig {
            top_k: 1,
            ..sampled()
        },
        GenerationConfig {
            min_p: Some(1.0),
            ..sampled()
        },
        GenerationConfig {
            top_h: Some(1e-9),
            ..sampled()
        },
        GenerationConfig {
            epsilon_cutoff: 0.999,
            ..sampled()
        },
        GenerationConfig {
            eta_cutoff: 0.999,
            epsilon_cutoff: 0.9,
            ..sampled()
        },
    ] {
        config.validate().unwrap();
        let scores = processed(vec![0.1, 2.0, -1.0, 0.3], &[], 0, &config);
        let left: Vec<_> = (0..4).filter(|&id| scores[id].is_finite()).collect();
        assert_eq!(left, [1], "{config:?}");
    }
}

#[test]
fn invalid_logits_are_replaced_and_exclusions_stay() {
    let config = GenerationConfig {
        remove_invalid_values: true,
        logit_bias: [(4, f64::NEG_INFINITY)].into_iter().collect(),
        bad_words_ids: vec![vec![5]],
        no_repeat_ngram_size: 2,
        eos_token_id: vec![7],
        min_new_tokens: 9,
        exponential_decay_length_penalty: Some((0, 3.0)),
        ..Default::default()
    };
    let mut allowed = TokenMask::new(9);
    (0..8).for_each(|id| allowed.allow(id));
    let (nan, infinite) = (f32::NAN, f32::INFINITY);
    let mut scores = [nan, infinite, -infinite, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0];
    let history = History {
        ids: &[3, 6, 3],
        new: 2,
    };
    let counts = &mut TokenCounts::default();
    process(&mut scores[..], history, Some(&allowed), &config, counts);
    // 4 has a bias of -infinity, 5 is a bad word, 6 followed 3 before, 7 ends the text too early, 8 is not allowed.
    let mut want = [-infinite; 9];
    want[..4].copy_from_slice(&[0.0, f32::MAX, f32::MIN, 1.0]);
    assert_eq!(scores, want);
}

#[test]
fn presence_is_taken_once_and_frequency_for_each_occurrence_of_generated_tokens() {
    let config = GenerationConfig {
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: [(4, 2.0)].into_iter().collect(),
        ..Default::default()
    };
    // The two tokens of the prompt do not count; 3 was generated twice and 1 once.
    let scores = processed(vec![1.0; 5], &[0, 3, 3, 1, 3], 3, &config);
    assert_eq!(scores, [1.0, 1.0 - 0.5 - 0.25, 1.0, 1.0 - 0.5 - 0.5, 3.0]);
}

#[test]
fn a_temperature_that_would_overflow_the_logits_is_greedy() {
    for temperature in [1e-320, 1e-40, 9e-6] {
        let config = GenerationConfig {
            do_sample: true,
            temperature,
            typical_p: 0.5,
            min_p: Some(0.5),
            ..Default::default()
        };
        assert!(config.is_greedy());
        for seed in 0..20 {
            let mut sampler = Sampler::new(&config, seed, 0).unwrap();
            let id = sampler.next_token(&mut [1.0, 3.0, 2.0], &[], 0);
            assert_eq!(id.unwrap(), 1, "{temperature}");
        }
    }
    let config = GenerationConfig {
        do_sample: true,
        temperature: 1e-5,
        ..Default::default()
    };
    assert!(!config.is_greedy());
}
