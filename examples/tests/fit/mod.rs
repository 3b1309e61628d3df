//! A tiny run, the loop of the example `train` for an evaluation of a test's own, and the comparison of its models.

use std::path::PathBuf;

use anyhow::Result;
use overdrive::datasets::{Batch, DeviceLoader};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::Ema;
use overdrive::trainer::{
    Evaluation, ModelArguments, RunOptions, RunSummary, TrainingArguments, TrainingRun, batch_loss,
};
use overdrive::transformer::CausalLm;

/// Returns the arguments of a run on the CPU of a model of one layer.
pub(crate) fn tiny(data: PathBuf) -> TrainingArguments {
    TrainingArguments {
        data: vec![data],
        use_cpu: true,
        vocab_size: 300,
        context_length: 32,
        validation_fraction: 0.2,
        learning_rate: 1e-2,
        samples: 0,
        model: ModelArguments {
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            ..ModelArguments::default()
        },
        ..TrainingArguments::default()
    }
}

/// Checks that all parameters of two models are equal.
#[track_caller]
pub(crate) fn equal(one: &CausalLm, other: &CausalLm) {
    let pairs = one.named_parameters().into_iter();
    for ((name, one), (_, other)) in pairs.zip(other.named_parameters()) {
        assert_eq!(one, other, "{name}");
    }
}

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
