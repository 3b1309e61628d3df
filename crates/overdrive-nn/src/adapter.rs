use std::any::Any;
use std::fmt::Debug;

use tch::Tensor;

use crate::{Linear, LinearWeight, Result};

/// A change of a [`Linear`] layer's output that is computed beside its weight.
///
/// A layer has one adapter, which may stand for several: overdrive-lora keeps all LoRA adapters of a layer
/// in one. The layer asks [`is_active`](Adapter::is_active) in every forward pass and computes its weight
/// alone, by the same path as without an adapter, where that is false. Where rows of a batch have adapters of their
/// own, [`AdapterRows`](crate::AdapterRows) names them.
///
/// ```
/// use overdrive_nn::{Adapter, Linear, Result};
/// use tch::{Device, Kind, Tensor};
///
/// /// Multiplies the output by one learned number.
/// #[derive(Debug)]
/// struct Scale(Tensor);
///
/// impl Adapter for Scale {
///     fn is_active(&self) -> bool {
///         true
///     }
///     fn active_names(&self) -> Vec<&str> {
///         vec!["scale"]
///     }
///     fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> Result<Tensor> {
///         Ok(layer.weight().forward(x, layer.bias(), fused)?.f_mul(&self.0)?)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let weight = Tensor::eye(4, (Kind::Float, Device::Cpu));
/// let mut layer = Linear::dense(weight, None)?;
/// layer.set_adapter(Box::new(Scale(Tensor::from(3f32))));
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// assert_eq!(layer.forward(&x)?, &x * 3);
/// # Ok(())
/// # }
/// ```
pub trait Adapter: Any + Debug + Send {
    /// Returns `true` if [`forward`](Adapter::forward) has to compute the layer's output. It is asked in
    /// every forward pass and should cost next to nothing.
    fn is_active(&self) -> bool;

    /// Returns the names of the adapters that the layer's output depends on now beyond its own weight and
    /// bias: neither those that are switched off nor those that are merged into the weight.
    fn active_names(&self) -> Vec<&str>;

    /// Computes the output `(…, O)` of `layer` for `x (…, I)`: its weight and what the adapter adds. `fused`
    /// is to be handed on to [`LinearWeight::forward`].
    ///
    /// # Errors
    /// Shapes that do not fit, and errors of libtorch.
    fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> Result<Tensor>;

    /// Computes the outputs of several layers of the same `x` side by side, `(…, ΣO)`, or returns `None` if
    /// this adapter has no joint form of them: then each layer is computed on its own, which is the
    /// default. It is called on the first active adapter of `layers`.
    ///
    /// # Errors
    /// As [`forward`](Adapter::forward).
    fn forward_joint(&self, layers: &[&Linear], x: &Tensor) -> Result<Option<Tensor>> {
        let _ = (layers, x);
        Ok(None)
    }

    /// Returns the names of all adapters that the layer has, active or not. Default: the active ones.
    fn names(&self) -> Vec<&str> {
        self.active_names()
    }

    /// Returns the weight and bias that the layer computes with in place of its own, such as a copy that
    /// is trained in full. Default: none.
    fn replacement(&self) -> Option<(&LinearWeight, Option<&Tensor>)> {
        None
    }

    /// Reacts to [`Linear::replace_weight`]: whatever was computed from the old weight is out of date.
    fn weight_replaced(&mut self) {}
}
