//! Files of tokens: `tokenize`, and `train` on its folder and on the files of nanoGPT.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive::datasets::{TokenStore, load_tokenizer};
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{
    IntervalStrategy, RunFolder, RunSummary, TextData, TrainingArguments, new_model, write_results,
};
use tch::Device;

use crate::fit;
use crate::tokenize_example::{Flags, run};

/// A tokenizer of 330 tokens with `</s>` and without `<|endoftext|>`.
fn tokenizer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/overdrive-trainer/tests/fixtures/chat_labels/tokenizer.json")
}

fn flags(data: PathBuf, out: PathBuf) -> Flags {
    Flags {
        data: vec![data],
        tokenizer: tokenizer(),
        out,
        text_column: "text".to_owned(),
        lines: false,
        remove_duplicates: false,
        end_of_document: Some("</s>".to_owned()),
        begin_of_document: None,
        threads: Some(2),
    }
}

fn arguments(data: &Path) -> TrainingArguments {
    TrainingArguments {
        context_length: 16,
        vocab_size: TrainingArguments::default().vocab_size,
        ..fit::tiny(data.to_owned())
    }
}

/// Returns the data, and the log lines about it.
fn prepare(arguments: &TrainingArguments) -> overdrive::trainer::Result<(TextData, String)> {
    let mut said = String::new();
    let cache = Path::new("a file of tokens needs no cache");
    let data = TextData::prepare_in(cache, arguments, |line| said += &format!("{line}\n"))?;
    Ok((data, said))
}

fn error(arguments: &TrainingArguments) -> String {
    prepare(arguments).unwrap_err().to_string()
}

fn document(number: usize) -> String {
    format!(
        "document {number}: {}",
        "the quick brown fox. ".repeat(1 + number % 4)
    )
}

#[test]
fn every_format_of_text_gives_the_same_folder_of_tokens_and_train_takes_it() {
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<String> = (0..30).map(document).collect();
    let records = documents
        .iter()
        .map(|text| format!("{}\n", serde_json::json!({ "body": text })));
    let rows = documents.iter().map(|text| format!("\"{text}\"\n"));
    let lines = documents.iter().map(|text| format!("{text}\n"));
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let mut stores = Vec::new();
    for (name, text) in [
        ("a.jsonl", records.collect::<String>()),
        ("a.csv", format!("body\n{}", rows.collect::<String>())),
        ("a.txt", lines.collect()),
    ] {
        let out = folder.path().join(format!("out-{name}"));
        let mut flags = flags(write(name, text), out.clone());
        flags.text_column = "body".to_owned();
        flags.lines = name == "a.txt";
        let mut said = String::new();
        run(&flags, |line| said += &format!("{line}\n")).unwrap();
        assert!(
            said.contains("of 30 documents, ") && said.contains(" bytes of text per token"),
            "{said}"
        );
        assert!(said.contains("documents end with </s>"), "{said}");
        stores.push(TokenStore::open(out.join("text.tokens")).unwrap());
    }
    let tokens = |store: &TokenStore| store.tokens(0..store.len()).unwrap();
    assert_eq!(tokens(&stores[0]), tokens(&stores[1]));
    assert_eq!(tokens(&stores[0]), tokens(&stores[2]));
    let tokenizer = load_tokenizer(tokenizer()).unwrap();
    let text = tokenizer.decode(&tokens(&stores[0])[..], true).unwrap();
    assert!(text.starts_with(&documents[0]), "{text}");

    // The folder, and the file in it.
    let out = folder.path().join("out-a.jsonl");
    for data in [out.clone(), out.join("text.tokens")] {
        let (data, said) = prepare(&arguments(&data)).unwrap();
        assert_eq!(data.train.len() + data.validation.len(), stores[0].len());
        assert_eq!(data.vocab_size(), tokenizer.get_vocab_size(true) as u64);
        assert_eq!(data.end_of_text(), tokenizer.token_to_id("</s>"));
        assert!(data.validation.bits_per_byte(1.0).is_some());
        assert!(said.contains("tokenizer   330 tokens"), "{said}");
    }
    // Documents are sequences too.
    let packed = TrainingArguments {
        packing: true,
        ..arguments(&out)
    };
    let (_, said) = prepare(&packed).unwrap();
    assert!(said.contains("no padding, packed rows "), "{said}");

    // Another tokenizer is found out.
    let other = folder.path().join("other.json");
    let text = fs::read_to_string(out.join("tokenizer.json")).unwrap();
    fs::write(&other, text.replacen("</s>", "</t>", 1)).unwrap();
    let wrong = TrainingArguments {
        tokenizer: Some(other),
        ..arguments(&out)
    };
    let message = error(&wrong);
    assert!(
        message.contains("was made with another tokenizer"),
        "{message}"
    );
    let lines = TrainingArguments {
        remove_duplicates: true,
        ..arguments(&out)
    };
    assert!(
        error(&lines).contains("give it to `tokenize`"),
        "{}",
        error(&lines)
    );
}

#[test]
fn samples_continue_documents_of_a_file_that_is_emptied_after_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let (text, out) = (folder.path().join("a.txt"), folder.path().join("tokens"));
    let lines: String = (0..30).map(|number| document(number) + "\n").collect();
    fs::write(&text, lines).unwrap();
    let flags = Flags {
        lines: true,
        ..flags(text, out.clone())
    };
    run(&flags, |_| {}).unwrap();
    let arguments = TrainingArguments {
        samples: 2,
        output_dir: Some(folder.path().join("run")),
        ..arguments(&out)
    };
    let (data, _) = prepare(&arguments).unwrap();
    let model = new_model(&arguments, &data, Device::Cpu).unwrap();
    let run = RunFolder::create(&arguments).unwrap();
    // The program still has it in its memory map, without bytes.
    let tokens = fs::File::options()
        .write(true)
        .open(out.join("text.tokens"));
    tokens.unwrap().set_len(0).unwrap();
    let results = write_results(
        &run,
        &arguments,
        &data,
        &model,
        &RunSummary::default(),
        None,
    )
    .unwrap();
    assert_eq!(results.samples.len(), 2);
    assert!(results.samples[0].prompt.starts_with("document "));
}

/// Writes tokens as nanoGPT's prepare.py does.
fn nanogpt(path: &Path, tokens: impl Iterator<Item = u16>) {
    fs::write(path, tokens.flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
}

#[test]
fn the_files_of_nanogpt_are_trained_on_with_their_own_validation_and_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let (train, val) = (
        folder.path().join("train.bin"),
        folder.path().join("val.bin"),
    );
    nanogpt(&train, (0..1000).map(|at| at * 7 % 65));
    nanogpt(&val, (0..200).map(|at| at * 3 % 65));
    // 65 characters, as in nanoGPT's shakespeare_char; a tokenizer that is trained needs 257.
    let small = TrainingArguments {
        vocab_size: 65,
        ..arguments(&train)
    };
    small.validate().unwrap();
    let (data, said) = prepare(&small).unwrap();
    assert!(data.tokenizer.is_none());
    assert_eq!(
        (data.train.len(), data.validation.len(), data.vocab_size()),
        (1000, 200, 65)
    );
    assert!(
        said.contains("validation on 200 tokens in ") && said.contains("val.bin"),
        "{said}"
    );
    let batch = data
        .train_loader(&small, tch::Device::Cpu)
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    batch.check_ids(65).unwrap();
    let prints = |data: &TextData| data.fingerprints(&small, &ProcessGroup::single()).unwrap();
    let first = prints(&data);

    // The folder is the same; with one file the end is held out.
    let folder_of = TrainingArguments {
        data: vec![folder.path().to_owned()],
        ..small.clone()
    };
    folder_of.validate().unwrap();
    assert_eq!(prepare(&folder_of).unwrap().0.validation.len(), 200);
    fs::remove_file(&val).unwrap();
    let (data, _) = prepare(&small).unwrap();
    assert_eq!((data.train.len(), data.validation.len()), (800, 200));

    // The bytes of the text are not known.
    let bits = TrainingArguments {
        metric_for_best_model: Some("bits_per_byte".to_owned()),
        eval_strategy: IntervalStrategy::Steps,
        ..small.clone()
    };
    let message = error(&bits);
    assert!(
        message.contains("`metric_for_best_model` is bits_per_byte; it must be `loss`"),
        "{message}"
    );

    // Other tokens have another fingerprint.
    drop(data);
    nanogpt(&train, (0..1000).map(|at| at * 11 % 65));
    assert_ne!(prints(&prepare(&small).unwrap().0), first);

    let message = error(&TrainingArguments {
        vocab_size: 64,
        ..small.clone()
    });
    assert!(
        message.contains("`vocab_size` is 64; it must be at least 65, because"),
        "{message}"
    );
    assert!(message.contains("train.bin has the token 64"), "{message}");
    // With a tokenizer its vocabulary counts.
    let with = TrainingArguments {
        tokenizer: Some(tokenizer()),
        ..small.clone()
    };
    assert_eq!(prepare(&with).unwrap().0.vocab_size(), 330);
    nanogpt(&train, (0..1000).map(|at| at % 331));
    let message = error(&with);
    assert!(message.contains("token 330 at position 330"), "{message}");
    let message = error(&TrainingArguments {
        data: vec![train, "a.txt".into()],
        ..small
    });
    assert!(
        message.contains("a.txt") && message.contains("`tokenize`"),
        "{message}"
    );
}

#[test]
fn a_run_on_tokens_without_a_tokenizer_saves_a_model_and_no_samples() {
    let _alone = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let train = folder.path().join("train.bin");
    nanogpt(&train, (0..2000).map(|at| at % 50));
    let mut arguments = TrainingArguments {
        vocab_size: 50,
        max_steps: 3,
        samples: 2,
        per_device_train_batch_size: 4,
        threads: Some(2),
        output_dir: Some(folder.path().join("run")),
        ..arguments(&train)
    };
    arguments.eval_steps = Some(3.0);
    let text = serde_json::to_string(&arguments).unwrap();
    let file = folder.path().join("run.json");
    fs::write(&file, text).unwrap();
    let flags = <crate::train_example::Flags as clap::Parser>::parse_from([
        "train",
        "--config",
        file.to_str().unwrap(),
    ]);
    crate::train_example::run(&flags).unwrap();
    let model = folder.path().join("run/model");
    assert!(model.join("model.safetensors").exists() && !model.join("tokenizer.json").exists());
}
