//! Times forward and backward of the 14M Llama (dim 384, 6 layers, 6 heads, context 256, vocabulary
//! 8192, micro-batch 8, fp32) for each way of executing it. Variants alternate, so that load on the machine
//! affects all of them equally; medians, the best round, and the ratio of the best rounds to the defaults' are
//! printed.
//!
//!     cargo run --release -p overdrive-benches --bin execution_time -- [rounds] [threads]

use std::time::Instant;

use overdrive::transformer::{
    AttentionImplementation, CausalLm, Execution, InitOptions, LabelShift, LlamaConfig,
};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let rounds = arguments.next().transpose()?.unwrap_or(5);
    if let Some(threads) = arguments.next().transpose()? {
        tch::set_num_threads(i32::try_from(threads)?);
    }
    let config = LlamaConfig {
        vocab_size: 8192,
        hidden_size: 384,
        intermediate_size: 1024,
        num_hidden_layers: 6,
        num_attention_heads: 6,
        max_position_embeddings: 256,
        ..LlamaConfig::default()
    };
    let mut model = CausalLm::new(&config.into(), &InitOptions::default())?;
    model.set_requires_grad(true)?;
    let tokens = Tensor::f_randint(8192, [8, 256], (Kind::Int64, Device::Cpu))?;

    let variants = variants();
    let mut times = vec![Vec::new(); variants.len()];
    for round in 0..=rounds {
        for (variant, times) in variants.iter().zip(&mut times) {
            model.set_execution(variant.1.clone());
            let start = Instant::now();
            let loss = model.loss(&tokens, &tokens, LabelShift::Shifted)?.mean()?;
            let forward = start.elapsed();
            loss.f_backward()?;
            let all = start.elapsed();
            for (_, mut parameter) in model.named_parameters() {
                parameter.zero_grad();
            }
            if round > 0 {
                times.push((all.as_secs_f64(), forward.as_secs_f64()));
            }
        }
    }
    let head = ["forward ms", "backward ms", "tokens/s", "best ms", "ratio"];
    println!(
        "{:24}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "", head[0], head[1], head[2], head[3], head[4]
    );
    let mut base = None;
    for ((name, _), mut times) in variants.iter().zip(times) {
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (all, forward) = times[times.len() / 2];
        let best = times[0].0;
        let ratio = best / *base.get_or_insert(best);
        let (forward, backward, best) = (forward * 1e3, (all - forward) * 1e3, best * 1e3);
        let speed = 2048.0 / all;
        println!("{name:24}{forward:12.1}{backward:12.1}{speed:12.0}{best:12.1}{ratio:12.3}");
    }
    Ok(())
}

fn variants() -> Vec<(&'static str, Execution)> {
    let with = |change: fn(&mut Execution)| {
        let mut execution = Execution::default();
        change(&mut execution);
        execution
    };
    vec![
        ("default", Execution::default()),
        ("unfused", with(|e| e.fused_kernels = false)),
        (
            "sdpa",
            with(|e| e.attention = AttentionImplementation::Sdpa),
        ),
        (
            "eager",
            with(|e| e.attention = AttentionImplementation::Eager),
        ),
        (
            "unfused, eager",
            with(|e| {
                e.fused_kernels = false;
                e.attention = AttentionImplementation::Eager;
            }),
        ),
    ]
}
