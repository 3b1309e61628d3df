//! The time of one layer in a decode step in microseconds, by kind of cache: 12 query heads over 4 key heads of
//! 64 channels, f32, one row.
//!
//! `cargo run --release -p overdrive-benches --bin cache_decode [tokens of the past …]`

use std::time::Instant;

use overdrive::kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, DynamicCache, KvCache, attend_to_view,
};
use tch::{Device, Kind, Tensor};

const STEPS: i64 = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let _no_grad = tch::no_grad_guard();
    let given: Vec<i64> = std::env::args()
        .skip(1)
        .map(|n| n.parse())
        .collect::<Result<_, _>>()?;
    let pasts = if given.is_empty() {
        vec![128, 1024, 4096]
    } else {
        given
    };
    // The layout of a projection: (B, T, H, D), viewed as (B, H, T, D).
    let random = |heads: i64, tokens: i64| -> Result<Tensor, tch::TchError> {
        Tensor::f_randn([1, tokens, heads, 64], (Kind::Float, Device::Cpu))?.f_transpose(1, 2)
    };
    let (query, keys, values) = (random(12, 1)?, random(4, 1)?, random(4, 1)?);

    let mut cache = DynamicCache::with_capacity(1, 20_000);
    let mut micros = f64::INFINITY;
    for _ in 0..200 {
        let begin = Instant::now();
        for _ in 0..100 {
            cache.append(0, &keys, &values)?;
        }
        micros = micros.min(begin.elapsed().as_secs_f64() * 1e6 / 100.0);
    }
    println!("growing: append of one token {micros:.2} µs");

    for past in pasts {
        println!("past of {past} tokens");
        let shape = CacheShape {
            windows: vec![None],
            max_len: Some(past + 2 * STEPS + 1),
            kv_heads: 4,
            window: Some(512),
            sinks: 4,
            ..Default::default()
        };
        for kind in CacheImplementation::ALL {
            let mut cache = kind.build(&shape)?;
            cache.append(0, &random(4, past)?, &random(4, past)?)?;
            let mut attend = |dense: bool| -> Result<f64, Box<dyn std::error::Error>> {
                let options = AttendOptions::default();
                let mut times = Vec::new();
                for _ in 0..STEPS {
                    let begin = Instant::now();
                    let _mixed = if dense {
                        let view = cache.append(0, &keys, &values)?;
                        attend_to_view(&query, &view, &options)?
                    } else {
                        cache.attend(0, &query, &keys, &values, &options)?
                    };
                    times.push(begin.elapsed().as_secs_f64() * 1e6);
                }
                // The lower quartile, because other processes only make a step longer.
                times.sort_by(f64::total_cmp);
                Ok(times[times.len() / 4])
            };
            let own = attend(false)?;
            let dense = attend(true)?;
            let share = cache.bytes_per_token() / (2 * 4 * 64 * 4) as f64;
            println!(
                "  {:14} attend {own:8.1} µs   append and attention {dense:8.1} µs   {:5.3} of the bytes per token",
                kind.name(),
                share
            );
        }
    }
    Ok(())
}
