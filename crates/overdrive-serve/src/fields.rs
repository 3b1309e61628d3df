//! The body of a request as an object whose fields are taken one by one.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use futures_util::StreamExt;
use overdrive_core::text::expected_by_serde;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use crate::ServerOptions;
use crate::api_error::{ApiError, ApiResult};

/// The fields of a request. Those that are never taken are ignored, as vLLM does: clients send many that only
/// OpenAI's own service reads.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads the body of a request within the server's limits.
    pub(crate) async fn read(request: Request, options: &ServerOptions) -> ApiResult<Fields> {
        let kind = request.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        // A web page can send requests of other types to this machine without a CORS preflight.
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            let message = format!("`Content-Type` is {kind:?}; it must be application/json");
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Err(ApiError::new(status, "unsupported_media_type", message));
        }
        let coding = request.headers().get(header::CONTENT_ENCODING);
        if let Some(coding) =
            coding.filter(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
        {
            let message = format!("`Content-Encoding` is {coding:?}; send the body uncompressed");
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Err(ApiError::new(status, "unsupported_media_type", message));
        }
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let most = options.max_body_bytes;
        if length.is_some_and(|length| length > most as u64) {
            return Err(too_large(most));
        }
        let body = collect(request.into_body(), most);
        let bytes = tokio::time::timeout(options.body_timeout, body)
            .await
            .map_err(|_| {
                let limit = options.body_timeout.as_secs_f64();
                let message = format!(
                    "the body did not arrive within {limit} seconds (`body_timeout`); send it faster"
                );
                ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
            })??;
        Fields::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> ApiResult<Fields> {
        let invalid = |what: String| {
            let message = format!("the body is not a JSON object: {what}");
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message)
        };
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(invalid("it is another JSON value".to_owned())),
            Err(error) => Err(invalid(error.to_string())),
        }
    }

    /// Takes a field; `None` if it is absent or null. An integer may be written as a number without a fraction, as in
    /// vLLM: some clients write every number as a float, such as 16.0.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> ApiResult<Option<T>> {
        let Some(value) = self.0.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        serde_path_to_error::deserialize(&value)
            .or_else(|error| {
                let whole = whole(&value).and_then(|whole| T::deserialize(whole).ok());
                // As text only here: a field may be a conversation with its images.
                whole.ok_or_else(|| wrong_type(name, &shorten(&value.to_string()), &error))
            })
            .map(Some)
    }

    /// Returns a field that is not taken.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Sets a field, for a route whose fields have the meaning of another one's in another form.
    pub(crate) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_owned(), value.into());
    }

    /// Takes a required field.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, name: &str) -> ApiResult<T> {
        let missing = || ApiError::field(name, format!("`{name}` is missing; it is required"));
        self.take(name)?.ok_or_else(missing)
    }

    /// Refuses fields that would change the answer and are not supported, unless they have a neutral value.
    pub(crate) fn refuse(&mut self, names: &[&str]) -> ApiResult<()> {
        for name in names {
            if let Some(value) = self.take::<Value>(name)? {
                let neutral = matches!(&value, Value::Bool(false))
                    || value.as_array().is_some_and(Vec::is_empty)
                    || value.as_str().is_some_and(str::is_empty);
                if !neutral {
                    let value = shorten(&value.to_string());
                    let message = format!(
                        "`{name}` is {value}, and this server does not support it; leave it out"
                    );
                    return Err(ApiError::field(*name, message));
                }
            }
        }
        Ok(())
    }
}

/// Returns the integer, or the list of integers, that is written with a point or an exponent.
fn whole(value: &Value) -> Option<Value> {
    // Beyond, a float does not tell one integer from the next.
    const MOST: f64 = 9_007_199_254_740_991.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64()?;
            let is_whole = number.fract() == 0.0 && number.abs() <= MOST;
            is_whole.then(|| Value::from(number as i64))
        }
        Value::Array(list) if list.iter().any(Value::is_f64) => {
            let one = |value: &Value| whole(value).unwrap_or_else(|| value.clone());
            Some(list.iter().map(one).collect())
        }
        _ => None,
    }
}

/// Returns the error of the field `name` whose value, shown as `shown`, has another type.
fn wrong_type(
    name: &str,
    shown: &str,
    error: &serde_path_to_error::Error<serde_json::Error>,
) -> ApiError {
    let (path, message) = (error.path(), error.inner().to_string());
    let inside = path.iter().next().map(|first| match first {
        Segment::Seq { .. } => format!("{name}{path}"),
        _ => format!("{name}.{path}"),
    });
    match (expected_by_serde(&message), inside) {
        (Some(expected), None) => ApiError::range(name, shown, expected),
        (Some(expected), Some(inside)) => {
            let message = format!("`{name}` is {shown}; `{inside}` must be {expected}");
            ApiError::field(name, message)
        }
        (None, _) => ApiError::field(name, format!("`{name}` is {shown}: {message}")),
    }
}

/// Returns the beginning of a value, so that an error does not repeat a whole prompt.
pub(crate) fn shorten(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

async fn collect(body: Body, most: usize) -> ApiResult<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            let message = format!("the body ended early: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", message)
        })?;
        if bytes.len() + chunk.len() > most {
            return Err(too_large(most));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn too_large(most: usize) -> ApiError {
    let message = format!(
        "the body is larger than {most} bytes (`max_body_bytes`); shorten it, or start the server with a larger limit"
    );
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_field_is_named_with_its_value() {
        let mut fields =
            Fields::parse(br#"{"n": "two", "seed": null, "m": 3, "best_of": 2}"#).unwrap();
        let error = fields.take::<usize>("n").unwrap_err().body();
        assert_eq!(error["error"]["param"], "n");
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(message, "`n` is \"two\"; it must be a non-negative integer");
        assert_eq!(fields.take::<u64>("seed").unwrap(), None);
        assert_eq!(fields.require::<u64>("m").unwrap(), 3);
        assert!(fields.require::<u64>("m").is_err());
        assert!(fields.refuse(&["echo", "best_of"]).is_err());
        assert!(Fields::parse(b"[1]").is_err() && Fields::parse(b"{").is_err());
    }

    #[test]
    fn an_integer_may_be_written_as_a_float_without_a_fraction() {
        let body = br#"{"n": 2.0, "ids": [1, 2e1], "t": 1.0, "seed": -3.0, "m": -1.0, "x": 1.5, "big": 1e300}"#;
        let mut fields = Fields::parse(body).unwrap();
        assert_eq!(fields.take::<usize>("n").unwrap(), Some(2));
        assert_eq!(fields.take::<Vec<i64>>("ids").unwrap(), Some(vec![1, 20]));
        assert_eq!(fields.take::<f64>("t").unwrap(), Some(1.0));
        assert_eq!(fields.take::<i64>("seed").unwrap(), Some(-3));
        for wrong in ["m", "x", "big"] {
            let error = fields.take::<usize>(wrong).unwrap_err();
            assert!(error.message().ends_with("a non-negative integer"));
        }
    }

    #[test]
    fn a_wrong_part_of_a_field_is_named_without_types_of_rust() {
        let mut fields = Fields::parse(br#"{"t": "x", "ids": [1, "x"], "list": 3}"#).unwrap();
        let message = |taken: ApiResult<()>| taken.unwrap_err().message().to_owned();
        assert_eq!(
            message(fields.take::<f64>("t").map(drop)),
            "`t` is \"x\"; it must be a number"
        );
        assert_eq!(
            message(fields.take::<Vec<i64>>("ids").map(drop)),
            "`ids` is [1,\"x\"]; `ids[1]` must be an integer"
        );
        assert_eq!(
            message(fields.take::<Vec<i64>>("list").map(drop)),
            "`list` is 3; it must be a list"
        );
    }
}
