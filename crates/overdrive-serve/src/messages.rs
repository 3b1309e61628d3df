//! The messages of a chat, as the model's template reads them.

use overdrive_generation::{ChatTemplate, Error, Message};
use serde_json::{Map, Value};

use crate::api_error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::images;
use crate::shared::Shared;

/// The messages of a chat, and its images.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    /// The files of the images, in the order of their parts.
    pub(crate) images: Vec<Vec<u8>>,
}

/// Takes the messages in the field `name`.
///
/// Templates expect `content` to be a string and `arguments` to be an object; OpenAI's API also allows a list of parts
/// and JSON text, which are converted. The content of a message with images stays a list of parts, as the templates of
/// models with images expect it; they are refused by a model that sees none. The role `developer` becomes `system`, its older
/// name, unless the template knows it.
pub(crate) fn take(
    fields: &mut Fields,
    name: &str,
    template: &ChatTemplate,
    shared: &Shared,
) -> ApiResult<Conversation> {
    let messages: Vec<Map<String, Value>> = fields.require(name)?;
    if messages.is_empty() {
        let expected = "a list with at least one message";
        return Err(ApiError::range(name, "[]", expected));
    }
    let knows_developer = template.names().any(|name| {
        let source = template.source(name);
        source.is_some_and(|source| source.contains("developer"))
    });
    let mut files = Vec::new();
    let message = |(index, mut fields): (usize, Map<String, Value>)| {
        let param = format!("{name}[{index}]");
        match fields.get("role").and_then(Value::as_str) {
            None => {
                let message = format!("`{param}.role` must be a string, such as \"user\"");
                return Err(ApiError::field(name, message));
            }
            Some("developer") if !knows_developer => {
                fields.insert("role".to_owned(), "system".into());
            }
            Some(_) => {}
        }
        let own = match fields.get_mut("content") {
            Some(content) if shared.sees_images() => images::take(content, &param),
            _ => Ok(Vec::new()),
        };
        let own = own.map_err(|message| ApiError::field(name, message))?;
        let has_images = !own.is_empty();
        files.extend(own);
        // Some servers answer with an empty list; to templates, a message with this key calls tools.
        if fields
            .get("tool_calls")
            .and_then(Value::as_array)
            .is_some_and(Vec::is_empty)
        {
            fields.shift_remove("tool_calls");
        }
        if let Some(calls) = fields.get_mut("tool_calls") {
            parse_arguments(calls, &param).map_err(|message| ApiError::field(name, message))?;
        }
        let message = Message::from(fields);
        if message.lacks_content() {
            let message = format!(
                "`{param}.content` is missing or null; it must be a string or a list of parts"
            );
            return Err(ApiError::field(name, message));
        }
        if has_images {
            return Ok(message);
        }
        message.with_text().map_err(|error| match error {
            Error::MessageContent(what) => {
                ApiError::field(name, format!("`{param}.content` {what}"))
            }
            other => other.into(),
        })
    };
    let messages = messages.into_iter().enumerate().map(message);
    Ok(Conversation {
        messages: messages.collect::<ApiResult<_>>()?,
        images: files,
    })
}

/// Parses the arguments of the calls in an earlier answer. The error is its message.
fn parse_arguments(calls: &mut Value, param: &str) -> Result<(), String> {
    let Value::Array(calls) = calls else {
        return Ok(());
    };
    for call in calls {
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Value::String(text) = arguments
        {
            // Some clients send an empty text instead of no arguments.
            let text = if text.trim().is_empty() { "{}" } else { text };
            let parsed = serde_json::from_str::<Value>(text).map_err(|error| {
                format!("`{param}.tool_calls` has arguments that are not JSON: {error}")
            })?;
            *arguments = parsed;
        }
    }
    Ok(())
}
