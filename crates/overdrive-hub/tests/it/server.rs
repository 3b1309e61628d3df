//! A server that speaks the hub's protocol, with faults on request.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use overdrive_hub::HubOptions;
use sha1::{Digest as _, Sha1};
use sha2::{Digest as _, Sha256};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const NAME: &str = "org/name";
/// More than the sockets' buffers hold, so that a download can be interrupted in the middle.
pub(crate) const WEIGHTS: usize = 3_000_000;

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// `true` for the server with the contents, which has another origin.
    pub(crate) cdn: bool,
    headers: BTreeMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub(crate) fn is(&self, method: &str, end: &str) -> bool {
        self.method == method && self.path.ends_with(end)
    }

    fn range_start(&self) -> Option<usize> {
        self.header("range")?
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse()
            .ok()
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after this number of bytes of the body.
    pub(crate) cut: Option<usize>,
    /// The connection stays open without an answer until the client leaves.
    pub(crate) silent: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Reply {
        Reply {
            status,
            ..Reply::default()
        }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Reply {
        self.body = body.into();
        self
    }

    /// Removes a header, so that another value can take its place.
    pub(crate) fn without(mut self, name: &str) -> Reply {
        self.headers.retain(|(key, _)| key != name);
        self
    }
}

type Fault = dyn FnMut(&Request, Reply) -> Reply + Send;

struct State {
    /// `true` if the repository is a dataset.
    is_dataset: bool,
    files: BTreeMap<String, Vec<u8>>,
    cdn: String,
    fault: Mutex<Box<Fault>>,
    log: Mutex<Vec<Request>>,
}

/// A hub with one repository, [`NAME`], at the commit [`COMMIT`].
pub(crate) struct Hub {
    pub(crate) url: String,
    state: Arc<State>,
}

impl Hub {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Hub {
        Hub::with_faults(files, |_, reply| reply)
    }

    /// Starts a hub whose replies `fault` changes.
    pub(crate) fn with_faults(
        files: &[(&str, &[u8])],
        fault: impl FnMut(&Request, Reply) -> Reply + Send + 'static,
    ) -> Hub {
        Hub::start(files, false, fault)
    }

    pub(crate) fn of_dataset(files: &[(&str, &[u8])]) -> Hub {
        Hub::of_dataset_with_faults(files, |_, reply| reply)
    }

    pub(crate) fn of_dataset_with_faults(
        files: &[(&str, &[u8])],
        fault: impl FnMut(&Request, Reply) -> Reply + Send + 'static,
    ) -> Hub {
        Hub::start(files, true, fault)
    }

    fn start(
        files: &[(&str, &[u8])],
        is_dataset: bool,
        fault: impl FnMut(&Request, Reply) -> Reply + Send + 'static,
    ) -> Hub {
        let listen = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = |listener: &TcpListener| {
            format!("http://{}", listener.local_addr().expect("an address"))
        };
        let (hub, cdn) = (listen(), listen());
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        let state = Arc::new(State {
            is_dataset,
            files: files.collect(),
            cdn: url(&cdn),
            fault: Mutex::new(Box::new(fault)),
            log: Mutex::new(Vec::new()),
        });
        let address = url(&hub);
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || serve(&stream, is_cdn, &state));
                }
            });
        }
        Hub {
            url: address,
            state,
        }
    }

    /// Returns options for this hub with a cache in `folder`.
    pub(crate) fn options(&self, folder: &Path) -> HubOptions {
        options(&self.url, folder)
    }

    /// Returns the requests so far, and forgets them.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.log.lock().expect("no panic"))
    }
}

pub(crate) fn options(url: &str, folder: &Path) -> HubOptions {
    HubOptions {
        cache: folder.to_owned(),
        endpoint: url.to_owned(),
        token: Some("hf_secret".to_owned()),
        retry_pause: Duration::ZERO,
        retries: 2,
        ..HubOptions::default()
    }
}

/// Returns bytes that no compression or repetition could hide a fault in.
pub(crate) fn weights(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn git_hash(bytes: &[u8]) -> String {
    let mut hasher = Sha1::new();
    hasher.update(format!("blob {}\0", bytes.len()).as_bytes());
    hasher.update(bytes);
    hex(&hasher.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serve(stream: &TcpStream, cdn: bool, state: &State) {
    let Some(request) = read_request(stream, cdn) else {
        return;
    };
    state.log.lock().expect("no panic").push(request.clone());
    let reply = state.reply(&request);
    let reply = (state.fault.lock().expect("no panic"))(&request, reply);
    write_reply(stream, &request, &reply);
}

fn read_request(stream: &TcpStream, cdn: bool) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let lines = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty());
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    let headers = headers.collect();
    Some(Request {
        method,
        path,
        cdn,
        headers,
    })
}

fn write_reply(mut stream: &TcpStream, request: &Request, reply: &Reply) {
    if reply.silent {
        let _ = stream.read(&mut [0]);
        return;
    }
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    let mut chunked = false;
    for (name, value) in &reply.headers {
        chunked |= name == "Transfer-Encoding";
        let _ = write!(head, "{name}: {value}\r\n");
    }
    if !chunked
        && !reply
            .headers
            .iter()
            .any(|(name, _)| name == "Content-Length")
    {
        let _ = write!(head, "Content-Length: {}\r\n", reply.body.len());
    }
    let mut bytes = format!("{head}\r\n").into_bytes();
    if request.method != "HEAD" {
        let body = &reply.body[..reply.cut.unwrap_or(usize::MAX).min(reply.body.len())];
        if chunked {
            bytes.extend(format!("{:x}\r\n", body.len()).bytes());
            bytes.extend(body);
            bytes.extend(b"\r\n0\r\n\r\n");
        } else {
            bytes.extend(body);
        }
    }
    // The client may leave before the end.
    let _ = stream.write_all(&bytes);
}

impl State {
    fn kind(&self) -> &'static str {
        match self.is_dataset {
            true => "datasets",
            false => "models",
        }
    }

    fn reply(&self, request: &Request) -> Reply {
        if let Some(sum) = request.path.strip_prefix("/cdn/") {
            let file = self.files.values().find(|bytes| sha256(bytes) == sum);
            return file.map_or(Reply::status(404), |bytes| content(request, bytes));
        }
        if request
            .path
            .starts_with(&format!("/api/{}/{NAME}/revision/", self.kind()))
        {
            let revision = request.path.rsplit('/').next().unwrap_or_default();
            if !["main", "v1", COMMIT].contains(&revision) {
                return Reply::status(404).with("X-Error-Code", "RevisionNotFound");
            }
            let names = self
                .files
                .keys()
                .map(|name| format!(r#"{{"rfilename": "{name}"}}"#));
            let names: Vec<String> = names.collect();
            let body = format!(
                r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#,
                names.join(", ")
            );
            return Reply::status(200).body(body);
        }
        for revision in [COMMIT, "main", "v1"] {
            let kind = if self.is_dataset { "/datasets" } else { "" };
            let prefix = format!("{kind}/{NAME}/resolve/{revision}/");
            if let Some(name) = request.path.strip_prefix(&prefix) {
                return match self.files.get(name) {
                    Some(bytes) => self.file(request, name, bytes),
                    None => Reply::status(404).with("X-Error-Code", "EntryNotFound"),
                };
            }
        }
        // As the hub answers those who may not know whether it is there.
        Reply::status(401).with("X-Error-Code", "RepoNotFound")
    }

    fn file(&self, request: &Request, name: &str, bytes: &[u8]) -> Reply {
        let large = [".safetensors", ".bin", ".gguf", ".parquet"]
            .iter()
            .any(|end| name.ends_with(end));
        if !large {
            return content(request, bytes)
                .with("X-Repo-Commit", COMMIT)
                .with("ETag", format!("\"{}\"", git_hash(bytes)));
        }
        Reply::status(302)
            .with("X-Repo-Commit", COMMIT)
            .with("ETag", "\"of the redirection\"")
            .with("X-Linked-Etag", format!("\"{}\"", sha256(bytes)))
            .with("X-Linked-Size", bytes.len().to_string())
            .with("Location", format!("{}/cdn/{}", self.cdn, sha256(bytes)))
    }
}

fn content(request: &Request, bytes: &[u8]) -> Reply {
    match request.range_start() {
        Some(start) if start < bytes.len() => Reply::status(206)
            .with(
                "Content-Range",
                format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len()),
            )
            .body(&bytes[start..]),
        Some(_) => Reply::status(416),
        None => Reply::status(200).body(bytes),
    }
}
