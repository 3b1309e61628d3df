//! The time of a matmul with a quantized weight, by scheme and rows, beside the dense one: the source of the
//! limits in `src/linear`.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin quantized_matmul -- 4096x4096 int8,int8-weight 1,8,64
//! ```
//!
//! A fourth argument `cpu` prints the CPU time of one thread as counted by Linux, for a machine with other load.

use std::time::Instant;

use overdrive::quantization::{QuantizedWeight, Scheme, linear};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let _no_grad = tch::no_grad_guard();
    let mut arguments = std::env::args().skip(1);
    let sizes = arguments.next().unwrap_or_else(|| "4096x4096".to_owned());
    let schemes = arguments.next().unwrap_or_else(|| "int8".to_owned());
    let rows = arguments.next().unwrap_or_else(|| "1,8,64,512".to_owned());
    let rows: Vec<i64> = rows.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let one_thread = arguments.next().as_deref() == Some("cpu");
    if one_thread {
        tch::set_num_threads(1);
    }
    println!(
        "instructions: {}",
        overdrive::quantization::instruction_set()
    );
    for size in sizes.split(',') {
        let (outputs, inputs) = size.split_once('x').ok_or("sizes are like 4096x4096")?;
        let (outputs, inputs): (i64, i64) = (outputs.parse()?, inputs.parse()?);
        let dense = Tensor::f_randn([outputs, inputs], (Kind::Float, Device::Cpu))?;
        for scheme in schemes.split(',') {
            let weight = match scheme {
                "dense" => None,
                name => Some(QuantizedWeight::quantize(&dense, name.parse::<Scheme>()?)?),
            };
            for &rows in &rows {
                for kind in [Kind::Float, Kind::BFloat16] {
                    let x = Tensor::f_randn([rows, inputs], (kind, Device::Cpu))?;
                    let dense = dense.f_to_kind(kind)?;
                    let time = if one_thread { processor } else { fastest };
                    let seconds = time(&|| match &weight {
                        Some(weight) => Ok(linear(&x, weight, None)?),
                        None => Ok(x.f_linear(&dense, None::<&Tensor>)?),
                    })?;
                    let products = (rows * outputs * inputs) as f64;
                    println!(
                        "{size} {scheme:>12} {kind:?} {rows:>4} rows {:9.3} ms, {:6.1} GB/s of weights, {:7.1} G products/s",
                        seconds * 1e3,
                        weight.as_ref().map_or(
                            dense.numel() * kind.elt_size_in_bytes(),
                            QuantizedWeight::bytes
                        ) as f64
                            / seconds
                            / 1e9,
                        products / seconds / 1e9,
                    );
                }
            }
        }
    }
    Ok(())
}

type Outcome = Result<Tensor, Box<dyn std::error::Error>>;

/// Returns the minimum of many short runs, because other processes make some of them longer.
fn fastest(run: &dyn Fn() -> Outcome) -> Result<f64, Box<dyn std::error::Error>> {
    let mut least = f64::INFINITY;
    let begin = Instant::now();
    let mut count = 0;
    while count < 5 || (begin.elapsed().as_secs_f64() < 0.6 && count < 2000) {
        let start = Instant::now();
        let _y = run()?;
        least = least.min(start.elapsed().as_secs_f64());
        count += 1;
    }
    Ok(least)
}

/// Returns the mean CPU time of this thread.
fn processor(run: &dyn Fn() -> Outcome) -> Result<f64, Box<dyn std::error::Error>> {
    let used = || -> Result<f64, Box<dyn std::error::Error>> {
        let line = std::fs::read_to_string("/proc/thread-self/schedstat")?;
        let nanoseconds = line.split_whitespace().next().ok_or("no schedstat")?;
        Ok(nanoseconds.parse::<f64>()? * 1e-9)
    };
    let _warm = run()?;
    let (begin, mut count) = (used()?, 0);
    while count < 5 || (used()? - begin < 0.3 && count < 10_000) {
        let _y = run()?;
        count += 1;
    }
    Ok((used()? - begin) / f64::from(count))
}
