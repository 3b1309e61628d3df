use std::time::Duration;

use anyhow::{Result, ensure};
use overdrive::distributed::{
    Backend, DdpConfig, DistributedDataParallel, Error, GroupConfig, Launch, ReduceOp,
    init_process_group,
};
use tch::{Device, Kind, Tensor};

use super::Target;
use crate::context::Context;
use crate::finding::Finding;

const RANKS: usize = 2;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    context.check("two processes reduce and train", || {
        let target = Target::of(device);
        if target == Target::Cuda {
            if tch::Cuda::device_count() < RANKS as i64 {
                return Ok(Finding::skipped_allowed("needs two GPUs"));
            }
            ensure!(
                Backend::nccl_is_built_in(),
                "there are two GPUs, but this program was built without the feature `nccl`; build it \
                 against a CUDA libtorch with NCCL's headers"
            );
        }
        Launch::new(std::env::current_exe()?)
            .args(["run-rank", "--device", target.name()])
            .nproc(RANKS)
            .run()?;
        Ok(Finding::passed())
    })
}

/// Runs one of the processes: a sum over all of them, and a step of data parallel training.
pub(crate) fn run_rank(target: Target) -> Result<()> {
    let mut config = GroupConfig::default();
    config.timeout = Duration::from_secs(60);
    config.backend = match target {
        Target::Cpu => Backend::Gloo,
        Target::Cuda => Backend::Nccl,
    };
    let group = init_process_group(config)?;
    let device = match target {
        Target::Cpu => Device::Cpu,
        Target::Cuda => Device::Cuda(group.local_rank()),
    };
    let options = (Kind::Float, device);
    let sum = Tensor::f_full([1000], (group.rank() + 1) as f64, options)?;
    group.all_reduce(&sum, ReduceOp::Sum)?;
    let value = sum.f_double_value(&[999])?;
    ensure!(value == 3.0, "the sum of 1 and 2 is {value}");

    let weight = Tensor::f_ones([64, 64], options)?.f_set_requires_grad(true)?;
    let named = [("weight".to_owned(), weight.shallow_clone())];
    let ddp = DistributedDataParallel::new(&group, named, [], DdpConfig::default())?;
    let x = Tensor::f_full([8, 64], (group.rank() + 1) as f64, options)?;
    let loss = ddp.forward(|| Ok::<_, Error>(x.f_matmul(&weight)?.f_sum(Kind::Float)?))?;
    ddp.backward(&loss)?;
    // 8 rows of 1 on one rank and of 2 on the other, averaged.
    let value = weight.f_grad()?.f_double_value(&[5, 7])?;
    ensure!(value == 12.0, "the averaged gradient is {value}, not 12");
    group.barrier()?;
    Ok(())
}
