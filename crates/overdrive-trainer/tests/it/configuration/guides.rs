//! The files and tables of the page docs/src/configs.md.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_trainer::{FinetuneArguments, Layers, Preset, TrainingArguments};
use serde_json::Value;

use crate::configuration::{error, file, resolve};

const PAGE: &str = include_str!("../../../../../docs/src/configs.md");

/// Returns the code blocks of the page that begin with a line.
fn blocks(language: &str, program: &str) -> Vec<&'static str> {
    let opening = format!("```{language} {program}\n");
    let begun = PAGE.split(opening.as_str()).skip(1);
    begun.filter_map(|rest| rest.split("```").next()).collect()
}

fn trained(text: &str) -> (TrainingArguments, Vec<String>) {
    let (_folder, path) = file("run.yaml", text);
    let layers = Layers::new(Preset::Tiny).file(path).unwrap();
    let notes = layers.notes().to_vec();
    (layers.resolve().unwrap(), notes)
}

fn tuned(name: &str, text: &str) -> (FinetuneArguments, Vec<String>) {
    let (_folder, path) = file(name, text);
    let layers = Layers::finetune().file(path).unwrap();
    let notes = layers.notes().to_vec();
    (layers.resolve().unwrap(), notes)
}

#[test]
fn the_five_files_load_as_they_stand() {
    let files = blocks("yaml", "train");
    assert_eq!(files.len(), 3);
    let (first, notes) = trained(files[0]);
    assert!(first.fp16 && first.gradient_checkpointing && first.dataloader_pin_memory);
    assert_eq!(
        (
            first.per_device_train_batch_size,
            first.gradient_accumulation_steps
        ),
        (8, 4)
    );
    assert_eq!(first.dataloader_num_workers, 4);
    assert!(
        notes.contains(&"`batch_size` is `per_device_train_batch_size`".to_owned()),
        "{notes:?}"
    );
    assert!(
        notes.contains(&"`dtype: float16` is `fp16: true` (autocast)".to_owned()),
        "{notes:?}"
    );

    let (text, _) = trained(files[1]);
    assert_eq!(
        (
            text.context_length,
            text.learning_rate,
            text.num_train_epochs
        ),
        (512, 6e-4, 2.0)
    );
    assert!(text.fp16 && text.remove_duplicates && text.max_steps <= 0 && text.save_steps == 500.0);
    assert_eq!(text.dataloader_prefetch_factor, Some(4));

    let (spot, _) = trained(files[2]);
    assert_eq!(
        (spot.max_steps, spot.save_steps, spot.save_total_limit),
        (20_000, 200.0, Some(3))
    );
    assert_eq!(spot.ddp_timeout, 600.0);
    assert_eq!(
        serde_json::to_value(&spot.resume_from_checkpoint).unwrap(),
        Value::Bool(true)
    );

    let files = blocks("yaml", "finetune");
    assert_eq!(files.len(), 1);
    let (qlora, notes) = tuned("run.yaml", files[0]);
    assert!(
        qlora.load_in_4bit
            && qlora.bnb_4bit_use_double_quant
            && qlora.training.gradient_checkpointing
    );
    assert_eq!((qlora.lora_r, qlora.training.context_length), (16, 2048));
    assert_eq!(qlora.training.max_grad_norm, 0.3);
    assert!(
        notes
            .iter()
            .any(|note| note.starts_with("`provider: unsloth` is not needed: its fused kernels")),
        "{notes:?}"
    );

    let files = blocks("json", "finetune");
    assert_eq!(files.len(), 1);
    let (stopping, _) = tuned("run.json", files[0]);
    let training = &stopping.training;
    assert_eq!(
        (
            training.early_stopping_patience,
            training.early_stopping_threshold
        ),
        (Some(3), 1e-3)
    );
    assert!(
        training.bf16 && training.load_best_model_at_end && training.packing && stopping.use_peft
    );
    assert_eq!(
        (training.eval_steps, training.save_steps),
        (Some(100.0), 100.0)
    );
}

/// Each spelling of the table is read as the key beside it.
#[test]
fn every_spelling_of_the_table_is_read() {
    let table = PAGE
        .split("## Spellings")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let mut read = 0;
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let key = cells[2].trim_matches('`');
        let plain = TrainingArguments::default();
        let Some(value) = serde_json::to_value(&plain).unwrap().get(key).cloned() else {
            continue;
        };
        for spelling in cells[1].split(';').next().unwrap().split(", ") {
            let spelling = spelling.trim_matches('`');
            let given = match &value {
                Value::Bool(_) => Value::Bool(true),
                Value::Number(_) => Value::from(7),
                Value::String(name) => Value::from(name.as_str()),
                Value::Array(_) => serde_json::json!(["a.txt"]),
                Value::Object(options) => {
                    let mut options = options.clone();
                    options.insert("policy".to_owned(), "matmuls".into());
                    Value::Object(options)
                }
                // Those that have no default.
                _ => match key {
                    "output_dir" => Value::from("somewhere"),
                    "resume_from_checkpoint" | "tf32" => Value::Bool(true),
                    _ => Value::from(7),
                },
            };
            let values = serde_json::json!({ spelling: given.clone() });
            let layers = Layers::new(Preset::Tiny).layer(values, "a file").unwrap();
            let arguments = serde_json::to_value(layers.arguments()).unwrap();
            let same = arguments[key] == given || arguments[key].as_f64() == given.as_f64();
            assert!(
                same && !arguments[key].is_null(),
                "{spelling}: {} {given}",
                arguments[key]
            );
            read += 1;
        }
    }
    assert!(read > 30, "{read}");
}

#[test]
fn contradictions_and_unknown_names_are_errors() {
    for (text, expected) in [
        (
            "batch_size: 4\nper_device_train_batch_size: 8",
            "run.yaml: `batch_size` and `per_device_train_batch_size`",
        ),
        (
            "training:\n  dtype: int4",
            "run.yaml: `dtype` is `int4`, which is not one of `bf16`",
        ),
        (
            "provider: nobody",
            "run.yaml: `provider` is `nobody`, which is not one of `unsloth`",
        ),
        ("device: tpu", "run.yaml: `device` is `tpu`"),
        (
            "batch_sise: 4",
            "run.yaml: unknown key `batch_sise`; did you mean `batch_size`?",
        ),
        (
            "use_4bit: true",
            "run.yaml: `load_in_4bit: true` is not supported in training from scratch; trainable weights cannot be quantized; fine-tuning trains adapters beside quantized weights; to fine-tune, run: cargo run --release -p overdrive-examples --example finetune -- --config ",
        ),
    ] {
        let found = error(text);
        assert!(found.starts_with(expected), "{found}");
    }
    assert!(resolve(&["--steps", "3"]).is_ok());
}

/// The error of a file of keys that the other program reads has the command that runs it.
#[test]
fn the_error_of_a_file_for_the_other_program_has_its_command() {
    let run = "cargo run --release -p overdrive-examples --example";
    let text = "model_name_or_path: models/base\ndata: train.jsonl\nload_in_8bit: true\n";
    for (name, quoted) in [("qlora.yaml", ""), ("my qlora.yaml", "'")] {
        let (_folder, path) = file(name, text);
        let found = resolve(&["--config", &path]).unwrap_err().to_string();
        assert!(
            found.ends_with(&format!(
                "; to fine-tune, run: {run} finetune -- --config {quoted}{path}{quoted}"
            )),
            "{found}"
        );
    }
    // What the file lacks is a flag of the command.
    let found = error("lora: {r: 8, alpha: 16}");
    assert!(
        found.starts_with("run.yaml: `lora: {\"r\":8,\"alpha\":16}` is not supported in training from scratch; to fine-tune, run: "),
        "{found}"
    );
    assert!(found.ends_with(" --model DIR --data FILE"), "{found}");

    let (_folder, path) = file("run.yaml", "model: models/base\ntokenizer: t.json\n");
    let found = Layers::finetune().file(&path).unwrap_err().to_string();
    assert!(
        found.ends_with(&format!(
            "`tokenizer: t.json` is not supported in fine-tuning; leave it out: the tokenizer of the model is used; to train from scratch, run: {run} train -- --config {path}"
        )),
        "{found}"
    );
}

#[test]
fn zero_steps_are_never_and_a_section_that_is_not_enabled_is_left_out() {
    use overdrive_trainer::{IntervalStrategy, SaveStrategy};
    let (never, notes) = trained("eval_steps: 0\nsave_steps: 0\n");
    assert_eq!(never.eval_strategy, IntervalStrategy::No);
    assert_eq!(never.save_strategy, SaveStrategy::No);
    assert!(
        notes.contains(&"`eval_steps: 0` is `eval_strategy: no`".to_owned()),
        "{notes:?}"
    );
    let flags = resolve(&["--eval-steps", "0", "--save-steps", "0"]).unwrap();
    assert_eq!(flags, never);

    let (arguments, _) = trained("early_stopping: {enabled: false, patience: 3}\n");
    assert_eq!(arguments.early_stopping_patience, None);
    let (arguments, _) = trained("early_stopping: true\n");
    assert_eq!(arguments.early_stopping_patience, Some(3));
    let (arguments, _) = trained("use_early_stopping: true\npatience: 5\n");
    assert_eq!(arguments.early_stopping_patience, Some(5));
    let (arguments, _) = trained("early_stopping: 4\n");
    assert_eq!(arguments.early_stopping_patience, Some(4));
}
