//! The time of matmuls with 4-bit and 8-bit weights, beside the time in which the weights are read from memory.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin four_bit_matmul -- [OUTPUTSxINPUTS…] [SCHEME…] [ROWS…] [hot] [fp32-scales]
//! ```
//!
//! Each size cycles through several weights that do not fit into the caches together, as the layers of a model
//! do; with `hot` there is one weight, which stays in the last-level cache if it fits. With `fp32-scales`,
//! groups with fp32 scales are also timed. The minimum of many times is printed, because other work on the
//! machine only adds to it.

use std::hint::black_box;
use std::time::Instant;

use overdrive::quantization::{GroupScales, QuantizedWeight, Scheme, linear};
use overdrive_benches::{UNCACHED_BYTES, read_bandwidth};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut sizes, mut schemes, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    let mut cold = UNCACHED_BYTES;
    let mut kinds = vec![GroupScales::Half];
    for argument in std::env::args().skip(1) {
        if let Ok(number) = argument.parse::<i64>() {
            rows.push(number);
        } else if let Some((outputs, inputs)) = argument.split_once('x') {
            sizes.push((outputs.parse::<i64>()?, inputs.parse::<i64>()?));
        } else if argument == "hot" {
            cold = 0;
        } else if argument == "fp32-scales" {
            kinds.push(GroupScales::Float);
        } else {
            schemes.push(argument.parse::<Scheme>()?);
        }
    }
    if rows.is_empty() {
        rows = vec![1, 2, 4, 8, 16, 32];
    }
    if sizes.is_empty() {
        sizes = vec![(4096, 4096), (11008, 4096), (4096, 11008)];
        sizes.extend([(768, 768), (2048, 768), (768, 2048), (32000, 768)]);
    }
    if schemes.is_empty() {
        for name in [
            "int8",
            "int4-g128",
            "int4-g32",
            "int4-asym",
            "nf4",
            "nf4-single",
            "fp4",
        ] {
            schemes.push(name.parse()?);
        }
    }
    let _no_grad = tch::no_grad_guard();
    let roof = read_bandwidth() / 1e9;
    println!(
        "memory is read at {roof:.1} GB/s by {} threads",
        tch::get_num_threads()
    );
    for (outputs, inputs) in sizes {
        println!("{outputs} x {inputs}: µs, GB/s of codes and scales, share of the roof");
        let dense = Tensor::randn([outputs, inputs], (Kind::Float, Device::Cpu));
        let all = schemes
            .iter()
            .flat_map(|scheme| kinds.iter().map(move |kind| (*scheme, *kind)));
        for (scheme, scales) in all {
            let make = || match scheme {
                Scheme::Grouped(options) => {
                    QuantizedWeight::quantize_groups(&dense, options, scales)
                }
                _ => QuantizedWeight::quantize(&dense, scheme),
            };
            if scales == GroupScales::Float && !matches!(scheme, Scheme::Grouped(_)) {
                continue;
            }
            let first = make()?;
            let bytes = first.bytes();
            let mut weights = vec![first];
            while weights.len() * bytes < cold {
                weights.push(make()?);
            }
            let bits = weights[0].bits_per_weight();
            print!("  {:13} {bits:5.2} bits", scheme.to_string());
            for &rows in &rows {
                let x = Tensor::randn([rows, inputs], (Kind::Float, Device::Cpu));
                let seconds = shortest(&x, &weights)?;
                let rate = bytes as f64 / seconds / 1e9;
                print!(
                    " | {rows:3}: {:8.1} {rate:5.1} {:3.0}%",
                    seconds * 1e6,
                    100.0 * rate / roof
                );
            }
            println!();
        }
    }
    Ok(())
}

/// Returns the seconds of a matmul: the mean of a round over some weights, the shortest of many rounds.
fn shortest(x: &Tensor, weights: &[QuantizedWeight]) -> Result<f64, Box<dyn std::error::Error>> {
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    let part = weights.len().div_ceil(4).clamp(1, 24);
    for of_round in weights.chunks(part).cycle() {
        let start = Instant::now();
        for weight in of_round {
            let _y = black_box(linear(x, weight, None)?);
        }
        best = best.min(start.elapsed().as_secs_f64() / of_round.len() as f64);
        if begin.elapsed().as_secs_f64() > 0.25 {
            break;
        }
    }
    Ok(best)
}
