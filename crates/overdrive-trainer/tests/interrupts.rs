//! Real signals to a child process, which is this test program started again.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use overdrive_trainer::Interrupt;

/// The variable that tells the child how to react to the flag.
const ROLE: &str = "OVERDRIVE_INTERRUPT_TEST";

/// A timeout far beyond the child's need, so that a test that hangs fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The code of the child: a test that does nothing in the parent.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let interrupt = Interrupt::install().expect("installs");
    let again = Interrupt::install().expect("installs twice");
    println!("\nready");
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if again.requested() && role == "leave" {
            assert!(interrupt.requested(), "one flag");
            println!("\nsaved");
            return;
        }
        if again.requested() {
            println!("\nbusy");
            std::thread::sleep(PATIENCE);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Running {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

fn start(role: &str) -> Running {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let lines = BufReader::new(child.stdout.take().expect("piped"));
    let mut running = Running { child, lines };
    running.wait_for("ready");
    running
}

impl Running {
    fn wait_for(&mut self, text: &str) {
        let mut line = String::new();
        while line.trim() != text {
            line.clear();
            let read = self.lines.read_line(&mut line).expect("reads");
            assert!(read > 0, "the child ended before it said {text}");
        }
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill")
            .args([name, &id])
            .status()
            .expect("kill runs");
        assert!(sent.success());
    }

    fn end(mut self) -> ExitStatus {
        self.child.wait().expect("ends")
    }
}

#[test]
fn the_first_signal_lets_the_loop_save_and_leave() {
    for signal in ["-INT", "-TERM"] {
        let mut running = start("leave");
        running.signal(signal);
        running.wait_for("saved");
        assert!(running.end().success(), "{signal}");
    }
}

#[test]
fn the_second_signal_ends_the_program_at_once_with_code_130() {
    for (first, second) in [("-INT", "-INT"), ("-TERM", "-INT")] {
        let mut running = start("stay");
        running.signal(first);
        running.wait_for("busy");
        running.signal(second);
        let status = running.end();
        assert_eq!(
            (status.code(), status.signal()),
            (Some(130), None),
            "{first} {second}"
        );
    }
}
