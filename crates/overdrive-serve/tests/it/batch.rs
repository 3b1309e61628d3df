//! Files of requests.

use std::convert::Infallible;

use overdrive_serve::{BatchCounts, BatchRequest, Error, ServerOptions};
use serde_json::{Value, json};

use crate::client::post;
use crate::support::{Gate, NAME, TestServer, model, server, template};

fn line(id: &str, url: &str, body: Value) -> Value {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body})
}

/// Returns the answers to the requests of a file, and their numbers.
fn answers(lines: &[Value]) -> (Vec<Value>, BatchCounts) {
    let file: Vec<String> = lines.iter().map(ToString::to_string).collect();
    let requests = BatchRequest::read(file.join("\n").as_bytes(), "requests").unwrap();
    let options = |options: &mut ServerOptions| *options = ServerOptions::for_batch();
    let server = server(model(), Gate::new(true), options, |_| {}, Some(template()));
    let mut answers = Vec::new();
    let counts = server.run_batch(requests, |answer| {
        answers.push(answer);
        Ok::<(), Infallible>(())
    });
    (answers, counts.unwrap())
}

#[test]
fn a_file_of_requests_has_the_answers_of_the_routes_in_its_order() {
    let chat = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0});
    let requests = [
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 30, "temperature": 0, "ignore_eos": true}),
        ),
        ("/v1/chat/completions", chat.clone()),
        (
            "/v1/completions",
            json!({"prompt": "b", "max_tokens": 2, "temperature": -1}),
        ),
        (
            "/v1/responses",
            json!({"input": "hello", "max_output_tokens": 4, "temperature": 0}),
        ),
        ("/v1/embeddings", json!({"input": "hello"})),
        (
            "/v1/chat/completions",
            json!({"messages": [], "model": "other"}),
        ),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
    ];
    let lines = requests.iter().enumerate();
    let lines: Vec<Value> = lines
        .map(|(index, (url, body))| line(&format!("request-{index}"), url, body.clone()))
        .collect();
    let (answers, counts) = answers(&lines);
    assert_eq!((counts.completed, counts.failed), (4, 3), "{answers:?}");
    let server = TestServer::start(|_| {});
    let unlike = ["id", "created", "created_at", "cached_tokens"];
    fn without(value: &mut Value, keys: &[&str]) {
        match value {
            Value::Object(fields) => {
                fields.retain(|key, _| !keys.contains(&key.as_str()));
                fields.values_mut().for_each(|value| without(value, keys));
            }
            Value::Array(list) => list.iter_mut().for_each(|value| without(value, keys)),
            _ => {}
        }
    }
    for (index, ((url, body), answer)) in requests.iter().zip(&answers).enumerate() {
        assert_eq!(answer["custom_id"], format!("request-{index}"));
        assert_eq!(answer["error"], Value::Null);
        let expected = post(server.address, url, body);
        let response = &answer["response"];
        assert_eq!(response["status_code"], expected.status, "{answer}");
        let (mut own, mut expected) = (response["body"].clone(), expected.json());
        without(&mut own, &unlike);
        without(&mut expected, &unlike);
        assert_eq!(own, expected);
    }
    assert_eq!(answers[1]["response"]["body"]["model"], NAME);
    let ids = |key: &str| {
        answers
            .iter()
            .map(|answer| answer.pointer(key).unwrap().to_string())
            .collect::<std::collections::HashSet<_>>()
    };
    assert_eq!(
        (ids("/id").len(), ids("/response/request_id").len()),
        (7, 7)
    );
}

#[test]
fn more_requests_than_are_answered_at_once_are_all_answered() {
    let body = json!({"prompt": "a", "max_tokens": 1, "temperature": 0});
    let lines: Vec<Value> = (0..600)
        .map(|index| line(&index.to_string(), "/v1/completions", body.clone()))
        .collect();
    let (answers, counts) = answers(&lines);
    assert_eq!((counts.completed, counts.failed), (600, 0));
    let is_in_order =
        |(index, answer): (usize, &Value)| answer["custom_id"] == json!(index.to_string());
    assert!(answers.iter().enumerate().all(is_in_order));
}

#[test]
fn a_wrong_line_is_named() {
    let good = line("1", "/v1/completions", json!({"prompt": "a"}));
    let with = |key: &str, value: Value| {
        let mut line = good.clone();
        line["custom_id"] = "2".into();
        line[key] = value;
        line.to_string()
    };
    for (line, expected) in [
        ("{".to_owned(), "EOF while parsing an object in column 1"),
        ("[]".to_owned(), "invalid length 0"),
        (with("custom_id", 7.into()), "`custom_id` must be a string"),
        (with("body", "x".into()), "`body` must be"),
        (
            with("custom_id", "1".into()),
            "`custom_id` is \"1\", as in line 1",
        ),
        (with("method", "GET".into()), "it must be \"POST\""),
        (
            with("url", "/v1/models".into()),
            "it must be one of /v1/completions, /v1/chat/completions",
        ),
        (
            with("body", json!({"stream": true})),
            "`body.stream` is set",
        ),
        (
            format!("{} x", with("custom_id", "3".into())),
            "trailing characters",
        ),
    ] {
        let text = format!("{good}\n\n{line}\n");
        let error = BatchRequest::read(text.as_bytes(), "file.jsonl").unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("file.jsonl, line 3: ") && message.contains(expected),
            "{message}"
        );
        assert!(matches!(error, Error::Batch { line: 3, .. }));
    }
}

#[test]
fn an_answer_that_cannot_be_written_ends_the_batch() {
    let lines = [line(
        "1",
        "/v1/completions",
        json!({"prompt": "a", "max_tokens": 1}),
    )];
    let file = lines[0].to_string();
    let requests = BatchRequest::read(file.as_bytes(), "requests").unwrap();
    let options = |options: &mut ServerOptions| *options = ServerOptions::for_batch();
    let server = server(model(), Gate::new(true), options, |_| {}, Some(template()));
    let error = server.run_batch(requests, |_| Err(std::io::Error::other("no space")));
    assert_eq!(error.unwrap_err().to_string(), "no space");
}
