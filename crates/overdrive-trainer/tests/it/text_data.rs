//! Text in Parquet files, which only a build with the feature `parquet` reads, and the fingerprint of text.

use std::path::PathBuf;

use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{Fingerprints, TextData, TrainingArguments};

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
    assert!(said.contains("40 records of 1 files"), "{said}");
    // A file that is named is data, and so is a folder of text with a table in it.
    let said = corpus(&[data.join("README.md")]);
    assert!(said.contains("1 files"), "{said}");
    std::fs::write(data.join("notes.txt"), &rows).unwrap();
    let said = corpus(&[data]);
    assert!(said.contains("4 files"), "{said}");
}
