use anyhow::{Result, anyhow, ensure};
use overdrive::accumulation::find_executable_batch_size;
use overdrive::precision::Precision;
use overdrive::sys::{is_out_of_memory, memory};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::models::{config, tokens};
use crate::training::{Trainer, loss};

/// More than any device has.
const TOO_MUCH: i64 = 1 << 44;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let config = config(context);
    let device = context.device();
    let block: i64 = context.sized(1 << 30, 4 << 20);
    context.check("a tensor that is too large, and work after it", || {
        let size = match device {
            Device::Cpu => 1 << 27,
            _ => TOO_MUCH / 4,
        };
        let allocated = || Ok::<_, anyhow::Error>(memory::stats(device)?.allocated_bytes);
        let first = allocated()?;
        // cuBLAS allocates its work space, 32 MiB on Hopper, in the first matmul and keeps it, which is no leak.
        works(device)?;
        let before = allocated()?;
        let limit = Limit::on(device, before + (256 << 20))?;
        refused(Tensor::f_empty([size], (Kind::Float, device)))?;
        drop(limit);
        works(device)?;
        let kept = before.saturating_sub(first) as f64;
        Ok(same_bytes(before, allocated()?).with("bytes kept by the first work", kept))
    })?;
    context.check(
        "memory that is filled to the end, and work after it",
        || {
            let before = memory::stats(device)?.allocated_bytes;
            let _limit = Limit::on(device, before + 64 * block.unsigned_abs())?;
            let mut held = Vec::new();
            let error = loop {
                match Tensor::f_empty([block], (Kind::Uint8, device)) {
                    Ok(tensor) => held.push(tensor),
                    Err(error) => break error,
                }
                ensure!(held.len() < 4096, "4096 blocks fit");
            };
            let filled = held.len() as f64 * block as f64;
            drop(held);
            refused(Err(error))?;
            memory::empty_cache(device)?;
            works(device)?;
            let after = memory::stats(device)?.allocated_bytes;
            Ok(same_bytes(before, after).with("filled bytes", filled))
        },
    )?;
    context.check("a step that does not fit, and a smaller one", || {
        let (model, mut trainer) = Trainer::of_model(&config, device, Precision::Fp32)?;
        let small = tokens(2, 64, device)?;
        trainer.steps(&model, &small, 2)?;
        let before = memory::stats(device)?.allocated_bytes;
        let _limit = Limit::on(device, before + (32 << 20))?;
        // The rest of the device is taken, so that a batch of this size does not fit.
        let taken = take_all_but(device, 32 << 20)?;
        let large = tokens(64, 500, Device::Cpu)?.f_to_device(device);
        let failed = large.map_err(anyhow::Error::from).and_then(|ids| {
            loss(&model, &ids, Precision::Fp32)?
                .f_backward()
                .map_err(Into::into)
        });
        let error = failed
            .err()
            .ok_or_else(|| anyhow!("the large batch fits"))?;
        ensure!(
            is_out_of_memory(error.as_ref()),
            "the error is not about memory: {error:#}"
        );
        drop(taken);
        memory::empty_cache(device)?;
        trainer.steps(&model, &small, 1)?;
        let after = memory::stats(device)?.allocated_bytes;
        let reason = format!("{before} bytes before and {after} after");
        // Gradients of the failed step are gone with the next one.
        Ok(Finding::judged(after <= before + (1 << 20), reason))
    })?;
    context.check("the search of a batch size", || {
        let before = memory::stats(device)?.allocated_bytes;
        let _limit = Limit::on(device, before + (64 << 20))?;
        let row = match device {
            Device::Cpu => 32 << 20,
            _ => TOO_MUCH / 4,
        };
        let mut tried = Vec::new();
        let found =
            find_executable_batch_size(16, |rows| -> std::result::Result<usize, tch::TchError> {
                tried.push(rows);
                // Up to two rows fit.
                let rows_of_memory = if rows > 2 { row * rows as i64 } else { 1024 };
                let _taken = Tensor::f_empty([rows_of_memory], (Kind::Uint8, device))?;
                Ok(rows)
            })?;
        works(device)?;
        Ok(
            Finding::judged(found.batch == 2, format!("the size is {}", found.batch))
                .noting(format!("tried {tried:?}")),
        )
    })
}

/// Checks that a failure leaks nothing.
fn same_bytes(before: u64, after: u64) -> Finding {
    Finding::judged(
        after == before,
        format!("{before} bytes before and {after} after"),
    )
}

/// Limits the memory of a CPU while it lives; a GPU has its own limit.
struct Limit(Device);

impl Limit {
    fn on(device: Device, bytes: u64) -> Result<Self> {
        if device == Device::Cpu {
            memory::set_limit(device, Some(bytes))?;
        }
        Ok(Self(device))
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if self.0 == Device::Cpu {
            let _ = memory::set_limit(Device::Cpu, None);
        }
    }
}

/// Takes blocks until less than `rest` bytes are left; nothing on a CPU, whose memory has a limit.
fn take_all_but(device: Device, rest: u64) -> Result<Vec<Tensor>> {
    let mut taken = Vec::new();
    if device == Device::Cpu {
        return Ok(taken);
    }
    memory::empty_cache(device)?;
    let mut block: i64 = 1 << 30;
    while block.unsigned_abs() >= rest {
        match Tensor::f_empty([block], (Kind::Uint8, device)) {
            Ok(tensor) => taken.push(tensor),
            Err(_) => block /= 2,
        }
    }
    Ok(taken)
}

/// Requires that an allocation has failed, and that its error is recognized as exhausted memory.
fn refused(result: std::result::Result<Tensor, tch::TchError>) -> Result<()> {
    match result {
        Ok(_) => Err(anyhow!("the tensor fits")),
        Err(error) if is_out_of_memory(&error) => Ok(()),
        Err(error) => Err(anyhow!("it is not recognized as exhausted memory: {error}")),
    }
}

fn works(device: Device) -> Result<()> {
    let x = Tensor::f_ones([128, 128], (Kind::Float, device))?;
    let sum = x.f_matmul(&x)?.f_sum(Kind::Double)?.f_double_value(&[])?;
    ensure!(sum == f64::from(128 * 128 * 128), "the sum is {sum}");
    Ok(())
}
