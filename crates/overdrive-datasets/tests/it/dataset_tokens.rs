//! Tokens of a dataset are those of a corpus of the same texts.

use crate::common::{text, tokenizer};
use overdrive_datasets::{
    BuildOptions, Corpus, CorpusOptions, DatasetExt, Error, JsonOptions, JsonRecords, RecordNumber,
    build_dataset_tokens, build_dataset_tokens_to, build_tokens_to,
};
use serde_json::{Value, json};

#[test]
fn the_tokens_are_those_of_the_corpus_for_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("texts.jsonl");
    // Some are empty, some longer than a piece.
    let document = |i: usize| {
        if i % 50 == 7 {
            String::new()
        } else {
            text(i).repeat(1 + i % 3)
        }
    };
    let lines: String = (0..600)
        .map(|i| format!("{}\n", json!({"text": document(i)})))
        .collect();
    std::fs::write(&path, lines).unwrap();
    let options = |threads| BuildOptions {
        max_chunk_bytes: 500,
        threads: Some(threads),
        progress: false,
        ..BuildOptions::default()
    };
    let tokenizer = tokenizer();
    let corpus = Corpus::from_paths([&path], &CorpusOptions::default()).unwrap();
    let (expected, report) = build_tokens_to(
        dir.path().join("corpus.tokens"),
        &corpus,
        &tokenizer,
        &options(2),
    )
    .unwrap();
    assert_eq!(report.documents, 588);

    let records = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
    let fingerprint = records.records().fingerprint().unwrap();
    let texts = records.map(|record| Ok(record["text"].as_str().unwrap_or("").to_owned()));
    for threads in [1, 3, 9] {
        let path = dir.path().join(format!("{threads}.tokens"));
        let (store, found) =
            build_dataset_tokens_to(path, &texts, &tokenizer, &options(threads)).unwrap();
        assert_eq!(
            (found.documents, found.tokens, found.text_bytes),
            (report.documents, report.tokens, report.text_bytes)
        );
        assert_eq!(
            store.tokens(0..store.len()).unwrap(),
            expected.tokens(0..expected.len()).unwrap()
        );
    }

    let cache = dir.path().join("cache");
    let build =
        || build_dataset_tokens(&texts, fingerprint, &tokenizer, &options(2), &cache).unwrap();
    assert!(!build().was_cached());
    assert!(build().was_cached());
    assert_eq!(build().store.len(), expected.len());
}

#[test]
fn a_record_that_cannot_be_read_leaves_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("texts.jsonl");
    std::fs::write(&path, "{\"text\": \"one\"}\n".repeat(2000) + "{\n").unwrap();
    let records = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
    let texts = records.map(|record| Ok(record["text"].to_string()));
    let store = dir.path().join("store.tokens");
    for threads in [1, 8] {
        let options = BuildOptions {
            threads: Some(threads),
            progress: false,
            ..BuildOptions::default()
        };
        let error = build_dataset_tokens_to(&store, &texts, &tokenizer(), &options).unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidRecord {
                    number: RecordNumber::Record(2000),
                    ..
                }
            ),
            "{error}"
        );
        assert!(!store.exists());
    }
}
