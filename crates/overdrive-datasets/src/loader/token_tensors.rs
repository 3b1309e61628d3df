//! Batches of tokens on their way to a device.

use tch::{Device, Tensor};

use super::OnDevice;
use crate::{Batch, InstructionTensors, Result};

impl OnDevice for Batch {
    fn pinned(self) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.pinned()?,
            labels: self.labels.pinned()?,
            ..self
        })
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.on_device(device, non_blocking)?,
            labels: self.labels.on_device(device, non_blocking)?,
            ..self
        })
    }
}

impl OnDevice for InstructionTensors {
    fn pinned(self) -> Result<Self> {
        changed(self, Tensor::pinned)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        changed(self, |tensor| tensor.on_device(device, non_blocking))
    }
}

fn changed(
    batch: InstructionTensors,
    change: impl Fn(Tensor) -> Result<Tensor>,
) -> Result<InstructionTensors> {
    Ok(InstructionTensors {
        input_ids: change(batch.input_ids)?,
        labels: change(batch.labels)?,
        attention_mask: batch.attention_mask.map(&change).transpose()?,
        position_ids: change(batch.position_ids)?,
        ..batch
    })
}
