//! The flags for generation refuse values that would be dropped, and flags that would be ignored.

use std::fs;

use clap::Parser;
use overdrive::generation::ModelFiles;
use overdrive_examples::GenerationFlags;

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    flags: GenerationFlags,
}

fn parse(flags: &[&str]) -> GenerationFlags {
    Program::parse_from([&["program"], flags].concat()).flags
}

#[test]
fn numbers_that_json_cannot_hold_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    for (flag, value) in [
        ("--temperature", "inf"),
        ("--temperature", "nan"),
        ("--top-p", "nan"),
        ("--repetition-penalty", "NaN"),
        ("--length-penalty", "inf"),
    ] {
        let error = parse(&[flag, value]).config(&files, 9).unwrap_err();
        let (error, name) = (error.to_string(), flag[2..].replace('-', "_"));
        assert!(error.starts_with(&format!("`{name}` is ")), "{error}");
        assert!(error.ends_with("it must be a finite number"), "{error}");
    }
    let config = parse(&["--temperature", "0.5"]).config(&files, 9).unwrap();
    assert_eq!(config.temperature, 0.5);
    // Keys of a map that are no token ids.
    let error = parse(&["--logit-bias", r#"{"a": 1}"#]).config(&files, 9);
    assert_eq!(
        error.unwrap_err().to_string(),
        r#"`logit_bias` is {"a":1}; it must be an object whose keys are numbers in quotes"#
    );
}

#[test]
fn flags_that_a_chat_would_ignore_are_refused() {
    let flags = parse(&["--temperature", "0.5", "--num-beams", "1"]);
    flags.check_for_chat().unwrap();
    for flag in ["--logprobs", "--num-beams", "--num-assistant-tokens"] {
        let error = parse(&[flag, "2"]).check_for_chat().unwrap_err();
        assert!(error.to_string().contains(flag), "{error}");
    }
}
