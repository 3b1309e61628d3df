//! AdamW with an 8-bit state.

use overdrive_kernels::with_element;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checks::{bytes, check_adam_options, step_count};
use crate::code_book::BLOCK;
use crate::joint_update::{JointUpdate, WINDOW, flat_range, scales_of};
use crate::kernels::{AdamNumbers, Quantized, adam8};
use crate::operators::{self, Piece};
use crate::paging::{Allocated, Pager, Request, Storage};
use crate::update_rule::{Job, Rule, StateTensors, optimizer};
use crate::weight_decay::name_contains;
use crate::{PagingConfig, Result};

/// The options of [`AdamW8bit`]. The defaults are those of bitsandbytes' `AdamW8bit`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW8bitConfig {
    /// The learning rate of groups that set none. Default: 1e-3.
    pub learning_rate: f64,
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1). Default:
    /// (0.9, 0.999).
    pub betas: (f64, f64),
    /// The term added to the denominator. Default: 1e-8.
    pub eps: f64,
    /// The decoupled weight decay of groups that set none. Default: 1e-2.
    pub weight_decay: f64,
    /// The number of elements below which a parameter has a float32 state: norms and biases, for which 8
    /// bits save little. Default: 4096.
    pub min_8bit_size: usize,
    /// The substrings of name components (between two dots, whole components) of parameters with a float32
    /// state. Embeddings are the usual ones ([`EMBEDDING_NAMES`](crate::EMBEDDING_NAMES)): most of their rows have
    /// no gradient in a step, and transformers' Trainer keeps them in 32 bits too. Default: none, as in bitsandbytes.
    pub full_precision_names: Vec<String>,
    /// If `true`, the objective is maximized. Default: `false`.
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
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_adam_options(self.learning_rate, self.weight_decay, self.eps, self.betas)
    }

    fn wants_8bit(&self, name: &str, tensor: &Tensor) -> bool {
        tensor.numel() >= self.min_8bit_size && !name_contains(name, &self.full_precision_names)
    }
}

optimizer! {
    /// AdamW whose running averages take one byte per element instead of four, with block-wise quantization
    /// (Dettmers et al. 2022, [arXiv:2110.02861]); bitsandbytes' `AdamW8bit`.
    ///
    /// Blocks of 256 elements share a scale, so the state takes 2.03 bytes per element, and AdamW's takes
    /// 8. The code book is bitsandbytes' dynamic map: signed for the average of gradients, unsigned for
    /// that of squares. A step dequantizes a block, updates the parameter with the exact averages of this
    /// step, and quantizes them again, in one pass on all cores; float16 and bfloat16 parameters are
    /// updated in float32 and rounded. A positive square never becomes zero, so no update is divided by
    /// `eps` alone.
    ///
    /// On a CPU a kernel of this crate does this; on other devices libtorch's operators do the same
    /// arithmetic for 8 million elements of any number of parameters at a time.
    ///
    /// In the [`StateDict`](crate::StateDict) `exp_avg` and `exp_avg_sq` contain codes if the scales
    /// `absmax1` and `absmax2` exist, and floats otherwise.
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
    /// // Two codes per element, two scales per block of 256, and one step count.
    /// assert_eq!(optimizer.state_bytes(), 2 * 4096 + 2 * 16 * 4 + 4);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// [arXiv:2110.02861]: https://arxiv.org/abs/2110.02861
    AdamW8bit(Adam8), AdamW8bitConfig
}

/// The rule of [`AdamW8bit`], with states in memory.
#[derive(Debug)]
pub(crate) struct Adam8;

/// The state of one parameter, in memory or elsewhere.
#[derive(Debug)]
pub(crate) struct AdamState {
    /// The number of steps, a float32 scalar on the CPU as in [`AdamW`](crate::AdamW)'s states.
    pub(crate) step: Tensor,
    pub(crate) exp_avg: Allocated,
    pub(crate) exp_avg_sq: Allocated,
    /// The scales of both averages, if these are codes.
    pub(crate) scales: Option<(Tensor, Tensor)>,
}

impl AdamState {
    pub(crate) fn tensors(&self) -> StateTensors<'_> {
        let mut tensors = vec![
            ("step", &self.step),
            ("exp_avg", &self.exp_avg.tensor),
            ("exp_avg_sq", &self.exp_avg_sq.tensor),
        ];
        if let Some((absmax1, absmax2)) = &self.scales {
            tensors.extend([("absmax1", absmax1), ("absmax2", absmax2)]);
        }
        tensors
    }

    pub(crate) fn paged_bytes(&self) -> u64 {
        [&self.exp_avg, &self.exp_avg_sq]
            .into_iter()
            .filter(|average| matches!(average.storage, Storage::File(_) | Storage::Host))
            .map(|average| bytes(&average.tensor))
            .sum()
    }

    /// Returns new states for parameters: in 8 bits if `wants_8bit` returns `true`, paged if `paged` does.
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
                // One for each running average.
                [request.clone(), request]
            })
            .collect();
        let mut allocated = pager.allocate(&requests)?.into_iter();
        let mut states = Vec::with_capacity(parameters.len());
        for ((_, tensor), kind) in parameters.iter().zip(kinds) {
            // The pager returns as many tensors as there were requests.
            let (Some(exp_avg), Some(exp_avg_sq)) = (allocated.next(), allocated.next()) else {
                break;
            };
            let blocks = tensor.numel().div_ceil(BLOCK) as i64;
            // Scales are never paged: they are 1/64 of the codes.
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

    /// Increments the number of steps and returns it.
    pub(crate) fn count(&mut self) -> Result<f64> {
        let _ = self.step.f_add_scalar_(1.0)?;
        step_count(&self.step)
    }
}

impl Rule for Adam8 {
    const NAME: &'static str = "adamw_8bit";
    type Config = AdamW8bitConfig;
    type State = AdamState;

    fn new(_: &AdamW8bitConfig) -> Self {
        Self
    }

    fn new_states(
        &mut self,
        config: &AdamW8bitConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<AdamState>> {
        // Nothing is paged: the pager allocates all states in memory.
        let mut pager = Pager::new(PagingConfig::default());
        AdamState::allocate(
            &mut pager,
            parameters,
            |name, tensor| config.wants_8bit(name, tensor),
            |_| false,
        )
    }

    fn state_tensors(state: &AdamState) -> StateTensors<'_> {
        state.tensors()
    }

    fn step(&mut self, config: &AdamW8bitConfig, jobs: Vec<Job<'_, AdamState>>) -> Result<()> {
        let mut joint = JointUpdate::default();
        for job in jobs {
            let numbers = AdamNumbers::new(
                job.state.count()?,
                job.learning_rate,
                job.weight_decay,
                config.betas,
                config.eps,
                config.maximize,
            );
            let (parameter, gradient) = (&job.parameter, &job.gradient);
            if has_kernel(parameter, job.state) {
                step_one(&numbers, parameter, gradient, job.state, usize::MAX)?;
            } else {
                joint.push(numbers, parameter, gradient, job.state)?;
            }
        }
        joint.run()
    }
}

/// Returns `true` if the kernels of this crate update the parameter; the others are updated by libtorch's operators.
pub(crate) fn has_kernel(parameter: &Tensor, state: &AdamState) -> bool {
    let slices = parameter.device() == Device::Cpu && parameter.kind() != Kind::Double;
    slices && state.scales.is_some()
}

/// Updates one parameter, `window` elements of its state at a time (a multiple of the block size, or all). States
/// outside of the memory of the parameter's device are loaded window by window.
pub(crate) fn step_one(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &AdamState,
    window: usize,
) -> Result<()> {
    // Kernels read memory in order; a parameter with other strides is updated in a dense copy.
    let dense = parameter.f_contiguous()?;
    let gradient = gradient.f_contiguous()?;
    let len = parameter.numel();
    let on_slices = has_kernel(parameter, state);
    // The path through operators has temporaries of the length of a window, unless libtorch's fused kernel
    // updates parameter and state in place.
    let in_place = match state.scales {
        Some(_) => on_slices,
        None => parameter.kind() == state.exp_avg.tensor.kind(),
    };
    let window = if in_place { window } else { window.min(WINDOW) };
    let mut start = 0;
    while start < len {
        let range = start..start.saturating_add(window).min(len);
        let averages = [&state.exp_avg, &state.exp_avg_sq];
        for average in averages {
            average.storage.fetch(&average.tensor, &range)?;
        }
        match &state.scales {
            Some((absmax1, absmax2)) if on_slices => {
                let quantized = Quantized {
                    exp_avg: &state.exp_avg.tensor,
                    absmax1,
                    exp_avg_sq: &state.exp_avg_sq.tensor,
                    absmax2,
                };
                with_element!(dense.kind(), T => {
                    adam8::<T>(numbers, &dense, &gradient, &quantized, range.clone())?;
                });
            }
            scales => {
                let device = parameter.device();
                let piece = [Piece {
                    parameter: flat_range(&dense, &range)?,
                    gradient: flat_range(&gradient, &range)?,
                    averages: [
                        state.exp_avg.to_device_of(&range, device)?,
                        state.exp_avg_sq.to_device_of(&range, device)?,
                    ],
                    scales: scales_of(state, &range)?,
                }];
                match scales {
                    Some(_) => operators::adam8(numbers, &piece)?,
                    None => operators::adam32(numbers, &piece)?,
                }
                let [exp_avg, exp_avg_sq] = &piece[0].averages;
                state.exp_avg.put_back(&range, exp_avg)?;
                state.exp_avg_sq.put_back(&range, exp_avg_sq)?;
            }
        }
        for average in averages {
            average.storage.release(&average.tensor, &range)?;
        }
        start = range.end;
    }
    if !parameter.is_contiguous() {
        parameter.shallow_clone().f_copy_(&dense)?;
    }
    Ok(())
}
