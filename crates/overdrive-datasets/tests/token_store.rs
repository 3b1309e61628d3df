//! Token stores: round trips, and errors that name the damage.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod common;

use std::path::Path;

use common::{fixture, store};
use overdrive_datasets::{
    Error, FORMAT_VERSION, RawOptions, Sha256Digest, StoreOptions, TokenStore, TokenStoreWriter,
    TokenWidth,
};
use proptest::prelude::*;

const HEADER: usize = 256;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_store_gives_back_the_documents_it_was_given(
        documents in prop::collection::vec(prop::collection::vec(0_u32..70_000, 0..50), 0..20),
        wide in any::<bool>(),
    ) {
        let vocab_size = if wide { 70_000 } else { 1 << 16 };
        let limit = |token: &u32| (*token).min(vocab_size as u32 - 1);
        let documents: Vec<Vec<u32>> =
            documents.iter().map(|document| document.iter().map(limit).collect()).collect();
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path(), vocab_size, &documents);
        let all: Vec<u32> = documents.concat();

        prop_assert_eq!(store.width(), if wide { TokenWidth::U32 } else { TokenWidth::U16 });
        prop_assert_eq!(store.len(), all.len());
        prop_assert_eq!(&store.tokens(0..all.len()).unwrap(), &all);
        prop_assert_eq!(store.document_count(), documents.len());
        for (document, expected) in store.documents().zip(&documents) {
            prop_assert_eq!(&store.tokens(document.tokens).unwrap(), expected);
            prop_assert_eq!(document.text_bytes, Some(3 * expected.len() as u64));
        }
        prop_assert_eq!(store.text_bytes(), Some(3 * all.len() as u64));
        store.verify().unwrap();
    }

    #[test]
    fn any_range_is_the_slice_of_the_tokens(start in 0_usize..=200, len in 0_usize..=200) {
        let dir = tempfile::tempdir().unwrap();
        let all: Vec<u32> = (0..200).map(|i| i * 3 % 101).collect();
        let store = store(dir.path(), 101, &[all[..70].to_vec(), all[70..].to_vec()]);
        let mut out = vec![-1; len];
        let read = store.copy_to(start, &mut out);
        if start + len <= 200 {
            read.unwrap();
            let expected: Vec<i64> = all[start..start + len].iter().map(|&t| t.into()).collect();
            prop_assert_eq!(out, expected);
        } else {
            let refused = matches!(read, Err(Error::OutOfRange { tokens: 200, .. }));
            prop_assert!(refused);
        }
        // No memory is taken for a range that is not there.
        let beyond = store.tokens(start..usize::MAX);
        let refused = matches!(beyond, Err(Error::OutOfRange { tokens: 200, .. }));
        prop_assert!(refused);
    }

    #[test]
    fn every_change_of_one_byte_of_the_header_is_detected(at in 0_usize..HEADER, xor in 1_u8..) {
        let dir = tempfile::tempdir().unwrap();
        let path = store(dir.path(), 50, &[vec![1, 2, 3], vec![4]]).path().to_owned();
        change(&path, |bytes| bytes[at] ^= xor);
        prop_assert!(TokenStore::open(&path).is_err());
    }
}

/// Changes the file at `path`.
fn change(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    edit(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Returns the error of opening a store after an edit.
fn error_after(edit: impl FnOnce(&mut Vec<u8>)) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let path = store(dir.path(), 50, &[vec![1, 2, 3], vec![4, 5]])
        .path()
        .to_owned();
    change(&path, edit);
    TokenStore::open(&path).unwrap_err()
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// Sets a field and makes the header's checksum right again.
fn put_checked(bytes: &mut [u8], at: usize, field: &[u8]) {
    put(bytes, at, field);
    let digest = Sha256Digest::of(&bytes[..224]);
    put(bytes, 224, &digest.0);
}

#[test]
fn each_damaged_field_is_refused_by_its_name() {
    let message = |edit: fn(&mut Vec<u8>)| error_after(edit).to_string();

    let error = error_after(|bytes| put(bytes, 0, b"OVERDOSE"));
    assert!(
        error
            .to_string()
            .contains("it starts with [4f, 56, 45, 52, 44, 4f, 53, 45]"),
        "{error}"
    );
    assert!(error.to_string().contains("open_nanogpt"), "{error}");

    let error = error_after(|bytes| put(bytes, 8, &7_u32.to_le_bytes()));
    assert!(
        error.to_string().contains(&format!(
            "it has format version 7, and this version of overdrive-datasets reads version {FORMAT_VERSION}"
        )),
        "{error}"
    );
    for (edit, expected) in [
        (
            (|bytes| put(bytes, 12, &[3])) as fn(&mut Vec<u8>),
            "token width in its header is 3 bytes, expected 2 or 4",
        ),
        (
            |bytes| put(bytes, 16, &0_u64.to_le_bytes()),
            "vocabulary size in its header is 0, expected 1 to 65536",
        ),
        (
            |bytes| put(bytes, 16, &70_000_u64.to_le_bytes()),
            "vocabulary size in its header is 70000",
        ),
        (
            |bytes| put(bytes, 48, &50_u32.to_le_bytes()),
            "end-of-document token in its header is 50, outside",
        ),
        (
            |bytes| put(bytes, 40, &[9]),
            "the checksum of its header is wrong",
        ),
        (
            |bytes| put(bytes, 70, &[9]),
            "the checksum of its header is wrong",
        ),
        (
            |bytes| put_checked(bytes, 24, &u64::MAX.to_le_bytes()),
            "token count in its header is larger than any",
        ),
        (
            |bytes| put_checked(bytes, 24, &6_u64.to_le_bytes()),
            "document",
        ),
        (
            |bytes| put_checked(bytes, 40, &9_u64.to_le_bytes()),
            "its header has 9 text bytes, and its documents have 15",
        ),
        // The table follows 5 tokens of 2 bytes, padded to 8.
        (
            |bytes| put(bytes, 256 + 16, &6_u64.to_le_bytes()),
            "document 0 ends at token 6",
        ),
        (
            |bytes| put(bytes, 256 + 32, &4_u64.to_le_bytes()),
            "documents hold 4 of 5 tokens",
        ),
        (
            |bytes| put(bytes, 256 + 32, &2_u64.to_le_bytes()),
            "document 1 ends at token 2",
        ),
    ] {
        let message = message(edit);
        assert!(
            message.contains(expected),
            "{message:?} does not say {expected:?}"
        );
    }
}

#[test]
fn a_truncated_file_is_refused_with_both_lengths() {
    let error = error_after(|bytes| bytes.truncate(bytes.len() - 1));
    assert!(
        error
            .to_string()
            .contains("it has 303 bytes where 304 were expected"),
        "{error}"
    );
    let error = error_after(|bytes| bytes.truncate(100));
    assert!(
        error
            .to_string()
            .contains("it has 100 bytes where 256 were expected"),
        "{error}"
    );
    let error = error_after(|bytes| bytes.push(0));
    assert!(
        error.to_string().contains("it has 305 bytes where"),
        "{error}"
    );
    let error = error_after(Vec::clear);
    assert!(
        error.to_string().contains("it has 0 bytes where"),
        "{error}"
    );
}

#[test]
fn verify_detects_a_changed_token_and_a_changed_document() {
    for (at, part) in [(HEADER, "tokens"), (HEADER + 10, "documents")] {
        let dir = tempfile::tempdir().unwrap();
        let path = store(dir.path(), 50, &[vec![1, 2, 3], vec![4, 5]])
            .path()
            .to_owned();
        // Byte 10 behind the header is padding before the table, which belongs to neither.
        let at = if part == "documents" { at + 6 + 8 } else { at };
        change(&path, |bytes| bytes[at] ^= 1);
        let error = match TokenStore::open(&path) {
            Ok(store) => store.verify().unwrap_err(),
            // A changed document length is noticed at once: the sum is in the header.
            Err(error) => {
                assert!(error.to_string().contains("text bytes"), "{error}");
                continue;
            }
        };
        assert!(
            matches!(&error, Error::DamagedFile { problem, .. } if problem.starts_with(&format!("its {part} "))),
            "{error}"
        );
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_by_writer_and_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tokens");
    let mut writer = TokenStoreWriter::create(&path, StoreOptions::new(50)).unwrap();
    writer.push_document(&[1, 2], 2).unwrap();
    let error = writer.push_document(&[3, 50], 2).unwrap_err();
    let at_3 = |error: &Error| {
        matches!(
            error,
            Error::TokenOutOfVocabulary {
                position: 3,
                token: 50,
                vocab_size: 50,
                ..
            }
        )
    };
    assert!(at_3(&error), "{error}");
    drop(writer);

    // A store whose content was changed behind the header: reading the window finds it.
    let path = store(dir.path(), 50, &[vec![1, 2, 3, 4]]).path().to_owned();
    change(&path, |bytes| bytes[HEADER + 6] = 50);
    let store = TokenStore::open(&path).unwrap();
    store.copy_to(0, &mut [0; 3]).unwrap();
    assert!(at_3(&store.copy_to(1, &mut [0; 3]).unwrap_err()));
    assert!(matches!(
        store.verify().unwrap_err(),
        Error::DamagedFile { .. }
    ));
}

#[test]
fn a_vocabulary_that_does_not_fit_the_width_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        width: Some(TokenWidth::U16),
        ..StoreOptions::new(65_537)
    };
    let error = TokenStoreWriter::create(dir.path().join("a"), options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`vocab_size` is 65537; it must be at most 65536 for tokens of 2 bytes; use TokenWidth::U32"
    );
    let options = StoreOptions {
        width: Some(TokenWidth::U16),
        ..StoreOptions::new(65_536)
    };
    TokenStoreWriter::create(dir.path().join("a"), options).unwrap();
}

#[test]
fn a_store_knows_its_tokenizer_and_refuses_another() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = Sha256Digest::of(b"tokenizer");
    let options = StoreOptions {
        tokenizer,
        end_of_document: Some(7),
        ..StoreOptions::new(50)
    };
    let mut writer = TokenStoreWriter::create(dir.path().join("a"), options).unwrap();
    writer.push_document(&[1, 7], 4).unwrap();
    let store = writer.finish().unwrap();
    assert_eq!(store.end_of_document(), Some(7));
    assert_eq!(store.vocab_size(), Some(50));
    store.expect_tokenizer(tokenizer).unwrap();
    let error = store
        .expect_tokenizer(Sha256Digest::of(b"other"))
        .unwrap_err();
    assert!(
        error.to_string().contains(&tokenizer.to_string()),
        "{error}"
    );
}

#[test]
fn an_empty_store_can_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path(), 50, &[]);
    assert!(store.is_empty());
    assert_eq!(store.document_count(), 0);
    assert_eq!(store.document(0), None);
    store.verify().unwrap();
}

#[test]
fn nanogpt_files_of_numpy_are_read_as_they_are() {
    let mut expected: Vec<u32> = (0..300).map(|i| i * 7919 % 50257).collect();
    expected[99] = 50256;
    expected[249] = 50256;
    let store = TokenStore::open_nanogpt(fixture("nanogpt_u16.bin"), TokenWidth::U16).unwrap();
    assert_eq!(store.tokens(0..300).unwrap(), expected);
    assert_eq!(store.document_count(), 1);
    assert_eq!(store.text_bytes(), None);

    let options = RawOptions {
        width: TokenWidth::U32,
        vocab_size: Some(50257),
        end_of_document: Some(50256),
    };
    let store = TokenStore::open_raw(fixture("raw_u32.bin"), &options).unwrap();
    assert_eq!(store.tokens(0..300).unwrap(), expected);
    let documents: Vec<_> = store.documents().map(|document| document.tokens).collect();
    assert_eq!(documents, [0..100, 100..250, 250..300]);
}

#[test]
fn headerless_files_of_another_width_or_vocabulary_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.bin");
    std::fs::write(&path, [0; 7]).unwrap();
    let error = TokenStore::open_nanogpt(&path, TokenWidth::U16).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it has 7 bytes, which is not a multiple of 2"),
        "{error}"
    );
    std::fs::write(&path, [0; 6]).unwrap();
    let error = TokenStore::open_nanogpt(&path, TokenWidth::U32).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it has 6 bytes, which is not a multiple of 4"),
        "{error}"
    );

    let options = RawOptions {
        vocab_size: Some(50256),
        ..RawOptions::default()
    };
    let error = TokenStore::open_raw(fixture("nanogpt_u16.bin"), &options).unwrap_err();
    let first_end = matches!(
        error,
        Error::TokenOutOfVocabulary {
            position: 99,
            token: 50256,
            ..
        }
    );
    assert!(first_end, "{error}");

    let ours = store(dir.path(), 50, &[vec![1]]).path().to_owned();
    let error = TokenStore::open_nanogpt(&ours, TokenWidth::U16).unwrap_err();
    assert!(error.to_string().contains("TokenStore::open"), "{error}");
    let missing = TokenStore::open(dir.path().join("none")).unwrap_err();
    assert!(missing.to_string().starts_with("cannot read "), "{missing}");
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tokens");
    let mut writer = TokenStoreWriter::create(&path, StoreOptions::new(50)).unwrap();
    writer.push_document(&[1; 10_000], 1).unwrap();
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_killed_writer_leaves_no_store() {
    const CHILD: &str = "OVERDRIVE_TEST_KILLED_WRITER";
    if let Some(path) = std::env::var_os(CHILD) {
        let mut writer = TokenStoreWriter::create(path, StoreOptions::new(50)).unwrap();
        // More than the writer's buffer, so that some of it is on the disk.
        writer.push_document(&vec![1; 2 << 20], 1).unwrap();
        std::process::abort();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tokens");
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_writer_leaves_no_store"])
        .env(CHILD, &path)
        .output()
        .unwrap();
    assert!(!child.status.success());
    assert!(!path.exists());
    let leftovers: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(leftovers.len(), 1, "{leftovers:?}");
    // Not even the leftover passes for a store.
    assert!(matches!(
        TokenStore::open(&leftovers[0]),
        Err(Error::InvalidFile { .. })
    ));
}

#[test]
fn a_replaced_store_stays_readable_for_those_who_have_it_open() {
    let dir = tempfile::tempdir().unwrap();
    let old = store(dir.path(), 50, &[vec![1, 2, 3]]);
    let new = store(dir.path(), 50, &[vec![4; 100]]);
    assert_eq!(old.tokens(0..3).unwrap(), [1, 2, 3]);
    assert_eq!(new.tokens(97..100).unwrap(), [4, 4, 4]);
}

/// Returns a file as llm.c writes it: 256 numbers of 4 bytes, of which the third is the number of tokens.
fn llm_c(magic: u32, version: u32, count: u32, tokens: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 1024];
    for (at, number) in [magic, version, count].into_iter().enumerate() {
        file[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
    }
    file.extend(tokens);
    file
}

#[test]
fn files_of_tokens_are_opened_by_their_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.bin");
    let options = RawOptions {
        vocab_size: Some(50_257),
        end_of_document: Some(50_256),
        ..RawOptions::default()
    };
    let open = |bytes: Vec<u8>| {
        std::fs::write(&path, bytes).unwrap();
        TokenStore::open_any(&path, &options)
    };
    let tokens = [7_u16, 8, 50_256, 9, 50_256].map(u16::to_le_bytes).concat();
    let wide = [7_u32, 8, 50_256, 9, 50_256].map(u32::to_le_bytes).concat();
    for file in [
        tokens.clone(),
        llm_c(20_240_520, 1, 5, &tokens),
        llm_c(20_240_801, 7, 5, &wide),
    ] {
        let store = open(file).unwrap();
        assert_eq!(store.tokens(0..5).unwrap(), [7, 8, 50_256, 9, 50_256]);
        assert_eq!((store.len(), store.document_count()), (5, 2));
        assert_eq!(store.end_of_document(), Some(50_256));
        assert_eq!(store.largest_token(), Some(50_256));
        store.verify().unwrap();
    }
    let error = open(llm_c(20_240_520, 1, 4, &tokens))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("should have 1032 bytes, but it has 1034"),
        "{error}"
    );
    // Another format: its header is no text.
    let error = open(llm_c(20_240_520, 2, 5, &tokens))
        .unwrap_err()
        .to_string();
    assert!(error.contains("token 55432 at position 0"), "{error}");
    let error = open(llm_c(20_240_520, 1, 1, &50_257_u16.to_le_bytes()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("token 50257 at position 0"), "{error}");

    let ours = dir.path().join("ours.tokens");
    let mut writer = TokenStoreWriter::create(&ours, StoreOptions::new(9)).unwrap();
    writer.push_document(&[1, 8], 3).unwrap();
    writer.finish().unwrap();
    let store = TokenStore::open_any(&ours, &options).unwrap();
    assert_eq!(
        (store.vocab_size(), store.largest_token()),
        (Some(9), Some(8))
    );
    assert_eq!(store.end_of_document(), None);
}
