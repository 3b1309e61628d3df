//! Building token stores, and their cache.

use crate::common::{corpus, text_folder, tokenizer, write_files};
use overdrive_datasets::{
    BuildOptions, Error, RecordNumber, TextFormat, TokenStore, TokenWidth, Tokenizer, build_tokens,
    build_tokens_to,
};

fn options() -> BuildOptions {
    BuildOptions {
        threads: Some(2),
        ..BuildOptions::default()
    }
}

fn decode(tokenizer: &Tokenizer, store: &TokenStore, document: usize) -> String {
    let tokens = store
        .tokens(store.document(document).unwrap().tokens)
        .unwrap();
    tokenizer.decode(&tokens, true).unwrap()
}

#[test]
fn every_document_comes_back_out_of_its_tokens() {
    let dir = text_folder();
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    let out = tempfile::tempdir().unwrap();
    let (store, report) =
        build_tokens_to(out.path().join("a.tokens"), &corpus, &tokenizer, &options()).unwrap();
    assert_eq!(store.document_count(), 60);
    assert_eq!(store.width(), TokenWidth::U16);
    assert_eq!(store.vocab_size(), Some(384));
    for (document, file) in corpus.files().iter().enumerate() {
        let text = std::fs::read_to_string(&file.path).unwrap();
        assert_eq!(decode(&tokenizer, &store, document), text);
        let of = store.document(document).unwrap();
        assert_eq!(of.text_bytes, Some(text.len() as u64));
        let last = store.tokens(of.tokens.end - 1..of.tokens.end).unwrap();
        assert_eq!(last, [tokenizer.token_to_id("<|endoftext|>").unwrap()]);
    }
    assert_eq!(report.documents, 60);
    assert_eq!(report.tokens, store.len() as u64);
    assert_eq!(report.text_bytes, corpus.total_bytes());
    store.verify().unwrap();
}

#[test]
fn the_tokens_do_not_depend_on_the_number_of_threads() {
    let dir = text_folder();
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    let out = tempfile::tempdir().unwrap();
    let bytes = |threads: usize| {
        let path = out.path().join(threads.to_string());
        // Small pieces, so that there are many to bring back into order.
        let options = BuildOptions {
            threads: Some(threads),
            max_chunk_bytes: 64,
            ..options()
        };
        build_tokens_to(&path, &corpus, &tokenizer, &options).unwrap();
        std::fs::read(path).unwrap()
    };
    let one = bytes(1);
    assert!(one == bytes(4) && one == bytes(3));
}

#[test]
fn chunks_give_the_tokens_of_the_whole() {
    // Lines that touch, blank lines, indented ones, and the two characters of Windows.
    for ends in [["\n", "\n\n"], ["\n    ", "\n\n\t"], ["\r\n", "\r\n\r\n  "]] {
        let dir = tempfile::tempdir().unwrap();
        let line = |i: usize| format!("line {i} of naïve   'text's 1 2 ({{;{}", ends[i % 2]);
        write_files(
            dir.path(),
            &[("a.txt", (0..400).map(line).collect::<String>())],
        );
        let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
        let out = tempfile::tempdir().unwrap();
        let tokens = |max_chunk_bytes: usize| {
            let path = out.path().join(max_chunk_bytes.to_string());
            let options = BuildOptions {
                max_chunk_bytes,
                ..options()
            };
            let (store, _) = build_tokens_to(&path, &corpus, &tokenizer, &options).unwrap();
            assert_eq!(store.document_count(), 1);
            store.tokens(0..store.len()).unwrap()
        };
        let whole = tokens(1 << 20);
        assert!(tokens(usize::MAX) == whole);
        for max_chunk_bytes in (60..160).step_by(3) {
            assert!(
                tokens(max_chunk_bytes) == whole,
                "pieces of {max_chunk_bytes}"
            );
        }
    }
}

#[test]
fn chunks_of_any_size_keep_every_character() {
    let dir = tempfile::tempdir().unwrap();
    let text = "naïve 日本語🦀 no line feed at all, \r\n  \n\t\n and some ".repeat(30);
    write_files(dir.path(), &[("a.txt", &text)]);
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    let out = tempfile::tempdir().unwrap();
    for max_chunk_bytes in [16, 17, 18, 19, 40, 100] {
        let path = out.path().join("a.tokens");
        let options = BuildOptions {
            max_chunk_bytes,
            ..options()
        };
        let (store, _) = build_tokens_to(&path, &corpus, &tokenizer, &options).unwrap();
        assert_eq!(decode(&tokenizer, &store, 0), text);
        assert_eq!(store.text_bytes(), Some(text.len() as u64));
    }
}

#[test]
fn a_byte_order_mark_is_not_part_of_the_text() {
    let text = "naïve words, \n and some ".repeat(20);
    let json = format!("{{\"text\": {}}}\n", serde_json::json!(text));
    let tokens = |mark: &str, max_chunk_bytes: usize| {
        let dir = tempfile::tempdir().unwrap();
        write_files(
            dir.path(),
            &[
                ("a.txt", format!("{mark}{text}")),
                // Only the first one of a file is a mark.
                ("b.jsonl", format!("{mark}{json}{json}")),
                ("c.txt", format!("{mark}x")),
            ],
        );
        let out = tempfile::tempdir().unwrap();
        let options = BuildOptions {
            max_chunk_bytes,
            ..options()
        };
        let path = out.path().join("tokens");
        let (store, report) =
            build_tokens_to(path, &corpus(dir.path()), &tokenizer(), &options).unwrap();
        assert_eq!(report.documents, 4);
        store.tokens(0..store.len()).unwrap()
    };
    for max_chunk_bytes in [16, 100, 1 << 20] {
        let plain = tokens("", max_chunk_bytes);
        assert_eq!(
            tokens("\u{feff}", max_chunk_bytes),
            plain,
            "{max_chunk_bytes}"
        );
    }
}

#[test]
fn special_tokens_in_the_text_are_text() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a.txt", "one<|endoftext|>two")]);
    let tokenizer = tokenizer();
    let end = tokenizer.token_to_id("<|endoftext|>").unwrap();
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("a.tokens");
    let (store, _) = build_tokens_to(&path, &corpus(dir.path()), &tokenizer, &options()).unwrap();
    let tokens = store.tokens(0..store.len()).unwrap();
    assert_eq!(tokens.iter().filter(|&&token| token == end).count(), 1);
    assert_eq!(decode(&tokenizer, &store, 0), "one<|endoftext|>two");
}

#[test]
fn documents_begin_and_end_with_the_tokens_of_the_options() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[
            (
                "a.txt",
                "a b c d e f g h i j k l m n o p q r s t u v w x y z",
            ),
            ("b.txt", "b"),
        ],
    );
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("a.tokens");
    let end = Some("<|endoftext|>".to_owned());
    let with = |begin_of_document, end_of_document| {
        let options = BuildOptions {
            begin_of_document,
            end_of_document,
            // Several pieces to a document.
            max_chunk_bytes: 16,
            ..options()
        };
        let (store, _) = build_tokens_to(&path, &corpus, &tokenizer, &options).unwrap();
        let tokens = store.tokens(0..store.len()).unwrap();
        let count = tokens.iter().filter(|&&token| token == 0).count();
        let documents: Vec<_> = store
            .documents()
            .map(|of| (tokens[of.tokens.start], tokens[of.tokens.end - 1]))
            .collect();
        (
            count,
            documents.iter().filter(|d| d.0 == 0).count(),
            documents.iter().filter(|d| d.1 == 0).count(),
        )
    };
    assert_eq!(with(None, end.clone()), (2, 0, 2));
    assert_eq!(with(end.clone(), None), (2, 2, 0));
    assert_eq!(with(end.clone(), end), (4, 2, 2));
    assert_eq!(with(None, None), (0, 0, 0));

    let options = BuildOptions {
        end_of_document: Some("</s>".to_owned()),
        ..options()
    };
    let error = build_tokens_to(&path, &corpus, &tokenizer, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`end_of_document` is \"</s>\"; it must be a token that the tokenizer has \
         (special tokens: <|endoftext|>), or None"
    );
}

#[test]
fn json_lines_are_one_document_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"id\": 1, \"text\": \"one\\nline\"}\n\n{\"text\": \"zwei ü\"}\r\n{\"text\": \"\"}\n{\"text\": \"last\"}";
    write_files(dir.path(), &[("a.jsonl", lines)]);
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    assert_eq!(corpus.files()[0].format, TextFormat::JsonLines);
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("a.tokens");
    let (store, report) = build_tokens_to(&path, &corpus, &tokenizer, &options()).unwrap();
    let texts: Vec<_> = (0..store.document_count())
        .map(|d| decode(&tokenizer, &store, d))
        .collect();
    assert_eq!(texts, ["one\nline", "zwei ü", "last"]);
    assert_eq!(report.text_bytes, "one\nlinezwei ülast".len() as u64);
}

#[test]
fn an_invalid_json_line_is_refused_with_its_position_and_leaves_no_store() {
    let tokenizer = tokenizer();
    for (second, expected) in [
        ("{\"text\": ", "EOF while parsing"),
        ("[1]", "expected a JSON object on each line"),
        ("{\"text\": 3}", "the field \"text\" is not a string"),
        (
            "{\"body\": \"b\", \"author\": 1}",
            "there is no field \"text\"; it has author, body",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write_files(
            dir.path(),
            &[("a.jsonl", format!("{{\"text\": \"a\"}}\n{second}\n"))],
        );
        let path = dir.path().join("out/a.tokens");
        let error =
            build_tokens_to(&path, &corpus(dir.path()), &tokenizer, &options()).unwrap_err();
        let message = error.to_string();
        assert!(
            matches!(
                error,
                Error::InvalidRecord {
                    number: RecordNumber::Line(2),
                    offset: 14,
                    ..
                }
            ),
            "{message}"
        );
        assert!(message.contains("a.jsonl, line 2 (byte 14): "), "{message}");
        assert!(message.contains(expected), "{message}");
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            0
        );
    }
}

#[test]
fn a_file_that_changes_after_it_was_listed_is_refused() {
    let dir = text_folder();
    let corpus = corpus(dir.path());
    let changed = &corpus.files()[7].path;
    std::fs::write(changed, "something else").unwrap();
    let path = dir.path().join("a.tokens");
    let error = build_tokens_to(&path, &corpus, &tokenizer(), &options()).unwrap_err();
    assert!(
        matches!(&error, Error::FileChanged { path } if path == changed),
        "{error}"
    );
    assert!(!path.exists());
}

#[test]
fn the_second_build_is_a_cache_hit_and_any_change_is_a_new_build() {
    let dir = text_folder();
    let cache = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let cached = |options: &BuildOptions| {
        let built = build_tokens(&corpus(dir.path()), &tokenizer, options, cache.path()).unwrap();
        (built.was_cached(), built.store.path().to_owned())
    };
    let (was_cached, first) = cached(&options());
    assert!(!was_cached);
    assert_eq!(cached(&options()), (true, first.clone()));
    // Neither the number of threads nor the place of the folder changes the tokens.
    assert_eq!(
        cached(&BuildOptions {
            threads: Some(1),
            ..options()
        }),
        (true, first.clone())
    );
    let moved = tempfile::tempdir().unwrap();
    std::fs::rename(dir.path(), moved.path().join("elsewhere")).unwrap();
    let elsewhere = moved.path().join("elsewhere");
    let built = build_tokens(&corpus(&elsewhere), &tokenizer, &options(), cache.path()).unwrap();
    assert!(built.was_cached());
    std::fs::rename(&elsewhere, dir.path()).unwrap();

    // An option, a content of the same length, a name, another file, another tokenizer.
    let changed = cached(&BuildOptions {
        end_of_document: None,
        ..options()
    });
    assert!(!changed.0 && changed.1 != first);
    let file = dir.path().join("0/00.rs");
    let content = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, content.replace("Module", "module")).unwrap();
    assert!(!cached(&options()).0);
    std::fs::write(&file, &content).unwrap();
    assert!(cached(&options()).0);
    std::fs::rename(&file, dir.path().join("0/000.rs")).unwrap();
    assert!(!cached(&options()).0);
    std::fs::rename(dir.path().join("0/000.rs"), &file).unwrap();
    write_files(dir.path(), &[("3/more.rs", "more")]);
    assert!(!cached(&options()).0);
    std::fs::remove_file(dir.path().join("3/more.rs")).unwrap();
    let mut other = tokenizer.clone();
    other
        .add_special_tokens([tokenizers::AddedToken::from("<extra>", true)])
        .unwrap();
    let built = build_tokens(&corpus(dir.path()), &other, &options(), cache.path()).unwrap();
    assert!(!built.was_cached());
    assert_eq!(built.store.vocab_size(), Some(385));
}

#[test]
fn a_damaged_store_in_the_cache_is_built_again() {
    let dir = text_folder();
    let cache = tempfile::tempdir().unwrap();
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    let build = || build_tokens(&corpus, &tokenizer, &options(), cache.path()).unwrap();
    let path = build().store.path().to_owned();
    let good = std::fs::read(&path).unwrap();
    for damaged in [&good[..good.len() - 1], &[0; 10], b""] {
        std::fs::write(&path, damaged).unwrap();
        assert!(!build().was_cached());
        assert!(std::fs::read(&path).unwrap() == good);
    }
    // Another store under the name of this one.
    let other = BuildOptions {
        end_of_document: None,
        ..options()
    };
    let other = build_tokens(&corpus, &tokenizer, &other, cache.path()).unwrap();
    std::fs::copy(other.store.path(), &path).unwrap();
    assert!(!build().was_cached());
    assert!(std::fs::read(&path).unwrap() == good);
}

#[test]
fn builds_at_the_same_time_agree_and_leave_no_temporary_file() {
    let dir = text_folder();
    let cache = tempfile::tempdir().unwrap();
    let (corpus, tokenizer) = (corpus(dir.path()), tokenizer());
    // What a killed build of another machine left.
    let stale = {
        let other = tempfile::tempdir().unwrap();
        let built = build_tokens(&corpus, &tokenizer, &options(), other.path()).unwrap();
        let name = built.store.path().file_name().unwrap().to_string_lossy();
        let unfinished = |random| {
            let name = format!(".{name}.overdrive-ffffffff-0123abcd-{random}.tmp");
            cache.path().join(name)
        };
        let stale = unfinished("x8s");
        std::fs::write(&stale, "half a store").unwrap();
        let file = std::fs::File::options().write(true).open(&stale).unwrap();
        let two_days = std::time::Duration::from_secs(2 * 24 * 60 * 60);
        file.set_modified(std::time::SystemTime::now() - two_days)
            .unwrap();
        // What another machine, which this one's lock does not exclude, is writing.
        std::fs::write(unfinished("x9s"), "half a store").unwrap();
        stale
    };
    let built: Vec<_> = std::thread::scope(|scope| {
        let build = || build_tokens(&corpus, &tokenizer, &options(), cache.path()).unwrap();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(build)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let all = built[0].store.tokens(0..built[0].store.len()).unwrap();
    assert!(
        built
            .iter()
            .all(|b| b.store.tokens(0..b.store.len()).unwrap() == all)
    );
    // The lock let one of them build; the others found it done.
    assert_eq!(built.iter().filter(|built| !built.was_cached()).count(), 1);
    assert!(!stale.exists());
    let names: Vec<_> = std::fs::read_dir(cache.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(
        names.len(),
        3,
        "a store, its lock and another machine's file: {names:?}"
    );
}
