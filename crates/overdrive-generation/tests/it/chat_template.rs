//! Tests of chat templates against transformers' `apply_chat_template`, and of the folders that hold
//! them.

use std::fs::{create_dir, write};

use overdrive_generation::{ChatTemplate, ChatTemplateOptions, Error, Message};
use serde_json::{Value, json};

fn fixtures() -> Value {
    serde_json::from_str(include_str!("../fixtures/chat_templates.json")).unwrap()
}

fn hello() -> Vec<Message> {
    vec![Message::user("hello")]
}

fn render(template: &ChatTemplate) -> String {
    template.render(&hello(), &Default::default()).unwrap()
}

#[test]
fn templates_render_byte_for_byte_what_transformers_renders() {
    let fixtures = fixtures();
    let cases = fixtures["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 92);
    for (number, case) in cases.iter().enumerate() {
        let name = case["name"].as_str().unwrap();
        let mut template =
            ChatTemplate::new(fixtures["templates"][name].as_str().unwrap()).unwrap();
        for (key, token) in case["special_tokens"].as_object().unwrap() {
            template = template.with_special_token(key, token.as_str().unwrap());
        }
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let options: ChatTemplateOptions = serde_json::from_value(case["options"].clone()).unwrap();
        let rendered = template.render(&messages, &options);
        if let Some(text) = case["text"].as_str() {
            let context = format!("case {number}, {name}: {}", case["options"]);
            assert_eq!(rendered.unwrap(), text, "{context}");
        } else {
            let want = case["error"].as_str().unwrap();
            let error = rendered.unwrap_err().to_string();
            // Python has its own message for a missing key.
            let same = error.contains(want) || want.contains("has no attribute");
            assert!(same, "case {number}, {name}: {error} for {want}");
        }
    }
}

#[test]
fn arguments_of_calls_are_text_for_a_template_that_appends_them() {
    let call = json!({"function": {"name": "f", "arguments": {"city": "Ülm", "days": 3}}});
    let messages = [Message::assistant("").with("tool_calls", json!([call]))];
    let render = |source: &str| {
        let source = format!("{{% for call in messages[0].tool_calls %}}{source}{{% endfor %}}");
        ChatTemplate::new(&source)
            .unwrap()
            .render(&messages, &Default::default())
    };
    let text = "{\"city\": \"Ülm\", \"days\": 3}";
    assert_eq!(
        render("{{ 'f ' + call.function.arguments }}").unwrap(),
        format!("f {text}")
    );
    assert_eq!(
        render("{{ call.function.arguments | tojson }}").unwrap(),
        text
    );
    let error = render("{{ 1 + call.function.arguments }}").unwrap_err();
    assert!(error.to_string().contains("dict"), "{error}");
}

#[test]
fn a_folder_gives_one_template_or_several_with_their_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let error = ChatTemplate::from_dir(dir.path()).unwrap_err();
    assert!(matches!(error, Error::NoChatTemplate { .. }));
    assert!(error.to_string().contains("may be a base model"), "{error}");

    let put = |name: &str, value: Value| write(dir.path().join(name), value.to_string()).unwrap();
    put("chat_template.json", json!({"chat_template": "processor"}));
    assert_eq!(
        render(&ChatTemplate::from_dir(dir.path()).unwrap()),
        "processor"
    );

    put(
        "tokenizer_config.json",
        json!({
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": true},
            "extra_special_tokens": {"image_token": "<img>"},
            // transformers 5 writes such a token here.
            "audio_token": "<audio>",
            "add_bos_token": true,
            "chat_template": [
                {
                    "name": "default",
                    "template": "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ audio_token }}{{ add_bos_token }}",
                },
                {"name": "tool_use", "template": "tools {{ tools | tojson }}"},
            ],
        }),
    );
    let template = ChatTemplate::from_dir(dir.path()).unwrap();
    assert_eq!(render(&template), "<s></s><img><audio>");
    assert_eq!(template.special_token("eos_token"), Some("</s>"));
    assert_eq!(
        template.names().collect::<Vec<_>>(),
        ["default", "tool_use"]
    );
    let tools = ChatTemplateOptions {
        tools: Some(vec![json!({"name": "f"})]),
        ..Default::default()
    };
    let text = template.render(&hello(), &tools).unwrap();
    assert_eq!(text, "tools [{\"name\": \"f\"}]");
    let other = ChatTemplateOptions {
        template: Some("rag".to_owned()),
        ..Default::default()
    };
    let error = template.render(&hello(), &other).unwrap_err().to_string();
    assert_eq!(
        error,
        "`template` is \"rag\"; it must be one of the model's templates, default, tool_use"
    );

    // The file wins over the JSON entry.
    write(
        dir.path().join("chat_template.jinja"),
        "file {{ messages[0].content }}",
    )
    .unwrap();
    let more = dir.path().join("additional_chat_templates");
    create_dir(&more).unwrap();
    write(more.join("rag.jinja"), "cite").unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap();
    assert_eq!(render(&template), "file hello");
    assert_eq!(template.render(&hello(), &other).unwrap(), "cite");
}

#[test]
fn errors_name_the_line_and_the_reason() {
    let error = ChatTemplate::new("{{ bos_token }}\n{% for m in messages %}").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("chat template: line 2: syntax error"),
        "{error}"
    );
    let template = ChatTemplate::new("\n{{ messages[0].a.b }}").unwrap();
    let error = template.render(&hello(), &Default::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("chat template: line 2: undefined"),
        "{error}"
    );
    let error = template.render(&[], &Default::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "conversation: it is empty: give at least one message"
    );
    let open = ChatTemplateOptions {
        continue_final_message: true,
        ..Default::default()
    };
    let template = ChatTemplate::new("nothing of it").unwrap();
    let error = template.render(&hello(), &open).unwrap_err().to_string();
    assert!(error.contains("drops the last message"), "{error}");
}

#[test]
fn the_date_of_today_is_in_the_format_asked_for() {
    let template = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}").unwrap();
    let date = render(&template);
    let parts: Vec<_> = date.split(' ').collect();
    assert_eq!(
        (parts[0].len(), parts[1].len(), parts[2].len()),
        (2, 3, 4),
        "{date}"
    );
    assert!(parts[2].parse::<u32>().unwrap() >= 2025);
}

#[test]
fn the_byte_ranges_between_generation_tags_are_returned() {
    let template = ChatTemplate::new(
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %} {{ m.content }}\n\
         {%- endgeneration %};{% else %}U:{{ m.content }};{% endif %}{% endfor %}",
    )
    .unwrap();
    let conversation = [
        Message::user("é"),
        Message::assistant("ü🦀"),
        Message::user("b"),
        Message::assistant("c"),
    ];
    let options = ChatTemplateOptions::default();
    let (text, answers) = template
        .render_with_answers(&conversation, &options)
        .unwrap();
    assert_eq!(text, "U:é;A: ü🦀;U:b;A: c;");
    assert_eq!(text, template.render(&conversation, &options).unwrap());
    let said: Vec<&str> = answers
        .unwrap()
        .into_iter()
        .map(|range| &text[range])
        .collect();
    assert_eq!(said, [" ü🦀", " c"]);

    let without = ChatTemplate::new("{{ messages[0].content }}").unwrap();
    let (text, answers) = without
        .render_with_answers(&conversation, &options)
        .unwrap();
    assert_eq!((text.as_str(), answers), ("é", None));
    let forged = [Message::assistant("a\u{fdd0}b")];
    assert!(template.render_with_answers(&forged, &options).is_err());
}

/// Returns the error of a template, or of its rendering.
fn refusal(source: &str) -> String {
    let rendered = ChatTemplate::new(source)
        .and_then(|template| template.render(&hello(), &Default::default()));
    rendered.unwrap_err().to_string()
}

#[test]
fn an_endless_loop_ends_with_an_error_that_names_its_line() {
    let source =
        "a\n{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    let error = refusal(source);
    let expected = "chat template: line 2: it exceeds the step limit of one rendering";
    assert!(error.starts_with(expected), "{error}");
    // Through macros, which call one another.
    let error = refusal("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}");
    assert!(error.contains("recursion"), "{error}");
}
