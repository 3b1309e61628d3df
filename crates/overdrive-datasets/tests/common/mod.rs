//! Shared helpers of the tests.
#![allow(dead_code, reason = "each test file uses some of them")]

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    Corpus, CorpusOptions, StoreOptions, TokenStore, TokenStoreWriter, Tokenizer, load_tokenizer,
};
use proptest::prelude::ProptestConfig;

/// Returns a configuration with `count` cases, or with `PROPTEST_CASES` for a longer search by hand.
pub(crate) fn cases(count: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(count),
    }
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    assert!(
        path.exists(),
        "{name} is missing: make it with the gen_*.py beside it"
    );
    path
}

/// Returns a byte-level tokenizer with 384 tokens, trained by this crate.
pub(crate) fn tokenizer() -> Tokenizer {
    load_tokenizer(fixture("tokenizer_fixture.json")).unwrap()
}

/// Returns a store of documents; the text of a document counts three bytes a token.
pub(crate) fn store(dir: &Path, vocab_size: u64, documents: &[Vec<u32>]) -> TokenStore {
    let mut writer =
        TokenStoreWriter::create(dir.join("test.tokens"), StoreOptions::new(vocab_size)).unwrap();
    for document in documents {
        writer
            .push_document(document, 3 * document.len() as u64)
            .unwrap();
    }
    writer.finish().unwrap()
}

/// Returns a store of the tokens 0, 1, 2, ... in one document.
pub(crate) fn counting_store(dir: &Path, tokens: u32) -> TokenStore {
    store(dir, u64::from(tokens), &[(0..tokens).collect()])
}

/// Returns a folder with 60 files of text.
pub(crate) fn text_folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..60)
        .map(|i| (format!("{}/{i:02}.rs", i % 3), text(i)))
        .collect();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text))
        .collect();
    write_files(dir.path(), &files);
    dir
}

/// Returns the corpus of the files below `path`.
pub(crate) fn corpus(path: impl AsRef<Path>) -> Corpus {
    Corpus::from_paths([path], &CorpusOptions::default()).unwrap()
}

/// Writes files with these names and contents under `dir`.
pub(crate) fn write_files<C: AsRef<[u8]>>(dir: &Path, files: &[(&str, C)]) {
    for (name, content) in files {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

/// Returns some Rust-like text, different for each number.
pub(crate) fn text(number: usize) -> String {
    let mut text = format!("//! Module {number}.\n\nuse std::fmt;\n\n");
    for i in 0..=number % 7 {
        text += &format!(
            "/// Adds {i} to the number.\npub fn add_{number}_{i}(x: u64) -> u64 {{\n    x + {i}\n}}\n\n"
        );
    }
    text
}
