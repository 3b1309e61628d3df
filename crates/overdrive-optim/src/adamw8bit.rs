//! AdamW with its state in 8 bits.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checks::{bytes, check_betas, check_finite_from_zero};
use crate::code_book::BLOCK;
use crate::engine::{Job, Parts, Rule, optimizer};
use crate::kernels::{AdamNumbers, Quantized, adam8, bump_version, with_elements};
use crate::operators;
use crate::paging::{Allocated, Pager, Request, Storage};
use crate::{PagingConfig, Result};

/// Elements that the path through operators takes at once: its temporaries are this long.
const OPERATOR_CHUNK: usize = 1 << 22;

/// Options of [`AdamW8bit`]. Defaults are those of bitsandbytes' `AdamW8bit`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW8bitConfig {
    /// Learning rate of groups that set none. Default 1e-3.
    pub learning_rate: f64,
    /// Decay of the running averages of the gradient and its square, each in [0, 1).
    /// Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the denominator. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay of groups that set none. Default 1e-2.
    pub weight_decay: f64,
    /// Parameters with fewer elements keep a float32 state: norms and biases, where 8 bits save
    /// nothing. Default 4096.
    pub min_8bit_size: usize,
    /// Parameters whose name contains one of these keep a float32 state. Embeddings are the usual
    /// ones (`embed`, `wte`): most of their rows have no gradient in a step, and transformers' Trainer
    /// leaves them in 32 bits too. Default none.
    pub full_precision_names: Vec<String>,
    /// Ascends instead of descends. Default false.
    pub maximize: bool,
}

impl Default for AdamW8bitConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            min_8bit_size: 4096,
            full_precision_names: Vec::new(),
            maximize: false,
        }
    }
}

impl AdamW8bitConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) naming the first option outside its
    /// range.
    pub fn validate(&self) -> Result<()> {
        check_finite_from_zero("learning_rate", self.learning_rate)?;
        check_finite_from_zero("weight_decay", self.weight_decay)?;
        check_finite_from_zero("eps", self.eps)?;
        check_betas(self.betas)
    }

    fn wants_8bit(&self, name: &str, tensor: &Tensor) -> bool {
        tensor.numel() >= self.min_8bit_size
            && !self
                .full_precision_names
                .iter()
                .any(|part| name.contains(part.as_str()))
    }
}

optimizer! {
    /// AdamW whose running averages take one byte an element instead of four, block-wise quantized
    /// (Dettmers et al. 2022, [arXiv:2110.02861]); bitsandbytes' `AdamW8bit`.
    ///
    /// Blocks of 256 elements share a scale, so the state takes 2.03 bytes an element where AdamW's
    /// takes 8. The code book is bitsandbytes' dynamic map: signed for the average of gradients,
    /// unsigned for that of squares. A step dequantizes a block, updates the parameter with the exact
    /// averages of this step, and quantizes them again, in one pass on all cores; parameters in
    /// float16 and bfloat16 are updated in float32 and rounded. A square that is not zero never
    /// becomes zero, so that no update is divided by `eps` alone.
    ///
    /// On a CPU that is a loop of this crate; elsewhere the same arithmetic goes through libtorch's
    /// operators, a few million elements at a time.
    ///
    /// In the [`StateDict`](crate::StateDict) `exp_avg` and `exp_avg_sq` hold codes where `absmax1` and
    /// `absmax2`, the scales, are there, else numbers.
    ///
    /// ```
    /// use overdrive_optim::{AdamW8bit, AdamW8bitConfig, Optimizer, ParamGroup};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let mut optimizer = AdamW8bit::new(vec![group], AdamW8bitConfig::default())?;
    /// weight.square().sum(Kind::Float).backward();
    /// optimizer.step()?;
    /// assert!((weight.double_value(&[0, 0]) - (1.0 - 1e-5 - 1e-3)).abs() < 1e-6);
    /// // Two codes an element, two scales a block of 256, one step count.
    /// assert_eq!(optimizer.state_bytes(), 2 * 4096 + 2 * 16 * 4 + 4);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// [arXiv:2110.02861]: https://arxiv.org/abs/2110.02861
    AdamW8bit(Adam8), AdamW8bitConfig
}

/// The rule of [`AdamW8bit`], with states in memory.
#[derive(Debug)]
pub(crate) struct Adam8 {
    config: AdamW8bitConfig,
}

/// What is kept for one parameter, wherever it is.
#[derive(Debug)]
pub(crate) struct AdamState {
    /// Steps taken, a float32 scalar on the CPU as in [`AdamW`](crate::AdamW)'s states.
    pub(crate) step: Tensor,
    pub(crate) exp_avg: Allocated,
    pub(crate) exp_avg_sq: Allocated,
    /// The scales of both averages, where those are codes.
    pub(crate) scales: Option<(Tensor, Tensor)>,
}

impl AdamState {
    pub(crate) fn parts(&self) -> Parts<'_> {
        let mut parts = vec![
            ("step", &self.step),
            ("exp_avg", &self.exp_avg.tensor),
            ("exp_avg_sq", &self.exp_avg_sq.tensor),
        ];
        if let Some((absmax1, absmax2)) = &self.scales {
            parts.extend([("absmax1", absmax1), ("absmax2", absmax2)]);
        }
        parts
    }

    pub(crate) fn paged_bytes(&self) -> u64 {
        [&self.exp_avg, &self.exp_avg_sq]
            .into_iter()
            .filter(|part| matches!(part.storage, Storage::File | Storage::Host))
            .map(|part| bytes(&part.tensor))
            .sum()
    }

    /// States for parameters, in 8 bits where `wants_8bit` says so, paged where `paged` does.
    pub(crate) fn allocate(
        pager: &mut Pager,
        parameters: &[(&str, &Tensor)],
        wants_8bit: impl Fn(&str, &Tensor) -> bool,
        paged: impl Fn(&Tensor) -> bool,
    ) -> Result<Vec<Self>> {
        let kinds: Vec<Kind> = parameters
            .iter()
            .map(|(name, tensor)| match tensor.kind() {
                _ if wants_8bit(name, tensor) => Kind::Uint8,
                Kind::Double => Kind::Double,
                _ => Kind::Float,
            })
            .collect();
        let requests: Vec<Request> = parameters
            .iter()
            .zip(&kinds)
            .flat_map(|((_, tensor), &kind)| {
                let request = Request {
                    size: tensor.size(),
                    kind,
                    device: tensor.device(),
                    paged: paged(tensor),
                };
                [request.clone(), request]
            })
            .collect();
        let mut allocated = pager.allocate(&requests)?.into_iter();
        let mut states = Vec::with_capacity(parameters.len());
        for ((_, tensor), kind) in parameters.iter().zip(kinds) {
            let (Some(exp_avg), Some(exp_avg_sq)) = (allocated.next(), allocated.next()) else {
                break;
            };
            let blocks = tensor.numel().div_ceil(BLOCK) as i64;
            let scales = || Tensor::f_zeros(blocks, (Kind::Float, tensor.device()));
            states.push(Self {
                step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
                exp_avg,
                exp_avg_sq,
                scales: match kind {
                    Kind::Uint8 => Some((scales()?, scales()?)),
                    _ => None,
                },
            });
        }
        Ok(states)
    }

    /// Counts a step.
    pub(crate) fn count(&mut self) -> Result<f64> {
        let _ = self.step.f_add_scalar_(1.0)?;
        Ok(self.step.f_double_value(&[])?)
    }
}

impl Rule for Adam8 {
    const NAME: &'static str = "adamw_8bit";
    type Config = AdamW8bitConfig;
    type State = AdamState;

    fn new(config: AdamW8bitConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { config })
    }

    fn config(&self) -> &AdamW8bitConfig {
        &self.config
    }

    fn group_defaults(&self) -> (f64, f64) {
        (self.config.learning_rate, self.config.weight_decay)
    }

    fn new_states(&mut self, parameters: &[(&str, &Tensor)]) -> Result<Vec<AdamState>> {
        let mut pager = Pager::new(PagingConfig::default());
        AdamState::allocate(
            &mut pager,
            parameters,
            |name, tensor| self.config.wants_8bit(name, tensor),
            |_| false,
        )
    }

    fn parts(state: &AdamState) -> Parts<'_> {
        state.parts()
    }

    fn step(&mut self, jobs: Vec<Job<'_, AdamState>>) -> Result<()> {
        for job in jobs {
            let numbers = AdamNumbers::new(
                job.state.count()?,
                job.learning_rate,
                job.weight_decay,
                self.config.betas,
                self.config.eps,
                self.config.maximize,
            );
            step_one(
                &numbers,
                &job.parameter,
                &job.gradient,
                job.state,
                usize::MAX,
            )?;
        }
        Ok(())
    }
}

/// Updates one parameter, `window` elements of its state at a time (a multiple of a block, or all).
pub(crate) fn step_one(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &AdamState,
    window: usize,
) -> Result<()> {
    // Kernels walk memory; a parameter with other strides is updated in a dense copy.
    let dense = parameter.f_contiguous()?;
    let gradient = gradient.f_contiguous()?;
    let len = parameter.numel();
    let eight_bit = state.scales.is_some();
    let on_slices = parameter.device() == Device::Cpu && parameter.kind() != Kind::Double;
    // Through operators, temporaries are as long as what is updated at once, except where libtorch's
    // fused kernel takes parameter and state as they are.
    let in_place = if eight_bit {
        on_slices
    } else {
        parameter.kind() == state.exp_avg.tensor.kind()
    };
    let chunk = if in_place {
        window
    } else {
        window.min(OPERATOR_CHUNK)
    };
    let mut start = 0;
    while start < len {
        let range = start..start.saturating_add(chunk).min(len);
        let parts = [&state.exp_avg, &state.exp_avg_sq];
        for part in parts {
            part.storage.fetch(&part.tensor, &range)?;
        }
        match &state.scales {
            Some((absmax1, absmax2)) if on_slices => {
                let quantized = Quantized {
                    exp_avg: &state.exp_avg.tensor,
                    absmax1,
                    exp_avg_sq: &state.exp_avg_sq.tensor,
                    absmax2,
                };
                with_elements!(dense.kind(), T => {
                    adam8::<T>(numbers, &dense, &gradient, &quantized, range.clone())
                })
                .transpose()?;
            }
            Some(scales) => {
                operators::adam8(numbers, &dense, &gradient, state, scales, &range)?;
            }
            None => operators::adam32(numbers, &dense, &gradient, state, &range)?,
        }
        for part in parts {
            part.storage.release(&part.tensor, &range)?;
        }
        start = range.end;
    }
    if parameter.is_contiguous() {
        bump_version(parameter)
    } else {
        Ok(parameter.shallow_clone().f_copy_(&dense)?)
    }
}
