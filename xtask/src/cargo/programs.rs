//! The commands that run the programs of the workspace.

use std::ffi::OsString;

use super::Cargo;

/// Returns the command of an example in release mode. A `--` before its arguments is optional.
pub(crate) fn example(name: &str, further: &[OsString]) -> Cargo {
    // What only some programs need, because it compiles long or has another licence.
    let own = match name {
        "export_onnx" => Some("onnx"),
        "images" | "finetune_vision" => Some("image"),
        "packages" => Some("packages"),
        "serve" => Some("serve"),
        "speech" => Some("speech"),
        _ => None,
    };
    let constraints = (name == "generate").then_some("constraints");
    let sees = matches!(name, "chat" | "generate") && has_flag(further, "--image");
    let features = [own, constraints, sees.then_some("image")];
    program("run", name, features.into_iter().flatten())
        .and(&["--".into()])
        .and(without_dashes(further))
}

/// Builds or runs an example with the features that all programs have, so that a second program reuses the crates that the
/// first has compiled, and with `further` ones.
fn program<'a>(
    command: &'a str,
    example: &'a str,
    further: impl IntoIterator<Item = &'a str>,
) -> Cargo {
    let features: Vec<&str> = ["hub", "mlflow"].into_iter().chain(further).collect();
    Cargo::new([
        command,
        "--release",
        "-p",
        "overdrive-examples",
        "--no-default-features",
        "--features",
        &features.join(","),
        "--example",
        example,
    ])
}

/// Returns `true` if a flag is among the arguments, with its value behind it or in it.
fn has_flag(arguments: &[OsString], flag: &str) -> bool {
    arguments.iter().any(|argument| {
        let argument = argument.to_string_lossy();
        argument.split('=').next() == Some(flag)
    })
}

/// Returns the arguments of a program without a `--` before them.
fn without_dashes(further: &[OsString]) -> &[OsString] {
    match further {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    }
}

/// Returns the command of the main program; with `--nproc N` among its flags, in N processes.
pub(crate) fn train(further: &[OsString]) -> Vec<Cargo> {
    let (launcher, trainer) = launchers_flags(further);
    if launcher.is_empty() {
        return vec![
            of_main_job("run", "train", further)
                .and(&["--".into()])
                .and(without_dashes(further)),
        ];
    }
    let launch = of_main_job("run", "launch", further).and(&["--".into()]);
    // The launcher starts the built program, so that N processes do not wait for cargo's lock.
    vec![
        of_main_job("build", "train", further),
        launch.and(&launcher).and(&["train".into()]).and(&trainer),
    ]
}

/// Returns the commands of the search for the fastest settings of the main program, which it starts for its trials.
pub(crate) fn tune(further: &[OsString]) -> Vec<Cargo> {
    vec![
        of_main_job("build", "train", further),
        of_main_job("run", "tune", further)
            .and(&["--".into()])
            .and(without_dashes(further)),
    ]
}

/// Builds or runs one of the programs of the main command. Data at a URL needs a client that other data does not.
fn of_main_job(command: &str, example: &str, further: &[OsString]) -> Cargo {
    let has_url = further
        .iter()
        .any(|word| word.to_string_lossy().contains("://"));
    program(command, example, has_url.then_some("remote"))
}

/// Separates the flags of the example `launch` from those of the program that it starts.
fn launchers_flags(further: &[OsString]) -> (Vec<OsString>, Vec<OsString>) {
    let (mut launcher, mut program) = (Vec::new(), Vec::new());
    let mut words = further.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let (name, value) = text.split_once('=').unzip();
        match name.unwrap_or(&text) {
            "--nproc" | "--nproc-per-node" | "--max-restarts" | "--stop-grace" => {
                launcher.push(word.clone());
                if value.is_none() {
                    // `--nproc 2`: the value is the next word.
                    launcher.extend(words.next().cloned());
                }
            }
            _ => program.push(word.clone()),
        }
    }
    (launcher, program)
}

pub(crate) fn bench(further: &[OsString]) -> Cargo {
    Cargo::new(["bench", "-p", "overdrive-benches"]).and(further)
}

/// Runs the ablation table. The program has its own flags, and the trainer's after a `--`.
pub(crate) fn ablation(further: &[OsString]) -> Cargo {
    Cargo::new([
        "run",
        "--release",
        "-p",
        "overdrive-benches",
        "--bin",
        "ablation",
        "--",
    ])
    .and(further)
}

/// The program of the GPU check.
const GPU_CHECK: [&str; 5] = [
    "--release",
    "-p",
    "overdrive-gpu-check",
    "--bin",
    "gpu-check",
];

/// Runs the GPU check.
pub(crate) fn gpu_check(further: &[OsString]) -> Cargo {
    let run = Cargo::new(["run"]).and(&GPU_CHECK.map(OsString::from));
    run.and(&["--".into()]).and(further)
}

/// Builds the GPU check; the output is Cargo's messages about the artifacts.
pub(crate) fn gpu_check_program() -> Cargo {
    let build = Cargo::new(["build"]).and(&GPU_CHECK.map(OsString::from));
    build.and(&["--message-format=json-render-diagnostics".into()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::words;

    #[test]
    fn an_example_is_built_with_the_feature_that_it_needs() {
        for (name, features) in [
            ("chat", ""),
            ("generate", ",constraints"),
            ("images", ",image"),
            ("packages", ",packages"),
            ("serve", ",serve"),
            ("speech", ",speech"),
        ] {
            assert_eq!(
                example(name, &words(&["--", "--help"])).line(),
                format!(
                    "cargo run --release -p overdrive-examples --no-default-features --features \
                     hub,mlflow{features} --example {name} -- --help"
                )
            );
        }
        for (flag, has) in [
            ("--image", true),
            ("--image=a.png", true),
            ("--images", false),
        ] {
            let line = example("chat", &words(&[flag, "a.png"])).line();
            assert_eq!(line.contains("--features hub,mlflow,image"), has, "{line}");
        }
    }

    #[test]
    fn several_processes_are_started_by_the_example_that_does_it() {
        let lines = |given: &[&str]| -> Vec<String> {
            train(&words(given)).iter().map(Cargo::line).collect()
        };
        let plain = "cargo run --release -p overdrive-examples --no-default-features --features hub,mlflow --example train -- --steps 3";
        assert_eq!(lines(&["--steps", "3"]), [plain]);
        assert_eq!(lines(&["--", "--steps", "3"]), [plain]);
        let build = "cargo build --release -p overdrive-examples --no-default-features --features hub,mlflow --example train";
        let launch = "cargo run --release -p overdrive-examples --no-default-features --features hub,mlflow --example launch -- --nproc 2 train --steps 3";
        assert_eq!(lines(&["--nproc", "2", "--steps", "3"]), [build, launch]);
        let with_url = plain.replace("--features hub,mlflow", "--features hub,mlflow,remote");
        let with_url = with_url.replace("--steps 3", "--data https://host/a.jsonl");
        assert_eq!(lines(&["--data", "https://host/a.jsonl"]), [with_url]);
        let restarts = launch.replace("--nproc 2", "--nproc=2 --max-restarts 1");
        assert_eq!(
            lines(&["--steps", "3", "--nproc=2", "--max-restarts", "1"]),
            [build, &restarts]
        );
    }

    #[test]
    fn tuning_builds_the_program_of_its_trials_first() {
        let lines: Vec<String> = tune(&words(&["--effective-batch", "16"]))
            .iter()
            .map(Cargo::line)
            .collect();
        let of = |command: &str, example: &str| {
            format!(
                "cargo {command} --release -p overdrive-examples --no-default-features --features hub,mlflow --example {example}"
            )
        };
        let run = format!("{} -- --effective-batch 16", of("run", "tune"));
        assert_eq!(lines, [of("build", "train"), run]);
    }
}
