//! Tokenizers, chat templates and settings as the metadata of a GGUF file: the inverse of the reader in this module.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use overdrive_core::Error as Common;
use overdrive_quantization::{GgufArray, GgufValue};
use overdrive_transformer::{CausalLm, GgufFileType, GgufOptions, LoadProgress, ModelConfig};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::pre_tokenizers::{DIGIT, GPT2, name_of};
use super::sentencepiece::SPACE;
use super::vocabulary::TokenType;
use crate::chat_template::SPECIAL_TOKENS;
use crate::{Error, ModelFiles, Result};

pub(crate) type Metadata = BTreeMap<String, GgufValue>;

/// The tokenizers that are written, for messages.
const WRITTEN: &str =
    "byte-level BPE with a word rule of llama.cpp, and SentencePiece BPE with byte fallback";
/// The keys of `generation_config.json` with a key in `general.sampling`.
const SAMPLING: [(&str, &str); 5] = [
    ("temperature", "temp"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "penalty_repeat"),
];

/// Writes `model` with its tokenizer, chat templates and settings, which `files` holds, as a GGUF file that llama.cpp
/// and this crate read. `file_type` is the type of the matrices, and `progress` receives the bytes.
///
/// The weights are those of [`CausalLm::save_gguf`]; the metadata are those of [`ModelFiles::gguf_metadata`], under the
/// name of the file.
///
/// ```no_run
/// use overdrive_generation::{ModelFiles, export_gguf};
/// use overdrive_transformer::{CausalLm, GgufFileType, LoadOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = "runs/tiny-001/model";
/// let model = CausalLm::from_pretrained(folder, &LoadOptions::default())?;
/// export_gguf(&model, &ModelFiles::open(folder)?, "tiny.gguf", GgufFileType::Q8_0, None)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Those of [`CausalLm::save_gguf`] and [`ModelFiles::gguf_metadata`].
pub fn export_gguf(
    model: &CausalLm,
    files: &ModelFiles,
    path: impl AsRef<Path>,
    file_type: GgufFileType,
    progress: Option<LoadProgress>,
) -> Result<()> {
    let path = path.as_ref();
    let mut metadata = files.gguf_metadata(model.config())?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = GgufValue::String(name.into_owned());
    metadata.entry("general.name".to_owned()).or_insert(name);
    let mut options = GgufOptions::new(file_type);
    options.metadata = metadata;
    options.progress = progress;
    Ok(model.save_gguf(path, &options)?)
}

/// Returns the metadata of another GGUF file that do not depend on the weights.
pub(crate) fn of_gguf(metadata: &Metadata) -> Metadata {
    let of_weights = [
        "general.architecture",
        "general.type",
        "general.file_type",
        "general.alignment",
        "general.quantization_version",
    ];
    let is_kept = |key: &str| {
        key.starts_with("tokenizer.") || key.starts_with("general.") && !of_weights.contains(&key)
    };
    let kept = metadata.iter().filter(|(key, _)| is_kept(key));
    kept.map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Returns the metadata of a Hugging Face folder.
pub(crate) fn of_folder(
    files: &ModelFiles,
    folder: &Path,
    templates: &BTreeMap<String, String>,
    config: &ModelConfig,
) -> Result<Metadata> {
    let tokenizer = files.tokenizer()?;
    let size = usize::try_from(config.vocab_size()).unwrap_or(0);
    let mut own = Written {
        folder,
        values: Metadata::new(),
    };
    own.vocabulary(&tokenizer, size)?;
    own.special_tokens(files, &tokenizer, config)?;
    own.templates(templates);
    own.sampling(&files.generation_config()?);
    Ok(own.values)
}

/// The metadata so far.
struct Written<'a> {
    folder: &'a Path,
    values: Metadata,
}

impl Written<'_> {
    fn put(&mut self, name: &str, value: GgufValue) {
        self.values.insert(format!("tokenizer.{name}"), value);
    }

    fn unwritable(&self, key: &'static str, found: impl Into<String>) -> Error {
        Error::UnwritableTokenizer {
            path: self.folder.to_owned(),
            key,
            found: found.into(),
            written: WRITTEN,
        }
    }

    /// Sets the tokens, their types, and what joins them.
    fn vocabulary(&mut self, tokenizer: &Tokenizer, size: usize) -> Result<()> {
        let json = tokenizer.to_string(false).map_err(Error::Tokenizer)?;
        let json: Value =
            serde_json::from_str(&json).map_err(|error| Error::Tokenizer(error.into()))?;
        let model = &json["model"];
        let kind = model["type"].as_str().unwrap_or("another model");
        if kind != "BPE" {
            return Err(self.unwritable("model.type", kind));
        }
        let mut texts: Vec<Option<String>> = vec![None; size];
        for (text, id) in tokenizer.get_vocab(true) {
            let Some(place) = texts.get_mut(id as usize) else {
                let expected =
                    format!("below {size}, the number of rows of the model's table of tokens");
                return Err(Common::option(
                    "tokenizer.json",
                    format!("a token with the id {id}"),
                    expected,
                )
                .into());
            };
            *place = Some(text);
        }
        let merges = merges(model);
        let is_sentencepiece = model["byte_fallback"] == Value::Bool(true);
        let unknown = model["unk_token"].as_str();
        let added = tokenizer.get_added_tokens_decoder();
        let type_of = |id: usize, text: &Option<String>| match (text, added.get(&(id as u32))) {
            (None, _) => TokenType::Unused,
            (Some(text), _) if is_sentencepiece && unknown == Some(text) => TokenType::Unknown,
            (_, Some(token)) if token.special => TokenType::Control,
            (_, Some(_)) => TokenType::UserDefined,
            (Some(text), None) if is_sentencepiece && is_byte(text) => TokenType::Byte,
            (Some(_), None) => TokenType::Normal,
        };
        let types = texts
            .iter()
            .enumerate()
            .map(|(id, text)| type_of(id, text).id())
            .collect();
        match is_sentencepiece {
            true => self.sentencepiece(&json, &texts, &merges)?,
            false => self.byte_level(&json, merges)?,
        }
        // Rows of the embedding without a token get the names that llama.cpp's converter gives them.
        let named = texts.into_iter().enumerate();
        let named = named.map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]")));
        self.put(
            "ggml.tokens",
            GgufValue::Array(GgufArray::String(named.collect())),
        );
        self.put("ggml.token_type", GgufValue::Array(GgufArray::I32(types)));
        Ok(())
    }

    fn byte_level(&mut self, json: &Value, merges: Vec<(String, String)>) -> Result<()> {
        let mut patterns = Vec::new();
        let mut is_byte_level = false;
        for step in steps(&json["pre_tokenizer"], "pretokenizers") {
            let kind = step["type"].as_str().unwrap_or("nothing");
            match kind {
                "ByteLevel" => {
                    is_byte_level = true;
                    if step["use_regex"] != Value::Bool(false) {
                        patterns.push(GPT2.to_owned());
                    }
                    if step["add_prefix_space"] == Value::Bool(true) {
                        self.put("ggml.add_space_prefix", GgufValue::Bool(true));
                    }
                }
                "Digits" if step["individual_digits"] == Value::Bool(true) => {
                    patterns.push(DIGIT.to_owned())
                }
                "Split" if step["pattern"]["Regex"].is_string() => {
                    patterns.push(
                        step["pattern"]["Regex"]
                            .as_str()
                            .unwrap_or_default()
                            .to_owned(),
                    );
                }
                other => return Err(self.unwritable("pre_tokenizer", other)),
            }
        }
        if !is_byte_level {
            return Err(self.unwritable("pre_tokenizer", "no ByteLevel"));
        }
        let ignores_merges = json["model"]["ignore_merges"] == Value::Bool(true);
        let pre = name_of(&patterns, ignores_merges)
            .ok_or_else(|| self.unwritable("pre_tokenizer", patterns.join(", then ")))?;
        for step in steps(&json["normalizer"], "normalizers") {
            match (step["type"].as_str(), step["prepend"].as_str()) {
                // llama.cpp leaves characters as they are, also for models whose tokenizer composes them.
                (None | Some("NFC"), _) => {}
                (Some("Prepend"), Some(" ")) => {
                    self.put("ggml.add_space_prefix", GgufValue::Bool(true))
                }
                (Some(other), _) => return Err(self.unwritable("normalizer", other)),
            }
        }
        self.put("ggml.model", GgufValue::String("gpt2".to_owned()));
        self.put("ggml.pre", GgufValue::String(pre.to_owned()));
        let merges = merges
            .into_iter()
            .map(|(left, right)| format!("{left} {right}"));
        self.put(
            "ggml.merges",
            GgufValue::Array(GgufArray::String(merges.collect())),
        );
        Ok(())
    }

    /// Sets the scores with which SentencePiece makes the same merges. They follow from the rank of the
    /// first merge that produces each token.
    fn sentencepiece(
        &mut self,
        json: &Value,
        texts: &[Option<String>],
        merges: &[(String, String)],
    ) -> Result<()> {
        let mut ranks: BTreeMap<String, usize> = BTreeMap::new();
        for (rank, (left, right)) in merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        // SentencePiece joins any two tokens whose concatenation is a token; other BPE applies only
        // the listed merges.
        let all: HashSet<&str> = texts.iter().flatten().map(String::as_str).collect();
        let listed: HashSet<(&str, &str)> = merges
            .iter()
            .map(|(left, right)| (left.as_str(), right.as_str()))
            .collect();
        for text in ranks.keys() {
            let mut pairs = text
                .char_indices()
                .skip(1)
                .map(|(middle, _)| text.split_at(middle));
            let missing = pairs.find(|pair| {
                all.contains(pair.0) && all.contains(pair.1) && !listed.contains(pair)
            });
            if let Some((left, right)) = missing {
                let found =
                    format!("BPE with bytes that does not join `{left}` and `{right}` to `{text}`");
                return Err(self.unwritable("model.merges", found));
            }
        }
        let score = |text: &Option<String>| {
            let rank = text.as_ref().and_then(|text| ranks.get(text));
            rank.map_or(0.0, |&rank| -(rank as f32) - 1.0)
        };
        let scores = texts.iter().map(score).collect();
        self.put("ggml.scores", GgufValue::Array(GgufArray::F32(scores)));
        self.put("ggml.model", GgufValue::String("llama".to_owned()));
        self.put("ggml.pre", GgufValue::String("default".to_owned()));
        let prepends = steps(&json["normalizer"], "normalizers")
            .any(|step| step["prepend"] == SPACE)
            || steps(&json["pre_tokenizer"], "pretokenizers").any(|step| {
                let scheme = step["prepend_scheme"].as_str();
                step["type"] == "Metaspace" && scheme.is_some_and(|scheme| scheme != "never")
            });
        self.put("ggml.add_space_prefix", GgufValue::Bool(prepends));
        Ok(())
    }

    fn special_tokens(
        &mut self,
        files: &ModelFiles,
        tokenizer: &Tokenizer,
        config: &ModelConfig,
    ) -> Result<()> {
        for (name, key) in SPECIAL_TOKENS {
            let of_files = files.special_token(name)?;
            let of_config = match name {
                "bos_token" => config.bos_token_id(),
                "eos_token" => config.eos_token_ids().first().copied(),
                "pad_token" => config.pad_token_id(),
                _ => None,
            };
            let id = of_files.and_then(|text| tokenizer.token_to_id(&text));
            let id = id.or_else(|| u32::try_from(of_config?).ok());
            if let Some(id) = id {
                self.put(&format!("ggml.{key}"), GgufValue::U32(id));
            }
        }
        let ids = |special: bool| {
            let encoded = tokenizer.encode("a", special).map_err(Error::Tokenizer)?;
            Ok::<_, Error>(encoded.get_ids().to_vec())
        };
        let (with, without) = (ids(true)?, ids(false)?);
        let adds = |first: bool| match first {
            true => with.first() != without.first(),
            false => with.last() != without.last(),
        };
        self.put("ggml.add_bos_token", GgufValue::Bool(adds(true)));
        self.put("ggml.add_eos_token", GgufValue::Bool(adds(false)));
        Ok(())
    }

    fn templates(&mut self, templates: &BTreeMap<String, String>) {
        let mut names = Vec::new();
        for (name, source) in templates {
            let source = GgufValue::String(source.clone());
            match name.as_str() {
                "default" => self.put("chat_template", source),
                other => {
                    names.push(other.to_owned());
                    self.put(&format!("chat_template.{other}"), source);
                }
            }
        }
        if !names.is_empty() {
            self.put("chat_templates", GgufValue::Array(GgufArray::String(names)));
        }
    }

    /// Sets the sampling defaults, if the model samples by default.
    fn sampling(&mut self, settings: &Map<String, Value>) {
        if settings.get("do_sample") != Some(&Value::Bool(true)) {
            return;
        }
        for (name, key) in SAMPLING {
            let Some(number) = settings.get(name).and_then(Value::as_f64) else {
                continue;
            };
            let value = match name {
                "top_k" => GgufValue::I32(number as i32),
                _ => GgufValue::F32(number as f32),
            };
            self.values.insert(format!("general.sampling.{key}"), value);
        }
    }
}

/// Returns the pairs of tokens that are joined, the first one first.
fn merges(model: &Value) -> Vec<(String, String)> {
    let list = model["merges"].as_array().map_or(&[][..], Vec::as_slice);
    let pair = |merge: &Value| match merge {
        Value::String(text) => {
            let (left, right) = text.split_once(' ')?;
            Some((left.to_owned(), right.to_owned()))
        }
        both => Some((both[0].as_str()?.to_owned(), both[1].as_str()?.to_owned())),
    };
    list.iter().filter_map(pair).collect()
}

/// Returns the steps of a sequence, the only step, or none.
fn steps<'v>(value: &'v Value, key: &str) -> impl Iterator<Item = &'v Value> {
    let list = match (value["type"] == "Sequence", value) {
        (_, Value::Null) => &[],
        (true, _) => value[key].as_array().map_or(&[][..], Vec::as_slice),
        (false, one) => std::slice::from_ref(one),
    };
    list.iter()
}

/// Returns `true` for the name of a byte, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let hex = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
