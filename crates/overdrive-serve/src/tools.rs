//! The schema of an answer, and the tools that the model may call.

use overdrive_constraints::GrammarConstraint;
use overdrive_generation::{ChatTemplate, Constraint};
use serde_json::{Map, Value, json};

use crate::api_error::{ApiError, ApiResult};
use crate::fields::{Fields, shorten};
use crate::shared::Shared;
use crate::{gemma4_calls, qwen_calls};

/// The mark that begins a call in models of the Hermes and Qwen families.
const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";
/// The marks of all families.
const MARKS: [&str; 2] = [BEGIN, gemma4_calls::BEGIN];

/// The JSON schema that an answer must fit.
#[derive(Debug)]
pub(crate) struct Schema {
    schema: Value,
    /// The field of the request that it comes from.
    param: &'static str,
}

impl Schema {
    /// Compiles the schema.
    pub(crate) fn constraint(self, shared: &Shared) -> ApiResult<Box<dyn Constraint>> {
        let wrong = |error| ApiError::from(error).with_param(self.param);
        let constraint = GrammarConstraint::json_schema(shared.grammar()?, &self.schema);
        Ok(Box::new(constraint.map_err(wrong)?))
    }
}

/// Takes `response_format`.
pub(crate) fn response_format(fields: &mut Fields) -> ApiResult<Option<Schema>> {
    let param = "response_format";
    let format = fields.take::<Map<String, Value>>(param)?;
    let format = format.map(|format| {
        let inner = format.get("json_schema").cloned();
        answer_format(format, inner, param)
    });
    Ok(format.transpose()?.flatten())
}

/// Returns the schema of the format of an answer; `inner` is the object that has the schema.
pub(crate) fn answer_format(
    format: Map<String, Value>,
    inner: Option<Value>,
    param: &'static str,
) -> ApiResult<Option<Schema>> {
    let kind = format.get("type").and_then(Value::as_str);
    let schema = |schema: Value| Schema { schema, param };
    match kind {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(schema(json!({"type": "object"})))),
        Some("json_schema") => {
            let given = inner.as_ref().and_then(|given| given.get("schema"));
            let missing = || {
                let message = format!(
                    "`{param}` is of type json_schema and has no `schema`; it is the schema of the answer"
                );
                ApiError::field(param, message)
            };
            Ok(Some(schema(given.cloned().ok_or_else(missing)?)))
        }
        _ => {
            let found = shorten(&Value::Object(format).to_string());
            let expected = "an object whose `type` is text, json_object or json_schema";
            Err(ApiError::range(param, found, expected))
        }
    }
}

/// The tools of a request.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// The tools, in the form that the template reads.
    pub(crate) list: Vec<Value>,
    /// The names of the tools and the schemas of their parameters.
    functions: Vec<(String, Value)>,
    is_parallel: bool,
}

/// The tools of a request, and the schema of the answer if it must be a call.
pub(crate) type ToolChoice = (Option<Tools>, Option<Schema>);

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`.
    pub(crate) fn take(fields: &mut Fields, template: &ChatTemplate) -> ApiResult<ToolChoice> {
        let list: Vec<Value> = fields.take("tools")?.unwrap_or_default();
        let choice: Option<Value> = fields.take("tool_choice")?;
        let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        if list.is_empty() {
            return match choice.as_ref().map(|choice| choice.as_str()) {
                None | Some(Some("none" | "auto")) => Ok((None, None)),
                _ => {
                    let message = "`tool_choice` is set without `tools`; give at least one tool";
                    Err(ApiError::field("tool_choice", message))
                }
            };
        }
        if !has_tools(template) {
            let message = "`tools` is set, and this model's chat template does not support tools; leave it out";
            return Err(ApiError::field("tools", message));
        }
        let functions = list.iter().map(function).collect::<ApiResult<Vec<_>>>()?;
        let tools = Tools {
            list,
            functions,
            is_parallel,
        };
        let invalid = |choice: &Value| {
            let expected =
                "none, auto, required, or an object of type function with the name of a tool";
            ApiError::range("tool_choice", shorten(&choice.to_string()), expected)
        };
        match &choice {
            None => Ok((Some(tools), None)),
            Some(Value::String(name)) => match name.as_str() {
                "none" => Ok((None, None)),
                "auto" => Ok((Some(tools), None)),
                "required" => {
                    let schema = tools.schema(|_| true);
                    Ok((Some(tools), Some(schema)))
                }
                _ => Err(invalid(&Value::String(name.clone()))),
            },
            Some(choice) => {
                let name = choice.pointer("/function/name").and_then(Value::as_str);
                let known = name.filter(|name| tools.functions.iter().any(|(own, _)| own == name));
                let name = known.ok_or_else(|| invalid(choice))?;
                let schema = tools.schema(|own| own == name);
                Ok((Some(tools), Some(schema)))
            }
        }
    }

    /// Returns the schema of one call of one of the chosen functions.
    fn schema(&self, is_chosen: impl Fn(&str) -> bool) -> Schema {
        let chosen = self.functions.iter().filter(|(name, _)| is_chosen(name));
        let calls = chosen.enumerate().map(|(index, (name, parameters))| {
            let mut arguments = parameters.clone();
            move_references(
                &mut arguments,
                &format!("#/anyOf/{index}/properties/arguments"),
            );
            json!({
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": false,
            })
        });
        Schema {
            schema: json!({"anyOf": calls.collect::<Vec<_>>()}),
            param: "tools",
        }
    }

    /// Returns the schema of the parameters of a function.
    fn parameters(&self, name: &str) -> Option<&Value> {
        let mut functions = self.functions.iter();
        let (_, parameters) = functions.find(|(own, _)| own == name)?;
        Some(parameters)
    }

    /// Reads the calls in a JSON value: a single call or a list of calls.
    fn calls(&self, value: &Value) -> Option<Vec<ToolCall>> {
        match value {
            Value::Array(list) if !list.is_empty() => {
                list.iter().map(|one| self.call(one)).collect()
            }
            one => Some(vec![self.call(one)?]),
        }
    }

    /// Reads a call: an object with a known `name`, and `arguments` or, as Llama writes it, `parameters`.
    fn call(&self, value: &Value) -> Option<ToolCall> {
        let name = value.get("name")?.as_str()?;
        if !self.functions.iter().any(|(own, _)| own == name) {
            return None;
        }
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

/// Rewrites the references of a schema, which are relative to its root, for its place in a larger schema.
fn move_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object {
                match value {
                    Value::String(target) if key == "$ref" => {
                        if target == "#" || target.starts_with("#/") {
                            target.replace_range(..1, root);
                        }
                    }
                    value => move_references(value, root),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|one| move_references(one, root)),
        _ => {}
    }
}

/// Returns `true` if a chat template of the model supports tools.
fn has_tools(template: &ChatTemplate) -> bool {
    template.names().any(|name| {
        let source = template.source(name);
        name == "tool_use" || source.is_some_and(|source| source.contains("tools"))
    })
}

fn function(tool: &Value) -> ApiResult<(String, Value)> {
    let wrong = || {
        let expected =
            "a list of {\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": …}}";
        ApiError::range(
            "tools",
            format!("a list with {}", shorten(&tool.to_string())),
            expected,
        )
    };
    let function = tool.get("function").ok_or_else(wrong)?;
    let name = function
        .get("name")
        .and_then(Value::as_str)
        .ok_or_else(wrong)?;
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object"}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong()),
    };
    Ok((name.to_owned(), parameters))
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    pub(crate) name: String,
    /// The arguments as JSON text.
    pub(crate) arguments: String,
}

/// Separates the text of an answer from its tool calls.
///
/// It reads four forms: any number of `<tool_call>{"name": …, "arguments": …}</tool_call>` after a text (Hermes,
/// Qwen), of `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5) or
/// of `<|tool_call>call:name{…}<tool_call|>` (Gemma 4), and an answer that is a JSON object with a `name` or a list of such
/// objects (Llama, Mistral, and every model whose answer is constrained by a schema). Text that may begin a call is held back until that is certain; malformed
/// calls and calls of unknown tools are text.
#[derive(Debug)]
pub(crate) struct ToolReader {
    tools: Tools,
    pending: String,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space so far.
    Start,
    /// Text; its end may be the beginning of a mark.
    Text,
    /// The rest of the answer may be calls.
    Held,
}

impl ToolReader {
    pub(crate) fn new(tools: Tools) -> ToolReader {
        ToolReader {
            tools,
            pending: String::new(),
            state: State::Start,
        }
    }

    /// Appends a piece of the answer, and returns the text that certainly belongs to no call.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        self.pending.push_str(piece);
        if self.state == State::Start {
            self.state = match self.pending.trim_start().chars().next() {
                None => return String::new(),
                Some('{' | '[') => State::Held,
                Some(_) => State::Text,
            };
        }
        if self.state == State::Held {
            return String::new();
        }
        let marks = MARKS.iter().filter_map(|mark| self.pending.find(mark));
        let end = match marks.min() {
            Some(start) => {
                self.state = State::Held;
                // The line break before a call belongs to it.
                self.pending[..start].trim_end().len()
            }
            None => self.certain(),
        };
        let rest = self.pending.split_off(end);
        std::mem::replace(&mut self.pending, rest)
    }

    /// Returns the number of leading bytes that belong neither to a mark nor to the white space before one.
    fn certain(&self) -> usize {
        let pending = &self.pending;
        let begun = |mark: &&str| {
            (1..mark.len())
                .rev()
                .find(|&n| pending.ends_with(&mark[..n]))
        };
        let mark = MARKS.iter().filter_map(begun).max();
        let end = pending.len() - mark.unwrap_or(0);
        pending[..end].trim_end().len()
    }

    /// Returns the rest of the text, and the calls.
    pub(crate) fn finish(self) -> (String, Vec<ToolCall>) {
        let calls = match self.state {
            State::Held => self.read(),
            _ => None,
        };
        match calls {
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
        let parse = |text: &str| {
            let value = serde_json::from_str(text.trim()).ok()?;
            self.tools.calls(&value)
        };
        if self.pending.trim_start().starts_with(gemma4_calls::BEGIN) {
            let calls = gemma4_calls::read(&self.pending)?.into_iter();
            let calls = calls.map(|(name, arguments)| {
                self.tools
                    .call(&json!({"name": name, "arguments": arguments}))
            });
            return calls.collect();
        }
        let Some(blocks) = self.pending.trim_start().strip_prefix(BEGIN) else {
            return parse(&self.pending);
        };
        let mut calls = Vec::new();
        for block in blocks.split(BEGIN) {
            // The last closing mark may be missing if the model ended its text instead.
            let call = block.split_once(END).map_or(block, |(call, _)| call);
            match qwen_calls::read(call, |name| self.tools.parameters(name)) {
                Some((name, arguments)) => calls.push(
                    self.tools
                        .call(&json!({"name": name, "arguments": arguments}))?,
                ),
                None => calls.extend(parse(call)?),
            }
        }
        Some(calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(is_parallel: bool) -> Tools {
        let list = vec![
            json!({"type": "function", "function": {"name": "weather"}}),
            json!({"type": "function", "function": {"name": "time"}}),
        ];
        let functions = list.iter().map(|tool| function(tool).unwrap()).collect();
        Tools {
            list,
            functions,
            is_parallel,
        }
    }

    /// Reads an answer in one piece, and character by character, which must not matter.
    fn read(text: &str, is_parallel: bool) -> (String, Vec<ToolCall>) {
        let by = |pieces: Vec<String>| {
            let mut reader = ToolReader::new(tools(is_parallel));
            let mut shown: String = pieces.iter().map(|piece| reader.push(piece)).collect();
            let (rest, calls) = reader.finish();
            shown.push_str(&rest);
            (shown, calls)
        };
        let whole = by(vec![text.to_owned()]);
        let letters = by(text.chars().map(String::from).collect());
        assert_eq!(whole, letters, "{text:?}");
        whole
    }

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        }
    }

    #[test]
    fn calls_are_read_in_each_form_and_the_rest_is_text() {
        let paris = call("weather", r#"{"city":"Paris"}"#);
        let hermes = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
                      <tool_call>{\"name\": \"time\"}";
        let both = vec![paris.clone(), call("time", "{}")];
        assert_eq!(read(hermes, true), ("Let me see.".to_owned(), both.clone()));
        assert_eq!(read(hermes, false).1, std::slice::from_ref(&paris));
        let llama = " {\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}";
        assert_eq!(read(llama, true), (String::new(), vec![paris.clone()]));
        let mistral = r#"[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": "{}"}]"#;
        assert_eq!(read(mistral, true), (String::new(), both.clone()));
        let coder = "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n\
                     </tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
        assert_eq!(read(coder, true), ("Let me see.".to_owned(), both.clone()));
        let gemma = "Let me see.\n<|tool_call>call:weather{city:<|\"|>Paris<|\"|>}<tool_call|>\
                     <|tool_call>call:time{}<tool_call|>";
        assert_eq!(read(gemma, true), ("Let me see.".to_owned(), both));
        for text in [
            "No tools < here <tool.  ",
            "{\"name\": \"unknown\", \"arguments\": {}}",
            "{\"a\": 1}",
            "[]",
            "{\"name\": \"weather\", \"argum",
            "<tool_call>{\"name\": \"time\"}</tool_call><tool_call>oh</tool_call>",
            "<|tool_call>call:unknown{}<tool_call|>",
            "<|tool_call>call:time{",
            "a <| b <|tool",
            "  ",
            "",
        ] {
            assert_eq!(read(text, true), (text.to_owned(), vec![]));
        }
    }

    #[test]
    fn text_is_shown_as_soon_as_it_is_certain() {
        let mut reader = ToolReader::new(tools(true));
        assert_eq!(reader.push("Hello <to"), "Hello");
        assert_eq!(reader.push("ast> a"), " <toast> a");
        assert_eq!(reader.push("  <tool_call>{"), "");
        assert_eq!(reader.push("\"name\": \"time\"}"), "");
        assert_eq!(reader.finish(), (String::new(), vec![call("time", "{}")]));
    }
}
