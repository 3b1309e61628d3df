//! How a group is made.

use std::time::Duration;

/// What carries the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, over TCP: tensors on the CPU.
    Gloo,
    /// NCCL: tensors on CUDA devices, one for each process. Needs the feature `nccl`.
    Nccl,
}

impl Backend {
    /// [`Nccl`](Self::Nccl) where it is built in and there is a CUDA device, else [`Gloo`](Self::Gloo).
    #[must_use]
    pub fn for_this_machine() -> Self {
        if cfg!(feature = "nccl") && tch::Cuda::is_available() {
            Self::Nccl
        } else {
            Self::Gloo
        }
    }
}

/// How a group is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupConfig {
    /// What carries the tensors. Default [`Backend::Gloo`].
    pub backend: Backend,
    /// How long a collective, and the meeting of the group, may take. Default 30 minutes, torch's.
    pub timeout: Duration,
    /// How often a process tells that it is alive. Default a second, or an eighth of the timeout if that
    /// is less. A rank is taken for lost after three of them and half a second.
    pub heartbeat: Option<Duration>,
    /// Compares dtype and shape between the ranks before each collective that is called (not those of
    /// backward, whose parameters are compared once): one that differs is an
    /// [`Error::TensorMismatch`](crate::Error::TensorMismatch) on all ranks, and the group stays whole. Each
    /// collective then takes two small ones more. Without, Gloo ends the process that receives more than it
    /// expects, and the others name it as lost. Default: whether `TORCH_DISTRIBUTED_DEBUG` is `DETAIL`.
    pub check_tensors: bool,
    /// The network interface that Gloo uses, such as `eth0`. Default: that of the variable
    /// `GLOO_SOCKET_IFNAME`; else loopback if the store is reached over it; else that of the host name.
    pub interface: Option<String>,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Gloo,
            timeout: Duration::from_secs(30 * 60),
            heartbeat: None,
            check_tensors: std::env::var("TORCH_DISTRIBUTED_DEBUG")
                .is_ok_and(|value| value.eq_ignore_ascii_case("detail")),
            interface: None,
        }
    }
}

impl GroupConfig {
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

    /// Sets whether tensors are compared before each collective.
    #[must_use]
    pub fn with_check_tensors(mut self, check: bool) -> Self {
        self.check_tensors = check;
        self
    }

    pub(crate) fn heartbeat(&self) -> Duration {
        self.heartbeat
            .unwrap_or((self.timeout / 8).min(Duration::from_secs(1)))
            .max(Duration::from_millis(20))
    }
}
