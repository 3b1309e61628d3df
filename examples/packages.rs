//! Runs a package compiled by `torch.export` and AOTInductor and, with `--compare`, Overdrive's model from the same
//! folder.
//!
//! ```text
//! python3 crates/overdrive-packages/python/compile_package.py --model runs/tiny/model \
//!     --output tiny.pt2 --models logits,prefill,decode
//! cargo run --release -p overdrive-examples --features packages --example packages -- \
//!     --package tiny.pt2 --model runs/tiny/model --compare
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use overdrive::kv_cache::DynamicCache;
use overdrive::packages::{CompiledDecoder, LoadOptions, ReplaceOptions};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::sys::threads;
use overdrive::transformer::{
    AttentionImplementation, CausalLm, Execution, ForwardInput, LoadOptions as ModelOptions, Logits,
};
use overdrive_examples::GreedySpeed;
use tch::{Device, Kind, Tensor};

/// Runs a compiled package
///
/// Prints one JSON line per model: the median tokens/s of prefill and decode.
#[derive(Parser)]
struct Flags {
    /// Package that contains the models prefill and decode
    #[arg(long)]
    package: PathBuf,
    /// Hugging Face folder that the package was compiled from, or its name on the hub
    #[arg(long)]
    model: PathBuf,
    /// Number of threads inside one operator [default: libtorch's choice]
    #[arg(long)]
    threads: Option<usize>,
    /// Also run Overdrive's model, eager and fused, and compare the tokens
    #[arg(long)]
    compare: bool,
    /// Batch size
    #[arg(long, default_value_t = 1)]
    batch: i64,
    /// Number of tokens in a prompt
    #[arg(long, default_value_t = 128)]
    prompt: i64,
    /// Number of generated tokens
    #[arg(long, default_value_t = 64)]
    new_tokens: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    // Makes libtorch's operators flush subnormal numbers too: each one costs a hundred cycles on Intel's processors.
    set_flush_denormals(true);
    if let Some(count) = flags.threads {
        threads::set_intra_op(count)?;
    }
    let _no_grad = tch::no_grad_guard();
    let mut model = CausalLm::from_pretrained(
        overdrive_examples::local_model(&flags.model)?,
        &ModelOptions::default(),
    )?;
    let count = Tensor::f_arange(flags.batch * flags.prompt, (Kind::Int64, Device::Cpu))?;
    let vocabulary = model.config().vocab_size();
    let prompt = (count * 104_729 + 13).f_remainder(vocabulary)?;
    let prompt = prompt.f_view([flags.batch, flags.prompt])?;

    let mut decoder = CompiledDecoder::load(&flags.package, flags.batch, &LoadOptions::default())?;
    // The package's two models and Overdrive's model share one set of weights in memory.
    let share = ReplaceOptions {
        share: true,
        ..ReplaceOptions::default()
    };
    for compiled in decoder.models() {
        compiled.replace_constants(&model.named_parameters(), share)?;
    }
    let greedy = GreedySpeed {
        new_tokens: flags.new_tokens,
        rounds: flags.rounds,
    };
    let expected = greedy.measure("package", &prompt, |tokens, first| {
        if first {
            decoder.reset();
        }
        Ok(decoder.prefill(tokens)?)
    })?;
    if !flags.compare {
        return Ok(());
    }
    for (side, fused) in [("operators", false), ("fused", true)] {
        let mut execution = Execution::default();
        if !fused {
            execution.fused_kernels = false;
            execution.attention = AttentionImplementation::Sdpa;
        }
        model.set_execution(execution);
        let mut cache = DynamicCache::new(model.num_layers());
        let found = greedy.measure(side, &prompt, |tokens, first| {
            if first {
                cache = DynamicCache::new(model.num_layers());
            }
            let input = ForwardInput::new(tokens).with_logits(Logits::Last);
            Ok(model.forward(input.with_cache(&mut cache))?)
        })?;
        let same = found
            .iter()
            .zip(&expected)
            .take_while(|(a, b)| a == b)
            .count();
        ensure!(
            same == expected.len(),
            "{side}: token {same} differs from that of the package"
        );
    }
    Ok(())
}
