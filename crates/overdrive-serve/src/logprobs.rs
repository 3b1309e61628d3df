//! Log-probabilities in OpenAI's two forms.

use overdrive_generation::TokenLogprobs;
use serde_json::{Map, Value, json};

use crate::shared::Shared;

/// vLLM's value for a log-probability of minus infinity, which JSON cannot represent.
const LEAST: f32 = -9999.0;

/// Returns the text and the bytes of a token. In the text, an incomplete character is U+FFFD.
fn token(shared: &Shared, id: i64) -> (String, Vec<u8>) {
    let known = usize::try_from(id).ok();
    if let Some(Some(bytes)) = known.and_then(|id| shared.token_bytes.get(id)) {
        return (String::from_utf8_lossy(bytes).into_owned(), bytes.clone());
    }
    let tokenizer = &shared.model.tokenizer;
    let number = u32::try_from(id).unwrap_or(u32::MAX);
    let text = tokenizer.id_to_token(number).unwrap_or_default();
    let bytes = text.clone().into_bytes();
    (text, bytes)
}

fn value(logprob: f32) -> Value {
    // A NaN becomes null.
    json!(if logprob < LEAST { LEAST } else { logprob })
}

/// Returns the entry of a token in the `logprobs.content` of a chat.
pub(crate) fn chat_entry(shared: &Shared, id: i64, logprobs: &TokenLogprobs) -> Value {
    let entry = |id: i64, logprob: f32| {
        let (text, bytes) = token(shared, id);
        json!({"token": text, "logprob": value(logprob), "bytes": bytes})
    };
    let mut own = entry(id, logprobs.logprob);
    let top = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob));
    own["top_logprobs"] = top.collect();
    own
}

/// Returns a token as a key of `top_logprobs`. A token that is part of a character is written as OpenAI does, with an
/// escape for each of its bytes, so that different parts have different keys.
fn key(bytes: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.to_owned();
    }
    let escaped = bytes.iter().map(|byte| match byte {
        b' '..=b'~' => char::from(*byte).to_string(),
        byte => format!("\\x{byte:02x}"),
    });
    format!("bytes:{}", escaped.collect::<String>())
}

/// Returns the number of characters that begin in the bytes.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| (**byte & 0xc0) != 0x80).count()
}

/// Returns the `logprobs` of a completion for some tokens; `offset`, the number of characters before them, is advanced.
/// The first token of a prompt has no log-probability, which is `null` as in OpenAI's and vLLM's answers.
pub(crate) fn completion_object<'a>(
    shared: &Shared,
    tokens: impl Iterator<Item = (i64, Option<&'a TokenLogprobs>)>,
    offset: &mut usize,
) -> Value {
    let (mut texts, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for (id, logprobs) in tokens {
        let (_, bytes) = token(shared, id);
        offsets.push(*offset);
        *offset += characters(&bytes);
        texts.push(key(&bytes));
        let Some(logprobs) = logprobs else {
            values.push(Value::Null);
            tops.push(Value::Null);
            continue;
        };
        let top = logprobs.top.iter().copied();
        // The chosen token is always among them; of several tokens with the same bytes, the likeliest gives the value.
        let mut object = Map::new();
        for (id, logprob) in top.chain([(id, logprobs.logprob)]) {
            object
                .entry(key(&token(shared, id).1))
                .or_insert_with(|| value(logprob));
        }
        values.push(value(logprobs.logprob));
        tops.push(Value::Object(object));
    }
    json!({"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
}

#[cfg(test)]
mod tests {
    use super::{characters, key};

    #[test]
    fn parts_of_characters_have_keys_with_their_bytes() {
        assert_eq!(key("é a".as_bytes()), "é a");
        assert_eq!(key(b"\xf0\x9f"), "bytes:\\xf0\\x9f");
        assert_eq!(key(b"\x98"), "bytes:\\x98");
        assert_eq!(key(b" a\xe2\n"), "bytes: a\\xe2\\x0a");
        assert_eq!(key(b""), "");
    }

    #[test]
    fn a_character_counts_where_it_begins() {
        let crab = "a🦀b".as_bytes();
        let counts: Vec<usize> = crab.chunks(2).map(characters).collect();
        assert_eq!(counts, [2, 0, 1]);
    }
}
