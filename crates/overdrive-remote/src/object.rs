//! Requests of one object: its state, and ranges of its bytes.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{HttpClient, HttpConnector};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, GetResult, ObjectMeta, ObjectStore, RetryConfig};
use overdrive_core::is_loopback;
use reqwest::header::{ACCEPT_ENCODING, HeaderMap, HeaderValue};
use reqwest::redirect;

use crate::location::{Location, Scheme};
use crate::{Error, RemoteOptions, Result};

const MAX_REDIRECTS: usize = 10;
/// The longest explanation of a server that a message has, in characters.
const MAX_REASON: usize = 200;

/// Why a request has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server has another version of the object.
    Changed,
    /// The server has no such object.
    Missing,
    /// The reason, and the remedy where there is one.
    Problem(String),
}

impl Failure {
    /// Returns the error of an object with this name.
    pub(crate) fn error(self, name: &str) -> overdrive_datasets::Error {
        match self {
            Failure::Changed => overdrive_datasets::Error::FileChanged { path: name.into() },
            Failure::Missing => overdrive_datasets::Error::Remote {
                path: name.into(),
                problem: "the server has no such file (status 404); check the URL".to_owned(),
            },
            Failure::Problem(problem) => overdrive_datasets::Error::Remote {
                path: name.into(),
                problem,
            },
        }
    }
}

/// A failed attempt.
struct Attempt {
    failure: Failure,
    /// `true` if a retry may succeed.
    transient: bool,
}

/// A bucket, or the server of one file.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    store: Arc<dyn ObjectStore>,
    scheme: Scheme,
    retries: u32,
    retry_pause: Duration,
}

/// An object of a server in the version that it had when it was opened.
#[derive(Debug)]
pub(crate) struct Object {
    server: Server,
    path: Path,
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// The ETag, or the time of the last change.
    pub(crate) version: String,
    pub(crate) etag: Option<String>,
}

impl Server {
    pub(crate) fn new(location: &Location, options: &RemoteOptions) -> Result<Server> {
        let connector = Connector {
            timeout: options.timeout,
            is_loopback: is_loopback(&location.host),
        };
        let settings = || options.settings.iter();
        let store = match location.scheme {
            Scheme::Http => HttpBuilder::new()
                .with_url(&location.url)
                .with_retry(no_retries())
                .with_http_connector(connector)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>),
            Scheme::S3 => {
                let mut builder = AmazonS3Builder::new();
                let mut endpoint = "";
                for (name, value) in settings() {
                    if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                        if matches!(
                            key,
                            AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint
                        ) {
                            endpoint = value;
                        }
                        builder = builder.with_config(key, value);
                    }
                }
                builder
                    .with_bucket_name(&location.host)
                    // An endpoint on this machine, such as MinIO's, often has no certificate.
                    .with_allow_http(endpoint.starts_with("http://"))
                    .with_retry(no_retries())
                    .with_http_connector(Connector {
                        is_loopback: is_loopback(endpoint),
                        ..connector
                    })
                    .build()
                    .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
            }
            Scheme::Gcs => {
                let mut builder = GoogleCloudStorageBuilder::new();
                let mut endpoint = "";
                for (name, value) in settings() {
                    if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
                        if key == GoogleConfigKey::BaseUrl {
                            endpoint = value;
                        }
                        builder = builder.with_config(key, value);
                    }
                }
                builder
                    .with_bucket_name(&location.host)
                    .with_retry(no_retries())
                    .with_http_connector(Connector {
                        is_loopback: is_loopback(endpoint),
                        ..connector
                    })
                    .build()
                    .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
            }
        };
        let store = store.map_err(|error| Error::InvalidUrl {
            url: location.name.clone(),
            problem: reason(&error),
        })?;
        Ok(Server {
            store,
            scheme: location.scheme,
            retries: options.retries,
            retry_pause: options.retry_pause,
        })
    }

    /// Returns the keys of the objects whose keys begin with `prefix`, in their order, without hidden ones.
    pub(crate) async fn list(&self, prefix: &str) -> std::result::Result<Vec<String>, Failure> {
        let prefix = Path::parse(prefix.trim_end_matches('/'))
            .map_err(|error| Failure::Problem(reason(&error)))?;
        let mut retries = Retries::of(self);
        loop {
            let error = match self.store.list_with_delimiter(Some(&prefix)).await {
                Ok(listed) => {
                    let objects = listed.objects.into_iter().filter(|object| {
                        let name = object.location.filename().unwrap_or(".");
                        !name.starts_with('.') && object.size > 0
                    });
                    let mut keys: Vec<String> =
                        objects.map(|object| object.location.to_string()).collect();
                    keys.sort();
                    return Ok(keys);
                }
                Err(error) => error,
            };
            retries.pause(self.attempt(&error)).await?;
        }
    }

    /// Requests bytes of an object; nothing is read yet.
    async fn get(
        &self,
        path: &Path,
        range: Option<Range<u64>>,
        etag: Option<&str>,
    ) -> object_store::Result<GetResult> {
        let options = GetOptions {
            range: range.map(Into::into),
            // A weak tag never matches (RFC 9110, section 13.1.1).
            if_match: etag.filter(|tag| !tag.starts_with("W/")).map(str::to_owned),
            ..GetOptions::default()
        };
        self.store.get_opts(path, options).await
    }

    /// Returns the failure of a request, and whether a retry may help.
    fn attempt(&self, error: &object_store::Error) -> Attempt {
        use object_store::Error as E;
        let problem = |text: &str| (Failure::Problem(text.to_owned()), false);
        let keys = match self.scheme {
            Scheme::Http => "check the URL; the signature of a signed one may have expired",
            Scheme::S3 => {
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, or set \
                 AWS_SKIP_SIGNATURE=true for a public bucket"
            }
            Scheme::Gcs => {
                "check GOOGLE_APPLICATION_CREDENTIALS, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket"
            }
        };
        let status = status_of(error);
        let (failure, transient) = match (error, status) {
            (E::Precondition { .. }, _) => (Failure::Changed, false),
            (E::NotFound { .. }, _) => (Failure::Missing, false),
            (E::Unauthenticated { .. }, _) => problem(&format!(
                "the server asks for credentials (status 401); {keys}"
            )),
            (E::PermissionDenied { .. }, _) => {
                problem(&format!("the server refuses access (status 403); {keys}"))
            }
            (E::NotSupported { .. }, _) => problem(
                "the server ignores the range of a request, so that single records cannot be read; download the file \
                 and give its path",
            ),
            (_, Some(status @ (408 | 429 | 500..=599))) => (
                Failure::Problem(format!("the server answered with status {status}")),
                true,
            ),
            (_, Some(status)) => {
                problem(&format!("the server answered with status {status}; {keys}"))
            }
            (error, None) => {
                let text = reason(error);
                // A bucket of another region redirects without an address.
                let hint = match text.contains("region") {
                    true => "; set AWS_REGION to that of the bucket",
                    false => "",
                };
                (Failure::Problem(format!("{text}{hint}")), hint.is_empty())
            }
        };
        Attempt { failure, transient }
    }
}

impl Object {
    /// Asks the server for the length and the version of an object.
    pub(crate) async fn open(
        server: &Server,
        location: &Location,
    ) -> std::result::Result<Object, Failure> {
        let path = match location.scheme {
            // The server of a file has its whole URL.
            Scheme::Http => Path::default(),
            Scheme::S3 | Scheme::Gcs => {
                Path::parse(&location.key).map_err(|error| Failure::Problem(reason(&error)))?
            }
        };
        let meta = state_of(server, &path).await?;
        let version = match (&meta.e_tag, meta.last_modified.timestamp()) {
            (Some(etag), _) => etag.clone(),
            (None, 1..) => format!("modified {}", meta.last_modified.to_rfc3339()),
            // object_store's value of a missing header is 1970.
            (None, _) => {
                return Err(Failure::Problem(
                    "the server gives neither an ETag nor a time of the last change, so that a changed file would go \
                     unnoticed; download the file and give its path"
                        .to_owned(),
                ));
            }
        };
        Ok(Object {
            server: server.clone(),
            path,
            name: location.name.clone(),
            bytes: meta.size,
            version,
            etag: meta.e_tag,
        })
    }

    /// Reads a range, which must not be empty.
    pub(crate) async fn read(&self, range: Range<u64>) -> std::result::Result<Bytes, Failure> {
        let mut retries = Retries::of(&self.server);
        loop {
            match self.try_read(range.clone()).await {
                Ok(bytes) => return Ok(bytes),
                Err(attempt) => retries.pause(attempt).await?,
            }
        }
    }

    async fn try_read(&self, range: Range<u64>) -> std::result::Result<Bytes, Attempt> {
        let expected = range.end - range.start;
        let server = &self.server;
        let result = server
            .get(&self.path, Some(range), self.etag.as_deref())
            .await;
        let result = result.map_err(|error| server.attempt(&error))?;
        self.check(&result.meta)?;
        let bytes = result
            .bytes()
            .await
            .map_err(|error| server.attempt(&error))?;
        match bytes.len() as u64 == expected {
            true => Ok(bytes),
            false => Err(Attempt {
                failure: Failure::Problem(format!(
                    "the server sent {} of {expected} bytes",
                    bytes.len()
                )),
                transient: true,
            }),
        }
    }

    /// Asks the server whether it still has this version.
    pub(crate) async fn check_unchanged(&self) -> std::result::Result<(), Failure> {
        let meta = match state_of(&self.server, &self.path).await {
            // An object that is gone has changed.
            Err(Failure::Missing) => Err(Failure::Changed),
            other => other,
        }?;
        self.check(&meta).map_err(|attempt| attempt.failure)
    }

    /// Compares the state in an answer: a server may ignore the condition of a request.
    fn check(&self, meta: &ObjectMeta) -> std::result::Result<(), Attempt> {
        let same_version = match &self.etag {
            Some(etag) => meta.e_tag.as_ref() == Some(etag),
            None => self.version == format!("modified {}", meta.last_modified.to_rfc3339()),
        };
        match same_version && meta.size == self.bytes {
            true => Ok(()),
            false => Err(Attempt {
                failure: Failure::Changed,
                transient: false,
            }),
        }
    }
}

/// Returns the state of an object by a request of its first byte: a signed URL permits no `HEAD`, and the answer shows
/// whether the server knows ranges.
async fn state_of(server: &Server, path: &Path) -> std::result::Result<ObjectMeta, Failure> {
    let mut retries = Retries::of(server);
    loop {
        let error = match server.get(path, Some(0..1), None).await {
            Ok(result) => return Ok(result.meta),
            Err(error) => error,
        };
        // An object without bytes has no first one.
        let may_be_empty = matches!(error, object_store::Error::NotSupported { .. })
            || status_of(&error) == Some(416);
        if may_be_empty
            && let Ok(result) = server.get(path, None, None).await
            && result.meta.size == 0
        {
            return Ok(result.meta);
        }
        retries.pause(server.attempt(&error)).await?;
    }
}

/// The retries of one request.
struct Retries {
    left: u32,
    pause: Duration,
    failures: u32,
}

impl Retries {
    fn of(server: &Server) -> Retries {
        Retries {
            left: server.retries,
            pause: server.retry_pause,
            failures: 0,
        }
    }

    /// Waits before the next attempt after a failed one; returns its failure if there is none.
    async fn pause(&mut self, attempt: Attempt) -> std::result::Result<(), Failure> {
        if !attempt.transient {
            return Err(attempt.failure);
        }
        if self.left == 0 {
            return Err(match attempt.failure {
                Failure::Problem(problem) => Failure::Problem(format!(
                    "{problem}, after {} retries; check the network and the server, and start again",
                    self.failures
                )),
                other => other,
            });
        }
        tokio::time::sleep(self.pause.saturating_mul(1 << self.failures.min(3))).await;
        self.left -= 1;
        self.failures += 1;
        Ok(())
    }
}

/// Retries are made here, where a truncated answer counts too.
fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Returns the HTTP status in an error, which object_store has only as text.
fn status_of(error: &object_store::Error) -> Option<u16> {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = source {
        let text = error.to_string();
        if let Some((_, after)) = text.split_once("status code: ") {
            return after.get(..3)?.parse().ok();
        }
        source = error.source();
    }
    None
}

/// Returns the innermost cause of an error in one line. The outer ones contain the URL with its query.
fn reason(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    let line: String = text
        .lines()
        .next()
        .unwrap_or_default()
        .chars()
        .filter(|letter| !letter.is_control())
        .take(MAX_REASON)
        .collect();
    let words = line.split(' ').map(|word| match word.contains("://") {
        true => word.split('?').next().unwrap_or_default(),
        false => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Makes the clients of a store: one for all files with the same settings, so that they share their connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Connector {
    timeout: Duration,
    is_loopback: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        static CLIENTS: Mutex<Option<HashMap<Connector, HttpClient>>> = Mutex::new(None);
        let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
        let clients = clients.get_or_insert_default();
        if let Some(client) = clients.get(self) {
            return Ok(client.clone());
        }
        let client = self.new_client()?;
        clients.insert(*self, client.clone());
        Ok(client)
    }
}

impl Connector {
    fn new_client(self) -> object_store::Result<HttpClient> {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| {
            // An error means that the program has one.
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        let downgrades = |attempt: &redirect::Attempt<'_>| {
            let was_encrypted = attempt.previous().iter().any(|url| url.scheme() == "https");
            was_encrypted && attempt.url().scheme() != "https"
        };
        let redirects = redirect::Policy::custom(move |attempt| {
            if downgrades(&attempt) {
                attempt.error("it redirects to an address without encryption")
            } else if attempt.previous().len() > MAX_REDIRECTS {
                attempt.error("it redirects too often")
            } else {
                attempt.follow()
            }
        });
        // Offsets count the bytes of the file, and not those of a compressed answer.
        let identity = HeaderValue::from_static("identity");
        let mut client = reqwest::Client::builder()
            .user_agent(concat!("overdrive/", env!("CARGO_PKG_VERSION")))
            .default_headers(HeaderMap::from_iter([(ACCEPT_ENCODING, identity)]))
            .connect_timeout(self.timeout)
            .read_timeout(self.timeout)
            .redirect(redirects);
        if self.is_loopback {
            client = client.no_proxy();
        }
        let client = client
            .build()
            .map_err(|error| object_store::Error::Generic {
                store: "HTTP",
                source: Box::new(error),
            })?;
        Ok(HttpClient::new(client))
    }
}
