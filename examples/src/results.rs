//! What a run leaves behind beside its metrics: the model, samples, the report.

use std::fmt;

use overdrive_profiling::{Machine, Report, Sample, read_metrics};
use overdrive_transformer::{CausalLm, SaveOptions};

use crate::{Result, RunFolder, TextData, TrainingArguments, write_samples};

/// What a finished run came to. Displayed: the samples and the last validation loss.
#[derive(Debug)]
#[non_exhaustive]
pub struct Results {
    /// What the model writes.
    pub samples: Vec<Sample>,
    /// The last validation loss in nats a token, if there was an evaluation.
    pub eval_loss: Option<f64>,
    /// The same in bits a byte of text.
    pub eval_bits_per_byte: Option<f64>,
    /// Steps that were done.
    pub steps: u64,
}

impl RunFolder {
    /// Writes the model and its tokenizer as a Hugging Face folder, lets the model write samples, and
    /// makes the report from the metrics file.
    ///
    /// # Errors
    /// When a file cannot be written, the metrics cannot be read, or generation fails. The model is
    /// written first.
    pub fn write_results(
        &self,
        arguments: &TrainingArguments,
        data: &TextData,
        model: &CausalLm,
    ) -> Result<Results> {
        model.save_pretrained(self.model(), &SaveOptions::default())?;
        data.save_tokenizer(self.model(), arguments)?;

        let samples = write_samples(model, data, arguments)?;
        let metrics = read_metrics(self.metrics())?.records;
        let evaluated = metrics.iter().rfind(|step| step.eval_loss.is_some());
        let results = Results {
            samples: samples.clone(),
            eval_loss: evaluated.and_then(|step| step.eval_loss),
            eval_bits_per_byte: evaluated.and_then(|step| step.eval_bits_per_byte),
            steps: metrics.last().map_or(0, |step| step.step),
        };
        let report = Report {
            title: format!("Llama, preset {}", arguments.preset),
            metrics,
            parameters: u64::try_from(model.num_parameters()).ok(),
            configuration: serde_json::to_value(arguments).unwrap_or_default(),
            samples,
            machine: Some(Machine::detect()),
            ..Report::default()
        };
        report.write_html(self.report())?;
        report.write_loss_svg(self.loss())?;
        Ok(results)
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for sample in &self.samples {
            writeln!(f, "\n---\n{}│{}", sample.prompt, sample.completion)?;
        }
        if let Some(loss) = self.eval_loss {
            write!(f, "\nvalidation loss {loss:.3} nats a token")?;
            if let Some(bits) = self.eval_bits_per_byte {
                write!(f, ", {bits:.3} bits a byte")?;
            }
            write!(f, ", after {} steps", self.steps)?;
        }
        Ok(())
    }
}
