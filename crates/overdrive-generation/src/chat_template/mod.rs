mod gguf;
mod message;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use overdrive_jinja::Template;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

pub(crate) use gguf::{SPECIAL_TOKENS, special_token, special_tokens_of_gguf, templates_of_gguf};
pub use message::Message;

use crate::optional_file::{read, read_object};
use crate::prompts::encode;
use crate::{Error, Result};

/// A chat template: the Jinja template of a model that renders its conversations.
///
/// It renders the same text as transformers' `apply_chat_template`, with the same Jinja settings and additions
/// (`raise_exception`, `strftime_now`, `tojson` in Python's format, `break` and `continue`, the `generation` tag). Values
/// print, compare, slice and convert as in Python, and templates that jinja2 refuses are refused. [`overdrive_jinja`]
/// lists the unsupported features and the limits of a template, such as ten million steps and 64 MiB of text per
/// rendering; beyond them, parsing or rendering returns an error.
///
/// ```
/// use overdrive_generation::{ChatTemplate, ChatTemplateOptions, Message};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let template = ChatTemplate::new(
///     "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}\n{% endfor %}\
///      {% if add_generation_prompt %}<|assistant|>{% endif %}",
/// )?;
/// let conversation = [Message::system("Be brief."), Message::user(" What is Rust? ")];
/// let text = template.render(&conversation, &ChatTemplateOptions::default())?;
/// assert_eq!(text, "<|system|>Be brief.\n<|user|>What is Rust?\n<|assistant|>");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    templates: BTreeMap<String, Template>,
    /// `bos_token` and others, as text.
    special_tokens: Map<String, Value>,
}

/// The options of rendering a conversation, named as in `apply_chat_template`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChatTemplateOptions {
    /// If `true`, the beginning of the assistant's answer follows the last message. Default `true`
    /// (`false` in transformers).
    pub add_generation_prompt: bool,
    /// If `true`, the last message is left open for the model to continue; replaces
    /// `add_generation_prompt`. Default `false`.
    pub continue_final_message: bool,
    /// The functions that the model may call, as JSON schemas. Default `None`.
    pub tools: Option<Vec<Value>>,
    /// The documents that the model may cite, as objects with `title` and `text`. Default `None`.
    pub documents: Option<Vec<Value>>,
    /// The other variables of the template, such as `enable_thinking` or `date_string`.
    pub variables: Map<String, Value>,
    /// The name of the template, for a model with several. Default `None`: `tool_use` if there are
    /// tools and a template of that name, else `default`.
    pub template: Option<String>,
}

impl Default for ChatTemplateOptions {
    fn default() -> Self {
        ChatTemplateOptions {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            documents: None,
            variables: Map::new(),
            template: None,
        }
    }
}

const DEFAULT: &str = "default";

/// The marks of the beginning and the end of the assistant's text: Unicode noncharacters, which no
/// message contains.
const MARKS: (char, char) = ('\u{fdd0}', '\u{fdd1}');

/// The mark of the end of a message that is left open.
const OPEN_END: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the line, if the template cannot be parsed.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        let mut templates = BTreeMap::new();
        templates.insert(DEFAULT.to_owned(), parse(source)?);
        Ok(ChatTemplate {
            templates,
            special_tokens: Map::new(),
        })
    }

    /// Reads the template of a Hugging Face folder: `chat_template.jinja` and
    /// `additional_chat_templates/*.jinja`, or `chat_template` (a text, or a list of named ones) of
    /// `tokenizer_config.json` or `chat_template.json`; special tokens from `tokenizer_config.json` and
    /// `special_tokens_map.json`.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`] if there is none; [`Error::ChatTemplate`] if one cannot be parsed; an
    /// error if a file cannot be read.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<ChatTemplate> {
        let dir = dir.as_ref();
        let special_tokens = special_tokens_of_dir(dir)?;
        ChatTemplate::from_sources(templates_of_dir(dir)?, special_tokens)
    }

    fn from_sources(
        sources: BTreeMap<String, String>,
        special_tokens: Map<String, Value>,
    ) -> Result<ChatTemplate> {
        let templates = sources
            .into_iter()
            .map(|(name, source)| Ok((name, parse(&source)?)))
            .collect::<Result<_>>()?;
        Ok(ChatTemplate {
            templates,
            special_tokens,
        })
    }

    /// Returns the template with the text of a special token, such as `bos_token`.
    pub fn with_special_token(mut self, name: &str, token: &str) -> ChatTemplate {
        self.special_tokens.insert(name.to_owned(), token.into());
        self
    }

    /// Returns the text of a special token, such as `eos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).and_then(Value::as_str)
    }

    /// Returns the names of the templates; `default` if there is one.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.keys().map(String::as_str)
    }

    /// Returns the source of the template of this name.
    ///
    /// ```
    /// # use overdrive_generation::ChatTemplate;
    /// let template = ChatTemplate::new("{{ messages[0].content }}")?;
    /// assert_eq!(template.source("default").as_deref(), Some("{{ messages[0].content }}"));
    /// assert_eq!(template.source("tool_use"), None);
    /// # Ok::<(), overdrive_generation::Error>(())
    /// ```
    pub fn source(&self, name: &str) -> Option<String> {
        Some(self.templates.get(name)?.source().to_owned())
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`Error::Conversation`] if it is empty or its last message cannot be left open;
    /// [`Error::ChatTemplate`] with the template's own message if it refuses the conversation (for
    /// example because roles do not alternate); an [option](overdrive_core::Error::InvalidOption) if
    /// there is no template of the name.
    pub fn render(&self, messages: &[Message], options: &ChatTemplateOptions) -> Result<String> {
        self.render_with(messages, options, false)
    }

    /// Renders a conversation, and returns the byte ranges of the assistant's text, which is between
    /// the template's `{% generation %}` tags, for a loss mask
    /// (`return_assistant_tokens_mask`). `None` for a template without these tags.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with_answers(
        &self,
        messages: &[Message],
        options: &ChatTemplateOptions,
    ) -> Result<(String, Option<Vec<Range<usize>>>)> {
        if !self.choose(options)?.has_generation() {
            return Ok((self.render(messages, options)?, None));
        }
        let (begin, end) = MARKS;
        let (mut text, mut answers) = (String::new(), Vec::new());
        let mut start = None;
        for letter in self.render_with(messages, options, true)?.chars() {
            match start {
                None if letter == begin => start = Some(text.len()),
                Some(from) if letter == end => {
                    answers.push(from..text.len());
                    start = None;
                }
                _ if letter == begin || letter == end => {
                    let message = "a message contains U+FDD0 or U+FDD1, which are not characters";
                    return Err(Error::Conversation(message.to_owned()));
                }
                _ => text.push(letter),
            }
        }
        Ok((text, Some(answers)))
    }

    fn render_with(
        &self,
        messages: &[Message],
        options: &ChatTemplateOptions,
        marking: bool,
    ) -> Result<String> {
        if messages.is_empty() {
            let text = "it is empty: give at least one message";
            return Err(Error::Conversation(text.to_owned()));
        }
        let mut messages: Vec<_> = messages.iter().map(Message::for_template).collect();
        let last = match options.continue_final_message {
            true => Some(leave_open(&mut messages)?),
            false => None,
        };
        let mut variables = self.special_tokens.clone();
        variables.extend(options.variables.clone());
        let list = |values: &Option<Vec<Value>>| match values {
            Some(values) => Value::Array(values.clone()),
            None => Value::Null,
        };
        let prompt = options.add_generation_prompt && last.is_none();
        let messages: Vec<Value> = messages.into_iter().map(Value::Object).collect();
        variables.insert("messages".to_owned(), messages.into());
        variables.insert("tools".to_owned(), list(&options.tools));
        variables.insert("documents".to_owned(), list(&options.documents));
        variables.insert("add_generation_prompt".to_owned(), prompt.into());
        let template = self.choose(options)?;
        let render = |variables: &Map<String, Value>| match marking {
            true => template.render_marked(variables, MARKS),
            false => template.render(variables),
        };
        let rendered = render(&variables).or_else(|error| {
            if error.is_raised() || !arguments_to_text(&mut variables)? {
                return Err(error);
            }
            render(&variables).map_err(|_| error)
        });
        let rendered = rendered.map_err(refused)?;
        match last {
            Some(last) => cut_at_open_end(&rendered, &last),
            None => Ok(rendered),
        }
    }

    /// Renders a conversation and encodes it without adding special tokens, because the template has already
    /// written them.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and [`Error::Tokenizer`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatTemplateOptions,
    ) -> Result<Vec<i64>> {
        encode(tokenizer, &self.render(messages, options)?)
    }

    fn choose(&self, options: &ChatTemplateOptions) -> Result<&Template> {
        let tool_use = options.tools.is_some().then_some("tool_use");
        let named = match &options.template {
            Some(name) => self.templates.get(name),
            None => tool_use
                .and_then(|name| self.templates.get(name))
                .or_else(|| self.templates.get(DEFAULT)),
        };
        named.ok_or_else(|| {
            let wanted = options.template.as_deref().unwrap_or(DEFAULT);
            let known = self.names().collect::<Vec<_>>().join(", ");
            let expected = format!("one of the model's templates, {known}");
            overdrive_core::Error::option("template", format!("{wanted:?}"), expected).into()
        })
    }
}

fn parse(source: &str) -> Result<Template> {
    Template::parse(source).map_err(refused)
}

/// The remedy for a template that fails for reasons other than the conversation.
const REMEDY: &str = "correct it, or give another template (`--chat-template` in the examples)";

/// The message of `raise_exception` is returned alone; other errors come with their line.
fn refused(error: overdrive_jinja::Error) -> Error {
    Error::ChatTemplate(match error.is_raised() {
        true => error.to_string(),
        false => format!("{error}; {REMEDY}"),
    })
}

/// Writes the arguments of the tool calls in `messages` as JSON text in Python's spelling, which the templates of DeepSeek's
/// models append to a text; all others read objects. Returns `false` if there are no arguments.
fn arguments_to_text(variables: &mut Map<String, Value>) -> overdrive_jinja::Result<bool> {
    let messages = variables.get_mut("messages").and_then(Value::as_array_mut);
    let calls = messages
        .into_iter()
        .flatten()
        .filter_map(|message| message.get_mut("tool_calls")?.as_array_mut());
    let mut is_changed = false;
    for call in calls.flatten() {
        if let Some(arguments @ Value::Object(_)) = call.pointer_mut("/function/arguments") {
            let json = Template::parse("{{ arguments | tojson }}")?;
            let variable = ("arguments".to_owned(), arguments.take());
            *arguments = json.render(&Map::from_iter([variable]))?.into();
            is_changed = true;
        }
    }
    Ok(is_changed)
}

/// Puts a mark at the end of the last message's text; returns that text.
fn leave_open(messages: &mut [Map<String, Value>]) -> Result<String> {
    let content = messages.last_mut().and_then(|last| last.get_mut("content"));
    let text = match content {
        Some(Value::String(text)) => Some(text),
        // The last text among the content parts of a message.
        Some(Value::Array(parts)) => {
            parts
                .iter_mut()
                .rev()
                .find_map(|part| match part.get_mut("text") {
                    Some(Value::String(text)) => Some(text),
                    _ => None,
                })
        }
        _ => None,
    };
    let Some(text) = text else {
        let text = "continue_final_message is set, but the last message has no text to continue";
        return Err(Error::Conversation(text.to_owned()));
    };
    let before = text.clone();
    text.push_str(OPEN_END);
    Ok(before)
}

fn cut_at_open_end(rendered: &str, last: &str) -> Result<String> {
    let mark = rendered.rfind(OPEN_END.trim_end());
    let Some(mark) = mark.filter(|_| rendered.contains(last.trim())) else {
        let text = "continue_final_message is set, but the template drops the last message or a part of it";
        return Err(Error::Conversation(text.to_owned()));
    };
    let (before, end) = rendered.split_at(mark);
    // A template that trims messages removes the mark's space, and would also remove the text's.
    Ok(match end.starts_with(OPEN_END) {
        true => before.to_owned(),
        false => before.trim_end().to_owned(),
    })
}

/// Returns the sources of the templates in the folder of a model, by their names.
///
/// # Errors
/// [`Error::NoChatTemplate`] if there is none; an error if a file cannot be read.
pub(crate) fn templates_of_dir(dir: &Path) -> Result<BTreeMap<String, String>> {
    let config = read_object(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut sources = BTreeMap::new();
    if let Some(given) = config.get("chat_template") {
        named(given, &mut sources)?;
    } else if let Some(file) = read_object(&dir.join("chat_template.json"))?
        && let Some(given) = file.get("chat_template")
    {
        named(given, &mut sources)?;
    }
    // The file takes precedence over the entries of JSON, as in transformers, which writes one or the other.
    if let Some(source) = read(&dir.join("chat_template.jinja"))? {
        sources.clear();
        sources.insert(DEFAULT.to_owned(), source);
    }
    additional(&dir.join("additional_chat_templates"), &mut sources)?;
    match sources.is_empty() {
        true => Err(Error::NoChatTemplate {
            dir: dir.to_owned(),
        }),
        false => Ok(sources),
    }
}

/// Reads `chat_template` of a JSON file: one template, or a list of named ones.
fn named(given: &Value, sources: &mut BTreeMap<String, String>) -> Result<()> {
    let wrong = || {
        let text = "`chat_template` is neither a text nor a list of objects with name and template";
        Error::ChatTemplate(text.to_owned())
    };
    match given {
        Value::Null => {}
        Value::String(source) => {
            sources.insert(DEFAULT.to_owned(), source.clone());
        }
        Value::Array(list) => {
            for entry in list {
                let text = |key| entry.get(key).and_then(Value::as_str);
                let (name, source) = text("name").zip(text("template")).ok_or_else(wrong)?;
                sources.insert(name.to_owned(), source.to_owned());
            }
        }
        _ => return Err(wrong()),
    }
    Ok(())
}

/// Reads the `.jinja` files of a folder, each under its file stem.
fn additional(dir: &Path, sources: &mut BTreeMap<String, String>) -> Result<()> {
    let failed = |error| overdrive_core::Error::io("read", dir)(error);
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error).into()),
    };
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str());
        if path.extension().is_some_and(|end| end == "jinja")
            && let Some(name) = name
            && let Some(source) = read(&path)?
        {
            sources.insert(name.to_owned(), source);
        }
    }
    Ok(())
}

/// Returns the text of a special token, which is a string, or, in older files, an object with it in `content`.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// Returns the special tokens of a folder by their names.
pub(crate) fn special_tokens_of_dir(dir: &Path) -> Result<Map<String, Value>> {
    let config = read_object(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut special_tokens = Map::new();
    let legacy = read_object(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
    take_special_tokens(&legacy, &mut special_tokens);
    // Later entries replace earlier ones: `tokenizer_config.json` takes precedence over the legacy file.
    take_special_tokens(&config, &mut special_tokens);
    Ok(special_tokens)
}

/// Reads special tokens.
fn take_special_tokens(from: &Map<String, Value>, into: &mut Map<String, Value>) {
    let mut take = |name: &str, value: &Value| {
        if let Some(text) = token_text(value) {
            into.insert(name.to_owned(), text.into());
        }
    };
    // Those of every model, and of individual models, such as `image_token`, which transformers 5 writes beside them.
    let named = from.iter().filter(|(name, _)| name.ends_with("_token"));
    named.for_each(|(name, value)| take(name, value));
    // As they are given to a tokenizer, and as version 4 wrote them.
    for key in ["extra_special_tokens", "model_specific_special_tokens"] {
        if let Some(Value::Object(extra)) = from.get(key) {
            extra.iter().for_each(|(name, value)| take(name, value));
        }
    }
}
