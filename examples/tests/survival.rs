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
use overdrive::distributed::{Launch, LaunchOutcome, ProcessGroup};
use overdrive::tracking::{StepMetrics, Trackers, read_metrics};
use overdrive::trainer::{
    DataShard, Evaluation, Interrupt, IntervalStrategy, Layers, ModelArguments, OptimizerName,
    ResumeFromCheckpoint, RunFolder, SaveStrategy, TextData, TrainingArguments,
};
use overdrive::transformer::CausalLm;
use overdrive_examples::training::{Summary, evaluate, name_lost_ranks, new_model, snapshot_files};

/// The example `finetune`, and in it the example `train`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../finetune.rs"]
mod finetune_example;
use finetune_example::train::Flags;

const CONFIG: &str = "OVERDRIVE_TRAINER_TEST_CONFIG";
/// The rank that has another model than the others.
const OTHER_MODEL: &str = "OVERDRIVE_TRAINER_TEST_OTHER_MODEL";
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
    if config.ends_with("program.json") {
        return runs_the_example(&config);
    }
    let mut arguments: TrainingArguments =
        serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let group = arguments.init_process_group().unwrap();
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

/// Runs the example `train` as it is.
fn runs_the_example(config: &Path) {
    let config = config.to_str().unwrap();
    let flags = Flags::parse_from(["train", "--config", config]);
    std::process::exit(match finetune_example::train::run(&flags) {
        Ok(end) => i32::from(end.exit_code()),
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    });
}

/// Trains as the example `train` does, without the results at its end.
fn train(config: &Path, arguments: &TrainingArguments, group: &ProcessGroup) -> Result<Summary> {
    let precision = arguments.apply()?;
    let data = TextData::prepare_in(&config.with_file_name("cache"), arguments, |_| {})?;
    let device = arguments.device(group);
    let fingerprints = data.fingerprints(arguments, group)?;
    let mut model = new_model(arguments, &data, device)?;
    let folder = RunFolder::open_or_create(group, arguments)?;
    let training = finetune_example::train::Training {
        arguments,
        group,
        precision,
        folder: Some(&folder),
        files: snapshot_files(&model, &data, arguments)?,
        fingerprints,
        parameters: model.named_parameters(),
        trackers: Trackers::new(),
    };
    let shard = DataShard::of(group, device);
    let loader = data.train_loader(arguments, shard)?;
    let trained = training.fit(&mut model, loader, &mut |model| {
        if config.ends_with("evaluated.json") {
            // The signal comes at the begin of the evaluation.
            Interrupt::install()?.request();
        }
        let batches = data.validation_loader(arguments, shard)?;
        Ok(Evaluation::new(
            evaluate(model, batches, precision, group)?,
            None,
        ))
    });
    let (summary, _) = trained.map_err(|error| name_lost_ranks(group, error))?;
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
    let end = finetune_example::finish(tuned, &group).unwrap();
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
            data: vec![self.path("text")],
            use_cpu: true,
            threads: Some(1),
            vocab_size: 300,
            context_length: 32,
            validation_fraction: 0.2,
            max_steps: 12,
            save_steps: 3.0,
            // The tests watch metrics.jsonl while a run writes it.
            logging_steps: 1.0,
            learning_rate: 1e-2,
            max_eval_batches: Some(3),
            per_device_train_batch_size: 2,
            samples: 0,
            ddp_timeout: 30.0,
            resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
            model: ModelArguments {
                hidden_size: 32,
                intermediate_size: 64,
                num_hidden_layers: 1,
                num_attention_heads: 2,
                ..ModelArguments::default()
            },
            ..TrainingArguments::default()
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

fn equal(one: &CausalLm, other: &CausalLm) {
    let pairs = one.named_parameters().into_iter();
    for ((name, one), (_, other)) in pairs.zip(other.named_parameters()) {
        assert_eq!(one, other, "{name}");
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

#[test]
fn fifty_kills_at_any_moment_change_no_loss() {
    const KILLS: usize = 50;
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        max_steps: 300,
        save_steps: 2.0,
        save_total_limit: Some(2),
        ..shop.arguments()
    };
    let mut whole = shop.start("whole", &arguments);
    assert!(wait(&mut whole).success());

    let mut random = Generator::new(7, 0);
    let (mut kills, mut in_saves, mut lives) = (0, 0, 0);
    while kills < KILLS {
        lives += 1;
        assert!(
            lives < 3 * KILLS,
            "the run ends before it can be killed: {kills} kills"
        );
        let before = shop.lines_so_far("killed");
        let mut child = shop.start("killed", &arguments);
        let begun = Instant::now();
        let (moment, steps, delay) = (random.below(4), random.next_u64(), random.next_u64());
        let wanted = || match moment {
            // While it starts, reads its snapshot, or takes its first steps.
            0 => begun.elapsed() > Duration::from_millis(steps % 700),
            // In the middle of a save.
            1 | 2 => {
                shop.is_saving("killed") && begun.elapsed() > Duration::from_millis(steps % 800)
            }
            // After some steps, and somewhere in the next.
            _ => shop.lines_so_far("killed") > before + (steps % 6) as usize,
        };
        while child.try_wait().unwrap().is_none() && !wanted() {
            assert!(begun.elapsed() < Duration::from_secs(120), "it hangs");
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(delay % 3000));
        let saving = shop.is_saving("killed");
        child.kill().unwrap();
        let status = child.wait().unwrap();
        // It never ends by itself with an error: whatever it found, it could go on.
        assert!(status.success() || status.code().is_none(), "{status}");
        if status.code().is_none() {
            kills += 1;
            in_saves += usize::from(saving);
        } else {
            // It was done before it was killed: another one in its place, from a step before.
            let newest = shop.path("killed").join("checkpoint-300");
            fs::remove_dir_all(newest).unwrap();
        }
    }
    assert!(in_saves > 0, "no kill fell into a save");
    let mut last = shop.start("killed", &arguments);
    assert!(wait(&mut last).success());
    assert_eq!(shop.lines("killed"), shop.lines("whole"));
    equal(&shop.model("killed", 300), &shop.model("whole", 300));
}

#[cfg(unix)]
#[test]
fn a_signal_ends_a_run_with_its_own_code_and_it_goes_on() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        max_steps: 400,
        save_steps: 1000.0,
        ..shop.arguments()
    };
    let mut whole = shop.start("whole", &arguments);
    assert!(wait(&mut whole).success());
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let before = shop.lines_so_far("stopped");
        let mut child = shop.start("stopped", &arguments);
        while shop.lines_so_far("stopped") < before + 5 {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        let asked = Instant::now();
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let status = wait(&mut child);
        assert_eq!(status.code(), Some(i32::from(SAVED_EXIT_CODE)));
        // Kubernetes gives 30 seconds; of a model as small as this one it takes none of them.
        assert!(asked.elapsed() < Duration::from_secs(20));
        let saved = shop
            .path("stopped")
            .join(format!("checkpoint-{}", shop.lines_so_far("stopped")));
        assert!(saved.is_dir(), "{saved:?}");
    }
    let mut last = shop.start("stopped", &arguments);
    assert!(wait(&mut last).success());
    assert_eq!(shop.lines("stopped"), shop.lines("whole"));
}

#[cfg(unix)]
#[test]
fn a_signal_without_a_snapshot_ends_a_run_with_another_code() {
    let shop = Workshop::new();
    let unsaved = TrainingArguments {
        max_steps: 100_000,
        save_strategy: SaveStrategy::No,
        ..shop.arguments()
    };
    let unwritable = TrainingArguments {
        save_strategy: SaveStrategy::Steps,
        save_steps: 100_000.0,
        ..unsaved.clone()
    };
    let program = std::env::current_exe().unwrap();
    for (name, arguments, script) in [
        ("unsaved", &unsaved, "exec \"$@\""),
        // Files of 80 KiB at most, which the optimizer's states are not.
        (
            "unwritable",
            &unwritable,
            "trap '' XFSZ; ulimit -f 160; exec \"$@\"",
        ),
    ] {
        // Prepared before, because the limit is one for the cache too.
        let prepared = TrainingArguments {
            max_steps: 1,
            ..arguments.clone()
        };
        assert!(wait(&mut shop.start("before", &prepared)).success());
        let mut child = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(&program)
            .args(TRAIN)
            .env(CONFIG, shop.configured(name, arguments))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        while shop.lines_so_far(name) < 5 {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = wait(&mut child);
        assert_eq!(
            status.code(),
            Some(i32::from(INTERRUPTED_EXIT_CODE)),
            "{name}"
        );
        let snapshots = fs::read_dir(shop.path(name)).unwrap().flatten();
        let mut names = snapshots.map(|entry| entry.file_name().to_string_lossy().into_owned());
        assert!(!names.any(|name| name.starts_with("checkpoint-")), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn snapshots_that_find_no_room_cost_no_step_and_no_other_snapshot() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        lr_scheduler_type: overdrive::optim::LrSchedulerType::Constant,
        ..shop.arguments()
    };
    assert!(wait(&mut shop.start("whole", &arguments)).success());
    let half = TrainingArguments {
        max_steps: 6,
        ..arguments.clone()
    };
    assert!(wait(&mut shop.start("full", &half)).success());

    // Files of 20 KiB at most, which the weights are not; the signal that would end the process is
    // ignored, so that writing fails as it does on a full disk.
    let script = "trap '' XFSZ; ulimit -f 40; exec \"$@\"";
    let program = std::env::current_exe().unwrap();
    let mut limited = Command::new("sh");
    limited.args(["-c", script, "sh"]).arg(program).args(TRAIN);
    limited.env(CONFIG, shop.configured("full", &arguments));
    let output = limited.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(shop.lines("full"), shop.lines("whole"));
    let exists = |step: u64| {
        shop.path("full")
            .join(format!("checkpoint-{step}"))
            .exists()
    };
    assert!(exists(6) && !exists(9) && !exists(12) && !shop.is_saving("full"));

    // With room again it goes on after the last one that there is.
    assert!(wait(&mut shop.start("full", &arguments)).success());
    assert_eq!(shop.lines("full"), shop.lines("whole"));
    equal(&shop.model("full", 12), &shop.model("whole", 12));
}

/// Checks that losses, norms and evaluations of two runs agree within 1e-5.
fn close(
    one: &[(u64, f64, Option<f64>, Option<f64>)],
    other: &[(u64, f64, Option<f64>, Option<f64>)],
) {
    assert_eq!(one.len(), other.len());
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
    for (a, b) in one.iter().zip(other) {
        assert!(near(a.1, b.1), "loss: {a:?} {b:?}");
        assert!(near(a.2.unwrap(), b.2.unwrap()), "norm: {a:?} {b:?}");
        assert_eq!(a.3.is_some(), b.3.is_some());
        assert!(
            near(a.3.unwrap_or(0.0), b.3.unwrap_or(0.0)),
            "evaluation: {a:?} {b:?}"
        );
    }
}

#[test]
fn several_processes_train_as_one_with_the_joint_batch() {
    let shop = Workshop::new();
    type Change = fn(TrainingArguments) -> TrainingArguments;
    let changes: [(&str, Change); 5] = [
        ("windows", |plain| plain),
        ("accumulation", |plain| TrainingArguments {
            gradient_accumulation_steps: 2,
            gradient_checkpointing: true,
            ..plain
        }),
        ("packing", |plain| TrainingArguments {
            packing: true,
            dataloader_num_workers: 1,
            ..plain
        }),
        ("sharded", |plain| TrainingArguments {
            optim: OptimizerName::Muon,
            zero_stage: 1,
            ema_decay: Some(0.5),
            ..plain
        }),
        ("padding", |plain| TrainingArguments {
            group_by_length: true,
            ..plain
        }),
    ];
    for (name, change) in changes {
        let plain = TrainingArguments {
            // One pass: at its end the processes fill the round up, and one process does not.
            max_steps: 4,
            save_steps: 1000.0,
            eval_strategy: IntervalStrategy::Steps,
            eval_steps: Some(2.0),
            ..shop.arguments()
        };
        let one = TrainingArguments {
            gradient_accumulation_steps: 2 * change(plain.clone()).gradient_accumulation_steps,
            ..change(plain.clone())
        };
        let mut alone = shop.start(&format!("{name}-1"), &one);
        assert!(wait(&mut alone).success());
        let two = format!("{name}-2");
        shop.launch(&two, &change(plain), 2).run().unwrap();
        close(&shop.lines(&format!("{name}-1")), &shop.lines(&two));
    }
}

#[cfg(unix)]
#[test]
fn a_stopped_run_saves_and_does_nothing_else() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        max_steps: 100_000,
        save_steps: 100_000.0,
        eval_strategy: IntervalStrategy::Steps,
        eval_steps: Some(1.0),
        samples: 2,
        ..shop.arguments()
    };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(TRAIN)
        .env(CONFIG, shop.configured("program", &arguments))
        .env("XDG_CACHE_HOME", shop.path("cache"))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    while shop.lines_so_far("program") < 5 {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    // A control group and a launcher: twice the same.
    for _ in 0..2 {
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    assert_eq!(wait(&mut child).code(), Some(i32::from(SAVED_EXIT_CODE)));
    let lines = shop.lines("program");
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line.3.is_some()));
    assert_eq!(last.3, None, "the stopped step was evaluated");
    let folder = shop.path("program");
    assert!(folder.join(format!("checkpoint-{}", last.0)).is_dir());
    for result in ["model", "report.html"] {
        assert!(!folder.join(result).exists(), "{result}");
    }
}

#[test]
fn a_signal_in_an_evaluation_ends_it_and_saves() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        max_steps: 100_000,
        save_steps: 100_000.0,
        eval_strategy: IntervalStrategy::Steps,
        eval_steps: Some(4.0),
        ..shop.arguments()
    };
    let mut child = shop.start("evaluated", &arguments);
    assert_eq!(wait(&mut child).code(), Some(i32::from(SAVED_EXIT_CODE)));
    let lines = shop.lines("evaluated");
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[3].3, None, "the stopped evaluation was logged");
    assert!(shop.path("evaluated/checkpoint-4").is_dir());
}

/// Returns the configuration of a fine-tuning run of adapters on the model of the run `base`.
fn adapters(shop: &Workshop, name: &str, steps: u64, accumulated: u64) -> PathBuf {
    if !shop.path("base").exists() {
        assert!(wait(&mut shop.start("base", &shop.arguments())).success());
        let records = (0..40).map(|number| {
            let answer = "na".repeat(1 + number % 5);
            format!("{{\"prompt\": \"Document {number} says\", \"response\": \"{answer}\"}}\n")
        });
        fs::write(shop.path("data.jsonl"), records.collect::<String>()).unwrap();
    }
    let values = serde_json::json!({
        "model": shop.path("base/checkpoint-12"),
        "data": shop.path("data.jsonl"),
        "output_dir": shop.path(name),
        "load_in_4bit": true,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulated,
        "logging_steps": 1,
        "use_cpu": true,
        "threads": 1,
        "samples": 0,
    });
    let config = shop.path(&format!("{name}.json"));
    fs::write(&config, values.to_string()).unwrap();
    config
}

#[cfg(unix)]
#[test]
fn a_stopped_fine_tuning_ends_with_one_code_on_all_processes_and_writes_no_adapter() {
    let shop = Workshop::new();
    let config = adapters(&shop, "tune-stopped", 100_000, 1);
    let launch = Launch::new(std::env::current_exe().unwrap()).args(TRAIN);
    let launch = launch.env(CONFIG, &config).nproc(2);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| launch.run());
        while shop.lines_so_far("tune-stopped") < 3 {
            assert!(!running.is_finished(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        // A signal to one process stops all of them.
        let pid = fs::read_to_string(shop.path("pid-1")).unwrap();
        let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let ended = running.join().unwrap().unwrap();
        assert_eq!(ended, LaunchOutcome::Saved);
    });
    for rank in 0..2 {
        let code = fs::read_to_string(shop.path(&format!("code-{rank}"))).unwrap();
        assert_eq!(code, SAVED_EXIT_CODE.to_string(), "rank {rank}");
    }
    let folder = shop.path("tune-stopped");
    assert!(!folder.join("adapter_model.safetensors").exists());
    assert!(!folder.join("report.html").exists());
}

#[test]
fn adapters_over_four_bits_are_trained_by_two_processes_as_by_one() {
    let shop = Workshop::new();
    for (name, processes, accumulated) in [("tune-1", 1, 4), ("tune-2", 2, 2)] {
        let config = adapters(&shop, name, 4, accumulated);
        let launch = Launch::new(std::env::current_exe().unwrap()).args(TRAIN);
        launch.env(CONFIG, &config).nproc(processes).run().unwrap();
        assert!(shop.path(name).join("adapter_model.safetensors").is_file());
    }
    let (one, two) = (shop.lines("tune-1"), shop.lines("tune-2"));
    assert_eq!(one.len(), 4);
    close(&one, &two);
}

#[cfg(unix)]
#[test]
fn processes_that_are_killed_at_different_moments_agree_on_where_to_go_on() {
    let shop = Workshop::new();
    let arguments = TrainingArguments {
        max_steps: 200,
        save_steps: 2.0,
        save_total_limit: Some(3),
        ddp_timeout: 10.0,
        ..shop.arguments()
    };
    shop.launch("whole", &arguments, 2).run().unwrap();

    let mut random = Generator::new(11, 0);
    for life in 0..6 {
        let steps = shop.lines_so_far("killed") + 3 + random.below(5) as usize;
        let pause = Duration::from_micros(random.below(4000));
        let first = life % 2;
        let _ = fs::remove_file(shop.path("pid-0"));
        let _ = fs::remove_file(shop.path("pid-1"));
        let launch = shop.launch("killed", &arguments, 2);
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                let begun = Instant::now();
                while shop.lines_so_far("killed") < steps {
                    assert!(begun.elapsed() < Duration::from_secs(60), "it hangs");
                    std::thread::sleep(Duration::from_micros(200));
                }
                for rank in [first, 1 - first] {
                    let pid = fs::read_to_string(shop.path(&format!("pid-{rank}"))).unwrap();
                    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                    // The second may have noticed already, and ended.
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                    std::thread::sleep(pause);
                }
            });
            let ended = launch.grace(Duration::from_millis(500)).run();
            assert!(ended.is_err(), "it was killed");
            killer.join().unwrap();
        });
    }
    shop.launch("killed", &arguments, 2).run().unwrap();
    assert_eq!(shop.lines("killed"), shop.lines("whole"));
    equal(&shop.model("killed", 200), &shop.model("whole", 200));
}

#[test]
fn a_run_resumes_with_another_number_of_processes() {
    let shop = Workshop::new();
    type Change = fn(TrainingArguments) -> TrainingArguments;
    let changes: [(&str, Change); 2] = [
        ("whole", |plain| plain),
        ("sharded", |plain| TrainingArguments {
            optim: OptimizerName::Muon,
            zero_stage: 1,
            ema_decay: Some(0.5),
            ..plain
        }),
    ];
    for (name, change) in changes {
        // A joint batch of 12 windows for each number of processes.
        let arguments = |processes: u64, max_steps| {
            change(TrainingArguments {
                gradient_accumulation_steps: 6 / processes,
                max_steps,
                save_steps: 1000.0,
                lr_scheduler_type: overdrive::optim::LrSchedulerType::Constant,
                eval_strategy: IntervalStrategy::Steps,
                eval_steps: Some(2.0),
                ..shop.arguments()
            })
        };
        let once = format!("{name}-once");
        let never = shop.launch(&once, &arguments(1, 4), 1);
        never.run().unwrap();
        for (before, after) in [(2, 1), (1, 2), (2, 3)] {
            let run = format!("{name}-{before}-{after}");
            let first = shop.launch(&run, &arguments(before, 2), before as usize);
            first.run().unwrap();
            let second = shop.launch(&run, &arguments(after, 4), after as usize);
            second.run().unwrap();
            close(&shop.lines(&once), &shop.lines(&run));
            let (one, other) = (shop.model(&once, 4), shop.model(&run, 4));
            let pairs = one.named_parameters().into_iter();
            for ((name, one), (_, other)) in pairs.zip(other.named_parameters()) {
                let most = (one - other).abs().max().double_value(&[]);
                assert!(most < 1e-4, "{run}: {name} differs by {most}");
            }
        }
    }
}

#[test]
fn another_effective_batch_is_said_and_an_epoch_stays_a_pass() {
    let shop = Workshop::new();
    let part = TrainingArguments {
        gradient_accumulation_steps: 3,
        max_steps: 2,
        ..shop.arguments()
    };
    shop.launch("run", &part, 2).run().unwrap();
    let rest = TrainingArguments {
        gradient_accumulation_steps: 5,
        max_steps: -1,
        num_train_epochs: 1.0,
        ..part
    };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(TRAIN)
        .env(CONFIG, shop.configured("run", &rest))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let said = said.concat();
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("2 processes saved it and 1 resume it"),
        "{said}"
    );
    assert!(
        said.contains("another effective batch: 10 examples per step")
            && said.contains("before 12 examples per step"),
        "{said}"
    );
    let metrics = read_metrics(shop.path("run").join("metrics.jsonl")).unwrap();
    let last = metrics.records.last().unwrap();
    assert_eq!(last.epoch, Some(1.0));
    // Two steps of 12 windows, and the rest in steps of 10: all windows once.
    let windows = last.tokens_seen.unwrap() / 32;
    assert_eq!(last.step, 2 + (windows - 24).div_ceil(10));
    let fresh = TrainingArguments {
        resume_from_checkpoint: None,
        ..rest
    };
    let data = TextData::prepare_in(&shop.path("cache"), &fresh, |_| {}).unwrap();
    assert_eq!(windows, (data.train.len() as u64 - 1) / 32);
}

#[test]
fn errors_that_concern_all_processes_are_found_before_the_first_step() {
    let shop = Workshop::new();
    let arguments = shop.arguments();
    let other = shop.launch("other", &arguments, 2).env(OTHER_MODEL, "1");
    let error = other.run().unwrap_err().to_string();
    let differs = "`model.intermediate_size` is 72 on rank 1 and 64 on rank 0";
    assert!(error.contains(differs), "{error}");

    let other = shop.launch("other", &arguments, 2).env(OTHER_DATA, "1");
    let error = other.run().unwrap_err().to_string();
    assert!(
        error.contains("rank 1 has other inputs than rank 0: `data` is "),
        "{error}"
    );
    assert!(!shop.path("other").exists(), "a run was begun");

    // Where the folder cannot be: all ranks end with the words of the one that tried.
    fs::write(shop.path("taken"), "a file").unwrap();
    let error = shop
        .launch("taken", &arguments, 2)
        .run()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("could not open the run's folder") && error.contains("--out DIR"),
        "{error}"
    );
}
