//! Tests of the limits: each answers with a status and a code that say which.

use std::io::Write;
use std::time::Duration;

use overdrive_serve::ServerOptions;
use serde_json::{Value, json};

use crate::client::{metric, post, receive, send};
use crate::support::{CONTEXT, TestServer, wait};

#[test]
fn a_large_body_is_refused_by_its_length_and_while_it_arrives() {
    let server = TestServer::start(|options| options.max_body_bytes = 100);
    let length = ("Content-Length", "101");
    let kind = ("Content-Type", "application/json");
    // Nothing of it is sent: the length is enough.
    let answer = receive(send(
        server.address,
        "POST",
        "/v1/completions",
        &[length, kind],
        b"",
    ));
    let error = answer.error(413);
    assert_eq!(error["code"], "body_too_large");
    assert!(
        error["message"].as_str().unwrap().contains("100"),
        "{error}"
    );
    // Without a length, the limit is met on the way.
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("65\r\n{}\r\n", "x".repeat(0x65));
    stream
        .write_all(format!("{head}{chunk}").as_bytes())
        .unwrap();
    assert_eq!(receive(stream).error(413)["code"], "body_too_large");
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
}

#[test]
fn a_body_that_does_not_arrive_is_not_waited_for() {
    let server = TestServer::start(|options| options.body_timeout = Duration::from_millis(50));
    let headers = [
        ("Content-Length", "50"),
        ("Content-Type", "application/json"),
    ];
    let answer = receive(send(
        server.address,
        "POST",
        "/v1/completions",
        &headers,
        b"{",
    ));
    assert_eq!(answer.error(408)["code"], "body_timeout");
}

#[test]
fn tokens_are_limited_by_the_context_and_by_the_server() {
    let server = TestServer::start(|options| options.max_tokens = Some(40));
    // OpenAI's words, by which clients recognize the case.
    let words = format!("this model's maximum context length is {CONTEXT} tokens");
    let begins = |error: &Value| error["message"].as_str().unwrap().starts_with(&words);
    let body = json!({"prompt": "x".repeat(CONTEXT), "max_tokens": 1});
    let error = post(server.address, "/v1/completions", &body).error(400);
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("prompt"))
    );
    assert!(begins(&error), "{error}");
    let body = json!({"prompt": "x".repeat(500), "max_tokens": 14});
    let error = post(server.address, "/v1/completions", &body).error(400);
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("max_tokens"))
    );
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("lower max_tokens to 13"),
        "{error}"
    );
    assert!(begins(&error), "{error}");
    let body = json!({"prompt": "x".repeat(500), "max_tokens": 13, "ignore_eos": true});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
    let body = json!({"prompt": "x", "max_tokens": 41});
    let error = post(server.address, "/v1/completions", &body).error(400);
    assert!(
        error["message"].as_str().unwrap().contains("at most 40"),
        "{error}"
    );
    // A chat that names no limit gets the server's.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "ignore_eos": true});
    let answer = post(server.address, "/v1/chat/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 40);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_full_queue_is_answered_by_429_and_empties_again() {
    let server = TestServer::start(|options| options.max_queue = 3);
    server.gate.set(false);
    let address = server.address;
    let body = json!({"prompt": "a", "max_tokens": 4, "n": 2});
    let text = body.to_string();
    let first = send(address, "POST", "/v1/completions", &[], text.as_bytes());
    wait("the first request", || {
        metric(address, "sequences_in_flight") == 2.0
    });
    let answer = post(address, "/v1/completions", &body);
    let error = answer.error(429);
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("queue_full"), &json!("rate_limit_error"))
    );
    assert_eq!(answer.headers["retry-after"], "1");
    assert!(
        error["message"].as_str().unwrap().contains("3 sequences"),
        "{error}"
    );
    // It could never be served, and need not be tried again.
    let body = json!({"prompt": "a", "n": 4, "max_tokens": 1});
    assert_eq!(
        post(address, "/v1/completions", &body).error(400)["param"],
        "prompt"
    );
    server.gate.set(true);
    assert_eq!(receive(first).status, 200);
    server.check_empty();
    let body = json!({"prompt": "a", "n": 3, "max_tokens": 1});
    assert_eq!(post(address, "/v1/completions", &body).status, 200);
}

#[test]
fn a_request_that_takes_too_long_ends_with_408_and_is_not_repeated_by_clients() {
    let server = TestServer::start(|options| options.max_time = Duration::ZERO);
    for stream in [false, true] {
        let body = json!({"prompt": "a", "max_tokens": 8, "stream": stream});
        let answer = post(server.address, "/v1/completions", &body);
        assert_eq!(answer.error(408)["code"], "max_time");
        assert_eq!(answer.headers["x-should-retry"], "false");
    }
    server.check_empty();
    let count = |name: &str| metric(server.address, name);
    wait("the count", || count("requests_cancelled_total") == 2.0);
    assert_eq!(count("requests_finished_total"), 0.0);
}

#[test]
fn choices_are_limited_and_options_checked() {
    let server = TestServer::start(|options| options.max_choices = 2);
    let body = json!({"prompt": "a", "n": 3, "max_tokens": 1});
    let error = post(server.address, "/v1/completions", &body).error(400);
    assert!(
        error["message"].as_str().unwrap().contains("from 1 to 2"),
        "{error}"
    );
    for change in [
        (|options| options.max_queue = 0) as fn(&mut ServerOptions),
        |options| options.max_body_bytes = 0,
        |options| options.max_choices = 0,
        |options| options.max_tokens = Some(0),
        |options| options.write_timeout = Duration::ZERO,
    ] {
        let mut options = ServerOptions::default();
        change(&mut options);
        assert!(options.validate().is_err(), "{options:?}");
    }
}
