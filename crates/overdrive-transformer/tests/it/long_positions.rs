//! Positions far beyond the trained context, scalings and windows, against transformers, on the fixtures of
//! `fixtures/gen_checkpoints.py`.

use crate::common::{
    CASES, copy_of, dynamic_cache, edit_config, expected, load, max_difference, max_magnitude,
};
use overdrive_kv_cache::{DynamicCache, KvCache, KvView};
use overdrive_transformer::{
    AttentionImplementation, CausalLm, Execution, ForwardInput, InitOptions, LlamaConfig,
    LlamaFamily, Logits, ModelConfig,
};
use tch::{Device, Kind, Tensor};

/// The fixture, with a context that takes all positions.
fn far(case: &str) -> CausalLm {
    let dir = copy_of(case);
    // The fixtures' contexts are small. In all but dynamic scaling, which brings its own, the number is a
    // limit and nothing else.
    if !case.contains("dynamic") {
        edit_config(dir.path(), |config| {
            config.insert("max_position_embeddings".to_owned(), 200_000.into());
        });
    }
    CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap()
}

#[test]
fn logits_at_positions_around_100_000_equal_transformers() {
    for case in CASES.into_iter().filter(|case| !case.contains("gpt2")) {
        let (mut model, want) = (far(case), expected(case));
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            let input =
                ForwardInput::new(&want["input_ids"]).with_position_ids(&want["long_position_ids"]);
            let got = model.forward(input).unwrap();
            let difference = max_difference(&got, &want["long_logits"]);
            println!(
                "{case:18} fused {fused}: {difference:.1e} of {:.1}",
                max_magnitude(&got)
            );
            assert!(difference < 1e-5, "{case}: {difference}");
        }
    }
}

#[test]
fn greedy_tokens_over_a_cache_equal_those_of_transformers_past_the_original_context() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let greedy = &want["greedy"];
        let mut cache = dynamic_cache(&model);
        let mut next = greedy.narrow(1, 0, 8);
        for position in 8..greedy.size()[1] {
            let input = ForwardInput::new(&next)
                .with_cache(cache.as_mut())
                .with_logits(Logits::Last);
            let logits = model.forward(input).unwrap();
            // The fixture was asked for at least so many tokens: the end-of-sequence token is excluded.
            let _same = logits.narrow(-1, 127, 1).fill_(f64::NEG_INFINITY);
            next = logits.argmax(-1, false);
            assert_eq!(next, greedy.narrow(1, position, 1), "{case} at {position}");
        }
    }
}

#[test]
fn a_scaling_gives_the_context_that_it_was_made_for() {
    let context = |text: &str| {
        ModelConfig::from_json(text)
            .unwrap()
            .max_position_embeddings()
    };
    let config = |scaling: &str| {
        format!(
            r#"{{"model_type": "qwen2", "max_position_embeddings": 1000, "rope_scaling": {scaling}}}"#
        )
    };
    assert_eq!(context(&config("null")), 1000);
    assert_eq!(
        context(&config(r#"{"type": "linear", "factor": 4.0}"#)),
        1000
    );
    assert_eq!(
        context(&config(r#"{"type": "dynamic", "factor": 4.0}"#)),
        4000
    );
    let yarn = r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}"#;
    assert_eq!(context(&config(yarn)), 2000);
    assert_eq!(context(&config(r#"{"type": "yarn", "factor": 8.0}"#)), 8000);
    assert_eq!(
        load("llama_dynamic_rope")
            .config()
            .max_position_embeddings(),
        256
    );
}

#[test]
fn windows_and_frequencies_are_returned_by_layer() {
    let gemma3 = load("gemma3");
    assert_eq!(gemma3.layer_windows(), [Some(5), None, Some(5)]);
    let local = gemma3.rotary_inverse_frequencies(0).unwrap();
    let global = gemma3.rotary_inverse_frequencies(1).unwrap();
    assert_eq!(local, gemma3.rotary_inverse_frequencies(2).unwrap());
    assert_eq!(gemma3.rotary_inverse_frequencies(3), None);
    assert_eq!((local.len(), global.len()), (8, 8));
    for i in 0..8 {
        let exponent = -f64::from(i) / 8.0;
        let close = |got: f32, want: f64| (f64::from(got) / want - 1.0).abs() < 1e-6;
        assert!(close(local[i as usize], 1e4f64.powf(exponent)));
        assert!(close(global[i as usize], 1e6f64.powf(exponent) / 8.0));
    }
    assert_eq!(load("gemma2").layer_windows(), [Some(5), None, Some(5)]);
    assert_eq!(load("mistral").layer_windows(), [Some(5), Some(5)]);
    assert_eq!(load("qwen2_sliding").layer_windows(), [None, Some(4)]);
    assert_eq!(load("llama_gqa").layer_windows(), [None, None]);
    let gpt2 = load("gpt2");
    assert_eq!(gpt2.layer_windows(), [None, None]);
    assert_eq!(gpt2.rotary_inverse_frequencies(0), None);
}

#[test]
fn gemma_configurations_of_transformers_4_are_read() {
    let parse = |text: &str| match ModelConfig::from_json(text).unwrap() {
        ModelConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    };
    let third = parse(
        r#"{"model_type": "gemma3_text", "rope_theta": 1000000.0, "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 7,
            "sliding_window": 512, "sliding_window_pattern": 3, "attn_logit_softcapping": null}"#,
    );
    let model = |config: &LlamaConfig| {
        let small = LlamaConfig {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 8,
            head_dim: Some(4),
            ..config.clone()
        };
        CausalLm::new(&small.into(), &InitOptions::default()).unwrap()
    };
    let windows = model(&third).layer_windows();
    let slides: Vec<bool> = windows.iter().map(Option::is_some).collect();
    assert_eq!(slides, [true, true, false, true, true, false, true]);
    assert_eq!(windows[0], Some(512));
    assert_eq!((third.rope_theta, third.rope_local_base_freq), (1e6, 2e4));
    // Written and read again, it is the same.
    let written = serde_json::Value::Object(ModelConfig::from(third.clone()).to_json());
    assert_eq!(parse(&written.to_string()), third);

    let plain = parse(r#"{"model_type": "gemma3_text"}"#);
    let full = |config: &LlamaConfig| -> Vec<usize> {
        let windows = model(config).layer_windows();
        let full = windows.iter().enumerate().filter(|(_, w)| w.is_none());
        full.map(|(layer, _)| layer).collect()
    };
    assert_eq!(full(&plain), [5, 11, 17, 23]);
    let second = LlamaConfig::of(LlamaFamily::Gemma2);
    assert_eq!(
        full(&second),
        (0..13).map(|i| 2 * i + 1).collect::<Vec<_>>()
    );

    let refusal = |text: &str| ModelConfig::from_json(text).unwrap_err().to_string();
    let message = refusal(r#"{"model_type": "gemma2", "use_bidirectional_attention": true}"#);
    assert!(message.contains("use_bidirectional_attention"), "{message}");
    let message = refusal(r#"{"model_type": "gemma2", "final_logit_softcapping": 0.0}"#);
    assert!(
        message.contains("`final_logit_softcapping` is 0.0; it must be a positive"),
        "{message}"
    );
    let message = refusal(
        r#"{"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {}, "x": {}}}"#,
    );
    assert!(
        message.contains("supported: full_attention, sliding_attention"),
        "{message}"
    );
}

#[test]
fn scalings_that_cannot_be_computed_are_refused_with_the_way_out() {
    let refusal = |scaling: &str| {
        let text = format!(
            r#"{{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "rope_scaling": {scaling}}}"#
        );
        ModelConfig::from_json(&text).unwrap_err().to_string()
    };
    for (scaling, part) in [
        (
            r#"{"rope_type": "dynamic"}"#,
            "`rope_scaling.factor` is missing or not positive",
        ),
        (
            r#"{"rope_type": "yarn", "factor": -1}"#,
            "`rope_scaling.factor` is -1.0; it must be a positive",
        ),
        (
            r#"{"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32}"#,
            "`rope_scaling.beta_fast` is 1.0; it must be at least beta_slow, 32",
        ),
        (
            r#"{"rope_type": "longrope", "long_factor": [1, 1, 1, 1]}"#,
            "`rope_scaling.short_factor` is missing",
        ),
        (
            r#"{"rope_type": "longrope", "long_factor": [1], "short_factor": [1, 1, 1, 1]}"#,
            "`rope_scaling.long_factor` is \"1 numbers\"; it must be 4 numbers, one for each pair of rotated channels",
        ),
        (
            r#"{"rope_type": "longrope", "long_factor": [1, 0, 1, 1], "short_factor": [1, 1, 1, 1]}"#,
            "it must be positive numbers",
        ),
        (
            r#"{"rope_type": "default", "partial_rotary_factor": 0.5}"#,
            "`partial_rotary_factor` is 0.5, which is not supported",
        ),
    ] {
        let message = refusal(scaling);
        assert!(message.contains(part), "{scaling}: {message}");
    }
}

#[test]
fn bounded_logits_are_bounded_and_their_loss_as_well() {
    let mut model = load("gemma2");
    let want = expected("gemma2");
    let logits = model
        .forward(ForwardInput::new(&want["input_ids"]))
        .unwrap();
    assert!(max_magnitude(&logits) < 4.0);
    // The bounds of the fixture matter: without them the result differs.
    let dir = copy_of("gemma2");
    for key in ["final_logit_softcapping", "attn_logit_softcapping"] {
        edit_config(dir.path(), |config| {
            config.insert(key.to_owned(), serde_json::Value::Null);
        });
        let other = CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap();
        let other = other
            .forward(ForwardInput::new(&want["input_ids"]))
            .unwrap();
        assert!(max_difference(&other, &logits) > 0.1, "{key}");
    }
    for attention in AttentionImplementation::ALL {
        let mut execution = Execution::default();
        execution.attention = attention;
        model.set_execution(execution);
        let got = model
            .forward(ForwardInput::new(&want["input_ids"]))
            .unwrap();
        assert!(max_difference(&got, &want["logits"]) < 1e-5, "{attention}");
    }
}

#[test]
fn a_norm_of_one_plus_weight_follows_its_weight() {
    let model = load("gemma3");
    let ids = &expected("gemma3")["input_ids"];
    let run = || model.forward(ForwardInput::new(ids)).unwrap();
    let before = run();
    assert_eq!(
        run(),
        before,
        "the second pass uses what the first has kept"
    );
    let (_, mut norm) = model
        .named_parameters()
        .into_iter()
        .find(|(name, _)| name == "model.norm.weight")
        .unwrap();
    let _same = norm.f_mul_scalar_(3.0).unwrap();
    assert!(max_difference(&run(), &before) > 0.1);
}

/// A cache whose attention never reaches further back than `span`.
#[derive(Debug)]
struct Bounded {
    inner: DynamicCache,
    past: i64,
    span: Option<i64>,
}

impl KvCache for Bounded {
    fn append(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> overdrive_kv_cache::Result<KvView> {
        self.inner.append(layer, keys, values)
    }

    fn layers(&self) -> usize {
        self.inner.layers()
    }

    fn len(&self) -> i64 {
        self.past
    }

    fn span(&self) -> Option<i64> {
        self.span
    }

    fn truncate(&mut self, _: i64) -> overdrive_kv_cache::Result<()> {
        Ok(())
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn reorder(&mut self, rows: &Tensor) -> overdrive_kv_cache::Result<()> {
        self.inner.reorder(rows)
    }

    fn fork(&self) -> overdrive_kv_cache::Result<Box<dyn KvCache>> {
        self.inner.fork()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn bytes_per_token(&self) -> f64 {
        self.inner.bytes_per_token()
    }

    fn state(&self) -> overdrive_kv_cache::Result<Vec<(String, Tensor)>> {
        self.inner.state()
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> overdrive_kv_cache::Result<()> {
        self.inner.load_state(state)
    }
}

#[test]
fn a_rotary_model_exceeds_its_context_over_a_cache_that_drops_tokens() {
    let ids = Tensor::full([1, 1], 5, (Kind::Int64, Device::Cpu));
    let step = |case: &str, past: i64, span: Option<i64>| {
        let model = load(case);
        let inner = DynamicCache::new(model.cache_layers());
        let mut cache = Bounded { inner, past, span };
        let input = ForwardInput::new(&ids).with_cache(&mut cache);
        model.forward(input).map(|logits| logits.size())
    };
    assert_eq!(step("llama_gqa", 1_000_000, Some(64)).unwrap(), [1, 1, 128]);
    for (case, past, span) in [
        ("llama_gqa", 64, None),
        ("llama_gqa", 64, Some(65)),
        ("gpt2", 64, Some(8)),
    ] {
        let message = step(case, past, span).unwrap_err().to_string();
        assert!(
            message.contains("65 positions exceed the model's context of 64"),
            "{message}"
        );
    }
}
