//! Tests of what every request passes: routes, keys, the form of bodies.

use overdrive_serve::{ApiKey, ServerOptions};
use serde_json::json;

use crate::client::{get, metric, post, receive, send};
use crate::support::{CONTEXT, NAME, TestServer, wait};

#[test]
fn the_model_is_listed_and_found_by_its_name() {
    let server = TestServer::start(|_| {});
    let list = get(server.address, "/v1/models").json();
    assert_eq!(list["object"], "list");
    let card = &list["data"][0];
    assert_eq!(
        (&card["id"], &card["object"]),
        (&json!(NAME), &json!("model"))
    );
    assert_eq!(card["max_model_len"], CONTEXT);
    assert_eq!(card["batch_invariant"], false);
    assert_eq!(
        get(server.address, &format!("/v1/models/{NAME}")).json(),
        *card
    );
    let error = get(server.address, "/v1/models/other").error(404);
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("model_not_found"), &json!("model"))
    );
    // A path is bytes, and need not be text.
    let error = get(server.address, "/v1/models/%ff").error(400);
    assert_eq!(error["param"], "model");
    let body = json!({"model": "other", "prompt": "a"});
    let error = post(server.address, "/v1/completions", &body).error(404);
    assert!(error["message"].as_str().unwrap().contains(NAME), "{error}");
}

#[test]
fn paths_and_methods_that_do_not_exist_are_answered_with_those_that_do() {
    let server = TestServer::start(|_| {});
    let error = get(server.address, "/v1/nothing").error(404);
    for path in [
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
        "/tokenizer_info",
    ] {
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(path), "{error}");
    }
    for path in [
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ] {
        let error = get(server.address, path).error(405);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("use POST"), "{error}");
    }
}

#[test]
fn web_pages_of_allowed_origins_may_use_the_server() {
    let (own, other) = ("https://chat.example.org", "https://other.example.org");
    let allowed = |server: &TestServer, method: &str, path: &str, origin: &str| {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            (
                "Access-Control-Request-Headers",
                "authorization,content-type",
            ),
        ];
        let answer = receive(send(server.address, method, path, &headers, b""));
        let header = |name: &str| answer.headers.get(name).cloned().unwrap_or_default();
        if method == "OPTIONS" && !header("access-control-allow-origin").is_empty() {
            assert_eq!(answer.status, 200);
            assert_eq!(
                header("access-control-allow-headers"),
                "authorization,content-type"
            );
            assert!(header("access-control-allow-methods").contains("POST"));
        }
        header("access-control-allow-origin")
    };
    let asks = [
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
    ];

    let none = TestServer::start(|_| {});
    let one = TestServer::start(|options| {
        options.allowed_origins = vec![own.to_owned()];
        // A browser asks for permission without it, and a page must be able to read that it is missing.
        options.api_key = Some(ApiKey::new("sk-1").unwrap());
    });
    let all = TestServer::start(|options| options.allowed_origins = vec!["*".to_owned()]);
    for (method, path) in asks {
        assert_eq!(allowed(&none, method, path, own), "");
        assert_eq!(allowed(&one, method, path, own), own);
        assert_ne!(allowed(&one, method, path, other), other);
        assert_eq!(allowed(&all, method, path, other), "*");
    }
}

#[test]
fn an_allowed_origin_has_a_scheme_and_no_path() {
    let check = |origin: &str| {
        let options = ServerOptions {
            allowed_origins: vec![origin.to_owned()],
            ..ServerOptions::default()
        };
        options.validate()
    };
    for valid in [
        "*",
        "null",
        "https://a.example",
        "http://localhost:3000",
        "http://[::1]:80",
    ] {
        check(valid).unwrap();
    }
    for wrong in [
        "",
        "localhost:3000",
        "https://a.example/",
        "https://a.example/x",
        "a b",
    ] {
        let error = check(wrong).unwrap_err().to_string();
        assert!(
            error.contains("allowed_origins") && error.contains("without a path"),
            "{error}"
        );
    }
}

#[test]
fn health_and_metrics_are_counted_and_need_no_key() {
    let server = TestServer::start(|options| {
        options.api_key = Some(ApiKey::new("sk-1").unwrap());
    });
    assert_eq!(
        get(server.address, "/health").json(),
        json!({"status": "ok"})
    );
    let body = json!({"prompt": "ab", "max_tokens": 3, "ignore_eos": true});
    let text = body.to_string();
    let ask = |headers: &[(&str, &str)]| {
        receive(send(
            server.address,
            "POST",
            "/v1/completions",
            headers,
            text.as_bytes(),
        ))
    };
    let error = ask(&[]).error(401);
    assert_eq!(error["code"], "invalid_api_key");
    assert_eq!(ask(&[]).headers["www-authenticate"], "Bearer");
    ask(&[("Authorization", "Bearer sk-2")]).error(401);
    assert_eq!(ask(&[("Authorization", "Bearer sk-1")]).status, 200);
    get(server.address, "/v1/nothing").error(401);
    get(server.address, "/v1/models").error(401);
    get(server.address, "/tokenizer_info").error(401);
    for path in ["/v1/responses", "/tokenize", "/detokenize"] {
        post(server.address, path, &body).error(401);
        let labels = format!("http_responses_total{{route=\"{path}\",status=\"401\"}}");
        assert_eq!(metric(server.address, &labels), 1.0);
    }

    // The engine counts a step when it has ended, which may be after its last token was answered.
    wait("the last step", || {
        metric(server.address, "generation_tokens_total") == 3.0
    });
    assert_eq!(metric(server.address, "prompt_tokens_total"), 2.0);
    assert_eq!(metric(server.address, "requests_finished_total"), 1.0);
    assert_eq!(
        metric(server.address, "time_to_first_token_seconds_count"),
        1.0
    );
    assert_eq!(metric(server.address, "request_seconds_count"), 1.0);
    let labels = "http_responses_total{route=\"/v1/completions\",status=\"401\"}";
    assert_eq!(metric(server.address, labels), 3.0);
    let kind = &get(server.address, "/metrics").headers["content-type"];
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
}

#[test]
fn a_body_that_is_no_json_object_is_refused() {
    let server = TestServer::start(|_| {});
    let ask = |headers: &[(&str, &str)], body: &str| {
        receive(send(
            server.address,
            "POST",
            "/v1/completions",
            headers,
            body.as_bytes(),
        ))
    };
    assert_eq!(ask(&[], "{\"prompt\": ").error(400)["code"], "invalid_json");
    assert_eq!(ask(&[], "[]").error(400)["code"], "invalid_json");
    let error = ask(&[("Content-Type", "text/plain")], "{\"prompt\": \"a\"}").error(415);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("application/json"),
        "{error}"
    );
    let error = ask(&[("Content-Encoding", "gzip")], "{\"prompt\": \"a\"}").error(415);
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("\"gzip\"; send the body uncompressed"),
        "{error}"
    );
    let kind = ("Content-Type", "application/json; charset=utf-8");
    assert_eq!(
        ask(&[kind], "{\"prompt\": \"a\", \"max_tokens\": 1}").status,
        200
    );
}

#[test]
fn wrong_fields_are_named_with_their_value_and_range() {
    let server = TestServer::start(|_| {});
    let long = "x".repeat(2000);
    for (fields, param, message) in [
        (json!({"prompt": null}), "prompt", "missing"),
        (json!({"prompt": 3}), "prompt", "list of token ids"),
        (json!({"prompt": []}), "prompt", "at least one"),
        (json!({"prompt": [999]}), "prompt", "999"),
        (json!({"temperature": "hot"}), "temperature", "\"hot\""),
        (json!({"temperature": -1}), "temperature", "-1"),
        (json!({"top_p": -0.5}), "top_p", "`top_p` is -0.5"),
        (json!({"top_k": -2}), "top_k", "-2"),
        (
            json!({"presence_penalty": 2.5}),
            "presence_penalty",
            "from -2 to 2",
        ),
        (json!({"logit_bias": {"260": 1}}), "logit_bias", "0..260"),
        (json!({"logit_bias": {"a": 1}}), "logit_bias", "0..260"),
        (
            json!({"logit_bias": {"1": 101}}),
            "logit_bias",
            "from -100 to 100",
        ),
        (json!({"stop": [long]}), "stop", "1024 bytes"),
        (json!({"stop": ""}), "stop", "1 to 1024"),
        (
            json!({"stop": [1]}),
            "stop",
            "`stop` is [1]; it must be a string or a list of strings",
        ),
        (json!({"n": 0}), "n", "from 1 to 128"),
        (json!({"n": 2, "temperature": 0}), "n", "temperature"),
        (json!({"n": 2, "temperature": 1e-40}), "n", "temperature"),
        (json!({"max_tokens": 0}), "max_tokens", "at least 1"),
        (json!({"max_tokens": -1}), "max_tokens", "-1"),
        (json!({"logprobs": 21}), "logprobs", "from 0 to 20"),
        (
            json!({"prompt_logprobs": 1}),
            "prompt_logprobs",
            "does not support",
        ),
        (
            json!({"return_token_ids": true}),
            "return_token_ids",
            "does not support",
        ),
        (json!({"best_of": 2}), "best_of", "equal to n"),
        (json!({"suffix": "x"}), "suffix", "does not support"),
        (
            json!({"guided_json": {"type": "object"}}),
            "guided_json",
            "does not support",
        ),
        (
            json!({"guided_regex": "a+"}),
            "guided_regex",
            "does not support",
        ),
        (
            json!({"guided_choice": ["a", "b"]}),
            "guided_choice",
            "does not support",
        ),
        (
            json!({"guided_grammar": "root ::= \"a\""}),
            "guided_grammar",
            "does not support",
        ),
        (
            json!({"skip_special_tokens": false}),
            "skip_special_tokens",
            "does not support",
        ),
        (
            json!({"spaces_between_special_tokens": false}),
            "spaces_between_special_tokens",
            "does not support",
        ),
        (
            json!({"thinking_token_budget": 10}),
            "thinking_token_budget",
            "does not support",
        ),
        (
            json!({"repetition_detection": {"max_pattern_size": 4}}),
            "repetition_detection",
            "does not support",
        ),
        (
            json!({"logprob_token_ids": [1]}),
            "logprob_token_ids",
            "does not support",
        ),
        (
            json!({"vllm_xargs": {"a": 1}}),
            "vllm_xargs",
            "does not support",
        ),
        (json!({"cache_salt": "a"}), "cache_salt", "does not support"),
        (
            json!({"watermarking": true}),
            "watermarking",
            "does not support",
        ),
        (
            json!({"prompt_embeds": "AAAA"}),
            "prompt_embeds",
            "does not support",
        ),
        (
            json!({"media_io_kwargs": {"video": {}}}),
            "media_io_kwargs",
            "does not support",
        ),
        (
            json!({"include_reasoning": false}),
            "include_reasoning",
            "does not support",
        ),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
            "stream",
        ),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format",
            "json_schema",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format",
            "schema",
        ),
    ] {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let error = post(server.address, "/v1/completions", &body).error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    // Neutral values, and fields that only OpenAI's service reads, change nothing.
    let body = json!({"prompt": "a", "max_tokens": 1, "suffix": null, "user": "me", "bad_words": [], "best_of": 1,
        "skip_special_tokens": true, "guided_json": null, "spaces_between_special_tokens": true, "top_p": 0});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    server.check_empty();
}
