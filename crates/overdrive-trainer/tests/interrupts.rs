//! Real signals to a child process, which is this test program started again.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Write};
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
    if role == "tokenize" {
        // Before a program has installed the flag.
        overdrive_trainer::run_main(|| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            println!("\nready");
            std::thread::sleep(PATIENCE);
            Ok(())
        });
        return;
    }
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
        if again.requested() && role == "stay" {
            println!("\nbusy");
            std::thread::sleep(PATIENCE);
        }
        if role == "answer" {
            // Each line is a question.
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).expect("reads");
            println!("\nrequested {}", again.requested());
            continue;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Running {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

fn start(role: &str) -> Running {
    start_by(
        Command::new(std::env::current_exe().expect("this program")),
        role,
    )
}

fn start_by(mut program: Command, role: &str) -> Running {
    let mut child = program
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
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
        self.send(name, &self.child.id().to_string());
    }

    fn send(&self, name: &str, id: &str) {
        let sent = Command::new("kill")
            .args([name, id])
            .status()
            .expect("kill runs");
        assert!(sent.success());
    }

    fn ask(&mut self) {
        let mut stdin = self.child.stdin.as_ref().expect("piped");
        stdin.write_all(b"?\n").expect("writes");
    }

    fn end(mut self) -> ExitStatus {
        self.child.wait().expect("ends")
    }
}

#[test]
fn the_first_signal_lets_the_loop_save_and_leave() {
    for signal in ["-INT", "-TERM", "-HUP", "-QUIT"] {
        if signal == "-HUP" && overdrive_sys::process::ignores_signal(1) {
            continue;
        }
        let mut running = start("leave");
        running.signal(signal);
        running.wait_for("saved");
        assert!(running.end().success(), "{signal}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_signal_ends_the_first_process_of_a_container() {
    // The system keeps signals without a handler from the process 1 of a namespace.
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork"]);
        command
    };
    let works = namespace().arg("true").status();
    if !works.is_ok_and(|status| status.success()) {
        eprintln!("not run: this system lets no user make a namespace of processes");
        return;
    }
    for (role, code) in [("tokenize", 130), ("leave", 0)] {
        let mut command = namespace();
        command.arg(std::env::current_exe().expect("this program"));
        let running = start_by(command, role);
        let outer = running.child.id();
        let children = format!("/proc/{outer}/task/{outer}/children");
        let children = std::fs::read_to_string(children).expect("reads");
        running.send("-TERM", children.trim());
        assert_eq!(running.end().code(), Some(code), "{role}");
    }
}

#[test]
fn the_same_request_in_several_signals_ends_nothing() {
    // A control group sends SIGTERM to a process to which its launcher sends it too.
    let mut running = start("answer");
    for signal in ["-TERM", "-TERM", "-QUIT", "-TERM"] {
        running.signal(signal);
    }
    loop {
        running.ask();
        let mut line = String::new();
        while !line.starts_with("requested") {
            line.clear();
            let read = running.lines.read_line(&mut line).expect("reads");
            assert!(read > 0, "the child ended");
        }
        if line.trim() == "requested true" {
            break;
        }
    }
    // And when the flag has long been seen.
    for signal in ["-TERM", "-QUIT"] {
        running.signal(signal);
        running.ask();
        running.wait_for("requested true");
    }
    running.signal("-KILL");
    assert_eq!(running.end().signal(), Some(9));
}

#[test]
fn a_program_under_nohup_goes_on_after_its_terminal() {
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]);
    nohup.arg(std::env::current_exe().expect("this program"));
    let mut running = start_by(nohup, "answer");
    running.signal("-HUP");
    running.ask();
    running.wait_for("requested false");
    running.signal("-KILL");
    assert_eq!(running.end().signal(), Some(9));
}

#[test]
fn ctrl_c_after_a_second_ends_the_program_at_once_with_code_130() {
    for (first, second) in [("-INT", "-INT"), ("-TERM", "-INT")] {
        let mut running = start("stay");
        running.signal(first);
        running.wait_for("busy");
        // The time that makes it another request.
        std::thread::sleep(Duration::from_secs(1));
        running.signal(second);
        let status = running.end();
        assert_eq!(
            (status.code(), status.signal()),
            (Some(130), None),
            "{first} {second}"
        );
    }
}
