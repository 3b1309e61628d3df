//! Training of a language model: a new model, its loss, its evaluation, its results.

mod model;
mod results;
mod samples;

pub use model::{
    batch_loss, decoder_shape, describe_model, evaluate, model_flops, new_model, snapshot_files,
};
pub(crate) use results::write_report;
pub use results::{TrainingResults, write_results};
pub(crate) use samples::text;
