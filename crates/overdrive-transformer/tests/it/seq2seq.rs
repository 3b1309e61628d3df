//! T5 and BART against transformers, on the random checkpoints that `fixtures/gen_seq2seq.py` makes. Tolerances and
//! their reasons are in its docstring.

use std::process::Command;

use crate::common::{
    copy_of, edit_config, expected, fixture, generator, max_difference, max_magnitude,
};
use crate::on_python::python;
use overdrive_kv_cache::{DynamicCache, KvCache};
use overdrive_lora::{
    AddOptions, LoadAdapterOptions, LoraConfig, MergeOptions, TargetModules, add_adapter,
    load_adapter, merge_and_unload, save_adapter, trainable_parameters,
};
use overdrive_nn::AdapterHost;
use overdrive_quantization::Scheme;
use overdrive_transformer::{
    AttentionImplementation, BartConfig, CausalLm, DecoderInput, Execution, InitOptions,
    LoadOptions, Logits, QuantizeOptions, Schedule, Seq2SeqConfig, Seq2SeqLm, T5Config,
};
use tch::{Kind, Tensor};

const CASES: [&str; 4] = ["t5", "t5_v1_1", "bart", "bart_scaled"];

fn load(case: &str) -> Seq2SeqLm {
    Seq2SeqLm::from_pretrained(fixture(case), &LoadOptions::default()).unwrap()
}

fn executions() -> Vec<Execution> {
    let mut all = Vec::new();
    for choice in 0..6 {
        let mut execution = Execution::default();
        execution.fused_kernels = choice & 1 != 0;
        execution.attention = AttentionImplementation::ALL[choice / 2];
        all.push(execution);
    }
    all
}

#[test]
fn encoder_states_and_logits_equal_transformers() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        let (ids, mask) = (&want["input_ids"], &want["attention_mask"]);
        for execution in executions() {
            model.set_execution(execution);
            let encoded = model.encode(ids, Some(mask)).unwrap();
            let real = mask.to_kind(Kind::Float).unsqueeze(-1);
            let states = max_difference(
                &(&encoded.states * &real),
                &(&want["encoder_states"] * &real),
            );
            let input = DecoderInput::new(&want["decoder_input_ids"], &encoded);
            let logits = max_difference(&model.decode(input).unwrap(), &want["logits"]);
            println!(
                "{case:12} states {states:.1e} logits {logits:.1e} of {:.1}",
                max_magnitude(&want["logits"])
            );
            // Saturated scores lose digits, as in the gradients below: transformers' states in fp32 are 1.6e-5 from its
            // own in fp64 with scaled embeddings, and up to 3e-6 in the others.
            let bound = if case == "bart_scaled" { 2e-5 } else { 1e-5 };
            assert!(
                states < bound && logits < TOLERANCE,
                "{case}: {states} {logits}"
            );
        }
    }
}

/// States differ by up to 4e-6 with AVX-512, and logits are sums of 32 of them times weights of up to 14.
const TOLERANCE: f64 = 5e-5;

#[test]
fn loss_and_gradients_equal_transformers_with_and_without_checkpointing() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model.set_requires_grad(true).unwrap();
        for (fused, checkpointing) in [
            (true, Schedule::Never),
            (false, Schedule::Never),
            (true, Schedule::EveryBlock),
        ] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            execution.checkpointing = checkpointing;
            model.set_execution(execution);
            let (ids, mask) = (&want["input_ids"], &want["attention_mask"]);
            let loss = model.loss(ids, Some(mask), &want["labels"]).unwrap();
            assert_eq!(loss.tokens().unwrap(), 2 * 7 - 3);
            let mean = loss.mean().unwrap();
            let difference = max_difference(&mean, &want["loss"]);
            assert!(difference < 1e-5, "{case}: loss {difference}");
            mean.backward();
            // Scaled embeddings make saturated scores, whose gradients lose digits: PyTorch's in fp32 differ from its
            // own in fp64 by 1e-3 there, and by 2e-5 in the others.
            let bound = if case == "bart_scaled" { 2e-3 } else { 1e-4 };
            let mut worst = 0f64;
            for (name, mut parameter) in model.named_parameters() {
                let gradient = &want[&format!("grad.{name}")];
                // The keys' biases move all scores of a query alike, and their gradient is rounding.
                let scale = max_magnitude(gradient).max(1e-2);
                let relative = max_difference(&parameter.grad(), gradient) / scale;
                assert!(relative < bound, "{case}: gradient of {name} {relative}");
                worst = worst.max(relative);
                parameter.zero_grad();
            }
            println!("{case:12} fused {fused}: loss {difference:.1e} gradients {worst:.1e}");
        }
    }
}

#[test]
fn names_and_their_order_equal_those_of_transformers() {
    for case in CASES {
        let text = std::fs::read_to_string(fixture(case).join("names.json")).unwrap();
        let want: Vec<String> = serde_json::from_str(&text).unwrap();
        let got: Vec<String> = load(case)
            .named_parameters()
            .into_iter()
            .map(|(n, _)| n)
            .collect();
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn the_decoders_input_is_that_of_transformers() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        assert_eq!(
            model.shift_right(&want["labels"]).unwrap(),
            want["decoder_input_ids"],
            "{case}"
        );
    }
}

#[test]
fn cached_steps_equal_one_pass_and_read_no_encoder_states() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        let ids = &want["decoder_input_ids"];
        for execution in executions() {
            model.set_execution(execution);
            for chunks in [vec![7], vec![1; 7], vec![3, 1, 2, 1]] {
                let _no_grad = tch::no_grad_guard();
                let mut encoded = model
                    .encode(&want["input_ids"], Some(&want["attention_mask"]))
                    .unwrap();
                let cross = model.cross_attention_cache(&encoded).unwrap();
                assert_eq!((cross.layers(), cross.batch()), (model.num_layers(), 2));
                // Whoever reads the states from now on gets NaN.
                let _same = encoded.states.fill_(f64::NAN);
                let mut cache = DynamicCache::with_capacity(model.num_layers(), 2);
                let mut parts = Vec::new();
                for tokens in chunks {
                    let part = ids.narrow(1, cache.len(), tokens);
                    let input = DecoderInput::new(&part, &cross).with_cache(&mut cache);
                    parts.push(model.decode(input).unwrap());
                }
                let difference = max_difference(&Tensor::cat(&parts, 1), &want["logits"]);
                assert!(difference < TOLERANCE, "{case}: {difference}");
            }
        }
    }
}

#[test]
fn reordered_rows_of_the_cross_attention_are_those_of_a_reordered_batch() {
    for case in ["t5", "bart"] {
        let (model, want) = (load(case), expected(case));
        let _no_grad = tch::no_grad_guard();
        let encoded = model
            .encode(&want["input_ids"], Some(&want["attention_mask"]))
            .unwrap();
        let mut cross = model.cross_attention_cache(&encoded).unwrap();
        let rows = Tensor::from_slice(&[1i64, 0, 1]);
        cross.reorder(&rows).unwrap();
        let ids = want["decoder_input_ids"].index_select(0, &rows);
        let input = DecoderInput::new(&ids, &cross).with_logits(Logits::Last);
        let last = want["logits"].index_select(0, &rows).narrow(1, 6, 1);
        assert!(
            max_difference(&model.decode(input).unwrap(), &last) < TOLERANCE,
            "{case}"
        );
    }
}

#[test]
fn fp16_is_bounded_where_the_residual_stream_overflows() {
    let folder = fixture("t5").join("half");
    let options = LoadOptions {
        kind: Some(Kind::Half),
        ..LoadOptions::default()
    };
    let model = Seq2SeqLm::from_pretrained(&folder, &options).unwrap();
    let wide = model
        .named_parameters()
        .into_iter()
        .filter(|(_, t)| t.kind() == Kind::Float);
    assert!(wide.count() == 5, "one wo for each of five blocks");
    let want = expected("t5");
    let half = expected("t5/half");
    let encoded = model
        .encode(&want["input_ids"], Some(&want["attention_mask"]))
        .unwrap();
    let input = DecoderInput::new(&want["decoder_input_ids"], &encoded);
    let logits = model.decode(input).unwrap();
    assert_eq!(logits.kind(), Kind::Half);
    let difference = max_difference(&logits, &half["logits"]);
    println!(
        "fp16 {difference:.1e} of {:.1}",
        max_magnitude(&half["logits"])
    );
    // fp16 has 11 bits; some twenty roundings in a row.
    assert!(
        difference < 0.01 * max_magnitude(&half["logits"]),
        "{difference}"
    );
}

/// Loads a folder by transformers and prints the largest difference of the logits from those of the fixture.
const CHECK: &str = "
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM
torch.set_num_threads(1)
model, report = AutoModelForSeq2SeqLM.from_pretrained(
    sys.argv[1], output_loading_info=True, attn_implementation='eager', dtype=torch.float32
)
assert not report['missing_keys'] and not report['unexpected_keys'], report
want = load_file(sys.argv[2])
logits = model(input_ids=want['input_ids'], attention_mask=want['attention_mask'], labels=want['labels']).logits
print((logits - want['logits']).abs().max().item())
";

#[test]
#[ignore = "needs Python with torch, transformers and safetensors"]
fn transformers_loads_what_save_pretrained_writes_on_python() {
    let python = python(&["transformers", "torch", "safetensors"]);
    for case in CASES {
        let dir = tempfile::tempdir().unwrap();
        load(case)
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let output = Command::new(&python)
            .args(["-c", CHECK])
            .args([dir.path(), &fixture(case).join("expected.safetensors")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{case}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let difference: f64 = text.trim().parse().unwrap();
        assert!(difference < 1e-6, "{case}: {difference}");
    }
}

#[test]
fn a_saved_model_is_read_back_bit_by_bit_in_one_file_and_in_shards() {
    for case in CASES {
        for bytes in [u64::MAX, 4000] {
            let model = load(case);
            let dir = tempfile::tempdir().unwrap();
            let options = overdrive_transformer::SaveOptions {
                max_shard_bytes: bytes,
            };
            model.save_pretrained(dir.path(), &options).unwrap();
            let again = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
            assert_eq!(again.config(), model.config(), "{case}");
            assert_eq!(
                again.generation_config(),
                model.generation_config(),
                "{case}"
            );
            assert_eq!(again.num_parameters(), model.num_parameters());
            let (one, other) = (model.named_parameters(), again.named_parameters());
            for ((name, a), (_, b)) in one.into_iter().zip(other) {
                assert_eq!(a, b, "{case}: {name}");
            }
        }
    }
}

/// Rewrites the weights of a copy of a fixture under other names.
fn renamed(case: &str, rename: impl Fn(&str) -> Vec<String>) -> tempfile::TempDir {
    let dir = copy_of(case);
    let path = dir.path().join("model.safetensors");
    let tensors = Tensor::read_safetensors(&path).unwrap();
    let tensors: Vec<(String, Tensor)> = tensors
        .into_iter()
        .flat_map(|(name, tensor)| {
            rename(&name)
                .into_iter()
                .map(move |name| (name, tensor.copy()))
                .collect::<Vec<_>>()
        })
        .collect();
    Tensor::write_safetensors(&tensors, &path).unwrap();
    dir
}

#[test]
fn tied_copies_and_absent_prefixes_load_as_in_transformers() {
    let bare = |name: &str| vec![name.strip_prefix("model.").unwrap_or(name).to_owned()];
    let copies = |name: &str| match name.strip_suffix("shared.weight") {
        Some(prefix) => vec![
            name.to_owned(),
            format!("{prefix}encoder.embed_tokens.weight"),
            format!("{prefix}decoder.embed_tokens.weight"),
            "lm_head.weight".to_owned(),
        ],
        None => vec![name.to_owned()],
    };
    // The embedding under the name of a copy alone.
    let moved = |name: &str| match name.strip_suffix("shared.weight") {
        Some(prefix) => vec![format!("{prefix}encoder.embed_tokens.weight")],
        None => vec![name.to_owned()],
    };
    let no_bias = |name: &str| match name {
        "final_logits_bias" => vec![],
        name => vec![name.to_owned()],
    };
    for (case, dir) in [
        ("bart", renamed("bart", bare)),
        ("bart", renamed("bart", copies)),
        ("bart", renamed("bart", no_bias)),
        ("t5", renamed("t5", copies)),
        ("t5", renamed("t5", moved)),
    ] {
        let want = expected(case);
        let model = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let mask = Some(&want["attention_mask"]);
        let got = model
            .forward(&want["input_ids"], mask, &want["decoder_input_ids"])
            .unwrap();
        assert!(max_difference(&got, &want["logits"]) < TOLERANCE, "{case}");
    }
}

#[test]
fn a_head_of_t5_that_no_file_holds_is_the_embedding() {
    let without = |name: &str| match name {
        "lm_head.weight" => vec![],
        name => vec![name.to_owned()],
    };
    let dir = renamed("t5_v1_1", without);
    let model = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    assert!(model.config().tie_word_embeddings());
    let names: Vec<String> = model
        .named_parameters()
        .into_iter()
        .map(|(n, _)| n)
        .collect();
    assert!(!names.contains(&"lm_head.weight".to_owned()));
    // The key of transformers 4 means the same as the two of transformers 5.
    let dir = copy_of("t5_v1_1");
    edit_config(dir.path(), |config| {
        config.remove("scale_decoder_outputs");
        config.insert("tie_word_embeddings".to_owned(), false.into());
    });
    let older = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    assert_eq!(older.config(), load("t5_v1_1").config());
}

#[test]
fn quantized_models_run_and_are_saved() {
    // Not BART in NF4: the steps of 4 bits are as large as the differences between its random weights' outputs.
    for (case, scheme, bound) in [
        ("t5_v1_1", "int8", 0.1),
        ("t5_v1_1", "nf4", 0.5),
        ("bart", "int8", 0.2),
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        let options = LoadOptions {
            quantization: Some(QuantizeOptions::new(scheme)),
            ..LoadOptions::default()
        };
        let model = Seq2SeqLm::from_pretrained(fixture(case), &options).unwrap();
        assert!(model.is_quantized());
        assert!(model.memory_footprint() < load(case).memory_footprint());
        let want = expected(case);
        let mask = Some(&want["attention_mask"]);
        let forward = |model: &Seq2SeqLm| {
            model
                .forward(&want["input_ids"], mask, &want["decoder_input_ids"])
                .unwrap()
        };
        let got = forward(&model);
        let mut in_place = load(case);
        in_place.quantize(&QuantizeOptions::new(scheme)).unwrap();
        assert_eq!(max_difference(&forward(&in_place), &got), 0.0, "{case}");
        assert_eq!(in_place.memory_footprint(), model.memory_footprint());
        in_place.dequantize().unwrap();
        assert!(!in_place.is_quantized());
        let names = |model: &Seq2SeqLm| {
            let parameters = model.named_parameters().into_iter();
            parameters.map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(&in_place), names(&load(case)), "{case}");
        assert_eq!(in_place.memory_footprint(), load(case).memory_footprint());
        let relative = (&got - &want["logits"]).norm() / want["logits"].norm();
        let relative = relative.double_value(&[]);
        println!("{case} {scheme}: {relative:.3}");
        assert!(relative < bound, "{case} {scheme}: {relative}");
        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let again = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let difference = max_difference(&forward(&again), &got);
        assert!(difference < TOLERANCE, "{case} {scheme}: {difference}");
    }
}

#[test]
fn every_linear_layer_is_lent_under_its_name() {
    let names = |case: &str| {
        let mut names = Vec::new();
        load(case)
            .visit_linears(&mut |name, _| {
                names.push(name.to_owned());
                Ok(())
            })
            .unwrap();
        names
    };
    let t5 = names("t5_v1_1");
    // Two encoder blocks of 4 + 3 layers, two decoder blocks of 8 + 3, and the head.
    assert_eq!(t5.len(), 2 * 7 + 2 * 11 + 1);
    assert!(t5.contains(&"decoder.block.1.layer.1.EncDecAttention.k".to_owned()));
    assert!(t5.contains(&"encoder.block.0.layer.1.DenseReluDense.wi_1".to_owned()));
    let bart = names("bart");
    assert_eq!(bart.len(), 3 * 6 + 2 * 10 + 1);
    assert!(bart.contains(&"model.decoder.layers.1.encoder_attn.out_proj".to_owned()));
    assert_eq!(bart.last().unwrap(), "lm_head");
}

#[test]
fn lora_trains_is_saved_and_merges() {
    for case in ["t5_v1_1", "bart"] {
        let (mut model, want) = (load(case), expected(case));
        let config = LoraConfig {
            r: 4,
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "default", &config, &AddOptions::default()).unwrap();
        let (ids, mask) = (&want["input_ids"], Some(&want["attention_mask"]));
        let loss = |model: &Seq2SeqLm| {
            model
                .loss(ids, mask, &want["labels"])
                .unwrap()
                .mean()
                .unwrap()
        };
        let before = loss(&model).double_value(&[]);
        assert!(
            (before - want["loss"].double_value(&[])).abs() < 1e-5,
            "{case}"
        );
        for _ in 0..5 {
            loss(&model).backward();
            for (_, parameter) in trainable_parameters(&mut model).unwrap() {
                let step = parameter.grad() * -0.05;
                let _same = tch::no_grad(|| parameter.shallow_clone().f_add_(&step)).unwrap();
                let _same = parameter.grad().f_zero_().unwrap();
            }
        }
        let trained = loss(&model).double_value(&[]);
        println!("{case}: loss {before:.3} -> {trained:.3}");
        assert!(trained < 0.95 * before, "{case}: {before} {trained}");
        let dir = tempfile::tempdir().unwrap();
        save_adapter(&mut model, dir.path(), "default").unwrap();
        let mut other = load(case);
        load_adapter(
            &mut other,
            dir.path(),
            "default",
            &LoadAdapterOptions::default(),
        )
        .unwrap();
        assert!(
            (loss(&other).double_value(&[]) - trained).abs() < 1e-5,
            "{case}"
        );
        merge_and_unload(&mut other, &MergeOptions::default()).unwrap();
        assert!(
            (loss(&other).double_value(&[]) - trained).abs() < 1e-4,
            "{case}"
        );
    }
}

#[test]
fn dropout_applies_in_training_only() {
    let _generator = generator();
    for case in ["t5", "bart"] {
        let (mut model, want) = (load(case), expected(case));
        let run = |model: &Seq2SeqLm| {
            tch::manual_seed(1);
            let mask = Some(&want["attention_mask"]);
            model
                .forward(&want["input_ids"], mask, &want["decoder_input_ids"])
                .unwrap()
        };
        model.set_training(true).unwrap();
        assert!(
            max_difference(&run(&model), &want["logits"]) > 1e-3,
            "{case}"
        );
        model.set_training(false).unwrap();
        assert!(
            max_difference(&run(&model), &want["logits"]) < TOLERANCE,
            "{case}"
        );
    }
}

#[test]
fn a_layer_that_is_dropped_in_training_is_skipped() {
    let _generator = generator();
    let dir = copy_of("bart");
    edit_config(dir.path(), |config| {
        config.insert("dropout".to_owned(), 0.0.into());
        config.insert("encoder_layerdrop".to_owned(), 0.5.into());
    });
    let want = expected("bart");
    let mut model = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    model.set_training(true).unwrap();
    let states = |seed| {
        tch::manual_seed(seed);
        model.encode(&want["input_ids"], None).unwrap().states
    };
    let first = states(0);
    // Of 20 seeds, all with the same layers of three: a chance of 8^-19.
    assert!((1..20).any(|seed| max_difference(&states(seed), &first) > 1e-3));
}

#[test]
fn new_models_begin_as_in_transformers() {
    let t5 = T5Config {
        vocab_size: 50,
        d_model: 64,
        d_ff: 128,
        num_layers: 1,
        ..T5Config::default()
    };
    let model = Seq2SeqLm::new(&t5.into(), &InitOptions::default()).unwrap();
    let parameters: std::collections::HashMap<_, _> =
        model.named_parameters().into_iter().collect();
    let std = |name: &str| parameters[name].std(true).double_value(&[]);
    // A standard deviation of 4096 and more values is within 5 % of its expectation.
    assert!((std("encoder.block.0.layer.0.SelfAttention.q.weight") * 64.0 - 1.0).abs() < 0.05);
    assert!((std("encoder.block.0.layer.0.SelfAttention.k.weight") * 8.0 - 1.0).abs() < 0.05);
    assert!(
        (std("decoder.block.0.layer.2.DenseReluDense.wo.weight") * 128f64.sqrt() - 1.0).abs()
            < 0.05
    );
    let bart = BartConfig {
        vocab_size: 50,
        d_model: 64,
        encoder_layers: 1,
        decoder_layers: 1,
        ..BartConfig::default()
    };
    let model = Seq2SeqLm::new(&bart.into(), &InitOptions::default()).unwrap();
    let (name, shared) = model.named_parameters().remove(0);
    assert_eq!(name, "model.shared.weight");
    assert_eq!(
        shared.get(1).abs().max().double_value(&[]),
        0.0,
        "the padding's embedding"
    );
}

#[test]
fn wrong_inputs_and_configurations_are_refused_by_name() {
    let (model, want) = (load("bart"), expected("bart"));
    let (ids, decoder) = (&want["input_ids"], &want["decoder_input_ids"]);
    let error = model
        .encode(&ids.to_kind(Kind::Float), None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("input_ids"), "{error}");
    let error = model
        .encode(ids, Some(&ids.narrow(1, 0, 3)))
        .unwrap_err()
        .to_string();
    assert!(error.contains("attention_mask"), "{error}");
    let error = model.encode(
        &Tensor::ones([1, 33], (Kind::Int64, tch::Device::Cpu)),
        None,
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("33 positions exceed the model's context of 32"),
        "{error}"
    );
    let encoded = model.encode(ids, None).unwrap();
    let one = decoder.narrow(0, 0, 1);
    let error = model
        .decode(DecoderInput::new(&one, &encoded))
        .unwrap_err()
        .to_string();
    assert!(error.contains("the encoder's states"), "{error}");
    let mut cache = DynamicCache::new(5);
    let input = DecoderInput::new(decoder, &encoded).with_cache(&mut cache);
    let error = model.decode(input).unwrap_err().to_string();
    assert!(
        error.contains("the cache has 5 layers and the model has 2"),
        "{error}"
    );
    for (text, expected) in [
        (
            r#"{"model_type": "mt5"}"#,
            "`model_type` is \"mt5\", which is not supported; supported: t5, bart",
        ),
        (
            r#"{"model_type": "t5", "feed_forward_proj": "gated-tanh"}"#,
            "`feed_forward_proj` is \"gated-tanh\"",
        ),
        (
            r#"{"model_type": "t5", "d_kv": 0}"#,
            "`d_kv` is 0; it must be a positive integer",
        ),
        (
            r#"{"model_type": "t5", "num_heads": 2147483647}"#,
            "num_heads * d_kv",
        ),
        (
            r#"{"model_type": "t5", "num_layers": 1000000000}"#,
            "`num_layers` is 1000000000",
        ),
        (
            r#"{"model_type": "t5", "relative_attention_num_buckets": 1}"#,
            "relative_attention_num_buckets",
        ),
        (
            r#"{"model_type": "t5", "relative_attention_max_distance": 16}"#,
            "above 16",
        ),
        (
            r#"{"model_type": "bart", "encoder_attention_heads": 7}"#,
            "a divisor of d_model (1024)",
        ),
        (
            r#"{"model_type": "bart", "dropout": 1.0}"#,
            "`dropout` is 1.0; it must be at least 0 and below 1",
        ),
        (
            r#"{"model_type": "bart", "activation_function": "tanh"}"#,
            "`activation_function` is \"tanh\"",
        ),
    ] {
        let error = Seq2SeqConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let config = T5Config {
        vocab_size: 9,
        d_model: 8,
        d_kv: 4,
        d_ff: 8,
        num_layers: 1,
        num_heads: 2,
        ..T5Config::default()
    };
    let model = Seq2SeqLm::new(&config.into(), &InitOptions::default()).unwrap();
    let ones = Tensor::ones([1, 2], (Kind::Int64, tch::Device::Cpu));
    let error = model.loss(&ones, None, &ones).unwrap_err().to_string();
    assert!(
        error.contains("`decoder_start_token_id` is null"),
        "{error}"
    );
    // A decoder cannot be read from the folder of an encoder-decoder model.
    let error = CausalLm::from_pretrained(fixture("t5"), &LoadOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("`model_type` is \"t5\""),
        "{error}"
    );
}
