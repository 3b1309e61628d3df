//! The tool calls in the text of an answer.

use overdrive_generation::certain_length;
use serde_json::{Map, Value, json};

use super::{ToolCall, Tools, deepseek, gemma4, pythonic, qwen};

/// A form in which models write their calls.
struct Form {
    /// The mark that begins the first call.
    begin: &'static str,
    /// Reads the calls in a text that begins with the mark; `None` if it is anything else.
    read: fn(&Tools, &str) -> Option<Vec<ToolCall>>,
}

/// The forms that begin with a mark.
const FORMS: &[Form] = &[
    // Hermes, Qwen, SmolLM3 and Granite; the calls of Qwen3-Coder and Qwen3.5 are elements and not JSON.
    Form {
        begin: TOOL_CALL,
        read: tagged,
    },
    Form {
        begin: gemma4::BEGIN,
        read: |tools, text| tools.named(gemma4::read(text)?),
    },
    // Granite 3.0 and Phi-4-mini.
    Form {
        begin: "<|tool_call|>",
        read: |tools, text| tools.json(between(text, "<|tool_call|>", "<|/tool_call|>")),
    },
    Form {
        begin: "functools[",
        read: |tools, text| tools.json(text.strip_prefix("functools")?),
    },
    Form {
        begin: MISTRAL,
        read: mistral,
    },
    // DeepSeek-V3 and R1.
    Form {
        begin: deepseek::BEGIN,
        read: |tools, text| tools.named(deepseek::read(text)?),
    },
    // OLMo 3.
    Form {
        begin: "<function_calls>",
        read: |tools, text| {
            let calls = between(text, "<function_calls>", "</function_calls>");
            tools.named(pythonic::read(calls)?)
        },
    },
    // gpt-oss; the form in which `ReasoningParser` leaves a message to a tool.
    Form {
        begin: HARMONY,
        read: harmony,
    },
];

const TOOL_CALL: &str = "<tool_call>";
const MISTRAL: &str = "[TOOL_CALLS]";
const HARMONY: &str = "<|channel|>commentary to=";

/// Separates the text of an answer from its tool calls, as vLLM's tool parsers do.
///
/// It reads the forms of [`FORMS`] after a text, and two forms that are the whole answer: a JSON object with a `name` or a
/// list of such objects (Llama, and every model whose answer is constrained by a schema), and the name of a tool with its
/// arguments on the next line (GLM-4). Text that may begin a call is held back until that is certain; malformed calls and
/// calls of unknown tools are text.
#[derive(Debug, Clone)]
pub(crate) struct ToolCallParser {
    tools: Tools,
    pending: String,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space so far, or the beginning of the name of a tool.
    Start,
    /// Text; its end may be the beginning of a mark.
    Text,
    /// The rest of the answer may be calls.
    Held,
}

impl ToolCallParser {
    pub(crate) fn new(tools: Tools) -> ToolCallParser {
        ToolCallParser {
            tools,
            pending: String::new(),
            state: State::Start,
        }
    }

    /// Appends a piece of the answer, and returns the text that certainly belongs to no call.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        self.pending.push_str(piece);
        if self.state == State::Start {
            self.state = self.start();
        }
        if self.state != State::Text {
            return String::new();
        }
        let marks = FORMS.iter().map(|form| form.begin);
        let end = match marks
            .clone()
            .filter_map(|mark| self.pending.find(mark))
            .min()
        {
            Some(start) => {
                self.state = State::Held;
                start
            }
            None => certain_length(&self.pending, &marks.collect::<Vec<_>>()),
        };
        // The line break before a call belongs to it.
        let end = self.pending[..end].trim_end().len();
        let rest = self.pending.split_off(end);
        std::mem::replace(&mut self.pending, rest)
    }

    /// Returns the state after the first text.
    fn start(&self) -> State {
        let text = self.pending.trim_start();
        let mut marks = FORMS.iter().map(|form| form.begin);
        let mut names = self.tools.functions.iter().map(|(name, _)| name);
        // The end of a name is the end of its line.
        let name = text.trim_end();
        if text.is_empty() || marks.any(|mark| mark.starts_with(text)) {
            State::Start
        } else if text.starts_with(['{', '[']) && !text.starts_with(MISTRAL)
            || split_name(&self.tools, text).is_some()
        {
            State::Held
        } else if names.any(|own| own.starts_with(name)) {
            State::Start
        } else {
            State::Text
        }
    }

    /// Returns the rest of the text, and the calls.
    pub(crate) fn finish(self) -> (String, Vec<ToolCall>) {
        let calls = match self.state {
            State::Held => self.read(),
            _ => None,
        };
        match calls.filter(|calls| !calls.is_empty()) {
            Some(mut calls) => {
                if !self.tools.is_parallel {
                    calls.truncate(1);
                }
                (String::new(), calls)
            }
            None => (self.pending, Vec::new()),
        }
    }

    fn read(&self) -> Option<Vec<ToolCall>> {
        let text = self.pending.trim();
        if let Some(form) = FORMS.iter().find(|form| text.starts_with(form.begin)) {
            return (form.read)(&self.tools, text);
        }
        match split_name(&self.tools, text) {
            Some((name, arguments)) => self.tools.named([(name, parse(arguments)?)]),
            None => self.tools.json(text),
        }
    }
}

impl Tools {
    /// Reads a JSON value: a single call or a list of calls.
    fn json(&self, text: &str) -> Option<Vec<ToolCall>> {
        match parse(text)? {
            Value::Array(list) if !list.is_empty() => {
                list.iter().map(|one| self.call(one)).collect()
            }
            one => Some(vec![self.call(&one)?]),
        }
    }

    /// Returns the calls of known tools by names and arguments.
    fn named<N: AsRef<str>, A: Into<Value>>(
        &self,
        calls: impl IntoIterator<Item = (N, A)>,
    ) -> Option<Vec<ToolCall>> {
        let calls = calls.into_iter().map(|(name, arguments)| {
            let arguments: Value = arguments.into();
            self.call(&json!({"name": name.as_ref(), "arguments": arguments}))
        });
        calls.collect()
    }

    /// Reads a call: an object with a known `name`, and `arguments` or, as Llama writes it, `parameters`.
    fn call(&self, value: &Value) -> Option<ToolCall> {
        let name = value.get("name")?.as_str()?;
        self.parameters(name)?;
        let arguments = value.get("arguments").or_else(|| value.get("parameters"));
        let arguments = match arguments {
            Some(Value::Object(object)) => Value::Object(object.clone()).to_string(),
            Some(Value::String(text)) => text.clone(),
            None => "{}".to_owned(),
            Some(_) => return None,
        };
        Some(ToolCall {
            name: name.to_owned(),
            arguments,
        })
    }
}

fn parse(text: &str) -> Option<Value> {
    serde_json::from_str(text.trim()).ok()
}

/// Returns the text between two marks; the last one may be missing if the model ended its text instead.
fn between<'t>(text: &'t str, begin: &str, end: &str) -> &'t str {
    let text = text.strip_prefix(begin).unwrap_or(text).trim();
    text.strip_suffix(end).unwrap_or(text)
}

/// Splits the name of a known tool from the arguments on the next line.
fn split_name<'t>(tools: &Tools, text: &'t str) -> Option<(&'t str, &'t str)> {
    let (name, arguments) = text.split_once('\n')?;
    let name = name.trim_end();
    let is_call = tools.parameters(name).is_some() && arguments.trim_start().starts_with('{');
    is_call.then_some((name, arguments))
}

/// Reads `<tool_call>…</tool_call>`, any number of times.
fn tagged(tools: &Tools, text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for block in text.split(TOOL_CALL).skip(1) {
        let call = block.split_once("</tool_call>");
        let call = call.map_or(block, |(call, _)| call);
        calls.extend(match qwen::read(call, |name| tools.parameters(name)) {
            Some(call) => tools.named([call])?,
            None => tools.json(call)?,
        });
    }
    Some(calls)
}

/// Reads `[TOOL_CALLS]` before a list of JSON objects or, since Mistral Small 3.2, before each
/// `name[ARGS]{…}` or `name{…}`.
fn mistral(tools: &Tools, text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for block in text.split(MISTRAL).skip(1) {
        let block = block.trim();
        if block.starts_with(['[', '{']) {
            calls.extend(tools.json(block)?);
            continue;
        }
        let (name, arguments) = block.split_at(block.find('{')?);
        let name = name.split('[').next().unwrap_or_default().trim();
        calls.extend(tools.named([(name, parse(arguments)?)])?);
    }
    Some(calls)
}

/// Reads `<|channel|>commentary to=functions.name<|message|>{…}`, any number of times.
fn harmony(tools: &Tools, text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    for block in text.split(HARMONY).skip(1) {
        let (recipient, arguments) = block.split_once("<|message|>")?;
        let name = recipient.strip_prefix("functions.")?;
        let arguments = match arguments.trim() {
            "" => Value::Object(Map::new()),
            text => parse(text)?,
        };
        calls.extend(tools.named([(name, arguments)])?);
    }
    Some(calls)
}
