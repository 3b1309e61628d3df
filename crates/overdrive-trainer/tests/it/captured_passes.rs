//! Runs whose passes are captured give the numbers of those whose operators are launched.

use std::cell::RefCell;
use std::rc::Rc;

use overdrive_datasets::InMemory;
use overdrive_datasets::prelude::*;
use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{CudaGraphs, Interrupt, RunOptions, TrainingArguments, TrainingRun};
use tch::{Device, Kind, Tensor, nn, nn::Module};

/// Trains with an average of the weights and two micro-batches a step, of which the last step of an epoch has
/// fewer rows. Returns the losses, the weights, their averages, and the number of micro-batches whose loss was computed from
/// the memory of an earlier one.
fn trained(cuda_graphs: CudaGraphs) -> (Vec<f64>, Vec<Tensor>, Vec<Tensor>, usize) {
    let arguments = TrainingArguments {
        cuda_graphs,
        max_steps: 9,
        gradient_accumulation_steps: 2,
        learning_rate: 0.05,
        ema_decay: Some(0.9),
        ..TrainingArguments::default()
    };
    let store = nn::VarStore::new(Device::Cpu);
    let root = store.root();
    let first = nn::linear(&root / "first", 2, 8, Default::default());
    let second = nn::linear(&root / "second", 8, 1, Default::default());
    let mut variables: Vec<(String, Tensor)> = store.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (_, tensor) in &variables {
        // Not the random numbers that they have: other tests draw from the same generator.
        let numbers = Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu));
        let numbers: Tensor = (numbers * 0.7 + 0.4).sin() * 0.5;
        tensor.detach().copy_(&numbers.view_as(tensor));
    }
    let rows: Vec<[f32; 2]> = (0..23)
        .map(|row| [row as f32 * 0.1, -(row as f32) * 0.05])
        .collect();
    let options = DataLoaderOptions {
        batch_size: 4,
        shuffle: true,
        ..Default::default()
    };
    let collate = |rows: Vec<[f32; 2]>| Ok(Tensor::from_slice(&rows.concat()).view([-1, 2]));
    let loader = DataLoader::with_collate(InMemory(rows), collate, options).unwrap();
    let mut loader = DeviceLoader::new(loader, Device::Cpu);
    let options = RunOptions {
        interrupt: Some(Interrupt::manual()),
        silent: true,
        ..RunOptions::default()
    };
    let group = ProcessGroup::single();
    let parameters = variables
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let mut run = TrainingRun::start(
        &arguments,
        &group,
        parameters.collect(),
        &mut loader,
        options,
    )
    .unwrap();
    let inputs = Rc::new(RefCell::new(Vec::new()));
    while let Some(batches) = run.next_batches(&mut loader).unwrap() {
        for batch in batches {
            let seen = Rc::clone(&inputs);
            let loss = |x: &Tensor| {
                // The handle keeps the memory, so that no other batch gets it.
                seen.borrow_mut().push(x.shallow_clone());
                let hidden = first.forward(x).f_relu()?;
                second.forward(&hidden).f_mse_loss(
                    &x.f_sum_dim_intlist(1, true, Kind::Float)?,
                    tch::Reduction::Mean,
                )
            };
            run.forward_backward(batch, loss).unwrap();
        }
        run.step().unwrap();
    }
    let (summary, averages) = run.finish().unwrap();
    let weights = variables
        .iter()
        .map(|(_, tensor)| tensor.detach().copy())
        .collect();
    let averages = averages.unwrap();
    let averages = averages
        .averages()
        .map(|(_, tensor)| tensor.copy())
        .collect();
    let seen = inputs.borrow();
    let mut places: Vec<usize> = seen.iter().map(|x| x.data_ptr() as usize).collect();
    places.sort_unstable();
    places.dedup();
    (summary.losses, weights, averages, seen.len() - places.len())
}

#[test]
fn a_run_of_captured_passes_has_the_same_bits() {
    let (losses, weights, averages, repeated) = trained(CudaGraphs::Never);
    assert_eq!(repeated, 0);
    let (captured_losses, captured_weights, captured_averages, repeated) =
        trained(CudaGraphs::Always);
    assert!(repeated >= 15, "{repeated} passes were replayed");
    assert_eq!(losses, captured_losses);
    assert_eq!(losses.len(), 9);
    assert_eq!(weights, captured_weights);
    assert_eq!(averages, captured_averages);
}
