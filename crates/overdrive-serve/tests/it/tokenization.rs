//! Tests of `/tokenize`, `/detokenize` and `/tokenizer_info`.

use serde_json::{Value, json};

use crate::client::{get, post};
use crate::support::{CONTEXT, END, NAME, TestServer, chat_prompt, encode};

#[test]
fn a_text_becomes_tokens_and_tokens_become_the_text() {
    let server = TestServer::start(|_| {});
    for text in ["two words, é and 🦀", "an end<end>", ""] {
        let body = json!({"model": NAME, "prompt": text, "add_special_tokens": false, "return_token_strs": true});
        let answer = post(server.address, "/tokenize", &body).json();
        let ids = encode(text);
        assert_eq!(answer["tokens"], json!(ids));
        assert_eq!(answer["count"], ids.len());
        assert_eq!(answer["max_model_len"], CONTEXT);
        assert_eq!(answer["token_strs"].as_array().unwrap().len(), ids.len());
        let body = json!({"model": NAME, "tokens": ids});
        let answer = post(server.address, "/detokenize", &body).json();
        assert_eq!(answer, json!({"prompt": text}));
    }
    let answer = post(server.address, "/tokenize", &json!({"prompt": " a"})).json();
    assert_eq!(
        (&answer["count"], &answer["token_strs"]),
        (&json!(2), &Value::Null)
    );
}

#[test]
fn a_conversation_becomes_the_tokens_of_its_chat() {
    let server = TestServer::start(|_| {});
    let messages = json!([{"role": "user", "content": "hello"}]);
    let tokens = |more: Value| {
        let mut body = json!({"messages": messages});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        post(server.address, "/tokenize", &body).json()["tokens"].clone()
    };
    assert_eq!(tokens(json!({})), json!(chat_prompt("hello")));
    let bare = encode("user: hello<end>\n");
    assert_eq!(tokens(json!({"add_generation_prompt": false})), json!(bare));
    let open = encode("user: hello");
    assert_eq!(tokens(json!({"continue_final_message": true})), json!(open));
    let tool = json!({"type": "function", "function": {"name": "time"}});
    let with_tools = tokens(json!({"tools": [tool]}));
    assert!(with_tools.as_array().unwrap().len() > chat_prompt("hello").len() + 40);
}

#[test]
fn wrong_fields_are_named() {
    let server = TestServer::start(|_| {});
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": [1]}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        (
            "/tokenize",
            json!({"prompt": "a", "model": "other"}),
            "model",
        ),
        (
            "/tokenize",
            json!({"messages": [], "chat_template": "x"}),
            "chat_template",
        ),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [260]}), "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
    ] {
        let answer = post(server.address, path, &body);
        let status = if param == "model" { 404 } else { 400 };
        assert_eq!(answer.error(status)["param"], param, "{path} {body}");
    }
    let server = TestServer::with(|_| {}, |_| {}, None);
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    let error = post(server.address, "/tokenize", &body).error(400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("no chat template"),
        "{error}"
    );
}

#[test]
fn the_special_tokens_are_listed() {
    let server = TestServer::start(|_| {});
    let info = get(server.address, "/tokenizer_info").json();
    assert_eq!(
        (&info["eos_token"], &info["bos_token"]),
        (&json!("<end>"), &Value::Null)
    );
    assert!(info["chat_template"].as_str().unwrap().contains("messages"));
    let server = TestServer::with(|_| {}, |_| {}, None);
    let info = get(server.address, "/tokenizer_info").json();
    assert_eq!(info["eos_token"], "<end>", "of the configuration, {END}");
    assert_eq!(info["chat_template"], Value::Null);
}
