//! Runs that signals stop.

use super::processes::adapters;
use super::*;

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
        assert_eq!(ended, RunEnd::Saved);
    });
    for rank in 0..2 {
        let code = fs::read_to_string(shop.path(&format!("code-{rank}"))).unwrap();
        assert_eq!(code, SAVED_EXIT_CODE.to_string(), "rank {rank}");
    }
    let folder = shop.path("tune-stopped");
    assert!(!folder.join("adapter_model.safetensors").exists());
    assert!(!folder.join("report.html").exists());
}
