//! Tests of chats: the template, streams, schemas and tools.

use overdrive_generation::{ChatTemplate, GenerationConfig};
use serde_json::{Value, json};

use crate::client::{Answer, post};
use crate::support::{TestServer, alone, chat_prompt, defaults, encode, template};

fn ask(server: &TestServer, body: &Value) -> Answer {
    post(server.address, "/v1/chat/completions", body)
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Biases against white space, of which JSON allows any amount; a random model may generate it without end.
fn no_space() -> Value {
    let ids = encode(" \n\r\t").into_iter();
    ids.map(|id| (id.to_string(), json!(-100)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Returns the deltas of the first choice, joined, and its last reason.
fn joined(events: &[Value]) -> (String, Vec<Value>, Value) {
    let (mut text, mut calls, mut reason) = (String::new(), Vec::new(), Value::Null);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    for event in events {
        assert_eq!(event["object"], "chat.completion.chunk");
        let choice = &event["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        calls.extend(
            choice["delta"]["tool_calls"]
                .as_array()
                .cloned()
                .unwrap_or_default(),
        );
        assert_eq!(reason, Value::Null, "a chunk after the last: {event}");
        reason = choice["finish_reason"].clone();
    }
    (text, calls, reason)
}

#[test]
fn an_answer_is_that_of_the_rendered_conversation_alone() {
    let server = TestServer::start(|_| {});
    let config = GenerationConfig {
        max_new_tokens: Some(20),
        seed: Some(4),
        temperature: 0.9,
        logprobs: Some(2),
        ..defaults()
    };
    let want = alone(&chat_prompt("hello"), config);
    let mut body = json!({"messages": user("hello"), "max_completion_tokens": 20, "seed": 4, "temperature": 0.9,
        "logprobs": true, "top_logprobs": 2});
    let answer = ask(&server, &body).json();
    let choice = &answer["choices"][0];
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], want.texts[0]);
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let rows = &want.logprobs.as_ref().unwrap()[0];
    assert_eq!(entries.len(), rows.len());
    for (entry, row) in entries.iter().zip(rows) {
        assert!((entry["logprob"].as_f64().unwrap() - f64::from(row.logprob)).abs() < 1e-4);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(entry["bytes"].is_array());
    }
    // A part of a character has its byte, whose text alone would be U+FFFD.
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    let ends = answer["choices"][0]["finish_reason"] == "stop";
    let shown = bytes.len() - if ends { "<end>".len() } else { 0 };
    assert_eq!(String::from_utf8_lossy(&bytes[..shown]), want.texts[0]);

    body["stream"] = true.into();
    let events = ask(&server, &body).events();
    let (text, _, reason) = joined(&events);
    assert_eq!(
        (json!(text), &reason),
        (
            choice["message"]["content"].clone(),
            &choice["finish_reason"]
        )
    );
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, entries);

    // Without a limit an answer ends with the context, and `n` answers differ by their streams.
    let body =
        json!({"messages": user("hello"), "n": 3, "max_tokens": 12, "seed": 1, "temperature": 1.5});
    let answer = ask(&server, &body).json();
    let texts: Vec<&Value> = (0..3)
        .map(|n| &answer["choices"][n]["message"]["content"])
        .collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    server.check_empty();
}

#[test]
fn content_in_parts_and_developers_are_what_the_template_knows() {
    let server = TestServer::start(|_| {});
    let parts = json!({"messages": [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ], "max_tokens": 6, "temperature": 0});
    let plain = json!({"messages": [
        {"role": "system", "content": "brief"}, {"role": "user", "content": "one\ntwo"},
    ], "max_tokens": 6, "temperature": 0});
    let choices = |body: &Value| ask(&server, body).json()["choices"].clone();
    assert_eq!(choices(&parts), choices(&plain));
    for (messages, text) in [
        (json!([]), "at least one"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "image_url",
        ),
        (
            json!([{"role": "user", "content": 3}]),
            "messages[0].content",
        ),
        (
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": null}]),
            "`messages[1].content` is missing or null",
        ),
        (
            json!([{"role": "assistant", "tool_calls": []}]),
            "`messages[0].content` is missing or null",
        ),
        (
            json!([{"role": "nobody", "content": "x"}]),
            "who is nobody?",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]),
            "not JSON",
        ),
    ] {
        let body = json!({"messages": messages, "max_tokens": 1});
        let error = ask(&server, &body).error(400);
        assert_eq!(error["param"], "messages", "{body}");
        assert!(error["message"].as_str().unwrap().contains(text), "{error}");
    }
    let body = json!({"messages": user("x"), "max_tokens": 1, "top_logprobs": 2});
    assert_eq!(ask(&server, &body).error(400)["param"], "top_logprobs");
}

#[test]
fn an_open_message_is_continued() {
    let server = TestServer::start(|_| {});
    let body = json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}],
        "continue_final_message": true, "max_tokens": 8, "temperature": 0});
    let config = GenerationConfig {
        max_new_tokens: Some(8),
        temperature: 0.0,
        ..defaults()
    };
    let want = alone(&encode("user: hi<end>\nassistant: I am"), config);
    assert_eq!(
        ask(&server, &body).json()["choices"][0]["message"]["content"],
        want.texts[0]
    );
}

#[test]
fn a_model_without_a_template_says_so() {
    let server = TestServer::with(|_| {}, |_| {}, None);
    let error = ask(&server, &json!({"messages": user("x")})).error(400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("/v1/completions"),
        "{error}"
    );
}

#[test]
fn answers_fit_the_schema_of_the_response_format() {
    let server = TestServer::start(|_| {});
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema}});
    let body = json!({"messages": user("who?"), "response_format": format, "max_tokens": 200, "n": 4, "seed": 2,
        "logit_bias": no_space()});
    let answer = ask(&server, &body).json();
    for choice in answer["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        let value: Value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        assert!(value["name"].as_str().unwrap().chars().count() <= 6);
        assert!((0..=99).contains(&value["age"].as_i64().unwrap()));
        assert_eq!(choice["finish_reason"], "stop");
    }
    // The shortest object, since a random model would never end one.
    let braces = encode("{}");
    let mut bias = no_space();
    bias[braces[1].to_string()] = json!(100);
    let body = json!({"prompt": "json: ", "response_format": {"type": "json_object"}, "max_tokens": 20,
        "logit_bias": bias});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], "{}");
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}});
    let body = json!({"messages": user("x"), "response_format": schema, "max_tokens": 5});
    let error = ask(&server, &body).error(400);
    assert_eq!(error["param"], "response_format");
    let begin = "`response_format` has a schema that cannot be enforced: ";
    assert!(
        error["message"].as_str().unwrap().starts_with(begin),
        "{error}"
    );
    // To JSON Schema, formats that it does not define are annotations.
    for format in [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "path",
        "binary",
        "password",
    ] {
        let schema = json!({"schema": {"type": "string", "format": format}});
        let format = json!({"type": "json_schema", "json_schema": schema});
        let body = json!({"messages": user("x"), "response_format": format, "max_tokens": 1});
        assert_eq!(ask(&server, &body).status, 200, "{body}");
    }
    // A number fits both alternatives: they are those of `anyOf`.
    let schema = json!({"schema": {"oneOf": [{"const": 1}, {"type": "integer"}]}});
    let format = json!({"type": "json_schema", "json_schema": schema});
    let bias = json!({encode("1")[0].to_string(): 100});
    let body = json!({"messages": user("x"), "response_format": format, "max_tokens": 1, "logit_bias": bias});
    let answer = ask(&server, &body).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "1");
}

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": false});
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    json!([
        {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": city}},
        {"type": "function", "function": {"name": "time", "parameters": none}},
    ])
}

#[test]
fn a_required_call_is_made_whole_and_streamed() {
    let server = TestServer::start(|_| {});
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let mut ids = std::collections::HashSet::new();
    for choice in [json!("required"), named.clone()] {
        let mut body = json!({"messages": user("go"), "tools": tools(), "tool_choice": choice, "max_tokens": 120,
            "seed": 6, "logit_bias": no_space(),
            // Of a text, and so not of a required call.
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}});
        let answer = ask(&server, &body).json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(
            answer["choices"][0]["finish_reason"], "tool_calls",
            "{answer}"
        );
        assert_eq!(message["content"], Value::Null);
        let [call] = message["tool_calls"].as_array().unwrap().as_slice() else {
            panic!("{message}");
        };
        assert_eq!(call["type"], "function");
        // The form without which Mistral's templates refuse the call in the next request.
        let id = call["id"].as_str().unwrap();
        let plain = id.chars().all(|letter| letter.is_ascii_alphanumeric());
        assert!(id.len() == 9 && plain && ids.insert(id.to_owned()), "{id}");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        match call["function"]["name"].as_str().unwrap() {
            "weather" => assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap())),
            "time" => assert!(choice == "required" && arguments == json!({})),
            other => panic!("{other}"),
        }
        body["stream"] = true.into();
        let (text, calls, reason) = joined(&ask(&server, &body).events());
        assert_eq!((text.as_str(), reason), ("", json!("tool_calls")));
        assert_eq!(calls[0]["function"], call["function"]);
        assert_eq!(calls[0]["index"], 0);
    }
}

#[test]
fn parameters_of_a_required_call_may_refer_to_their_own_definitions() {
    let server = TestServer::start(|_| {});
    let tool = |name: &str, city: &str| {
        let parameters = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}},
            "required": ["p"], "additionalProperties": false, "$defs": {"P": {"const": city}}});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    // Definitions of the same name in two tools are different ones.
    let tools = json!([tool("r", "Rome"), tool("o", "Oslo")]);
    let mut body =
        json!({"messages": user("go"), "tools": tools, "max_tokens": 45, "logit_bias": no_space()});
    for (seed, choice) in [
        json!("required"),
        json!("required"),
        json!({"type": "function", "function": {"name": "o"}}),
    ]
    .into_iter()
    .enumerate()
    {
        body["seed"] = seed.into();
        body["tool_choice"] = choice;
        let answer = ask(&server, &body).json();
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        let expected = match call["name"].as_str() {
            Some("r") => json!({"p": "Rome"}),
            _ => json!({"p": "Oslo"}),
        };
        assert_eq!(call["arguments"], expected.to_string(), "{answer}");
    }
    body["tools"][1]["function"]["parameters"]["type"] = "nothing".into();
    assert_eq!(ask(&server, &body).error(400)["param"], "tools");
}

#[test]
fn a_message_with_an_empty_list_of_calls_is_one_without() {
    let source = "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('a call') }}{% endif %}\
                  {{ m.content }}{% endfor %}";
    let server = TestServer::with(|_| {}, |_| {}, Some(ChatTemplate::new(source).unwrap()));
    let mut answer = json!({"role": "assistant", "content": "hello", "tool_calls": []});
    let body = |answer: &Value| json!({"messages": [answer], "max_tokens": 1});
    assert_eq!(
        ask(&server, &body(&answer)).json()["usage"]["prompt_tokens"],
        5
    );
    answer["tool_calls"] = json!([{"function": {"name": "x", "arguments": "{}"}}]);
    let error = ask(&server, &body(&answer)).error(400);
    assert!(
        error["message"].as_str().unwrap().contains("a call"),
        "{error}"
    );
}

#[test]
fn a_message_with_calls_and_no_text_has_an_empty_one() {
    // An error if the content of a message is not a text.
    let source = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}";
    let server = TestServer::with(|_| {}, |_| {}, Some(ChatTemplate::new(source).unwrap()));
    let tokens = |answer: Value| {
        let body =
            json!({"messages": [{"role": "user", "content": "hi"}, answer], "max_tokens": 1});
        ask(&server, &body).json()["usage"]["prompt_tokens"].clone()
    };
    let calls =
        json!([{"id": "1", "type": "function", "function": {"name": "x", "arguments": "{}"}}]);
    for answer in [
        json!({"role": "assistant", "content": null, "tool_calls": calls}),
        json!({"role": "assistant", "tool_calls": calls}),
        json!({"role": "assistant", "content": null, "refusal": "no"}),
    ] {
        assert_eq!(tokens(answer.clone()), 6, "{answer}");
    }
    // A refusal may also be a part of the content.
    let answer = json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]});
    assert_eq!(tokens(answer), 8);
}

#[test]
fn tools_change_the_prompt_unless_none_may_be_called() {
    let server = TestServer::start(|_| {});
    let mut body = json!({"messages": user("go"), "max_tokens": 5, "temperature": 0});
    let plain = ask(&server, &body).json();
    body["tools"] = tools();
    let auto = ask(&server, &body).json();
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&auto) > tokens(&plain) + 100, "{auto}");
    // The random text of this model is no call.
    assert!(auto["choices"][0]["message"]["tool_calls"].is_null());
    body["tool_choice"] = "none".into();
    assert_eq!(ask(&server, &body).json()["choices"], plain["choices"]);
    for (choice, text) in [
        (json!("perhaps"), "required"),
        (
            json!({"type": "function", "function": {"name": "other"}}),
            "name of a tool",
        ),
    ] {
        body["tool_choice"] = choice;
        let error = ask(&server, &body).error(400);
        assert_eq!(error["param"], "tool_choice");
        assert!(error["message"].as_str().unwrap().contains(text), "{error}");
    }
    body["tool_choice"] = "auto".into();
    body["tools"] = json!([{"name": "x"}]);
    assert_eq!(ask(&server, &body).error(400)["param"], "tools");
    body["tools"] = Value::Null;
    body["tool_choice"] = "required".into();
    assert_eq!(ask(&server, &body).error(400)["param"], "tool_choice");
}

#[test]
fn only_the_allowed_tools_are_in_the_prompt_and_may_be_called() {
    let server = TestServer::start(|_| {});
    let allowed = |mode: &str, names: &[&str]| {
        let name = |name: &&str| json!({"type": "function", "function": {"name": name}});
        let tools: Vec<Value> = names.iter().map(name).collect();
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    };
    let body = |tools: &Value, choice: Value| {
        json!({"messages": user("go"), "max_tokens": 120, "temperature": 0, "tools": tools,
            "tool_choice": choice, "logit_bias": no_space()})
    };
    let (both, time) = (tools(), json!([tools()[1]]));
    let (some, all) = (
        allowed("auto", &["time"]),
        allowed("auto", &["time", "weather"]),
    );
    for (choice, alone) in [(some, &time), (all, &both)] {
        let answer = ask(&server, &body(&both, choice)).json();
        let expected = ask(&server, &body(alone, json!("auto"))).json();
        assert_eq!(answer["choices"], expected["choices"]);
        let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].clone();
        assert_eq!(tokens(&answer), tokens(&expected));
    }
    for name in ["time", "weather"] {
        let answer = ask(&server, &body(&both, allowed("required", &[name]))).json();
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], name, "{answer}");
    }
    for wrong in [
        allowed("auto", &[]),
        allowed("auto", &["other"]),
        allowed("none", &["time"]),
        json!({"type": "allowed_tools"}),
    ] {
        let error = ask(&server, &body(&both, wrong)).error(400);
        assert_eq!(error["param"], "tool_choice");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("allowed_tools"), "{message}");
    }
}

#[test]
fn a_template_without_tools_refuses_them() {
    let plain = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let server = TestServer::with(|_| {}, |_| {}, Some(plain));
    let body = json!({"messages": user("go"), "tools": tools(), "max_tokens": 1});
    assert_eq!(ask(&server, &body).error(400)["param"], "tools");
    assert!(template().source("default").unwrap().contains("tools"));
}
