//! The time of a mixture of experts: tokens sorted by expert (`overdrive-transformer`) against the loop over all
//! experts, each of which computes every token and masks what was not chosen, and against the loop of transformers'
//! eager implementation in libtorch's operators, which gathers the tokens of each expert and adds its outputs by index.
//! The three run in turn in one process on one layer of a model without attention to speak of; the time of the same
//! model with a feed-forward block of 8 features is subtracted. `pytorch/experts.py` times transformers itself.
//!
//! `cargo run --release -p overdrive-benches --bin experts`

use std::collections::HashMap;
use std::time::Instant;

use clap::Parser;
use overdrive::transformer::{
    CausalLm, ExpertsConfig, ForwardInput, InitOptions, LlamaConfig, LlamaFamily,
};
use overdrive_benches::median;
use tch::{Device, Kind, Tensor};

/// Times a layer of experts
#[derive(Parser)]
struct Flags {
    /// Width of the hidden states
    #[arg(long, default_value_t = 512)]
    hidden: i64,
    /// Inner width of an expert
    #[arg(long, default_value_t = 384)]
    inner: i64,
    /// Number of experts
    #[arg(long, default_value_t = 32)]
    experts: i64,
    /// Number of experts of a token
    #[arg(long, default_value_t = 4)]
    per_token: i64,
    /// Number of tokens
    #[arg(long, default_value_t = 512)]
    tokens: i64,
    /// Number of rounds of each kind
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let flags = Flags::parse();
    for training in [false, true] {
        compare(&flags, training)?;
    }
    Ok(())
}

fn compare(flags: &Flags, training: bool) -> Result<()> {
    let model = model(flags, true)?;
    let base = self::model(flags, false)?;
    for model in [&model, &base] {
        model.set_requires_grad(training)?;
    }
    let weights: HashMap<String, Tensor> = model.named_parameters().into_iter().collect();
    let ids = Tensor::f_arange(flags.tokens, (Kind::Int64, Device::Cpu))?.f_view([1, -1])?;
    let x = Tensor::f_randn([flags.tokens, flags.hidden], (Kind::Float, Device::Cpu))?;
    let x = x.f_set_requires_grad(training)?;
    let whole =
        |model: &CausalLm| -> Result<Tensor> { Ok(model.hidden_states(ForwardInput::new(&ids))?) };
    let names = ["sorted by expert", "eager loop", "masked loop"];
    let mut times = [const { Vec::new() }; 3];
    // The first round of each warms up.
    for round in 0..=flags.rounds {
        let attention = time(training, || whole(&base))?;
        let of_round = [
            time(training, || whole(&model))? - attention,
            time(training, || eager(flags, &weights, &x))?,
            time(training, || masked(flags, &weights, &x))?,
        ];
        if round > 0 {
            for (times, time) in times.iter_mut().zip(of_round) {
                times.push(time);
            }
        }
    }
    let pass = if training {
        "forward and backward"
    } else {
        "forward"
    };
    let medians = times.map(median);
    println!(
        "{pass}, {} tokens, {} of {} experts of {} x {}",
        flags.tokens, flags.per_token, flags.experts, flags.hidden, flags.inner
    );
    for (name, median) in names.iter().zip(medians) {
        println!(
            "  {name:17} {:8.2} ms, {:5.2} times that of the first",
            1e3 * median,
            median / medians[0]
        );
    }
    Ok(())
}

/// Returns a model of one layer, with experts or with next to no feed-forward block.
fn model(flags: &Flags, experts: bool) -> Result<CausalLm> {
    let family = match experts {
        true => LlamaFamily::Mixtral,
        false => LlamaFamily::Mistral,
    };
    let defaults = LlamaConfig::of(family);
    let config = LlamaConfig {
        // Every token is another one.
        vocab_size: flags.tokens,
        hidden_size: flags.hidden,
        intermediate_size: if experts { flags.inner } else { 8 },
        num_hidden_layers: 1,
        num_attention_heads: 1,
        num_key_value_heads: Some(1),
        head_dim: Some(8),
        experts: defaults.experts.clone().map(|defaults| ExpertsConfig {
            num_experts: flags.experts,
            num_experts_per_tok: flags.per_token,
            ..defaults
        }),
        ..defaults
    };
    // So wide that the tokens choose different experts.
    let config = LlamaConfig {
        initializer_range: 0.2,
        ..config
    };
    Ok(CausalLm::new(&config.into(), &InitOptions::default())?)
}

/// Returns the experts of each token and their weights.
fn route(flags: &Flags, weights: &HashMap<String, Tensor>, x: &Tensor) -> Result<(Tensor, Tensor)> {
    let router = &weights["model.layers.0.block_sparse_moe.gate.weight"];
    let scores = x
        .f_linear(router, None::<&Tensor>)?
        .f_softmax(-1, Kind::Float)?;
    let (chosen, experts) = scores.f_topk(flags.per_token, -1, true, true)?;
    let sum = chosen.f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Float)?;
    Ok((chosen.f_div(&sum)?, experts))
}

fn expert(weights: &HashMap<String, Tensor>, expert: i64, x: &Tensor) -> Result<Tensor> {
    let part = |name: &str| {
        &weights[&format!("model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight")]
    };
    let gate = x.f_linear(part("w1"), None::<&Tensor>)?.f_silu()?;
    let up = x.f_linear(part("w3"), None::<&Tensor>)?;
    Ok(gate.f_mul(&up)?.f_linear(part("w2"), None::<&Tensor>)?)
}

/// Computes every expert for every token.
fn masked(flags: &Flags, weights: &HashMap<String, Tensor>, x: &Tensor) -> Result<Tensor> {
    let (factors, experts) = route(flags, weights, x)?;
    let mut y = x.f_zeros_like()?;
    for index in 0..flags.experts {
        let mask = experts.f_eq(index)?.f_to_kind(Kind::Float)?;
        let factor =
            factors
                .f_mul(&mask)?
                .f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Float)?;
        y = y.f_add(&expert(weights, index, x)?.f_mul(&factor)?)?;
    }
    Ok(y)
}

/// Computes each expert for its tokens, which it gathers, and adds its outputs by index.
fn eager(flags: &Flags, weights: &HashMap<String, Tensor>, x: &Tensor) -> Result<Tensor> {
    let (factors, experts) = route(flags, weights, x)?;
    let mut y = x.f_zeros_like()?;
    for index in 0..flags.experts {
        let places = experts.f_eq(index)?.f_nonzero()?;
        if places.size()[0] == 0 {
            continue;
        }
        let (tokens, slots) = (places.f_select(1, 0)?, places.f_select(1, 1)?);
        let rows = x.f_index_select(0, &tokens)?;
        let factor = factors
            .f_index(&[Some(&tokens), Some(&slots)])?
            .f_unsqueeze(-1)?;
        let output = expert(weights, index, &rows)?.f_mul(&factor)?;
        y = y.f_index_add(0, &tokens, &output)?;
    }
    Ok(y)
}

/// Returns the seconds of one pass, with backward in training.
fn time(training: bool, mut forward: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    let begin = Instant::now();
    if training {
        forward()?.f_sum(Kind::Float)?.f_backward()?;
    } else {
        let _no_grad = tch::no_grad_guard();
        drop(forward()?);
    }
    Ok(begin.elapsed().as_secs_f64())
}
