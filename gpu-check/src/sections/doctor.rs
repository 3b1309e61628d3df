use anyhow::{Result, ensure};
use overdrive::precision::Precision;
use overdrive::profiling::{Machine, PeakFlops};
use overdrive::sys::cuda::{CudaLibrary, compute_capability, library};
use overdrive::sys::memory;
use overdrive::sys::profiler::cuda_identity;
use tch::{Cuda, Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::timing::seconds;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    context.examine_the_device();
    context.check("machine", || {
        let machine = Machine::detect();
        let gib = machine.memory_bytes.unwrap_or(0) as f64 / f64::from(1 << 30);
        let text = format!("{}, {} threads", machine.cpu, machine.threads);
        Ok(Finding::passed().noting(text).with("memory GiB", gib))
    })?;
    context.check("libtorch", || {
        let machine = Machine::detect();
        let mapped = mapped_libraries();
        let text = format!("{} ({})", machine.libtorch, machine.cpu_capability);
        Ok(Finding::passed().noting(text).noting(mapped.join(", ")))
    })?;
    context.check("python", || {
        let script = "import torch; print(torch.__version__, torch.cuda.is_available())";
        let mut python = crate::peer::python();
        let Ok(output) = python.args(["-c", script]).output() else {
            return Ok(Finding::skipped_allowed("there is no python3"));
        };
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() {
            return Ok(Finding::passed().noting(format!("torch {text}")));
        }
        Ok(Finding::skipped_allowed("python3 has no torch"))
    })?;
    context.check("CUDA library", || {
        Ok(match library()? {
            CudaLibrary::Loaded { path } => Finding::passed().noting(path),
            CudaLibrary::Failed { reason } => Finding::failed(reason),
            CudaLibrary::Absent { detail } if device == Device::Cpu => {
                Finding::passed().noting(format!("absent: {detail}"))
            }
            CudaLibrary::Absent { detail } => Finding::failed(format!("absent: {detail}")),
            other => Finding::failed(format!("{other:?}")),
        })
    })?;
    if let Device::Cuda(index) = device {
        context.check("devices", || {
            ensure!(Cuda::is_available(), "libtorch finds no CUDA device");
            let (major, minor) = compute_capability(index)?;
            let text = format!(
                "{}, compute capability {major}.{minor}, cuDNN {}",
                cuda_identity(index)?.name,
                Cuda::cudnn_is_available()
            );
            let count = Cuda::device_count() as f64;
            Ok(Finding::passed().noting(text).with("devices", count))
        })?;
    }
    context.check("a matmul", || {
        let x = Tensor::f_ones([64, 64], (Kind::Float, device))?;
        let sum = x.f_matmul(&x)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let right = sum == f64::from(64 * 64 * 64);
        Ok(Finding::judged(right, format!("the sum is {sum}")))
    })?;
    context.check("memory statistics", || {
        let before = memory::stats(device)?.allocated_bytes;
        let held = Tensor::f_zeros([1 << 20], (Kind::Float, device))?;
        let grown = memory::stats(device)?
            .allocated_bytes
            .saturating_sub(before);
        drop(held);
        let reason = format!("4 MiB of a tensor are counted as {grown} bytes");
        Ok(Finding::judged(grown == 4 << 20, reason).with("allocated bytes", grown as f64))
    })?;
    context.check("recommended precision", || {
        let found = Precision::recommend(device);
        let text = format!("{}: {}", found.precision, found.reason);
        Ok(Finding::passed().noting(text))
    })?;
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        // A CPU without the instructions would take minutes.
        if device == Device::Cpu && kind != Kind::Float {
            continue;
        }
        let width = context.sized(8192, 512);
        context.check(
            format!("matmul of {width} in {}", crate::parity::name_of(kind)),
            || {
                let x = Tensor::f_randn([width, width], (Kind::Float, device))?.f_to_kind(kind)?;
                let time = seconds(device, 3, 2, || {
                    let _product = x.f_matmul(&x)?;
                    Ok(())
                })?;
                let rate = 2.0 * (width as f64).powi(3) / time;
                let finding = Finding::passed().with("TFLOP/s", rate / 1e12);
                if device == Device::Cpu {
                    return Ok(finding);
                }
                let peak = PeakFlops::of(device, kind)?.flops_per_second;
                Ok(finding.with("of the data sheet", rate / peak))
            },
        )?;
    }
    let bytes = context.sized(4_i64 << 30, 64 << 20);
    context.check("copy in memory", || {
        let from = Tensor::f_ones([bytes / 4], (Kind::Float, device))?;
        let mut to = from.f_empty_like()?;
        let time = seconds(device, 3, 2, || Ok(to.f_copy_(&from)?))?;
        let rate = 2.0 * bytes as f64 / time;
        Ok(Finding::passed().with("GB/s", rate / 1e9))
    })
}

/// Returns the paths from which the libraries of libtorch were loaded (Linux).
fn mapped_libraries() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut found: Vec<String> = Vec::new();
    for path in maps.lines().filter_map(|line| line.split_once('/')) {
        let path = format!("/{}", path.1);
        let name = path.rsplit('/').next().unwrap_or_default();
        let wanted = ["libtorch_cpu.", "libtorch_cuda.", "libc10.", "libgomp"];
        if wanted.iter().any(|start| name.starts_with(start)) && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}
