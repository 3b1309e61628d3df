//! The loop of the example `train`, for a run and an evaluation of a test's own.

use anyhow::Result;
use overdrive::datasets::{Batch, DeviceLoader};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::Ema;
use overdrive::trainer::{
    Evaluation, RunOptions, RunSummary, TrainingArguments, TrainingRun, batch_loss,
};
use overdrive::transformer::CausalLm;

/// Trains until the run ends.
pub(crate) fn fit(
    arguments: &TrainingArguments,
    group: &ProcessGroup,
    options: RunOptions,
    model: &mut CausalLm,
    mut loader: DeviceLoader<Batch>,
    evaluate: &mut dyn FnMut(&CausalLm) -> Result<Evaluation>,
) -> Result<(RunSummary, Option<Ema>)> {
    let parameters = model.named_parameters();
    let mut run = TrainingRun::start(arguments, group, parameters, &mut loader, options)?;
    let mut evaluate = |model: &mut CausalLm| -> Result<Evaluation> {
        model.set_training(false)?;
        let found = evaluate(model)?;
        model.set_training(true)?;
        Ok(found)
    };
    model.set_training(true)?;
    run.evaluate_on_start(|| evaluate(model))?;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in batches {
            run.forward_backward(batch, |batch| batch_loss(model, batch).map(|loss| loss.sum))?;
        }
        run.step()?;
        run.evaluate_if_due(|| evaluate(model))?;
        run.save_if_due()?;
    }
    let ended = run.finish()?;
    model.set_training(false)?;
    Ok(ended)
}
