use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_core::{Error as Common, files, text};
use overdrive_datasets::{ImageProcessor, copy_tokenizer, load_tokenizer, save_tokenizer};
use overdrive_quantization::{GgufFile, GgufValue};
use overdrive_transformer::{ModelConfig, Seq2SeqConfig, generation_config_from_gguf};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::chat_template::{
    special_token, special_tokens_of_dir, special_tokens_of_gguf, templates_of_dir,
    templates_of_gguf,
};
use crate::optional_file::read_object;
use crate::{ChatTemplate, Error, GenerationConfig, Result, gguf, tokenizer_from_gguf};

/// The tokenizer, chat template and generation settings that come with a model: the files of a Hugging Face folder,
/// or the metadata of a GGUF file.
///
/// `CausalLm::from_pretrained` reads the weights of both.
///
/// ```no_run
/// use overdrive_generation::{Message, ModelFiles};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let files = ModelFiles::open("SmolLM2-135M-Instruct.Q4_1.gguf")?;
/// let tokenizer = files.tokenizer()?;
/// let messages = [Message::user("What is Rust?")];
/// let prompt = files.chat_template()?.encode(&tokenizer, &messages, &Default::default())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ModelFiles {
    source: Source,
}

#[derive(Debug)]
enum Source {
    Folder(PathBuf),
    Gguf(Box<GgufFile>),
}

impl ModelFiles {
    /// Opens a folder or a GGUF file (for a split model, any of its files).
    ///
    /// # Errors
    /// An error if there is no such folder or file, or if a file is not in the GGUF format.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(Common::io("open", path))?;
        let source = match metadata.is_dir() {
            true => Source::Folder(path.to_owned()),
            false => Source::Gguf(Box::new(GgufFile::open(path)?)),
        };
        Ok(ModelFiles { source })
    }

    /// Returns the tokenizer: that of `tokenizer.json`, or the one that a GGUF file describes
    /// ([`tokenizer_from_gguf`]).
    ///
    /// # Errors
    /// An error if there is none, or if it cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.source {
            Source::Folder(folder) => Ok(load_tokenizer(folder)?),
            Source::Gguf(file) => tokenizer_from_gguf(file),
        }
    }

    /// Returns `true` if `config.json` names an encoder-decoder model, which
    /// [`Seq2SeqLm`](overdrive_transformer::Seq2SeqLm) loads; `false` without the file.
    ///
    /// # Errors
    /// An error if the file cannot be read or parsed.
    pub fn is_seq2seq(&self) -> Result<bool> {
        let Source::Folder(folder) = &self.source else {
            return Ok(false);
        };
        let config = read_object(&folder.join("config.json"))?.unwrap_or_default();
        let name = config.get("model_type").and_then(Value::as_str);
        Ok(Seq2SeqConfig::is_model_type(name.unwrap_or_default()))
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// As [`ChatTemplate::from_dir`] and [`ChatTemplate::from_gguf`].
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        match &self.source {
            Source::Folder(folder) => ChatTemplate::from_dir(folder),
            Source::Gguf(file) => ChatTemplate::from_gguf(file),
        }
    }

    /// Returns the processor of images, or `None` for a model without one: a GGUF file, or a folder without
    /// `preprocessor_config.json`.
    ///
    /// # Errors
    /// As [`ImageProcessor::from_dir`].
    pub fn image_processor(&self) -> Result<Option<ImageProcessor>> {
        match &self.source {
            Source::Folder(folder) => Ok(ImageProcessor::from_dir(folder)?),
            Source::Gguf(_) => Ok(None),
        }
    }

    /// Returns the chat template of `path`, a Jinja file or the folder of another model, to be used instead of this
    /// model's template. It gets this model's special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`](crate::Error::ChatTemplate) if it cannot be parsed; an error if a file cannot be read.
    pub fn chat_template_from(&self, path: impl AsRef<Path>) -> Result<ChatTemplate> {
        let path = path.as_ref();
        let mut template = match path.is_dir() {
            true => ChatTemplate::from_dir(path)?,
            false => ChatTemplate::new(&text::read(path)?)?,
        };
        let tokens = match &self.source {
            Source::Folder(folder) => special_tokens_of_dir(folder)?,
            Source::Gguf(file) => special_tokens_of_gguf(file)?,
        };
        for (name, token) in &tokens {
            template = template.with_special_token(name, token.as_str().unwrap_or_default());
        }
        Ok(template)
    }

    /// Returns the generation settings, as an object for [`GenerationConfig::from_map`]: those of
    /// `generation_config.json`, or the end-of-text tokens and the sampling defaults (`general.sampling.*`) of a GGUF
    /// file.
    ///
    /// # Errors
    /// As [`GenerationConfig::map_from_dir`], and for a value of another type.
    pub fn generation_config(&self) -> Result<Map<String, Value>> {
        match &self.source {
            Source::Folder(folder) => GenerationConfig::map_from_dir(folder),
            Source::Gguf(file) => Ok(generation_config_from_gguf(file)?),
        }
    }

    /// Returns the text of a special token, such as `eos_token`, as the files of a folder (`tokenizer_config.json`, or an
    /// older `special_tokens_map.json`) or a GGUF file name it.
    ///
    /// # Errors
    /// An error if a file cannot be read, or a value is of another type.
    pub fn special_token(&self, name: &str) -> Result<Option<String>> {
        match &self.source {
            Source::Folder(folder) => {
                let tokens = special_tokens_of_dir(folder)?;
                let token = tokens.get(name).and_then(Value::as_str);
                Ok(token.map(str::to_owned))
            }
            Source::Gguf(file) => special_token(file, name),
        }
    }

    /// Returns the metadata of a GGUF file of a model with this configuration: its tokenizer (`tokenizer.ggml.*`), its chat
    /// templates and its sampling defaults (`general.sampling.*`). Those of another GGUF file are taken over.
    ///
    /// | tokenizer of the folder | `tokenizer.ggml.model` |
    /// |---|---|
    /// | byte-level BPE whose word rule llama.cpp knows | `gpt2`, with merges, and the rule in `tokenizer.ggml.pre` |
    /// | SentencePiece BPE with byte fallback | `llama`, with scores |
    ///
    /// # Errors
    /// [`Error::UnwritableTokenizer`](crate::Error::UnwritableTokenizer) for another tokenizer; an error if a file cannot be
    /// read, or the tokenizer has more tokens than the model.
    pub fn gguf_metadata(&self, config: &ModelConfig) -> Result<BTreeMap<String, GgufValue>> {
        match &self.source {
            Source::Gguf(file) => Ok(gguf::of_gguf(file.metadata())),
            Source::Folder(folder) => {
                let templates = match templates_of_dir(folder) {
                    Err(Error::NoChatTemplate { .. }) => BTreeMap::new(),
                    found => found?,
                };
                gguf::of_folder(self, folder, &templates, config)
            }
        }
    }

    /// Copies the tokenizer and the chat templates into the folder `to`, in Hugging Face's format.
    ///
    /// # Errors
    /// An error if they cannot be read, or the folder cannot be written.
    pub fn copy_tokenizer(&self, to: impl AsRef<Path>) -> Result<()> {
        let to = to.as_ref();
        match &self.source {
            Source::Folder(folder) => {
                copy_tokenizer(folder, to)?;
            }
            Source::Gguf(file) => save_gguf_tokenizer(file, to)?,
        }
        Ok(())
    }
}

/// Writes the tokenizer of a GGUF file as transformers reads it.
fn save_gguf_tokenizer(file: &GgufFile, to: &Path) -> Result<()> {
    let tokenizer = tokenizer_from_gguf(file)?;
    let architecture = file
        .value("general.architecture")
        .and_then(GgufValue::as_str);
    let key = format!("{}.context_length", architecture.unwrap_or_default());
    let context = file
        .value(&key)
        .and_then(GgufValue::as_i64)
        .unwrap_or(i64::MAX);
    save_tokenizer(
        to,
        &tokenizer,
        None,
        usize::try_from(context).unwrap_or(usize::MAX),
    )?;
    let path = to.join("tokenizer_config.json");
    let mut config = read_object(&path)?.unwrap_or_default();
    config.extend(special_tokens_of_gguf(file)?);
    let config = format!("{:#}\n", Value::Object(config));
    files::write(&path, config.as_bytes())?;
    write_templates(&templates_of_gguf(file)?, to)
}

/// Writes the chat template of `from`, a file with Jinja's syntax or the folder of a model, into the folder `to`, where
/// transformers and [`ModelFiles`] read it.
///
/// # Errors
/// [`Error::NoChatTemplate`](crate::Error::NoChatTemplate) if a folder has none; an error if a file cannot be read or
/// written.
pub fn copy_chat_template(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let sources = match from.is_dir() {
        true => templates_of_dir(from)?,
        false => BTreeMap::from([("default".to_owned(), text::read(from)?)]),
    };
    write_templates(&sources, to)
}

/// Writes chat templates as transformers does.
fn write_templates(sources: &BTreeMap<String, String>, to: &Path) -> Result<()> {
    for (name, source) in sources {
        let path = match name.as_str() {
            "default" => to.join("chat_template.jinja"),
            name => {
                let folder = to.join("additional_chat_templates");
                std::fs::create_dir_all(&folder).map_err(Common::io("create", &folder))?;
                // The name comes from a file: only one that is a plain name becomes a path.
                let plain = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
                if !name.chars().all(plain) {
                    continue;
                }
                folder.join(format!("{name}.jinja"))
            }
        };
        files::write(&path, source.as_bytes())?;
    }
    Ok(())
}
