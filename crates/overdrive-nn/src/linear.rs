use std::any::Any;
use std::sync::Arc;

use overdrive_quantization::{QuantizedWeight, Scheme, observe_input};
use overdrive_sys::autocast::WithoutFp8;
use tch::{Tensor, nn};

use crate::weight::bytes;
use crate::{Adapter, LinearWeight, Result};

/// A linear layer, `y = x · Wᵀ + b`, whose weight is dense or quantized and may have an [`Adapter`].
///
/// It takes the place of [`tch::nn::Linear`]:
///
/// ```
/// use overdrive_nn::Linear;
/// use tch::nn::Module;
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let dense = nn::linear(store.root(), 64, 96, nn::LinearConfig::default());
/// let quantized = Linear::from_dense(&dense, "int8".parse()?)?;
/// let x = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
/// let error = (dense.forward(&x) - quantized.forward(&x)?).abs().max();
/// assert!(error.double_value(&[]) < 0.05);
/// assert!(quantized.bytes() * 3 < 64 * 96 * 4);
///
/// let model = nn::seq().add(quantized).add_fn(Tensor::relu);
/// assert_eq!(model.forward(&x).size(), [3, 96]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Linear {
    /// Shared, so that a visitor can hold the name while it changes the layer.
    name: Arc<str>,
    weight: LinearWeight,
    bias: Option<Tensor>,
    adapter: Option<Box<dyn Adapter>>,
    training: bool,
    /// If `true`, the layer is multiplied in FP8 where autocast says so.
    fp8: bool,
}

impl Linear {
    /// Creates a layer from a weight `(O, I)` and a bias `(O,)`. The tensors are shared, not copied.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a dense weight that is not a matrix, and for a bias of
    /// another length or on another device.
    pub fn new(weight: LinearWeight, bias: Option<Tensor>) -> Result<Linear> {
        if let LinearWeight::Dense { weight, .. } = &weight
            && weight.dim() != 2
        {
            return Err(overdrive_core::Error::shape("weight", weight.size(), "(O, I)").into());
        }
        if let Some(bias) = &bias {
            let outputs = weight.size()[0];
            if bias.size() != [outputs] {
                let expected = format!("({outputs},), the outputs of the weight");
                return Err(overdrive_core::Error::shape("bias", bias.size(), expected).into());
            }
            if bias.device() != weight.device() {
                let expected = format!("on {:?}, where the weight is", weight.device());
                return Err(overdrive_core::Error::device("bias", bias.device(), expected).into());
            }
        }
        Ok(Linear {
            name: Arc::from(""),
            weight,
            bias,
            adapter: None,
            training: false,
            fp8: true,
        })
    }

    /// Creates a layer from a dense weight `(O, I)` and a bias `(O,)`.
    ///
    /// # Errors
    /// As [`Linear::new`].
    pub fn dense(weight: Tensor, bias: Option<Tensor>) -> Result<Linear> {
        let transposed = false;
        Linear::new(LinearWeight::Dense { weight, transposed }, bias)
    }

    /// Creates a layer from a quantized weight `(O, I)` and a bias `(O,)`, which may be trained.
    ///
    /// # Errors
    /// As [`Linear::new`].
    pub fn quantized(weight: QuantizedWeight, bias: Option<Tensor>) -> Result<Linear> {
        Linear::new(LinearWeight::Quantized(weight), bias)
    }

    /// Quantizes `weight (O, I)`; the bias keeps its dtype.
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`] and [`Linear::new`].
    pub fn quantize(weight: &Tensor, bias: Option<&Tensor>, scheme: Scheme) -> Result<Linear> {
        // Detached, so that this layer does not contribute to the gradient of the dense layer's bias.
        let bias = bias.map(Tensor::f_detach).transpose()?;
        Linear::quantized(QuantizedWeight::quantize(weight, scheme)?, bias)
    }

    /// Quantizes a layer of tch. The dense layer keeps its memory until it and its `VarStore` are dropped.
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`].
    pub fn from_dense(dense: &nn::Linear, scheme: Scheme) -> Result<Linear> {
        Linear::quantize(&dense.ws, dense.bs.as_ref(), scheme)
    }

    /// Sets the name of the layer: that of the checkpoint, without `.weight`. The inputs of a named layer are
    /// reported to [`observe_inputs`](overdrive_quantization::observe_inputs), as calibration needs.
    pub fn with_name(mut self, name: &str) -> Linear {
        self.name = Arc::from(name);
        self
    }

    /// Excludes the layer from FP8: under autocast with FP8 (`Precision::Fp8` of overdrive-precision) it is multiplied in
    /// bf16. For heads and routers, whose results need more digits.
    pub fn without_fp8(mut self) -> Linear {
        self.fp8 = false;
        self
    }

    pub(crate) fn has_fp8(&self) -> bool {
        self.fp8
    }

    /// Returns the name, or "" if the layer has none. It is shared, so that a caller can hold it while it
    /// changes the layer.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Computes the output `(…, O)` for `x (…, I)`, with the adapter if it is active. Dense weights are
    /// multiplied by overdrive-fused.
    ///
    /// # Errors
    /// Shapes that do not fit, and errors of libtorch and of the adapter.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, true)
    }

    /// Computes [`Linear::forward`]; if `fused` is false, dense weights are multiplied by libtorch's operator.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_with(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        self.observe(x)?;
        self.compute(x, fused)
    }

    /// Reports the input to this thread's observer.
    pub(crate) fn observe(&self, x: &Tensor) -> Result<()> {
        // Without a name, an observer could not tell the layer from others.
        if self.name.is_empty() {
            return Ok(());
        }
        Ok(observe_input(&self.name, x)?)
    }

    pub(crate) fn compute(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let _bf16 = (!self.fp8).then(WithoutFp8::enter);
        if let Some(adapter) = self.active_adapter() {
            return adapter.forward(self, x, fused);
        }
        let (weight, bias) = self.in_use();
        weight.forward(x, bias, fused)
    }

    /// Returns the adapter if it is active.
    pub fn active_adapter(&self) -> Option<&dyn Adapter> {
        self.adapter().filter(|adapter| adapter.is_active())
    }

    /// Returns the weight and bias that the layer computes with: its own, or the adapter's
    /// [replacement](Adapter::replacement).
    pub fn in_use(&self) -> (&LinearWeight, Option<&Tensor>) {
        // An inactive adapter counts as well: a full copy replaces the weight and adds nothing.
        let replacement = self.adapter().and_then(Adapter::replacement);
        replacement.unwrap_or((&self.weight, self.bias.as_ref()))
    }

    /// Returns the dense weight `(O, I)` if the layer has neither a bias nor an active adapter. Fused losses
    /// need it.
    pub fn dense_weight(&self) -> Option<&Tensor> {
        match self.in_use() {
            (
                LinearWeight::Dense {
                    weight,
                    transposed: false,
                },
                None,
            ) if self.active_adapter().is_none() => Some(weight),
            _ => None,
        }
    }

    /// Returns the weight, without the adapter.
    pub fn weight(&self) -> &LinearWeight {
        &self.weight
    }

    /// Returns the bias `(O,)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Replaces the weight by another one of the same size and returns the old one. An adapter that was
    /// merged into the old weight counts as part of it from then on.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a weight of another size.
    pub fn replace_weight(&mut self, weight: LinearWeight) -> Result<LinearWeight> {
        self.check_size(&weight)?;
        // Before the exchange, so that no forward pass uses a stale cache.
        if let Some(adapter) = &mut self.adapter {
            adapter.weight_replaced();
        }
        Ok(std::mem::replace(&mut self.weight, weight))
    }

    /// Sets a copy of the weight in other memory. Unlike [`replace_weight`](Self::replace_weight) it leaves what adapters have
    /// computed from the weight.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a weight of another size.
    pub fn move_weight(&mut self, copy: LinearWeight) -> Result<()> {
        self.check_size(&copy)?;
        self.weight = copy;
        Ok(())
    }

    fn check_size(&self, weight: &LinearWeight) -> Result<()> {
        let (found, [outputs, inputs]) = (weight.size(), self.weight.size());
        if found == [outputs, inputs] {
            return Ok(());
        }
        let expected = format!("({outputs}, {inputs}), as the weight that it replaces");
        Err(overdrive_core::Error::shape("weight", found, expected).into())
    }

    /// Returns the number of elements of the weight and the bias, before quantization.
    pub fn parameters(&self) -> usize {
        let [outputs, inputs] = self.weight.size();
        // Counted by shape and not by storage, since quantized weights are packed.
        let weight = usize::try_from(outputs * inputs).unwrap_or(0);
        weight + self.bias.as_ref().map_or(0, Tensor::numel)
    }

    /// Returns the size of the weight and the bias in bytes, without adapters.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, bytes)
    }

    /// Returns the adapter.
    pub fn adapter(&self) -> Option<&dyn Adapter> {
        self.adapter.as_deref()
    }

    /// Returns the adapter if it is of type `A`.
    pub fn adapter_as<A: Adapter>(&self) -> Option<&A> {
        (self.adapter()? as &dyn Any).downcast_ref()
    }

    /// Sets the layer's adapter and returns the previous one.
    pub fn set_adapter(&mut self, adapter: Box<dyn Adapter>) -> Option<Box<dyn Adapter>> {
        self.adapter.replace(adapter)
    }

    /// Removes the adapter and returns it.
    pub fn take_adapter(&mut self) -> Option<Box<dyn Adapter>> {
        self.adapter.take()
    }

    /// Returns mutable references to the weight, the bias and, if it is of type `A`, the adapter: merging
    /// changes all of them.
    pub fn split_mut<A: Adapter>(
        &mut self,
    ) -> (&mut LinearWeight, Option<&Tensor>, Option<&mut A>) {
        let adapter = self.adapter.as_deref_mut();
        let adapter = adapter.and_then(|adapter| (adapter as &mut dyn Any).downcast_mut());
        (&mut self.weight, self.bias.as_ref(), adapter)
    }

    /// Switches training mode on or off; it is off by default. Adapters apply dropout in training mode only.
    pub fn set_training(&mut self, training: bool) {
        self.training = training;
    }

    /// Returns `true` in training mode.
    pub fn is_training(&self) -> bool {
        self.training
    }
}

impl nn::Module for Linear {
    /// Computes [`Linear::forward`].
    ///
    /// # Panics
    /// Panics if [`Linear::forward`] returns an error: the trait has no other way to report it, and the
    /// modules of tch do the same.
    fn forward(&self, x: &Tensor) -> Tensor {
        match Linear::forward(self, x) {
            Ok(y) => y,
            Err(error) => panic!("the linear layer `{}`: {error}", self.name),
        }
    }
}
