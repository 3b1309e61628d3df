//! The flags for generation refuse values that would be dropped, and those of a chat leave out what it would ignore.

use std::fs;

use clap::Parser;
use overdrive::generation::ModelFiles;
use overdrive_examples::{CompletionFlags, GenerationFlags, generation_config};

#[derive(Parser)]
struct Generate {
    #[command(flatten)]
    flags: CompletionFlags,
}

#[derive(Parser)]
struct Chat {
    #[command(flatten)]
    flags: GenerationFlags,
}

fn parse<P: Parser>(flags: &[&str]) -> Result<P, clap::Error> {
    P::try_parse_from([&["program"], flags].concat())
}

#[test]
fn numbers_that_json_cannot_hold_are_refused() {
    for (flag, value) in [
        ("--temperature", "inf"),
        ("--temperature", "nan"),
        ("--top-p", "nan"),
        ("--repetition-penalty", "NaN"),
        ("--length-penalty", "inf"),
    ] {
        let error = parse::<Generate>(&[flag, value]).err().unwrap().to_string();
        assert!(error.contains(flag), "{error}");
        assert!(error.contains("expected a finite number"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    let config = |flags: &[&str]| {
        let flags = parse::<Generate>(flags).unwrap().flags;
        generation_config(&flags, &files, 9)
    };
    let sampled = config(&["--temperature", "0.5", "--num-return-sequences", "2"]).unwrap();
    assert_eq!((sampled.temperature, sampled.do_sample), (0.5, true));
    assert_eq!(sampled.num_return_sequences, 2);
    let biased = config(&["--logit-bias", r#"{"42": -5, "7": 2.5}"#]).unwrap();
    assert_eq!(biased.logit_bias, [(7, 2.5), (42, -5.0)].into());
    for value in ["{x", r#"{"a": 1}"#] {
        let error = parse::<Generate>(&["--logit-bias", value])
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains(r#"it must be a JSON object such as {"42": -5}"#),
            "{error}"
        );
    }
}

#[test]
fn a_chat_has_no_flags_that_it_would_ignore() {
    for flag in ["--logprobs", "--num-beams", "--num-assistant-tokens"] {
        assert!(parse::<Generate>(&[flag, "2"]).is_ok());
        let error = parse::<Chat>(&[flag, "2"]).err().unwrap().to_string();
        assert!(error.contains(flag), "{error}");
    }
    let flags = parse::<Chat>(&["--top-k", "3"]).unwrap().flags;
    assert_eq!(flags.top_k, Some(3));
}
