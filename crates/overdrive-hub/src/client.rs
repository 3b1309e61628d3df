//! Requests in the hub's protocol.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::hash::Checksum;
use crate::name::{HubName, is_commit};
use crate::{Error, HubOptions, Result};

const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');
const PATH: &AsciiSet = &SEGMENT.remove(b'/');
const MAX_REDIRECTS: usize = 10;
/// The longest list of files that is read, in bytes.
const MAX_LISTING: u64 = 64 << 20;
/// The longest pause that a server can request.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A client for the repository of a name.
pub(crate) struct Client<'a> {
    options: &'a HubOptions,
    name: &'a HubName,
    agent: Agent,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// `true` if a retry may succeed.
    pub(crate) transient: bool,
    /// `true` if the attempt received bytes of the download before it failed.
    pub(crate) progress: bool,
    /// The pause that the server asks for.
    pause: Option<Duration>,
}

impl Failure {
    pub(crate) fn transient(error: Error, progress: bool) -> Failure {
        Failure {
            error,
            transient: true,
            progress,
            pause: None,
        }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure {
            error: error.into(),
            transient: false,
            progress: false,
            pause: None,
        }
    }
}

pub(crate) type Attempt<T> = std::result::Result<T, Failure>;

/// The commit and the files of a revision.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<String>,
}

/// The hub's description of a file.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) name: String,
    pub(crate) etag: String,
    pub(crate) size: Option<u64>,
}

impl Remote {
    pub(crate) fn checksum(&self) -> Checksum {
        Checksum::of_etag(&self.etag)
    }
}

impl<'a> Client<'a> {
    pub(crate) fn new(options: &'a HubOptions, name: &'a HubName) -> Client<'a> {
        // Set explicitly, so that ureq does not need its own list of certificates.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(provider)
            .root_certs(RootCerts::PlatformVerifier);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // `send` follows the redirects, because it decides which servers may receive the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("overdrive/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(options.etag_timeout))
            .timeout_recv_response(Some(options.etag_timeout))
            .timeout_per_read(Some(options.download_timeout))
            .tls_config(tls.build());
        if overdrive_core::is_loopback(&options.endpoint) {
            config = config.proxy(None);
        }
        Client {
            options,
            name,
            agent: config.build().new_agent(),
        }
    }

    /// Retries an attempt while it fails for transient reasons.
    pub(crate) fn repeat<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T> {
        let mut failures = 0;
        loop {
            let failure = match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            if failure.progress {
                failures = 0;
            }
            if !failure.transient || failures >= self.options.retries {
                return Err(failure.error);
            }
            let doubled = self
                .options
                .retry_pause
                .saturating_mul(1 << failures.min(3));
            std::thread::sleep(failure.pause.unwrap_or(doubled).min(MAX_PAUSE));
            failures += 1;
        }
    }

    /// Returns the commit and the files of the revision.
    pub(crate) fn listing(&self) -> Attempt<Listing> {
        let revision = utf8_percent_encode(self.name.revision(), SEGMENT);
        let (endpoint, repository) = (&self.options.endpoint, &self.name.repository);
        let kind = self.name.kind.plural();
        let url = format!("{endpoint}/api/{kind}/{repository}/revision/{revision}");
        let mut response = self.accepted(&url, self.send("GET", &url, 0)?, None)?;
        let body = response.body_mut().with_config().limit(MAX_LISTING);
        let text = body
            .read_to_string()
            .map_err(|error| unreachable(&url, &error))?;
        let protocol = |reason: &str| Error::Protocol {
            url: url.clone(),
            reason: reason.to_owned(),
        };
        let answer: Value = serde_json::from_str(&text)
            .map_err(|error| protocol(&format!("not JSON ({error})")))?;
        let commit = answer["sha"].as_str().filter(|sha| is_commit(sha));
        let files = answer["siblings"].as_array();
        let (Some(commit), Some(files)) = (commit, files) else {
            return Err(protocol("`sha` is not a commit, or `siblings` is not a list").into());
        };
        let name = |file: &Value| file["rfilename"].as_str().map(str::to_owned);
        Ok(Listing {
            commit: commit.to_owned(),
            files: files.iter().filter_map(name).collect(),
        })
    }

    /// Returns the hub's description of a file.
    pub(crate) fn remote(&self, commit: &str, file: &str) -> Attempt<Remote> {
        let url = self.file_url(commit, file);
        let response = self.accepted(&url, self.send("HEAD", &url, 0)?, Some(file))?;
        let get = |name: &str| response.headers().get(name)?.to_str().ok();
        let etag = get("x-linked-etag")
            .or_else(|| get("etag"))
            .unwrap_or_default();
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
        // The ETag becomes a file name.
        let letter = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
        if etag.is_empty() || etag.len() > 128 || !etag.chars().all(letter) {
            let reason = format!("the ETag of {file} is {etag:?}");
            return Err(Error::Protocol { url, reason }.into());
        }
        // The length of a redirection is that of its own body.
        let own = || get("content-length").filter(|_| response.status().is_success());
        let size = get("x-linked-size").or_else(own);
        let name = file.to_owned();
        let size = size.and_then(|size| size.parse().ok());
        Ok(Remote { name, etag, size })
    }

    /// Requests a file from byte `from` on. The status is 200, 206 or 416.
    pub(crate) fn open(&self, commit: &str, file: &str, from: u64) -> Attempt<Response<Body>> {
        let url = self.file_url(commit, file);
        let response = self.send("GET", &url, from)?;
        if from > 0 && response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        self.accepted(&url, response, Some(file))
    }

    pub(crate) fn file_url(&self, commit: &str, file: &str) -> String {
        let (endpoint, repository) = (&self.options.endpoint, &self.name.repository);
        let file = utf8_percent_encode(file, PATH);
        let prefix = self.name.kind.prefix();
        format!("{endpoint}/{prefix}{repository}/resolve/{commit}/{file}")
    }

    /// Sends a request and follows redirects; only the endpoint's server receives the token. HEAD requests are not
    /// redirected to the server that has the content, because the hub itself describes the file.
    fn send(&self, method: &str, url: &str, from: u64) -> Attempt<Response<Body>> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let head = method == "HEAD";
            let mut request = match head {
                true => self.agent.head(&url),
                false => self.agent.get(&url),
            };
            request = request.header(header::ACCEPT_ENCODING, "identity");
            if let Some(token) = &self.options.token
                && origin(&url) == origin(&self.options.endpoint)
            {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| unreachable(&url, &error))?;
            let location = response.headers().get(header::LOCATION);
            let location = location.and_then(|location| location.to_str().ok());
            let Some(location) = location.filter(|_| response.status().is_redirection()) else {
                return Ok(response);
            };
            if head && !is_relative(location) {
                return Ok(response);
            }
            let next = joined(&url, location);
            if url.starts_with("https://") && !next.starts_with("https://") {
                let reason = format!("it redirects to {next}, which is not encrypted");
                return Err(Error::Protocol { url, reason }.into());
            }
            url = next;
        }
        let reason = format!("it redirects more than {MAX_REDIRECTS} times");
        Err(Error::Protocol { url, reason }.into())
    }

    /// Converts a response with an error status into the error.
    fn accepted(
        &self,
        url: &str,
        response: Response<Body>,
        file: Option<&str>,
    ) -> Attempt<Response<Body>> {
        let status = response.status().as_u16();
        if matches!(status, 200 | 206 | 300..400) {
            return Ok(response);
        }
        let get = |name: &str| response.headers().get(name)?.to_str().ok();
        let message = get("x-error-message").unwrap_or_default();
        let transient = matches!(status, 408 | 429 | 500..600);
        let seconds = get("retry-after").and_then(|text| text.parse().ok());
        let pause = seconds.filter(|_| transient).map(Duration::from_secs);
        let repository = self.name.repository.clone();
        let endpoint = self.options.endpoint.clone();
        let with_token = self.options.token.is_some();
        let bad_token = status == 401 && with_token && message.contains("credentials");
        let error = match (get("x-error-code").unwrap_or_default(), status) {
            _ if bad_token => Error::BadToken { endpoint },
            ("GatedRepo", _) | (_, 403) => Error::NoAccess {
                repository,
                endpoint,
                with_token,
            },
            ("RevisionNotFound", _) => Error::NoRevision {
                repository,
                revision: self.name.revision().to_owned(),
            },
            ("RepoNotFound", _) | (_, 401) => self.no_repository(),
            (code, 404) => match file {
                Some(file) if matches!(code, "" | "EntryNotFound") => Error::NoFile {
                    repository,
                    file: format!("file `{file}`"),
                    found: "other files".to_owned(),
                },
                _ => self.no_repository(),
            },
            _ => Error::Status {
                url: url.to_owned(),
                status,
                message: explanation(status, message),
            },
        };
        Err(Failure {
            error,
            transient,
            progress: false,
            pause,
        })
    }

    fn no_repository(&self) -> Error {
        Error::NoRepository {
            repository: self.name.repository.clone(),
            endpoint: self.options.endpoint.clone(),
        }
    }
}

/// Returns the failure of a request that got no response.
pub(crate) fn unreachable(url: &str, error: &ureq::Error) -> Failure {
    use ureq::Timeout::{Connect, Resolve};
    let transient = match error {
        // No server answers, or one with a wrong certificate: a retry would fail as well.
        ureq::Error::Timeout(Connect | Resolve) => false,
        ureq::Error::Timeout(_) | ureq::Error::Protocol(_) => true,
        ureq::Error::Io(error) => !matches!(
            error.kind(),
            ErrorKind::ConnectionRefused | ErrorKind::InvalidData
        ),
        _ => false,
    };
    Failure {
        error: Error::Unreachable {
            url: url.to_owned(),
            reason: error.to_string(),
        },
        transient,
        progress: false,
        pause: None,
    }
}

/// Returns the hub's explanation as part of an error message: one line, without control characters.
fn explanation(status: u16, message: &str) -> String {
    let message: String = message
        .chars()
        .filter(|letter| !letter.is_control())
        .take(300)
        .collect();
    match (status, message.as_str()) {
        (429, _) => ": too many requests; set HF_TOKEN for a higher limit".to_owned(),
        (_, "") => String::new(),
        (_, message) => format!(": {message}"),
    }
}

/// Returns `scheme://host:port`.
fn origin(url: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..]
        .find(['/', '?', '#'])
        .map_or(url.len(), |at| start + at);
    url[..end].to_ascii_lowercase()
}

fn is_relative(location: &str) -> bool {
    !location.contains("://") && !location.starts_with("//")
}

/// Returns the target of a redirect from `url`.
fn joined(url: &str, location: &str) -> String {
    if !is_relative(location) {
        return match location.strip_prefix("//") {
            Some(rest) => format!("{}://{rest}", url.split("://").next().unwrap_or("https")),
            None => location.to_owned(),
        };
    }
    if location.starts_with('/') {
        return format!("{}{location}", origin(url));
    }
    let path = url.split(['?', '#']).next().unwrap_or(url);
    format!(
        "{}/{location}",
        path.rsplit_once('/').map_or(path, |(folder, _)| folder)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_are_joined_and_origins_compared() {
        let url = "https://a.example/x/resolve/main/f?y=/z";
        assert_eq!(joined(url, "/api/b"), "https://a.example/api/b");
        assert_eq!(joined(url, "g"), "https://a.example/x/resolve/main/g");
        assert_eq!(joined(url, "//b.example/c"), "https://b.example/c");
        assert_eq!(joined(url, "http://b.example/c"), "http://b.example/c");
        assert_eq!(origin(url), origin("HTTPS://A.example"));
        for other in [
            "https://a.example:444/",
            "http://a.example/",
            "https://a.example@b.example/x",
        ] {
            assert_ne!(origin(url), origin(other));
        }
    }
}
