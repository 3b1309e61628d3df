//! A server of files that knows ranges and conditions, with faults on request.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use overdrive_remote::RemoteOptions;

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// With the query.
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    /// Returns the range that is asked for, with its end.
    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        let (start, end) = self
            .headers
            .get("range")?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        Some((start.parse().ok()?, end.parse::<usize>().ok()? + 1))
    }

    /// Returns `true` for the request of a file's state, which is its first byte.
    pub(crate) fn is_opening(&self) -> bool {
        self.range() == Some((0, 1))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after this number of bytes of the body.
    pub(crate) cut: Option<usize>,
    /// The connection ends without an answer.
    pub(crate) drop: bool,
    pub(crate) delay: Duration,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Reply {
        Reply {
            status,
            headers: Vec::new(),
            body: Vec::new(),
            cut: None,
            drop: false,
            delay: Duration::ZERO,
        }
    }

    /// Sets a header in place of an earlier value.
    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.retain(|(key, _)| key != name);
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Reply {
        self.headers.retain(|(key, _)| key != name);
        self
    }
}

type Fault = dyn Fn(&Request, Reply) -> Reply + Send + Sync;

struct State {
    files: Mutex<BTreeMap<String, (Vec<u8>, String)>>,
    fault: Box<Fault>,
    log: Mutex<Vec<Request>>,
    has_ended: AtomicBool,
}

pub(crate) struct Server {
    pub(crate) host: String,
    state: Arc<State>,
}

impl Server {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Server {
        Server::with_faults(files, |_, reply| reply)
    }

    /// Starts a server whose replies `fault` changes.
    pub(crate) fn with_faults(
        files: &[(&str, &[u8])],
        fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let files = files.iter().map(|(name, bytes)| {
            let etag = "\"version-1\"".to_owned();
            ((*name).to_owned(), (bytes.to_vec(), etag))
        });
        let state = Arc::new(State {
            files: Mutex::new(files.collect()),
            fault: Box::new(fault),
            log: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let state = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // A client that leaves ends the connection.
                    let _ = serve(&state, &stream.unwrap());
                });
            }
        });
        Server { host, state }
    }

    pub(crate) fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.host)
    }

    /// Replaces a file.
    pub(crate) fn set(&self, name: &str, bytes: &[u8], etag: &str) {
        let mut files = self.state.files.lock().unwrap();
        files.insert(name.to_owned(), (bytes.to_vec(), etag.to_owned()));
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.state.log.lock().unwrap().clone()
    }

    /// Returns the requests of content so far.
    pub(crate) fn reads(&self) -> Vec<Request> {
        let mut requests = self.requests();
        requests.retain(|request| !request.is_opening());
        requests
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.has_ended.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for a connection.
        let _ = TcpStream::connect(&self.host);
    }
}

/// Returns options with small blocks, no pauses and a cache in `folder`.
pub(crate) fn options(folder: &Path) -> RemoteOptions {
    let mut options = RemoteOptions::new(folder.join("blocks"));
    options.block_bytes = 4096;
    options.retry_pause = Duration::from_millis(1);
    options
}

fn serve(state: &State, stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let mut out = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim().split_once(':') else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let request = Request {
            method,
            path,
            headers,
        };
        state.log.lock().unwrap().push(request.clone());
        let reply = (state.fault)(&request, answer(state, &request));
        std::thread::sleep(reply.delay);
        if reply.drop {
            return stream.shutdown(Shutdown::Both);
        }
        let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
        for (name, value) in &reply.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !reply
            .headers
            .iter()
            .any(|(name, _)| name == "content-length")
        {
            head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        let cut = reply.cut.unwrap_or(reply.body.len());
        bytes.extend_from_slice(&reply.body[..cut]);
        out.write_all(&bytes)?;
        if reply.cut.is_some() {
            return stream.shutdown(Shutdown::Both);
        }
    }
}

fn answer(state: &State, request: &Request) -> Reply {
    let name = request.path.split('?').next().unwrap();
    let files = state.files.lock().unwrap();
    let Some((bytes, etag)) = files.get(&decoded(name.trim_start_matches('/'))) else {
        return Reply::status(404);
    };
    let reply = |status| {
        Reply::status(status)
            .with("etag", etag.clone())
            .with("last-modified", "Sat, 28 Nov 2026 10:00:00 GMT")
            .with("accept-ranges", "bytes")
    };
    if request
        .headers
        .get("if-match")
        .is_some_and(|tag| tag != etag)
    {
        return reply(412);
    }
    let Some((start, end)) = request.range() else {
        let mut whole = reply(200);
        whole.body = bytes.clone();
        return whole;
    };
    if start >= bytes.len() {
        return reply(416);
    }
    let end = end.min(bytes.len());
    let range = format!("bytes {start}-{}/{}", end - 1, bytes.len());
    let mut part = reply(206).with("content-range", range);
    part.body = bytes[start..end].to_vec();
    part
}

/// Decodes the `%XX` of a path.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        text.push(char::from(u8::from_str_radix(&part[..2], 16).unwrap()));
        text.push_str(&part[2..]);
    }
    text
}
