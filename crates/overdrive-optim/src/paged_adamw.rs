//! AdamW with its state outside the memory that is short.

use serde::{Deserialize, Serialize};
use tch::{Cuda, Device, Tensor};

use crate::Result;
use crate::adamw8bit::{AdamState, step_one};
use crate::checks::{check_betas, check_finite_from_zero};
use crate::code_book::BLOCK;
use crate::engine::{Job, Parts, Rule, optimizer};
use crate::kernels::AdamNumbers;
use crate::paging::{Pager, PagingConfig, Storage};

/// Bits of a state element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StateBits {
    /// Float32 (float64 for float64 parameters): bitsandbytes' `paged_adamw_32bit`.
    #[default]
    #[serde(rename = "32")]
    ThirtyTwo,
    /// Block-wise quantized as in [`AdamW8bit`](crate::AdamW8bit): `paged_adamw_8bit`.
    #[serde(rename = "8")]
    Eight,
}

/// Options of [`PagedAdamW`]. Defaults are those of bitsandbytes' `PagedAdamW`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PagedAdamWConfig {
    /// Learning rate of groups that set none. Default 1e-3.
    pub learning_rate: f64,
    /// Decay of the running averages of the gradient and its square, each in [0, 1).
    /// Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the denominator. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay of groups that set none. Default 1e-2.
    pub weight_decay: f64,
    /// Ascends instead of descends. Default false.
    pub maximize: bool,
    /// Bits of a state element. Default 32.
    pub state_bits: StateBits,
    /// With 8 bits: parameters with fewer elements keep a float32 state. Default 4096.
    pub min_8bit_size: usize,
    /// Where the state is, and how much of it may be in memory. It belongs to the machine: loading a
    /// stored state leaves it as it is.
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
            paging: PagingConfig::default(),
        }
    }
}

impl PagedAdamWConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) naming the first option outside its
    /// range.
    pub fn validate(&self) -> Result<()> {
        check_finite_from_zero("learning_rate", self.learning_rate)?;
        check_finite_from_zero("weight_decay", self.weight_decay)?;
        check_finite_from_zero("eps", self.eps)?;
        check_betas(self.betas)?;
        self.paging.validate()
    }
}

optimizer! {
    /// AdamW whose state of large parameters lies outside the memory that is short: on a CPU in a
    /// mapped file, on a GPU in pinned host memory (Dettmers et al. 2023, [arXiv:2305.14314];
    /// bitsandbytes' `PagedAdamW`, which pages by CUDA's unified memory and not on a CPU).
    ///
    /// A step walks the state in windows: pages of a window come in together, are updated by the same
    /// kernel as [`AdamW`](crate::AdamW)'s (results are bit-equal for float32 parameters) or by
    /// [`AdamW8bit`](crate::AdamW8bit)'s, and go again. The process never holds more of the mapped
    /// state than [`PagingConfig::max_resident_bytes`]; what fits stays, the rest is in the system's
    /// cache while that has room and on the disk when not. On a GPU, windows are copied in and out on
    /// the current stream, and a step waits for the last copy.
    ///
    /// The state's room is claimed on the disk when a parameter has its first gradient. A full disk is
    /// an error then, with parameters and states as they were. File systems that move data when it is
    /// written again (btrfs, ZFS) can still run full later, and a disk that fails while pages are
    /// written back ends the process with SIGBUS: mapped files leave no other way. The file has no
    /// name, so that nothing stays behind when the process dies.
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
    /// Bytes of state that may be in the memory that is short: states of small parameters, scales,
    /// what is kept of the mapped file, and one window of the rest.
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
    config: PagedAdamWConfig,
    pager: Pager,
}

impl Rule for Paged {
    const NAME: &'static str = "paged_adamw";
    type Config = PagedAdamWConfig;
    type State = AdamState;

    fn new(config: PagedAdamWConfig) -> Result<Self> {
        config.validate()?;
        let pager = Pager::new(config.paging.clone());
        Ok(Self { config, pager })
    }

    fn config(&self) -> &PagedAdamWConfig {
        &self.config
    }

    fn group_defaults(&self) -> (f64, f64) {
        (self.config.learning_rate, self.config.weight_decay)
    }

    fn stored_config(&self) -> PagedAdamWConfig {
        PagedAdamWConfig {
            paging: PagingConfig::default(),
            ..self.config.clone()
        }
    }

    fn with_stored_config(&self, stored: PagedAdamWConfig) -> Result<Self> {
        Self::new(PagedAdamWConfig {
            paging: self.config.paging.clone(),
            ..stored
        })
    }

    fn new_states(&mut self, parameters: &[(&str, &Tensor)]) -> Result<Vec<AdamState>> {
        let (bits, least) = (self.config.state_bits, self.config.min_8bit_size);
        let min_paged = self.pager.config().min_paged_elements;
        AdamState::allocate(
            &mut self.pager,
            parameters,
            |_, tensor| bits == StateBits::Eight && tensor.numel() >= least,
            |tensor| tensor.numel() >= min_paged,
        )
    }

    fn parts(state: &AdamState) -> Parts<'_> {
        state.parts()
    }

    fn paged_bytes(&self, state: &AdamState) -> u64 {
        state.paged_bytes()
    }

    fn step(&mut self, jobs: Vec<Job<'_, AdamState>>) -> Result<()> {
        let window_bytes = self.pager.config().window_bytes() as usize;
        let mut copied_from = Vec::new();
        for job in jobs {
            let numbers = AdamNumbers::new(
                job.state.count()?,
                job.learning_rate,
                job.weight_decay,
                self.config.betas,
                self.config.eps,
                self.config.maximize,
            );
            let first = &job.state.exp_avg;
            let window = match first.storage {
                Storage::Memory | Storage::Kept => usize::MAX,
                Storage::File | Storage::Host => {
                    let both = 2 * first.tensor.kind().elt_size_in_bytes();
                    (window_bytes / both / BLOCK).max(1) * BLOCK
                }
            };
            if let (Storage::Host, Device::Cuda(index)) = (first.storage, job.parameter.device())
                && !copied_from.contains(&index)
            {
                copied_from.push(index);
            }
            step_one(&numbers, &job.parameter, &job.gradient, job.state, window)?;
        }
        // The host may read the states from here on.
        for index in copied_from {
            Cuda::synchronize(index as i64);
        }
        Ok(())
    }
}
