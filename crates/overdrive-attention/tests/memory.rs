//! Memory grows with the length, not with its square: one test, because the counts are the process's.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_attention::{
    AttentionOptions, Backend, PackedLengths, Window, attention, attention_varlen,
};
use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const HEADS: i64 = 4;
const DIM: i64 = 32;

/// The most bytes above those that were there before, while `run` runs.
fn peak(run: impl FnOnce()) -> u64 {
    let before = memory::stats(CPU).unwrap().allocated_bytes;
    memory::reset_peak(CPU).unwrap();
    run();
    memory::stats(CPU).unwrap().peak_allocated_bytes - before
}

/// Peak of forward and backward over `length` queries and keys.
fn training(length: i64, options: &AttentionOptions<'_>, packed: bool) -> u64 {
    let leaf = || {
        let x = Tensor::randn([1, HEADS, length, DIM], (Kind::Float, CPU));
        x.set_requires_grad(true)
    };
    let (query, key, value) = (leaf(), leaf(), leaf());
    peak(|| {
        let output = if packed {
            let lengths = PackedLengths::from_lengths(&[length / 2; 2], CPU).unwrap();
            let rows = |x: &Tensor| x.squeeze_dim(0).transpose(0, 1);
            let (query, key, value) = (rows(&query), rows(&key), rows(&value));
            attention_varlen(&query, &key, &value, &lengths, options).unwrap()
        } else {
            attention(&query, &key, &value, options).unwrap()
        };
        output.square().sum(Kind::Float).backward();
    })
}

#[test]
fn peak_memory_is_linear_in_the_length_whatever_the_options() {
    overdrive_sys::threads::set_intra_op(2).unwrap();
    let (slopes, sinks) = (
        Tensor::ones([HEADS], (Kind::Float, CPU)),
        Tensor::ones([HEADS], (Kind::Float, CPU)).set_requires_grad(true),
    );
    let plain = AttentionOptions {
        causal: true,
        backend: Backend::Blockwise,
        ..AttentionOptions::default()
    };
    let all = AttentionOptions {
        window: Window {
            left: Some(300),
            right: None,
        },
        sink_tokens: 4,
        softcap: Some(30.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        dropout_p: 0.1,
        ..plain
    };
    for (options, packed) in [(&plain, false), (&all, false), (&all, true)] {
        let peaks = [512, 1024, 2048].map(|length| training(length, options, packed));
        for pair in peaks.windows(2) {
            let growth = pair[1] as f64 / pair[0] as f64;
            assert!(
                growth < 2.05,
                "doubling the length takes {growth} times: {peaks:?}"
            );
        }
        // Scores of T · T in f32 would take 16 MiB a head.
        let row = (HEADS * DIM * 2048 * 4) as u64;
        assert!(
            peaks[2] < 14 * row,
            "{} times the size of a query",
            peaks[2] / row
        );
    }
    let math = AttentionOptions {
        backend: Backend::Math,
        ..plain
    };
    let growth = training(1024, &math, false) as f64 / training(512, &math, false) as f64;
    assert!(growth > 3.5, "the measure sees squares: {growth}");
}
