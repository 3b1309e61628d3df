//! Tests of clients that disconnect.

use std::io::Read;

use serde_json::json;

use crate::client::{metric, post, send};
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
