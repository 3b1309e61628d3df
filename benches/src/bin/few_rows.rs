//! The speed at which a matmul of a few rows reads its weights, beside libtorch's operator: the source of the
//! limit in `crates/overdrive-fused/src/linear.rs`.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin few_rows
//! ```

use std::time::Instant;

use overdrive_benches::median;
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let _no_grad = tch::no_grad_guard();
    // More weights than fit into the cache, read one after the other as a model reads its layers.
    for (outputs, inputs) in [(4096, 768), (768, 2048)] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let bytes = outputs * inputs * kind.elt_size_in_bytes() as i64;
            let count = (400 << 20) / bytes;
            let weights: Vec<Tensor> = (0..count)
                .map(|_| Tensor::f_randn([outputs, inputs], (kind, Device::Cpu)))
                .collect::<Result<_, _>>()?;
            println!("{kind:?} {outputs} x {inputs}: GB/s of weights (libtorch's)");
            for rows in [1, 2, 3, 4, 8, 12, 16, 24, 32] {
                let x = Tensor::f_randn([rows, inputs], (kind, Device::Cpu))?;
                let rate = |product: &dyn Fn(&Tensor) -> Tensor| {
                    let seconds: Vec<f64> = (0..5)
                        .map(|_| {
                            let start = Instant::now();
                            for weight in &weights {
                                let _y = product(weight);
                            }
                            start.elapsed().as_secs_f64()
                        })
                        .collect();
                    (bytes * count) as f64 / median(seconds) / 1e9
                };
                let ours =
                    rate(&|w| overdrive::fused::linear(&x, w, None).expect("the shapes fit"));
                let theirs = rate(&|w| x.f_linear(w, None::<&Tensor>).expect("the shapes fit"));
                println!("{rows:>4} rows {ours:6.1} ({theirs:5.1})");
            }
        }
    }
    Ok(())
}
