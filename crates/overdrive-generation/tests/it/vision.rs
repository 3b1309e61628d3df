//! Prompts with images against transformers (`gen_vision.py` of overdrive-transformer), over each cache, with samples and
//! beams, and what is refused.

use std::ops::ControlFlow;

use overdrive_generation::{
    GenerateOptions, GenerateOutput, GenerationConfig, ImagePatches, Result, generate_with_options,
};
use overdrive_transformer::CausalLm;

use crate::support::{greedy, load, with_images};

fn run(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    images: &[Vec<ImagePatches>],
    config: &GenerationConfig,
) -> Result<GenerateOutput> {
    let options = GenerateOptions {
        images,
        ..GenerateOptions::default()
    };
    generate_with_options(model, prompts, config, &options, |_| {
        ControlFlow::Continue(())
    })
}

#[test]
fn greedy_tokens_of_two_prompts_with_images_are_those_of_transformers() {
    let (model, case) = (load("qwen3_vl"), with_images());
    let changes: [fn(&mut GenerationConfig); 4] = [
        |_| {},
        |config| config.cache_implementation = Some("static".to_owned()),
        |config| config.prefill_chunk_size = Some(5),
        |config| config.use_cache = false,
    ];
    for change in changes {
        let mut config = greedy(12);
        change(&mut config);
        let found = run(&model, &case.prompts, &case.images, &config).unwrap();
        for (row, wanted) in case.continuations.iter().enumerate() {
            assert_eq!(found.new_tokens(row), wanted, "{row} {config:?}");
            let alone = run(
                &model,
                &case.prompts[row..=row],
                &case.images[row..=row],
                &config,
            );
            assert_eq!(alone.unwrap().new_tokens(0), wanted, "{row} {config:?}");
        }
    }
}

#[test]
fn samples_and_beams_of_prompts_with_images_do_not_depend_on_the_cache() {
    let (model, case) = (load("qwen3_vl"), with_images());
    let beams = GenerationConfig {
        num_beams: 3,
        num_return_sequences: 2,
        ..greedy(8)
    };
    let samples = GenerationConfig {
        do_sample: true,
        seed: Some(7),
        num_return_sequences: 2,
        ..greedy(8)
    };
    for config in [beams, samples] {
        let cached = run(&model, &case.prompts, &case.images, &config).unwrap();
        let again = GenerationConfig {
            use_cache: false,
            ..config
        };
        let again = run(&model, &case.prompts, &case.images, &again).unwrap();
        assert_eq!(cached.sequences, again.sequences);
        assert_ne!(cached.sequences[0], cached.sequences[1]);
    }
}

#[test]
fn a_row_that_ends_early_leaves_the_images_of_the_others() {
    let (model, case) = (load("qwen3_vl"), with_images());
    let (prompts, images) = (&case.prompts, &case.images);
    // The first row ends with its second token.
    let end = case.continuations[0][1];
    for use_cache in [true, false] {
        let config = GenerationConfig {
            eos_token_id: vec![end],
            use_cache,
            ..greedy(12)
        };
        let found = run(&model, prompts, images, &config).unwrap();
        let wanted = &case.continuations[1];
        let length = wanted
            .iter()
            .position(|id| *id == end)
            .map_or(12, |at| at + 1);
        assert_eq!(found.new_tokens(1), &wanted[..length]);
    }
}

#[test]
fn options_that_do_not_go_with_images_are_refused() {
    let (model, case) = (load("qwen3_vl"), with_images());
    let refused = |config: GenerationConfig| {
        let error = run(&model, &case.prompts[..1], &case.images[..1], &config);
        error.unwrap_err().to_string()
    };
    let cache = |name: &str| GenerationConfig {
        cache_implementation: Some(name.to_owned()),
        ..greedy(4)
    };
    assert!(refused(cache("paged")).contains("use an engine"));
    let mut sliding = cache("sliding_window");
    sliding.cache_config.window_length = Some(8);
    assert!(refused(sliding).contains("sliding"));
    let lookup = GenerationConfig {
        prompt_lookup_num_tokens: Some(2),
        ..greedy(4)
    };
    assert!(refused(lookup).contains("images"));
    let error = run(&model, &case.prompts, &case.images[..1], &greedy(4)).unwrap_err();
    assert!(
        error.to_string().contains("`images` has 1 entries for 2"),
        "{error}"
    );
    let error = run(&model, &case.prompts[..1], &case.images[1..], &greedy(4)).unwrap_err();
    assert!(
        error.to_string().contains("image tokens in a prompt"),
        "{error}"
    );
    let text = load("qwen3");
    let error = run(&text, &case.prompts, &case.images, &greedy(4)).unwrap_err();
    assert!(error.to_string().contains("sees no images"), "{error}");
}
