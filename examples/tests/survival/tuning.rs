//! The example `tune`, whose trials are other processes, and `auto_find_batch_size` of `train` and `finetune`.

use std::os::unix::fs::PermissionsExt;

use overdrive::optim::{LrSchedulerType, ScheduleOptions};
use overdrive::trainer::{
    FinetuneArguments, Interrupt, MemoryPlan, ModelArguments, Trials, TuneCandidate, TuneOutcome,
    decoder_shape,
};
use overdrive::transformer::{InitOptions, LlamaConfig, ModelConfig, SaveOptions};

use super::*;
use crate::tune_example::{Flags as TuneFlags, tune};

/// Returns a program that trains as the example does when it gets `--config FILE`.
fn program(shop: &Workshop) -> PathBuf {
    let script = shop.path("train.sh");
    let this = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\n{CONFIG}=\"$2\" exec '{}' {}\n",
        this.display(),
        TRAIN.join(" ")
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

/// Returns the arguments of a model whose steps take more memory than the 48 MiB that the measurement of the CPU's peak
/// rate takes at the start of a run.
fn arguments(shop: &Workshop) -> TrainingArguments {
    TrainingArguments {
        auto_precision: false,
        context_length: 128,
        model: ModelArguments {
            hidden_size: 128,
            intermediate_size: 512,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            ..ModelArguments::default()
        },
        ..shop.arguments()
    }
}

fn flags(shop: &Workshop, further: &[&str]) -> TuneFlags {
    let config = shop.configured("base", &arguments(shop));
    let results = shop.path("results");
    let words = [
        "tune",
        "--config",
        config.to_str().unwrap(),
        "--results",
        results.to_str().unwrap(),
        "--max-trials",
        "4",
        "--effective-batch",
        "8",
    ];
    TuneFlags::parse_from(words.iter().chain(further))
}

#[test]
fn tuning_measures_other_processes_and_writes_a_configuration_that_trains() {
    let shop = Workshop::new();
    let trials = Trials::new(program(&shop), 2, 1);
    let tuning = tune(&flags(&shop, &["--memory-limit", "1GiB"]), &trials).unwrap();
    let best = tuning.best().unwrap();
    let measured = best.measured().unwrap();
    assert!(measured.tokens_per_second > 0.0);
    // The peak is that of the trial's process: near its estimate, whatever this process holds.
    let ratio = measured.peak_bytes as f64 / best.estimated_bytes as f64;
    assert!((0.3..3.0).contains(&ratio), "{best:?}");
    let tried = tuning.rows.iter().filter(|row| row.measured().is_some());
    assert!((2..=4).contains(&tried.count()), "{}", tuning.markdown());
    for row in &tuning.rows {
        assert_eq!(row.candidate.batch.effective_batch(), 8);
    }
    let table = fs::read_to_string(shop.path("results/tune.md")).unwrap();
    assert!(table.contains("| chosen |"), "{table}");
    let config = shop.path("results/config.json");
    let read = Layers::new(Default::default()).file(&config).unwrap();
    let read = read.resolve().unwrap();
    assert_eq!(read.sequences_per_step(), 8);
    assert_eq!(
        read.per_device_train_batch_size,
        best.candidate.batch.micro_batch()
    );
    // The rest is the given configuration.
    assert_eq!((read.max_steps, read.learning_rate), (12, 1e-2));
    assert!(wait(&mut shop.start("best", &read)).success());
    assert_eq!(shop.lines("best").len(), 12);
}

#[test]
fn a_trial_is_shorter_than_a_phase_of_the_schedule() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        lr_scheduler_type: LrSchedulerType::WarmupStableDecay,
        lr_scheduler_kwargs: ScheduleOptions {
            num_decay_steps: Some(8),
            ..ScheduleOptions::default()
        },
        warmup_steps: 4.0,
        ..shop.arguments()
    };
    let candidate = TuneCandidate {
        batch: arguments.batch_plan(1).unwrap(),
        precision: overdrive::precision::Precision::Fp32,
        gradient_checkpointing: false,
        dataloader_num_workers: 0,
    };
    let trials = Trials::new(program(&shop), 2, 1);
    let end = trials.run(&arguments, &candidate).unwrap();
    assert!(matches!(end, TuneOutcome::Measured(_)), "{end}");
}

#[test]
fn a_limit_below_every_estimate_is_an_error_with_the_remedy() {
    let shop = Workshop::new();
    let trials = Trials::new(program(&shop), 2, 1);
    let error = tune(&flags(&shop, &["--memory-limit", "100KB"]), &trials).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("--memory-limit"), "{error}");
    let json = fs::read(shop.path("results/tune.json")).unwrap();
    let tuning: overdrive::trainer::Tuning = serde_json::from_slice(&json).unwrap();
    let left_out = |row: &overdrive::trainer::TuneRow| matches!(&row.outcome, TuneOutcome::LeftOut(why) if why.contains("estimate"));
    assert!(tuning.rows.iter().all(left_out));
}

#[test]
fn a_trial_that_is_killed_ran_out_of_memory() {
    let shop = Workshop::new();
    let script = shop.path("killed.sh");
    fs::write(&script, "#!/bin/sh\nkill -9 $$\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let trials = Trials::new(script, 2, 1);
    let error = tune(&flags(&shop, &["--memory-limit", "1GiB"]), &trials);
    assert!(error.unwrap_err().to_string().contains("no setting fits"));
    let table = fs::read_to_string(shop.path("results/tune.md")).unwrap();
    assert!(table.contains("SIGKILL"), "{table}");
}

/// The variable with the program of the trial of `tunes_until_a_signal`.
const TRIAL: &str = "OVERDRIVE_TEST_TRIAL";

#[test]
#[ignore = "another test runs it in a process of its own"]
fn tunes_until_a_signal() {
    let Some(script) = std::env::var_os(TRIAL) else {
        return;
    };
    Interrupt::install().unwrap();
    let shop = Workshop::new();
    let arguments = shop.arguments();
    let candidate = TuneCandidate {
        batch: arguments.batch_plan(1).unwrap(),
        precision: overdrive::precision::Precision::Fp32,
        gradient_checkpointing: false,
        dataloader_num_workers: 0,
    };
    let trials = Trials::new(script.into(), 2, 1);
    let error = trials.run(&arguments, &candidate).unwrap_err();
    assert!(error.to_string().contains("a signal"), "{error}");
}

#[test]
fn a_signal_ends_the_trial_and_leaves_nothing_of_it() {
    let shop = Workshop::new();
    let (script, pid, tmp) = (shop.path("endless.sh"), shop.path("pid"), shop.path("tmp"));
    let text = format!("#!/bin/sh\necho $$ > '{}'\nexec sleep 600\n", pid.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(&tmp).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tuning::tunes_until_a_signal", "--ignored"])
        .env(TRIAL, &script)
        .env("TMPDIR", &tmp)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let trial = loop {
        let text = fs::read_to_string(&pid).unwrap_or_default();
        if text.ends_with('\n') {
            break text.trim().to_owned();
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    };
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    assert!(wait(&mut child).success());
    let alive = Command::new("kill").args(["-0", &trial]).status().unwrap();
    assert!(!alive.success(), "the trial goes on");
    let left: Vec<_> = fs::read_dir(&tmp).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Runs the example of which `config` holds the arguments, in another process whose tensors may take `limit` bytes, and
/// returns whether it succeeded and what it printed.
fn run_within(limit: u64, config: &Path, arguments: &impl serde::Serialize) -> (bool, String) {
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(config, serde_json::to_vec(arguments).unwrap()).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(TRAIN)
        .env(CONFIG, config)
        .env(MEMORY_LIMIT, limit.to_string())
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output.status.success(), text)
}

/// Writes a model with its tokenizer, and records, and returns the arguments of a fine-tuning whose activations take
/// most of the memory.
fn finetuning(shop: &Workshop) -> FinetuneArguments {
    let model = shop.path("base");
    let shape = arguments(shop).model;
    let config: ModelConfig = LlamaConfig {
        vocab_size: 330,
        hidden_size: shape.hidden_size.try_into().unwrap(),
        intermediate_size: shape.intermediate_size.try_into().unwrap(),
        num_hidden_layers: shape.num_hidden_layers.try_into().unwrap(),
        num_attention_heads: shape.num_attention_heads.try_into().unwrap(),
        max_position_embeddings: 128,
        ..LlamaConfig::default()
    }
    .into();
    let fresh = CausalLm::new(&config, &InitOptions::default()).unwrap();
    fresh
        .save_pretrained(&model, &SaveOptions::default())
        .unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/overdrive-trainer/tests/fixtures/chat_labels/tokenizer.json");
    fs::copy(fixtures, model.join("tokenizer.json")).unwrap();
    fs::write(
        model.join("tokenizer_config.json"),
        r#"{"eos_token": "</s>"}"#,
    )
    .unwrap();
    let record = |number: usize| {
        let words = "so on and on ".repeat(number % 3 + 8);
        format!("{{\"prompt\": \"{number}: \", \"response\": \"{words}\"}}\n")
    };
    let records: String = (0..200).map(record).collect();
    fs::write(shop.path("records.jsonl"), records).unwrap();
    let mut arguments = FinetuneArguments {
        model_name_or_path: model,
        training: TrainingArguments {
            data: vec![shop.path("records.jsonl")],
            packing: true,
            context_length: 128,
            per_device_train_batch_size: 16,
            max_steps: 4,
            samples: 1,
            use_cpu: true,
            auto_precision: false,
            ..FinetuneArguments::default().training
        },
        ..FinetuneArguments::default()
    };
    arguments.training.output_dir = Some(shop.path("tuned"));
    arguments
}

#[test]
fn a_fine_tuning_that_runs_out_of_memory_continues_with_half_the_micro_batch() {
    let shop = Workshop::new();
    let mut arguments = finetuning(&shop);
    let options = overdrive::transformer::LoadOptions::default();
    let model = CausalLm::from_pretrained(&arguments.model_name_or_path, &options).unwrap();
    let shape = decoder_shape(&model);
    let step = |micro: u64| {
        let precision = overdrive::precision::Precision::Fp32;
        let plan = MemoryPlan {
            batch: micro,
            accumulates: micro < 16,
            ..arguments.training.memory_plan_of(shape, precision)
        };
        let all = plan.estimate().unwrap();
        // The adapter has about a fiftieth of the parameters.
        (all.gradients + all.optimizer) / 50 + all.activations + all.recomputed.max(all.logits)
    };
    // Between what 16 and what 4 take: at least one try fails.
    let limit = model.memory_footprint() as u64 + u64::midpoint(step(16), step(4));
    let config = shop.path("program/finetune.json");
    let (succeeded, text) = run_within(limit, &config, &arguments.to_values().unwrap());
    assert!(!succeeded && text.contains("out of memory"), "{text}");
    arguments.training.auto_find_batch_size = true;
    arguments.training.output_dir = Some(shop.path("found"));
    let (succeeded, text) = run_within(limit, &config, &arguments.to_values().unwrap());
    assert!(succeeded, "{text}");
    assert!(text.contains("memory ran out; again with"), "{text}");
    let stored = fs::read(shop.path("found/training_args.json")).unwrap();
    let stored: serde_json::Value = serde_json::from_slice(&stored).unwrap();
    let micro = stored["per_device_train_batch_size"].as_u64().unwrap();
    let steps = stored["gradient_accumulation_steps"].as_u64().unwrap();
    assert!(micro < 16 && micro * steps == 16, "{stored}");
    assert_eq!(shop.lines("found").len(), 4);
}

#[test]
fn a_run_that_runs_out_of_memory_continues_with_half_the_micro_batch() {
    let shop = Workshop::new();
    let mut arguments = TrainingArguments {
        per_device_train_batch_size: 16,
        max_steps: 4,
        samples: 1,
        ..arguments(&shop)
    };
    let estimate = |micro: u64| {
        let changed = TrainingArguments {
            per_device_train_batch_size: micro,
            gradient_accumulation_steps: 16 / micro,
            ..arguments.clone()
        };
        let plan = changed.memory_plan(300, overdrive::precision::Precision::Fp32);
        plan.estimate().unwrap().peak
    };
    // Between what 16 and what 4 take: at least one try fails.
    let limit = u64::midpoint(estimate(16), estimate(4));
    let run = |name: &str, arguments: &TrainingArguments| {
        let arguments = TrainingArguments {
            output_dir: Some(shop.path(name).join("run")),
            ..arguments.clone()
        };
        run_within(limit, &shop.path(name).join("program.json"), &arguments)
    };
    let (succeeded, text) = run("plain", &arguments);
    assert!(!succeeded && text.contains("out of memory"), "{text}");
    arguments.auto_find_batch_size = true;
    let (succeeded, text) = run("found", &arguments);
    assert!(succeeded, "{text}");
    assert!(text.contains("memory ran out; again with"), "{text}");
    let stored = fs::read(shop.path("found/run/training_args.json")).unwrap();
    let stored: TrainingArguments = serde_json::from_slice(&stored).unwrap();
    assert!(stored.per_device_train_batch_size < 16);
    assert_eq!(stored.sequences_per_step(), 16);
    assert_eq!(shop.lines("found/run").len(), 4);

    // A run that begins at a snapshot of another run begins there again after memory ran out.
    let first = TrainingArguments {
        max_steps: 2,
        ..arguments.clone()
    };
    let (succeeded, text) = run("first", &first);
    assert!(succeeded, "{text}");
    let snapshot = shop.path("first/run/checkpoint-2");
    arguments.resume_from_checkpoint = Some(ResumeFromCheckpoint::Folder(snapshot.clone()));
    let (succeeded, text) = run("second", &arguments);
    assert!(succeeded, "{text}");
    let (_, after) = text.split_once("memory ran out; again with").unwrap();
    let resumed = format!("resumed     from {}", snapshot.display());
    assert!(after.contains(&resumed), "{text}");
    let metrics = read_metrics(shop.path("second/run/metrics.jsonl")).unwrap();
    let steps: Vec<u64> = metrics.records.iter().map(|step| step.step).collect();
    assert_eq!(steps, [3, 4]);
}
