//! The tokenizer, the chat template and the settings of a GGUF file, read and written.

mod byte_level;
mod charsmap;
mod pre_tokenizers;
mod sentencepiece;
mod unigram;
mod vocabulary;
mod word_piece;
mod write;

use overdrive_quantization::GgufFile;
use serde_json::{Value, json};
use tokenizers::{AddedToken, Tokenizer};

pub(crate) use self::vocabulary::special;
use self::vocabulary::{TokenType, Vocabulary};
pub use self::write::export_gguf;
pub(crate) use self::write::{of_folder, of_gguf};
use crate::{Error, Result};

/// The key that names the kind of tokenizer.
const MODEL: &str = "tokenizer.ggml.model";

/// The values of `tokenizer.ggml.model` that are read, for messages.
const KNOWN: &str = "gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (SentencePiece unigram), bert (WordPiece) and gemma4";

/// Builds the tokenizer that the metadata of a GGUF file describes (`tokenizer.ggml.*`). Its ids equal those of
/// llama.cpp, including control tokens within the text.
///
/// | `tokenizer.ggml.model` | tokenizer |
/// |---|---|
/// | `gpt2` | byte-level BPE, with the rule for words that `tokenizer.ggml.pre` names |
/// | `llama` | SentencePiece BPE by scores, with bytes for unknown characters |
/// | `gemma4` | SentencePiece BPE by merges, with bytes for unknown characters |
/// | `t5` | SentencePiece unigram, with the file's normalization of characters |
/// | `bert` | WordPiece |
///
/// Control and unknown tokens become special tokens, user-defined ones added tokens; `add_bos_token`,
/// `add_eos_token`, `add_space_prefix` and `remove_extra_whitespaces` are followed, with llama.cpp's defaults.
///
/// # Errors
/// [`Error::UnknownTokenizer`] for an unknown kind of tokenizer or word rule, and [`Error::Common`] for missing or
/// invalid metadata.
pub fn tokenizer_from_gguf(file: &GgufFile) -> Result<Tokenizer> {
    let vocabulary = Vocabulary::read(file)?;
    let (mut tokenizer, ends) = match vocabulary.model()? {
        "gpt2" => byte_level::tokenizer(&vocabulary)?,
        "llama" => sentencepiece::by_scores(&vocabulary)?,
        "gemma4" => sentencepiece::by_merges(&vocabulary)?,
        "t5" => unigram::tokenizer(&vocabulary)?,
        "bert" => word_piece::tokenizer(&vocabulary)?,
        other => return Err(vocabulary.unknown(MODEL, other, KNOWN)),
    };
    add_tokens(&mut tokenizer, &vocabulary)?;
    add_ends(&mut tokenizer, &vocabulary, ends)?;
    Ok(tokenizer)
}

/// The tokens around a text that is encoded with special tokens.
#[derive(Debug, Default, Clone, Copy)]
struct Ends {
    before: Option<u32>,
    after: Option<u32>,
}

impl Ends {
    /// Returns the tokens that the file specifies, or else llama.cpp's default for the kind of tokenizer.
    fn read(vocabulary: &Vocabulary<'_>, bos: bool, eos: bool) -> Result<Ends> {
        let add_bos = vocabulary.flag("add_bos_token", bos)?;
        let add_eos = vocabulary.flag("add_eos_token", eos)?;
        Ok(Ends {
            before: vocabulary.special("bos_token_id")?.filter(|_| add_bos),
            after: vocabulary.special("eos_token_id")?.filter(|_| add_eos),
        })
    }
}

/// Adds the tokens that are matched in a text before it is split.
fn add_tokens(tokenizer: &mut Tokenizer, vocabulary: &Vocabulary<'_>) -> Result<()> {
    let strips = vocabulary.strips_after_special_tokens();
    let added = vocabulary.tokens().filter_map(|(id, text, kind)| {
        let special = match kind {
            TokenType::Control | TokenType::Unknown => true,
            TokenType::UserDefined => false,
            // Converters mark some tokens that end a turn as normal ones.
            _ if vocabulary.ends_text(id) => true,
            _ => return None,
        };
        let strips = strips && special && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
        let token = AddedToken::from(text, special).normalized(false);
        Some(token.rstrip(strips))
    });
    let added: Vec<AddedToken> = added.collect();
    tokenizer.add_tokens(added).map_err(Error::Tokenizer)?;
    Ok(())
}

/// Sets the post-processor that adds the tokens around a text.
fn add_ends(tokenizer: &mut Tokenizer, vocabulary: &Vocabulary<'_>, ends: Ends) -> Result<()> {
    let mut tokens = serde_json::Map::new();
    let mut piece = |id: u32| {
        let text = vocabulary.text(id);
        let token = json!({"id": text, "ids": [id], "tokens": [text]});
        tokens.insert(text.to_owned(), token);
        json!({"SpecialToken": {"id": text, "type_id": 0}})
    };
    let (before, after) = (ends.before.map(&mut piece), ends.after.map(&mut piece));
    if before.is_none() && after.is_none() {
        return Ok(());
    }
    let around = |sequences: &[&str]| -> Vec<Value> {
        let sequences = sequences.iter();
        let sequences = sequences.map(|id| json!({"Sequence": {"id": id, "type_id": 0}}));
        before
            .iter()
            .cloned()
            .chain(sequences)
            .chain(after.clone())
            .collect()
    };
    let (single, pair) = (around(&["A"]), around(&["A", "B"]));
    let processor: tokenizers::PostProcessorWrapper = part(json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens,
    }))?;
    tokenizer.with_post_processor(Some(processor));
    Ok(())
}

/// Reads a part of a tokenizer from the form in which `tokenizer.json` holds it.
fn part<T: serde::de::DeserializeOwned>(json: Value) -> Result<T> {
    serde_json::from_value(json).map_err(|error| Error::Tokenizer(error.into()))
}

/// Sets the pre-tokenizer.
fn set_pre_tokenizer(tokenizer: &mut Tokenizer, steps: Vec<Value>) -> Result<()> {
    let all = json!({"type": "Sequence", "pretokenizers": steps});
    tokenizer.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(all)?));
    Ok(())
}

/// Sets the decoder.
fn set_decoder(tokenizer: &mut Tokenizer, steps: Vec<Value>) -> Result<()> {
    let all = json!({"type": "Sequence", "decoders": steps});
    tokenizer.with_decoder(Some(part::<tokenizers::DecoderWrapper>(all)?));
    Ok(())
}

/// Returns the step that replaces each match of a regular expression by a text.
fn replace(regex: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"Regex": regex}, "content": content})
}

/// Returns the step that splits a text at the matches of a regular expression, which stay pieces of their own.
fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}
