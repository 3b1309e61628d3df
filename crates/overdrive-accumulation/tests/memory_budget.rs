//! The search under a simulated memory budget. One test, because the budget is that of the process.

#![allow(clippy::unwrap_used)]

use overdrive_accumulation::{
    AccumulationConfig, BatchPlan, Error, GradientAccumulator, Window, find_executable_batch_plan,
    find_executable_batch_size,
};
use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
use overdrive_sys::memory;
use tch::{Device, Kind, Reduction, Tensor};

const WIDTH: i64 = 256;
const HIDDEN: i64 = 4096;
const BUDGET: u64 = 24 << 20;

struct Trainer {
    up: Tensor,
    down: Tensor,
    optimizer: AdamW,
}

impl Trainer {
    fn new() -> Self {
        let leaf = |shape: [i64; 2]| {
            (Tensor::ones(shape, (Kind::Float, Device::Cpu)) * 0.01).set_requires_grad(true)
        };
        let (up, down) = (leaf([WIDTH, HIDDEN]), leaf([HIDDEN, 2]));
        let named = vec![
            ("up".into(), up.shallow_clone()),
            ("down".into(), down.shallow_clone()),
        ];
        let group = ParamGroup::new("all", named);
        let optimizer = AdamW::new(vec![group], AdamWConfig::default()).unwrap();
        Self {
            up,
            down,
            optimizer,
        }
    }

    /// One optimizer step over `plan`'s effective batch, with fallible calls only.
    fn step(&mut self, plan: BatchPlan) -> Result<f64, Error> {
        let config = AccumulationConfig {
            gradient_accumulation_steps: plan.accumulation_steps() as usize,
            max_grad_norm: Some(1.0),
        };
        let mut accumulator = GradientAccumulator::new(config)?;
        let run = self.micro_batches(&mut accumulator, plan);
        if run.is_err() {
            accumulator.abandon(&mut self.optimizer)?;
        }
        run
    }

    fn micro_batches(
        &mut self,
        accumulator: &mut GradientAccumulator,
        plan: BatchPlan,
    ) -> Result<f64, Error> {
        let (rows, steps) = (plan.micro_batch(), plan.accumulation_steps());
        accumulator.open(Window::new(std::iter::repeat_n(rows, steps as usize)))?;
        for _ in 0..steps {
            let inputs = Tensor::f_ones([rows as i64, WIDTH], (Kind::Float, Device::Cpu))?;
            let hidden = inputs.f_matmul(&self.up)?.f_tanh()?;
            let logits = hidden.f_matmul(&self.down)?;
            let labels = Tensor::f_zeros([rows as i64], (Kind::Int64, Device::Cpu))?;
            let loss =
                logits.f_cross_entropy_loss::<Tensor>(&labels, None, Reduction::Sum, -100, 0.0)?;
            accumulator.backward(&loss)?;
        }
        accumulator.step(&mut self.optimizer)?.loss()
    }
}

#[test]
fn a_budget_halves_the_micro_batch_and_keeps_the_effective_batch() {
    let plan = BatchPlan::new(1024, 1, 1).unwrap();
    // Without a budget the first plan fits.
    let found = find_executable_batch_plan(plan, |plan| Trainer::new().step(plan)).unwrap();
    assert_eq!(found.batch, plan);
    let unlimited_loss = found.value;

    let mut trainer = Trainer::new();
    memory::empty_cache(Device::Cpu).unwrap();
    let held = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    // Gradients and AdamW's averages take three times the parameters; the rest is for
    // activations, of which 1024 rows take 16 MiB a tensor.
    memory::set_limit(Device::Cpu, Some(held + BUDGET)).unwrap();
    let found = find_executable_batch_plan(plan, |plan| trainer.step(plan));
    memory::set_limit(Device::Cpu, None).unwrap();
    let found = found.unwrap();
    assert!(found.batch.micro_batch() < 1024, "{}", found.batch);
    assert_eq!(found.batch.effective_batch(), 1024);
    assert!(
        (found.value - unlimited_loss).abs() < 1e-5,
        "{} {unlimited_loss}",
        found.value
    );
    println!(
        "fits in {} MiB beyond the parameters: {}",
        BUDGET >> 20,
        found.batch
    );

    // A panic of tch's infallible calls counts too, and a budget that nothing fits is reported.
    let held = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    memory::set_limit(Device::Cpu, Some(held + (1 << 20))).unwrap();
    let floats = |size: usize| -> Result<usize, Error> {
        Ok(Tensor::zeros([size as i64 * 1024], (Kind::Float, Device::Cpu)).numel())
    };
    let found = find_executable_batch_size(1000, floats);
    let nothing = find_executable_batch_size(3, |size| floats(size * 1000));
    memory::set_limit(Device::Cpu, None).unwrap();
    assert_eq!(found.unwrap().batch, 250);
    let message = nothing.unwrap_err().to_string();
    assert!(
        message.contains("tried [3, 1]") && message.contains("out of memory"),
        "{message}"
    );
}
