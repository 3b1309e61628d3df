//! Runs that are killed, and disks that are full.

use super::*;

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
