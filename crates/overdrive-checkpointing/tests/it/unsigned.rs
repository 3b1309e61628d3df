//! Saved tensors of a dtype that tch does not know: flash attention on a GPU saves its random state as unsigned
//! integers of 64 bits.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_checkpointing::{
    CheckpointOptions, Error, OffloadOptions, SavedTo, checkpoint_with, measure_blocks,
    offload_saved_tensors,
};
use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

/// `at::ScalarType::UInt64`.
const UINT64: i64 = 29;
/// `at::ScalarType::UInt32`.
const UINT32: i64 = 28;

/// Returns `values` in an unsigned dtype of libtorch.
fn unsigned(values: &[i64], dtype: i64) -> Tensor {
    let size = [values.len() as i64];
    let arguments = [
        Value::Ints(&size),
        Value::Int(dtype),
        Value::None,
        Value::Device(Device::Cpu),
    ];
    let made = call("aten::empty", "memory_format", &arguments).unwrap();
    let mut tensor = made.into_iter().next().unwrap().into_tensor().unwrap();
    tensor.copy_(&Tensor::from_slice(values));
    tensor
}

/// Multiplies by the sum of a tensor that it saves, as flash attention saves its random state.
struct Scale(Tensor);

impl Function for Scale {
    const NAME: &'static str = "Scale";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.save_for_backward(&[&self.0]);
        Ok(vec![inputs[0].f_mul(&sum(&self.0)?)?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let factor = sum(&context.saved()[0])?;
        let gradient = gradients[0]
            .as_ref()
            .map(|gradient| gradient.f_mul(&factor));
        Ok(vec![gradient.transpose()?])
    }
}

/// Returns the sum, in a dtype that has one.
fn sum(saved: &Tensor) -> Result<Tensor, tch::TchError> {
    saved.f_to_kind(Kind::Double)?.f_sum(Kind::Float)
}

fn scaled(x: &Tensor, dtype: i64) -> Result<Tensor, overdrive_autograd::Error> {
    let mut outputs = apply(Scale(unsigned(&[1, 4], dtype)), &[x])?;
    Ok(outputs.remove(0))
}

fn input() -> Tensor {
    Tensor::from_slice(&[1.0_f32, -2.0, 3.0]).set_requires_grad(true)
}

#[test]
fn checkpoints_keep_and_compare_tensors_of_dtypes_that_tch_does_not_know() {
    let _generator = crate::generator();
    let x = input();
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
        Ok(scaled(&inputs[0], UINT64)?)
    })
    .unwrap();
    y.sum(Kind::Float).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[5.0_f32; 3]));
}

#[test]
fn a_recomputation_that_saves_another_unsigned_dtype_is_an_error() {
    let _generator = crate::generator();
    let first = std::sync::atomic::AtomicBool::new(true);
    let x = input();
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), move |inputs| {
        let is_first = first.swap(false, std::sync::atomic::Ordering::SeqCst);
        Ok(scaled(&inputs[0], if is_first { UINT64 } else { UINT32 })?)
    })
    .unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(
        error.contains("[2] UInt64 on Cpu") && error.contains("[2] UInt32 on Cpu"),
        "{error}"
    );
}

#[test]
fn tensors_of_dtypes_that_tch_does_not_know_are_offloaded_and_come_back() {
    let _generator = crate::generator();
    let x = input();
    let options = OffloadOptions {
        to: SavedTo::Disk { folder: None },
        min_bytes: 1,
        prefetch: 0,
    };
    let y = {
        let offload = offload_saved_tensors(&options, &[]).unwrap();
        let y = scaled(&x, UINT64).unwrap();
        // Two of 8 bytes; nothing else is saved.
        assert_eq!((offload.stats().tensors, offload.stats().bytes), (1, 16));
        y
    };
    y.sum(Kind::Float).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[5.0_f32; 3]));
}

#[test]
fn blocks_that_save_dtypes_that_tch_does_not_know_are_measured() -> Result<(), Error> {
    let _generator = crate::generator();
    let costs = measure_blocks(1, &input().detach(), |_, x| Ok(scaled(x, UINT64)?))?;
    assert_eq!((costs[0].saved_bytes, costs[0].input_bytes), (16, 12));
    Ok(())
}
