use super::*;

fn tools(is_parallel: bool) -> Tools {
    let list = vec![
        json!({"type": "function", "function": {"name": "weather"}}),
        json!({"type": "function", "function": {"name": "time"}}),
    ];
    let functions = list.iter().map(|tool| function(tool).unwrap()).collect();
    Tools {
        list,
        functions,
        is_parallel,
    }
}

/// Reads an answer in one piece, and character by character, which must not matter.
fn read(text: &str, is_parallel: bool) -> (String, Vec<ToolCall>) {
    let by = |pieces: Vec<String>| {
        let mut parser = ToolCallParser::new(tools(is_parallel));
        let mut shown: String = pieces.iter().map(|piece| parser.push(piece)).collect();
        let (rest, calls) = parser.finish();
        shown.push_str(&rest);
        (shown, calls)
    };
    let whole = by(vec![text.to_owned()]);
    let letters = by(text.chars().map(String::from).collect());
    assert_eq!(whole, letters, "{text:?}");
    whole
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    }
}

#[test]
fn calls_are_read_in_each_form_and_the_rest_is_text() {
    let paris = call("weather", r#"{"city":"Paris"}"#);
    let hermes = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
                  <tool_call>{\"name\": \"time\"}";
    let both = vec![paris.clone(), call("time", "{}")];
    assert_eq!(read(hermes, true), ("Let me see.".to_owned(), both.clone()));
    assert_eq!(read(hermes, false).1, std::slice::from_ref(&paris));
    let llama = " {\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}";
    assert_eq!(read(llama, true), (String::new(), vec![paris.clone()]));
    let mistral = r#"[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": "{}"}]"#;
    assert_eq!(read(mistral, true), (String::new(), both.clone()));
    let coder = "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n\
                 </tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
    assert_eq!(read(coder, true), ("Let me see.".to_owned(), both.clone()));
    let gemma = "Let me see.\n<|tool_call>call:weather{city:<|\"|>Paris<|\"|>}<tool_call|>\
                 <|tool_call>call:time{}<tool_call|>";
    assert_eq!(read(gemma, true), ("Let me see.".to_owned(), both.clone()));
    let deepseek = "Let me see.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n\
                    {\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}\
                    <｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let small = "Let me see.[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]time{}";
    let olmo = "Let me see.\n<function_calls>\nweather(city=\"Paris\")\ntime()\n</function_calls>";
    let harmony = "Let me see.\n\n<|channel|>commentary to=functions.weather<|message|>{\"city\": \"Paris\"}\n\n\
                   <|channel|>commentary to=functions.time<|message|>";
    for text in [deepseek, small, olmo, harmony] {
        assert_eq!(read(text, true), ("Let me see.".to_owned(), both.clone()));
    }
    let list = r#"[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]"#;
    for begin in ["<|tool_call|>", "<tool_call>", "functools", "[TOOL_CALLS] "] {
        assert_eq!(
            read(&format!("{begin}{list}"), true),
            (String::new(), both.clone())
        );
    }
    assert_eq!(
        read(&format!("<|tool_call|>{list}<|/tool_call|>"), true).1,
        both
    );
    let glm = "\nweather\n{\"city\": \"Paris\"}";
    assert_eq!(read(glm, true), (String::new(), vec![paris]));
    for text in [
        "weather",
        "weather\nis fine",
        "\nweather in Paris\n{}",
        "weather\n{\"city\"",
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL",
        "[1, 2]",
        "<|tool_call|>[{\"name\": \"unknown\"}]",
        "<function_calls>\nweather(city)\n</function_calls>",
        "<｜tool▁calls▁begin｜>weather",
        "<|channel|>commentary to=python<|message|>1 + 1",
        "No tools < here <tool.  ",
        "{\"name\": \"unknown\", \"arguments\": {}}",
        "{\"a\": 1}",
        "[]",
        "{\"name\": \"weather\", \"argum",
        "<tool_call>{\"name\": \"time\"}</tool_call><tool_call>oh</tool_call>",
        "<|tool_call>call:unknown{}<tool_call|>",
        "<|tool_call>call:time{",
        "a <| b <|tool",
        "  ",
        "",
    ] {
        assert_eq!(read(text, true), (text.to_owned(), vec![]));
    }
}

#[test]
fn text_is_shown_as_soon_as_it_is_certain() {
    let mut parser = ToolCallParser::new(tools(true));
    assert_eq!(parser.push("Hello <to"), "Hello");
    assert_eq!(parser.push("ast> a"), " <toast> a");
    assert_eq!(parser.push("  <tool_call>{"), "");
    assert_eq!(parser.push("\"name\": \"time\"}"), "");
    assert_eq!(parser.finish(), (String::new(), vec![call("time", "{}")]));
}
