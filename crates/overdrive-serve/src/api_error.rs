//! The errors of single requests, with OpenAI's error body.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error that is sent to the client.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            code: Some(code),
            param: None,
            message: message.into(),
        }
    }

    /// Returns the error for an invalid field of the request.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            code: None,
            param: Some(param.into()),
            message: message.into(),
        }
    }

    /// Returns the error for a field whose value is out of range.
    pub(crate) fn range(param: &str, value: impl std::fmt::Display, expected: &str) -> Self {
        ApiError::field(
            param,
            format!("`{param}` is {value}; it must be {expected}"),
        )
    }

    /// Returns the error for a request that does not fit the context of `limit` tokens; `found` is the rest of the
    /// sentence. It begins with OpenAI's words, because clients that shorten a conversation or choose another model
    /// (LiteLLM, agents) recognize the case by them and not by its code.
    pub(crate) fn context(param: &str, limit: usize, found: std::fmt::Arguments<'_>) -> Self {
        let message = format!("this model's maximum context length is {limit} tokens, {found}");
        ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::field(param, message)
        }
    }

    /// Returns `true` if the error is about the field `param`.
    pub(crate) fn names(&self, param: &str) -> bool {
        self.param.as_deref() == Some(param)
    }

    /// Returns the message.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn with_param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// Returns the error for a failure of the server that the client cannot avoid.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// Returns the body: OpenAI's error object.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            408 => "timeout_error",
            status if status >= 500 => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // OpenAI's clients retry after a 408, and the retry would take just as long.
            StatusCode::REQUEST_TIMEOUT => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
            _ => {}
        }
        response
    }
}

pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], value.to_string()).into_response()
}

impl From<overdrive_generation::Error> for ApiError {
    fn from(error: overdrive_generation::Error) -> Self {
        use overdrive_generation::Error as E;
        let message = error.to_string();
        let field = |param: &str| ApiError::field(param, message.clone());
        match error {
            E::Common(overdrive_core::Error::InvalidOption { option, .. }) => {
                field(name_in_requests(&option))
            }
            E::PromptTooLong { .. } | E::RequestTooLarge { .. } => ApiError {
                code: Some("context_length_exceeded"),
                ..field("max_tokens")
            },
            E::EmptyPrompt { .. } | E::TokenOutOfRange { .. } | E::Tokenizer(_) => field("prompt"),
            E::NotInEngine { key, .. } => field(name_in_requests(key)),
            E::Incompatible { .. } | E::NothingAllowed { .. } => ApiError {
                param: None,
                ..field("")
            },
            E::Constraint(_) => field("response_format"),
            E::ChatTemplate(_) | E::Conversation(_) => field("messages"),
            E::EngineStopped => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "engine_stopped",
                message.clone(),
            ),
            _ => ApiError::internal(message),
        }
    }
}

/// Returns the name that OpenAI's API has for an option of the generation config.
fn name_in_requests(option: &str) -> &str {
    match option {
        "max_new_tokens" => "max_tokens",
        "num_return_sequences" => "n",
        "stop_strings" => "stop",
        other => other,
    }
}
