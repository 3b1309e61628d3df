//! Tokenized texts, and paragraphs and documents of text files.

use crate::common::{tokenizer, write_files};
use overdrive_datasets::{
    Dataset, DatasetExt, Error, JsonOptions, JsonRecords, RecordNumber, SampleBy, TextDataset,
    TextDatasetOptions, TextLines, TextOptions, Tokenizer, TruncationSide,
};
use proptest::prelude::*;
use tokenizers::processors::template::TemplateProcessing;

/// Returns a tokenizer that puts `<|endoftext|>` before and after a text, as BERT does with its tokens.
fn with_special_tokens() -> Tokenizer {
    let mut tokenizer = tokenizer();
    let id = tokenizer.token_to_id("<|endoftext|>").unwrap();
    let template = TemplateProcessing::builder()
        .try_single("<|endoftext|> $A <|endoftext|>")
        .unwrap()
        .special_tokens(vec![("<|endoftext|>", id)])
        .build()
        .unwrap();
    tokenizer.with_post_processor(Some(template));
    tokenizer
}

#[test]
fn texts_are_truncated_on_the_side_of_the_option_with_and_without_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[("a.txt", "fn main() { let x = 1; }\n<|endoftext|>\n\nlet")],
    );
    let path = dir.path().join("a.txt");
    let end = tokenizer().token_to_id("<|endoftext|>").unwrap();
    for tokenizer in [tokenizer(), with_special_tokens()] {
        for (truncation_side, add_special_tokens, max_length) in [
            (TruncationSide::Right, true, None),
            (TruncationSide::Right, true, Some(5)),
            (TruncationSide::Left, true, Some(5)),
            (TruncationSide::Left, false, Some(5)),
            (TruncationSide::Right, false, Some(5)),
        ] {
            let options = TextDatasetOptions {
                max_length,
                truncation_side,
                add_special_tokens,
            };
            let texts =
                TextDataset::open([&path], &TextOptions::default(), tokenizer.clone(), options)
                    .unwrap();
            let has_special = add_special_tokens
                && tokenizer
                    .get_post_processor()
                    .is_some_and(|post| tokenizers::PostProcessor::added_tokens(post, false) > 0);
            let mut plain = tokenizer.clone();
            plain.set_encode_special_tokens(true);
            for index in 0..4 {
                let text = texts.texts().get(index).unwrap();
                let mut expected = plain.encode_fast(text, false).unwrap().get_ids().to_vec();
                let room = max_length.map_or(usize::MAX, |max| max - 2 * usize::from(has_special));
                let cut = expected.len().saturating_sub(room);
                match truncation_side {
                    TruncationSide::Right => expected.truncate(expected.len() - cut),
                    TruncationSide::Left => drop(expected.drain(..cut)),
                }
                if has_special {
                    expected.insert(0, end);
                    expected.push(end);
                }
                let found = texts.get(index).unwrap();
                assert_eq!(found, expected, "{index} {options:?}");
                // What looks like a special token in a text is text.
                let inner = usize::from(has_special)..found.len() - usize::from(has_special);
                assert!(!found[inner].contains(&end));
            }
            let lengths = texts.lengths().unwrap();
            let expected: Vec<_> = (0..4)
                .map(|index| texts.get(index).unwrap().len() as u32)
                .collect();
            assert_eq!(lengths, expected);
        }
    }
}

#[test]
fn any_dataset_of_texts_can_be_tokenized_and_errors_are_returned() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[("a.jsonl", "{\"text\": \"let x\"}\n{\"text\": \n")],
    );
    let rows = JsonRecords::<serde_json::Value>::open(
        [dir.path().join("a.jsonl")],
        &JsonOptions::default(),
    )
    .unwrap();
    let texts = rows.map(|row| Ok(row["text"].as_str().unwrap_or_default().to_owned()));
    let tokens = TextDataset::new(texts, tokenizer(), TextDatasetOptions::default()).unwrap();
    assert_eq!(
        tokens
            .tokenizer()
            .decode(&tokens.get(0).unwrap(), true)
            .unwrap(),
        "let x"
    );
    assert!(matches!(
        tokens.get(1),
        Err(Error::InvalidRecord {
            number: RecordNumber::Record(1),
            ..
        })
    ));
    assert!(tokens.lengths().is_err());
}

#[test]
fn a_max_length_without_room_for_a_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a.txt", "a")]);
    let open = |max| {
        let lines = TextLines::open([dir.path()], &TextOptions::default()).unwrap();
        let options = TextDatasetOptions {
            max_length: Some(max),
            ..TextDatasetOptions::default()
        };
        TextDataset::new(lines, with_special_tokens(), options).map(drop)
    };
    assert!(matches!(
        open(2),
        Err(Error::Common(overdrive_core::Error::InvalidOption { option, .. })) if option == "max_length"
    ));
    assert!(open(3).is_ok());
}

fn records(text: &str, sample_by: SampleBy) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a.txt", text)]);
    let options = TextOptions {
        sample_by,
        ..TextOptions::default()
    };
    let lines = TextLines::open([dir.path()], &options).unwrap();
    (0..lines.len())
        .map(|index| lines.get(index).unwrap())
        .collect()
}

#[test]
fn documents_are_whole_files_and_empty_files_are_skipped() {
    let text = "\u{feff}a\n\n b\r\n";
    assert_eq!(records(text, SampleBy::Document), ["a\n\n b\r\n"]);
    assert!(records("", SampleBy::Document).is_empty());
    assert!(records("\u{feff}", SampleBy::Document).is_empty());
}

proptest! {
    #![proptest_config(crate::common::cases(256))]

    #[test]
    fn paragraphs_are_runs_of_lines_that_are_not_blank(text in "[ab \r\t\n]{0,60}") {
        let mut expected: Vec<String> = Vec::new();
        let mut in_paragraph = false;
        for line in text.split_inclusive('\n') {
            if line.trim_ascii().is_empty() {
                in_paragraph = false;
            } else if in_paragraph {
                expected.last_mut().unwrap().push_str(line);
            } else {
                expected.push(line.to_owned());
                in_paragraph = true;
            }
        }
        let expected: Vec<_> = expected.iter().map(|text| text.trim_ascii_end().to_owned()).collect();
        prop_assert_eq!(records(&text, SampleBy::Paragraph), expected);
    }
}
