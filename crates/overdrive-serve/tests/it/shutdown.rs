//! Tests of the end of a server.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use overdrive_serve::Error;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;

use crate::client::{get, metric, receive, send};
use crate::support::{TestServer, model, open_gate, server, template, wait};

#[test]
fn a_draining_server_answers_what_has_begun_and_takes_no_more() {
    let mut server = TestServer::start(|_| {});
    let address = server.address;
    server.gate.set(false);
    let body = json!({"prompt": "a", "max_tokens": 30, "stream": true, "ignore_eos": true});
    let begun = send(
        address,
        "POST",
        "/v1/completions",
        &[],
        body.to_string().as_bytes(),
    );
    wait("the request", || {
        metric(address, "sequences_in_flight") == 1.0
    });
    server.shut_down();
    wait("the listener to close", || {
        TcpStream::connect(address).is_err()
    });
    server.gate.set(true);
    let events = receive(begun).events();
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
    server.join().unwrap();
}

#[test]
fn requests_that_do_not_end_in_time_are_cut_off_and_counted() {
    let mut server = TestServer::start(|options| options.drain_timeout = Duration::ZERO);
    let address = server.address;
    server.gate.set(false);
    let body = json!({"prompt": "a", "max_tokens": 30});
    let mut begun = send(
        address,
        "POST",
        "/v1/completions",
        &[],
        body.to_string().as_bytes(),
    );
    wait("the request", || {
        metric(address, "sequences_in_flight") == 1.0
    });
    server.shut_down();
    let mut rest = Vec::new();
    // The connection ends without an answer, by an end or by a reset.
    let _ended = begun.read_to_end(&mut rest);
    assert!(rest.is_empty(), "{:?}", String::from_utf8_lossy(&rest));
    server.gate.set(true);
    let error = server.join().unwrap_err();
    assert!(matches!(error, Error::Cut { sequences: 1, .. }), "{error}");
    assert!(
        error.to_string().contains("0 seconds after the signal"),
        "{error}"
    );
}

#[test]
fn a_signal_ends_the_server() {
    let server = server(model(), open_gate(), |_| {}, |_| {}, Some(template()));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || server.run(listener));
    // Handlers are registered before the first answer.
    assert_eq!(get(address, "/health").status, 200);
    kill_process(getpid(), Signal::TERM).unwrap();
    thread.join().unwrap().unwrap();
}
