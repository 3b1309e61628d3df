//! The training of WordPiece tokenizers.

use std::collections::BTreeSet;
use std::path::Path;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::bert::BertProcessing;

use tokenizers::{AddedToken, PreTokenizer, Tokenizer, Trainer, TruncationParams};

use crate::{Error, Result, TokenizedExample};
use overdrive_core::{check_option, files};

/// The special tokens of BERT, whose ids are 0 to 4.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Trains a tokenizer like BERT's on texts: lower case, words and punctuation apart, WordPiece (Schuster and Nakajima
/// 2012), `[CLS]` before and `[SEP]` after each sequence. The ids of `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]`
/// are 0 to 4. The vocabulary has at most `vocab_size` tokens, including all letters of the texts: each at the
/// beginning of a word and, where it occurs inside one, as `##letter`.
///
/// ```
/// use overdrive_datasets::train_word_piece;
/// let tokenizer = train_word_piece(&["A cat and a hat.", "The cat sat."], 60)?;
/// let ids = tokenizer.encode("the hat", true).unwrap().get_ids().to_vec();
/// assert_eq!((ids[0], ids[ids.len() - 1]), (2, 3));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// Returns an error if `vocab_size` is below 6 or has no room for the special tokens and the letters of the texts, or
/// the tokenizers crate fails.
pub fn train_word_piece<S: AsRef<str> + Sync>(texts: &[S], vocab_size: usize) -> Result<Tokenizer> {
    let special = SPECIAL.map(|token| AddedToken::from(token, true));
    let normalizer = BertNormalizer::default();
    let words = |text: &str| -> tokenizers::Result<Vec<String>> {
        let mut text = tokenizers::NormalizedString::from(text);
        tokenizers::Normalizer::normalize(&normalizer, &mut text)?;
        let mut text = tokenizers::PreTokenizedString::from(text);
        BertPreTokenizer.pre_tokenize(&mut text)?;
        let parts = text.get_splits(
            tokenizers::OffsetReferential::Original,
            tokenizers::OffsetType::Byte,
        );
        Ok(parts
            .into_iter()
            .map(|(word, ..)| word.to_owned())
            .collect())
    };
    // The trainer numbers the letters in the order of a hash map, which differs from run to run, and the merges
    // depend on the numbers. Tokens that are passed to the trainer keep their order.
    let (mut letters, mut inner) = (BTreeSet::new(), BTreeSet::new());
    for text in texts {
        let words = words(text.as_ref()).map_err(Error::tokenizer("read the texts"))?;
        letters.extend(words.iter().flat_map(|word| word.chars()));
        inner.extend(words.iter().flat_map(|word| word.chars().skip(1)));
    }
    // The trainer uses all of these tokens, regardless of the bound.
    let least = (SPECIAL.len() + letters.len() + inner.len()).max(SPECIAL.len() + 1);
    check_option(
        vocab_size >= least,
        "vocab_size",
        vocab_size,
        format!(
            "at least {least}: the special tokens, and the letters of the texts at the beginning and inside of words"
        ),
    )?;
    let inner = inner
        .into_iter()
        .map(|letter| AddedToken::from(format!("##{letter}"), false));
    let first: Vec<AddedToken> = special.iter().cloned().chain(inner).collect();
    let mut trainer = WordPieceTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .special_tokens(first)
        .show_progress(false)
        .build();
    trainer
        .feed(texts.iter(), words)
        .map_err(Error::tokenizer("read the texts"))?;
    let mut model = WordPiece::default();
    trainer
        .train(&mut model)
        .map_err(Error::tokenizer("train the tokenizer"))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_normalizer(Some(normalizer))
        .map_err(Error::tokenizer("set the normalizer"))?;
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    tokenizer.with_decoder(Some(WordPieceDecoder::default()));
    let (end, start) = (("[SEP]".to_owned(), 3), ("[CLS]".to_owned(), 2));
    tokenizer.with_post_processor(Some(BertProcessing::new(end, start)));
    tokenizer
        .add_special_tokens(special)
        .map_err(Error::tokenizer("add the special tokens"))?;
    Ok(tokenizer)
}

/// Writes `tokenizer.json` and `tokenizer_config.json` of a tokenizer with BERT's special tokens into `folder`, so that
/// transformers' `AutoTokenizer.from_pretrained(folder)` loads it. `context` becomes its `model_max_length`.
///
/// # Errors
/// Returns an error if the folder cannot be written.
pub fn save_word_piece(
    folder: impl AsRef<Path>,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<()> {
    let folder = folder.as_ref();
    crate::save_tokenizer(folder, tokenizer, None, context)?;
    let [pad, unknown, start, end, mask] = SPECIAL;
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": false,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token": pad,
        "unk_token": unknown,
        "cls_token": start,
        "sep_token": end,
        "mask_token": mask,
    });
    files::write(
        folder.join("tokenizer_config.json"),
        format!("{config:#}\n").as_bytes(),
    )?;
    Ok(())
}

/// Encodes texts with the special tokens that the tokenizer adds, at most `longest` tokens each: the end of a longer
/// text is cut, the special tokens stay.
///
/// # Errors
/// Returns an error if `longest` leaves no room for a token of the text, or the tokenizers crate fails.
pub fn encode_sequences<S: AsRef<str>>(
    tokenizer: &Tokenizer,
    texts: &[S],
    longest: usize,
) -> Result<Vec<TokenizedExample>> {
    let special = tokenizer
        .encode("", true)
        .map_err(Error::tokenizer("encode a text"))?
        .len();
    let expected = format!("more than {special}, the special tokens of each text");
    check_option(longest > special, "max_length", longest, expected)?;
    let mut tokenizer = tokenizer.clone();
    let truncation = TruncationParams {
        max_length: longest,
        ..TruncationParams::default()
    };
    tokenizer
        .with_truncation(Some(truncation))
        .map_err(Error::tokenizer("set the truncation"))?;
    texts
        .iter()
        .map(|text| {
            let encoding = tokenizer
                .encode(text.as_ref(), true)
                .map_err(Error::tokenizer("encode a text"))?;
            Ok(TokenizedExample {
                truncated: !encoding.get_overflowing().is_empty(),
                ..TokenizedExample::from(encoding.get_ids().to_vec())
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trained_tokenizer_is_berts_and_the_same_every_time() {
        let texts: Vec<String> = (0..40)
            .map(|i| format!("Number {i} is {}, isn't it?", i * 7))
            .collect();
        let trained = || train_word_piece(&texts, 80).unwrap();
        let tokenizer = trained();
        for (id, token) in (0..).zip(SPECIAL) {
            assert_eq!(tokenizer.token_to_id(token), Some(id));
        }
        assert!(tokenizer.get_vocab_size(true) <= 80);
        let encoding = tokenizer.encode("NUMBER 12, is it?", true).unwrap();
        let tokens = encoding.get_tokens();
        assert_eq!(
            (tokens[0].as_str(), tokens[tokens.len() - 1].as_str()),
            ("[CLS]", "[SEP]")
        );
        assert_eq!(tokens[1], "number");
        assert_eq!(
            tokenizer.decode(encoding.get_ids(), true).unwrap(),
            "number 12, is it?"
        );
        assert_eq!(tokenizer.get_vocab(true), trained().get_vocab(true));
        let rows = encode_sequences(&tokenizer, &["number 1", "number 1 is 2"], 4).unwrap();
        assert_eq!((rows[0].input_ids.len(), rows[0].truncated), (4, false));
        assert_eq!((rows[1].input_ids.len(), rows[1].truncated), (4, true));
        assert_eq!((rows[1].input_ids[0], rows[1].input_ids[3]), (2, 3));
        let error = encode_sequences(&tokenizer, &["a"], 2)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("`max_length` is 2; it must be more than 2"),
            "{error}"
        );
        let error = train_word_piece(&texts, 5).unwrap_err().to_string();
        assert!(error.starts_with("`vocab_size` is 5"), "{error}");
        // The letters a, b and c, and ##b and ##c.
        let error = train_word_piece(&["ab ac"], 9).unwrap_err().to_string();
        let least = "`vocab_size` is 9; it must be at least 10: ";
        assert!(error.starts_with(least), "{error}");
        let least = train_word_piece(&["ab ac"], 10).unwrap();
        assert_eq!(least.get_vocab_size(true), 10);
    }
}
