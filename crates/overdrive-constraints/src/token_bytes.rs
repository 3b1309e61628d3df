//! The bytes of every token.

use overdrive_generation::{Error, Result};
use tokenizers::Tokenizer;

/// The encoding of bytes in the tokens of a tokenizer.
struct Decoding {
    /// If `true`, every character stands for a byte (GPT-2's table).
    byte_level: bool,
    /// If `true`, `<0xNN>` stands for a byte.
    byte_fallback: bool,
    /// The string that replaces a space.
    space: Option<String>,
}

/// Returns the bytes of each id in `0..vocabulary`; `None` for special tokens, which have no text, and for ids
/// that the tokenizer does not have.
///
/// # Errors
/// [`Error::Constraint`] if the tokenizer's decoder gives no bytes to single tokens.
pub fn token_bytes(tokenizer: &Tokenizer, vocabulary: usize) -> Result<Vec<Option<Vec<u8>>>> {
    let decoding = decoding(tokenizer)?;
    let added = tokenizer.get_added_tokens_decoder();
    let table = byte_table();
    let bytes_of = |id: u32| -> Option<Vec<u8>> {
        if let Some(token) = added.get(&id) {
            // Added tokens are stored as plain text, not in the byte alphabet of the others.
            return (!token.special).then(|| token.content.clone().into_bytes());
        }
        let token = tokenizer.id_to_token(id)?;
        if decoding.byte_level {
            return token.chars().map(|c| table.get(&c).copied()).collect();
        }
        if decoding.byte_fallback
            && let Some(hex) = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'))
            && let Ok(byte) = u8::from_str_radix(hex, 16)
        {
            return Some(vec![byte]);
        }
        Some(match &decoding.space {
            Some(space) => token.replace(space.as_str(), " ").into_bytes(),
            None => token.into_bytes(),
        })
    };
    Ok((0..vocabulary)
        .map(|id| u32::try_from(id).ok().and_then(bytes_of))
        .collect())
}

fn decoding(tokenizer: &Tokenizer) -> Result<Decoding> {
    let mut decoding = Decoding {
        byte_level: false,
        byte_fallback: false,
        space: None,
    };
    let Some(decoder) = tokenizer.get_decoder() else {
        return Ok(decoding);
    };
    let decoder = serde_json::to_value(decoder).map_err(|e| Error::Constraint(e.to_string()))?;
    let steps = match decoder["decoders"].as_array() {
        Some(steps) => steps.clone(),
        None => vec![decoder],
    };
    for step in &steps {
        match step["type"].as_str() {
            Some("ByteLevel") => decoding.byte_level = true,
            Some("ByteFallback") => decoding.byte_fallback = true,
            Some("Metaspace") => {
                decoding.space = step["replacement"].as_str().map(str::to_owned);
            }
            Some("Replace") if step["content"] == " " => {
                decoding.space = step["pattern"]["String"].as_str().map(str::to_owned);
            }
            // These decoders join tokens and strip the first space of a text, but do not change a token's bytes.
            Some("Fuse" | "Strip") => {}
            other => {
                return Err(Error::Constraint(format!(
                    "the tokenizer has the decoder {other:?}, whose tokens have no bytes of their own; use a \
                     byte-level or SentencePiece tokenizer"
                )));
            }
        }
    }
    Ok(decoding)
}

/// Returns GPT-2's characters for bytes: a printable one is itself, the others follow from U+0100 on.
fn byte_table() -> std::collections::HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    (0..=255u8)
        .filter_map(|byte| {
            if printable(byte) {
                return Some((char::from(byte), byte));
            }
            next += 1;
            char::from_u32(next - 1).map(|c| (c, byte))
        })
        .collect()
}
