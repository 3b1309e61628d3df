//! Small fine-tuning runs: LoRA, QLoRA and all weights on prompts and responses.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use overdrive::datasets::{Batch, DeviceLoader, PackingStrategy};
use overdrive::distributed::ProcessGroup;
use overdrive::generation::{ChatTemplate, Message, ModelFiles};
use overdrive::lora::{LoadAdapterOptions, Names, load_adapter};
use overdrive::tracking::read_metrics;
use overdrive::trainer::{
    FinetuneArguments, FinetuneMethod, FinetuneResults, InstructionData, IntervalStrategy, Layers,
    Quant4Type, ResumeFromCheckpoint,
};
use overdrive::transformer::{
    CausalLm, ForwardInput, InitOptions, LabelShift, LlamaConfig, LoadOptions, ModelConfig,
    SaveOptions,
};
use tch::{Device, Kind, Tensor};

use crate::alone;
use crate::finetune_example::compare;

/// Fine-tunes as the example does.
fn finetune(arguments: &FinetuneArguments, say: impl FnMut(&str)) -> Result<FinetuneResults> {
    let group = ProcessGroup::single();
    let tuned = crate::finetune_example::finetune(arguments, &group, true, say)?;
    Ok(tuned.write("base")?.unwrap())
}

fn tokenizer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/overdrive-trainer/tests/fixtures/chat_labels/tokenizer.json")
}

/// Creates a small model with a tokenizer, and questions to train on.
pub(crate) fn prepare(folder: &Path, questions: usize) -> FinetuneArguments {
    let model = folder.join("base");
    if !model.exists() {
        let config: ModelConfig = LlamaConfig {
            vocab_size: 330,
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            max_position_embeddings: 64,
            // Wide enough that a frozen head can be sure of something.
            initializer_range: 0.15,
            ..LlamaConfig::default()
        }
        .into();
        let fresh = CausalLm::new(&config, &InitOptions::default()).unwrap();
        fresh
            .save_pretrained(&model, &SaveOptions::default())
            .unwrap();
        std::fs::copy(tokenizer(), model.join("tokenizer.json")).unwrap();
        std::fs::write(
            model.join("tokenizer_config.json"),
            r#"{"eos_token": "</s>"}"#,
        )
        .unwrap();
    }
    let data = folder.join(format!("questions{questions}.jsonl"));
    let mut text = String::new();
    for number in 0..questions {
        let (a, b) = (number % 7, number % 5);
        writeln!(text, r#"{{"prompt": "{a}+{b}=", "response": "{}"}}"#, a + b).unwrap();
    }
    std::fs::write(&data, text).unwrap();
    let mut arguments = FinetuneArguments {
        model_name_or_path: model,
        lora_r: 8,
        lora_alpha: 16.0,
        lora_dropout: 0.0,
        target_modules: Some(Names::One("all-linear".to_owned())),
        ..FinetuneArguments::default()
    };
    arguments.training.data = vec![data];
    arguments.training.output_dir = Some(folder.join("run"));
    arguments.training.max_steps = 20;
    arguments.training.learning_rate = 5e-3;
    arguments.training.use_cpu = true;
    arguments.training.threads = Some(2);
    arguments.training.samples = 1;
    arguments
}

fn quiet(_line: &str) {}

#[test]
fn the_loss_curve_of_qlora_is_within_two_percent_of_loras() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 70);
    arguments.training.max_steps = 40;
    // Slowly: on a random model with 64 channels, unlike on a trained one, what four bits change grows
    // with each large step.
    arguments.training.learning_rate = 1e-3;
    let comparison = compare(&arguments, quiet).unwrap();
    let difference = comparison.curve_difference().unwrap();
    assert!(difference < 0.02, "{difference}");
    let losses = |index: usize| &comparison.rows[index].2.losses;
    for (index, method) in FinetuneMethod::ALL.into_iter().enumerate() {
        assert_eq!(comparison.rows[index].0, method);
        assert!(
            losses(index)[39] < 0.9 * losses(index)[0],
            "{method}: {:?}",
            losses(index)
        );
    }
    // Adapters learn a part of the numbers, with the optimizer's state to match, and packed weights are
    // an eighth of those in the blocks.
    let memory = |index: usize| &comparison.rows[index].1;
    let (full, lora, qlora) = (memory(0), memory(1), memory(2));
    assert_eq!(full.trainable_parameters, full.all_parameters);
    assert!(lora.trainable_parameters < full.trainable_parameters / 2);
    assert_eq!(qlora.trainable_parameters, lora.trainable_parameters);
    // Two moments of 4 bytes, and the steps taken.
    let state = |parameters: u64| 8 * parameters;
    assert!(
        (state(lora.trainable_parameters)..state(lora.trainable_parameters) + 4096)
            .contains(&lora.optimizer_bytes),
        "{}",
        lora.optimizer_bytes
    );
    assert!(qlora.weight_bytes < lora.weight_bytes && lora.weight_bytes > full.weight_bytes);
    let text = comparison.to_string();
    assert!(
        text.contains("QLoRA (NF4, double quantization)") && text.contains("from LoRA's"),
        "{text}"
    );
}

#[test]
fn a_run_leaves_an_adapter_that_gives_the_trained_model_again() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 40);
    arguments.merge = true;
    arguments.training.eval_strategy = IntervalStrategy::Steps;
    arguments.training.eval_steps = Some(10.0);
    arguments.training.validation_fraction = 0.2;
    let mut lines = String::new();
    let results = finetune(&arguments, |line| lines += &format!("{line}\n")).unwrap();
    assert!(lines.contains("the model has no chat template"), "{lines}");
    assert!(lines.contains("max_seq_length is 64"), "{lines}");
    let run = folder.path().join("run");
    for file in [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "training_args.json",
        "metrics.jsonl",
        "report.html",
        "merged/model.safetensors",
        "merged/tokenizer.json",
    ] {
        assert!(run.join(file).is_file(), "{file}");
    }
    let losses = &results.summary.losses;
    assert!(losses[19] < losses[0], "{losses:?}");
    let evaluation = results.summary.evaluation.as_ref().unwrap().loss;
    assert!(evaluation < losses[0], "{evaluation} {losses:?}");
    assert!(results.samples[0].prompt.ends_with('='));
    assert!(
        results.to_string().contains("full fine-tuning: optimizer"),
        "{results}"
    );

    let base = arguments.model_name_or_path.clone();
    let load = |dir: &Path| CausalLm::from_pretrained(dir, &LoadOptions::default()).unwrap();
    let mut adapted = load(&base);
    load_adapter(
        &mut adapted,
        &run,
        "default",
        &LoadAdapterOptions::default(),
    )
    .unwrap();
    let ids = Tensor::arange(12, (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let logits = |model: &CausalLm| {
        let _no_grad = tch::no_grad_guard();
        model.forward(ForwardInput::new(&ids)).unwrap()
    };
    let merged = load(&run.join("merged"));
    assert!(logits(&merged).allclose(&logits(&adapted), 1e-4, 1e-5, false));
    assert!(!logits(&load(&base)).allclose(&logits(&adapted), 1e-2, 1e-2, false));

    // The stored configuration is a configuration.
    let again = Layers::finetune()
        .file(run.join("training_args.json"))
        .unwrap()
        .resolve()
        .unwrap();
    let mut expected = arguments.clone();
    // As it ran: not longer than the context.
    expected.training.context_length = 64;
    assert_eq!(again, expected);
    let error = finetune(&arguments, quiet).unwrap_err().to_string();
    assert!(error.contains("already holds a run"), "{error}");
}

#[test]
fn fine_tuning_resumes_with_its_own_records_template_and_model_only() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 30);
    arguments.training.max_steps = 2;
    arguments.training.samples = 0;
    finetune(&arguments, quiet).unwrap();
    arguments.training.max_steps = 3;
    arguments.training.resume_from_checkpoint = Some(ResumeFromCheckpoint::Latest(true));
    let error = |change: &dyn Fn(&mut FinetuneArguments)| {
        let mut arguments = arguments.clone();
        change(&mut arguments);
        finetune(&arguments, quiet).unwrap_err().to_string()
    };
    let more = prepare(folder.path(), 31).training.data;
    type Change<'c> = &'c dyn Fn(&mut FinetuneArguments);
    let changes: [(&str, Change<'_>); 6] = [
        ("`completion_only_loss` was true and is false", &|a| {
            a.completion_only_loss = false;
        }),
        ("`data` was ", &|a| a.training.data = more.clone()),
        ("`data` was ", &|a| a.max_train_samples = Some(29)),
        ("`chat_template` was ", &|a| {
            a.prompt_template = "Q: {prompt} A:".to_owned();
        }),
        // The tensors of the adapter have the same shapes with any scale.
        ("`lora_alpha` was 16 and is 32", &|a| a.lora_alpha = 32.0),
        ("`seed` was 42 and is 1", &|a| a.training.seed = 1),
    ];
    for (expected, change) in changes {
        let error = error(change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let weights = arguments.model_name_or_path.join("model.safetensors");
    let stored = std::fs::read(&weights).unwrap();
    let mut bytes = stored.clone();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let error = error(&|_| {});
    assert!(error.contains("`model_name_or_path` was "), "{error}");

    std::fs::write(&weights, stored).unwrap();
    arguments.training.learning_rate = 1e-3;
    let results = finetune(&arguments, quiet).unwrap();
    assert_eq!(results.summary.resumed_step, 2);
}

#[test]
fn all_weights_can_be_trained_and_are_saved_as_a_model() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 20);
    arguments.use_peft = false;
    arguments.training.max_steps = 4;
    let results = finetune(&arguments, quiet).unwrap();
    let model = results.folder.model();
    assert!(model.join("model.safetensors").is_file() && model.join("tokenizer.json").is_file());
    assert_eq!(
        results.memory.trainable_parameters,
        results.memory.all_parameters
    );
}

#[test]
fn packed_padded_and_padding_free_batches_have_one_loss() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // One step over all examples, whatever the layout.
    let first_loss = |change: &dyn Fn(&mut FinetuneArguments)| {
        let mut arguments = prepare(folder.path(), 12);
        arguments.training.max_steps = 1;
        arguments.training.per_device_train_batch_size = 12;
        arguments.training.samples = 0;
        arguments.training.overwrite_output_dir = true;
        change(&mut arguments);
        finetune(&arguments, quiet).unwrap().summary.losses[0]
    };
    let padded = first_loss(&|_| {});
    for loss in [
        first_loss(&|arguments| arguments.training.packing = true),
        first_loss(&|arguments| arguments.training.padding_free = true),
        first_loss(&|arguments| {
            arguments.training.packing = true;
            arguments.training.gradient_checkpointing = true;
        }),
    ] {
        assert!((loss - padded).abs() < 1e-5 * padded, "{loss} {padded}");
    }
}

#[test]
fn losses_of_fine_tuning_are_equal_for_any_number_of_workers() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for (grouped, packed) in [(false, false), (true, false), (false, true)] {
        let losses = |workers| {
            let mut arguments = prepare(folder.path(), 30);
            arguments.training.max_steps = 8;
            arguments.training.samples = 0;
            arguments.training.overwrite_output_dir = true;
            arguments.training.group_by_length = grouped;
            arguments.training.packing = packed;
            arguments.training.dataloader_num_workers = workers;
            finetune(&arguments, quiet).unwrap().summary.losses
        };
        let without = losses(0);
        assert_eq!(losses(1), without);
        assert_eq!(losses(2), without);
    }
}

#[test]
fn equal_records_are_left_out_and_counted() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // Of 7 by 5 different questions.
    let mut arguments = prepare(folder.path(), 70);
    arguments.training.remove_duplicates = true;
    arguments.training.eval_strategy = IntervalStrategy::Steps;
    arguments.training.validation_fraction = 0.2;
    let mut said = String::new();
    let data = InstructionData::prepare(&arguments, &[], |line| said += line);
    let data = data.unwrap();
    assert!(
        said.contains("35 records equal to an earlier one removed"),
        "{said}"
    );
    let held = data.validation.as_ref().unwrap();
    assert_eq!((data.train.lengths().len(), held.lengths().len()), (28, 7));
}

#[test]
fn padding_changes_no_loss_with_a_mask_or_without() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 9);
    // The questions are about equally long; this pads each of them.
    arguments.training.pad_to_multiple_of = 64;
    let data = InstructionData::prepare(&arguments, &[], quiet).unwrap();
    let mut batches = data.train_loader(&arguments, Device::Cpu).unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert!(batch.padded_tokens() > batch.tokens);
    let model =
        CausalLm::from_pretrained(&arguments.model_name_or_path, &LoadOptions::default()).unwrap();
    let loss = |input| {
        let shift = LabelShift::HuggingFace;
        f64::try_from(model.loss_of(input, &batch.labels, shift).unwrap().sum).unwrap()
    };
    let without = loss(ForwardInput::new(&batch.input_ids));
    let mask = batch.attention_mask.as_ref().unwrap();
    let with = loss(ForwardInput::new(&batch.input_ids).with_attention_mask(mask));
    assert!((with - without).abs() < 1e-5 * without, "{with} {without}");
}

#[test]
fn optimizers_compute_types_and_checkpointing_compose_with_quantized_weights() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("qlora.yaml");
    let base = prepare(folder.path(), 16);
    for (optim, dtype, bits) in [
        ("paged_adamw_8bit", "float32", "load_in_4bit"),
        ("paged_adamw_32bit", "bfloat16", "load_in_4bit"),
        ("adamw_8bit", "float32", "load_in_8bit"),
    ] {
        let text = format!(
            "model: {}\ndata: {}\noutput_dir: {}\noverwrite_output_dir: true\n{bits}: true\n\
             bnb_4bit_quant_type: nf4\nbnb_4bit_use_double_quant: true\nbnb_4bit_compute_dtype: {dtype}\n\
             lora_r: 4\nlora_alpha: 8\nlora_dropout: 0.1\ntarget_modules: [q_proj, v_proj]\noptim: {optim}\n\
             packing: true\nuse_gradient_checkpointing: true\nmax_steps: 3\nuse_cpu: true\nsamples: 0\n",
            base.model_name_or_path.display(),
            base.training.data[0].display(),
            folder.path().join("run").display(),
        );
        std::fs::write(&file, text).unwrap();
        let arguments = Layers::finetune().file(&file).unwrap().resolve().unwrap();
        let results = finetune(&arguments, quiet).unwrap();
        assert!(
            results.summary.losses.iter().all(|loss| loss.is_finite()),
            "{optim}"
        );
        assert!(results.fill.rows.is_some_and(|rows| rows > 0.5), "{optim}");
        assert_eq!(results.fill.batches, 1.0);
    }
}

#[test]
fn losses_are_scaled_if_quantized_weights_compute_in_float16() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let run = |dtype: &str| {
        let mut arguments = prepare(folder.path(), 16);
        arguments.training.output_dir = Some(folder.path().join(dtype));
        arguments.training.max_steps = 2;
        arguments.load_in_4bit = true;
        let name = serde_json::Value::String(dtype.to_owned());
        arguments.bnb_4bit_compute_dtype = serde_json::from_value(name).unwrap();
        let results = finetune(&arguments, quiet).unwrap();
        let metrics = read_metrics(results.folder.metrics()).unwrap().records;
        (metrics[0].loss_scale, results.memory.full_peak_bytes)
    };
    let ((half, of_half), (full, of_full)) = (run("float16"), run("float32"));
    // The initial scale of torch.amp.
    assert_eq!((half, full), (Some(65536.0), None));
    // The estimate is for the precision that is used: autocast keeps copies of the weights.
    assert_ne!(of_half, of_full);
}

fn error_of(values: serde_json::Value) -> String {
    let layers = Layers::finetune().layer(values, "run.json");
    layers.and_then(Layers::resolve).unwrap_err().to_string()
}

#[test]
fn errors_of_a_configuration_name_the_key() {
    use serde_json::json;
    let with = |more: serde_json::Value| {
        let mut all = json!({"model": "m", "data": "d.jsonl"});
        all.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        error_of(all)
    };
    for (more, problem) in [
        (
            json!({"lora_alfa": 3}),
            "unknown key `lora_alfa`; did you mean `lora_alpha`?",
        ),
        (
            json!({"learning_rat": 3}),
            "unknown key `learning_rat`; did you mean `learning_rate`?",
        ),
        (
            json!({"bnb_4bit_quant_type": "nf5"}),
            "`bnb_4bit_quant_type` is `nf5`",
        ),
        (
            json!({"lora_r": "many"}),
            "`lora_r` is the string \"many\", expected an integer",
        ),
        (
            json!({"load_in_4bit": true, "load_in_8bit": true}),
            "`load_in_8bit` is true; drop one of them",
        ),
        (
            json!({"load_in_4bit": true, "use_peft": false}),
            "quantized weights, which cannot be trained",
        ),
        (
            json!({"vocab_size": 5}),
            "the tokenizer of the model is used",
        ),
        (json!({"neftune_noise_alpha": 5}), "neftune_noise_alpha"),
        (json!({"r": 4, "lora_r": 8}), "two names of the same key"),
        (
            json!({"packing": true, "group_by_length": true}),
            "whose rows are full anyway",
        ),
        (
            json!({"prompt_template": "Q:"}),
            "a text that contains {prompt}",
        ),
        (json!({"lora_r": 0}), "`lora_r` is 0; it must be at least 1"),
    ] {
        let error = with(more.clone());
        assert!(error.contains(problem), "{more}: {error}");
    }
    assert!(error_of(json!({"data": "d"})).contains("`--model MODEL`"));
    assert!(error_of(json!({"model": "m"})).contains("`--data FILE`"));
}

#[test]
fn sections_and_names_of_other_libraries_are_read() {
    use serde_json::json;
    let arguments = Layers::finetune()
        .layer(
            json!({
                "base_model": "m",
                "train_file": ["a.jsonl", "b.jsonl"],
                "quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "torch.bfloat16"},
                "peft_config": {"r": 32, "lora_alpha": 64, "task_type": "CAUSAL_LM", "target_modules": "all-linear"},
                "use_gradient_checkpointing": "unsloth",
                "max_length": 512,
                "packing_strategy": "wrapped",
            }),
            "run.json",
        )
        .unwrap()
        .resolve()
        .unwrap();
    assert_eq!(arguments.training.data.len(), 2);
    assert_eq!((arguments.lora_r, arguments.lora_alpha), (32, 64.0));
    assert_eq!(arguments.bnb_4bit_quant_type, Quant4Type::Nf4);
    assert!(arguments.training.gradient_checkpointing);
    assert_eq!(arguments.training.context_length, 512);
    assert_eq!(
        arguments.quantization().unwrap().scheme.to_string(),
        "nf4-single"
    );
    assert_eq!(arguments.precision(), overdrive::precision::Precision::Bf16);
}

#[test]
fn a_second_start_reads_the_tokens_from_the_cache_and_gives_the_same_batches() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 30);
    arguments.training.packing = true;
    let cache = folder.path().join("cache");
    let start = |arguments: &FinetuneArguments| {
        let mut said = String::new();
        let say = |line: &str| said += &format!("{line}\n");
        let data = InstructionData::prepare_in(&cache, arguments, &[], say).unwrap();
        let mut batches = data.train_loader(arguments, Device::Cpu).unwrap();
        let batches: Vec<_> = (0..4).map(|_| batches.next().unwrap().unwrap()).collect();
        (said, batches)
    };
    let (written, first) = start(&arguments);
    assert!(
        written.contains("tokens written to the cache, "),
        "{written}"
    );
    let (read, second) = start(&arguments);
    assert!(read.contains("tokens read from the cache"), "{read}");
    for (first, second) in first.iter().zip(&second) {
        assert_eq!(
            (&first.input_ids, &first.labels),
            (&second.input_ids, &second.labels)
        );
        assert_eq!(first.padded_tokens(), first.tokens);
    }
    // What does not change the tokens reads them: the order, the packing, the split.
    let mut same = arguments.clone();
    same.training.seed = 7;
    same.training.packing = false;
    same.training.validation_fraction = 0.5;
    same.lora_r = 4;
    assert!(start(&same).0.contains("read from the cache"));

    let made_again = |change: &dyn Fn(&mut FinetuneArguments)| {
        let mut changed = arguments.clone();
        change(&mut changed);
        for expected in ["written to the cache", "read from the cache"] {
            let said = start(&changed).0;
            assert!(said.contains(expected), "{expected}: {said}");
        }
    };
    made_again(&|a| a.training.context_length = 20);
    made_again(&|a| a.prompt_template = "Q: {prompt} A:".to_owned());
    made_again(&|a| a.completion_only_loss = false);
    let template = folder.path().join("chat.jinja");
    let chat = |extra: &str| {
        format!(
            "{{% for m in messages %}}<{{{{ m['role'] }}}}>{{{{ m['content'] }}}}{extra}{{% endfor %}}"
        )
    };
    for text in [chat(""), chat("{{ eos_token }}")] {
        std::fs::write(&template, text).unwrap();
        made_again(&|a| a.chat_template_path = Some(template.clone()));
    }
    // A special token of the template is part of it.
    let config = arguments.model_name_or_path.join("tokenizer_config.json");
    std::fs::write(&config, r#"{"eos_token": "<s>"}"#).unwrap();
    made_again(&|a| a.chat_template_path = Some(template.clone()));
    // A template that tells the time is not cached.
    std::fs::write(&template, chat("{{ strftime_now('%Y') }}")).unwrap();
    arguments.chat_template_path = Some(template);
    for _ in 0..2 {
        let said = start(&arguments).0;
        assert!(
            said.contains("not cached: the chat template calls `strftime_now`"),
            "{said}"
        );
    }
}

/// The template once stayed behind where it was that of a folder, and had the special tokens of that folder.
#[test]
fn the_chat_template_of_another_models_folder_is_saved_with_the_model() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 4);
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let template = "{% for m in messages %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}\
                    {% endfor %}";
    let config = serde_json::json!({"chat_template": template, "eos_token": "<|other|>"});
    std::fs::write(other.join("tokenizer_config.json"), config.to_string()).unwrap();
    arguments.chat_template_path = Some(other.clone());
    let data =
        InstructionData::prepare_in(&folder.path().join("cache"), &arguments, &[], |_| {}).unwrap();
    let saved = folder.path().join("saved");
    data.copy_tokenizer(&arguments, &saved).unwrap();
    let written = std::fs::read_to_string(saved.join("chat_template.jinja")).unwrap();
    assert_eq!(written, template);

    let conversation = [Message::user("a"), Message::assistant("b")];
    let render = |template: ChatTemplate| template.render(&conversation, &Default::default());
    let files = ModelFiles::open(&arguments.model_name_or_path).unwrap();
    let trained = render(files.chat_template_from(&other).unwrap()).unwrap();
    assert_eq!(trained, "a</s>b</s>");
    let loaded = ModelFiles::open(&saved).unwrap().chat_template().unwrap();
    assert_eq!(render(loaded).unwrap(), trained);
}

/// Examples were once cut off at the length of a row before the packing could split them.
#[test]
fn packing_that_splits_long_examples_trains_on_all_of_their_tokens() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 3);
    let long = "0123456789".repeat(6);
    let text = format!("{{\"prompt\": \"a\", \"response\": \"{long}\"}}\n");
    std::fs::write(&arguments.training.data[0], text.repeat(3)).unwrap();
    arguments.training.context_length = 16;
    arguments.training.packing = true;
    arguments.training.eval_strategy = IntervalStrategy::Steps;
    arguments.training.validation_fraction = 0.4;
    let cache = folder.path().join("cache");
    let mut tokens = |strategy| {
        arguments.training.packing_strategy = strategy;
        let data = InstructionData::prepare_in(&cache, &arguments, &[], quiet).unwrap();
        let widest = |loader: DeviceLoader<Batch>| {
            let batches = loader.map(Result::unwrap);
            batches.flat_map(|batch| batch.sequence_lengths).max()
        };
        let held = data
            .validation_loader(&arguments, Device::Cpu)
            .unwrap()
            .unwrap();
        assert_eq!(widest(held), Some(16));
        let mut loader = data.train_loader(&arguments, Device::Cpu).unwrap();
        let batches = loader.next_batches(100).unwrap();
        let lengths = batches.iter().flat_map(|batch| &batch.sequence_lengths);
        assert_eq!(lengths.max(), Some(&16));
        batches.iter().map(|batch| batch.tokens).sum::<usize>()
    };
    // Two examples of 62 tokens: a letter, 60 digits and the end.
    assert_eq!(tokens(PackingStrategy::Bfd), 2 * 16);
    assert_eq!(tokens(PackingStrategy::BfdSplit), 2 * 62);
    assert_eq!(tokens(PackingStrategy::Wrapped), 2 * 62);
}

#[test]
fn the_lines_about_padding_tell_padded_from_packed_batches() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 16);
    let record = |number: usize| {
        let answer = "1".repeat(1 + number % 7);
        format!("{{\"prompt\": \"{number}=\", \"response\": \"{answer}\"}}\n")
    };
    let text: String = (0..16).map(record).collect();
    std::fs::write(&arguments.training.data[0], text).unwrap();
    arguments.training.max_steps = 1;
    arguments.training.samples = 0;
    let mut lines = |packing: bool| {
        arguments.training.packing = packing;
        arguments.training.output_dir = Some(folder.path().join(format!("run{packing}")));
        let mut said = String::new();
        let results = finetune(&arguments, |line| said += &format!("{line}\n")).unwrap();
        (said, results.to_string(), results.fill)
    };
    let (start, end, fill) = lines(true);
    assert!(
        start.contains(" rows per epoch, no padding, packed rows "),
        "{start}"
    );
    assert!(end.contains(" tokens/s, no padding\n"), "{end}");
    assert_eq!(fill.batches, 1.0);
    let (start, end, fill) = lines(false);
    assert!(
        start.contains("% of the positions are padding\n"),
        "{start}"
    );
    assert!(end.contains("without padding, which was "), "{end}");
    assert!(fill.batches < 1.0 && fill.rows.is_none(), "{fill:?}");
}

#[test]
fn a_data_file_that_is_emptied_after_the_last_step_does_not_take_the_results() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 30);
    arguments.merge = true;
    arguments.training.max_steps = 2;
    arguments.training.samples = 3;
    let group = ProcessGroup::single();
    let tuned = crate::finetune_example::finetune(&arguments, &group, true, quiet).unwrap();
    // The program still has it in its memory map, without bytes.
    let data = &arguments.training.data[0];
    let emptied = std::fs::File::options().write(true).open(data).unwrap();
    emptied.set_len(0).unwrap();
    let results = tuned.write("base").unwrap().unwrap();
    assert_eq!(results.samples.len(), 3);
    let run = folder.path().join("run");
    for file in ["report.html", "merged/model.safetensors"] {
        assert!(run.join(file).is_file(), "{file}");
    }
}

#[cfg(unix)]
#[test]
fn the_results_of_a_run_whose_folder_was_moved_are_not_written_to_its_old_path() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = prepare(folder.path(), 30);
    arguments.training.max_steps = 2;
    let group = ProcessGroup::single();
    let tuned = crate::finetune_example::finetune(&arguments, &group, true, quiet).unwrap();
    let (old, new) = (folder.path().join("run"), folder.path().join("moved"));
    std::fs::rename(&old, &new).unwrap();
    let error = tuned.write("base").unwrap_err().to_string();
    let said = format!("the folder {} was moved", old.display());
    assert!(error.starts_with(&said), "{error}");
    assert!(!old.exists());
}
