//! AdamW with its state in a mapped file or in host memory.

use serde::{Deserialize, Serialize};
use tch::{Cuda, Device, Tensor};

use crate::Result;
use crate::adamw8bit::{AdamState, has_kernel, step_one};
use crate::checks::check_adam_options;
use crate::code_book::BLOCK;
use crate::joint_update::JointUpdate;
use crate::kernels::AdamNumbers;
use crate::paging::{Pager, PagingConfig, Storage};
use crate::update_rule::{Job, Rule, StateTensors, optimizer};
use crate::weight_decay::name_contains;

/// The bits of a state element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StateBits {
    /// Float32 (float64 for float64 parameters), as bitsandbytes' `paged_adamw_32bit`. The default.
    #[default]
    #[serde(rename = "32")]
    ThirtyTwo,
    /// Block-wise quantized as in [`AdamW8bit`](crate::AdamW8bit), as bitsandbytes' `paged_adamw_8bit`.
    #[serde(rename = "8")]
    Eight,
}

/// The options of [`PagedAdamW`]. The defaults are those of bitsandbytes' `PagedAdamW`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PagedAdamWConfig {
    /// The learning rate of groups that set none. Default: 1e-3.
    pub learning_rate: f64,
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1). Default:
    /// (0.9, 0.999).
    pub betas: (f64, f64),
    /// The term added to the denominator. Default: 1e-8.
    pub eps: f64,
    /// The decoupled weight decay of groups that set none. Default: 1e-2.
    pub weight_decay: f64,
    /// If `true`, the objective is maximized. Default: `false`.
    pub maximize: bool,
    /// The bits of a state element. Default: 32.
    pub state_bits: StateBits,
    /// With 8 bits, the number of elements below which a parameter has a float32 state. Default: 4096.
    pub min_8bit_size: usize,
    /// With 8 bits, the substrings of name components of parameters with a float32 state, as
    /// [`AdamW8bitConfig::full_precision_names`](crate::AdamW8bitConfig::full_precision_names). Default: none.
    pub full_precision_names: Vec<String>,
    /// The location of the state and the limit of its resident part. They belong to the machine, so
    /// loading a stored state does not change them.
    pub paging: PagingConfig,
}

impl Default for PagedAdamWConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            maximize: false,
            state_bits: StateBits::ThirtyTwo,
            min_8bit_size: 4096,
            full_precision_names: Vec::new(),
            paging: PagingConfig::default(),
        }
    }
}

impl PagedAdamWConfig {
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_adam_options(self.learning_rate, self.weight_decay, self.eps, self.betas)?;
        self.paging.validate()
    }
}

optimizer! {
    /// AdamW that keeps the state of large parameters out of memory: in a mapped file for parameters on a
    /// CPU, in pinned host memory for those on a GPU (Dettmers et al. 2023, [arXiv:2305.14314];
    /// bitsandbytes' `PagedAdamW`, which uses CUDA's unified memory and does not page on a CPU).
    ///
    /// A step processes the state in windows: the pages of a window are loaded together, updated by the
    /// kernel of [`AdamW`](crate::AdamW) (results are bit-equal for float32 parameters) or of
    /// [`AdamW8bit`](crate::AdamW8bit), and released. The process never holds more of the mapped state
    /// than [`PagingConfig::max_resident_bytes`]; states that fit stay in memory, and the others are in
    /// the system's cache as long as it has room, or on the disk. On a GPU, windows are copied in and out
    /// on the current stream, and a step waits for the last copy.
    ///
    /// The disk space of a state is allocated when its parameter has its first gradient. A full disk is
    /// an error at that point, and leaves parameters and states unchanged. File systems that relocate
    /// rewritten data (btrfs, ZFS) can still become full later, and a disk error during the write-back of
    /// pages ends the process with a message. The file has no name, so the system deletes it when the
    /// process ends.
    ///
    /// ```
    /// use overdrive_optim::{Optimizer, PagedAdamW, PagedAdamWConfig, PagingConfig, ParamGroup};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([400, 300], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let paging = PagingConfig { max_resident_bytes: 1 << 20, ..Default::default() };
    /// let config = PagedAdamWConfig { paging, ..Default::default() };
    /// let mut optimizer = PagedAdamW::new(vec![group], config)?;
    /// weight.square().sum(Kind::Float).backward();
    /// optimizer.step()?;
    /// assert!((weight.double_value(&[0, 0]) - (1.0 - 1e-5 - 1e-3)).abs() < 1e-6);
    /// assert_eq!(optimizer.state_bytes(), 8 * 120_000 + 4);
    /// assert!(optimizer.resident_state_bytes() <= 1 << 20);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// [arXiv:2305.14314]: https://arxiv.org/abs/2305.14314
    PagedAdamW(Paged), PagedAdamWConfig
}

impl PagedAdamW {
    /// Returns the maximum bytes of state in memory (device memory for a GPU): states of small
    /// parameters, scales, the resident part of the mapped file, and one window of the other part.
    #[must_use]
    pub fn resident_state_bytes(&self) -> u64 {
        let paged = self.engine.paged_bytes();
        let window = self.config().paging.window_bytes().min(paged);
        self.engine.state_bytes() - paged + window
    }
}

/// The rule of [`PagedAdamW`].
#[derive(Debug)]
pub(crate) struct Paged {
    pager: Pager,
}

impl Rule for Paged {
    const NAME: &'static str = "paged_adamw";
    type Config = PagedAdamWConfig;
    type State = AdamState;

    fn new(config: &PagedAdamWConfig) -> Self {
        let pager = Pager::new(config.paging.clone());
        Self { pager }
    }

    fn on_machine(config: PagedAdamWConfig, machine: &PagedAdamWConfig) -> PagedAdamWConfig {
        PagedAdamWConfig {
            paging: machine.paging.clone(),
            ..config
        }
    }

    fn new_states(
        &mut self,
        config: &PagedAdamWConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<AdamState>> {
        let min_paged = config.paging.min_paged_elements;
        AdamState::allocate(
            &mut self.pager,
            parameters,
            |name, tensor| {
                config.state_bits == StateBits::Eight
                    && tensor.numel() >= config.min_8bit_size
                    && !name_contains(name, &config.full_precision_names)
            },
            |tensor| tensor.numel() >= min_paged,
        )
    }

    fn state_tensors(state: &AdamState) -> StateTensors<'_> {
        state.tensors()
    }

    fn paged_bytes(state: &AdamState) -> u64 {
        state.paged_bytes()
    }

    fn step(&mut self, config: &PagedAdamWConfig, jobs: Vec<Job<'_, AdamState>>) -> Result<()> {
        let window_bytes = config.paging.window_bytes() as usize;
        let mut copied_from = Vec::new();
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
            let first = &job.state.exp_avg;
            if matches!(first.storage, Storage::Memory) && !has_kernel(&job.parameter, job.state) {
                joint.push(numbers, &job.parameter, &job.gradient, job.state)?;
                continue;
            }
            let window = match &first.storage {
                // Nothing to load or release, so the whole parameter is one window.
                Storage::Memory | Storage::Kept => usize::MAX,
                Storage::File(_) | Storage::Host => {
                    // Two averages, in whole blocks, because a block is quantized as a whole.
                    let both = 2 * first.tensor.kind().elt_size_in_bytes();
                    (window_bytes / both / BLOCK).max(1) * BLOCK
                }
            };
            if let (Storage::Host, Device::Cuda(index)) = (&first.storage, job.parameter.device())
                && !copied_from.contains(&index)
            {
                copied_from.push(index);
            }
            step_one(&numbers, &job.parameter, &job.gradient, job.state, window)?;
        }
        joint.run()?;
        // The copies to host memory are asynchronous; afterwards the host may read the states.
        for index in copied_from {
            Cuda::synchronize(index as i64);
        }
        Ok(())
    }
}
