//! Steps of linear attention over a pool of states; part of the section `own_kernels`.

use anyhow::Result;
use overdrive::linear_attention::{
    CausalConv1dOptions, DeltaRuleInputs, DeltaRuleOptions, StateSlot, causal_conv1d_update,
    gated_delta_rule_update,
};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{KINDS, distance, largest, name_of, tolerance};
use crate::timing::seconds;

/// The heads of Qwen3-Next: key heads, value heads, and the width of both.
const KEY_HEADS: i64 = 16;
const HEADS: i64 = 32;
const DIM: i64 = 128;

/// The inputs of a step: convolved projections, decays, rates, and the states and inputs before it.
struct Step {
    mixed: Tensor,
    weight: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    inputs: Tensor,
    sequences: i64,
    tokens: i64,
}

impl Step {
    fn new(sequences: i64, tokens: i64) -> Result<Step> {
        tch::manual_seed(11);
        let random = |shape: &[i64]| Tensor::f_randn(shape, (Kind::Float, Device::Cpu));
        let (rows, width) = (sequences * tokens, (2 * KEY_HEADS + HEADS) * DIM);
        Ok(Step {
            mixed: random(&[rows, width])?,
            weight: random(&[width, 4])?,
            decay: random(&[rows, HEADS])?.f_abs()?.f_neg()?,
            beta: random(&[rows, HEADS])?.f_sigmoid()?,
            states: random(&[2 * sequences, HEADS, DIM, DIM])?,
            inputs: random(&[2 * sequences, width, 3])?,
            sequences,
            tokens,
        })
    }

    /// Returns the same step on a device, in a dtype; the states are in `state_kind`.
    fn on(&self, device: Device, kind: Kind, state_kind: Kind) -> Result<Step> {
        let to = |x: &Tensor, kind| Tensor::f_to_device(&x.f_to_kind(kind)?, device);
        Ok(Step {
            mixed: to(&self.mixed, kind)?,
            weight: to(&self.weight, kind)?,
            decay: to(&self.decay, state_kind)?,
            beta: to(&self.beta, state_kind)?,
            states: to(&self.states, state_kind)?,
            inputs: to(&self.inputs, kind)?,
            ..*self
        })
    }

    /// Runs the convolution and the rule, from the first half of the pools to the second; returns the output.
    fn run(&mut self) -> Result<Tensor> {
        let slot = |row| StateSlot {
            from: Some(row),
            to: row + self.sequences,
        };
        let slots: Vec<StateSlot> = (0..self.sequences).map(slot).collect();
        let offsets = (0..=self.sequences).map(|row| row * self.tokens);
        let offsets: Vec<i64> = offsets.collect();
        let convolved = causal_conv1d_update(
            &self.mixed,
            &self.weight,
            None,
            &mut self.inputs,
            &slots,
            &offsets,
            &CausalConv1dOptions::default(),
        )?;
        let part = |start: i64, heads: i64| {
            let columns = convolved.f_narrow(1, start * DIM, heads * DIM)?;
            columns.f_unflatten(1, [heads, DIM])
        };
        let inputs = DeltaRuleInputs {
            query: &part(0, KEY_HEADS)?,
            key: &part(KEY_HEADS, KEY_HEADS)?,
            value: &part(2 * KEY_HEADS, HEADS)?,
            decay: &self.decay,
            beta: &self.beta,
        };
        let options = DeltaRuleOptions {
            qk_l2norm: true,
            ..DeltaRuleOptions::default()
        };
        Ok(gated_delta_rule_update(
            inputs,
            &mut self.states,
            &slots,
            &offsets,
            &options,
        )?)
    }
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    for kind in KINDS {
        for (sequences, tokens) in [(3, 1), (2, context.sized(150, 5))] {
            let name = format!(
                "a layer of the gated delta rule, {sequences} sequences of {tokens} tokens in {}",
                name_of(kind)
            );
            context.check(name, || {
                let step = Step::new(sequences, tokens)?;
                let mut there = step.on(device, kind, Kind::Float)?;
                // The inputs as they are in this dtype.
                let mut exact = there.on(Device::Cpu, Kind::Double, Kind::Double)?;
                let (found, expected) = (there.run()?, exact.run()?);
                let states = distance(&there.states, &exact.states)?;
                let far = largest([distance(&found, &expected)?, states]);
                // The convolution is rounded before the rule.
                Ok(Finding::within(
                    far,
                    4.0 * tolerance(kind),
                    "beyond the tolerance",
                ))
            })?;
        }
    }
    let sequences = context.sized(64, 2);
    context.check(
        format!("a layer of the gated delta rule, {sequences} streams"),
        || {
            let mut step = Step::new(sequences, 1)?.on(device, Kind::BFloat16, Kind::Float)?;
            let with = seconds(device, 5, 10, || step.run().map(drop))?;
            let off = overdrive_gpu::override_enabled(false);
            let without = seconds(device, 5, 10, || step.run().map(drop))?;
            drop(off);
            // Each state is read and written once.
            let bytes = (2 * sequences * HEADS * DIM * DIM * 4) as f64;
            Ok(Finding::passed()
                .with("µs", with * 1e6)
                .with("µs without the kernels", without * 1e6)
                .with("GB/s", bytes / with / 1e9))
        },
    )
}
