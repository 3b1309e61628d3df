use overdrive_nn::{AdapterRows, Linear};
use overdrive_sys::engine;
use tch::{Device, Tensor};

use super::balance::{ExpertLoad, LoadBalance};
use super::dispatch::Dispatch;
use super::grouped;
use super::names::{ExpertModules, expert_modules};
use super::router::{Router, Routing};
use super::shared::SharedExpert;
use crate::Result;
use crate::config::{ExpertsConfig, LlamaConfig};
use crate::feed_forward::GatedMlp;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor};

/// A router and the feed-forward blocks that it chooses from: `Σ wₖ · expertₖ(x)` over the chosen ones of each token,
/// and an expert that computes every token, if the model has one.
#[derive(Debug)]
pub(crate) struct MixtureOfExperts {
    pub(super) router: Router,
    pub(super) experts: Vec<GatedMlp>,
    /// The expert that computes every token (Qwen2-MoE, DeepSeek).
    pub(super) shared: Option<Box<SharedExpert>>,
    /// The relative noise of the input in training.
    noise: f64,
}

impl MixtureOfExperts {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        experts: &ExpertsConfig,
    ) -> Result<MixtureOfExperts> {
        let expert = |index| {
            let ExpertModules { joint, down } = expert_modules(config.family, prefix, index);
            match config.family.has_transposed_experts() {
                true => GatedMlp::take_transposed(parameters, &joint, &down, config, experts),
                false => GatedMlp::take(parameters, &joint, &down, config),
            }
        };
        Ok(MixtureOfExperts {
            experts: (0..experts.num_experts)
                .map(expert)
                .collect::<Result<_>>()?,
            router: Router::take(parameters, prefix, config, experts)?,
            shared: match experts.shared_width() {
                Some(_) => Some(Box::new(SharedExpert::take(parameters, prefix, config)?)),
                None => None,
            },
            noise: experts.router_jitter_noise,
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let experts = self.experts.iter().flat_map(GatedMlp::layers);
        let shared = self.shared.iter().flat_map(|shared| shared.layers());
        std::iter::once(self.router.layer())
            .chain(experts)
            .chain(shared)
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.router.visit(visit)?;
        self.experts
            .iter_mut()
            .try_for_each(|expert| expert.visit(visit))?;
        self.shared
            .iter_mut()
            .try_for_each(|shared| shared.visit(visit))
    }

    /// Computes the block for `x (…, C)`, and the load of its experts if `balance` wants it.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        fused: bool,
        balance: &LoadBalance,
    ) -> Result<(Tensor, Option<ExpertLoad>)> {
        let size = x.size();
        let mut rows = x.f_reshape([-1, size.last().copied().unwrap_or(1)])?;
        if balance.training && self.noise > 0.0 {
            let factors = rows.f_empty_like()?;
            let factors = factors.f_uniform(1.0 - self.noise, 1.0 + self.noise)?;
            rows = rows.f_mul(&factors)?;
        }
        let routing = self.router.route(&rows, fused)?;
        let load = balance
            .is_wanted
            .then(|| ExpertLoad::of(&routing, balance.mask.as_ref()));
        let mut y = self.compute(&rows, &routing, fused)?;
        if let Some(shared) = &self.shared {
            y = y.f_add(&shared.forward(&rows, fused)?)?;
        }
        Ok((y.f_view(size.as_slice())?, load.transpose()?))
    }

    /// Computes the experts of `x (…, C)` that the router chooses by `residual (…, C)` in its place (Gemma 4).
    pub(crate) fn forward_chosen_by(
        &self,
        residual: &Tensor,
        x: &Tensor,
        fused: bool,
    ) -> Result<Tensor> {
        let rows = |x: &Tensor| x.f_flatten(0, -2);
        let routing = self.router.route(&rows(residual)?, fused)?;
        let y = self.compute(&rows(x)?, &routing, fused)?;
        Ok(y.f_view_as(x)?)
    }

    /// Lends the parameters of the router that are not of a linear layer.
    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.router.visit_parameters(prefix, visit)
    }

    /// Computes the chosen experts of the rows `x (N, C)` and adds them up, in the dtype of `x`.
    pub(super) fn compute(&self, x: &Tensor, routing: &Routing, fused: bool) -> Result<Tensor> {
        let dispatch = Dispatch::new(routing, self.experts.len() as i64)?;
        let sorted = dispatch.sort(x, fused)?;
        let on_gpu = fused && x.device() != Device::Cpu;
        let at_once = on_gpu && grouped::has_kernel(&sorted);
        let y = at_once.then(|| grouped::feed_forward(&self.experts, &sorted, &dispatch.ends));
        let y = match y.transpose()?.flatten() {
            Some(y) => y,
            None => self.one_by_one(&sorted, &dispatch, fused)?,
        };
        let sum = dispatch.combine(&y, &routing.weights, fused)?;
        Ok(sum.f_to_kind(x.kind())?)
    }

    /// Computes each expert for its rows of `sorted`, with the adapters of their tokens.
    pub(super) fn one_by_one(
        &self,
        sorted: &Tensor,
        dispatch: &Dispatch,
        fused: bool,
    ) -> Result<Tensor> {
        let counts = dispatch.counts()?;
        let adapters = AdapterRows::current();
        let tokens = match adapters {
            Some(_) => dispatch.tokens_on_host()?,
            None => Vec::new(),
        };
        let mut tokens = tokens.as_slice();
        // One operator, whose backward writes each gradient once; that of a slice adds a tensor of zeros as large as
        // all rows.
        let parts = sorted.f_split_with_sizes(&counts, 0)?;
        let recording = engine::is_grad_enabled();
        let mut outputs = Vec::with_capacity(parts.len());
        for ((expert, part), count) in self.experts.iter().zip(&parts).zip(&counts) {
            let own = adapters.as_ref().and_then(|rows| {
                let (own, rest) = tokens.split_at_checked(usize::try_from(*count).ok()?)?;
                tokens = rest;
                Some(rows.select(own))
            });
            let _scope = own.transpose()?.map(AdapterRows::scope);
            // A trained expert without tokens has a gradient of zeros, as in transformers, where all experts are one
            // parameter: an optimizer's averages decay, and processes agree on which gradients there are.
            if *count > 0 || recording && expert.is_trained() {
                outputs.push(expert.forward(part, fused)?);
            }
        }
        Ok(Tensor::f_cat(&outputs, 0)?)
    }
}
