//! The parallel residual streams of Gemma 3n, of which a layer computes one (Baykal et al. 2023, arXiv:2301.13310).

use overdrive_nn::{Linear, LinearWeight};
use tch::{Kind, Tensor};

use crate::config::AltUpConfig;
use crate::parameters::ParameterMap;
use crate::projections::{JointLinear, LinearVisitor, ParameterVisitor, visit_linear};
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, Result};

/// The projections that make the streams `(B, T, N, C)` from the embeddings, and join them after the last layer.
#[derive(Debug)]
pub(super) struct Streams {
    projections: JointLinear,
    unembed: Vec<Linear>,
}

impl Streams {
    /// Returns the names of the projections from the embeddings, whose weights lie together.
    pub(super) fn joint_names(altup: &AltUpConfig) -> Vec<String> {
        let name = |stream| format!("model.altup_projections.{stream}");
        (0..altup.altup_num_inputs - 1).map(name).collect()
    }

    /// Returns the names of all projections, without `.weight`.
    pub(super) fn names(altup: &AltUpConfig) -> Vec<String> {
        let name = |stream| format!("model.altup_unembed_projections.{stream}");
        let mut names = Streams::joint_names(altup);
        names.extend((0..altup.altup_num_inputs - 1).map(name));
        names
    }

    pub(super) fn take(parameters: &mut ParameterMap, altup: &AltUpConfig) -> Result<Streams> {
        let joint = Streams::joint_names(altup);
        let names = Streams::names(altup);
        let unembed = names[joint.len()..].iter();
        let unembed = unembed.map(|name| parameters.take_linear(name, false));
        Ok(Streams {
            unembed: unembed.collect::<Result<_>>()?,
            projections: JointLinear::take(parameters, &joint, false)?,
        })
    }

    /// Makes the streams from the embeddings `(B, T, C)`, with their magnitude.
    pub(super) fn expand(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let width = x.size().last().copied().unwrap_or(0);
        let widths = vec![width; self.unembed.len()];
        let mut streams = vec![x.shallow_clone()];
        let magnitude = magnitude(x)?;
        for stream in self.projections.forward_split(x, &widths, fused)? {
            streams.push(with_magnitude(&stream, &magnitude)?);
        }
        Ok(Tensor::f_stack(&streams, 2)?)
    }

    /// Joins the streams to their mean, each with the magnitude of the first.
    pub(super) fn join(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let first = x.f_select(2, 0)?;
        let magnitude = magnitude(&first)?;
        let mut streams = vec![first];
        for (index, projection) in (1..).zip(&self.unembed) {
            let stream = projection.forward_with(&x.f_select(2, index)?, fused)?;
            streams.push(with_magnitude(&stream, &magnitude)?);
        }
        let kind = x.kind();
        let stacked = Tensor::f_stack(&streams, 0)?;
        Ok(stacked.f_mean_dim([0i64].as_slice(), false, kind)?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.projections.layers().chain(&self.unembed)
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.projections.visit(visit)?;
        let mut unembed = self.unembed.iter_mut();
        unembed.try_for_each(|linear| visit_linear(linear, visit))
    }
}

/// Returns the mean square of the last dimension.
fn mean_square(x: &Tensor) -> Result<Tensor> {
    let square = x.f_square()?;
    Ok(square.f_mean_dim([-1i64].as_slice(), true, x.kind())?)
}

fn magnitude(x: &Tensor) -> Result<Tensor> {
    Ok(mean_square(x)?.f_sqrt()?)
}

fn with_magnitude(x: &Tensor, magnitude: &Tensor) -> Result<Tensor> {
    let own = mean_square(x)?.f_clamp_min(1e-5)?.f_sqrt()?;
    Ok(x.f_mul(magnitude)?.f_div(&own)?)
}

/// The part of a layer that predicts all streams, and corrects them by the one that the layer computes.
#[derive(Debug)]
pub(super) struct AltUp {
    active: i64,
    streams: i64,
    /// The bound of the coefficients' weights in training.
    clip: Option<f64>,
    /// The factor of the computed stream before it meets the input of the layer, if it is used.
    output_scale: Tensor,
    scales_output: bool,
    correction: Linear,
    prediction: Linear,
    router: Linear,
    router_norm: RmsNorm,
    router_scale: f64,
}

impl AltUp {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        altup: &AltUpConfig,
    ) -> Result<AltUp> {
        let name = |part: &str| format!("{prefix}.altup.{part}");
        Ok(AltUp {
            active: altup.altup_active_idx,
            streams: altup.altup_num_inputs,
            clip: altup.altup_coef_clip,
            output_scale: parameters.take(&name("correct_output_scale"))?,
            scales_output: altup.altup_correct_scale,
            correction: parameters.take_linear(&name("correction_coefs"), false)?,
            prediction: parameters.take_linear(&name("prediction_coefs"), false)?,
            router: parameters.take_linear(&name("modality_router"), false)?,
            router_norm: RmsNorm::take(parameters, &name("router_norm"), config)?,
            router_scale: 1.0 / config.hidden_size as f64,
        })
    }

    /// Predicts the streams `(B, T, N, C)` after the layer from those before it.
    pub(super) fn predict(&self, x: &Tensor, training: bool, fused: bool) -> Result<Tensor> {
        let routed = self.routed(&x.f_select(2, self.active)?, fused)?;
        if let (true, Some(clip)) = (training, self.clip)
            && let (LinearWeight::Dense { weight, .. }, _) = self.prediction.in_use()
        {
            // As in transformers, these weights are changed, and those of the correction are not. Through `data`, so
            // that backward does not take it for a change of what the graph has saved.
            let _same = weight.f_data()?.f_clamp_(-clip, clip)?;
        }
        let coefficients = self.prediction.forward_with(&routed, fused)?;
        let coefficients = coefficients.f_unflatten(-1, [self.streams, self.streams])?;
        // Stream by stream, so that the result for a token does not depend on the others, as that of a batched matmul may.
        let mut predicted = x.shallow_clone();
        for stream in 0..self.streams {
            let (from, factors) = (
                x.f_narrow(2, stream, 1)?,
                coefficients.f_narrow(-1, stream, 1)?,
            );
            predicted = predicted.f_add(&from.f_mul(&factors)?)?;
        }
        Ok(predicted)
    }

    /// Returns the stream that the layer computes, `(B, T, C)`.
    pub(super) fn active(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_select(2, self.active)?)
    }

    /// Corrects the `predicted` streams `(B, T, N, C)` by the computed one `(B, T, C)`.
    pub(super) fn correct(
        &self,
        predicted: &Tensor,
        computed: &Tensor,
        training: bool,
        fused: bool,
    ) -> Result<Tensor> {
        let routed = self.routed(computed, fused)?;
        let mut coefficients = self.correction.forward_with(&routed, fused)?;
        if let (true, Some(clip)) = (training, self.clip)
            && let (LinearWeight::Dense { weight, .. }, _) = self.correction.in_use()
        {
            // What the bound takes from the weights, so that an adapter counts as it is.
            let change = weight.f_clamp(-clip, clip)?.f_sub(weight)?;
            coefficients = coefficients.f_add(&routed.f_linear(&change, None::<&Tensor>)?)?;
        }
        let error = computed.f_sub(&self.active(predicted)?)?.f_unsqueeze(2)?;
        let coefficients = coefficients.f_add_scalar(1.0)?.f_unsqueeze(-1)?;
        Ok(predicted.f_add(&error.f_mul(&coefficients)?)?)
    }

    /// Returns the computed stream with the factor of its output.
    pub(super) fn output(&self, corrected: &Tensor) -> Result<Tensor> {
        let active = self.active(corrected)?;
        match self.scales_output {
            true => Ok(active.f_mul(&self.output_scale)?),
            false => Ok(active),
        }
    }

    /// Adds `delta (B, T, C)` to all streams but the first.
    pub(super) fn add_to_others(&self, x: &Tensor, delta: &Tensor) -> Result<Tensor> {
        let first = x.f_narrow(2, 0, 1)?;
        let others = x.f_narrow(2, 1, self.streams - 1)?;
        let others = others.f_add(&delta.f_unsqueeze(2)?)?;
        Ok(Tensor::f_cat(&[first, others], 2)?)
    }

    fn routed(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let normalised = self.router_norm.forward(&x.f_contiguous()?, fused)?;
        let scaled = normalised.f_mul_scalar(self.router_scale)?;
        let routed = self.router.forward_with(&scaled, fused)?;
        let wide = match routed.kind() {
            Kind::Half | Kind::BFloat16 => routed.f_to_kind(Kind::Float)?,
            _ => routed,
        };
        Ok(wide.f_tanh()?.f_to_kind(x.kind())?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        [&self.correction, &self.prediction, &self.router].into_iter()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        for layer in [&mut self.correction, &mut self.prediction, &mut self.router] {
            visit_linear(layer, visit)?;
        }
        Ok(())
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        let name = format!("{prefix}.altup.correct_output_scale");
        visit(&name, &mut self.output_scale)?;
        let name = format!("{prefix}.altup.router_norm");
        self.router_norm.visit_parameters(&name, visit)
    }
}

/// The learned residual connection of a layer of Gemma 3n (Menghani et al. 2024, arXiv:2411.07501).
#[derive(Debug)]
pub(super) struct Laurel {
    left: Linear,
    right: Linear,
    norm: RmsNorm,
}

impl Laurel {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<Laurel> {
        let name = |part: &str| format!("{prefix}.laurel.{part}");
        Ok(Laurel {
            left: parameters.take_linear(&name("linear_left"), false)?,
            right: parameters.take_linear(&name("linear_right"), false)?,
            norm: RmsNorm::take(parameters, &name("post_laurel_norm"), config)?,
        })
    }

    /// Computes `x + norm(right(left(x)))`.
    pub(super) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let low = self.left.forward_with(x, fused)?;
        let high = self.right.forward_with(&low, fused)?;
        Ok(x.f_add(&self.norm.forward(&high, fused)?)?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        [&self.left, &self.right].into_iter()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.left, visit)?;
        visit_linear(&mut self.right, visit)
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        let name = format!("{prefix}.laurel.post_laurel_norm");
        self.norm.visit_parameters(&name, visit)
    }
}
