use std::fmt;
use std::path::PathBuf;

use overdrive_optim::Ema;
use overdrive_profiling::Machine;
use overdrive_tracking::{Report, Sample, read_metrics};
use overdrive_transformer::{CausalLm, SaveOptions};

use super::samples::write_samples;
use crate::Result;
use crate::arguments::TrainingArguments;
use crate::data::TextData;
use crate::run::{RunFolder, RunSummary};

/// The results of a finished run. Displayed as the samples, the validation loss of the model, and the paths of report and model.
#[derive(Debug)]
pub struct TrainingResults {
    /// The generated samples.
    pub samples: Vec<Sample>,
    /// The validation loss of the model in nats per token, if there was an evaluation: the last one, or with
    /// `load_best_model_at_end` the best one.
    pub eval_loss: Option<f64>,
    /// The same validation loss in bits per byte of text.
    pub eval_bits_per_byte: Option<f64>,
    /// The step of this evaluation.
    pub eval_step: u64,
    /// If `true`, the model is that of the best evaluation and not of the last step.
    pub is_best: bool,
    /// The number of steps.
    pub steps: u64,
    /// The warning that the report was not written, if it was not.
    pub warning: Option<String>,
    /// The report.
    pub report: PathBuf,
    /// The folder of the model.
    pub model: PathBuf,
}

/// Writes the model and its tokenizer as a Hugging Face folder, and the model with averaged weights if there are
/// any, generates samples, and writes the report from the metrics file. `summary` is that of the run, whose best snapshot
/// `model` may have.
///
/// # Errors
/// An error if the model cannot be written, or generation fails. A report that cannot be written is a warning in the
/// results.
pub fn write_results(
    run: &RunFolder,
    arguments: &TrainingArguments,
    data: &TextData,
    model: &CausalLm,
    summary: &RunSummary,
    ema: Option<Ema>,
) -> Result<TrainingResults> {
    let best = summary.best.as_ref();
    run.check_in_place()?;
    model.save_pretrained(run.model(), &SaveOptions::default())?;
    data.save_tokenizer(run.model(), arguments)?;
    if let Some(mut ema) = ema {
        let _averaged = ema.apply()?;
        model.save_pretrained(run.averaged_model(), &SaveOptions::default())?;
        data.save_tokenizer(run.averaged_model(), arguments)?;
    }
    let samples = write_samples(model, data, arguments)?;
    let (metrics, unread) = match read_metrics(run.metrics()) {
        Ok(file) => (file.records, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let evaluated = metrics
        .iter()
        .rfind(|step| step.eval_loss.is_some() && best.is_none_or(|best| best.step == step.step));
    let mut results = TrainingResults {
        samples: samples.clone(),
        eval_loss: evaluated.and_then(|step| step.eval_loss),
        eval_bits_per_byte: evaluated.and_then(|step| step.eval_bits_per_byte),
        eval_step: evaluated.map_or(0, |step| step.step),
        is_best: best.is_some(),
        steps: metrics.last().map_or(0, |step| step.step),
        warning: None,
        report: run.report(),
        model: run.model(),
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
    results.warning = write_report(run, &report, unread);
    Ok(results)
}

/// Writes the report and its loss curve, unless its metrics could not be read (`unread`). Returns a warning instead
/// of an error if writing fails: the model is already written, and the report can be made from the metrics later.
pub(crate) fn write_report(
    run: &RunFolder,
    report: &Report,
    unread: Option<overdrive_tracking::Error>,
) -> Option<String> {
    let written = unread.map_or(Ok(()), Err).and_then(|()| {
        report.write_html(run.report())?;
        report.write_loss_svg(run.loss())
    });
    let error = written.err()?;
    Some(format!(
        "warning: the report was not written: {error}; write it with the example `report`, from {}",
        run.metrics().display()
    ))
}

impl fmt::Display for TrainingResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for sample in &self.samples {
            writeln!(f, "\n---\n{}│{}", sample.prompt, sample.completion)?;
        }
        if let Some(loss) = self.eval_loss {
            write!(f, "\nvalidation loss {loss:.3} nats per token")?;
            if let Some(bits) = self.eval_bits_per_byte {
                write!(f, ", {bits:.3} bits per byte")?;
            }
            match self.is_best {
                true => write!(
                    f,
                    ", the best one, after {} of {} steps",
                    self.eval_step, self.steps
                )?,
                false => write!(f, ", after {} steps", self.steps)?,
            }
        }
        match &self.warning {
            Some(warning) => write!(f, "\n{warning}")?,
            None => write!(f, "\nreport {}", self.report.display())?,
        }
        write!(f, "\nmodel  {}", self.model.display())
    }
}
