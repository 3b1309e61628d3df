//! Tests of completions: answers equal those of `generate` alone, whole and streamed.

use overdrive_generation::{FinishReason, GenerationConfig, Tokenizer};
use serde_json::{Value, json};

use crate::client::post;
use crate::support::{END, NAME, TestServer, alone, defaults, encode, tokenizer};

/// Returns the continuations that `generate` gives.
fn texts(prompt: &[i64], config: &GenerationConfig) -> Vec<String> {
    alone(prompt, config.clone()).texts
}

fn config(new: usize, seed: u64) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        seed: Some(seed),
        ..defaults()
    }
}

#[test]
fn sixteen_clients_at_once_get_the_answers_of_single_runs() {
    let server = TestServer::start(|_| {});
    std::thread::scope(|scope| {
        for client in 0..16u64 {
            let address = server.address;
            scope.spawn(move || {
                let prompt = format!("client {} says", client % 5);
                let temperature = [0.0, 0.7, 1.0, 1.3][client as usize % 4];
                let body = json!({
                    "model": NAME, "prompt": prompt, "max_tokens": 24, "seed": client, "temperature": temperature,
                    "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"70": 3, "71": -100},
                });
                let answer = post(address, "/v1/completions", &body).json();
                let config = GenerationConfig {
                    temperature,
                    top_p: 0.9,
                    presence_penalty: 0.5,
                    frequency_penalty: -0.5,
                    logit_bias: [(70, 3.0), (71, -100.0)].into_iter().collect(),
                    ..config(24, client)
                };
                let want = alone(&encode(&prompt), config);
                assert_eq!(answer["choices"][0]["text"], want.texts[0], "{body}");
                let reason = match want.finish_reasons[0] {
                    FinishReason::Length => "length",
                    _ => "stop",
                };
                assert_eq!(answer["choices"][0]["finish_reason"], reason);
                let (prompt, new) = (encode(&prompt).len(), want.new_tokens(0).len());
                // Prompts with a common beginning share blocks, depending on their order.
                let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
                assert!(cached.as_u64().unwrap() < prompt as u64, "{answer}");
                let usage = json!({
                    "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
                    "prompt_tokens_details": {"cached_tokens": cached},
                });
                assert_eq!(answer["usage"], usage);
                assert_eq!(answer["object"], "text_completion");
            });
        }
    });
    server.check_empty();
}

#[test]
fn several_prompts_and_choices_are_numbered_one_after_the_other() {
    let server = TestServer::start(|_| {});
    let body = json!({
        "prompt": ["first", "second"], "n": 3, "max_tokens": 9, "seed": 5, "temperature": 1.2, "echo": true,
    });
    let answer = post(server.address, "/v1/completions", &body).json();
    let choices = answer["choices"].as_array().unwrap();
    let mut index = 0;
    for prompt in ["first", "second"] {
        let config = GenerationConfig {
            temperature: 1.2,
            num_return_sequences: 3,
            ..config(9, 5)
        };
        for text in texts(&encode(prompt), &config) {
            assert_eq!(choices[index]["index"], index);
            assert_eq!(choices[index]["text"], format!("{prompt}{text}"));
            index += 1;
        }
    }
    assert_eq!(choices.len(), index);
    // Ids are the same prompt as their text.
    let by_ids = json!({"prompt": [encode("first"), encode("second")], "n": 3, "max_tokens": 9, "seed": 5,
        "temperature": 1.2, "echo": true});
    assert_eq!(
        post(server.address, "/v1/completions", &by_ids).json()["choices"],
        answer["choices"]
    );
    let one = json!({"prompt": encode("first"), "max_tokens": 4, "temperature": 0});
    let text = json!({"prompt": "first", "max_tokens": 4, "temperature": 0});
    let ask =
        |body: &Value| post(server.address, "/v1/completions", body).json()["choices"].clone();
    assert_eq!(ask(&one), ask(&text));
}

/// Returns `true` if two values are equal but for the rounding of numbers: it depends on the texts that happen to be
/// computed together.
fn is_close(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() < 1e-5
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_close(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let close = |(key, a)| b.get(key).is_some_and(|b| is_close(a, b));
            a.len() == b.len() && a.iter().all(close)
        }
        _ => a == b,
    }
}

#[test]
fn a_stream_has_the_text_and_the_log_probabilities_of_the_whole_answer() {
    let server = TestServer::start(|_| {});
    let mut body = json!({
        "prompt": ["one", "two"], "n": 2, "max_tokens": 20, "seed": 8, "logprobs": 2,
    });
    let whole = post(server.address, "/v1/completions", &body).json();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut events = post(server.address, "/v1/completions", &body).events();
    let last = events.pop().unwrap();
    assert_eq!(
        (&last["choices"], &last["usage"]),
        (&json!([]), &whole["usage"])
    );
    let mut choices = vec![json!({"text": "", "logprobs": {}}); 4];
    for event in &events {
        assert_eq!(event["usage"], Value::Null);
        assert_eq!(event["id"], events[0]["id"]);
        let [choice] = event["choices"].as_array().unwrap().as_slice() else {
            panic!("{event}");
        };
        let own = &mut choices[choice["index"].as_u64().unwrap() as usize];
        assert!(
            own.get("finish_reason").is_none(),
            "a chunk after the last: {event}"
        );
        let text = own["text"].as_str().unwrap().to_owned() + choice["text"].as_str().unwrap();
        own["text"] = text.into();
        if let Some(logprobs) = choice["logprobs"].as_object() {
            for (name, values) in logprobs {
                let mut all = own["logprobs"][name]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                all.extend(values.as_array().unwrap().iter().cloned());
                own["logprobs"][name] = all.into();
            }
        }
        if !choice["finish_reason"].is_null() {
            own["finish_reason"] = choice["finish_reason"].clone();
        }
    }
    for (index, choice) in choices.iter().enumerate() {
        for name in ["text", "logprobs", "finish_reason"] {
            let expected = &whole["choices"][index][name];
            assert!(
                is_close(&choice[name], expected),
                "{name} of {index}: {} and {expected}",
                choice[name]
            );
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let server = TestServer::start(|_| {});
    let body = json!({"prompt": "log", "max_tokens": 6, "temperature": 0, "logprobs": 3});
    let answer = post(server.address, "/v1/completions", &body).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    let config = GenerationConfig {
        temperature: 0.0,
        logprobs: Some(3),
        ..config(6, 0)
    };
    let want = alone(&encode("log"), config);
    let rows = &want.logprobs.as_ref().unwrap()[0];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), rows.len());
    let mut offset = 0;
    for (index, row) in rows.iter().enumerate() {
        let value = logprobs["token_logprobs"][index].as_f64().unwrap();
        assert!((value - f64::from(row.logprob)).abs() < 1e-4);
        // The likeliest is the chosen one.
        let top = logprobs["top_logprobs"][index].as_object().unwrap();
        let token = logprobs["tokens"][index].as_str().unwrap();
        assert_eq!(top[token], logprobs["token_logprobs"][index]);
        assert_eq!(logprobs["text_offset"][index], offset);
        // A character counts where it begins.
        let is_inner = ["8", "9", "a", "b"]
            .iter()
            .any(|x| token.starts_with(&format!("bytes:\\x{x}")));
        offset += match token.starts_with("bytes:") {
            true => usize::from(!is_inner),
            false => token.chars().count(),
        };
    }
    // Most tokens of this tokenizer are parts of characters, and each has an entry of its own.
    let many = json!({"prompt": "log", "max_tokens": 6, "temperature": 0, "logprobs": 20});
    let answer = post(server.address, "/v1/completions", &many).json();
    let tops = answer["choices"][0]["logprobs"]["top_logprobs"]
        .as_array()
        .unwrap();
    let mut parts = 0;
    for top in tops {
        let top = top.as_object().unwrap();
        // Ids without a token have an empty text in common.
        assert!(top.len() > 15, "{top:?}");
        parts += top
            .keys()
            .filter(|key| key.starts_with("bytes:\\x"))
            .count();
    }
    assert!(parts > tops.len(), "{parts} parts of characters");
    let zero = json!({"prompt": "log", "max_tokens": 2, "temperature": 0, "logprobs": 0});
    let answer = post(server.address, "/v1/completions", &zero).json();
    let tops = &answer["choices"][0]["logprobs"]["top_logprobs"];
    assert_eq!(tops[0].as_object().unwrap().len(), 1);
}

#[test]
fn text_ends_before_a_stop_string_and_at_a_stop_token() {
    let server = TestServer::start(|_| {});
    let greedy = GenerationConfig {
        temperature: 0.0,
        ..config(24, 0)
    };
    let free = alone(&encode("stop"), greedy.clone());
    // A string of this model's own continuation, which is not at its beginning.
    let characters: Vec<char> = free.texts[0].chars().collect();
    let stop: String = characters[5..7].iter().collect();
    let want = GenerationConfig {
        stop_strings: vec![stop.clone()],
        ..greedy.clone()
    };
    let want = texts(&encode("stop"), &want).remove(0);
    assert!(!want.contains(&stop) && want.len() < free.texts[0].len());
    let mut body = json!({"prompt": "stop", "max_tokens": 24, "temperature": 0, "stop": stop});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], want);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    body["stream"] = true.into();
    let streamed = post(server.address, "/v1/completions", &body).events();
    let text: String = streamed
        .iter()
        .map(|event| event["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, want);
    let third = free.new_tokens(0)[2];
    let first = free
        .new_tokens(0)
        .iter()
        .position(|id| *id == third)
        .unwrap();
    let body =
        json!({"prompt": "stop", "max_tokens": 24, "temperature": 0, "stop_token_ids": [third]});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], first + 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn the_default_is_sixteen_tokens_and_the_end_of_text_ends_before() {
    let server = TestServer::start(|_| {});
    let body = json!({"prompt": "x", "ignore_eos": true});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let end = END.to_string();
    let body = json!({"prompt": "x", "logit_bias": {end: 100}});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn before_min_tokens_nothing_stops_and_a_token_that_stops_has_no_text() {
    let server = TestServer::start(|_| {});
    let greedy = GenerationConfig {
        temperature: 0.0,
        ..config(24, 0)
    };
    let free = alone(&encode("stop"), greedy.clone());
    let ids = free.new_tokens(0);
    // The first token that is another than those before it.
    let end = ids.iter().position(|id| *id != ids[0]).unwrap();
    let stop = ids[end];
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "stop", "max_tokens": 24, "temperature": 0});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let answer = post(server.address, "/v1/completions", &body).json();
        body["stream"] = true.into();
        let events = post(server.address, "/v1/completions", &body).events();
        let choices = events.iter().map(|event| &event["choices"][0]);
        let streamed: String = choices.map(|one| one["text"].as_str().unwrap()).collect();
        assert_eq!(answer["choices"][0]["text"], streamed, "{body}");
        answer
    };
    let answer = ask(json!({"stop_token_ids": [stop]}));
    let before = GenerationConfig {
        max_new_tokens: Some(end),
        ..greedy.clone()
    };
    assert_eq!(
        answer["choices"][0]["text"],
        texts(&encode("stop"), &before)[0]
    );
    assert_eq!(answer["usage"]["completion_tokens"], end + 1);

    let answer = ask(json!({"stop_token_ids": [stop], "min_tokens": 24}));
    let others = GenerationConfig {
        suppress_tokens: vec![stop, END],
        ..greedy.clone()
    };
    assert_eq!(
        answer["choices"][0]["text"],
        texts(&encode("stop"), &others)[0]
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");

    let body = json!({"prompt": "stop", "max_tokens": 24, "min_tokens": 25});
    let error = post(server.address, "/v1/completions", &body).error(400);
    assert_eq!(
        error["message"],
        "`min_tokens` is 25; it must be at most `max_tokens`, which is 24"
    );

    let string: String = free.texts[0].chars().skip(5).take(2).collect();
    let answer = ask(json!({"stop": string, "min_tokens": 24}));
    let whole = GenerationConfig {
        suppress_tokens: vec![END],
        ..greedy
    };
    assert_eq!(
        answer["choices"][0]["text"],
        texts(&encode("stop"), &whole)[0]
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");

    // A stop string that is a special token, which has no text.
    let end = END.to_string();
    let answer = ask(json!({"stop": "<end>", "ignore_eos": true, "logit_bias": {end: 100}}));
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn truncation_and_padding_of_the_tokenizer_change_no_prompt() {
    let mut limited = serde_json::to_value(tokenizer()).unwrap();
    limited["truncation"] =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    limited["padding"] = json!({"strategy": {"Fixed": 10}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let limited: Tokenizer = serde_json::from_value(limited).unwrap();
    assert_eq!(limited.encode("a", false).unwrap().len(), 10);
    let server = TestServer::with_tokenizer(limited);
    for prompt in ["abcdef", "a"] {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
        let answer = post(server.address, "/v1/completions", &body).json();
        assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
        let greedy = GenerationConfig {
            temperature: 0.0,
            ..config(8, 0)
        };
        assert_eq!(
            answer["choices"][0]["text"],
            texts(&encode(prompt), &greedy)[0]
        );
    }
}
