//! The schema of an answer, and the tools that the model may call; `call_parser` reads the calls in the form of each family.

use overdrive_constraints::GrammarConstraint;
use overdrive_generation::{ChatTemplate, Constraint, Error};
use serde_json::{Map, Value, json};

use crate::api_error::{ApiError, ApiResult};
use crate::fields::{Fields, shorten};
use crate::shared::Shared;

mod call_parser;
mod deepseek;
mod gemma4;
mod pythonic;
mod qwen;
#[cfg(test)]
mod tests;

pub(crate) use call_parser::ToolCallParser;

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
        let param = self.param;
        let wrong = |error| match error {
            Error::Constraint(why) => {
                let message = format!("`{param}` has a schema that cannot be enforced: {why}");
                ApiError::field(param, message)
            }
            error => ApiError::from(error).with_param(param),
        };
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
        let mut tools = Tools {
            list,
            functions,
            is_parallel,
        };
        let invalid = |choice: &Value| {
            let expected = "none, auto, required, an object of type function with the name of a tool, \
                            or one of type allowed_tools with its mode (auto, required) and names of tools";
            ApiError::range("tool_choice", shorten(&choice.to_string()), expected)
        };
        let choice = match choice {
            Some(choice) if choice["type"] == "allowed_tools" => {
                Some(tools.allow(&choice).ok_or_else(|| invalid(&choice))?)
            }
            choice => choice,
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

    /// Keeps the tools that a choice of type `allowed_tools` names, and returns its mode; `None` if the choice is invalid.
    fn allow(&mut self, choice: &Value) -> Option<Value> {
        fn name(tool: &Value) -> Option<&str> {
            tool.pointer("/function/name")?.as_str()
        }
        let allowed = choice.get("allowed_tools")?;
        let mode = allowed
            .get("mode")
            .filter(|mode| *mode == "auto" || *mode == "required")?;
        let tools = allowed.get("tools")?.as_array()?.iter();
        let names: Vec<&str> = tools.map(name).collect::<Option<_>>()?;
        let are_known = names.iter().all(|name| self.parameters(name).is_some());
        if names.is_empty() || !are_known {
            return None;
        }
        self.list
            .retain(|tool| name(tool).is_some_and(|name| names.contains(&name)));
        self.functions
            .retain(|(name, _)| names.contains(&name.as_str()));
        Some(mode.clone())
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
