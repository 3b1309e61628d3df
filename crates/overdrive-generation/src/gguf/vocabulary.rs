use std::collections::HashSet;

use overdrive_core::Error as Common;
use overdrive_quantization::{GgufArray, GgufFile, GgufValue};
use overdrive_transformer::end_of_text_tokens;

use crate::{Error, Result};

/// The type of a token, `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    /// Returns the number in a file.
    pub(super) fn id(self) -> i32 {
        match self {
            TokenType::Normal => 1,
            TokenType::Unknown => 2,
            TokenType::Control => 3,
            TokenType::UserDefined => 4,
            TokenType::Unused => 5,
            TokenType::Byte => 6,
        }
    }
}

/// The tokens of a GGUF file, and the keys that describe its tokenizer.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    file: &'a GgufFile,
    texts: Vec<String>,
    types: Vec<TokenType>,
    /// The ids of the tokens that end a text or a turn.
    ends: HashSet<i64>,
}

impl<'a> Vocabulary<'a> {
    pub(super) fn read(file: &'a GgufFile) -> Result<Vocabulary<'a>> {
        let key = "tokenizer.ggml.tokens";
        let tokens = file.value(key).and_then(GgufValue::as_strings);
        let tokens = tokens.ok_or_else(|| missing(file, key, "a list of strings"))?;
        // An id is a `u32`, as in llama.cpp.
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            let expected = "from one token to 2^32";
            return Err(
                Common::option(key, format!("a list of {}", tokens.len()), expected).into(),
            );
        }
        let mut texts = Vec::with_capacity(tokens.len());
        let mut seen = HashSet::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            // llama.cpp's name for a token without text; it does not occur in any text.
            let text = match token.is_empty() {
                true => format!("[EMPTY_{id}]"),
                false => token.clone(),
            };
            if !seen.insert(text.clone()) {
                let expected = "different tokens";
                return Err(Common::option(key, format!("twice {text:?}"), expected).into());
            }
            texts.push(text);
        }
        let types = types(file, texts.len())?;
        let ends = end_of_text_tokens(file)?.into_iter().collect();
        Ok(Vocabulary {
            file,
            texts,
            types,
            ends,
        })
    }

    /// Returns the kind of tokenizer.
    pub(super) fn model(&self) -> Result<&'a str> {
        let value = self.file.value(super::MODEL);
        let name = value.and_then(GgufValue::as_str);
        name.ok_or_else(|| missing(self.file, super::MODEL, super::KNOWN))
    }

    /// Returns the rule by which byte-level BPE finds words.
    pub(super) fn pre(&self) -> Option<&'a str> {
        self.file.value("tokenizer.ggml.pre")?.as_str()
    }

    /// Returns every token with its id and type.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (u32, &str, TokenType)> {
        let texts = self.texts.iter().map(String::as_str);
        (0..)
            .zip(texts.zip(&self.types))
            .map(|(id, (text, &kind))| (id, text, kind))
    }

    pub(super) fn text(&self, id: u32) -> &str {
        &self.texts[id as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Returns `true` if the token ends a text or a turn.
    pub(super) fn ends_text(&self, id: u32) -> bool {
        self.ends.contains(&i64::from(id))
    }

    /// Returns `true` if the vocabulary has tokens of single bytes.
    pub(super) fn has_bytes(&self) -> bool {
        self.types.contains(&TokenType::Byte)
    }

    /// Returns the scores, one for each token; `None` if the file has none.
    pub(super) fn scores(&self) -> Result<Option<Vec<f32>>> {
        let key = "tokenizer.ggml.scores";
        let Some(value) = self.file.value(key) else {
            return Ok(None);
        };
        let scores = match value {
            GgufValue::Array(GgufArray::F32(scores)) => Some(scores.clone()),
            value => value
                .as_i64s()
                .map(|scores| scores.iter().map(|&score| score as f32).collect()),
        };
        let scores =
            scores.filter(|all| all.len() >= self.len() && all.iter().all(|s| !s.is_nan()));
        let expected = format!(
            "a list of at least {} numbers, one for each token",
            self.len()
        );
        let scores = scores.ok_or_else(|| missing(self.file, key, &expected))?;
        Ok(Some(scores))
    }

    /// Returns the merges, the first one first; `None` if the file has none.
    pub(super) fn merges(&self) -> Result<Option<Vec<(String, String)>>> {
        let key = "tokenizer.ggml.merges";
        let Some(value) = self.file.value(key) else {
            return Ok(None);
        };
        let wrong = |found: &str| {
            let expected = "a list of two tokens with a space between them";
            Common::option(key, format!("{found:?}"), expected)
        };
        let merges = value.as_strings().ok_or_else(|| wrong("another type"))?;
        let pairs = merges.iter().map(|merge| {
            // The first token may itself begin with a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = merge[first..].find(' ').map(|at| at + first);
            let (left, right) = merge.split_at(space.ok_or_else(|| wrong(merge))?);
            Ok((left.to_owned(), right[1..].to_owned()))
        });
        pairs.collect::<Result<_>>().map(Some)
    }

    /// Returns the bytes of an array of bytes.
    pub(super) fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let key = format!("tokenizer.ggml.{name}");
        match self.file.value(&key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::U8(bytes))) => Ok(Some(bytes.clone())),
            Some(GgufValue::Array(GgufArray::I8(bytes))) => Ok(Some(
                bytes.iter().map(|byte| byte.cast_unsigned()).collect(),
            )),
            Some(_) => Err(missing(self.file, &key, "a list of bytes")),
        }
    }

    /// Returns a boolean, or `default` if the file does not have the key.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        let key = format!("tokenizer.ggml.{name}");
        match self.file.value(&key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| missing(self.file, &key, "true or false")),
        }
    }

    /// Returns the id of a special token, by default llama.cpp's for the kind of tokenizer; `None` if there is no
    /// such token.
    pub(super) fn special(&self, name: &str) -> Result<Option<u32>> {
        special(self.file, name, self.len())
    }

    /// Returns `true` if white space after a special token belongs to the token. GGUF has no key for this
    /// property; llama.cpp infers it from the name of the model.
    pub(super) fn strips_after_special_tokens(&self) -> bool {
        let name = self.file.value("general.name").and_then(GgufValue::as_str);
        let name = name.unwrap_or_default().to_lowercase();
        name.contains("phi-3") || name.contains("phi3")
    }

    pub(super) fn unknown(&self, key: &'static str, found: &str, known: &'static str) -> Error {
        Error::UnknownTokenizer {
            path: self.file.path().to_owned(),
            key,
            found: found.to_owned(),
            known,
        }
    }

    /// Returns the error for a vocabulary that the tokenizers crate refuses.
    pub(super) fn refused(&self, error: impl std::fmt::Display) -> Error {
        Common::parse("GGUF", self.file.path())(format!("its tokenizer is inconsistent: {error}"))
            .into()
    }
}

/// Returns the id of the special token that a file names as `name`, or llama.cpp's default for its kind of tokenizer.
pub(crate) fn special(file: &GgufFile, name: &str, tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}");
    let model = file.value(super::MODEL).and_then(GgufValue::as_str);
    let id = match file.value(&key) {
        Some(value) => value
            .as_i64()
            .ok_or_else(|| missing(file, &key, "a token id"))?,
        None => match (model.unwrap_or_default(), name) {
            ("llama" | "bert", "padding_token_id") if model != Some("bert") => return Ok(None),
            ("llama", "unknown_token_id") | ("bert" | "t5", "padding_token_id") => 0,
            ("llama", "bos_token_id") | ("t5", "eos_token_id") => 1,
            ("llama", "eos_token_id") | ("t5", "unknown_token_id") => 2,
            ("bert", "unknown_token_id") => 100,
            ("bert", "bos_token_id") => 101,
            ("bert", "seperator_token_id") => 102,
            ("bert", "mask_token_id") => 103,
            _ => return Ok(None),
        },
    };
    // Some converters write -1, or its bits as a u32, for a token that does not exist.
    Ok(u32::try_from(id).ok().filter(|&id| (id as usize) < tokens))
}

fn types(file: &GgufFile, tokens: usize) -> Result<Vec<TokenType>> {
    let key = "tokenizer.ggml.token_type";
    let Some(value) = file.value(key) else {
        return Ok(vec![TokenType::Normal; tokens]);
    };
    let types = value.as_i64s().filter(|types| types.len() >= tokens);
    let expected = format!("a list of at least {tokens} integers, one for each token");
    let types = types.ok_or_else(|| missing(file, key, &expected))?;
    let of = |&number: &i64| match number {
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        4 => TokenType::UserDefined,
        5 => TokenType::Unused,
        6 => TokenType::Byte,
        _ => TokenType::Normal,
    };
    Ok(types.iter().take(tokens).map(of).collect())
}

/// Returns the error that a key is missing or of another form. The value itself may have a hundred thousand entries.
fn missing(file: &GgufFile, key: &str, expected: &str) -> Error {
    let found = match file.value(key) {
        None => "missing".to_owned(),
        Some(GgufValue::Array(_)) => "another list".to_owned(),
        Some(value) => format!("{value:?}"),
    };
    Common::option(key.to_owned(), found, expected.to_owned()).into()
}
