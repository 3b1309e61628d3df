//! Tests of responses, whose answers are those of chats.

use serde_json::{Value, json};

use crate::client::{Answer, post};
use crate::support::{NAME, TestServer, encode};

fn ask(server: &TestServer, body: &Value) -> Answer {
    post(server.address, "/v1/responses", body)
}

/// Returns the events of a stream, whose names and numbers are checked.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{answer:?}");
    let one = |(number, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let value: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(value["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(value["sequence_number"], number);
        value
    };
    let body = answer.body.strip_suffix("\n\n").unwrap();
    let events = body.split("\n\n").filter(|event| !event.starts_with(':'));
    events.enumerate().map(one).collect()
}

/// Removes the ids and times, which differ from answer to answer.
fn comparable(mut response: Value) -> Value {
    response["id"] = Value::Null;
    response["created_at"] = Value::Null;
    // The second one finds the prompt in the cache.
    response["usage"]["input_tokens_details"] = Value::Null;
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item["type"] == "function_call" {
            item["call_id"] = Value::Null;
        }
    }
    response
}

#[test]
fn usage_counts_the_tokens_that_the_cache_had() {
    let server = TestServer::start(|_| {});
    let text = "the same long prompt, asked three times";
    let body = json!({"input": text, "max_output_tokens": 2, "temperature": 0});
    let cached = |usage: &Value| usage["input_tokens_details"]["cached_tokens"].as_u64();
    let first = ask(&server, &body).json()["usage"].clone();
    assert_eq!(cached(&first), Some(0), "{first}");
    let second = ask(&server, &body).json()["usage"].clone();
    let input = second["input_tokens"].as_u64().unwrap();
    // All whole blocks of 4 tokens, but for the last token, which is computed.
    assert_eq!(cached(&second), Some((input - 1) / 4 * 4), "{second}");
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"messages": messages, "max_tokens": 2, "temperature": 0.9, "n": 2});
    let chat = post(server.address, "/v1/chat/completions", &body).json();
    assert_eq!(
        chat["usage"]["prompt_tokens_details"],
        second["input_tokens_details"]
    );
}

#[test]
fn a_response_is_the_answer_of_the_same_chat() {
    let server = TestServer::start(|_| {});
    let call =
        json!({"id": "abc", "type": "function", "function": {"name": "time", "arguments": "{}"}});
    let options = json!({"model": NAME, "seed": 4, "temperature": 0.9, "top_p": 0.8});
    for (instructions, input, messages) in [
        (
            json!(null),
            json!("hello"),
            json!([{"role": "user", "content": "hello"}]),
        ),
        (
            json!("be brief"),
            json!([{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]),
            json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]),
        ),
        (
            json!(null),
            json!([
                {"role": "user", "content": "when?"},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                    "content": [{"type": "output_text", "text": "let me see", "annotations": []}]},
                {"type": "function_call", "call_id": "abc", "name": "time", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "abc", "output": "noon"},
            ]),
            json!([
                {"role": "user", "content": "when?"},
                {"role": "assistant", "content": "let me see", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abc", "content": "noon"},
            ]),
        ),
    ] {
        let mut chat = options.clone();
        chat["messages"] = messages;
        chat["max_tokens"] = 20.into();
        let chat = post(server.address, "/v1/chat/completions", &chat).json();
        let mut body = options.clone();
        body["input"] = input;
        body["instructions"] = instructions.clone();
        body["max_output_tokens"] = 20.into();
        let answer = ask(&server, &body).json();
        let text = &chat["choices"][0]["message"]["content"];
        let [message] = answer["output"].as_array().unwrap().as_slice() else {
            panic!("{answer}");
        };
        assert_eq!(message["content"][0]["text"], *text);
        assert_eq!(
            (&message["type"], &message["role"]),
            (&json!("message"), &json!("assistant"))
        );
        assert_eq!(
            (&answer["object"], &answer["store"]),
            (&json!("response"), &json!(false))
        );
        assert_eq!(answer["instructions"], instructions);
        let is_cut = chat["choices"][0]["finish_reason"] == "length";
        let status = if is_cut { "incomplete" } else { "completed" };
        assert_eq!(
            (&answer["status"], &message["status"]),
            (&json!(status), &json!(status))
        );
        let usage = (&answer["usage"], &chat["usage"]);
        assert_eq!(usage.0["input_tokens"], usage.1["prompt_tokens"]);
        assert_eq!(usage.0["output_tokens"], usage.1["completion_tokens"]);
        assert_eq!(usage.0["total_tokens"], usage.1["total_tokens"]);

        body["stream"] = true.into();
        let events = events(&ask(&server, &body));
        let kinds: Vec<&str> = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .collect();
        let mut expected = vec![
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ];
        let last = format!("response.{status}");
        let deltas = kinds
            .iter()
            .filter(|kind| **kind == "response.output_text.delta")
            .count();
        expected.extend(vec!["response.output_text.delta"; deltas]);
        expected.extend([
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            &last,
        ]);
        assert_eq!(kinds, expected);
        let pieces = events.iter().filter_map(|event| event["delta"].as_str());
        assert_eq!(*text, pieces.collect::<String>());
        let end = events.last().unwrap()["response"].clone();
        assert_eq!(events[0]["response"]["status"], "in_progress");
        assert_eq!(events[0]["response"]["id"], end["id"]);
        assert_eq!(comparable(end), comparable(answer));
    }
    server.check_empty();
}

/// Biases against white space, of which JSON allows any amount.
fn no_space() -> Value {
    let ids = encode(" \n\r\t").into_iter();
    let biases = ids.map(|id| (id.to_string(), json!(-100)));
    biases.collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn the_format_of_the_text_is_enforced() {
    let server = TestServer::start(|_| {});
    let schema = json!({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "answer", "schema": schema, "strict": true});
    let mut body = json!({"input": "well?", "text": {"format": format}, "max_output_tokens": 60, "seed": 1,
        "logit_bias": no_space()});
    let answer = ask(&server, &body).json();
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    assert!(value["yes"].is_boolean());
    assert_eq!(
        (&answer["status"], &answer["text"]["format"]),
        (&json!("completed"), &format)
    );
    body["text"]["format"]["schema"] = json!({"type": "nothing"});
    assert_eq!(ask(&server, &body).error(400)["param"], "text.format");
}

#[test]
fn calls_of_functions_are_items() {
    let server = TestServer::start(|_| {});
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": false});
    let tools = json!([{"type": "function", "name": "weather", "description": "The weather.", "parameters": city}]);
    for choice in [
        json!("required"),
        json!({"type": "function", "name": "weather"}),
        json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}),
    ] {
        let mut body = json!({"input": "go", "tools": tools, "tool_choice": choice, "max_output_tokens": 120,
            "seed": 6, "logit_bias": no_space(),
            // Of a text, and so not of a required call.
            "text": {"format": {"type": "json_schema", "name": "one", "schema": {"const": 1}}}});
        let answer = ask(&server, &body).json();
        let [call] = answer["output"].as_array().unwrap().as_slice() else {
            panic!("{answer}");
        };
        assert_eq!(
            (&call["type"], &call["name"]),
            (&json!("function_call"), &json!("weather"))
        );
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
        assert_eq!(
            (&answer["tools"], &answer["tool_choice"]),
            (&tools, &choice)
        );
        body["stream"] = true.into();
        let events = events(&ask(&server, &body));
        let kinds: Vec<&str> = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .collect();
        assert_eq!(
            kinds,
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.completed"
            ]
        );
        assert_eq!(events[3]["delta"], call["arguments"]);
        assert_eq!(
            comparable(events[6]["response"].clone()),
            comparable(answer.clone())
        );
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let server = TestServer::start(|_| {});
    for (fields, param, message) in [
        (json!({"store": true}), "store", "does not support"),
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
            "does not support",
        ),
        (
            json!({"conversation": "conv_1"}),
            "conversation",
            "does not support",
        ),
        (
            json!({"background": true}),
            "background",
            "does not support",
        ),
        (
            json!({"reasoning": {"summary": "detailed"}}),
            "reasoning.summary",
            "auto",
        ),
        (
            json!({"include": ["message.output_text.logprobs"]}),
            "include",
            "does not support",
        ),
        (json!({"n": 2}), "n", "does not support"),
        (json!({"truncation": "auto"}), "truncation", "disabled"),
        (
            json!({"text": {"verbosity": "low"}}),
            "text.verbosity",
            "medium",
        ),
        (json!({"top_logprobs": 2}), "top_logprobs", "must be 0"),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools",
            "web_search",
        ),
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "without `tools`",
        ),
        (
            json!({"text": {"format": {"type": "grammar"}}}),
            "text.format",
            "json_schema",
        ),
        (
            json!({"text": {"format": "json"}}),
            "text.format",
            "an object",
        ),
        (json!({"input": 3}), "input", "a list of items"),
        (json!({"input": []}), "input", "at least one"),
        (json!({"input": null}), "input", "missing"),
        (
            json!({"input": [{"type": "web_search_call"}]}),
            "input",
            "web_search_call",
        ),
        (
            json!({"input": [{"content": "a"}]}),
            "input",
            "input[0].role",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input",
            "input_image",
        ),
        (
            json!({"input": [{"role": "nobody", "content": "a"}]}),
            "input",
            "who is nobody",
        ),
        (
            json!({"max_output_tokens": 0}),
            "max_output_tokens",
            "at least 1",
        ),
        (
            json!({"max_output_tokens": 600}),
            "max_output_tokens",
            "lower max_output_tokens",
        ),
        (json!({"temperature": -1}), "temperature", "-1"),
    ] {
        let mut body = json!({"input": "a", "max_output_tokens": 1});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let error = ask(&server, &body).error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    // Neutral values, and fields that only OpenAI's service reads, change nothing.
    let body = json!({"input": "a", "max_output_tokens": 1, "store": false, "background": false, "include": [],
        "previous_response_id": null, "truncation": "disabled", "top_logprobs": 0, "user": "me",
        "metadata": {"a": "b"}, "stream_options": {"include_obfuscation": false}});
    let answer = ask(&server, &body).json();
    assert_eq!(answer["metadata"], json!({"a": "b"}));
    assert_eq!(
        answer["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    server.check_empty();
    let server = TestServer::with(|_| {}, |_| {}, None);
    assert_eq!(
        ask(&server, &json!({"input": "a"})).error(400)["param"],
        "input"
    );
}
