//! The pass before the first prompt.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::ControlFlow;

use overdrive_generation::{
    GenerateOptions, GenerateOutput, GenerationConfig, GenerationModel, ImagePatches, Result,
    RowDecoder, generate_with_options, warm_up,
};
use overdrive_sys::random;
use overdrive_transformer::CausalLm;
use tch::{Device, Tensor};

use crate::support::{byte_tokenizer, greedy, random_model};

/// A model that loads something in its first pass, as one on a GPU does, and records the lengths of the prompts and the
/// steps of each decoder.
struct Loading {
    model: CausalLm,
    passes: RefCell<Vec<(Vec<usize>, usize)>>,
    loads: bool,
}

impl Loading {
    fn new(loads: bool) -> Self {
        Self {
            model: random_model(257, 1, 3),
            passes: RefCell::default(),
            loads,
        }
    }

    fn prompts(&self) -> Vec<Vec<usize>> {
        let passes = self.passes.borrow();
        passes.iter().map(|(prompts, _)| prompts.clone()).collect()
    }
}

impl GenerationModel for Loading {
    fn num_logits(&self) -> i64 {
        self.model.num_logits()
    }

    fn max_positions(&self, config: &GenerationConfig) -> usize {
        self.model.max_positions(config)
    }

    fn beginnings<'p>(
        &self,
        prompts: &'p [Vec<i64>],
        config: &GenerationConfig,
    ) -> Result<Cow<'p, [Vec<i64>]>> {
        self.model.beginnings(prompts, config)
    }

    fn row_decoder<'m>(
        &'m self,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Box<dyn RowDecoder + 'm>> {
        let lengths = prompts.iter().map(Vec::len).collect();
        self.passes.borrow_mut().push((lengths, 0));
        let rows = self.model.row_decoder(prompts, images, config, copies)?;
        Ok(Box::new(Recorded(self, rows)))
    }

    fn loads_on_first_use(&self) -> bool {
        self.loads
    }
}

struct Recorded<'m>(&'m Loading, Box<dyn RowDecoder + 'm>);

impl RowDecoder for Recorded<'_> {
    fn prefill(&mut self) -> Result<Tensor> {
        self.1.prefill()
    }

    fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        self.0.passes.borrow_mut().last_mut().unwrap().1 += 1;
        self.1.step(tokens)
    }

    fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        self.1.reorder(rows)
    }
}

fn generated(
    model: &Loading,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
) -> GenerateOutput {
    generate_with_options(model, prompts, config, options, |_| {
        ControlFlow::Continue(())
    })
    .unwrap()
}

#[test]
fn the_first_pass_is_made_before_the_prompts_and_changes_no_result() {
    let long: Vec<i64> = (0..40).collect();
    let tokenizer = byte_tokenizer();
    let sampled = GenerationConfig {
        do_sample: true,
        seed: Some(5),
        top_p: 0.9,
        ..greedy(6)
    };
    let cases = [
        (vec![long.clone()], sampled.clone()),
        // Of different lengths, which are laid out in another way.
        (vec![vec![1, 2], long.clone(), vec![3; 20]], sampled.clone()),
        (
            vec![long.clone()],
            GenerationConfig {
                cache_implementation: Some("static".to_owned()),
                num_return_sequences: 2,
                logprobs: Some(1),
                ..sampled.clone()
            },
        ),
        (
            vec![long],
            GenerationConfig {
                num_beams: 2,
                min_new_tokens: 4,
                ..greedy(6)
            },
        ),
    ];
    for (prompts, config) in cases {
        let options = GenerateOptions {
            tokenizer: Some(&tokenizer),
            ..GenerateOptions::default()
        };
        let cold = generated(&Loading::new(true), &prompts, &config, &options);
        let model = Loading::new(true);
        let before = random::state(Device::Cpu).unwrap();
        warm_up(&model, &prompts, &config, &options).unwrap();
        assert_eq!(random::state(Device::Cpu).unwrap(), before);
        let (lengths, steps) = model.passes.borrow()[0].clone();
        assert_eq!(steps, 1, "a prompt and a decode step");
        let expected = match prompts.len() {
            1 => vec![8],
            _ => vec![2, 8, 7],
        };
        assert_eq!(lengths, expected);

        let warm = generated(&model, &prompts, &config, &options);
        assert_eq!(warm.sequences, cold.sequences);
        assert_eq!(warm.texts, cold.texts);
        assert_eq!(warm.logprobs, cold.logprobs);
        assert_eq!(warm.sequence_scores, cold.sequence_scores);
        // The pass that loads is not the one whose time is that of the prompts.
        let whole: Vec<usize> = prompts.iter().map(Vec::len).collect();
        assert_eq!(model.prompts(), [expected, whole]);
    }
}

#[test]
fn a_model_that_loads_nothing_makes_no_first_pass() {
    let model = Loading::new(false);
    let prompts = [vec![1, 2, 3]];
    let time = warm_up(&model, &prompts, &greedy(4), &GenerateOptions::default()).unwrap();
    assert!(time.is_zero());
    assert!(model.prompts().is_empty());
    assert!(!model.model.loads_on_first_use(), "a model on the CPU");
}
