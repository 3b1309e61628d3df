//! Requests with images: against transformers and `generate`, in chunks, after preemption, with shared blocks.

use std::ops::ControlFlow;

use overdrive_generation::{
    Engine, EngineConfig, EngineModel, Error, GenerateOptions, GenerationConfig, ImagePatches,
    RaggedStep, Request, Result, generate_with_options,
};
use overdrive_transformer::{CausalLm, ImageFeatures, VisionConfig};
use tch::Tensor;

use crate::support::{greedy, load, with_images};

fn model() -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    load("qwen3_vl")
}

fn config(change: impl FnOnce(&mut EngineConfig)) -> EngineConfig {
    let mut config = EngineConfig {
        block_size: 4,
        num_blocks: Some(64),
        max_num_seqs: 8,
        max_num_batched_tokens: Some(64),
        ..EngineConfig::default()
    };
    change(&mut config);
    config
}

fn alone(model: &CausalLm, prompt: &[i64], images: &[ImagePatches], new: usize) -> Vec<i64> {
    let images = [images.to_vec()];
    let options = GenerateOptions {
        images: &images,
        ..GenerateOptions::default()
    };
    let go = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(model, &[prompt.to_vec()], &greedy(new), &options, go);
    output.unwrap().new_tokens(0).to_vec()
}

/// The same images with other pixels.
fn brighter(images: &[ImagePatches]) -> Vec<ImagePatches> {
    let brighter = |image: &ImagePatches| {
        let values = image.values().iter().map(|value| value + 0.7).collect();
        ImagePatches::new(values, image.patch_width, image.grid, image.merge_size).unwrap()
    };
    images.iter().map(brighter).collect()
}

#[test]
fn requests_with_images_get_the_tokens_of_transformers_in_chunks_of_any_size() {
    let (model, case) = (model(), with_images());
    for budget in [64, 9, 8] {
        let config = config(|config| config.max_num_batched_tokens = Some(budget));
        let mut engine = Engine::new(&model, config).unwrap();
        for (prompt, images) in case.prompts.iter().zip(&case.images) {
            let request = Request::new(prompt.clone(), greedy(12)).with_images(images.clone());
            engine.submit(request).unwrap();
            // A request without images in the same steps.
            engine
                .submit(Request::new(vec![5, 9, 3], greedy(12)))
                .unwrap();
        }
        let outcomes = engine.run_to_end().unwrap();
        let text = alone(&model, &[5, 9, 3], &[], 12);
        for (number, (_, completions)) in outcomes.into_iter().enumerate() {
            let tokens = &completions.unwrap()[0].tokens;
            let wanted = if number % 2 == 0 {
                &case.continuations[number / 2]
            } else {
                &text
            };
            assert_eq!(tokens, wanted, "{budget} {number}");
        }
    }
}

#[test]
fn a_preempted_request_reads_its_images_again() {
    let (model, case) = (model(), with_images());
    let config = config(|config| {
        config.num_blocks = Some(11);
        config.watermark = 0.0;
        config.enable_prefix_caching = false;
    });
    let mut engine = Engine::new(&model, config).unwrap();
    for (prompt, images) in case.prompts.iter().zip(&case.images) {
        let request = Request::new(prompt.clone(), greedy(12)).with_images(images.clone());
        engine.submit(request).unwrap();
    }
    let outcomes = engine.run_to_end().unwrap();
    for ((_, completions), wanted) in outcomes.into_iter().zip(&case.continuations) {
        assert_eq!(&completions.unwrap()[0].tokens, wanted);
    }
    assert!(engine.statistics().preemptions > 0);
}

#[test]
fn blocks_are_shared_by_equal_pixels_and_not_by_equal_tokens() {
    let (model, case) = (model(), with_images());
    let (prompt, images) = (&case.prompts[0], &case.images[0]);
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let other = brighter(images);
    let mut reused = 0;
    for (images, shared) in [(images, 0), (&other, 0), (images, 20), (&other, 20)] {
        let request = Request::new(prompt.clone(), greedy(12)).with_images(images.clone());
        let completions = engine
            .run_one(request, |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(completions[0].tokens, alone(&model, prompt, images, 12));
        let now = engine.statistics().reused_tokens;
        // Whole blocks before the last token; the first block ends with the token before the image.
        let before_image = if now > 0 && shared == 0 { 4 } else { 0 };
        assert_eq!(now - reused, shared.max(before_image));
        reused = now;
    }
    assert_ne!(
        alone(&model, prompt, images, 12),
        alone(&model, prompt, &other, 12)
    );
}

#[test]
fn samples_and_proposals_continue_after_the_positions_of_images() {
    let (model, case) = (model(), with_images());
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    // Sampling among one token is greedy.
    let options = GenerationConfig {
        do_sample: true,
        top_k: 1,
        num_return_sequences: 2,
        prompt_lookup_num_tokens: Some(3),
        ..greedy(12)
    };
    let request =
        Request::new(case.prompts[0].clone(), options).with_images(case.images[0].clone());
    let completions = engine
        .run_one(request, |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(completions.len(), 2);
    for completion in completions {
        assert_eq!(completion.tokens, case.continuations[0]);
    }
}

/// A model whose vision tower fails.
struct Blind(CausalLm);

impl EngineModel for Blind {
    forwards_shape!(0);

    fn vision(&self) -> Option<&VisionConfig> {
        EngineModel::vision(&self.0)
    }

    fn encode_images(&self, _: &Tensor, _: &[[i64; 2]]) -> Result<ImageFeatures> {
        Err(Error::BadLogits { row: 0 })
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        EngineModel::forward(&self.0, step)
    }
}

#[test]
fn images_that_cannot_be_encoded_fail_their_request_alone() {
    let case = with_images();
    let wanted = alone(&model(), &[5, 9, 3], &[], 12);
    let mut engine = Engine::new(Blind(model()), config(|_| {})).unwrap();
    let text = Request::new(vec![5, 9, 3], greedy(12));
    let text = engine.submit(text).unwrap();
    let (prompt, images) = (case.prompts[0].clone(), case.images[0].clone());
    let request = Request::new(prompt, greedy(12)).with_images(images);
    let failed = engine.submit(request).unwrap();
    for (request, outcome) in engine.run_to_end().unwrap() {
        match outcome {
            Ok(completions) => {
                assert_eq!(request, text);
                assert_eq!(completions[0].tokens, wanted);
            }
            Err(error) => {
                assert_eq!(request, failed);
                assert!(matches!(error, Error::BadLogits { .. }), "{error}");
            }
        }
    }
    assert_eq!(engine.statistics().failed, 1);
    assert!(engine.cache().is_empty());
}

#[test]
fn images_that_do_not_fit_are_refused_at_submission() {
    let (model, case) = (model(), with_images());
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let request =
        Request::new(case.prompts[0].clone(), greedy(4)).with_images(case.images[1].clone());
    let error = engine.submit(request).unwrap_err().to_string();
    assert!(error.contains("image tokens in a prompt"), "{error}");
    let image = ImagePatches::new(vec![0.0; 8 * 8 * 48], 48, [8, 8], 2).unwrap();
    let other = Request::new(case.prompts[0].clone(), greedy(4)).with_images(vec![image]);
    let error = engine.submit(other).unwrap_err().to_string();
    assert!(error.contains("patch_width 96"), "{error}");
    let text = load("qwen3");
    let mut engine = Engine::new(&text, config(|_| {})).unwrap();
    let request =
        Request::new(case.prompts[0].clone(), greedy(4)).with_images(case.images[0].clone());
    let error = engine.submit(request).unwrap_err().to_string();
    assert!(error.contains("sees no images"), "{error}");
}
