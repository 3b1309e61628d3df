//! Programs write over nothing that they read, nor over what something else wrote; and what they read may have any line
//! ends.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Parser;
use overdrive::trainer::{FinetuneArguments, RunFolder, TrainingArguments};
use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig};
use overdrive_examples::JsonLines;

use crate::alone;

/// Writes a small model with its tokenizer and a chat template.
fn write_model(folder: &Path) {
    let config = LlamaConfig {
        vocab_size: 330,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        ..LlamaConfig::default()
    };
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    model.save_pretrained(folder, &Default::default()).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/overdrive-trainer/tests/fixtures/chat_labels/tokenizer.json");
    fs::copy(tokenizer, folder.join("tokenizer.json")).unwrap();
    fs::write(
        folder.join("tokenizer_config.json"),
        r#"{"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 4096}"#,
    )
    .unwrap();
    fs::write(
        folder.join("chat_template.jinja"),
        "{% for m in messages %}{{ m.content }}\r\n{% endfor %}",
    )
    .unwrap();
}

/// Returns the content of every file of a folder.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// The paths by which a user may name the folder.
fn names_of(folder: &Path) -> Vec<PathBuf> {
    let mut names = vec![
        folder.to_owned(),
        folder.join("..").join(folder.file_name().unwrap()),
    ];
    #[cfg(unix)]
    {
        let link = folder.with_file_name("link");
        if !link.exists() {
            std::os::unix::fs::symlink(folder, &link).unwrap();
        }
        names.push(link);
    }
    names
}

#[test]
fn no_program_writes_over_the_model_that_it_reads_or_over_another_one() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (model, other) = (dir.path().join("model"), dir.path().join("other"));
    write_model(&model);
    write_model(&other);
    let text = dir.path().join("text.txt");
    fs::write(&text, "The quick brown fox. ".repeat(20)).unwrap();
    // `merge` takes the folder as that of the adapter, too.
    fs::write(model.join("adapter_config.json"), "{}").unwrap();
    let before = [contents(&model), contents(&other)];
    let flags = |program: &str, out: &Path, more: &[&str]| -> Vec<String> {
        let own = [program, "--out", out.to_str().unwrap()];
        own.iter()
            .chain(more)
            .map(|flag| (*flag).to_owned())
            .collect()
    };
    let model_path = model.to_str().unwrap();
    let tokenize = |out: &Path| {
        let more = [text.to_str().unwrap(), "--tokenizer", model_path];
        let flags = crate::tokenize_example::Flags::parse_from(flags("tokenize", out, &more));
        crate::tokenize_example::run(&flags, |_| {}).map(drop)
    };
    let merge = |out: &Path| {
        let more = ["--model", model_path, "--adapter", model_path];
        crate::merge_example::run(&Parser::parse_from(flags("merge", out, &more)))
    };
    #[cfg(feature = "onnx")]
    let export = |out: &Path| {
        let more = ["--model", model_path];
        crate::export_onnx_example::run(&Parser::parse_from(flags("export_onnx", out, &more)))
    };
    let finetune = |out: &Path| -> anyhow::Result<()> {
        let arguments = FinetuneArguments {
            model_name_or_path: model.clone(),
            training: TrainingArguments {
                output_dir: Some(out.to_owned()),
                ..TrainingArguments::default()
            },
            ..FinetuneArguments::default()
        };
        RunFolder::create(&arguments)?;
        Ok(())
    };
    type Program<'a> = &'a dyn Fn(&Path) -> anyhow::Result<()>;
    let programs: &[(&str, Program<'_>)] = &[
        ("tokenize", &tokenize),
        ("merge", &merge),
        #[cfg(feature = "onnx")]
        ("export_onnx", &export),
        ("finetune", &finetune),
    ];
    for (name, run) in programs {
        for out in names_of(&model) {
            let error = run(&out).unwrap_err().to_string();
            assert!(
                error.contains("which it would overwrite"),
                "{name}: {error}"
            );
        }
        let error = run(&other).unwrap_err().to_string();
        assert!(
            error.contains("did not write; choose another or remove it"),
            "{name}: {error}"
        );
        assert!(
            [contents(&model), contents(&other)] == before,
            "{name} has changed a model"
        );
    }

    // What a program has written, it writes again.
    let out = dir.path().join("tokens");
    tokenize(&out).unwrap();
    tokenize(&out).unwrap();
    assert!(out.join("text.tokens").is_file());
    #[cfg(feature = "onnx")]
    {
        let out = model.join("onnx");
        export(&out).unwrap();
        export(&out).unwrap();
        let error = tokenize(&out).unwrap_err().to_string();
        assert!(error.contains("`export_onnx` wrote this one"), "{error}");
    }
}

#[cfg(feature = "onnx")]
#[test]
fn a_program_that_fails_before_the_tokenizer_leaves_no_model_and_runs_again() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("out"));
    write_model(&model);
    let run = |more: &[&str]| {
        let (model, out) = (model.to_str().unwrap(), out.to_str().unwrap());
        let own = ["export_onnx", "--model", model, "--out", out];
        crate::export_onnx_example::run(&Parser::parse_from(own.iter().chain(more)))
    };
    let missing = dir.path().join("missing.json");
    run(&["--tokenizer", missing.to_str().unwrap()]).unwrap_err();
    assert!(!out.exists(), "a folder is left");
    run(&[]).unwrap();
    let visible = || {
        let files = contents(&out).into_keys();
        let names = files.map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
        names.collect::<Vec<String>>()
    };
    for name in ["config.json", "model.onnx", "tokenizer.json"] {
        assert!(visible().iter().any(|found| found == name), "{name}");
    }
}

#[test]
fn a_file_is_written_only_into_a_folder_that_exists() {
    let folder = tempfile::tempdir().unwrap();
    let check = |path: &Path| overdrive_examples::check_output_file("--out", path);
    check(Path::new("a.gguf")).unwrap();
    check(&folder.path().join("a.gguf")).unwrap();
    let path = folder.path().join("new/a.gguf");
    let error = check(&path).unwrap_err().to_string();
    let (path, new) = (path.display(), folder.path().join("new"));
    let new = new.display();
    let expected =
        format!("`--out` is {path}; it must be in a folder that exists; create {new} first");
    assert_eq!(error, expected);
    let error = check(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("it must be a file; this is a folder"),
        "{error}"
    );
}

#[test]
fn a_line_that_is_not_utf_8_does_not_end_a_conversation() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path());
    let model = dir.path().to_str().unwrap();
    let flags = [
        "chat",
        "--model",
        model,
        "--max-new-tokens",
        "2",
        "--cache-mib",
        "4",
    ];
    let flags = crate::chat_example::Flags::parse_from(flags);
    crate::chat_example::run(&flags, &b"\xef\xbb\xbfhello\r\ncaf\xe9\n/stats\n"[..]).unwrap();
}

#[test]
fn no_program_panics_when_nobody_reads_what_it_prints() {
    // `println!` does; `print_line` and `print_now` do not.
    let programs = ["", "src"];
    let others = [
        "xtask/src",
        "xtask/src/setup",
        "gpu-check/src",
        "gpu-check/src/sections",
    ];
    let others = others.map(|folder| format!("../{folder}"));
    for folder in programs
        .into_iter()
        .chain(others.iter().map(String::as_str))
    {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let printed = text.lines().find(|line| {
                    ["println!(", "print!("].iter().any(|call| {
                        let before = line.find(call).map(|at| &line[..at]);
                        before.is_some_and(|before| !before.ends_with('e'))
                    })
                });
                assert_eq!(printed, None, "{}", path.display());
            }
        }
    }
}

#[test]
fn json_lines_that_find_no_room_are_whole() {
    const OUTPUT: &str = "OVERDRIVE_JSON_LINES_TEST_OUTPUT";
    if let Some(path) = std::env::var_os(OUTPUT) {
        let mut lines = JsonLines::create(Path::new(&path)).unwrap();
        let error = (0..).find_map(|_| lines.write(&"a line of text").err());
        let error = error.unwrap().to_string();
        assert!(error.starts_with("cannot write "), "{error}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.jsonl");
    // SIGXFSZ is ignored so that the write fails, as on a full disk, and does not end the process.
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$0\" --exact outputs::json_lines_that_find_no_room_are_whole";
    let mut limited = Command::new("sh");
    limited
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap());
    let limited = limited.env(OUTPUT, &path).stdout(Stdio::null());
    assert!(limited.status().unwrap().success());
    let text = fs::read_to_string(path).unwrap();
    assert!(text.len() > 1000);
    assert!(text.lines().all(|line| line == "\"a line of text\"") && text.ends_with('\n'));
}

#[test]
fn the_folder_of_a_training_in_python_names_its_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    for step in ["checkpoint-20", "checkpoint-100", "0_Transformer", "runs"] {
        fs::create_dir_all(output.join(step)).unwrap();
        if step != "runs" {
            fs::write(output.join(step).join("config.json"), "{}").unwrap();
        }
    }
    let error = overdrive_examples::local_model(&output)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("has no config.json") && error.ends_with("checkpoint-100"),
        "{error}"
    );
    let newest = output.join("checkpoint-100");
    assert_eq!(overdrive_examples::local_model(&newest).unwrap(), newest);
    // Without any, what is missing is named.
    for (found, what, missing) in [
        (
            overdrive_examples::local_adapter(&output),
            "adapter",
            "adapter_config.json",
        ),
        (
            overdrive_examples::local_model(folder.path()),
            "model",
            "config.json",
        ),
    ] {
        let error = found.unwrap_err().to_string();
        let expected = format!("holds no {what}: {missing} is missing");
        assert!(error.ends_with(&expected), "{error}");
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_with_all_that_would_be_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    fs::write(&path, "a text").unwrap();
    let error = overdrive_examples::local_tokenizer(&path)
        .unwrap_err()
        .to_string();
    let expected =
        "text.txt is no tokenizer: it is neither a tokenizer.json, a model folder nor a GGUF file";
    assert!(error.ends_with(expected), "{error}");
}
