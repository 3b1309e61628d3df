//! Tests of the limits of connections.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::json;

use crate::client::{get, parse, post, send};
use crate::support::{TestServer, wait};

#[test]
fn a_connection_too_many_is_answered_by_503_and_the_operator_still_gets_in() {
    let server = TestServer::start(|options| options.max_connections = 1);
    let address = server.address;
    // Connections are accepted in order, so that this one has the seat although it sends nothing.
    let first = TcpStream::connect(address).unwrap();
    let body = json!({"prompt": "a", "max_tokens": 1});
    let answer = post(address, "/v1/completions", &body);
    let error = answer.error(503);
    assert_eq!(error["code"], "max_connections");
    assert!(
        error["message"].as_str().unwrap().contains("1 connections"),
        "{error}"
    );
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.headers["connection"], "close");
    // A probe that failed would end a server because it is full.
    assert_eq!(get(address, "/health").status, 200);
    assert_eq!(get(address, "/metrics").status, 200);
    drop(first);
    wait("the seat", || {
        post(address, "/v1/completions", &body).status == 200
    });
}

#[test]
fn connections_that_ask_nothing_do_not_keep_the_operator_out() {
    let server = TestServer::start(|options| options.max_connections = 1);
    // One has the seat, and the others more than fill the places of those that are refused.
    let open = || TcpStream::connect(server.address).unwrap();
    let _idle: Vec<TcpStream> = (0..100).map(|_| open()).collect();
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(get(server.address, "/metrics").status, 200);
}

#[test]
fn a_client_that_takes_nothing_keeps_neither_seats_nor_its_connection() {
    let server = TestServer::start(|options| {
        options.max_queue = 16;
        options.write_timeout = Duration::from_millis(200);
    });
    let address = server.address;
    // Some 16 MiB, more than the system keeps for a connection.
    let body = json!({"prompt": "a", "max_tokens": 500, "n": 16, "stream": true, "logprobs": 20, "ignore_eos": true});
    let mut stalled = send(
        address,
        "POST",
        "/v1/completions",
        &[],
        body.to_string().as_bytes(),
    );
    wait("the sequences", || {
        crate::client::metric(address, "sequences_in_flight") == 16.0
    });
    // The sequences end whether or not somebody reads.
    wait("the seats", || {
        crate::client::metric(address, "sequences_in_flight") == 0.0
    });
    let other = json!({"prompt": "a", "max_tokens": 1, "n": 16});
    assert_eq!(post(address, "/v1/completions", &other).status, 200);
    // What it has not taken in time is gone, and the end of the stream with it.
    std::thread::sleep(Duration::from_millis(400));
    let mut taken = Vec::new();
    let _reset = stalled.read_to_end(&mut taken);
    let text = String::from_utf8_lossy(&taken);
    assert!(text.starts_with("HTTP/1.1 200"), "{}", &text[..100]);
    assert!(!text.contains("[DONE]"), "{} bytes were taken", taken.len());
}

#[test]
fn connections_that_do_not_ask_are_closed() {
    let server = TestServer::start(|options| options.header_timeout = Duration::from_millis(50));
    let mut buffer = Vec::new();
    // Half a head.
    let mut slow = TcpStream::connect(server.address).unwrap();
    slow.write_all(b"GET /health HT").unwrap();
    slow.read_to_end(&mut buffer).unwrap();
    assert!(buffer.is_empty(), "{buffer:?}");
    // A connection that is kept open after an answer and not used.
    let mut idle = TcpStream::connect(server.address).unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    idle.read_to_end(&mut buffer).unwrap();
    let answer = parse(&buffer).unwrap();
    assert_eq!(answer.status, 200);
    assert!(!answer.headers.contains_key("connection"), "{answer:?}");
}

#[test]
fn the_time_of_a_head_does_not_limit_an_answer() {
    let server = TestServer::start(|options| options.header_timeout = Duration::from_millis(20));
    server.gate.set(false);
    let address = server.address;
    std::thread::scope(|scope| {
        let body = json!({"prompt": "a", "max_tokens": 4, "ignore_eos": true});
        let client = scope.spawn(move || post(address, "/v1/completions", &body));
        wait("the request", || {
            crate::client::metric(address, "sequences_in_flight") == 1.0
        });
        std::thread::sleep(Duration::from_millis(60));
        server.gate.set(true);
        let answer = client.join().unwrap();
        assert_eq!(answer.json()["usage"]["completion_tokens"], 4);
    });
}
