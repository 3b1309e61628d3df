mod environment;
mod message;
mod python_json;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

pub use message::Message;

use crate::{Error, Result};

/// How a model wants its conversations written: the Jinja template that comes with it.
///
/// Renders what transformers' `apply_chat_template` renders, with its settings of Jinja and its
/// additions (`raise_exception`, `strftime_now`, `tojson` as Python prints, `break` and `continue`,
/// the `generation` tag).
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
    templates: BTreeMap<String, Environment<'static>>,
    /// `bos_token` and others, as text.
    special_tokens: Map<String, Value>,
}

/// How a conversation is rendered; in the words of `apply_chat_template`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChatTemplateOptions {
    /// Whether the beginning of the assistant's answer follows the last message; default true (false
    /// in transformers), for something to be answered.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open, for the model to go on with it; takes the place of
    /// `add_generation_prompt`. Default false.
    pub continue_final_message: bool,
    /// What the model may call, as JSON schemas of functions; default none.
    pub tools: Option<Vec<Value>>,
    /// What it may cite, as objects with `title` and `text`; default none.
    pub documents: Option<Vec<Value>>,
    /// Other variables of the template, such as `enable_thinking` or `date_string`.
    pub variables: Map<String, Value>,
    /// The name of the template, of a model with several; default: `tool_use` where there are tools and
    /// there is one of that name, else `default`.
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

/// Marks the place at which a message is left open.
const OPEN_END: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// A template from its text.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] where the text is no template, with the line.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        let mut templates = BTreeMap::new();
        templates.insert(DEFAULT.to_owned(), parse(source)?);
        Ok(ChatTemplate {
            templates,
            special_tokens: Map::new(),
        })
    }

    /// Reads a Hugging Face folder: `chat_template.jinja` and `additional_chat_templates/*.jinja`, or
    /// `chat_template` (a text, or a list of named ones) of `tokenizer_config.json` or
    /// `chat_template.json`; special tokens from `tokenizer_config.json` and `special_tokens_map.json`.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`] where there is none; [`Error::ChatTemplate`] where one cannot be
    /// parsed; when a file cannot be read.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<ChatTemplate> {
        let dir = dir.as_ref();
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let mut sources = BTreeMap::new();
        if let Some(given) = config.get("chat_template") {
            named(given, &mut sources)?;
        } else if let Some(file) = read_json(&dir.join("chat_template.json"))?
            && let Some(given) = file.get("chat_template")
        {
            named(given, &mut sources)?;
        }
        if let Some(source) = read(&dir.join("chat_template.jinja"))? {
            sources.clear();
            sources.insert(DEFAULT.to_owned(), source);
        }
        additional(&dir.join("additional_chat_templates"), &mut sources)?;
        if sources.is_empty() {
            return Err(Error::NoChatTemplate {
                dir: dir.to_owned(),
            });
        }
        let mut special_tokens = Map::new();
        let legacy = read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        take_special_tokens(&legacy, &mut special_tokens);
        take_special_tokens(&config, &mut special_tokens);
        let templates = sources
            .into_iter()
            .map(|(name, source)| Ok((name, parse(&source)?)))
            .collect::<Result<_>>()?;
        Ok(ChatTemplate {
            templates,
            special_tokens,
        })
    }

    /// With the text of a special token, such as `bos_token`.
    pub fn with_special_token(mut self, name: &str, token: &str) -> ChatTemplate {
        self.special_tokens.insert(name.to_owned(), token.into());
        self
    }

    /// The text of a special token, such as `eos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).and_then(Value::as_str)
    }

    /// The names of the templates; `default` where there is one.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.keys().map(String::as_str)
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// [`Error::Conversation`] where it is empty or its last message cannot be left open;
    /// [`Error::ChatTemplate`] with the template's own words where it refuses the conversation (roles
    /// that do not take turns, say); [`Error::UnknownChatTemplate`].
    pub fn render(&self, messages: &[Message], options: &ChatTemplateOptions) -> Result<String> {
        self.render_with(messages, options, false)
    }

    /// The text of a conversation, and which bytes of it the assistant has written: those between the
    /// template's `{% generation %}` tags, for a loss mask (`return_assistant_tokens_mask`). `None` for a
    /// template without such tags.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with_answers(
        &self,
        messages: &[Message],
        options: &ChatTemplateOptions,
    ) -> Result<(String, Option<Vec<Range<usize>>>)> {
        if !self.marks_answers(options)? {
            return Ok((self.render(messages, options)?, None));
        }
        let (begin, end) = environment::MARKS;
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
                    let problem = "a message has U+FDD0 or U+FDD1 in it, which are no characters";
                    return Err(Error::Conversation(problem.to_owned()));
                }
                _ => text.push(letter),
            }
        }
        Ok((text, Some(answers)))
    }

    /// Whether the template says what the assistant has written, by `{% generation %}`.
    fn marks_answers(&self, options: &ChatTemplateOptions) -> Result<bool> {
        let template = self.choose(options)?.get_template(environment::NAME);
        Ok(template
            .map_err(refused)?
            .source()
            .contains(environment::MARKING))
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
        let messages = messages.into_iter().map(Value::Object).collect();
        if marking {
            variables.insert(environment::MARKING.to_owned(), true.into());
        }
        variables.insert("messages".to_owned(), Value::Array(messages));
        variables.insert("tools".to_owned(), list(&options.tools));
        variables.insert("documents".to_owned(), list(&options.documents));
        variables.insert("add_generation_prompt".to_owned(), prompt.into());
        let rendered = self
            .choose(options)?
            .get_template(environment::NAME)
            .and_then(|template| template.render(minijinja::Value::from(Serde(&variables))))
            .map_err(refused)?;
        match last {
            Some(last) => cut_at_open_end(&rendered, &last),
            None => Ok(rendered),
        }
    }

    /// The token ids of a conversation: what is rendered, encoded without further special tokens, for
    /// the template has written them.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and [`Error::Tokenizer`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &ChatTemplateOptions,
    ) -> Result<Vec<i64>> {
        let text = self.render(messages, options)?;
        let encoding = tokenizer.encode(text, false).map_err(Error::Tokenizer)?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    fn choose(&self, options: &ChatTemplateOptions) -> Result<&Environment<'static>> {
        let tool_use = options.tools.is_some().then_some("tool_use");
        let named = match &options.template {
            Some(name) => self.templates.get(name),
            None => tool_use
                .and_then(|name| self.templates.get(name))
                .or_else(|| self.templates.get(DEFAULT)),
        };
        named.ok_or_else(|| Error::UnknownChatTemplate {
            wanted: options.template.clone().unwrap_or(DEFAULT.to_owned()),
            known: self.names().collect::<Vec<_>>().join(", "),
        })
    }
}

fn parse(source: &str) -> Result<Environment<'static>> {
    environment::environment(source).map_err(refused)
}

/// What a template says with `raise_exception` stands alone; other errors come with their line.
fn refused(error: minijinja::Error) -> Error {
    let detail = error.detail().unwrap_or_default();
    let text = match (error.kind(), error.line()) {
        (ErrorKind::InvalidOperation, _) if !detail.is_empty() => detail.to_owned(),
        (kind, Some(line)) => format!("line {line}: {kind}: {detail}"),
        (kind, None) => format!("{kind}: {detail}"),
    };
    Error::ChatTemplate(text)
}

/// Puts a mark at the end of the last message's text; returns that text.
fn leave_open(messages: &mut [Map<String, Value>]) -> Result<String> {
    let content = messages.last_mut().and_then(|last| last.get_mut("content"));
    let text = match content {
        Some(Value::String(text)) => Some(text),
        // The last text among the parts of a message.
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
        let text = "continue_final_message is set, and the last message has no text to continue";
        return Err(Error::Conversation(text.to_owned()));
    };
    let before = text.clone();
    text.push_str(OPEN_END);
    Ok(before)
}

fn cut_at_open_end(rendered: &str, last: &str) -> Result<String> {
    let mark = rendered.rfind(OPEN_END.trim_end());
    let Some(mark) = mark.filter(|_| rendered.contains(last.trim())) else {
        let text = "continue_final_message is set, and the template drops the last message or a part of it";
        return Err(Error::Conversation(text.to_owned()));
    };
    let (before, end) = rendered.split_at(mark);
    // A template that trims messages has taken the mark's own space, and would take the text's.
    Ok(match end.starts_with(OPEN_END) {
        true => before.to_owned(),
        false => before.trim_end().to_owned(),
    })
}

/// `chat_template` of a JSON file: one, or a list of named ones.
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
            for one in list {
                let text = |key| one.get(key).and_then(Value::as_str);
                let (name, source) = text("name").zip(text("template")).ok_or_else(wrong)?;
                sources.insert(name.to_owned(), source.to_owned());
            }
        }
        _ => return Err(wrong()),
    }
    Ok(())
}

/// The `.jinja` files of a folder, named after themselves.
fn additional(dir: &Path, sources: &mut BTreeMap<String, String>) -> Result<()> {
    let failed = |source| Error::Io {
        path: dir.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
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

/// Special tokens are texts, or objects with a text.
fn take_special_tokens(from: &Map<String, Value>, into: &mut Map<String, Value>) {
    let mut take = |name: &str, value: &Value| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str());
        if let Some(text) = text {
            into.insert(name.to_owned(), text.into());
        }
    };
    for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"] {
        let name = format!("{name}_token");
        if let Some(value) = from.get(&name) {
            take(&name, value);
        }
    }
    // Those of one model's own, such as `image_token`.
    for key in ["extra_special_tokens", "model_specific_special_tokens"] {
        if let Some(Value::Object(extra)) = from.get(key) {
            extra.iter().for_each(|(name, value)| take(name, value));
        }
    }
}

fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io {
            path: path.to_owned(),
            source,
        }),
    }
}

fn read_json(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|source| Error::Json {
            path: path.to_owned(),
            source,
        })
}
