use std::time::Duration;

use axum::http::Uri;
use overdrive_core::{check_at_least, check_option};
use overdrive_transformer::PoolingMode;

use crate::{ApiKey, Result};

/// The largest number of connections and of sequences. Tokio's semaphores hold an eighth of the integers; no server needs a
/// millionth of them.
const MOST: usize = 1 << 20;

/// The options of a [`Server`](crate::Server): its key and its limits.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The key that requests must carry, except those to `/health` and `/metrics`. Default `None`: no key is needed.
    pub api_key: Option<ApiKey>,
    /// The origins of the web pages that may use the server (CORS), such as `https://chat.example.org`; `*` stands for every
    /// page. Default none: a browser lets only pages of the server's own address read its answers.
    pub allowed_origins: Vec<String>,
    /// The largest number of open connections; requests on further ones are answered with 503, and the connection is
    /// closed. Default 512.
    pub max_connections: usize,
    /// The time within which the head of a request must arrive, counted from the connection or from the end of the last
    /// answer. An idle connection is closed after the same time. Default 30 seconds.
    pub header_timeout: Duration,
    /// The time after which the connection is closed if the client reads nothing of an answer that is ready; the rest
    /// of the answer is dropped. Default 30 seconds.
    pub write_timeout: Duration,
    /// The largest body of a request in bytes; a larger one is answered with 413. Default 4 MiB.
    pub max_body_bytes: usize,
    /// The largest `max_tokens` of a request, and the value for requests without one; a larger one is answered with
    /// 400. Default `None`: the context is the limit.
    pub max_tokens: Option<usize>,
    /// The largest `n`; a larger one is answered with 400. Default 128, as in OpenAI's API.
    pub max_choices: usize,
    /// The largest number of continuations (prompts times `n`) and embeddings that run or wait at once; further ones
    /// are answered with 429. One that has ended no longer counts, even if its client has not read the answer yet.
    /// Default 256.
    pub max_queue: usize,
    /// The longest time of a request, including the wait; a slower one is answered with 408. Default ten minutes.
    pub max_time: Duration,
    /// The time within which the body of a request must arrive; a slower one is answered with 408. Default 30 seconds.
    pub body_timeout: Duration,
    /// The time that the server waits after a signal for requests that have begun. Default 25 seconds, because Kubernetes
    /// kills a container after 30.
    pub drain_timeout: Duration,
    /// The pooling of the hidden states into embeddings. Default [`PoolingMode::LastToken`].
    pub pooling: PoolingMode,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            api_key: None,
            allowed_origins: Vec::new(),
            max_connections: 512,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            max_body_bytes: 4 << 20,
            max_tokens: None,
            max_choices: 128,
            max_queue: 256,
            max_time: Duration::from_secs(600),
            body_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(25),
            pooling: PoolingMode::LastToken,
        }
    }
}

impl ServerOptions {
    /// Returns the options for [`Server::run_batch`](crate::Server::run_batch): the defaults without the limits of time and
    /// of requests that wait.
    pub fn for_batch() -> Self {
        ServerOptions {
            max_body_bytes: usize::MAX,
            max_queue: MOST,
            // A year.
            max_time: Duration::from_secs(365 * 24 * 3600),
            ..ServerOptions::default()
        }
    }

    /// Checks every option against its range.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range.
    pub fn validate(&self) -> Result<()> {
        for origin in &self.allowed_origins {
            let expected =
                "`*`, or a scheme and a host without a path, such as https://chat.example.org";
            check_option(
                is_origin(origin),
                "allowed_origins",
                format!("{origin:?}"),
                expected,
            )?;
        }
        let valid = (1..=MOST).contains(&self.max_connections);
        let expected = format!("from 1 to {MOST}");
        check_option(valid, "max_connections", self.max_connections, expected)?;
        let seconds = self.header_timeout.as_secs_f64();
        check_option(seconds > 0.0, "header_timeout", seconds, "positive")?;
        let seconds = self.write_timeout.as_secs_f64();
        check_option(seconds > 0.0, "write_timeout", seconds, "positive")?;
        check_at_least("max_body_bytes", self.max_body_bytes, 1)?;
        check_at_least("max_tokens", self.max_tokens.unwrap_or(1), 1)?;
        check_at_least("max_choices", self.max_choices, 1)?;
        let valid = (1..=MOST).contains(&self.max_queue);
        let expected = format!("from 1 to {MOST}");
        Ok(check_option(valid, "max_queue", self.max_queue, expected)?)
    }
}

/// Returns `true` for what a browser sends as `Origin`, and for `*`.
fn is_origin(text: &str) -> bool {
    // Pages of files have the origin `null`.
    matches!(text, "*" | "null") || text.parse::<Uri>().is_ok_and(|uri| {
        let (scheme, host) = (uri.scheme_str(), uri.authority());
        // A path is more than an origin, also if it is only a slash.
        matches!((scheme, host), (Some(scheme), Some(host)) if text == format!("{scheme}://{host}"))
    })
}
