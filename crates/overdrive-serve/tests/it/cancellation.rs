//! Tests of clients that disconnect.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::client::{Answer, metric, parse, post, send};
use crate::support::{TestServer, wait};

#[test]
fn a_client_that_disconnects_while_it_reads_a_stream_leaves_nothing() {
    let server = TestServer::start(|_| {});
    let address = server.address;
    let body = json!({"prompt": "long", "max_tokens": 400, "stream": true, "ignore_eos": true})
        .to_string();
    let mut stream = send(address, "POST", "/v1/completions", &[], body.as_bytes());
    let mut seen = Vec::new();
    while !seen.windows(6).any(|six| six == b"data: ") {
        let mut buffer = [0; 256];
        let count = stream.read(&mut buffer).unwrap();
        seen.extend_from_slice(&buffer[..count]);
    }
    // From here on the engine waits, so that the request cannot end by itself.
    server.gate.set(false);
    drop(stream);
    wait("the server to notice", || {
        metric(address, "sequences_in_flight") == 0.0
    });
    server.gate.set(true);
    server.check_empty();
    wait("the count", || {
        metric(address, "requests_cancelled_total") == 1.0
    });
    assert_eq!(metric(address, "requests_finished_total"), 0.0);
    assert!(metric(address, "generation_tokens_total") < 400.0);
}

#[test]
fn a_client_that_disconnects_while_it_waits_leaves_nothing() {
    let server = TestServer::start(|_| {});
    let address = server.address;
    for stream in [false, true] {
        server.gate.set(false);
        let before = metric(address, "requests_cancelled_total");
        let prompts = metric(address, "prompt_tokens_total");
        let body = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 300, "stream": stream, "ignore_eos": true});
        let waiting = send(
            address,
            "POST",
            "/v1/completions",
            &[],
            body.to_string().as_bytes(),
        );
        // Both prompts, of one token each, are with the engine.
        wait("the request", || {
            metric(address, "prompt_tokens_total") == prompts + 2.0
        });
        assert_eq!(metric(address, "sequences_in_flight"), 4.0);
        drop(waiting);
        wait("the server to notice", || {
            metric(address, "sequences_in_flight") == 0.0
        });
        server.gate.set(true);
        server.check_empty();
        wait("the count", || {
            metric(address, "requests_cancelled_total") == before + 2.0
        });
    }
    let body = json!({"prompt": "a", "max_tokens": 2});
    assert_eq!(post(address, "/v1/completions", &body).status, 200);
}

/// Reads until `text` has arrived.
fn read_until(stream: &mut TcpStream, text: &str) -> Vec<u8> {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut buffer = [0; 256];
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
    seen
}

#[test]
fn a_client_that_closes_its_sending_half_gets_its_answer() {
    let server = TestServer::start(|_| {});
    let address = server.address;
    let body = |stream: bool| json!({"prompt": "a", "max_tokens": 8, "temperature": 0, "stream": stream, "ignore_eos": true});
    let ask = |stream: bool, version: &str| {
        let body = body(stream).to_string();
        let head = format!(
            "POST /v1/completions {version}\r\nHost: x\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all((head + &body).as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        client
    };
    let rest = |mut client: TcpStream, mut seen: Vec<u8>| {
        client.read_to_end(&mut seen).unwrap();
        parse(&seen).unwrap()
    };
    let text = |answer: &Answer| answer.json()["choices"][0]["text"].clone();
    let expected = text(&post(address, "/v1/completions", &body(false)));
    for stream in [false, true] {
        let client = ask(stream, "HTTP/1.1");
        let answer = rest(client, Vec::new());
        assert_eq!(answer.status, 200);
        // While it waits, it is asked whether it is there.
        server.gate.set(false);
        let mut client = ask(stream, "HTTP/1.1");
        let seen = read_until(&mut client, "HTTP/1.1 100 Continue\r\n\r\n");
        server.gate.set(true);
        let answer = rest(client, seen);
        match stream {
            false => assert_eq!(text(&answer), expected),
            true => {
                let events = answer.events();
                let texts = events
                    .iter()
                    .filter_map(|one| one["choices"][0]["text"].as_str());
                assert_eq!(texts.collect::<String>(), expected.as_str().unwrap());
            }
        }
    }
    // Version 1.0 has no interim responses.
    server.gate.set(false);
    let client = ask(false, "HTTP/1.0");
    wait("the request", || {
        metric(address, "sequences_in_flight") == 1.0
    });
    std::thread::sleep(Duration::from_millis(1500));
    server.gate.set(true);
    let mut seen = Vec::new();
    { client }.read_to_end(&mut seen).unwrap();
    assert!(seen.starts_with(b"HTTP/1.0 200 OK\r\n"), "{seen:?}");
    server.check_empty();
    assert_eq!(metric(address, "requests_cancelled_total"), 0.0);
}

#[test]
fn a_stream_asks_a_client_that_has_closed_its_sending_half_by_comments() {
    let server = TestServer::start(|_| {});
    let address = server.address;
    let body = json!({"prompt": "a", "max_tokens": 400, "stream": true, "ignore_eos": true});
    let mut client = send(
        address,
        "POST",
        "/v1/completions",
        &[],
        body.to_string().as_bytes(),
    );
    client.shutdown(Shutdown::Write).unwrap();
    let mut seen = read_until(&mut client, "data: ");
    server.gate.set(false);
    seen.extend(read_until(&mut client, "\n: waiting\n\n"));
    server.gate.set(true);
    client.read_to_end(&mut seen).unwrap();
    let answer = parse(&seen).unwrap();
    assert!(answer.body.ends_with("data: [DONE]\n\n"), "{answer:?}");
    server.check_empty();
    assert_eq!(metric(address, "requests_cancelled_total"), 0.0);
}
