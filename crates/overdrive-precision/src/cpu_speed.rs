//! The measurement behind [`Precision::recommend`](crate::Precision::recommend) on a CPU.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use overdrive_build::measured::Processor;
use overdrive_build::{Environment, MatmulSpeed};
use overdrive_sys::gemm::mm_into;
use overdrive_sys::{build_info, threads};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// The linear layer of a small model. Its matmuls with [`ROWS`] rows take a few milliseconds.
const INPUTS: i64 = 384;
const OUTPUTS: i64 = 1024;
const ROWS: i64 = 1024;
/// The rows of the first matmuls in bf16, which bound the time if bf16 is emulated after all.
const FEW_ROWS: i64 = 16;
/// If matmuls of [`FEW_ROWS`] take longer, no more rows are measured: in hardware they take less than 1 ms.
const TOO_LONG: Duration = Duration::from_millis(50);
const LEAST_ROUNDS: usize = 5;
/// The two shortest times of a dtype must agree within this factor; else more rounds follow.
const SPREAD: f64 = 1.05;
/// The time after which no more rounds begin. The figures are then not stored, because the machine is too busy.
const BUDGET: Duration = Duration::from_secs(1);

/// Returns the speed of matmuls on this processor: the stored one, else a new measurement of about 0.1
/// seconds, which is stored. `None` if libtorch cannot measure it.
///
/// The speed is determined once per process.
pub(crate) fn of_this_processor() -> Option<MatmulSpeed> {
    static SPEED: OnceLock<Option<MatmulSpeed>> = OnceLock::new();
    *SPEED.get_or_init(|| {
        let libtorch = build_info::libtorch_version().ok()?;
        let processor = Processor::detect(&libtorch, threads::intra_op());
        let environment = Environment::process();
        let mut measured = None;
        let stored = processor.read_or_measure(&environment, MatmulSpeed::SUBJECT, || {
            measured = measure().ok();
            let reliable = measured.filter(|(_, reliable)| *reliable);
            reliable.map(|(speed, _)| speed.to_figures())
        });
        let stored = stored.as_ref().and_then(MatmulSpeed::from_figures);
        // Figures that cannot be stored are used by this process only; that is not an error.
        stored.or_else(|| {
            let (speed, _) = measured.or_else(|| measure().ok())?;
            Some(speed)
        })
    })
}

/// Returns the speed, and `true` if the times agreed.
fn measure() -> Result<(MatmulSpeed, bool)> {
    let threads = threads::intra_op();
    // A separate thread has no autocast, no dispatch mode and no gradient recording of the caller.
    let measured = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| {
            threads::set_intra_op(threads)?;
            measure_here()
        });
        measuring.join()
    });
    match measured {
        Ok(speed) => speed,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn measure_here() -> Result<(MatmulSpeed, bool)> {
    let mut fp32 = Times::of(Kind::Float, ROWS)?;
    let mut few = Times::of(Kind::BFloat16, FEW_ROWS)?;
    few.round()?;
    few.round()?;
    let emulated = few.shortest > TOO_LONG.as_secs_f64();
    let mut bf16 = match emulated {
        true => few,
        false => Times::of(Kind::BFloat16, ROWS)?,
    };
    let began = Instant::now();
    for round in 1.. {
        // In turn, so that other work on the machine slows both.
        fp32.round()?;
        if !emulated {
            bf16.round()?;
        }
        let agree = fp32.agree() && (emulated || bf16.agree());
        if (round >= LEAST_ROUNDS && agree) || began.elapsed() > BUDGET {
            break;
        }
    }
    let reliable = fp32.agree() && (emulated || bf16.agree());
    let speed = MatmulSpeed {
        fp32: fp32.gflops(),
        bf16: bf16.gflops(),
    };
    Ok((speed, reliable))
}

/// The three matmuls of the layer in one dtype, and the two shortest times of a round of them in seconds: other work
/// on the machine only makes a matmul slower.
struct Times {
    rows: i64,
    products: Vec<(Tensor, Tensor, Tensor)>,
    shortest: f64,
    second: f64,
}

impl Times {
    /// Multiplies once, which starts threads and compiles kernels.
    fn of(dtype: Kind, rows: i64) -> Result<Self> {
        // Constants, because a random number would change those of the caller.
        let f32 = (Kind::Float, Device::Cpu);
        let matrix = |n, m| Tensor::f_full([n, m], 0.37, f32)?.f_to_kind(dtype);
        let (x, w, dy) = (
            matrix(rows, INPUTS)?,
            matrix(OUTPUTS, INPUTS)?,
            matrix(rows, OUTPUTS)?,
        );
        let products = vec![
            (dy.f_empty_like()?, x.shallow_clone(), w.f_tr()?),
            (x.f_empty_like()?, dy.shallow_clone(), w.shallow_clone()),
            (w.f_empty_like()?, dy.f_tr()?, x),
        ];
        for (out, left, right) in &products {
            mm_into(out, left, right, false)?;
        }
        Ok(Self {
            rows,
            products,
            shortest: f64::INFINITY,
            second: f64::INFINITY,
        })
    }

    fn round(&mut self) -> Result<()> {
        let began = Instant::now();
        for (out, left, right) in &self.products {
            mm_into(out, left, right, false)?;
        }
        let seconds = began.elapsed().as_secs_f64().max(1e-9);
        self.second = self.second.min(seconds.max(self.shortest));
        self.shortest = self.shortest.min(seconds);
        Ok(())
    }

    fn agree(&self) -> bool {
        self.second <= SPREAD * self.shortest
    }

    fn gflops(&self) -> f64 {
        3.0 * (2 * self.rows * INPUTS * OUTPUTS) as f64 / self.shortest / 1e9
    }
}
