use std::any::Any;
use std::fmt::Debug;

use tch::Tensor;

use crate::{Linear, LinearWeight, Result};

/// A modification of a [`Linear`] layer's output that is computed beside its weight.
///
/// A layer has one `Adapter`, which may hold several: overdrive-lora keeps all LoRA adapters of a layer in one. In
/// every forward pass the layer calls [`is_active`](Adapter::is_active); if that returns `false`, it computes its
/// weight alone, exactly as a layer without an adapter does. If the rows of a batch use different adapters,
/// [`AdapterRows`](crate::AdapterRows) names the adapter of each row.
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
    /// Returns `true` if [`forward`](Adapter::forward) has to compute the layer's output. The layer calls it in
    /// every forward pass, so it should be cheap.
    fn is_active(&self) -> bool;

    /// Returns the names of the adapters that currently change the layer's output: neither disabled adapters
    /// nor those that are merged into the weight.
    fn active_names(&self) -> Vec<&str>;

    /// Computes the output `(…, O)` of `layer` for `x (…, I)`, from its weight and the adapter. Implementations
    /// pass `fused` to [`LinearWeight::forward`].
    ///
    /// # Errors
    /// Shapes that do not fit, and errors of libtorch.
    fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> Result<Tensor>;

    /// Computes the outputs of several layers of the same `x` side by side, `(…, ΣO)`, or returns `None`, the
    /// default, if this adapter cannot compute them jointly; each layer is then computed separately. It is
    /// called on the first active adapter of `layers`.
    ///
    /// # Errors
    /// As [`forward`](Adapter::forward).
    fn forward_joint(&self, layers: &[&Linear], x: &Tensor) -> Result<Option<Tensor>> {
        let _ = (layers, x);
        Ok(None)
    }

    /// Returns the names of all adapters of the layer, active or not. Default: the active ones.
    fn names(&self) -> Vec<&str> {
        self.active_names()
    }

    /// Returns the weight and bias that replace the layer's own in the forward pass, such as a fully trained
    /// copy. Default: none.
    fn replacement(&self) -> Option<(&LinearWeight, Option<&Tensor>)> {
        None
    }

    /// Reacts to [`Linear::replace_weight`] by discarding everything that was computed from the old weight.
    fn weight_replaced(&mut self) {}
}
