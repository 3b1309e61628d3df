//! Text in Parquet files, which only a build with the feature `parquet` reads, and the fingerprint of text.

use std::path::PathBuf;

use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{Fingerprints, MixtureWeights, TextData, TrainingArguments};
use tch::Device;

#[test]
fn a_parquet_file_that_cannot_be_read_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.parquet");
    std::fs::write(&file, "PAR1").unwrap();
    let arguments = TrainingArguments {
        data: vec![file],
        ..TrainingArguments::default()
    };
    let error = TextData::prepare_in(&folder.path().join("cache"), &arguments, |_| {});
    let error = error.unwrap_err().to_string();
    let expected = match cfg!(feature = "parquet") {
        true => "a.parquet cannot be read: ",
        false => "`--features parquet`",
    };
    assert!(error.contains(expected), "{error}");
}

#[test]
fn the_fingerprint_of_data_is_that_of_its_content_whatever_the_names_and_times_of_the_files_are() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprints = |name: &str, text: &str| -> Fingerprints {
        let file = folder.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, text).unwrap();
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
        if name.starts_with("old") {
            let file = std::fs::File::options().append(true).open(&file).unwrap();
            file.set_modified(long_ago).unwrap();
        }
        let arguments = TrainingArguments {
            data: vec![file],
            vocab_size: 270,
            context_length: 8,
            validation_fraction: 0.2,
            ..TrainingArguments::default()
        };
        let cache = folder.path().join("cache");
        let data = TextData::prepare_in(&cache, &arguments, |_| {}).unwrap();
        data.fingerprints(&arguments, &ProcessGroup::single())
            .unwrap()
    };
    let records = "{\"text\": \"two and two is four\"}\n".repeat(40);
    for ending in ["jsonl", "txt"] {
        let first = fingerprints(&format!("new/a.{ending}"), &records);
        assert_eq!(fingerprints(&format!("old/b.{ending}"), &records), first);
        let changed = records.replacen("four", "five", 1);
        assert_ne!(fingerprints(&format!("new/a.{ending}"), &changed), first);
    }
}

#[test]
fn the_description_beside_the_records_of_a_data_set_is_no_text_to_train_on() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let rows = "two and two is four\n".repeat(40);
    std::fs::write(data.join("rows.csv"), format!("text\n{rows}")).unwrap();
    for name in ["README.md", "dataset_info.json"] {
        std::fs::write(data.join(name), "{\"about\": \"the rows\"}\n".repeat(40)).unwrap();
    }
    let corpus = |data: &[PathBuf]| {
        let arguments = TrainingArguments {
            data: data.to_vec(),
            vocab_size: 270,
            context_length: 8,
            validation_fraction: 0.2,
            ..TrainingArguments::default()
        };
        let mut said = String::new();
        TextData::prepare_in(&folder.path().join("cache"), &arguments, |line| {
            said += line
        })
        .unwrap();
        said
    };
    let said = corpus(std::slice::from_ref(&data));
    assert!(said.contains("40 records of 1 file"), "{said}");
    // A file that is named is data, and so is a folder of text with a table in it.
    let said = corpus(&[data.join("README.md")]);
    assert!(said.contains("1 file,"), "{said}");
    std::fs::write(data.join("notes.txt"), &rows).unwrap();
    let said = corpus(&[data]);
    assert!(said.contains("4 files"), "{said}");
}

/// Returns arguments for a mixture of a JSON Lines file with the text `a` and a text file with the text `b`.
fn mixed(folder: &std::path::Path, weights: [f64; 2]) -> TrainingArguments {
    let long = format!("{{\"text\": \"{}\"}}\n", "a".repeat(40)).repeat(200);
    std::fs::write(folder.join("a.jsonl"), long).unwrap();
    std::fs::create_dir_all(folder.join("b")).unwrap();
    for number in 0..50 {
        std::fs::write(folder.join(format!("b/{number}.txt")), "b".repeat(10)).unwrap();
    }
    // A byte a token: there are no merges beyond the vocabulary of bytes.
    TrainingArguments {
        data: [("a.jsonl", weights[0]), ("b", weights[1])]
            .map(|(name, weight)| folder.join(format!("{name}:{weight}")))
            .to_vec(),
        vocab_size: 257,
        context_length: 10,
        validation_fraction: 0.2,
        per_device_train_batch_size: 8,
        ..TrainingArguments::default()
    }
}

/// Returns the numbers of tokens `a` and `b` in the first batches of training, and the passes over the sources.
fn drawn(data: &TextData, arguments: &TrainingArguments, batches: usize) -> ([usize; 2], Vec<f64>) {
    let mut loader = data.train_loader(arguments, Device::Cpu).unwrap();
    let tokenizer = data.tokenizer.as_ref().unwrap();
    let ids = ["a", "b"].map(|text| i64::from(tokenizer.token_to_id(text).unwrap()));
    let mut counts = [0; 2];
    for batch in loader.by_ref().take(batches) {
        let tokens: Vec<i64> = batch.unwrap().input_ids.flatten(0, -1).try_into().unwrap();
        for (count, id) in counts.iter_mut().zip(ids) {
            *count += tokens.iter().filter(|&&token| token == id).count();
        }
    }
    let epochs = loader.source_epochs().into_iter();
    (counts, epochs.map(|(_, passes)| passes).collect())
}

#[test]
fn a_mixture_has_the_shares_of_its_weights_in_tokens_or_in_samples() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = mixed(folder.path(), [1.0, 3.0]);
    let prepare = |arguments: &TrainingArguments| {
        let mut said = Vec::new();
        let say = |line: &str| said.push(line.to_owned());
        let data = TextData::prepare_in(&folder.path().join("cache"), arguments, say).unwrap();
        (data, said)
    };
    let share = |[a, b]: [usize; 2]| b as f64 / (a + b) as f64;

    let (data, said) = prepare(&arguments);
    let lines: Vec<&String> = said.iter().filter(|line| line.contains('%')).collect();
    assert!(lines[0].starts_with("mixture     25.0% "), "{said:?}");
    assert!(lines[1].starts_with("            75.0% "), "{said:?}");
    let (counts, epochs) = drawn(&data, &arguments, 200);
    assert!((share(counts) - 0.75).abs() < 0.05, "{counts:?}");
    // 1,600 windows, 1,200 of them out of the 44 of `b` (the end of a document is a token).
    assert!((25.0..29.0).contains(&epochs[1]), "{epochs:?}");

    // Documents of `a` have four times the tokens of those of `b`.
    let documents = TrainingArguments {
        sequences: Some(overdrive_trainer::SequenceMode::Documents),
        context_length: 64,
        ..arguments.clone()
    };
    let (data, _) = prepare(&documents);
    let (counts, _) = drawn(&data, &documents, 400);
    assert!((share(counts) - 0.75).abs() < 0.05, "{counts:?}");
    let samples = TrainingArguments {
        mixture_weights: MixtureWeights::Samples,
        ..documents
    };
    let (counts, _) = drawn(&data, &samples, 400);
    assert!((share(counts) - 30.0 / 70.0).abs() < 0.05, "{counts:?}");

    // The weights of a schedule hold after a number of steps.
    let scheduled = TrainingArguments {
        data_schedule: vec!["100:1,0".to_owned()],
        gradient_accumulation_steps: 1,
        ..arguments
    };
    let (data, _) = prepare(&scheduled);
    let (before, _) = drawn(&data, &scheduled, 98);
    assert!((share(before) - 0.75).abs() < 0.05, "{before:?}");
    // The last batch of the first epoch is smaller, so the 800 rows of 100 steps end a batch later.
    let (after, _) = drawn(&data, &scheduled, 102);
    let (all, _) = drawn(&data, &scheduled, 200);
    assert!(after[1] > before[1]);
    assert_eq!(all[1], after[1]);
}

#[test]
fn a_mixture_is_part_of_the_fingerprint_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprints = |arguments: &TrainingArguments| {
        let cache = folder.path().join("cache");
        let data = TextData::prepare_in(&cache, arguments, |_| {}).unwrap();
        data.fingerprints(arguments, &ProcessGroup::single())
            .unwrap()
    };
    let arguments = mixed(folder.path(), [1.0, 3.0]);
    let first = fingerprints(&arguments);
    assert_eq!(fingerprints(&arguments), first);
    assert_ne!(fingerprints(&mixed(folder.path(), [1.0, 2.0])), first);
    let scheduled = TrainingArguments {
        data_schedule: vec!["100:1,0".to_owned()],
        ..arguments
    };
    let (_, file) = fingerprints(&scheduled).to_file();
    let text = String::from_utf8(file).unwrap();
    assert!(
        text.contains("\"mixture\": \"1 3 of tokens, after 800 rows 1 0\""),
        "{text}"
    );
}
