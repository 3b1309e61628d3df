//! Exported graphs in ONNX Runtime, compared with the models that they were made from.

use std::fs;
use std::path::PathBuf;

use crate::common::{CASES, Promise, Scene, check, fixture, small, write_case};
use crate::on_python::python;
use overdrive_lora::{AddOptions, LoraConfig, MergeOptions, TargetModules};
use overdrive_onnx::{
    Activations, Attention, ExportOptions, ExternalData, LogitsFor, Precision, export,
};
use overdrive_quantization::{CheckpointOptions, quantize_checkpoint};
use overdrive_transformer::{
    CausalLm, Gpt2Config, InitOptions, LlamaConfig, LlamaFamily, LoadOptions, QuantizeOptions,
    SaveOptions,
};

/// A folder of cases.
struct Cases {
    python: String,
    root: tempfile::TempDir,
    count: usize,
}

impl Cases {
    fn new() -> Cases {
        Cases {
            python: python(&["numpy", "onnx", "onnxruntime"]),
            root: tempfile::tempdir().unwrap(),
            count: 0,
        }
    }

    fn folder(&mut self, name: &str) -> PathBuf {
        let folder = self.root.path().join(name);
        fs::create_dir(&folder).unwrap();
        self.count += 1;
        folder
    }

    /// Exports `model`; ONNX Runtime must compute what the model itself computes.
    fn add(&mut self, name: &str, model: &mut CausalLm, options: &ExportOptions, promise: Promise) {
        let folder = self.folder(name);
        export(model, folder.join("model.onnx"), options).unwrap();
        write_case(&folder, model, &Scene::usual(model), promise);
    }

    fn check(&self) {
        check(&self.python, self.root.path(), self.count);
    }
}

/// Frequencies that depend on the longest position of a step: keys in a cache keep older ones.
fn depends_on_length(case: &str) -> bool {
    matches!(case, "llama_dynamic_rope" | "llama_longrope")
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn every_architecture_computes_the_same_at_the_default_opset_on_python() {
    let mut cases = Cases::new();
    for case in CASES {
        let promise = Promise {
            parts: !depends_on_length(case),
            ..Promise::default()
        };
        cases.add(case, &mut fixture(case), &ExportOptions::default(), promise);
    }
    cases.check();
}

/// Fixtures whose heads are of a width that ONNX Runtime's operator does not take.
const NARROW: [&str; 1] = ["mistral"];

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn every_opset_and_form_of_attention_computes_the_same_on_python() {
    let mut cases = Cases::new();
    for opset in 18..=26 {
        // The operator sets differ in GELU, norms, rotation and windows.
        for case in ["gpt2", "gemma3", "qwen2_sliding"] {
            let options = ExportOptions {
                opset,
                ..ExportOptions::default()
            };
            let name = format!("{case}_{opset}");
            cases.add(&name, &mut fixture(case), &options, Promise::default());
        }
    }
    for (attention, opset) in [
        (Attention::Standard, 23),
        (Attention::Standard, 24),
        (Attention::GroupQuery, 18),
        (Attention::GroupQuery, 23),
    ] {
        for case in CASES {
            let options = ExportOptions {
                opset,
                attention,
                ..ExportOptions::default()
            };
            if attention == Attention::GroupQuery && NARROW.contains(&case) {
                continue; // `structure/` has the refusal.
            }
            let promise = Promise {
                parts: !depends_on_length(case),
                batches_continue: attention != Attention::GroupQuery,
                ..Promise::default()
            };
            let name = format!("{attention:?}_{opset}_{case}");
            cases.add(&name, &mut fixture(case), &options, promise);
        }
    }
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn other_layouts_and_precisions_compute_the_same_on_python() {
    let mut cases = Cases::new();
    let external = ExportOptions {
        external_data: ExternalData::Always,
        ..ExportOptions::default()
    };
    cases.add(
        "external",
        &mut fixture("llama_gqa"),
        &external,
        Promise::default(),
    );
    let whole = ExportOptions {
        use_cache: false,
        ..ExportOptions::default()
    };
    let no_cache = Promise {
        parts: false,
        greedy: false,
        ..Promise::default()
    };
    cases.add("without_cache", &mut fixture("qwen3"), &whole, no_cache);
    for case in ["gpt2", "qwen3", "gemma2"] {
        let half = ExportOptions {
            precision: Precision::Float16,
            ..ExportOptions::default()
        };
        // 11 binary digits: a few rounded sums in a row are off by a few 2⁻¹¹.
        let promise = Promise {
            tolerance: 1e-2,
            greedy: false,
            ..Promise::default()
        };
        cases.add(&format!("half_{case}"), &mut fixture(case), &half, promise);
    }
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn the_last_logits_alone_are_those_of_the_last_token_on_python() {
    let mut cases = Cases::new();
    let mut model = fixture("llama_gqa");
    let options = ExportOptions {
        logits: LogitsFor::Last,
        ..ExportOptions::default()
    };
    let folder = cases.folder("last");
    export(&mut model, folder.join("model.onnx"), &options).unwrap();
    let scenes = [Scene::new("token", &model, [2, 1], 0, true)];
    // Greedy decoding takes the last logits of longer sequences as well.
    write_case(&folder, &model, &scenes, Promise::default());
    cases.check();
}

/// Models whose widths every scheme takes, with logits that tell tokens apart.
fn quantizable() -> Vec<(&'static str, overdrive_transformer::ModelConfig)> {
    let tied = LlamaConfig {
        tie_word_embeddings: true,
        ..small(LlamaFamily::Llama)
    };
    let gpt2 = Gpt2Config {
        vocab_size: 96,
        n_positions: 64,
        n_embd: 64,
        n_layer: 2,
        n_head: 4,
        initializer_range: 0.12,
        ..Gpt2Config::default()
    };
    vec![
        ("llama", small(LlamaFamily::Llama).into()),
        ("llama_tied", tied.into()),
        ("qwen2", small(LlamaFamily::Qwen2).into()),
        ("gpt2", gpt2.into()),
    ]
}

const SCHEMES: [&str; 12] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4-g16",
    "int4-g32",
    "int4-g64-asym",
    "int8-g32",
    "int8-g32-asym",
    "nf4",
    "nf4-single",
    "fp4",
    "fp8",
];

fn quantized_cases(cases: &mut Cases, activations: Activations, promise: Promise) {
    let options = ExportOptions {
        activations,
        ..ExportOptions::default()
    };
    for (name, config) in quantizable() {
        for scheme in SCHEMES {
            let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
            let scheme_of = scheme.parse().unwrap();
            model
                .quantize(&QuantizeOptions::new(scheme_of).with_head(scheme_of))
                .unwrap();
            let folder = cases.folder(&format!("{name}_{scheme}"));
            export(&mut model, folder.join("model.onnx"), &options).unwrap();
            model.dequantize().unwrap();
            write_case(&folder, &model, &Scene::usual(&model), promise);
        }
    }
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn quantized_weights_give_the_logits_of_the_dequantized_model_on_python() {
    let mut cases = Cases::new();
    quantized_cases(&mut cases, Activations::Float, Promise::default());
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn a_quantized_table_beside_another_head_is_looked_up_on_python() {
    let mut cases = Cases::new();
    let options = ExportOptions {
        activations: Activations::Float,
        ..ExportOptions::default()
    };
    let [(_, untied), (_, tied), ..] = &quantizable()[..] else {
        panic!("two models");
    };
    // The head of the tied model shares the quantized table; that of the other model is dense.
    for (name, config) in [("untied", untied), ("tied", tied)] {
        for scheme in ["int8", "int4-g32", "int4-g64-asym", "nf4", "fp8"] {
            let folder = cases.folder(&format!("table_{name}_{scheme}"));
            let scheme = scheme.parse().unwrap();
            let dense = CausalLm::new(config, &InitOptions::default()).unwrap();
            dense
                .save_pretrained(folder.join("dense"), &SaveOptions::default())
                .unwrap();
            let checkpoint = CheckpointOptions {
                embedding: Some(scheme),
                ..CheckpointOptions::default()
            };
            let packed = folder.join("packed");
            quantize_checkpoint(folder.join("dense"), &packed, scheme, &checkpoint).unwrap();
            let mut model = CausalLm::from_pretrained(&packed, &LoadOptions::default()).unwrap();
            assert!(model.quantized_embedding().is_some());
            export(&mut model, folder.join("model.onnx"), &options).unwrap();
            model.dequantize().unwrap();
            write_case(&folder, &model, &Scene::usual(&model), Promise::default());
        }
    }
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn activations_in_8_bits_stay_near_the_dequantized_model_on_python() {
    let mut cases = Cases::new();
    // Each of some ten products rounds its inputs to 1/254 of their largest: the logits, relative to the
    // largest, are off by a few hundredths at most.
    let promise = Promise {
        tolerance: 0.1,
        greedy: false,
        exact_products: false,
        ..Promise::default()
    };
    quantized_cases(&mut cases, Activations::Int8, promise);
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn int8_activations_by_token_are_those_of_our_own_kernels_on_python() {
    let mut cases = Cases::new();
    for (name, config) in quantizable() {
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        model
            .quantize(&QuantizeOptions::new("int8".parse().unwrap()))
            .unwrap();
        // The same integers; a number between two codes may fall to either side where the floats before
        // it differ in their last bit, which moves a logit by a thousandth.
        let promise = Promise {
            tolerance: 5e-3,
            ..Promise::default()
        };
        cases.add(name, &mut model, &ExportOptions::default(), promise);
    }
    cases.check();
}

#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn a_merged_adapter_is_part_of_the_written_weights_on_python() {
    let mut cases = Cases::new();
    for (name, quantization) in [("dense", None), ("int8", Some("int8-weight"))] {
        let config = small(LlamaFamily::Llama).into();
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        if let Some(scheme) = quantization {
            model
                .quantize(&QuantizeOptions::new(scheme.parse().unwrap()))
                .unwrap();
        }
        let before = Scene::new("text", &model, [1, 8], 0, true).logits(&model);
        let lora = LoraConfig {
            r: 4,
            target_modules: Some(TargetModules::AllLinear),
            init_lora_weights: overdrive_lora::InitLoraWeights::Random,
            ..LoraConfig::default()
        };
        overdrive_lora::add_adapter(&mut model, "taught", &lora, &AddOptions::default()).unwrap();
        overdrive_lora::merge_and_unload(&mut model, &MergeOptions::default()).unwrap();
        let after = Scene::new("text", &model, [1, 8], 0, true).logits(&model);
        assert!(
            (before - after).abs().max().double_value(&[]) > 0.01,
            "the adapter does something"
        );
        cases.add(
            name,
            &mut model,
            &ExportOptions::default(),
            Promise::default(),
        );
    }
    cases.check();
}

/// The merged head has codes of its own; a graph with one name for both would give it those of the table.
#[test]
#[ignore = "needs Python with numpy, onnx and onnxruntime"]
fn a_quantized_head_that_was_tied_until_an_adapter_was_merged_keeps_its_codes_on_python() {
    let mut cases = Cases::new();
    let config = LlamaConfig {
        tie_word_embeddings: true,
        ..small(LlamaFamily::Llama)
    };
    let options = ExportOptions {
        activations: Activations::Float,
        ..ExportOptions::default()
    };
    for scheme in ["int8", "int4-g32", "nf4"] {
        let mut model = CausalLm::new(&config.clone().into(), &InitOptions::default()).unwrap();
        let scheme_of = scheme.parse().unwrap();
        model
            .quantize(&QuantizeOptions::new(scheme_of).with_head(scheme_of))
            .unwrap();
        let before = Scene::new("text", &model, [1, 8], 0, true).logits(&model);
        let lora = LoraConfig {
            r: 4,
            target_modules: Some(TargetModules::Names(vec!["lm_head".to_owned()])),
            init_lora_weights: overdrive_lora::InitLoraWeights::Random,
            ..LoraConfig::default()
        };
        overdrive_lora::add_adapter(&mut model, "taught", &lora, &AddOptions::default()).unwrap();
        overdrive_lora::merge_and_unload(&mut model, &MergeOptions::default()).unwrap();
        let after = Scene::new("text", &model, [1, 8], 0, true).logits(&model);
        let moved = (&before - &after).abs().max().double_value(&[]);
        assert!(moved > 0.01, "{scheme}: the adapter does something");
        let folder = cases.folder(&format!("own_head_{scheme}"));
        export(&mut model, folder.join("model.onnx"), &options).unwrap();
        model.dequantize().unwrap();
        let dense = Scene::new("text", &model, [1, 8], 0, true).logits(&model);
        let kept = (&dense - &after).abs().max().double_value(&[]);
        assert!(
            kept < moved / 2.0,
            "{scheme}: dense weights have it too: {kept}, {moved}"
        );
        write_case(&folder, &model, &Scene::usual(&model), Promise::default());
    }
    cases.check();
}
