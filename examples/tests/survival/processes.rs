//! Runs of several processes.

use super::*;

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

/// Returns the configuration of a fine-tuning run of adapters on the model of the run `base`.
pub(super) fn adapters(shop: &Workshop, name: &str, steps: u64, accumulated: u64) -> PathBuf {
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

    // An argument that must agree is compared before anything waits for it.
    for (setting, differs) in [
        ("learning_rate=0.5", "`learning_rate` is 0.5 on rank 1"),
        ("max_grad_norm=9.0", "`max_grad_norm` is 9"),
        ("bf16=true", "`bf16` is true on rank 1 and false on rank 0"),
        ("save_strategy=\"no\"", "`save_strategy` is no on rank 1"),
        (
            "gradient_accumulation_steps=5",
            "`gradient_accumulation_steps` is 5 on rank 1",
        ),
        ("logging_steps=77.0", "`logging_steps` is 77"),
    ] {
        let other = shop.launch("other", &arguments, 2);
        let other = other.env(OTHER_ARGUMENT, format!("1:{setting}"));
        let error = other.run().unwrap_err().to_string();
        assert!(error.contains(differs), "{setting}: {error}");
        assert!(!shop.path("other").exists(), "a run was begun");
    }

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
