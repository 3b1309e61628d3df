//! Tests of what evaluation harnesses ask for: the log-probabilities of prompts, and prompts of token ids.

use overdrive_transformer::{CausalLm, ForwardInput};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::client::{Answer, post};
use crate::support::{END, TestServer, encode, model};

fn ask(server: &TestServer, body: &Value) -> Answer {
    post(server.address, "/v1/completions", body)
}

/// Returns the log-probability of each token of a prompt after the first, and the largest one at its position, from
/// one pass of the model over the whole prompt.
pub(crate) fn scores(model: &CausalLm, prompt: &[i64]) -> Vec<(f64, f64)> {
    let ids = Tensor::from_slice(prompt).unsqueeze(0);
    let logits = tch::no_grad(|| model.forward(ForwardInput::new(&ids)).unwrap());
    let all = logits.squeeze_dim(0).log_softmax(-1, Kind::Float);
    let (best, _) = all.max_dim(-1, false);
    let one = |at: usize| {
        let before = at as i64 - 1;
        (
            all.double_value(&[before, prompt[at]]),
            best.double_value(&[before]),
        )
    };
    (1..prompt.len()).map(one).collect()
}

/// Checks the `logprobs` of a choice whose text begins with `prompt`, and has `new` more tokens.
pub(crate) fn check(model: &CausalLm, logprobs: &Value, prompt: &[i64], new: usize) {
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let (values, tops) = (list("token_logprobs"), list("top_logprobs"));
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(name).len(), prompt.len() + new, "{name}");
    }
    assert_eq!((&values[0], &tops[0]), (&Value::Null, &Value::Null));
    for (at, (own, best)) in (1..).zip(scores(model, prompt)) {
        let value = values[at].as_f64().unwrap();
        assert!((value - own).abs() < 1e-4, "{at}: {value} and {own}");
        let likeliest = tops[at].as_object().unwrap().values();
        let likeliest = likeliest
            .map(|x| x.as_f64().unwrap())
            .fold(f64::MIN, f64::max);
        assert!(
            (likeliest - best).abs() < 1e-4,
            "{at}: {likeliest} and {best}"
        );
    }
}

/// Returns the request that lm_eval's `local-completions` sends.
fn harness(prompt: impl Into<Value>) -> Value {
    json!({"model": crate::support::NAME, "prompt": prompt.into(), "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": true, "temperature": 0})
}

#[test]
fn an_echoed_prompt_has_its_own_log_probabilities() {
    let texts = [
        "evaluate me",
        "x",
        "a longer prompt, whose chunks are read in several steps, and émojis 🦀",
    ];
    let model = model();
    // At once; in chunks; with so few blocks that prompts are read again.
    for (tokens, blocks) in [(64, 512), (17, 512), (64, 23)] {
        let server = TestServer::with(
            |_| {},
            |engine| {
                engine.max_num_batched_tokens = Some(tokens);
                engine.num_blocks = Some(blocks);
            },
            None,
        );
        let ids: Vec<Vec<i64>> = texts.iter().map(|text| encode(text)).collect();
        let batch = ask(&server, &harness(json!(ids))).json();
        for (index, (text, ids)) in texts.iter().zip(&ids).enumerate() {
            let choice = &batch["choices"][index];
            assert_eq!(choice["index"], index);
            assert!(choice["text"].as_str().unwrap().starts_with(text));
            check(&model, &choice["logprobs"], ids, 1);
            let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
            assert_eq!(offsets[0], 0);
            assert_eq!(offsets[ids.len()], text.chars().count());
            // The same prompt alone, as ids and as text, now that the cache has it.
            for prompt in [json!(ids), json!(text)] {
                let mut one = ask(&server, &harness(prompt)).json()["choices"][0].clone();
                one["index"] = index.into();
                assert_eq!(one["text"], choice["text"]);
                check(&model, &one["logprobs"], ids, 1);
            }
        }
        let usage = &batch["usage"];
        let prompt: usize = ids.iter().map(Vec::len).sum();
        assert_eq!(
            (&usage["prompt_tokens"], &usage["completion_tokens"]),
            (&json!(prompt), &json!(3))
        );
        server.check_empty();
    }
}

#[test]
fn a_prompt_can_be_scored_without_an_answer() {
    let server = TestServer::start(|_| {});
    let model = model();
    let ids = encode("nothing more");
    let mut body = harness("nothing more");
    body["max_tokens"] = 0.into();
    let answer = ask(&server, &body).json();
    let choice = &answer["choices"][0];
    check(&model, &choice["logprobs"], &ids, 0);
    assert_eq!(choice["text"], "nothing more");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    // As long as the context, which leaves no room for an answer.
    let long = vec![7i64; 512];
    body["prompt"] = json!(long);
    check(
        &model,
        &ask(&server, &body).json()["choices"][0]["logprobs"],
        &long,
        0,
    );
    // Without log-probabilities, and without an echo.
    body["logprobs"] = Value::Null;
    body["prompt"] = "again".into();
    let choice = ask(&server, &body).json()["choices"][0].clone();
    assert_eq!(
        (&choice["text"], &choice["logprobs"]),
        (&json!("again"), &Value::Null)
    );
    body["echo"] = false.into();
    let error = ask(&server, &body).error(400);
    assert!(
        error["message"].as_str().unwrap().contains("with `echo`"),
        "{error}"
    );
    server.check_empty();
}

#[test]
fn a_stream_begins_with_the_log_probabilities_of_the_prompt() {
    let server = TestServer::start(|_| {});
    let model = model();
    for new in [0, 5] {
        let mut body = harness(json!(["one", "two more"]));
        body["max_tokens"] = new.into();
        body["ignore_eos"] = true.into();
        let whole = ask(&server, &body).json();
        body["stream"] = true.into();
        let events = ask(&server, &body).events();
        for (index, text) in ["one", "two more"].into_iter().enumerate() {
            let own = events.iter().map(|event| &event["choices"][0]);
            let own: Vec<&Value> = own.filter(|choice| choice["index"] == index).collect();
            assert_eq!(own[0]["text"], text);
            check(&model, &own[0]["logprobs"], &encode(text), 0);
            let joined: String = own
                .iter()
                .map(|choice| choice["text"].as_str().unwrap())
                .collect();
            assert_eq!(whole["choices"][index]["text"], joined);
            for name in ["tokens", "text_offset"] {
                let lists = own
                    .iter()
                    .filter_map(|choice| choice["logprobs"][name].as_array());
                let all: Vec<Value> = lists.flatten().cloned().collect();
                assert_eq!(
                    whole["choices"][index]["logprobs"][name],
                    json!(all),
                    "{name}"
                );
            }
        }
    }
    server.check_empty();
}

#[test]
fn samples_of_a_prompt_share_its_log_probabilities() {
    let server = TestServer::start(|_| {});
    let mut body = harness("three times");
    body["n"] = 3.into();
    body["temperature"] = 1.into();
    let answer = ask(&server, &body).json();
    let model = model();
    for choice in answer["choices"].as_array().unwrap() {
        check(&model, &choice["logprobs"], &encode("three times"), 1);
    }
    assert_eq!(answer["choices"].as_array().unwrap().len(), 3);
}

#[test]
fn prompts_of_token_ids_are_checked() {
    let server = TestServer::start(|_| {});
    let answer = |prompt: Value| {
        ask(
            &server,
            &json!({"prompt": prompt, "max_tokens": 1, "temperature": 0}),
        )
    };
    for prompt in [
        json!([72]),
        json!([72, END]),
        json!([[72]]),
        json!([[72], [1, 2, 3]]),
    ] {
        assert_eq!(answer(prompt.clone()).status, 200, "{prompt}");
    }
    for (prompt, message) in [
        (json!([]), "at least one prompt"),
        (json!([[]]), "no tokens"),
        (json!([[72], []]), "no tokens"),
        (json!(""), "no tokens"),
        (json!([72, 260]), "260"),
        (json!([[72], [-1]]), "-1"),
        (json!([72.5]), "list of token ids"),
        (json!(["a", 72]), "list of token ids"),
        (json!([["a"]]), "list of token ids"),
        (json!([[[72]]]), "list of token ids"),
        (json!({"ids": [72]}), "list of token ids"),
    ] {
        let error = answer(prompt.clone()).error(400);
        assert_eq!(error["param"], "prompt", "{prompt}");
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{prompt}: {error}"
        );
    }
    server.check_empty();
}
