//! The linear layers of a decoder block; layers that share an input are computed together.

use std::sync::Arc;

use overdrive_checkpointing::Shared;
use overdrive_core::Error;
use overdrive_nn::{Linear, joint_forward, joint_forward_into};
use tch::Tensor;

use crate::Result;
use crate::parameters::ParameterMap;

/// A visitor of the parameters that are not of a linear layer, with their full names.
pub(crate) type ParameterVisitor<'v> =
    &'v mut dyn FnMut(&str, &mut Tensor) -> overdrive_nn::Result<()>;

/// A visitor of the linear layers with their full names.
pub(crate) type LinearVisitor<'v> =
    &'v mut dyn FnMut(&str, &mut Linear) -> overdrive_nn::Result<()>;

/// Lends one layer under its own name.
pub(crate) fn visit_linear(
    linear: &mut Linear,
    visit: LinearVisitor<'_>,
) -> overdrive_nn::Result<()> {
    // A handle of the name, since the layer itself is lent mutably beside it.
    let name = Arc::clone(linear.name());
    visit(&name, linear)
}

/// Lends each block to `body`, to change it.
///
/// # Errors
/// [`overdrive_nn::Error::InUse`] while a graph with checkpoints holds the blocks.
pub(crate) fn visit_shared<B>(
    blocks: &mut [Shared<B>],
    mut body: impl FnMut(&mut B) -> overdrive_nn::Result<()>,
) -> overdrive_nn::Result<()> {
    for block in blocks {
        body(block.get_mut().ok_or(overdrive_nn::Error::InUse)?)?;
    }
    Ok(())
}

/// Several linear layers with the same input (query, key and value, or gate and up), or the one joint layer that some
/// models have instead.
#[derive(Debug)]
pub(crate) struct JointLinear(Vec<Linear>);

impl JointLinear {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        names: &[String],
        bias: bool,
    ) -> Result<JointLinear> {
        let layers = names.iter().map(|name| parameters.take_linear(name, bias));
        Ok(JointLinear(layers.collect::<Result<_>>()?))
    }

    /// Takes layers whose weights a file has as `(I, O)`.
    pub(crate) fn take_conv1d(
        parameters: &mut ParameterMap,
        names: &[String],
        bias: bool,
    ) -> Result<JointLinear> {
        let layers = names.iter().map(|name| parameters.take_conv1d(name, bias));
        Ok(JointLinear(layers.collect::<Result<_>>()?))
    }

    /// Computes all outputs side by side, `(…, Σ out)`, in one matmul.
    pub(crate) fn forward_joint(&self, x: &Tensor) -> Result<Tensor> {
        let layers: Vec<&Linear> = self.0.iter().collect();
        Ok(joint_forward(x, &layers)?)
    }

    /// Computes [`forward_joint`](Self::forward_joint) for rows of f32 in slices; returns `false` if it needed
    /// operators on tensors.
    pub(crate) fn forward_rows(&self, x: &[f32], y: &mut [f32]) -> Result<bool> {
        let layers: Vec<&Linear> = self.0.iter().collect();
        Ok(joint_forward_into(x, &layers, y)?)
    }

    /// Computes the output of the one joint layer.
    pub(crate) fn forward_single(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        match self.0.as_slice() {
            [joint] => Ok(joint.forward_with(x, fused)?),
            // Several layers lie side by side in the same order.
            _ => self.forward_joint(x),
        }
    }

    /// Returns the number of inputs.
    pub(crate) fn inputs(&self) -> usize {
        let inputs = self.0.first().map_or(0, |linear| linear.weight().size()[1]);
        inputs.unsigned_abs() as usize
    }

    /// Returns the number of all outputs.
    pub(crate) fn outputs(&self) -> usize {
        let outputs = self.0.iter().map(|linear| linear.weight().size()[0]);
        outputs.sum::<i64>().unsigned_abs() as usize
    }

    /// Computes the outputs of these `widths`, in one matmul if `fused`.
    pub(crate) fn split<const N: usize>(
        &self,
        x: &Tensor,
        widths: [i64; N],
        fused: bool,
    ) -> Result<[Tensor; N]> {
        let parts = self.forward_split(x, &widths, fused)?;
        parts.try_into().map_err(|parts: Vec<_>| {
            let count = parts.len();
            Error::internal(format!("{count} outputs instead of {N}")).into()
        })
    }

    /// Computes [`split`](Self::split) for a number of outputs that only the model knows.
    pub(crate) fn forward_split(
        &self,
        x: &Tensor,
        widths: &[i64],
        fused: bool,
    ) -> Result<Vec<Tensor>> {
        let joint = match self.0.as_slice() {
            [joint] => joint.forward_with(x, fused)?,
            // One split instead of slices: its backward is one concatenation.
            _ if fused => self.forward_joint(x)?,
            each => {
                let each = each.iter().map(|linear| linear.forward_with(x, false));
                return Ok(each.collect::<overdrive_nn::Result<_>>()?);
            }
        };
        Ok(joint.f_split_with_sizes(widths, -1)?)
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.0.iter()
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.0
            .iter_mut()
            .try_for_each(|linear| visit_linear(linear, visit))
    }
}
