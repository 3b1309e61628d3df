//! Options of a process group.

use std::time::Duration;

/// The backend that transfers tensors between the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, over TCP: tensors on the CPU.
    Gloo,
    /// NCCL: tensors on CUDA devices, one for each process. Needs the feature `nccl`.
    Nccl,
}

impl Backend {
    /// Returns `true` if the feature `nccl` is on.
    #[must_use]
    pub fn nccl_is_built_in() -> bool {
        cfg!(feature = "nccl")
    }
}

/// The longest timeout, 24 days: libtorch's store counts milliseconds in 31 bits.
pub(crate) const MAX_TIMEOUT: Duration = Duration::from_millis(i32::MAX as u64);

/// The options of a process group.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupConfig {
    /// The backend. Default [`Backend::Gloo`].
    pub backend: Backend,
    /// The timeout of a collective, and of the rendezvous of the group. More than 24 days count as 24 days, which is
    /// the longest that libtorch can wait. Default 30 minutes, as in torch.
    pub timeout: Duration,
    /// The interval of heartbeats. Default one second, or an eighth of the timeout if that is shorter. A rank
    /// counts as lost after three intervals and half a second without a heartbeat.
    pub heartbeat: Option<Duration>,
    /// If `true`, the ranks compare dtype and shape before each explicit collective (not those of backward,
    /// whose parameters are compared once). A difference is an
    /// [`Error::TensorMismatch`](crate::Error::TensorMismatch) on all ranks, and the group stays usable. The
    /// comparison costs two small collectives each time. Without it, Gloo ends the process that receives more
    /// than it expects, and the others report it as lost. Default: `true` if `TORCH_DISTRIBUTED_DEBUG` is
    /// `DETAIL`.
    pub check_tensors: bool,
    /// The network interface that Gloo uses, such as `eth0`. Default: the variable `GLOO_SOCKET_IFNAME`; else
    /// loopback if the store is reached over it; else the interface of the host name.
    pub interface: Option<String>,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Gloo,
            timeout: Self::DEFAULT_TIMEOUT,
            heartbeat: None,
            check_tensors: std::env::var("TORCH_DISTRIBUTED_DEBUG")
                .is_ok_and(|value| value.eq_ignore_ascii_case("detail")),
            interface: None,
        }
    }
}

impl GroupConfig {
    /// The default timeout, that of PyTorch's Gloo groups: 30 minutes.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

    /// Sets the timeout.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the backend.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Sets the option `check_tensors`.
    #[must_use]
    pub fn with_check_tensors(mut self, check: bool) -> Self {
        self.check_tensors = check;
        self
    }

    pub(crate) fn heartbeat(&self) -> Duration {
        self.heartbeat
            .unwrap_or((self.timeout / 8).min(Duration::from_secs(1)))
            // One process answers the heartbeats of all ranks, so they must not be arbitrarily frequent.
            .max(Duration::from_millis(20))
    }
}
