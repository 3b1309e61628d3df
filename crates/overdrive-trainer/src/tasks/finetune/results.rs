use std::fmt;
use std::path::PathBuf;

use overdrive_generation::{GenerationConfig, generate};
use overdrive_optim::Ema;
use overdrive_profiling::Machine;
use overdrive_tracking::{Report, Sample, read_metrics};
use overdrive_transformer::CausalLm;

use super::data::{InstructionData, Question};
use super::{FinetuneModel, TrainingMemory};
use crate::arguments::FinetuneArguments;
use crate::data::BatchFill;
use crate::run::{RunFolder, RunSummary};
use crate::tasks::language_model::{text, write_report};
use crate::{Result, RunEnd};

/// The maximum number of tokens of an answer that is shown at the end.
const ANSWER_TOKENS: usize = 64;

/// A fine-tuned model before its results are written.
#[derive(Debug)]
pub struct Finetuned {
    /// The arguments, with the model's context.
    pub arguments: FinetuneArguments,
    /// The run's folder; `None` for a run that writes nothing.
    pub folder: Option<RunFolder>,
    /// The trained model.
    pub model: FinetuneModel,
    /// The prompts and responses.
    pub data: InstructionData,
    /// The losses and the speed.
    pub summary: RunSummary,
    /// The average of the trainable parameters (`ema_decay`).
    pub ema: Option<Ema>,
    /// The memory of the training.
    pub memory: TrainingMemory,
    /// The shares of tokens in the batches and in their rows.
    pub fill: BatchFill,
}

/// The results of a fine-tuning run. Displayed as answers, loss, memory, speed and
/// folders.
#[derive(Debug)]
pub struct FinetuneResults {
    /// The run's folder.
    pub folder: RunFolder,
    /// The folder of the model with the adapter merged into it, if it was written.
    pub merged: Option<PathBuf>,
    /// The losses and the speed.
    pub summary: RunSummary,
    /// The memory of the training.
    pub memory: TrainingMemory,
    /// The shares of tokens in the batches and in their rows.
    pub fill: BatchFill,
    /// Answers of the trained model to held-out questions, or to training questions if none are held out.
    pub samples: Vec<Sample>,
    /// The warning that the report was not written, if it was not.
    pub warning: Option<String>,
}

impl Finetuned {
    /// Writes the adapter (or the model), the tokenizer, answers and the report into the run's folder, unless the run was
    /// interrupted. The title of the report is that of the model, `name`.
    ///
    /// # Errors
    /// An error if a file cannot be written, or generation fails. A report that cannot be written is a warning in the
    /// results.
    pub fn write(mut self, name: &str) -> Result<Option<FinetuneResults>> {
        let (Some(folder), RunEnd::Finished) = (self.folder, self.summary.end()) else {
            return Ok(None);
        };
        let arguments = &self.arguments;
        folder.check_in_place()?;
        self.model.save(&folder, self.ema.as_mut())?;
        let beside = match arguments.use_peft {
            true => folder.root().to_owned(),
            false => folder.model(),
        };
        self.data.copy_tokenizer(arguments, &beside)?;
        let samples = answers(&self.model.model, &self.data)?;
        let warning = report(arguments, &folder, name, &self.model, &samples)?;
        let merged = arguments.merge.then(|| folder.root().join("merged"));
        if let Some(path) = &merged {
            folder.check_in_place()?;
            FinetuneModel::save_merged(&arguments.model_name_or_path, folder.root(), path)?;
            self.data.copy_tokenizer(arguments, path)?;
        }
        Ok(Some(FinetuneResults {
            folder,
            merged,
            summary: self.summary,
            memory: self.memory,
            fill: self.fill,
            samples,
            warning,
        }))
    }
}

/// Generates answers of the model to some of the questions.
fn answers(model: &CausalLm, data: &InstructionData) -> Result<Vec<Sample>> {
    let context = usize::try_from(model.config().max_position_embeddings()).unwrap_or(usize::MAX);
    let answer = |Question {
                      text: prompt,
                      ids,
                      end,
                  }: &Question|
     -> Result<Sample> {
        let config = GenerationConfig {
            max_new_tokens: Some(ANSWER_TOKENS.min(context.saturating_sub(ids.len()))),
            do_sample: false,
            eos_token_id: end.iter().copied().collect(),
            ..GenerationConfig::default()
        };
        let output = generate(model, std::slice::from_ref(ids), &config)?;
        Ok(Sample {
            prompt: prompt.clone(),
            completion: text(data.tokenizer(), output.new_tokens(0))?,
        })
    };
    data.questions().iter().map(answer).collect()
}

fn report(
    arguments: &FinetuneArguments,
    folder: &RunFolder,
    name: &str,
    model: &FinetuneModel,
    samples: &[Sample],
) -> Result<Option<String>> {
    let (metrics, unread) = match read_metrics(folder.metrics()) {
        Ok(file) => (file.records, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let report = Report {
        title: format!("Fine-tuning of {name}"),
        metrics,
        parameters: Some(model.all_parameters()),
        configuration: arguments.to_values()?,
        samples: samples.to_vec(),
        machine: Some(Machine::detect()),
        ..Report::default()
    };
    Ok(write_report(folder, &report, unread))
}

impl fmt::Display for FinetuneResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for sample in &self.samples {
            writeln!(f, "\n---\n{}│{}", sample.prompt, sample.completion)?;
        }
        let losses = &self.summary.losses;
        let (Some(first), Some(last)) = (losses.first(), losses.last()) else {
            let step = self.summary.resumed_step;
            write!(
                f,
                "\nloss        none: step {step} was the last one of the run"
            )?;
            return self.write_files(f);
        };
        let steps = losses.len();
        write!(f, "\nloss        {first:.3} → {last:.3} in {steps} steps")?;
        if let Some(best) = &self.summary.best {
            write!(f, ", the best on held-out data: {best}")?;
        } else if let Some(found) = &self.summary.evaluation {
            write!(f, ", {:.3} on held-out data", found.loss)?;
        }
        write!(
            f,
            "\nspeed       {:.0} tokens/s",
            self.summary.tokens_per_second()
        )?;
        match self.summary.padding() {
            padding if padding > 0.0 => writeln!(
                f,
                " without padding, which was {:.1}% of all positions",
                100.0 * padding
            )?,
            _ => writeln!(f, ", no padding")?,
        }
        if let Some(loading) = self.summary.data_loading {
            writeln!(f, "            {loading}")?;
        }
        write!(f, "{}", self.memory)?;
        self.write_files(f)
    }
}

impl FinetuneResults {
    /// Writes the lines about what is on the disk.
    fn write_files(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(warning) = &self.warning {
            write!(f, "\n{warning}")?;
        }
        write!(f, "\nwritten     {}", self.folder.root().display())?;
        if let Some(merged) = &self.merged {
            write!(f, "\nmerged      {}", merged.display())?;
        }
        Ok(())
    }
}
