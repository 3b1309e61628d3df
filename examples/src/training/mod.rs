//! Helpers of the loops of `train` and `finetune`: a language model's loss and evaluation, totals of a step, the
//! log of a run and its results.

mod language_model;
mod results;
mod run_log;
mod samples;
mod step_totals;
mod summary;

use anyhow::{Error, Result};
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{TextData, TrainingArguments};
use overdrive::transformer::CausalLm;
use serde_json::Value;
use tch::Tensor;

pub use language_model::{
    batch_loss, decoder_shape, describe_model, evaluate, model_flops, new_model,
};
pub(crate) use results::write_report;
pub use results::{Results, write_results};
pub use run_log::{Done, RunLog};
pub use step_totals::StepTotals;
pub use summary::Summary;

/// Returns handles that share storage with `parameters`.
pub fn shared(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let handles = parameters.iter();
    handles
        .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
        .collect()
}

/// Returns the error that names the lost processes, if they are the cause of `error`.
pub fn name_lost_ranks(group: &ProcessGroup, error: Error) -> Error {
    let named = error
        .downcast_ref::<overdrive::distributed::Error>()
        .is_some()
        || matches!(
            error.downcast_ref::<overdrive::trainer::Error>(),
            Some(overdrive::trainer::Error::Distributed(_))
        );
    match group.explain(&*error) {
        Some(explained) if !named => explained.into(),
        _ => error,
    }
}

/// Returns the files that make a snapshot of `model` a folder for transformers and
/// [`CausalLm::from_pretrained`]: its configuration and its tokenizer.
pub fn snapshot_files(
    model: &CausalLm,
    data: &TextData,
    arguments: &TrainingArguments,
) -> Result<Vec<(String, Vec<u8>)>> {
    let config = format!("{:#}\n", Value::Object(model.config().to_json()));
    let mut files = vec![("config.json".to_owned(), config.into_bytes())];
    let folder = tempfile::tempdir()?;
    data.save_tokenizer(folder.path(), arguments)?;
    for entry in std::fs::read_dir(folder.path())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        files.push((name.into_owned(), std::fs::read(&path)?));
    }
    Ok(files)
}
