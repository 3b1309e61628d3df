//! A small HTTP client: one request for each connection.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the events of a stream, without comments; the last one must be the end.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        assert!(self.headers["content-type"].starts_with("text/event-stream"));
        let events = self.body.strip_suffix("data: [DONE]\n\n").unwrap();
        let event =
            |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        let whole = events
            .split("\n\n")
            .filter(|event| !event.is_empty() && !event.starts_with(':'));
        whole.map(event).collect()
    }

    /// Returns the message of an error, after checking its form.
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        let error = self.json()["error"].clone();
        assert!(
            error["message"].is_string() && error["type"].is_string(),
            "{error}"
        );
        let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        error
    }
}

/// Connects and sends a request without reading the answer.
pub(crate) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let has = |name: &str| {
        headers
            .iter()
            .any(|(own, _)| own.eq_ignore_ascii_case(name))
    };
    if !body.is_empty() && !has("content-type") {
        head.push_str("Content-Type: application/json\r\n");
    }
    if !has("content-length") {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    stream
}

/// Reads the answer, up to the end of the connection.
pub(crate) fn receive(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    parse(&bytes).unwrap_or_else(|| panic!("{:?}", String::from_utf8_lossy(&bytes)))
}

/// Parses an answer, after any interim ones; `None` if it is cut off.
pub(crate) fn parse(bytes: &[u8]) -> Option<Answer> {
    if let Some(rest) = bytes.strip_prefix(b"HTTP/1.1 100 Continue\r\n\r\n") {
        return parse(rest);
    }
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&bytes[..end]).unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let rest = &bytes[end + 4..];
    let body = match headers.get("transfer-encoding").map(String::as_str) {
        Some("chunked") => unchunk(rest)?,
        _ => rest.to_vec(),
    };
    let body = String::from_utf8(body).unwrap();
    Some(Answer {
        status,
        headers,
        body,
    })
}

fn unchunk(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(bytes.get(end + 2..end + 2 + size)?);
        bytes = bytes.get(end + 4 + size..)?;
    }
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    receive(send(address, "GET", path, &[], b""))
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    receive(send(
        address,
        "POST",
        path,
        &[],
        body.to_string().as_bytes(),
    ))
}

/// Returns the value of a sample of `/metrics`.
pub(crate) fn metric(address: SocketAddr, name: &str) -> f64 {
    let answer = get(address, "/metrics");
    let line = answer
        .body
        .lines()
        .find_map(|line| line.strip_prefix(&format!("overdrive_{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {}", answer.body))
        .parse()
        .unwrap()
}
