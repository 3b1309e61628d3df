//! The results of a request do not depend on the requests beside it: by default for weights whose activations are
//! integers, with the switch for all. A process of its own, because the switch belongs to the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ops::ControlFlow;

use overdrive_generation::{
    Engine, EngineConfig, GenerateOptions, GenerationConfig, Request, TokenLogprobs,
    generate_with_options, set_batch_invariant,
};
use overdrive_kv_cache::KvCacheDtype;
use overdrive_transformer::{
    CausalLm, DeltaNetConfig, ExpertsConfig, InitOptions, LlamaConfig, LlamaFamily, MlaConfig,
    QuantizeOptions,
};

/// The tokens of a continuation and the bits of their log-probabilities.
type Bits = Vec<(i64, u64)>;

/// Returns a model whose widths are no multiples of 128, with weights in `scheme`, and the head too unless it is dense.
fn model(scheme: Option<&str>, dense_head: bool, window: Option<i64>) -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 200,
        hidden_size: 96,
        intermediate_size: 160,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: Some(2),
        max_position_embeddings: 256,
        sliding_window: window,
        initializer_range: 0.1,
        ..LlamaConfig::default()
    };
    let mut model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    if let Some(scheme) = scheme {
        let scheme = scheme.parse().unwrap();
        let options = QuantizeOptions::new(scheme);
        let options = match dense_head {
            true => options,
            false => options.with_head(scheme),
        };
        model.quantize(&options).unwrap();
    }
    model
}

/// Returns a model with latent attention and a mixture of experts.
fn deepseek(scheme: Option<&str>) -> CausalLm {
    let defaults = LlamaConfig::of(LlamaFamily::DeepseekV3);
    let config = LlamaConfig {
        vocab_size: 200,
        hidden_size: 96,
        intermediate_size: 160,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: None,
        max_position_embeddings: 256,
        initializer_range: 0.1,
        mla: defaults.mla.clone().map(|mla| MlaConfig {
            q_lora_rank: Some(48),
            kv_lora_rank: 40,
            qk_nope_head_dim: 12,
            qk_rope_head_dim: 8,
            v_head_dim: 16,
            ..mla
        }),
        experts: defaults.experts.clone().map(|experts| ExpertsConfig {
            num_experts: 8,
            num_experts_per_tok: 2,
            moe_intermediate_size: 64,
            n_group: Some(4),
            topk_group: Some(2),
            first_k_dense_replace: 1,
            ..experts
        }),
        ..defaults
    };
    let mut model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    if let Some(scheme) = scheme {
        let options = QuantizeOptions::new(scheme.parse().unwrap());
        model.quantize(&options).unwrap();
    }
    model
}

/// Returns a model with layers of linear attention.
fn hybrid(scheme: Option<&str>) -> CausalLm {
    let defaults = LlamaConfig::of(LlamaFamily::Qwen35);
    let config = LlamaConfig {
        vocab_size: 200,
        hidden_size: 96,
        intermediate_size: 160,
        num_hidden_layers: 4,
        num_attention_heads: 6,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        partial_rotary_factor: 0.5,
        max_position_embeddings: 256,
        initializer_range: 0.1,
        delta_net: defaults.delta_net.clone().map(|sizes| DeltaNetConfig {
            linear_key_head_dim: 16,
            linear_value_head_dim: 24,
            linear_num_key_heads: 2,
            linear_num_value_heads: 4,
            ..sizes
        }),
        ..defaults
    };
    let mut model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    if let Some(scheme) = scheme {
        let scheme = scheme.parse().unwrap();
        let options = QuantizeOptions::new(scheme).with_head(scheme);
        model.quantize(&options).unwrap();
    }
    model
}

/// Returns prompts of several lengths, of which two have a common beginning.
fn prompts() -> Vec<Vec<i64>> {
    let lengths = [3, 70, 1, 33, 8, 71];
    let prompt = |(index, length): (usize, &i64)| {
        let first = if *length >= 70 { 1 } else { index as i64 };
        (0..*length)
            .map(|at| (first * 31 + at * 17) % 200)
            .collect()
    };
    lengths.iter().enumerate().map(prompt).collect()
}

fn options(chunk: Option<usize>) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(9),
        logprobs: Some(1),
        prefill_chunk_size: chunk,
        ..GenerationConfig::default()
    }
}

fn bits(tokens: &[i64], logprobs: &[TokenLogprobs]) -> Bits {
    assert_eq!(tokens.len(), logprobs.len());
    let bits = logprobs.iter().map(|one| one.logprob.to_bits());
    tokens.iter().copied().zip(bits.map(u64::from)).collect()
}

fn by_engine(model: &CausalLm, prompts: &[Vec<i64>], budget: usize) -> Vec<Bits> {
    by_engine_with(model, prompts, budget, &options(None))
}

fn by_engine_with(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    budget: usize,
    options: &GenerationConfig,
) -> Vec<Bits> {
    by_engine_over(KvCacheDtype::Auto, model, prompts, budget, options)
}

fn by_engine_over(
    dtype: KvCacheDtype,
    model: &CausalLm,
    prompts: &[Vec<i64>],
    budget: usize,
    options: &GenerationConfig,
) -> Vec<Bits> {
    let config = EngineConfig {
        max_num_seqs: budget.min(64),
        max_num_batched_tokens: Some(budget),
        num_blocks: Some(128),
        kv_cache_dtype: dtype,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, config).unwrap();
    for prompt in prompts {
        engine
            .submit(Request::new(prompt.clone(), options.clone()))
            .unwrap();
    }
    let outcomes = engine.run_to_end().unwrap();
    let each = outcomes.into_iter().map(|(_, outcome)| {
        let completion = outcome.unwrap().remove(0);
        bits(&completion.tokens, &completion.logprobs.unwrap())
    });
    each.collect()
}

/// Returns the tokens of prompts, without the first, and the bits of their log-probabilities.
fn scored_by_engine(model: &CausalLm, prompts: &[Vec<i64>], budget: usize) -> Vec<Bits> {
    let config = EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: Some(budget),
        num_blocks: Some(64),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, config).unwrap();
    for prompt in prompts {
        let request = Request::new(prompt.clone(), options(None)).with_prompt_logprobs(0);
        engine.submit(request).unwrap();
    }
    let outcomes = engine.run_to_end().unwrap();
    let each = outcomes.into_iter().zip(prompts);
    let each = each.map(|((_, outcome), prompt)| {
        let scores = outcome.unwrap().remove(0).prompt_logprobs.unwrap();
        let scores: Vec<_> = scores.iter().skip(1).flatten().cloned().collect();
        bits(&prompt[1..], &scores)
    });
    each.collect()
}

fn by_generate(model: &CausalLm, prompts: &[Vec<i64>], chunk: Option<usize>) -> Vec<Bits> {
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let none = GenerateOptions::default();
    let output = generate_with_options(model, prompts, &options(chunk), &none, go_on).unwrap();
    let logprobs = output.logprobs.as_ref().unwrap();
    let each = logprobs.iter().enumerate();
    each.map(|(row, logprobs)| bits(output.new_tokens(row), logprobs))
        .collect()
}

/// Asserts that `prompts` have the same bits alone and together, in steps and chunks of any size.
fn assert_invariant(model: &CausalLm, prompts: &[Vec<i64>], what: &str) {
    assert!(tch::no_grad(|| model.is_batch_invariant()), "{what}");
    let alone: Vec<Bits> = prompts
        .iter()
        .flat_map(|prompt| by_engine(model, std::slice::from_ref(prompt), 512))
        .collect();
    for budget in [8, 20, 512] {
        let together = by_engine(model, prompts, budget);
        assert_eq!(together, alone, "{what}, steps of {budget}");
    }
    // Proposed tokens are verified in steps of several rows.
    let lookup = GenerationConfig {
        prompt_lookup_num_tokens: Some(4),
        ..options(None)
    };
    for budget in [8, 512] {
        let together = by_engine_with(model, prompts, budget, &lookup);
        assert_eq!(together, alone, "{what}, steps of {budget} with proposals");
    }
    // A continuation has the same bits when it is scored as part of a prompt, in any chunks.
    let texts: Vec<Vec<i64>> = prompts
        .iter()
        .zip(&alone)
        .map(|(prompt, new)| prompt.iter().copied().chain(new.iter().map(|one| one.0)))
        .map(Iterator::collect)
        .collect();
    for budget in [8, 20, 512] {
        let scored = scored_by_engine(model, &texts, budget);
        for (own, new) in scored.iter().zip(&alone) {
            let end = own.len() - new.len();
            assert_eq!(own[end..], new[..], "{what}, steps of {budget}");
        }
    }
    for chunk in [None, Some(1), Some(5), Some(64)] {
        for (prompt, alone) in prompts.iter().zip(&alone) {
            let found = by_generate(model, std::slice::from_ref(prompt), chunk);
            assert_eq!(&found[0], alone, "{what}, chunks of {chunk:?}");
        }
    }
}

/// As [`assert_invariant`] for the engine over a cache of codes, whose scales belong to one token each. The results are
/// near those over a cache of elements.
fn assert_invariant_over(dtype: KvCacheDtype, model: &CausalLm, prompts: &[Vec<i64>]) {
    let over = |dtype, prompts: &[Vec<i64>], budget, options| {
        by_engine_over(dtype, model, prompts, budget, options)
    };
    let plain = options(None);
    let alone: Vec<Bits> = prompts
        .iter()
        .flat_map(|prompt| over(dtype, std::slice::from_ref(prompt), 512, &plain))
        .collect();
    let lookup = GenerationConfig {
        prompt_lookup_num_tokens: Some(4),
        ..options(None)
    };
    for budget in [8, 20, 512] {
        for options in [&plain, &lookup] {
            let together = over(dtype, prompts, budget, options);
            assert_eq!(together, alone, "{dtype}, steps of {budget}");
        }
    }
    let exact = over(KvCacheDtype::Auto, prompts, 512, &plain);
    assert_ne!(exact, alone, "{dtype}");
    for (exact, alone) in exact.iter().zip(&alone) {
        let (exact, alone) = (f64::from_bits(exact[0].1), f64::from_bits(alone[0].1));
        assert!((exact - alone).abs() < 0.05, "{dtype}: {exact} {alone}");
    }
}

#[test]
fn a_request_has_the_same_bits_alone_and_beside_others_in_any_chunks() {
    tch::set_num_threads(2);
    let prompts = prompts();
    for scheme in ["int8", "int4-g32", "int4-g32-asym", "nf4-b32"] {
        let model = model(Some(scheme), false, None);
        assert_invariant(&model, &prompts, scheme);
    }
    for dtype in [KvCacheDtype::Int8, KvCacheDtype::Fp8] {
        assert_invariant_over(dtype, &model(Some("int8"), false, Some(20)), &prompts);
    }
    assert_invariant(&hybrid(Some("int8")), &prompts, "linear attention");
    // More sequences than rows that the dense head multiplies at a time.
    let many: Vec<Vec<i64>> = (0..40).map(|first| vec![first, 7, 3 * first]).collect();
    let dense_head = model(Some("int8"), true, None);
    assert_invariant(&dense_head, &many, "int8 with a dense head");
    for scheme in [None, Some("int8-weight"), Some("fp8"), Some("llm-int8")] {
        let model = model(scheme, false, None);
        assert!(!tch::no_grad(|| model.is_batch_invariant()), "{scheme:?}");
    }
    for scheme in [None, Some("int8")] {
        let model = deepseek(scheme);
        assert!(!tch::no_grad(|| model.is_batch_invariant()), "{scheme:?}");
    }

    set_batch_invariant(true);
    for (scheme, window) in [
        (None, None),
        (None, Some(20)),
        (Some("int8-weight"), None),
        (Some("fp8"), None),
        (Some("nf4"), None),
    ] {
        let model = model(scheme, false, window);
        assert_invariant(&model, &prompts, &format!("{scheme:?} {window:?}"));
    }
    for scheme in [None, Some("nf4")] {
        let name = format!("linear attention {scheme:?}");
        assert_invariant(&hybrid(scheme), &prompts, &name);
    }
    for scheme in [None, Some("int8")] {
        assert_invariant(
            &deepseek(scheme),
            &prompts,
            &format!("deepseek_v3 {scheme:?}"),
        );
    }
}
