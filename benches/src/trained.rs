//! A training step of a model that has learned from text, on batches of that text.
//!
//! Random weights attend to all keys alike. Learned ones ignore most of them, with weights and gradients below 2⁻¹²⁶ that
//! an Intel processor multiplies a hundred times slower.

use std::path::{Path, PathBuf};

use overdrive::trainer::{Preset, TextData, TrainingArguments};
use overdrive::transformer::{CausalLm, LoadOptions, SaveOptions};
use tch::{Device, Tensor};

use crate::{Shape, Step, StepResult};

/// The name of the file of batches beside the weights.
const BATCHES: &str = "batches.safetensors";

/// The number of batches that are kept for measurements.
const KEPT: usize = 16;

/// A step of a trained model, and the batches to run it with.
#[derive(Debug)]
pub struct Trained {
    /// The step, with a new optimizer if it was loaded.
    pub step: Step,
    /// Inputs and labels, each (B, T).
    pub batches: Vec<(Tensor, Tensor)>,
}

impl Trained {
    /// Trains a new model of `preset` for `steps` steps, on the text of `train` or on `data`; returns its step with the
    /// batches that follow.
    ///
    /// # Errors
    /// An error if the text cannot be read, or if memory runs out.
    pub fn new(preset: Preset, data: &[PathBuf], steps: usize) -> StepResult<Self> {
        let arguments = preset.arguments();
        let arguments = TrainingArguments {
            data: data.to_vec(),
            // One more than the model sees: the label of its last token.
            context_length: arguments.context_length + 1,
            ..arguments
        };
        let text = TextData::prepare(&arguments, |line| eprintln!("{line}"))?;
        let shape = Shape {
            vocab: text.vocab_size().try_into()?,
            ..Shape::of(preset)
        };
        let mut step = Step::new(shape, Device::Cpu)?;
        let mut loader = text.train_loader(&arguments, Device::Cpu)?;
        let mut next = || -> StepResult<(Tensor, Tensor)> {
            let batch = loader.next_batches(1)?;
            let tokens = &batch.first().ok_or("the text has no batch")?.input_ids;
            split(tokens)
        };
        for index in 1..=steps {
            let loss = step.run(&next()?)?;
            if index % 50 == 0 {
                eprintln!("            step {index}, loss {loss:.3}");
            }
        }
        let batches = (0..KEPT).map(|_| next()).collect::<StepResult<_>>()?;
        Ok(Self { step, batches })
    }

    /// Writes the weights as Hugging Face's libraries read them, and the batches as `tokens` (batches, B, T + 1).
    ///
    /// # Errors
    /// An error if a file cannot be written.
    pub fn save(&self, folder: &Path) -> StepResult<()> {
        self.step
            .model()
            .save_pretrained(folder, &SaveOptions::default())?;
        let whole = |(inputs, labels): &(Tensor, Tensor)| {
            let last = labels.f_narrow(1, -1, 1)?;
            Tensor::f_cat(&[inputs, &last], 1)
        };
        let tokens: Result<Vec<_>, _> = self.batches.iter().map(whole).collect();
        let tokens = Tensor::f_stack(&tokens?, 0)?;
        Tensor::write_safetensors(&[("tokens", tokens)], folder.join(BATCHES))?;
        Ok(())
    }

    /// Loads what [`save`](Self::save) has written for a preset of `shape`.
    ///
    /// # Errors
    /// An error if a file cannot be read.
    pub fn load(folder: &Path, shape: Shape) -> StepResult<Self> {
        let options = LoadOptions {
            device: Device::Cpu,
            ..LoadOptions::default()
        };
        let model = CausalLm::from_pretrained(folder, &options)?;
        let read = Tensor::read_safetensors(folder.join(BATCHES))?;
        let (_, tokens) = read.first().ok_or("the file of batches is empty")?;
        let batches = (0..tokens.size()[0]).map(|at| split(&tokens.f_get(at)?));
        Ok(Self {
            step: Step::of_model(model, shape)?,
            batches: batches.collect::<StepResult<_>>()?,
        })
    }
}

/// Returns the inputs and the labels of `tokens` (B, T + 1).
fn split(tokens: &Tensor) -> StepResult<(Tensor, Tensor)> {
    let length = tokens.size()[1] - 1;
    let part = |start| tokens.f_narrow(1, start, length)?.f_contiguous();
    Ok((part(0)?, part(1)?))
}
