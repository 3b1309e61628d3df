//! Generation of encoder-decoder models against transformers, on the fixtures of overdrive-transformer.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use overdrive_generation::{
    ChoiceConstraint, Constraint, EarlyStopping, FinishReason, GenerateOptions, GeneratedToken,
    GenerationConfig, generate, generate_with_options,
};
use overdrive_transformer::{LoadOptions, Seq2SeqLm};
use tch::Tensor;

const CASES: [&str; 4] = ["t5", "t5_v1_1", "bart", "bart_scaled"];

fn fixture(case: &str) -> PathBuf {
    let fixtures = "../overdrive-transformer/tests/fixtures";
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(fixtures)
        .join(case)
}

fn load(case: &str) -> Seq2SeqLm {
    Seq2SeqLm::from_pretrained(fixture(case), &LoadOptions::default()).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(tensor).unwrap()
}

struct Fixture {
    model: Seq2SeqLm,
    config: GenerationConfig,
    sources: Vec<Vec<i64>>,
    want: HashMap<String, Tensor>,
}

fn open(case: &str) -> Fixture {
    let path = fixture(case).join("expected.safetensors");
    let want: HashMap<String, Tensor> = Tensor::read_safetensors(path)
        .unwrap()
        .into_iter()
        .collect();
    let lengths: Vec<i64> =
        Vec::try_from(want["sources_mask"].sum_dim_intlist(1i64, false, None)).unwrap();
    let sources = rows(&want["sources"]).into_iter().zip(lengths);
    Fixture {
        model: load(case),
        config: GenerationConfig {
            max_new_tokens: Some(12),
            ..GenerationConfig::from_dir(fixture(case)).unwrap()
        },
        sources: sources
            .map(|(row, length)| row[..length as usize].to_vec())
            .collect(),
        want,
    }
}

/// Cuts the padding off that transformers puts after the end of a sequence.
fn without_padding(row: &[i64], config: &GenerationConfig) -> Vec<i64> {
    let end = row[1..]
        .iter()
        .position(|id| config.eos_token_id.contains(id));
    row[..end.map_or(row.len(), |end| end + 2)].to_vec()
}

/// The caches, `None` for none.
fn caches() -> Vec<Option<&'static str>> {
    vec![Some("dynamic"), Some("static"), None]
}

#[test]
fn greedy_sequences_of_a_padded_batch_are_those_of_transformers() {
    for case in CASES {
        let fixture = open(case);
        for cache in caches() {
            let config = GenerationConfig {
                use_cache: cache.is_some(),
                cache_implementation: cache.map(str::to_owned),
                ..fixture.config.clone()
            };
            let output = generate(&fixture.model, &fixture.sources, &config).unwrap();
            for (row, want) in output.sequences.iter().zip(rows(&fixture.want["greedy"])) {
                assert_eq!(*row, without_padding(&want, &config), "{case} {cache:?}");
            }
            assert_eq!(output.prompt_lengths, [1; 3]);
        }
        // A prompt alone gives the same as in the padded batch.
        let alone = generate(&fixture.model, &fixture.sources[1..2], &fixture.config).unwrap();
        let want = &rows(&fixture.want["greedy"])[1];
        assert_eq!(
            alone.sequences[0],
            without_padding(want, &fixture.config),
            "{case}"
        );
    }
}

#[test]
fn beams_of_a_padded_batch_are_those_of_transformers() {
    for case in CASES {
        let fixture = open(case);
        for cache in caches() {
            let config = GenerationConfig {
                use_cache: cache.is_some(),
                cache_implementation: cache.map(str::to_owned),
                num_beams: 4,
                num_return_sequences: 2,
                length_penalty: 0.7,
                early_stopping: EarlyStopping::FirstFinished,
                ..fixture.config.clone()
            };
            let output = generate(&fixture.model, &fixture.sources, &config).unwrap();
            for (row, want) in output.sequences.iter().zip(rows(&fixture.want["beams"])) {
                assert_eq!(*row, without_padding(&want, &config), "{case} {cache:?}");
            }
            let want: Vec<f32> = Vec::try_from(&fixture.want["beam_scores"]).unwrap();
            for (score, want) in output.sequence_scores.unwrap().iter().zip(want) {
                assert!(
                    (score - want).abs() < 1e-4 * want.abs().max(1.0),
                    "{case}: {score} {want}"
                );
            }
        }
    }
}

#[test]
fn forced_tokens_of_a_folder_begin_and_end_each_sequence() {
    let fixture = open("bart_scaled");
    assert_eq!(fixture.config.decoder_start_token_id, Some(2));
    let output = generate(&fixture.model, &fixture.sources, &fixture.config).unwrap();
    for row in output.sequences {
        assert_eq!((row[..2].to_vec(), row.last()), (vec![2, 5], Some(&2)));
    }
}

#[test]
fn samples_of_a_prompt_have_streams_of_their_own_and_repeat_with_the_seed() {
    let fixture = open("t5");
    let config = GenerationConfig {
        do_sample: true,
        temperature: 2.0,
        num_return_sequences: 3,
        seed: Some(1),
        ..fixture.config.clone()
    };
    let run = || {
        generate(&fixture.model, &fixture.sources, &config)
            .unwrap()
            .sequences
    };
    let (first, again) = (run(), run());
    assert_eq!(first, again);
    assert_eq!(first.len(), 9);
    assert!(first[0] != first[1] && first[1] != first[2]);
}

#[test]
fn a_quantized_cache_gives_sequences_of_the_length_and_a_paged_one_is_refused() {
    for case in ["t5", "bart"] {
        let fixture = open(case);
        let with = |name: &str| GenerationConfig {
            cache_implementation: Some(name.to_owned()),
            ..fixture.config.clone()
        };
        let output = generate(&fixture.model, &fixture.sources, &with("int8")).unwrap();
        assert!(output.sequences.iter().all(|row| row.len() <= 13));
        let error = generate(&fixture.model, &fixture.sources, &with("paged")).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("`cache_implementation` is \"paged\"; it must be dynamic"),
            "{error}"
        );
    }
}

#[test]
fn wrong_prompts_and_options_are_refused_by_name() {
    let fixture = open("bart");
    let error = |prompts: &[Vec<i64>], config: &GenerationConfig| {
        generate(&fixture.model, prompts, config)
            .unwrap_err()
            .to_string()
    };
    assert!(error(&[], &fixture.config).contains("no prompt"));
    assert!(error(&[vec![5, 64]], &fixture.config).contains("token 1 of prompt 0 is 64"));
    assert!(
        error(&[vec![5; 33]], &fixture.config).contains("33 tokens, and the model's context is 32")
    );
    let config = GenerationConfig {
        decoder_start_token_id: Some(99),
        ..fixture.config.clone()
    };
    assert!(error(&[vec![5]], &config).contains("`decoder_start_token_id` is 99"));
    let config = GenerationConfig {
        prompt_lookup_num_tokens: Some(3),
        ..fixture.config.clone()
    };
    assert!(error(&[vec![5]], &config).contains("an encoder-decoder model"));
    // The decoder's context ends a sequence before its length does.
    let config = GenerationConfig {
        max_new_tokens: Some(100),
        eos_token_id: vec![],
        forced_eos_token_id: vec![],
        ..fixture.config.clone()
    };
    let output = generate(&fixture.model, &[vec![5]], &config).unwrap();
    assert_eq!(
        (output.sequences[0].len(), output.finish_reasons[0]),
        (33, FinishReason::ContextFull)
    );
}

#[test]
fn a_folder_without_generation_config_has_its_tokens_in_config_json() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(
        fixture("bart").join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    let config = GenerationConfig::from_dir(dir.path()).unwrap();
    assert_eq!(config.decoder_start_token_id, Some(2));
    assert_eq!(
        (config.forced_eos_token_id, config.eos_token_id),
        (vec![2], vec![2])
    );
    assert_eq!(config.pad_token_id, Some(1));
}

#[test]
fn tokens_are_handed_out_as_they_are_generated() {
    let fixture = open("t5_v1_1");
    let mut seen = vec![Vec::new(); 3];
    let options = GenerateOptions::default();
    let output = generate_with_options(
        &fixture.model,
        &fixture.sources,
        &fixture.config,
        &options,
        |token| {
            seen[token.row].push(token.id);
            std::ops::ControlFlow::Continue(())
        },
    )
    .unwrap();
    for (row, seen) in seen.iter().enumerate() {
        assert_eq!(output.new_tokens(row), seen);
    }
}

#[test]
fn forced_tokens_come_beside_those_of_a_constraint() {
    let fixture = open("bart_scaled");
    let run = |choice: &[i64], new: usize, num_beams: usize| {
        let config = GenerationConfig {
            max_new_tokens: Some(new),
            num_beams,
            ..fixture.config.clone()
        };
        let constraint = ChoiceConstraint::new(&[choice.to_vec()], &[]).unwrap();
        let constraints = fixture.sources.iter().map(|_| constraint.fork());
        let options = GenerateOptions {
            constraints: constraints.collect(),
            ..GenerateOptions::default()
        };
        let go_on = |_: GeneratedToken<'_>| std::ops::ControlFlow::Continue(());
        generate_with_options(&fixture.model, &fixture.sources, &config, &options, go_on).unwrap()
    };
    for num_beams in [1, 3] {
        // The first token is forced, and the constraint begins after it.
        let output = run(&[10, 11, 12], 12, num_beams);
        assert_eq!(output.sequences, vec![vec![2, 5, 10, 11, 12]; 3]);
        assert_eq!(output.finish_reasons, [FinishReason::Constraint; 3]);
        // Or begins with it.
        let output = run(&[5, 11, 12], 12, num_beams);
        assert_eq!(output.sequences, vec![vec![2, 5, 11, 12]; 3]);
        assert_eq!(output.finish_reasons, [FinishReason::Constraint; 3]);
        // The last token is forced, and the text ends with its length.
        let output = run(&[10, 11, 12], 3, num_beams);
        assert_eq!(output.sequences, vec![vec![2, 5, 10, 2]; 3]);
        assert_eq!(output.finish_reasons, [FinishReason::Length; 3]);
    }
}
