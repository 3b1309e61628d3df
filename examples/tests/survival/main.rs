//! Runs of several processes, and runs that are killed. The other processes are this test program, which a
//! variable makes train as the examples do.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use overdrive::core::random::Generator;
use overdrive::core::{INTERRUPTED_EXIT_CODE, SAVED_EXIT_CODE};
use overdrive::distributed::{Launch, ProcessGroup, RunEnd};
use overdrive::tracking::{StepMetrics, read_metrics};
use overdrive::trainer::{
    DataShard, Evaluation, Interrupt, IntervalStrategy, Layers, OptimizerName,
    ResumeFromCheckpoint, RunFolder, RunOptions, RunSummary, SaveStrategy, TextData,
    TrainingArguments, evaluate, new_model, snapshot_files, train_with_batch_that_fits,
};
use overdrive::transformer::CausalLm;
use tch::Device;

/// The example `finetune`.
#[path = "../../finetune.rs"]
mod finetune_example;
/// The example `train`.
#[path = "../../train.rs"]
mod train_example;
use train_example::Flags;

/// The example `tune`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../tune.rs"]
mod tune_example;

#[path = "../fit/mod.rs"]
mod fit;
use fit::equal;
mod kills;
mod processes;
mod signals;
mod tuning;

/// The bytes that the tensors of the other process may take.
const MEMORY_LIMIT: &str = "OVERDRIVE_TRAINER_TEST_MEMORY_LIMIT";
const CONFIG: &str = "OVERDRIVE_TRAINER_TEST_CONFIG";
/// The rank that has another model than the others.
const OTHER_MODEL: &str = "OVERDRIVE_TRAINER_TEST_OTHER_MODEL";
/// The rank that has a key of the arguments with another value, as `RANK:key=value`.
const OTHER_ARGUMENT: &str = "OVERDRIVE_TRAINER_TEST_OTHER_ARGUMENT";
/// The rank whose data lacks a file.
const OTHER_DATA: &str = "OVERDRIVE_TRAINER_TEST_OTHER_DATA";
const TRAIN: [&str; 4] = ["--exact", "trains", "--ignored", "--nocapture"];

/// The program that the tests start, stop and kill; it trains as the example `train` does.
#[test]
#[ignore = "the other process of the tests here"]
fn trains() {
    let Some(config) = std::env::var_os(CONFIG).map(PathBuf::from) else {
        return;
    };
    if config
        .file_stem()
        .is_some_and(|stem| stem.to_string_lossy().starts_with("tune"))
    {
        return tunes(&config);
    }
    if config.ends_with("program.json") || config.ends_with("finetune.json") {
        return runs_the_example(&config);
    }
    let mut values: serde_json::Value =
        serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    if let Ok(other) = std::env::var(OTHER_ARGUMENT) {
        let (rank, setting) = other.split_once(':').unwrap();
        let (key, value) = setting.split_once('=').unwrap();
        if std::env::var("RANK").unwrap() == rank {
            values[key] = serde_json::from_str(value).unwrap();
        }
    }
    let mut arguments: TrainingArguments = serde_json::from_value(values).unwrap();
    let group = match arguments.init_process_group() {
        Ok(group) => group,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    };
    let rank = group.rank().to_string();
    fs::write(
        config.with_file_name(format!("pid-{rank}")),
        std::process::id().to_string(),
    )
    .unwrap();
    if std::env::var(OTHER_MODEL).is_ok_and(|other| other == rank) {
        arguments.model.intermediate_size += 8;
    }
    if std::env::var(OTHER_DATA).is_ok_and(|other| other == rank) {
        let files = fs::read_dir(&arguments.data[0]).unwrap();
        let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.pop();
        arguments.data = files;
    }
    // Without the harness, whose words would hide the code.
    std::process::exit(match train(&config, &arguments, &group) {
        Ok(summary) => i32::from(summary.end().exit_code()),
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    });
}

/// Runs the example `train`, or `finetune`, as it is.
fn runs_the_example(config: &Path) {
    let limit = std::env::var(MEMORY_LIMIT).ok();
    let limit = limit.map(|bytes| bytes.parse().unwrap());
    overdrive::sys::memory::set_limit(Device::Cpu, limit).unwrap();
    let flags = ["example", "--config", config.to_str().unwrap()];
    let ended = match config.ends_with("finetune.json") {
        true => finetune_example::run(&finetune_example::Flags::parse_from(flags)),
        false => train_example::run(&Flags::parse_from(flags)),
    };
    std::process::exit(match ended {
        Ok(end) => i32::from(end.exit_code()),
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    });
}

/// Trains as the example `train` does, without the results at its end.
fn train(config: &Path, arguments: &TrainingArguments, group: &ProcessGroup) -> Result<RunSummary> {
    train_with_batch_that_fits(
        &mut arguments.clone(),
        group,
        |_| {},
        |arguments, _| train_once(config, arguments, group),
    )
}

fn train_once(
    config: &Path,
    arguments: &TrainingArguments,
    group: &ProcessGroup,
) -> Result<RunSummary> {
    let precision = arguments.apply()?;
    let data = TextData::prepare_in(&config.with_file_name("cache"), arguments, |_| {})?;
    let device = arguments.device(group);
    let fingerprints = data.fingerprints(arguments, group)?;
    let mut model = new_model(arguments, &data, device)?;
    let folder = RunFolder::open_or_create(group, arguments)?;
    let options = RunOptions {
        precision: Some(precision),
        folder: Some(folder),
        files: snapshot_files(&model, &data, arguments)?,
        fingerprints: Some(fingerprints),
        ..RunOptions::default()
    };
    let shard = DataShard::of(group, device);
    let loader = data.train_loader(arguments, shard)?;
    let (summary, _) = fit::fit(
        arguments,
        group,
        options,
        &mut model,
        loader,
        &mut |model| {
            if config.ends_with("evaluated.json") {
                // The signal comes at the begin of the evaluation.
                Interrupt::install()?.request();
            }
            let batches = data.validation_loader(arguments, shard)?;
            Ok(Evaluation::new(evaluate(model, batches, precision, group)?))
        },
    )?;
    Ok(summary)
}

/// Fine-tunes as the example `finetune` does.
fn tunes(config: &Path) {
    let arguments = Layers::finetune().file(config).unwrap().resolve().unwrap();
    let group = arguments.training.init_process_group().unwrap();
    let rank = group.rank();
    fs::write(
        config.with_file_name(format!("pid-{rank}")),
        std::process::id().to_string(),
    )
    .unwrap();
    let tuned = finetune_example::finetune(&arguments, &group, true, |_| {}).unwrap();
    let end = overdrive_examples::write_tuned(tuned, &group).unwrap();
    let code = end.exit_code();
    fs::write(
        config.with_file_name(format!("code-{rank}")),
        code.to_string(),
    )
    .unwrap();
    std::process::exit(i32::from(code));
}

/// A folder with a text, runs and their configurations.
struct Workshop(tempfile::TempDir);

impl Workshop {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        fs::create_dir_all(&text).unwrap();
        for number in 0..60 {
            let line = format!("Document {number} says that the quick brown fox jumps.\n");
            let file = text.join(format!("{number:02}.txt"));
            fs::write(file, line.repeat(1 + number % 7)).unwrap();
        }
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arguments(&self) -> TrainingArguments {
        TrainingArguments {
            threads: Some(1),
            max_steps: 12,
            save_steps: 3.0,
            // The tests watch metrics.jsonl while a run writes it.
            logging_steps: 1.0,
            max_eval_batches: Some(3),
            per_device_train_batch_size: 2,
            ddp_timeout: 30.0,
            resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
            ..fit::tiny(self.path("text"))
        }
    }

    fn configured(&self, run: &str, arguments: &TrainingArguments) -> PathBuf {
        let config = self.path(&format!("{run}.json"));
        let arguments = TrainingArguments {
            output_dir: Some(self.path(run)),
            ..arguments.clone()
        };
        fs::write(&config, serde_json::to_vec(&arguments).unwrap()).unwrap();
        config
    }

    fn start(&self, run: &str, arguments: &TrainingArguments) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(TRAIN)
            .env(CONFIG, self.configured(run, arguments))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap()
    }

    fn launch(&self, run: &str, arguments: &TrainingArguments, processes: usize) -> Launch {
        Launch::new(std::env::current_exe().unwrap())
            .args(TRAIN)
            .env(CONFIG, self.configured(run, arguments))
            .nproc(processes)
    }

    /// Returns step, loss, gradient norm and evaluation of each line; there must be one line per step, in order.
    fn lines(&self, run: &str) -> Vec<(u64, f64, Option<f64>, Option<f64>)> {
        let metrics = read_metrics(self.path(run).join("metrics.jsonl")).unwrap();
        let numbers = |step: &StepMetrics| (step.step, step.loss, step.grad_norm, step.eval_loss);
        let lines: Vec<_> = metrics.records.iter().map(numbers).collect();
        let steps: Vec<u64> = lines.iter().map(|line| line.0).collect();
        assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
        lines
    }

    fn model(&self, run: &str, step: u64) -> CausalLm {
        let snapshot = self.path(run).join(format!("checkpoint-{step}"));
        CausalLm::from_pretrained(snapshot, &Default::default()).unwrap()
    }

    fn lines_so_far(&self, run: &str) -> usize {
        fs::read(self.path(run).join("metrics.jsonl"))
            .map_or(0, |text| text.iter().filter(|&&byte| byte == b'\n').count())
    }

    fn is_saving(&self, run: &str) -> bool {
        let entries = fs::read_dir(self.path(run)).into_iter().flatten().flatten();
        entries
            .into_iter()
            .any(|entry| entry.file_name().to_string_lossy().ends_with(".tmp"))
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "it hangs");
        std::thread::sleep(Duration::from_millis(1));
    }
}
