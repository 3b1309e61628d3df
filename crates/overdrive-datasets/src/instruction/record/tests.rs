use super::*;
use crate::instruction::chat::role;

fn read(json: &str) -> Result<InstructionRecord, String> {
    InstructionRecord::from_json(json.as_bytes())
}

#[test]
fn share_gpt_becomes_roles_and_contents() {
    let record = read(
        r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}"#,
    );
    let Ok(InstructionRecord::Chat { messages, .. }) = record else {
        panic!("{record:?}")
    };
    let said: Vec<_> = messages
        .iter()
        .map(|m| (role(m), m["content"].as_str().unwrap()))
        .collect();
    assert_eq!(said, [("user", "Hi"), ("assistant", "Yes?")]);
}

#[test]
fn each_form_is_known_by_its_keys() {
    let answer = read(r#"{"prompt": "2+2=", "completion": "4", "id": 7}"#).unwrap();
    assert!(matches!(answer, InstructionRecord::Answer { ref response, .. } if response == "4"));
    let task = read(r#"{"instruction": "Add", "input": null, "output": "4"}"#).unwrap();
    assert!(matches!(task, InstructionRecord::Task { ref input, .. } if input.is_empty()));
    let chat = read(
        r#"{"prompt": [{"role": "user", "content": "?"}], "completion": [{"role": "assistant", "content": "!"}]}"#,
    );
    assert!(matches!(
        chat,
        Ok(InstructionRecord::Chat {
            prompt_messages: 1,
            ..
        })
    ));
    assert_eq!(
        read(r#"{"text": "a"}"#),
        Ok(InstructionRecord::Text("a".to_owned()))
    );
}

#[test]
fn function_calls_of_openai_and_share_gpt_become_tool_calls_with_arguments_as_json() {
    let messages = |json: &str| match read(json).unwrap() {
        InstructionRecord::Chat { messages, .. } => messages,
        other => panic!("{other:?}"),
    };
    let calls = serde_json::json!([
        {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}},
    ]);
    for (form, json) in [
        (
            "function_call",
            r#"{"messages": [{"role": "assistant", "content": null,
                "function_call": {"name": "sum", "arguments": "{\"a\": 1}"}}]}"#,
        ),
        (
            "tool_calls",
            r#"{"messages": [{"role": "assistant", "tool_calls":
                [{"type": "function", "function": {"name": "sum", "arguments": "{\"a\": 1}"}}]}]}"#,
        ),
        (
            "share_gpt",
            r#"{"conversations": [{"from": "function_call", "value": "{\"name\": \"sum\", \"arguments\": {\"a\": 1}}"}]}"#,
        ),
    ] {
        let messages = messages(json);
        assert_eq!(messages[0]["tool_calls"], calls, "{form}");
        assert_eq!(role(&messages[0]), "assistant", "{form}");
        assert!(!messages[0].contains_key("function_call"), "{form}");
    }
    let result = messages(
        r#"{"messages": [{"role": "function", "name": "sum", "content": [{"type": "text", "text": "a"},
            {"type": "text", "text": "b"}]}]}"#,
    );
    assert_eq!(
        (role(&result[0]), result[0]["content"].as_str()),
        ("tool", Some("a\nb"))
    );
    let record = read(
        r#"{"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "sum"}],
            "parallel_tool_calls": false}"#,
    );
    let Ok(InstructionRecord::Chat { tools, .. }) = record else {
        panic!("{record:?}")
    };
    let expected = serde_json::json!([{"type": "function", "function": {"name": "sum"}}]);
    assert_eq!(tools, Some(expected));
}

#[test]
fn blank_keys_are_missing_ones() {
    let record = read(
        r#"{"instruction": "a", "input": "", "output": "b", "system": "", "history": [], "tools": "", "images": []}"#,
    );
    let plain = read(r#"{"instruction": "a", "output": "b"}"#);
    assert_eq!(record, plain);
    let messages = r#"[{"role": "assistant", "content": "a", "tool_calls": [], "refusal": null}]"#;
    let record = read(&format!(r#"{{"messages": {messages}, "system": null}}"#));
    let plain = read(r#"{"messages": [{"role": "assistant", "content": "a"}]}"#);
    assert_eq!(record, plain);
}

#[test]
fn keys_that_would_change_the_text_are_refused_by_name() {
    let chat =
        |more: &str| format!(r#"{{"conversations": [{{"from": "human", "value": "a"}}], {more}}}"#);
    let said = |more: &str| {
        format!(r#"{{"messages": [{{"role": "assistant", "content": "a", {more}}}]}}"#)
    };
    for (json, problem) in [
        (
            chat(r#""history": [["a", "b"]]"#),
            "it has `history` beside `conversations`; put the earlier turns into `conversations`",
        ),
        (
            chat(r#""history": ["a"]"#),
            "`history` is not a list of pairs",
        ),
        (
            chat(r#""images": ["a.png"]"#),
            "`images` is not supported; only text is supported",
        ),
        (
            chat(r#""chosen": {"from": "gpt", "value": "b"}"#),
            "`chosen` is not supported",
        ),
        (chat(r#""kto_tag": false"#), "`kto_tag` is not supported"),
        (
            chat(r#""tools": [{}], "functions": [{}]"#),
            "it has `tools` and `functions`",
        ),
        (
            chat(r#""system": "a", "system_prompt": "b""#),
            "it has `system` and `system_prompt`, which differ",
        ),
        (
            r#"{"messages": [{"role": "system", "content": "a"}], "system": "b"}"#.to_owned(),
            "it has `system`, and another system message in `messages`; remove one of them",
        ),
        (
            r#"{"text": "a", "system": "b"}"#.to_owned(),
            "it has `system` beside `text`, which must be the complete text",
        ),
        (
            said(r#""weight": 0.5"#),
            "has a `weight` of 0.5; it must be 0 or false",
        ),
        (
            said(r#""weight": 0, "train": true"#),
            "has `weight` and `train`, which contradict",
        ),
        (
            said(r#""refusal": "No.""#),
            "has `refusal`, which is not supported; put the text",
        ),
        (
            said(r#""train_detail": [{}]"#),
            "has `train_detail`, which is not supported",
        ),
        (
            said(r#""tool_calls": [{"function": {"name": "f", "arguments": "{"}}]"#),
            "has a call whose `arguments` are not JSON",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a", "weight": 1}]}"#.to_owned(),
            "message 1 of `messages` has `weight`, but is from the user; only messages of the assistant",
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#.to_owned(),
            "has a part of the type \"image_url\" in `content`; only text is supported",
        ),
    ] {
        let error = read(&json).unwrap_err();
        assert!(error.contains(problem), "{json}: {error}");
    }
    // A system prompt that occurs twice counts once, and published preference data repeats the chosen
    // answer in `messages`.
    let twice =
        r#"{"messages": [{"role": "system", "content": "a"}], "system": "a", "chosen": "b"}"#;
    assert_eq!(
        read(twice),
        read(r#"{"messages": [{"role": "system", "content": "a"}]}"#)
    );
}

#[test]
fn invalid_records_are_errors_with_a_reason() {
    for (json, problem) in [
        (
            r#"{"prompt": "a"}"#,
            "it has `prompt`, but neither `response` nor `completion`",
        ),
        (
            r#"{"question": "a"}"#,
            "it has question; expected `messages`",
        ),
        (r#"{"messages": []}"#, "`messages` is an empty list"),
        (
            r#"{"messages": [{"content": "a"}]}"#,
            "message 1 of `messages` has no `role`",
        ),
        (
            r#"{"messages": [{"role": "user", "content": 3}]}"#,
            "has a `content` that is a number",
        ),
        (
            r#"{"conversations": [{"from": "x", "value": "a"}]}"#,
            "is from \"x\", which is not a known role",
        ),
        (
            r#"{"prompt": 3, "response": "a"}"#,
            "`prompt` is a number, expected a text",
        ),
        (r#"[1]"#, "expected a JSON object"),
        (r#"{"text": "a""#, "EOF while parsing"),
    ] {
        let error = read(json).unwrap_err();
        assert!(error.contains(problem), "{json}: {error}");
    }
}

fn preference(json: &str) -> [Result<InstructionRecord, String>; 2] {
    [AnswerKey::Chosen, AnswerKey::Rejected]
        .map(|answer| InstructionRecord::from_preference_json(json.as_bytes(), answer))
}

#[test]
fn the_two_answers_of_a_preference_record_are_the_answers_to_one_prompt() {
    let [chosen, rejected] =
        preference(r#"{"prompt": "1+1=", "chosen": "2", "rejected": "3", "system": "Add."}"#);
    let answer = |text: &str| InstructionRecord::Answer {
        system: Some("Add.".to_owned()),
        prompt: "1+1=".to_owned(),
        response: text.to_owned(),
    };
    assert_eq!(chosen, Ok(answer("2")));
    assert_eq!(rejected, Ok(answer("3")));

    let user = r#"{"role": "user", "content": "Hi"}"#;
    let says = |text: &str| format!(r#"{{"role": "assistant", "content": "{text}"}}"#);
    let (good, bad) = (says("Hello!"), says("What?"));
    let explicit = format!(r#"{{"prompt": [{user}], "chosen": [{good}], "rejected": [{bad}]}}"#);
    // Whole conversations, as in published data, with or without the question as a text.
    let whole = format!(
        r#"{{"chosen": [{user}, {good}], "rejected": [{user}, {bad}], "messages": [{user}, {good}]}}"#
    );
    let repeated = whole.replacen('{', r#"{"prompt": "Hi", "#, 1);
    for json in [&explicit, &whole, &repeated] {
        for (record, text) in preference(json).into_iter().zip(["Hello!", "What?"]) {
            let Ok(InstructionRecord::Chat {
                messages,
                prompt_messages: 1,
                ..
            }) = record
            else {
                panic!("{json}: {record:?}")
            };
            assert_eq!(messages.len(), 2, "{json}");
            assert_eq!(messages[1]["content"], text, "{json}");
        }
    }
}

#[test]
fn an_incomplete_preference_record_is_refused_with_the_missing_key() {
    let turn = r#"[{"role": "user", "content": "a"}]"#;
    let other = turn.replace('a', "b");
    for (json, expected) in [
        (
            r#"{"prompt": "a", "chosen": "b"}"#.to_owned(),
            "no `rejected`",
        ),
        (
            r#"{"prompt": "a", "rejected": "b"}"#.to_owned(),
            "no `chosen`",
        ),
        (
            r#"{"chosen": "ab", "rejected": "ac"}"#.to_owned(),
            "no `prompt`",
        ),
        (
            format!(r#"{{"chosen": {turn}, "rejected": {other}}}"#),
            "no first message",
        ),
        (
            format!(r#"{{"chosen": {turn}, "rejected": {turn}}}"#),
            "empty list",
        ),
        (
            format!(r#"{{"prompt": {turn}, "chosen": "b", "rejected": "c"}}"#),
            "is a text",
        ),
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": ["c"]}"#.to_owned(),
            "is a list",
        ),
    ] {
        let refused = preference(&json).into_iter().filter_map(Result::err);
        let refused: Vec<String> = refused.collect();
        assert!(
            refused.iter().any(|problem| problem.contains(expected)),
            "{json}: {refused:?}"
        );
    }
    let error = read(r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#).unwrap_err();
    assert!(error.contains("the example `dpo`"), "{error}");
}
