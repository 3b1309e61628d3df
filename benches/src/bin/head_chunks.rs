//! The time of a fused head, forward and backward, for several chunk sizes, beside libtorch's `linear` and
//! `cross_entropy_loss`: the source of the default of `chunk_rows`.
//!
//! `cargo run --release -p overdrive-benches --bin head_chunks`
#![allow(clippy::print_stdout, reason = "the output is the point")]

use std::error::Error;
use std::num::NonZeroUsize;
use std::time::Instant;

use overdrive::fused::{LinearCrossEntropyOptions, linear_cross_entropy};
use tch::{Device, Kind, Reduction, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The numbers of rows, channels, classes and rounds.
const SHAPES: [(i64, i64, i64, usize); 3] = [
    (2048, 384, 8192, 9),
    (1024, 768, 50_257, 3),
    (1024, 512, 151_936, 1),
];

fn main() -> Result<(), Box<dyn Error>> {
    for (rows, width, classes, rounds) in SHAPES {
        let hidden = Tensor::f_randn([rows, width], F32)?.f_set_requires_grad(true)?;
        let weight = (Tensor::f_randn([classes, width], F32)? * 0.02).f_set_requires_grad(true)?;
        let labels = Tensor::f_randint(classes, [rows], (Kind::Int64, Device::Cpu))?;
        // None: libtorch; Some: a chunk size, where None is the default size.
        let sizes = [64, 128, 256, 512, 1024].map(NonZeroUsize::new);
        let variants: Vec<_> = [None, Some(None)]
            .into_iter()
            .chain(sizes.map(Some))
            .collect();
        let mut times = vec![Vec::new(); variants.len()];
        // Alternating, because the speed of a shared machine drifts; the first round warms up.
        for round in 0..=rounds {
            for (variant, times) in variants.iter().zip(&mut times) {
                let start = Instant::now();
                let loss = match *variant {
                    None => hidden
                        .f_linear(&weight, None::<&Tensor>)?
                        .f_cross_entropy_loss(
                            &labels,
                            None::<&Tensor>,
                            Reduction::Mean,
                            -100,
                            0.0,
                        )?,
                    Some(chunk_rows) => {
                        let options = LinearCrossEntropyOptions {
                            chunk_rows,
                            ..Default::default()
                        };
                        linear_cross_entropy(&hidden, &weight, &labels, &options)?.loss
                    }
                };
                loss.f_backward()?;
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
                overdrive::sys::grad::clear(&hidden)?;
                overdrive::sys::grad::clear(&weight)?;
            }
        }
        let mebibytes = (rows * classes * 4) >> 20;
        println!(
            "{rows} rows of {width}, {classes} classes, logits of {mebibytes} MiB: median, best"
        );
        for (variant, mut times) in variants.into_iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let name = match variant {
                None => "libtorch".to_owned(),
                Some(None) => "the default".to_owned(),
                Some(Some(rows)) => format!("{rows} rows"),
            };
            println!(
                "  {name:>12} {:9.1} {:9.1} ms",
                times[times.len() / 2],
                times[0]
            );
        }
    }
    Ok(())
}
