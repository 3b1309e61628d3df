//! Runs that a signal ends.

use overdrive_datasets::InMemory;
use overdrive_datasets::prelude::*;
use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{Error, Interrupt, RunOptions, TrainingArguments, TrainingRun};
use tch::{Device, Kind, Tensor, nn};

#[test]
fn a_run_without_a_folder_ends_with_an_error_so_that_half_a_model_is_not_written_as_a_whole_one() {
    let rows = InMemory(vec![1.0f32; 8]);
    let collate = |rows: Vec<f32>| Ok(Tensor::from_slice(&rows));
    let loader = DataLoader::with_collate(rows, collate, DataLoaderOptions::default()).unwrap();
    let mut loader = DeviceLoader::new(loader, Device::Cpu);
    let store = nn::VarStore::new(Device::Cpu);
    let weight = store.root().ones("weight", &[1]);
    let arguments = TrainingArguments {
        gradient_accumulation_steps: 1,
        max_steps: 8,
        ..TrainingArguments::default()
    };
    let interrupt = Interrupt::manual();
    let options = RunOptions {
        interrupt: Some(interrupt.clone()),
        silent: true,
        ..RunOptions::default()
    };
    let parameters = store.variables().into_iter().collect();
    let group = ProcessGroup::single();
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options).unwrap();
    while let Some(batches) = run.next_batches(&mut loader).unwrap() {
        for batch in batches {
            let mean = |x: &Tensor| (x * &weight).f_mean(Kind::Float);
            run.forward_backward(batch, mean).unwrap();
        }
        interrupt.request();
        run.step().unwrap();
    }
    let error = run.finish().unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    assert!(error.to_string().contains("after step 1,"), "{error}");
}
