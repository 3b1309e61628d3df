//! Training byte-level BPE, and tokenizers as files.

use crate::common::{fixture, text, tokenizer, write_files};
use overdrive_datasets::{
    BpeOptions, Corpus, CorpusOptions, DatasetExt, Error, InMemory, load_tokenizer, sample_texts,
    save_tokenizer, tokenizer_digest, train_bpe, train_bpe_cached,
};
use proptest::prelude::*;

const SAMPLE: u64 = 16 << 20;

fn corpus() -> (tempfile::TempDir, Corpus) {
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..60).map(|i| (format!("{i:02}.rs"), text(i))).collect();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text))
        .collect();
    write_files(dir.path(), &files);
    let corpus = Corpus::from_paths([dir.path()], &CorpusOptions::default()).unwrap();
    (dir, corpus)
}

fn options(vocab_size: usize) -> BpeOptions {
    BpeOptions {
        vocab_size,
        ..BpeOptions::default()
    }
}

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

#[derive(serde::Deserialize)]
struct Fixture {
    vocab_size: usize,
    cases: Vec<Case>,
    special_as_text: Case,
}

#[test]
fn ids_are_those_of_transformers() {
    let json = std::fs::read(fixture("tokenizer_fixture_ids.json")).unwrap();
    let expected: Fixture = serde_json::from_slice(&json).unwrap();
    let mut tokenizer = tokenizer();
    assert_eq!(tokenizer.get_vocab_size(true), expected.vocab_size);
    for case in &expected.cases {
        let ids = tokenizer
            .encode_fast(case.text.as_str(), true)
            .unwrap()
            .get_ids()
            .to_vec();
        assert_eq!(ids, case.ids, "{:?}", case.text);
    }
    tokenizer.set_encode_special_tokens(true);
    let case = &expected.special_as_text;
    let ids = tokenizer
        .encode_fast(case.text.as_str(), true)
        .unwrap()
        .get_ids()
        .to_vec();
    assert_eq!(ids, case.ids);
}

#[test]
fn a_byte_order_mark_is_not_learned() {
    let trained = |mark: &str| {
        let dir = tempfile::tempdir().unwrap();
        let record = serde_json::json!({ "text": text(1) });
        write_files(
            dir.path(),
            &[
                ("a.jsonl", format!("{mark}{record}\n")),
                ("b.txt", format!("{mark}{}", text(2))),
            ],
        );
        let corpus = Corpus::from_paths([dir.path()], &CorpusOptions::default()).unwrap();
        let bpe = train_bpe(corpus.sample(SAMPLE), &options(300)).unwrap();
        bpe.tokenizer.get_vocab(true)
    };
    assert_eq!(trained("\u{feff}"), trained(""));
}

#[test]
fn the_vocabulary_has_the_size_asked_for_and_special_tokens_first() {
    let (_dir, corpus) = corpus();
    let bpe = train_bpe(corpus.sample(SAMPLE), &options(340)).unwrap();
    assert_eq!(bpe.vocab_size, 340);
    assert_eq!(bpe.tokenizer.get_vocab_size(true), 340);
    assert_eq!(bpe.tokenizer.token_to_id("<|endoftext|>"), Some(0));
    let two = BpeOptions {
        special_tokens: vec!["<s>".to_owned(), "</s>".to_owned()],
        ..options(300)
    };
    let bpe = train_bpe(corpus.sample(SAMPLE), &two).unwrap();
    assert_eq!(bpe.vocab_size, 300);
    assert_eq!(bpe.tokenizer.token_to_id("</s>"), Some(1));
}

#[test]
fn a_text_without_pairs_gives_a_smaller_vocabulary_and_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a.txt", "ab ab ab")]);
    let corpus = Corpus::from_paths([dir.path()], &CorpusOptions::default()).unwrap();
    // 256 bytes, one special token, and the merges "ab" and " ab".
    assert_eq!(
        train_bpe(corpus.sample(SAMPLE), &options(1000))
            .unwrap()
            .vocab_size,
        259
    );
}

#[test]
fn a_vocabulary_below_the_bytes_is_refused() {
    let (_dir, corpus) = corpus();
    let error = train_bpe(corpus.sample(SAMPLE), &options(256)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`vocab_size` is 256; it must be at least 257: 256 bytes and 1 special token(s)"
    );
    assert_eq!(
        train_bpe(corpus.sample(SAMPLE), &options(257))
            .unwrap()
            .vocab_size,
        257
    );
}

#[test]
fn training_is_deterministic_for_any_number_of_threads() {
    let (_dir, corpus) = corpus();
    let train = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            train_bpe(corpus.sample(SAMPLE), &options(350))
                .unwrap()
                .tokenizer
                .to_string(false)
                .unwrap()
        })
    };
    let one = train(1);
    assert_eq!(one, train(4));
    assert_eq!(one, train(4));
}

#[test]
fn the_sample_is_a_stable_subset_of_the_corpus() {
    let (_dir, corpus) = corpus();
    let sample = |bytes| corpus.sample(bytes).map(Result::unwrap).collect::<Vec<_>>();
    let all = sample(SAMPLE);
    assert_eq!(all, (0..60).map(text).collect::<Vec<_>>());
    let third = sample(corpus.total_bytes() / 3);
    assert_eq!(third, sample(corpus.total_bytes() / 3));
    let mut rest = all.iter();
    assert!(third.iter().all(|text| rest.any(|other| other == text)));
    let bytes = third.iter().map(String::len).sum::<usize>() as u64;
    let largest = all.iter().map(String::len).max().unwrap() as u64;
    assert!((corpus.total_bytes() / 3..corpus.total_bytes() / 3 + largest).contains(&bytes));
}

#[test]
fn the_sample_of_a_dataset_is_spread_over_its_records() {
    let texts: Vec<String> = (0..1000).map(|i| format!("{i:09} ")).collect();
    let data = InMemory(texts.clone());
    let sample = |bytes| {
        sample_texts(&data, bytes)
            .map(Result::unwrap)
            .collect::<Vec<_>>()
    };
    assert_eq!(sample(10_000), texts);
    let tenth = sample(1000);
    assert_eq!(tenth.len(), 100);
    // 64 runs of one or two records.
    let gaps = |pair: &[String]| {
        pair[1].trim().parse::<usize>().unwrap() - pair[0].trim().parse::<usize>().unwrap()
    };
    assert!(
        tenth.windows(2).all(|pair| (1..=16).contains(&gaps(pair))),
        "{tenth:?}"
    );
    assert_eq!(sample(0), Vec::<String>::new());
    assert_eq!(sample_texts(&InMemory(Vec::new()), 10).count(), 0);
    // A record that cannot be read ends the training.
    let failing = data.map(|text| match text.starts_with("000000500") {
        true => Err(Error::other("broken")),
        false => Ok(text),
    });
    let error = train_bpe(sample_texts(&failing, 10_000), &options(300)).unwrap_err();
    assert!(error.to_string().contains("broken"), "{error}");
}

#[test]
fn json_lines_are_trained_on_their_text_alone() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"zebra\": 1, \"text\": \"hello hello\"}\n".repeat(100);
    write_files(dir.path(), &[("a.jsonl", lines)]);
    let corpus = Corpus::from_paths([dir.path()], &CorpusOptions::default()).unwrap();
    let bpe = train_bpe(corpus.sample(SAMPLE), &options(270)).unwrap();
    assert!(bpe.tokenizer.token_to_id("hello").is_some());
    assert!(bpe.tokenizer.token_to_id("zebra").is_none());
    assert!(bpe.tokenizer.token_to_id("ze").is_none());
}

#[test]
fn a_trained_tokenizer_is_found_again_and_trained_anew_when_something_changed() {
    let (_dir, corpus) = corpus();
    let cache = tempfile::tempdir().unwrap();
    let train = |options: &BpeOptions| {
        train_bpe_cached(
            corpus.sample(SAMPLE),
            corpus.digest(),
            options,
            cache.path(),
        )
        .unwrap()
    };
    let first = train(&options(320));
    assert!(!first.was_cached);
    let second = train(&options(320));
    assert!(second.was_cached);
    assert_eq!(second.vocab_size, 320);
    assert_eq!(
        tokenizer_digest(&first.tokenizer).unwrap(),
        tokenizer_digest(&second.tokenizer).unwrap()
    );
    assert!(!train(&options(321)).was_cached);
    assert!(
        !train(&BpeOptions {
            min_frequency: 3,
            ..options(320)
        })
        .was_cached
    );
    // A damaged file is replaced.
    for entry in std::fs::read_dir(cache.path()).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            std::fs::write(path, "{").unwrap();
        }
    }
    assert!(!train(&options(320)).was_cached);
    assert!(train(&options(320)).was_cached);
}

#[test]
fn a_saved_tokenizer_is_loaded_from_its_folder_or_file() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    save_tokenizer(dir.path(), &tokenizer, Some("<|endoftext|>"), 256).unwrap();
    let digest = tokenizer_digest(&tokenizer).unwrap();
    for path in [dir.path().to_owned(), dir.path().join("tokenizer.json")] {
        assert_eq!(
            tokenizer_digest(&load_tokenizer(path).unwrap()).unwrap(),
            digest
        );
    }
    let config = std::fs::read(dir.path().join("tokenizer_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(config["eos_token"], "<|endoftext|>");
    assert_eq!(config["model_max_length"], 256);
    let error = save_tokenizer(dir.path(), &tokenizer, Some("</s>"), 256).unwrap_err();
    assert!(error.to_string().contains("\"</s>\""), "{error}");
    let error = load_tokenizer(dir.path().join("tokenizer_config.json")).unwrap_err();
    assert!(
        error.to_string().contains("tokenizer_config.json"),
        "{error}"
    );
}

/// A file that is read without an error and panics in the tokenizers crate at the first text; a fuzzer found it.
#[test]
fn a_template_with_an_undefined_special_token_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let special = |name: &str| {
        serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "decoder": null,
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "<s>": 1}, "unk_token": "a"},
        })
    };
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, special("<s>").to_string()).unwrap();
    load_tokenizer(&path).unwrap();
    std::fs::write(&path, special("<t>").to_string()).unwrap();
    let error = load_tokenizer(&path).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_text_comes_back_out_of_its_tokens(text in any::<String>(), ascii in "[ -~\\s]{0,80}") {
        let tokenizer = tokenizer();
        for text in [text, ascii] {
            let ids = tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
    }
}
