//! A fast encoder for byte-level BPE.
//!
//! `tokenizers` tracks the origin of each byte of a text, which training does not need. For the most common
//! kind of tokenizer, GPT-2's byte-level BPE (the kind that [`crate::train_bpe`] makes), this encoder takes the
//! words directly out of the text and caches the tokens of each word. A new word is passed to the BPE model of
//! `tokenizers`, so the ids are the same; property tests compare them.

use std::collections::HashMap;
use std::sync::Mutex;

use tokenizers::models::bpe::BPE;
use tokenizers::utils::SysRegex;
use tokenizers::{Model, ModelWrapper, PreTokenizerWrapper, Tokenizer};

use crate::{Error, Result};

/// The pattern by which GPT-2 splits text into words.
const PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The longest word that is cached, in bytes: longer ones are rare.
const MAX_CACHED_WORD: usize = 64;
/// The number of words that each thread caches: a few megabytes.
const MAX_CACHED_WORDS: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Space,
    Other,
}

fn class_of(ascii: u8) -> Class {
    match ascii {
        b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
        b'0'..=b'9' => Class::Number,
        b' ' | 0x09..=0x0D => Class::Space,
        _ => Class::Other,
    }
}

/// A splitter of text into words, equal to GPT-2's pattern.
///
/// ASCII is scanned directly; where a character beyond ASCII could belong to the word, the pattern itself
/// decides. No alternative of the pattern looks behind, so matching may start at the end of any word.
#[derive(Debug)]
pub(crate) struct Words {
    pattern: SysRegex,
}

impl Words {
    pub(crate) fn new() -> Result<Self> {
        let pattern =
            SysRegex::new(PATTERN).map_err(Error::tokenizer("compile GPT-2's pattern"))?;
        Ok(Self { pattern })
    }

    /// Passes each word to `take`, in order; the words together are the text.
    pub(crate) fn for_each<E>(
        &self,
        text: &str,
        mut take: impl FnMut(&str) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let bytes = text.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            if let Some(end) = ascii_word_end(bytes, start) {
                take(&text[start..end])?;
                start = end;
                continue;
            }
            let from = start;
            for (begin, end) in self.pattern.find_iter(&text[from..]) {
                debug_assert_eq!(from + begin, start, "the pattern leaves nothing out");
                take(&text[start..from + end])?;
                start = from + end;
                // The fast scan is resumed as soon as ASCII follows.
                if bytes.get(start).is_some_and(u8::is_ascii) {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Returns the end of the word that starts at `start`; `None` if it depends on characters beyond ASCII.
fn ascii_word_end(bytes: &[u8], start: usize) -> Option<usize> {
    let first = bytes[start];
    if !first.is_ascii() {
        return None;
    }
    // A contraction is a word even if letters follow, since its alternative is first in the pattern.
    if first == b'\'' {
        match (bytes.get(start + 1), bytes.get(start + 2)) {
            (Some(b's' | b't' | b'm' | b'd'), _) => return Some(start + 2),
            (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => return Some(start + 3),
            _ => {}
        }
    }
    // A single space belongs to the word after it.
    let mut at = start;
    let mut class = class_of(first);
    if first == b' ' {
        match bytes.get(start + 1) {
            Some(next) if !next.is_ascii() => return None,
            Some(&next) if class_of(next) != Class::Space => {
                at += 1;
                class = class_of(next);
            }
            _ => {}
        }
    }
    let run = bytes[at..]
        .iter()
        .position(|&byte| !byte.is_ascii() || class_of(byte) != class);
    let end = run.map_or(bytes.len(), |run| at + run);
    match bytes.get(end) {
        // A run that a character beyond ASCII follows may continue with it: the pattern decides.
        Some(next) if !next.is_ascii() => None,
        // Of several white-space characters before a word, the last one belongs to the word: `\s+(?!\S)`.
        Some(_) if class == Class::Space && end - at > 1 => Some(end - 1),
        _ => Some(end),
    }
}

/// The character that stands for each byte in the vocabulary: itself where it is printable in
/// Latin-1, else one from U+0100 on.
#[derive(Debug, Clone)]
pub(crate) struct ByteAlphabet([char; 256]);

impl ByteAlphabet {
    pub(crate) fn new() -> Self {
        let mut next = 0x100;
        let mut chars = ['\0'; 256];
        for (byte, slot) in (0_u8..=255).zip(&mut chars) {
            *slot = match byte {
                b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
                _ => {
                    next += 1;
                    // 68 bytes are not printable: U+0100 to U+0143, all of them characters.
                    char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
            };
        }
        Self(chars)
    }

    /// Writes the word into `out` with the vocabulary's characters.
    pub(crate) fn map(&self, word: &str, out: &mut String) {
        out.clear();
        out.extend(word.bytes().map(|byte| self.0[usize::from(byte)]));
    }
}

/// A cache of words and their tokens.
#[derive(Debug, Default)]
struct WordCache {
    /// The ranges of the words' tokens in `ids`.
    ranges: HashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
}

/// An encoder that gives the ids of a GPT-2 tokenizer.
pub(crate) struct ByteLevelEncoder {
    words: Words,
    alphabet: ByteAlphabet,
    model: BPE,
    /// The caches that no thread uses at the moment.
    caches: Mutex<Vec<WordCache>>,
}

impl ByteLevelEncoder {
    /// Returns the encoder for a tokenizer; `None` for a tokenizer of another kind.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Ok(None);
        };
        let Some(PreTokenizerWrapper::ByteLevel(pre_tokenizer)) = tokenizer.get_pre_tokenizer()
        else {
            return Ok(None);
        };
        let plain = model.dropout.is_none_or(|dropout| dropout == 0.0)
            && tokenizer.get_normalizer().is_none()
            && pre_tokenizer.use_regex
            && !pre_tokenizer.add_prefix_space
            // Special tokens in the text are ordinary text here (see `Encoder`); other added tokens would have
            // to be searched for.
            && tokenizer.get_added_tokens_decoder().values().all(|token| token.special);
        if !plain {
            return Ok(None);
        }
        let (words, alphabet) = (Words::new()?, ByteAlphabet::new());
        Ok(Some(Self {
            words,
            alphabet,
            model: model.clone(),
            caches: Mutex::default(),
        }))
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        // The entries of a cache are valid even if a thread panicked, so a poisoned lock is harmless.
        let lock = || {
            self.caches
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
        };
        // A thread takes a cache out of the list and puts it back, so that the lock is never held while encoding.
        let mut cache = lock().pop().unwrap_or_default();
        // Code has about three bytes per token, prose more.
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut mapped = String::new();
        let result = self.words.for_each(text, |word| {
            if let Some(&(from, to)) = cache.ranges.get(word) {
                ids.extend_from_slice(&cache.ids[from as usize..to as usize]);
                return Ok(());
            }
            self.alphabet.map(word, &mut mapped);
            let from = ids.len();
            ids.extend(self.model.tokenize(&mapped)?.iter().map(|token| token.id));
            if word.len() <= MAX_CACHED_WORD && cache.ranges.len() < MAX_CACHED_WORDS {
                // At most 2^16 words of 64 bytes, each a token: 2^22 ids.
                let start = cache.ids.len() as u32;
                cache.ids.extend_from_slice(&ids[from..]);
                cache
                    .ranges
                    .insert(word.into(), (start, cache.ids.len() as u32));
            }
            Ok(())
        });
        lock().push(cache);
        result.map_err(Error::tokenizer("tokenize a document"))?;
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    fn words(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        let take = |word: &str| {
            found.push(word.to_owned());
            Ok::<(), ()>(())
        };
        Words::new().unwrap().for_each(text, take).unwrap();
        found
    }

    fn words_of_the_pattern(text: &str) -> Vec<String> {
        let pattern = SysRegex::new(PATTERN).unwrap();
        pattern
            .find_iter(text)
            .map(|(start, end)| text[start..end].to_owned())
            .collect()
    }

    #[test]
    fn words_of_any_three_ascii_characters_are_those_of_the_pattern() {
        let pattern = SysRegex::new(PATTERN).unwrap();
        let scanner = Words::new().unwrap();
        // One character of each class, and all characters that the pattern names.
        let alphabet = b" \t\n\r\x0b\x0c\x1c\x00\x7fstmdrvelaZ09'\"_-{.";
        for text in (0..alphabet.len().pow(4)).map(|i| {
            let digit = |place: u32| alphabet[i / alphabet.len().pow(place) % alphabet.len()];
            String::from_utf8([digit(0), digit(1), digit(2), digit(3)].to_vec()).unwrap()
        }) {
            let mut ends = Vec::new();
            let mut end = 0;
            let take = |word: &str| {
                end += word.len();
                ends.push(end);
                Ok::<(), ()>(())
            };
            scanner.for_each(&text, take).unwrap();
            assert!(
                pattern.find_iter(&text).map(|(_, end)| end).eq(ends),
                "{text:?}"
            );
        }
    }

    #[test]
    fn every_single_ascii_character_is_classified_as_the_pattern_does() {
        for byte in 0..128_u8 {
            let c = char::from(byte);
            for text in [
                format!("a{c}a"),
                format!("{c}{c}1"),
                format!(" {c} "),
                format!("\n{c}'"),
            ] {
                assert_eq!(words(&text), words_of_the_pattern(&text), "{text:?}");
            }
        }
    }

    #[test]
    fn the_alphabet_is_that_of_tokenizers() {
        let ours: std::collections::HashSet<char> = ByteAlphabet::new().0.into_iter().collect();
        assert_eq!(ours, ByteLevel::alphabet().into_iter().collect());
        assert_eq!(ByteAlphabet::new().0[usize::from(b' ')], 'Ġ');
        assert_eq!(ByteAlphabet::new().0[usize::from(b'\n')], 'Ċ');
    }

    fn fixture() -> Tokenizer {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/tokenizer_fixture.json"
        );
        let mut tokenizer = crate::load_tokenizer(path).unwrap();
        tokenizer.set_encode_special_tokens(true);
        tokenizer
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn words_of_any_text_are_those_of_the_pattern(
            text in any::<String>(),
            mixed in "[ \\n\\t\\u{85}\\u{a0}\\u{2003}\\u{3000}a-cst'ü語٣²½_.!\\u{301}0-9🦀]{0,24}",
        ) {
            for text in [text, mixed] {
                prop_assert_eq!(words(&text), words_of_the_pattern(&text));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn ids_of_any_text_are_those_of_tokenizers(
            texts in prop::collection::vec("([ \\n'a-zé語0-9{}();=_<>|]|fn |let |<\\|endoftext\\|>){0,60}", 1..8),
        ) {
            let tokenizer = fixture();
            let encoder = ByteLevelEncoder::of(&tokenizer).unwrap().expect("a GPT-2 tokenizer");
            for text in texts {
                let expected = tokenizer.encode_fast(text.as_str(), false).unwrap();
                // Encoded twice: by the model, and from the cache.
                for _ in 0..2 {
                    prop_assert_eq!(&encoder.encode(&text).unwrap(), expected.get_ids());
                }
            }
        }
    }

    #[test]
    fn other_tokenizers_are_left_to_tokenizers() {
        let quick = |tokenizer: &Tokenizer| ByteLevelEncoder::of(tokenizer).unwrap().is_some();
        assert!(quick(&fixture()));
        let mut prefix = fixture();
        prefix.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(true)));
        assert!(!quick(&prefix));
        let mut own_pattern = fixture();
        own_pattern.with_pre_tokenizer(Some(
            ByteLevel::default()
                .add_prefix_space(false)
                .use_regex(false),
        ));
        assert!(!quick(&own_pattern));
        let mut normalized = fixture();
        normalized
            .with_normalizer(Some(tokenizers::normalizers::NFC))
            .unwrap();
        assert!(!quick(&normalized));
        let mut added = fixture();
        added
            .add_tokens([tokenizers::AddedToken::from("fn main", false)])
            .unwrap();
        assert!(!quick(&added));
        let mut no_pre_tokenizer = fixture();
        no_pre_tokenizer.with_pre_tokenizer(None::<ByteLevel>);
        assert!(!quick(&no_pre_tokenizer));
    }
}
