//! How texts become the inputs of a model of embeddings or scores: the files of sentence-transformers.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_core::{Error as Common, check_option, text};
use overdrive_generation::{ChatTemplate, ChatTemplateOptions, Message};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::api_error::{ApiError, ApiResult};
use crate::fields::shorten;

/// The settings of a folder. The default, that of a folder without these files: no prompts, and no other form of pairs
/// than the model's.
#[derive(Debug, Default)]
pub(crate) struct TextFormat {
    prompts: Prompts,
    /// The form in which a causal reranker of sentence-transformers reads pairs.
    pub(crate) pairs: Option<PairFormat>,
}

/// `config_sentence_transformers.json`.
#[derive(Debug, Default, Deserialize)]
struct Prompts {
    /// The text before each input, by the name that a request gives as `prompt_name`.
    #[serde(default)]
    prompts: BTreeMap<String, String>,
    /// The prompt of requests without a `prompt_name`.
    #[serde(default)]
    default_prompt_name: Option<String>,
}

/// `sentence_bert_config.json`.
#[derive(Debug, Default, Deserialize)]
struct Settings {
    #[serde(default)]
    modality_config: Map<String, Value>,
    #[serde(default)]
    processing_kwargs: Map<String, Value>,
}

/// The form of the pairs of a causal reranker.
#[derive(Debug)]
pub(crate) enum PairFormat {
    /// Two texts with the special tokens of the tokenizer.
    Tokens,
    /// The folder's chat template.
    Template(Box<PairTemplate>),
}

/// A chat template with the roles `query` and `document`; a prompt is the message of the system.
#[derive(Debug)]
pub(crate) struct PairTemplate {
    template: ChatTemplate,
    options: ChatTemplateOptions,
    /// If `true`, the content of a message is a list of parts.
    structured: bool,
}

impl TextFormat {
    /// Reads the settings of a folder; a GGUF file has none.
    pub(crate) fn of(path: &Path) -> Result<TextFormat> {
        if path.is_file() {
            return Ok(TextFormat::default());
        }
        let prompts: Prompts = read(&path.join("config_sentence_transformers.json"))?;
        if let Some(name) = &prompts.default_prompt_name {
            let known = prompts.prompts.contains_key(name);
            let expected = "the name of one of its prompts";
            check_option(known, "default_prompt_name", format!("{name:?}"), expected)?;
        }
        let modules: Value = read(&path.join("modules.json"))?;
        let kinds = modules.as_array().into_iter().flatten();
        let mut kinds = kinds.filter_map(|module| module.get("type")?.as_str());
        let scores = kinds.any(|kind| kind.ends_with(".LogitScore"));
        let settings: Settings = read(&path.join("sentence_bert_config.json"))?;
        let message = settings.modality_config.get("message");
        // Other models of sentence-transformers could read texts as messages, too.
        let expected =
            "only for a reranker: embeddings of texts in a chat template are not implemented";
        let is_known = message.is_none() || scores;
        check_option(is_known, "modality_config", "with \"message\"", expected)?;
        let pairs = match (scores, message) {
            (false, _) => None,
            (true, None) => Some(PairFormat::Tokens),
            (true, Some(message)) => {
                let template = PairTemplate::of(path, message, &settings.processing_kwargs)?;
                Some(PairFormat::Template(Box::new(template)))
            }
        };
        Ok(TextFormat { prompts, pairs })
    }

    /// Returns the prompt that a request names, or else the default one; empty if there is none.
    pub(crate) fn prompt(&self, name: Option<&str>) -> ApiResult<&str> {
        let Prompts {
            prompts,
            default_prompt_name,
        } = &self.prompts;
        let Some(name) = name.or(default_prompt_name.as_deref()) else {
            return Ok("");
        };
        prompts.get(name).map(String::as_str).ok_or_else(|| {
            let name = format!("{:?}", shorten(name));
            let names: Vec<&String> = prompts.keys().collect();
            let expected = match names.is_empty() {
                true => "left out: this model has no prompts".to_owned(),
                false => format!("one of the model's prompts, {names:?}"),
            };
            ApiError::range("prompt_name", name, &expected)
        })
    }
}

impl PairTemplate {
    fn of(folder: &Path, message: &Value, processing: &Map<String, Value>) -> Result<PairTemplate> {
        let template = ChatTemplate::from_dir(folder)?;
        let mut variables = match processing.get("chat_template") {
            Some(Value::Object(variables)) => variables.clone(),
            _ => Map::new(),
        };
        // An argument of sentence-transformers.
        variables.remove("restore_suffix");
        let begins = variables.remove("add_generation_prompt");
        let structured = match message.get("format").and_then(Value::as_str) {
            Some("flat") => false,
            Some("structured") => true,
            // The signs that sentence-transformers looks for.
            _ => {
                let signs = [
                    "content[0]",
                    ".type",
                    "'type'",
                    "\"type\"",
                    "message.content[",
                ];
                let source = template.source("default").unwrap_or_default();
                signs.into_iter().any(|sign| source.contains(sign))
            }
        };
        let format = PairTemplate {
            template,
            options: ChatTemplateOptions {
                add_generation_prompt: begins == Some(Value::Bool(true)),
                variables,
                ..ChatTemplateOptions::default()
            },
            structured,
        };
        let (query, document) = ("Is it a query?", "It is a document.");
        let text = format.render("", query, document)?;
        let expected = "a template with the roles query and document";
        let known = text.contains(query) && text.contains(document);
        check_option(
            known,
            "chat_template",
            "without the texts of a pair",
            expected,
        )?;
        Ok(format)
    }

    /// Returns the prompt of a pair. `system` is the message of the system, if it is not empty.
    pub(crate) fn render(
        &self,
        system: &str,
        query: &str,
        document: &str,
    ) -> overdrive_generation::Result<String> {
        let message = |(role, text): (&str, &str)| match self.structured {
            false => Message::new(role, text),
            true => Message::new(role, "").with("content", json!([{"type": "text", "text": text}])),
        };
        let messages = [("system", system), ("query", query), ("document", document)];
        let first = usize::from(system.is_empty());
        let messages: Vec<Message> = messages[first..].iter().copied().map(message).collect();
        self.template.render(&messages, &self.options)
    }
}

/// Reads a JSON file that may be missing.
fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T> {
    match text::read_optional(path)? {
        Some(text) => Ok(serde_json::from_str(&text).map_err(Common::parse("JSON", path))?),
        None => Ok(T::default()),
    }
}
