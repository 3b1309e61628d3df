//! The parts that a program gives to a run, and the run that it leaves early.

use overdrive_datasets::InMemory;
use overdrive_datasets::prelude::*;
use overdrive_distributed::ProcessGroup;
use overdrive_optim::{Lion, LionConfig, decay_groups};
use overdrive_trainer::{Interrupt, Result, RunOptions, TrainingArguments, TrainingRun};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Tensor};

fn rows(count: i64) -> DeviceLoader<Tensor> {
    let rows = InMemory((0..count).collect());
    let collate = |rows: Vec<i64>| Ok(Tensor::f_from_slice(&rows)?.f_to_kind(tch::Kind::Float)?);
    let loader = DataLoader::with_collate(rows, collate, DataLoaderOptions::default()).unwrap();
    DeviceLoader::new(loader, Device::Cpu)
}

fn store() -> (VarStore, nn::Linear) {
    let store = VarStore::new(Device::Cpu);
    let layer = nn::linear(store.root(), 1, 1, Default::default());
    (store, layer)
}

fn started(
    parameters: Vec<(String, Tensor)>,
    loader: &mut DeviceLoader<Tensor>,
    options: RunOptions,
) -> Result<TrainingRun> {
    let arguments = TrainingArguments {
        max_steps: 10,
        logging_steps: 100.0,
        ..TrainingArguments::default()
    };
    let options = RunOptions {
        interrupt: Some(Interrupt::manual()),
        silent: true,
        ..options
    };
    TrainingRun::start(
        &arguments,
        &ProcessGroup::single(),
        parameters,
        loader,
        options,
    )
}

fn refused(run: Result<TrainingRun>) -> String {
    match run {
        Ok(_) => panic!("the run would train nothing"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_run_without_parameters_batches_or_an_optimizer_over_its_parameters_is_refused() {
    let parameters = || store().0.variables().into_iter().collect::<Vec<_>>();
    let error = refused(started(Vec::new(), &mut rows(4), RunOptions::default()));
    assert!(error.starts_with("`parameters` is empty"), "{error}");

    let error = refused(started(parameters(), &mut rows(0), RunOptions::default()));
    assert!(error.starts_with("`loader` is without batches"), "{error}");

    let groups = decay_groups(parameters(), 0.0);
    let of_another_model = Lion::new(groups, LionConfig::default()).unwrap();
    let options = RunOptions {
        optimizer: Some(Box::new(of_another_model)),
        ..RunOptions::default()
    };
    let error = refused(started(parameters(), &mut rows(4), options));
    assert!(
        error.contains("an optimizer with 2 other parameters"),
        "{error}"
    );
}

#[test]
fn the_steps_of_a_loop_that_ends_early_are_in_the_summary() {
    let (store, layer) = store();
    let mut loader = rows(4);
    let parameters = store.variables().into_iter().collect();
    let mut run = started(parameters, &mut loader, RunOptions::default()).unwrap();
    for _ in 0..3 {
        for batch in run.next_batches(&mut loader).unwrap().unwrap() {
            run.forward_backward(batch, |x: &Tensor| {
                layer.forward(&x.f_view([-1, 1])?).f_square()?.f_mean(None)
            })
            .unwrap();
        }
        run.step().unwrap();
        run.save_if_due().unwrap();
    }
    let (summary, _) = run.finish().unwrap();
    assert_eq!(summary.losses.len(), 3);
}
