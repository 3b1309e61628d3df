//! Beam search against transformers.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::Path;

use overdrive_generation::{
    ChoiceConstraint, Constraint, FinishReason, GenerateOptions, GenerationConfig, GenerationModel,
    ImagePatches, Result, RowDecoder, generate, generate_with_options,
};
use overdrive_transformer::CausalLm;
use serde_json::Value;
use tch::Tensor;

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

#[test]
fn each_prompt_has_its_number_of_rows_even_if_it_has_fewer_continuations() {
    let model = model();
    let constraint = ChoiceConstraint::new(&[vec![10], vec![12]], &[]).unwrap();
    let config = GenerationConfig {
        num_beams: 4,
        num_return_sequences: 3,
        ..crate::support::greedy(8)
    };
    let options = GenerateOptions {
        constraints: vec![constraint.fork(), constraint.fork()],
        ..GenerateOptions::default()
    };
    let prompts = [vec![5, 9], vec![7]];
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(&model, &prompts, &config, &options, go_on).unwrap();
    assert_eq!(output.prompt_lengths, [2, 2, 2, 1, 1, 1]);
    let scores = output.sequence_scores.as_ref().unwrap();
    for row in 0..6 {
        assert!(output.sequences[row].starts_with(&prompts[row / 3]));
        assert!(
            [[10], [12]]
                .iter()
                .any(|choice| output.new_tokens(row) == choice)
        );
        assert_eq!(output.finish_reasons[row], FinishReason::Constraint);
        // The third repeats one of the two.
        assert_eq!(scores[row] < -1e8, row % 3 == 2, "{scores:?}");
    }
    assert_ne!(output.sequences[0], output.sequences[1]);
}

/// A model whose logits are the same after any tokens, but for those after the prompt.
struct Fixed {
    first: Vec<f32>,
    then: Vec<f32>,
}

impl GenerationModel for Fixed {
    fn num_logits(&self) -> i64 {
        self.first.len() as i64
    }

    fn max_positions(&self, _: &GenerationConfig) -> usize {
        100
    }

    fn beginnings<'p>(
        &self,
        prompts: &'p [Vec<i64>],
        _: &GenerationConfig,
    ) -> Result<Cow<'p, [Vec<i64>]>> {
        Ok(Cow::Borrowed(prompts))
    }

    fn row_decoder<'m>(
        &'m self,
        prompts: &[Vec<i64>],
        _: &[Vec<ImagePatches>],
        _: &GenerationConfig,
        _: usize,
    ) -> Result<Box<dyn RowDecoder + 'm>> {
        Ok(Box::new(FixedRows(self, prompts.len())))
    }
}

struct FixedRows<'m>(&'m Fixed, usize);

fn repeated(logits: &[f32], rows: usize) -> Result<Tensor> {
    let logits = Tensor::from_slice(logits).view([1, 1, -1]);
    Ok(logits.repeat([rows as i64, 1, 1]))
}

impl RowDecoder for FixedRows<'_> {
    fn prefill(&mut self) -> Result<Tensor> {
        repeated(&self.0.first, self.1)
    }

    fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        repeated(&self.0.then, tokens.len())
    }

    fn reorder(&mut self, _: &[usize]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn at_the_time_limit_running_beams_compete_with_finished_ones() {
    let logits: Vec<f32> = [0.5f32, 0.11, 0.09, 0.3].iter().map(|p| p.ln()).collect();
    let model = Fixed {
        first: logits.clone(),
        then: logits,
    };
    let config = GenerationConfig {
        num_beams: 3,
        num_return_sequences: 3,
        eos_token_id: vec![1],
        max_time: Some(0.0),
        ..crate::support::greedy(8)
    };
    let output = generate(&model, &[vec![2]], &config).unwrap();
    // The end of text has finished first, and is the worst of the three.
    assert_eq!(output.sequences, [[2, 0], [2, 3], [2, 1]]);
    let late = FinishReason::TimeLimit;
    assert_eq!(output.finish_reasons, [late, late, FinishReason::EndOfText]);
    for (score, p) in output
        .sequence_scores
        .unwrap()
        .iter()
        .zip([0.5f32, 0.3, 0.11])
    {
        assert!((score - p.ln()).abs() < 1e-5, "{score}");
    }
}

#[test]
fn remove_invalid_values_makes_logits_that_are_not_finite_alike() {
    let model = Fixed {
        first: vec![0.0, f32::NAN, 2.0, 1.0],
        then: vec![0.0, 0.0, 50.0, 0.0],
    };
    let config = GenerationConfig {
        num_beams: 2,
        num_return_sequences: 2,
        ..crate::support::greedy(3)
    };
    let error = generate(&model, &[vec![3]], &config).unwrap_err();
    assert!(error.to_string().contains("hold NaN"), "{error}");
    let config = GenerationConfig {
        remove_invalid_values: true,
        ..config
    };
    // transformers' log-softmax of NaN is NaN for every token, and 0 in its place.
    let output = generate(&model, &[vec![3]], &config).unwrap();
    assert_eq!(output.sequences, [[3, 0, 2, 2], [3, 1, 2, 2]]);
    assert!(
        output
            .sequence_scores
            .unwrap()
            .iter()
            .all(|score| score.abs() < 1e-5)
    );
}

#[test]
fn remove_invalid_values_gives_no_beam_a_token_that_the_constraint_excludes() {
    let model = Fixed {
        first: vec![0.0; 4],
        then: vec![0.0, 3.0, 2.0, 1.0],
    };
    let config = GenerationConfig {
        num_beams: 3,
        remove_invalid_values: true,
        ..crate::support::greedy(3)
    };
    // Fewer tokens than beams.
    let choice = ChoiceConstraint::new(&[vec![0, 1, 2], vec![0, 2, 3]], &[]).unwrap();
    let options = GenerateOptions {
        constraints: vec![Box::new(choice)],
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(&model, &[vec![3]], &config, &options, go_on).unwrap();
    assert_eq!(output.sequences, [[3, 0, 1, 2]]);
}
