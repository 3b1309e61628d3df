//! Files of requests in OpenAI's batch format.

use std::collections::HashMap;
use std::io::BufRead;

use axum::BoxError;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, header};
use futures_util::{StreamExt, stream};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use overdrive_core::text::{Lines, expected_by_serde, in_one_line};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::routes::{batch_routes, router};
use crate::server::runtime;
use crate::shared::Shared;
use crate::{Error, Result, Server};

/// The number of requests that are answered at once; the engine batches what its `max_num_seqs` allows.
const AT_ONCE: usize = 512;

/// A line of a file of requests in [OpenAI's batch format](https://platform.openai.com/docs/guides/batch).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct BatchRequest {
    /// The name of the request in the file.
    pub custom_id: String,
    /// The HTTP method, which is POST.
    pub method: String,
    /// The route, such as `/v1/chat/completions`.
    pub url: String,
    /// The fields of the request.
    pub body: Map<String, Value>,
}

impl BatchRequest {
    /// Reads the requests of a file in JSON Lines, whose `name` is in errors. Empty lines are skipped.
    ///
    /// # Errors
    /// [`Error::Batch`] with the line that is not JSON, lacks a field, has another method than POST, a route that takes no
    /// requests of a batch, `stream`, or the `custom_id` of an earlier line; [`Error::Common`] if the file cannot be read.
    ///
    /// ```
    /// use overdrive_serve::BatchRequest;
    ///
    /// let file = r#"{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}"#;
    /// let requests = BatchRequest::read(file.as_bytes(), "requests.jsonl")?;
    /// assert_eq!(requests[0].body["prompt"], "Hi");
    ///
    /// let error = BatchRequest::read(&b"\n{\"method\": \"POST\"}"[..], "requests.jsonl").unwrap_err();
    /// assert_eq!(error.to_string(), "requests.jsonl, line 2: missing field `custom_id`");
    /// # Ok::<(), overdrive_serve::Error>(())
    /// ```
    pub fn read(reader: impl BufRead, name: &str) -> Result<Vec<BatchRequest>> {
        let mut requests: Vec<BatchRequest> = Vec::new();
        let mut seen: HashMap<String, usize> = HashMap::new();
        for (number, line) in (1..).zip(Lines::new(reader, name)) {
            let line = line?;
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |problem: String| Error::Batch {
                file: name.to_owned(),
                line: number,
                problem,
            };
            let request = BatchRequest::parse(&line).map_err(wrong)?;
            if let Some(first) = seen.insert(request.custom_id.clone(), number) {
                let id = &request.custom_id;
                return Err(wrong(format!(
                    "`custom_id` is {id:?}, as in line {first}; each request needs its own"
                )));
            }
            requests.push(request);
        }
        Ok(requests)
    }

    fn parse(line: &str) -> std::result::Result<BatchRequest, String> {
        let mut json = serde_json::Deserializer::from_str(line);
        let request: BatchRequest =
            serde_path_to_error::deserialize(&mut json).map_err(|error| {
                let (path, message) = (error.path().to_string(), error.inner().to_string());
                // The place of a value is its path; only a mistake in the JSON itself needs a column.
                let place = message
                    .rfind(" at line ")
                    .filter(|_| error.inner().is_data());
                let message = &message[..place.unwrap_or(message.len())];
                match expected_by_serde(message) {
                    Some(expected) if path != "." => format!("`{path}` must be {expected}"),
                    _ => in_one_line(message),
                }
            })?;
        json.end()
            .map_err(|error| in_one_line(&error.to_string()))?;
        if request.method != Method::POST.as_str() {
            return Err(format!(
                "`method` is {:?}; it must be \"POST\"",
                request.method
            ));
        }
        let routes = batch_routes();
        if !routes.contains(&request.url.as_str()) {
            let (url, routes) = (&request.url, routes.join(", "));
            return Err(format!("`url` is {url:?}; it must be one of {routes}"));
        }
        if request
            .body
            .get("stream")
            .is_some_and(|stream| *stream != Value::Bool(false) && !stream.is_null())
        {
            return Err(
                "`body.stream` is set, and an answer in a file is not streamed; leave it out"
                    .to_owned(),
            );
        }
        Ok(request)
    }
}

/// The numbers of answers to the requests of a file (OpenAI's `request_counts`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchCounts {
    /// The requests with the status 200.
    pub completed: usize,
    /// The others, whose answers have an error.
    pub failed: usize,
}

impl Server {
    /// Answers requests of a file instead of a network's, as vLLM's `run-batch` does. `on_answer` gets the line of each, in
    /// the order of the requests, as soon as it and all earlier ones are answered: `custom_id`, and `response` with
    /// `status_code`, `request_id` and `body`. Requests that are refused have the error in `body`, and the others are
    /// answered.
    ///
    /// The options of the server should be those of [`ServerOptions::for_batch`](crate::ServerOptions::for_batch).
    ///
    /// # Errors
    /// The error of `on_answer`, as [`Error::Answer`]; [`Error::System`] if the system refuses threads.
    pub fn run_batch<E: Into<BoxError>>(
        self,
        requests: Vec<BatchRequest>,
        mut on_answer: impl FnMut(Value) -> std::result::Result<(), E>,
    ) -> Result<BatchCounts> {
        let shared = self.into_shared();
        let routes = TowerToHyperService::new(router(shared.clone()));
        let mut counts = BatchCounts::default();
        runtime()?.block_on(async {
            let requests = stream::iter(requests);
            let answers = requests.map(|request| answer(&routes, &shared, request));
            let mut answers = std::pin::pin!(answers.buffered(AT_ONCE));
            while let Some(answer) = answers.next().await {
                match answer["response"]["status_code"] == 200 {
                    true => counts.completed += 1,
                    false => counts.failed += 1,
                }
                on_answer(answer).map_err(|error| Error::Answer(error.into()))?;
            }
            Ok(counts)
        })
    }
}

/// Returns the line of the answer to a request.
async fn answer(
    routes: &TowerToHyperService<axum::Router>,
    shared: &Shared,
    request: BatchRequest,
) -> Value {
    let BatchRequest {
        custom_id,
        url,
        body,
        ..
    } = request;
    let text = Value::Object(body).to_string();
    let answered = async {
        let request = Request::post(url).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(text))?;
        let Ok(response) = routes.call(request).await;
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await?;
        let body: Value = serde_json::from_slice(&body)?;
        Ok(json!({"status_code": status, "request_id": shared.id("req"), "body": body}))
    };
    let answered: std::result::Result<Value, BoxError> = answered.await;
    let (response, error) = match answered {
        Ok(response) => (response, Value::Null),
        Err(error) => {
            let message = format!("internal error: {error}");
            (
                Value::Null,
                json!({"code": "internal_error", "message": message}),
            )
        }
    };
    json!({"id": shared.id("batch_req"), "custom_id": custom_id, "response": response, "error": error})
}
