//! Data parallel runs.

use std::time::Duration;

use overdrive_distributed::{
    Backend, DdpConfig, DistributedDataParallel, GroupConfig, ProcessGroup, Rendezvous,
    init_process_group,
};
use tch::{Device, Tensor};

use crate::Result;
use crate::arguments::{DdpBackend, TrainingArguments};
use crate::error::invalid;

impl TrainingArguments {
    /// Joins the process group that torchrun, a Kubernetes job, mpirun, srun or
    /// [`overdrive_distributed::Launch`] has started; without any of them it is a world of one. All arguments that must
    /// agree are compared between the processes.
    ///
    /// # Errors
    /// Errors about invalid variables of the launcher, or processes that do not join within `ddp_timeout`; an
    /// error if the machine has GPUs that several processes could not use; [`crate::Error::RankDiffers`] with the names
    /// and values of the arguments that differ, on every process.
    pub fn init_process_group(&self) -> Result<ProcessGroup> {
        // Decided before the rendezvous, so that each process fails at once.
        let processes = Rendezvous::from_env()?.world_size;
        let (backend, _) = self.backend_and_device(processes)?;
        let config = GroupConfig::default()
            .with_timeout(Duration::from_secs_f64(self.ddp_timeout))
            .with_backend(backend);
        let group = init_process_group(config)?;
        self.compare_ranks(&group)?;
        Ok(group)
    }

    /// Wraps the trainable parameters, so that gradients are averaged over the processes during backward. In a
    /// world of one it does nothing.
    ///
    /// # Errors
    /// An error if the models of the processes differ.
    pub fn data_parallel(
        &self,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
    ) -> Result<DistributedDataParallel> {
        let defaults = DdpConfig::default();
        let config = DdpConfig {
            bucket_cap_mb: self.ddp_bucket_cap_mb.unwrap_or(defaults.bucket_cap_mb),
            find_unused_parameters: self.ddp_find_unused_parameters.unwrap_or(false),
            static_graph: self.ddp_static_graph.unwrap_or(false),
            broadcast_buffers: self.ddp_broadcast_buffers.unwrap_or(true),
            ..defaults
        };
        // Transformer models have no buffers that change during training.
        let none: [(String, Tensor); 0] = [];
        Ok(DistributedDataParallel::new(
            group, parameters, none, config,
        )?)
    }

    /// Returns the device of this process: the CPU, or the GPU of the local rank.
    pub fn device(&self, group: &ProcessGroup) -> Device {
        match self.backend_and_device(group.world_size()) {
            Ok((_, true)) => group.device(),
            // `init_process_group` has returned the error of several processes that cannot use their GPUs.
            _ => Device::Cpu,
        }
    }

    fn backend_and_device(&self, processes: usize) -> Result<(Backend, bool)> {
        let gpus = match tch::Cuda::is_available() {
            true => usize::try_from(tch::Cuda::device_count()).unwrap_or(0),
            false => 0,
        };
        select_backend(
            processes,
            gpus,
            Backend::nccl_is_built_in(),
            self.use_cpu,
            self.ddp_backend,
        )
    }
}

/// Chooses the backend, and `true` to train on GPUs or `false` to train on the CPU, for `processes` processes on machines with `gpus` GPUs each.
///
/// One process uses a GPU if there is one. Several use GPUs over NCCL only: Gloo reduces tensors on the CPU. They
/// use the CPU if there is no GPU, if `use_cpu` is set, or if `ddp_backend` is `gloo`.
///
/// # Errors
/// An error if there is a GPU and NCCL is not built in, unless `use_cpu` or `ddp_backend: gloo` asks for the CPU.
fn select_backend(
    processes: usize,
    gpus: usize,
    nccl: bool,
    use_cpu: bool,
    ddp_backend: Option<DdpBackend>,
) -> Result<(Backend, bool)> {
    let has_gpu = gpus > 0;
    Ok(match ddp_backend {
        _ if processes == 1 => (Backend::Gloo, has_gpu && !use_cpu),
        Some(DdpBackend::Gloo) => (Backend::Gloo, false),
        // NCCL was requested explicitly: if the feature or a GPU is missing, the error of the process group
        // says which.
        Some(DdpBackend::Nccl) => (Backend::Nccl, has_gpu && !use_cpu),
        None if use_cpu || !has_gpu => (Backend::Gloo, false),
        None if nccl => (Backend::Nccl, true),
        None => {
            return invalid(
                "ddp_backend",
                "not set",
                format!(
                    "`nccl` to train {processes} processes on this machine's {gpus} GPU(s), which needs a build \
                     with `--features nccl`; or set `use_cpu: true` or `ddp_backend: gloo` to train on the CPU"
                ),
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use Backend::{Gloo, Nccl};

    #[test]
    fn several_processes_use_their_gpus_or_refuse() {
        let (gloo, nccl) = (Some(DdpBackend::Gloo), Some(DdpBackend::Nccl));
        // processes, GPUs, NCCL built in, use_cpu, ddp_backend: backend, on a GPU
        for (processes, gpus, built_in, use_cpu, asked, expected) in [
            (1, 0, false, false, None, (Gloo, false)),
            (1, 1, false, false, None, (Gloo, true)),
            (1, 1, false, true, None, (Gloo, false)),
            (1, 4, true, false, gloo, (Gloo, true)),
            (2, 0, false, false, None, (Gloo, false)),
            (2, 0, true, false, None, (Gloo, false)),
            (2, 2, true, false, None, (Nccl, true)),
            (2, 2, true, true, None, (Gloo, false)),
            (2, 2, false, true, None, (Gloo, false)),
            (2, 2, true, false, gloo, (Gloo, false)),
            (2, 2, false, false, gloo, (Gloo, false)),
            (2, 2, true, false, nccl, (Nccl, true)),
        ] {
            let found = select_backend(processes, gpus, built_in, use_cpu, asked);
            assert_eq!(
                found.unwrap(),
                expected,
                "{processes} {gpus} {built_in} {use_cpu} {asked:?}"
            );
        }
        let error = select_backend(2, 2, false, false, None).unwrap_err();
        let error = error.to_string();
        for part in [
            "2 GPU(s)",
            "--features nccl",
            "use_cpu: true",
            "ddp_backend: gloo",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
