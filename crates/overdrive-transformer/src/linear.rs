use overdrive_checkpointing::Shared;
use overdrive_lora::{AdaptedLinear, BaseWeight};
use overdrive_quantization::observe_input;
use tch::Tensor;

use crate::parameters::ParameterMap;
use crate::{Error, Result};

/// A named affine map of the last dimension: its weight may be dense or quantized, and may have
/// adapters beside it.
#[derive(Debug)]
pub(crate) struct Linear {
    /// As in the checkpoint, without `.weight`.
    name: String,
    map: AdaptedLinear,
}

/// Sees each parameter that is not of a linear map, with its full name.
pub(crate) type ParameterVisitor<'v> =
    &'v mut dyn FnMut(&str, &mut Tensor) -> overdrive_lora::Result<()>;

/// Sees each linear map of a model with its name.
pub(crate) type Visitor<'v> =
    &'v mut dyn FnMut(&str, &mut AdaptedLinear) -> overdrive_lora::Result<()>;

impl Linear {
    pub(crate) fn new(name: &str, map: AdaptedLinear) -> Linear {
        Linear {
            name: name.to_owned(),
            map,
        }
    }

    /// `{name}.weight (out, in)`, and `{name}.bias` where there is one.
    pub(crate) fn take(parameters: &mut ParameterMap, name: &str, bias: bool) -> Result<Linear> {
        Linear::take_with(parameters, name, bias, false)
    }

    /// `{name}.weight (in, out)` and `{name}.bias`.
    pub(crate) fn take_conv1d(parameters: &mut ParameterMap, name: &str) -> Result<Linear> {
        Linear::take_with(parameters, name, true, true)
    }

    fn take_with(
        parameters: &mut ParameterMap,
        name: &str,
        bias: bool,
        transposed: bool,
    ) -> Result<Linear> {
        let base = match parameters.take_quantized(name) {
            Some(weight) => BaseWeight::Quantized(weight),
            None => BaseWeight::Dense {
                weight: parameters.take(&format!("{name}.weight"))?,
                transposed,
            },
        };
        let bias = bias.then(|| parameters.take(&format!("{name}.bias")));
        Ok(Linear::new(
            name,
            AdaptedLinear::new(base, bias.transpose()?),
        ))
    }

    /// `x (…, in)` to `(…, out)`.
    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        observe_input(&self.name, x)?;
        Ok(self.map.forward(x, fused)?)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn map(&self) -> &AdaptedLinear {
        &self.map
    }

    pub(crate) fn visit(&mut self, visit: Visitor<'_>) -> overdrive_lora::Result<()> {
        visit(&self.name, &mut self.map)
    }
}

/// Lends each block to `body`, to change it.
///
/// # Errors
/// [`overdrive_lora::Error::InUse`] while a graph with checkpoints holds the blocks.
pub(crate) fn visit_shared<B>(
    blocks: &mut [Shared<B>],
    mut body: impl FnMut(&mut B) -> overdrive_lora::Result<()>,
) -> overdrive_lora::Result<()> {
    for block in blocks {
        body(block.get_mut().ok_or(overdrive_lora::Error::InUse)?)?;
    }
    Ok(())
}

/// Several affine maps of one input.
#[derive(Debug)]
pub(crate) struct JointLinear(Vec<Linear>);

impl JointLinear {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        names: &[String],
        bias: bool,
    ) -> Result<JointLinear> {
        let maps = names
            .iter()
            .map(|name| Linear::take(parameters, name, bias));
        Ok(JointLinear(maps.collect::<Result<_>>()?))
    }

    /// All results side by side, `(…, Σ out)`, by one product.
    pub(crate) fn forward_joint(&self, x: &Tensor) -> Result<Tensor> {
        for linear in &self.0 {
            observe_input(&linear.name, x)?;
        }
        let maps: Vec<&AdaptedLinear> = self.0.iter().map(|linear| &linear.map).collect();
        Ok(overdrive_lora::joint_forward(x, &maps)?)
    }

    /// The results one by one, dense ones by libtorch's operator.
    pub(crate) fn forward_each<const N: usize>(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let each = self.0.iter().map(|linear| linear.forward(x, false));
        let each: Vec<Tensor> = each.collect::<Result<_>>()?;
        each.try_into().map_err(|each: Vec<_>| Error::BadConfig {
            key: "a joint linear map".to_owned(),
            found: format!("{} parts", each.len()),
            expected: format!("{N} (please report this)"),
        })
    }

    pub(crate) fn maps(&self) -> impl Iterator<Item = &Linear> {
        self.0.iter()
    }

    pub(crate) fn visit(&mut self, visit: Visitor<'_>) -> overdrive_lora::Result<()> {
        self.0.iter_mut().try_for_each(|linear| linear.visit(visit))
    }
}
