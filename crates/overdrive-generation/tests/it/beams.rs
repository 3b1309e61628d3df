//! Beam search against transformers.

use std::ops::ControlFlow;
use std::path::Path;

use overdrive_generation::{
    ChoiceConstraint, FinishReason, GenerateOptions, GenerationConfig, generate,
    generate_with_options,
};
use overdrive_transformer::CausalLm;
use serde_json::Value;

fn fixtures() -> Value {
    let text = include_str!("../fixtures/beams.json");
    serde_json::from_str(text).unwrap()
}

fn model() -> CausalLm {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/beams");
    CausalLm::from_pretrained(dir, &Default::default()).unwrap()
}

fn prompts() -> Vec<Vec<i64>> {
    serde_json::from_value(fixtures()["prompts"].clone()).unwrap()
}

#[test]
fn beams_are_those_of_transformers_with_their_scores_within_1e_4() {
    let (model, prompts) = (model(), prompts());
    let cases = fixtures()["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), 14);
    for case in cases {
        let config = GenerationConfig::from_map(case["config"].as_object().unwrap()).unwrap();
        for use_cache in [true, false] {
            let config = GenerationConfig {
                use_cache,
                pad_token_id: Some(0),
                ..config.clone()
            };
            // All prompts in one batch; transformers ran each alone.
            let output = generate(&model, &prompts, &config).unwrap();
            let rows = case["rows"].as_array().unwrap();
            assert_eq!(output.sequences.len(), rows.len());
            let scores = output.sequence_scores.unwrap();
            for (number, row) in rows.iter().enumerate() {
                let want: Vec<i64> = serde_json::from_value(row["ids"].clone()).unwrap();
                assert_eq!(
                    output.sequences[number], want,
                    "row {number}: {}",
                    case["config"]
                );
                let want = row["score"].as_f64().unwrap() as f32;
                // Relative for large scores: a length penalty below 0 multiplies their rounding.
                let error = (scores[number] - want).abs() / want.abs().max(1.0);
                assert!(error < 1e-4, "row {number}: {error}: {}", case["config"]);
            }
        }
    }
}

#[test]
fn each_prompt_of_a_batch_is_searched_as_alone() {
    let (model, prompts) = (model(), prompts());
    for do_sample in [false, true] {
        let config = GenerationConfig {
            num_beams: 3,
            num_return_sequences: 2,
            eos_token_id: vec![3],
            do_sample,
            ..crate::support::greedy(10)
        };
        let options = GenerateOptions {
            seeds: vec![5, 6, 7, 8],
            ..GenerateOptions::default()
        };
        let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
        let together = generate_with_options(&model, &prompts, &config, &options, go_on).unwrap();
        for (number, prompt) in prompts.iter().enumerate() {
            let options = GenerateOptions {
                seeds: vec![options.seeds[number]],
                ..GenerateOptions::default()
            };
            let prompt = std::slice::from_ref(prompt);
            let alone = generate_with_options(&model, prompt, &config, &options, go_on).unwrap();
            assert_eq!(
                together.sequences[2 * number..2 * number + 2],
                alone.sequences,
                "prompt {number}, sampled {do_sample}"
            );
        }
    }
}

#[test]
fn the_best_beam_is_at_least_as_likely_as_the_greedy_text() {
    let (model, prompts) = (model(), prompts());
    let greedy = GenerationConfig {
        logprobs: Some(0),
        ..crate::support::greedy(8)
    };
    let output = generate(&model, &prompts, &greedy).unwrap();
    let beams = GenerationConfig {
        num_beams: 8,
        ..crate::support::greedy(8)
    };
    let found = generate(&model, &prompts, &beams).unwrap();
    let scores = found.sequence_scores.unwrap();
    for (row, logprobs) in output.logprobs.unwrap().iter().enumerate() {
        let sum: f32 = logprobs.iter().map(|token| token.logprob).sum();
        assert!(
            scores[row] * 8.0 >= sum - 1e-4,
            "{} < {sum}",
            scores[row] * 8.0
        );
    }
}

#[test]
fn tokens_of_the_best_beams_are_handed_out_at_the_end_with_their_text() {
    let (model, prompts) = (model(), prompts());
    let config = GenerationConfig {
        num_beams: 2,
        num_return_sequences: 2,
        ..crate::support::greedy(5)
    };
    let mut seen = vec![Vec::new(); 8];
    let mut ends = Vec::new();
    let options = GenerateOptions::default();
    let output = generate_with_options(&model, &prompts, &config, &options, |token| {
        seen[token.row].push(token.id);
        ends.extend(token.finished);
        ControlFlow::Continue(())
    })
    .unwrap();
    for (row, seen) in seen.iter().enumerate() {
        assert_eq!(seen, output.new_tokens(row));
    }
    assert_eq!(ends, [FinishReason::Length; 8]);
}

#[test]
fn beams_of_a_constraint_are_its_choices_from_the_likeliest_on() {
    let model = model();
    let choices = vec![vec![10, 11], vec![12], vec![13, 14, 15]];
    let constraint = ChoiceConstraint::new(&choices, &[]).unwrap();
    let config = GenerationConfig {
        num_beams: 4,
        num_return_sequences: 3,
        length_penalty: 0.0,
        early_stopping: overdrive_generation::EarlyStopping::Never,
        ..crate::support::greedy(8)
    };
    let options = GenerateOptions {
        constraints: vec![Box::new(constraint)],
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(&model, &[vec![5, 9]], &config, &options, go_on).unwrap();
    let mut found: Vec<Vec<i64>> = (0..3).map(|row| output.new_tokens(row).to_vec()).collect();
    let scores = output.sequence_scores.unwrap();
    assert!(
        scores.windows(2).all(|pair| pair[0] >= pair[1]),
        "{scores:?}"
    );
    found.sort();
    assert_eq!(found, choices);
    assert_eq!(output.finish_reasons, [FinishReason::Constraint; 3]);
}
