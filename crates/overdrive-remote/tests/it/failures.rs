//! Faults of the network and of servers.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_datasets::{Error, registered_source};
use overdrive_remote::{RemoteOptions, data_paths, open};

use crate::server::{Reply, Request, Server, options};

/// What a fault makes of an answer.
type Change = fn(Reply) -> Reply;

/// Bytes of which every block differs.
fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + at / 4096) as u8).collect()
}

/// Reads a whole file by ranges of 1000 bytes.
fn read(path: &PathBuf) -> Result<Vec<u8>, Error> {
    let source = registered_source(path).unwrap();
    let mut bytes = vec![0; source.len() as usize];
    for (number, part) in bytes.chunks_mut(1000).enumerate() {
        source.read_at(1000 * number as u64, part)?;
    }
    Ok(bytes)
}

/// Opens and reads a file of a server with a fault in the first answers to each range.
fn read_with_fault(
    times: usize,
    fault: impl Fn(Reply) -> Reply + Send + Sync + 'static,
) -> (Result<Vec<u8>, Error>, usize) {
    let folder = tempfile::tempdir().unwrap();
    let seen = std::sync::Mutex::new(std::collections::HashMap::new());
    let faulty = move |request: &Request, reply: Reply| {
        let mut seen = seen.lock().unwrap();
        let count: &mut usize = seen.entry(request.range()).or_default();
        *count += 1;
        match *count <= times {
            true => fault(reply),
            false => reply,
        }
    };
    let server = Server::with_faults(&[("a", &content(50_000))], faulty);
    let path = open(&server.url("a?signature=secret"), &options(folder.path()));
    let result = match path {
        Ok(path) => read(&path),
        Err(overdrive_remote::Error::Data(error)) => Err(error),
        Err(other) => panic!("{other}"),
    };
    (result, server.requests().len())
}

#[test]
fn dropped_truncated_and_refused_answers_are_retried() {
    let faults: [(&str, Change); 6] = [
        ("dropped", |reply| Reply {
            drop: true,
            ..reply
        }),
        ("cut", |reply| Reply {
            cut: Some(reply.body.len() / 2),
            ..reply
        }),
        ("short", |reply| Reply {
            body: reply.body[..reply.body.len() / 2].to_vec(),
            ..reply
        }),
        ("503", |_| Reply::status(503)),
        ("429", |_| Reply::status(429)),
        ("500", |_| Reply::status(500)),
    ];
    for (name, fault) in faults {
        let (bytes, _) = read_with_fault(2, fault);
        assert!(bytes.unwrap() == content(50_000), "{name}");
        let (error, _) = read_with_fault(usize::MAX, fault);
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Remote { .. }), "{name}: {error:?}");
        let text = format!("{error} {error:?}");
        assert!(
            text.contains("/a cannot be read") && text.contains("after 5 retries"),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn a_refusal_is_not_retried_and_names_the_remedy() {
    for (status, remedy) in [
        (401, "credentials"),
        (403, "signature"),
        (404, "check the URL"),
        (400, "check the URL"),
    ] {
        let (error, requests) = read_with_fault(usize::MAX, move |_| {
            let mut reply = Reply::status(status);
            reply.body = b"<Error>secret</Error>".to_vec();
            reply
        });
        let error = error.unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(
            text.contains(&status.to_string()) && text.contains(remedy),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
        assert_eq!(requests, 1, "{status}");
    }
}

#[test]
fn a_changed_file_is_an_error_that_names_it() {
    // A server that knows the condition of a request, one that ignores it, and one without ETags.
    let kinds: [fn(&Request, Reply) -> Reply; 3] = [
        |_, reply| reply,
        |request, reply| match reply.status {
            412 => {
                // The new content with its own ETag, as if there were no condition.
                let (start, end) = request.range().unwrap();
                let mut lie = Reply::status(206)
                    .with("etag", "\"version-2\"")
                    .with("content-range", format!("bytes {start}-{}/50000", end - 1));
                lie.body = vec![0; end - start];
                lie
            }
            _ => reply,
        },
        |_, reply| {
            let is_new = reply
                .headers
                .contains(&("etag".to_owned(), "\"version-2\"".to_owned()));
            let reply = reply.without("etag");
            match is_new {
                true => reply.with("last-modified", "Sun, 29 Nov 2026 10:00:00 GMT"),
                false => reply,
            }
        },
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::with_faults(&[("a.jsonl", &content(50_000))], kind);
        let path = open(
            &server.url("a.jsonl?signature=secret"),
            &options(folder.path()),
        )
        .unwrap();
        let source = registered_source(&path).unwrap();
        let mut out = [0; 100];
        source.read_at(0, &mut out).unwrap();
        source.check_unchanged().unwrap();
        server.set("a.jsonl", &content(50_000), "\"version-2\"");
        for error in [source.read_at(30_000, &mut out), source.check_unchanged()] {
            let error = error.unwrap_err();
            assert!(
                matches!(error, Error::FileChanged { .. }),
                "kind {number}: {error}"
            );
            assert!(error.to_string().contains("/a.jsonl changed"), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        // A file that is gone has changed too; opened again, the new version is another file.
        let again = open(
            &server.url("a.jsonl?signature=secret"),
            &options(folder.path()),
        )
        .unwrap();
        assert_eq!(again, path);
        assert!(read(&path).unwrap() == content(50_000), "kind {number}");
    }
}

#[test]
fn a_file_of_another_length_has_changed_although_its_tag_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(&[("a", &content(50_000))]);
    let path = open(&server.url("a"), &options(folder.path())).unwrap();
    server.set("a", &content(60_000), "\"version-1\"");
    assert!(matches!(read(&path), Err(Error::FileChanged { .. })));
}

#[test]
fn a_weak_tag_is_compared_and_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let weak = |_: &Request, reply: Reply| reply.with("etag", "W/\"1\"");
    let server = Server::with_faults(&[("a", &content(50_000))], weak);
    let path = open(&server.url("a"), &options(folder.path())).unwrap();
    assert!(read(&path).unwrap() == content(50_000));
    assert!(
        server
            .requests()
            .iter()
            .all(|request| !request.headers.contains_key("if-match"))
    );
}

#[test]
fn servers_that_cannot_serve_single_records_are_refused_with_the_way_out() {
    let whole = |_: &Request, reply: Reply| {
        let mut reply = Reply {
            status: 200,
            ..reply
        }
        .without("content-range");
        reply.body = content(50_000);
        reply
    };
    let unmarked = |_: &Request, reply: Reply| reply.without("etag").without("last-modified");
    let faults: [fn(&Request, Reply) -> Reply; 2] = [whole, unmarked];
    for fault in faults {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::with_faults(&[("a", &content(50_000))], fault);
        let error = open(&server.url("a"), &options(folder.path()))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("download the file and give its path"),
            "{error}"
        );
    }
}

#[test]
fn a_slow_answer_is_waited_for_and_a_silent_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    let slow = move |_: &Request, reply: Reply| {
        // The third answer comes long after the limit.
        let is_silent = count.fetch_add(1, Ordering::SeqCst) == 2;
        let delay = if is_silent { 20_000 } else { 5 };
        Reply {
            delay: Duration::from_millis(delay),
            ..reply
        }
    };
    let server = Server::with_faults(&[("a", &content(50_000))], slow);
    let mut options = options(folder.path());
    options.timeout = Duration::from_secs(2);
    let path = open(&server.url("a"), &options).unwrap();
    assert!(read(&path).unwrap() == content(50_000));
}

#[test]
fn two_urls_that_differ_in_their_queries_are_not_confused() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(&[("a", b"one")]);
    let options = options(folder.path());
    open(&server.url("a?id=1"), &options).unwrap();
    open(&server.url("a?id=1"), &options).unwrap();
    server.set("a", b"two", "\"version-2\"");
    let error = open(&server.url("a?id=2"), &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("different queries") && !error.contains("id="),
        "{error}"
    );
}

#[test]
fn a_signed_url_that_was_renewed_takes_the_place_of_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with_faults(&[("a", &content(10_000))], |request, reply| {
        match request.path.contains("signature=old") && !request.is_opening() {
            true => Reply::status(403),
            false => reply,
        }
    });
    let options = options(folder.path());
    let path = open(&server.url("a?signature=old"), &options).unwrap();
    assert!(read(&path).is_err());
    assert_eq!(
        open(&server.url("a?signature=new"), &options).unwrap(),
        path
    );
    assert!(read(&path).unwrap() == content(10_000));
}

#[test]
fn a_failure_of_a_request_ahead_is_not_that_of_a_later_read() {
    let folder = tempfile::tempdir().unwrap();
    let is_down = Arc::new(AtomicBool::new(false));
    let fault = {
        let is_down = Arc::clone(&is_down);
        move |_: &Request, reply: Reply| match is_down.load(Ordering::SeqCst) {
            true => Reply::status(503),
            false => reply,
        }
    };
    let server = Server::with_faults(&[("a", &content(50_000))], fault);
    let mut options = options(folder.path());
    options.retries = 0;
    let path = open(&server.url("a"), &options).unwrap();
    let source = registered_source(&path).unwrap();
    is_down.store(true, Ordering::SeqCst);
    source.prefetch(&[8192..8193, 8200..8201]);
    // The read waits for the request ahead, makes its own, and returns the failure of that one.
    let mut byte = [0];
    assert!(source.read_at(8192, &mut byte).is_err());
    assert_eq!(server.reads().len(), 2);
    source.prefetch(&[8192..8193, 8200..8201]);
    while server.reads().len() < 3 {
        std::thread::yield_now();
    }
    is_down.store(false, Ordering::SeqCst);
    source.read_at(8192, &mut byte).unwrap();
    assert_eq!(byte[0], content(8193)[8192]);
}

#[test]
fn a_server_that_does_not_answer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut options: RemoteOptions = options(folder.path());
    options.retries = 1;
    options.timeout = Duration::from_millis(200);
    // It takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "http://{}/a.jsonl?signature=secret",
        silent.local_addr().unwrap()
    );
    let error = open(&url, &options).unwrap_err().to_string();
    assert!(
        error.contains("/a.jsonl cannot be read") && error.contains("after 1 retries"),
        "{error}"
    );
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn data_keeps_its_order_and_its_paths() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(&[("a.jsonl", b"{}"), ("b.jsonl", b"{}")]);
    let local = folder.path().join("c.jsonl");
    std::fs::write(&local, "{}").unwrap();
    let data = [
        server.url("b.jsonl?x=1"),
        local.display().to_string(),
        server.url("a.jsonl"),
    ];
    let data = data.map(PathBuf::from);
    let options = options(folder.path());
    let found = data_paths(&data, &options).unwrap();
    let expected = [
        server.url("b.jsonl"),
        local.display().to_string(),
        server.url("a.jsonl"),
    ];
    assert_eq!(found, expected.map(PathBuf::from));
    let tokens = [PathBuf::from(server.url("train.bin"))];
    let error = data_paths(&tokens, &options).unwrap_err().to_string();
    assert!(error.contains("download it"), "{error}");
}
