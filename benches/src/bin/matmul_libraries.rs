//! Prints the speed of fp32 matmuls by libtorch's default library and by oneDNN, in GFLOP/s, for the three
//! matmuls of a linear layer, and the one that the stored table of this processor chooses: `cargo run --release -p overdrive-benches --bin matmul_libraries`.

use std::time::Instant;

use overdrive::sys::Result;
use overdrive::sys::gemm::{GemmLibrary, library_for, mm_into, set_library};
use tch::{Device, Kind, Tensor};

fn main() -> Result<()> {
    let rows = 2048;
    println!(
        "{:>16} {:>8} {:>10} {:>10} {:>6} {:>8}",
        "in x out", "product", "default", "oneDNN", "ratio", "chosen"
    );
    for (input, output) in [
        (384, 384),
        (384, 1152),
        (384, 2048),
        (1024, 384),
        (384, 8192),
    ] {
        let random = |n, m| Tensor::f_randn([n, m], (Kind::Float, Device::Cpu));
        let (x, w, dy) = (
            random(rows, input)?,
            random(output, input)?,
            random(rows, output)?,
        );
        let products = [
            ("y", random(rows, output)?, x.shallow_clone(), w.f_tr()?),
            (
                "dx",
                random(rows, input)?,
                dy.shallow_clone(),
                w.shallow_clone(),
            ),
            ("dw", random(output, input)?, dy.f_tr()?, x.shallow_clone()),
        ];
        for (name, out, left, right) in &products {
            let speed = |library| -> Result<f64> {
                set_library(library);
                mm_into(out, left, right, false)?;
                let mut best = f64::INFINITY;
                for _ in 0..15 {
                    let start = Instant::now();
                    mm_into(out, left, right, false)?;
                    best = best.min(start.elapsed().as_secs_f64());
                }
                Ok(2.0 * (rows * input * output) as f64 / best / 1e9)
            };
            set_library(GemmLibrary::Auto);
            let chosen = library_for(left, right)?;
            let (default, one_dnn) = (speed(GemmLibrary::Torch)?, speed(GemmLibrary::OneDnn)?);
            println!(
                "{:>16} {name:>8} {default:>10.0} {one_dnn:>10.0} {:>5.2}x {:>8}",
                format!("{input} x {output}"),
                one_dnn / default,
                format!("{chosen:?}")
            );
        }
    }
    Ok(())
}
