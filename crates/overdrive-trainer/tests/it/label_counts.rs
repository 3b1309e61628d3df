//! The label counts of the micro-batches of a step.

use overdrive_datasets::prelude::*;
use overdrive_datasets::{InMemory, OnDevice, Result};
use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{Interrupt, MicroBatch, RunOptions, TrainingArguments, TrainingRun};
use tch::{Device, nn};

/// A micro-batch that counts its labels only if it is the first.
struct Row(i64);

impl OnDevice for Row {
    fn pinned(self) -> Result<Self> {
        Ok(self)
    }

    fn on_device(self, _device: Device, _non_blocking: bool) -> Result<Self> {
        Ok(self)
    }
}

impl MicroBatch for Row {
    fn examples(&self) -> usize {
        1
    }

    fn label_count(&self) -> Option<usize> {
        (self.0 == 0).then_some(1)
    }
}

#[test]
fn a_step_of_counted_and_uncounted_micro_batches_is_refused() {
    let rows = InMemory(vec![0, 1]);
    let first = |rows: Vec<i64>| Ok(Row(rows[0]));
    let loader = DataLoader::with_collate(rows, first, DataLoaderOptions::default()).unwrap();
    let mut loader = DeviceLoader::new(loader, Device::Cpu);
    let store = nn::VarStore::new(Device::Cpu);
    let _weight = store.root().ones("weight", &[1]);
    let arguments = TrainingArguments {
        gradient_accumulation_steps: 2,
        max_steps: 1,
        ..TrainingArguments::default()
    };
    let options = RunOptions {
        interrupt: Some(Interrupt::manual()),
        silent: true,
        ..RunOptions::default()
    };
    let parameters = store.variables().into_iter().collect();
    let group = ProcessGroup::single();
    let mut run = TrainingRun::start(&arguments, &group, parameters, &mut loader, options).unwrap();
    let Err(error) = run.next_batches(&mut loader) else {
        panic!("the loss would have two meanings");
    };
    assert!(error.to_string().contains("`label_count`"), "{error}");
}
