//! Tests of answers with reasoning and with calls between special tokens, which a scripted model gives.

use overdrive_generation::{CacheShape, ChatTemplate, EngineModel, RaggedStep, Result, Tokenizer};
use overdrive_transformer::CausalLm;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::client::{Answer, post};
use crate::support::{END, TestServer, model};

/// A model whose answer is given: the token at each position follows from the position alone.
struct Scripted {
    model: CausalLm,
    /// The tokens of the prompt and of the answer.
    tokens: Vec<i64>,
}

impl EngineModel for Scripted {
    fn cache_shape(&self) -> Result<CacheShape> {
        Ok(self.model.cache_shape())
    }

    fn vocab_size(&self) -> usize {
        EngineModel::vocab_size(&self.model)
    }

    fn context(&self) -> usize {
        self.model.context()
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        let positions = step
            .position_ids
            .view(-1)
            .index_select(0, step.logits_indices);
        let positions = Vec::<i64>::try_from(positions).unwrap();
        let logits = EngineModel::forward(&self.model, step)?;
        let next = positions.iter().map(|&position| {
            let next = self.tokens.get(position as usize + 1);
            next.copied().unwrap_or(END)
        });
        let next = Tensor::from_slice(&next.collect::<Vec<_>>()).view([-1, 1]);
        // Beside the scripted token any other may come, if a grammar forbids that one.
        let scripted = Tensor::full(
            [positions.len() as i64, 1],
            1000.0,
            (Kind::Float, Device::Cpu),
        );
        Ok(logits.scatter(1, &next, &scripted.to_kind(logits.kind())))
    }
}

/// Returns a server whose model answers every prompt with the pieces, each of which is a token; the prompt is `prompt`,
/// and the pieces in `special` are special tokens.
fn server(prompt: &[&str], answer: &[&str], special: &[&str]) -> TestServer {
    let mut vocab = json!({"<unk>": 0, "{}": 1, "a": 2});
    let vocab = vocab.as_object_mut().unwrap();
    for piece in prompt.iter().chain(answer).chain(special) {
        let id = vocab.len();
        vocab.entry(*piece).or_insert(id.into());
    }
    vocab.insert("<end>".to_owned(), END.into());
    let added: Vec<Value> = vocab
        .iter()
        .map(|(piece, id)| {
            let is_special = special.contains(&piece.as_str()) || piece == "<end>";
            json!({"id": id, "content": piece, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": is_special})
        })
        .collect();
    let tokens = prompt.iter().chain(answer);
    let tokens = tokens
        .map(|piece| vocab[*piece].as_i64().unwrap())
        .collect();
    let tokenizer: Tokenizer = serde_json::from_value(json!({
        "version": "1.0", "added_tokens": added, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }))
    .unwrap();
    // The template names what it is asked for; the prompt is always the same.
    let source = format!(
        "{{% if tools or reasoning_effort or enable_thinking %}}{{% endif %}}{}",
        prompt.concat()
    );
    let template = ChatTemplate::new(&source).unwrap();
    let model = Scripted {
        model: model(),
        tokens,
    };
    TestServer::with_model(model, tokenizer, template)
}

fn chat(server: &TestServer, mut body: Value) -> (Value, Vec<Value>) {
    body["messages"] = json!([{"role": "user", "content": "a"}]);
    let ask = |body: &Value| -> Answer { post(server.address, "/v1/chat/completions", body) };
    let whole = ask(&body).json();
    body["stream"] = true.into();
    (whole["choices"][0].clone(), ask(&body).events())
}

/// Returns a field of the deltas, joined.
fn joined(events: &[Value], name: &str) -> String {
    let deltas = events
        .iter()
        .map(|event| &event["choices"][0]["delta"][name]);
    deltas.filter_map(Value::as_str).collect()
}

fn tools() -> Value {
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    json!([function("weather"), function("time")])
}

const HARMONY: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
];
const HARMONY_PROMPT: &[&str] = &["<|start|>", "assistant"];

#[test]
fn reasoning_is_a_field_of_its_own() {
    let harmony = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "Two",
        " and two.",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
        "It is",
        " 4.",
    ];
    let tags = [
        "<think>",
        "\n",
        "Two",
        " and two.",
        "\n",
        "</think>",
        "\n\n",
        "It is",
        " 4.",
    ];
    for (server, has_tools) in [
        (server(HARMONY_PROMPT, &harmony, HARMONY), false),
        (server(HARMONY_PROMPT, &harmony, HARMONY), true),
        (server(&["a"], &tags, &[]), false),
        (server(&["a"], &tags, &["<think>", "</think>"]), true),
        (server(&["<think>", "\n"], &tags[2..], &[]), false),
    ] {
        let mut body = json!({"reasoning_effort": "low"});
        if has_tools {
            body["tools"] = tools();
        }
        let (choice, events) = chat(&server, body);
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"], "Two and two.");
        assert_eq!(
            (&message["content"], &choice["finish_reason"]),
            (&json!("It is 4."), &json!("stop"))
        );
        assert_eq!(joined(&events, "reasoning_content"), "Two and two.");
        assert_eq!(joined(&events, "content"), "It is 4.");
    }
    // An answer that is cut in its reasoning has no content.
    let server = server(HARMONY_PROMPT, &harmony, HARMONY);
    let (choice, events) = chat(&server, json!({"max_tokens": 4}));
    assert_eq!(choice["message"]["reasoning_content"], "Two");
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(""), &json!("length"))
    );
    assert_eq!(joined(&events, "reasoning_content"), "Two");
}

#[test]
fn calls_between_special_tokens_are_read() {
    let harmony = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "Look.",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "commentary",
        " to=functions.",
        "weather",
        " ",
        "<|constrain|>",
        "json",
        "<|message|>",
        "{\"city\":",
        " \"Oslo\"}",
    ];
    let deepseek = [
        "<think>",
        "Look.",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "weather",
        "<｜tool▁sep｜>",
        "{\"city\":",
        " \"Oslo\"}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ];
    let mistral = [
        "[THINK]",
        "Look.",
        "[/THINK]",
        "[TOOL_CALLS]",
        "weather",
        "[ARGS]",
        "{\"city\":",
        " \"Oslo\"}",
    ];
    let granite = [
        "<think>",
        "Look.",
        "</think>",
        "<|tool_call|>",
        "[{\"name\": \"",
        "weather",
        "\", \"arguments\": {\"city\":",
        " \"Oslo\"}",
        "}]",
    ];
    let gemma = [
        "<|channel>",
        "thought",
        "\n",
        "Look.",
        "<channel|>",
        "<|tool_call>",
        "call:",
        "weather",
        "{city:",
        "<|\"|>",
        "Oslo",
        "<|\"|>",
        "}",
        "<tool_call|>",
    ];
    for (prompt, answer, special) in [
        (HARMONY_PROMPT, &harmony[..], HARMONY),
        (&["a"], &deepseek, &deepseek[3..5]),
        (
            &["a"],
            &mistral,
            &["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"],
        ),
        (&["a"], &granite, &["<|tool_call|>"]),
        (
            &["a"],
            &gemma,
            &[
                "<|channel>",
                "<channel|>",
                "<|tool_call>",
                "<tool_call|>",
                "<|\"|>",
            ],
        ),
    ] {
        let server = server(prompt, answer, special);
        let (choice, events) = chat(&server, json!({"tools": tools()}));
        let message = &choice["message"];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(
            (&message["reasoning_content"], &message["content"]),
            (&json!("Look."), &Value::Null)
        );
        let call = json!({"name": "weather", "arguments": "{\"city\":\"Oslo\"}"});
        assert_eq!(message["tool_calls"][0]["function"], call);
        assert_eq!(joined(&events, "reasoning_content"), "Look.");
        assert_eq!(joined(&events, "content"), "");
        let calls = events
            .iter()
            .map(|event| &event["choices"][0]["delta"]["tool_calls"][0]["function"]);
        assert_eq!(
            calls.filter(|call| !call.is_null()).collect::<Vec<_>>(),
            [&call]
        );
    }
}

#[test]
fn a_schema_begins_after_the_reasoning() {
    let harmony = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "Look.",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
        "prose",
    ];
    let tags = ["Look.", "</think>", "prose"];
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"const": {}}}});
    for (prompt, answer, special, reasoning) in [
        (HARMONY_PROMPT, &harmony[..], HARMONY, json!("Look.")),
        (&["<think>"], &tags, &[], json!("Look.")),
        // The text does not say whether it begins with reasoning.
        (&["a"], &tags, &[], Value::Null),
    ] {
        let server = server(prompt, answer, special);
        let (choice, events) = chat(&server, json!({"response_format": format}));
        let message = &choice["message"];
        assert_eq!(
            (&message["reasoning_content"], &message["content"]),
            (&reasoning, &json!("{}"))
        );
        assert_eq!(
            joined(&events, "reasoning_content"),
            reasoning.as_str().unwrap_or_default()
        );
        assert_eq!(joined(&events, "content"), "{}");
    }
}

#[test]
fn a_response_has_reasoning_as_an_item() {
    let tags = ["<think>", "Two", " and two.", "</think>", "It is", " 4."];
    let server = server(&["a"], &tags, &[]);
    let mut body = json!({"input": "a", "reasoning": {"effort": "high", "summary": "auto"}});
    let response = post(server.address, "/v1/responses", &body).json();
    let [reasoning, message] = response["output"].as_array().unwrap().as_slice() else {
        panic!("{response}");
    };
    assert_eq!(reasoning["type"], "reasoning");
    assert_eq!(
        reasoning["content"],
        json!([{"type": "reasoning_text", "text": "Two and two."}])
    );
    assert_eq!(message["content"][0]["text"], "It is 4.");
    assert_eq!(response["reasoning"]["effort"], "high");
    assert_eq!(
        response["usage"]["output_tokens_details"]["reasoning_tokens"],
        3
    );
    body["stream"] = true.into();
    let events = post(server.address, "/v1/responses", &body);
    let kinds: Vec<&str> = events
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("event: response."))
        .collect();
    assert_eq!(
        kinds,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
    );
}

#[test]
fn reasoning_of_earlier_answers_reaches_the_template() {
    let source = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}";
    let server = TestServer::with(|_| {}, |_| {}, Some(ChatTemplate::new(source).unwrap()));
    let thought = json!({"type": "reasoning", "id": "rs_1", "summary": [],
        "content": [{"type": "reasoning_text", "text": "abc"}]});
    let call = json!({"type": "function_call", "call_id": "x", "name": "time", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "x", "output": "noon"});
    let said = json!({"role": "assistant", "content": "d"});
    for items in [
        json!([thought, said]),
        json!([thought, call, output]),
        json!([said, thought, call]),
    ] {
        let body = json!({"input": items, "max_output_tokens": 1});
        let response = post(server.address, "/v1/responses", &body).json();
        assert_eq!(response["usage"]["input_tokens"], 3, "{items}");
    }
}
