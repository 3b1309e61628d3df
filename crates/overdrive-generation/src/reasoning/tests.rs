use proptest::prelude::*;

use super::*;

fn tokenizer(marks: &[&str]) -> Tokenizer {
    let added: Vec<_> = marks
        .iter()
        .enumerate()
        .map(|(id, mark)| {
            serde_json::json!({"id": id + 1, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": added,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    });
    serde_json::from_value(json).unwrap()
}

/// Parses an answer in one piece, and character by character, which must not matter.
fn parse(parser: &ReasoningParser, answer: &str) -> (String, String) {
    let by = |pieces: Vec<String>| {
        let mut parser = parser.clone();
        let mut texts: Vec<AnswerText> = pieces.iter().map(|piece| parser.push(piece)).collect();
        texts.push(parser.finish());
        let reasoning = texts.iter().map(|text| text.reasoning.as_str());
        let content = texts.iter().map(|text| text.content.as_str());
        (reasoning.collect::<String>(), content.collect::<String>())
    };
    let whole = by(vec![answer.to_owned()]);
    let letters = by(answer.chars().map(String::from).collect());
    assert_eq!(whole, letters, "{answer:?}");
    whole
}

fn pair(reasoning: &str, content: &str) -> (String, String) {
    (reasoning.to_owned(), content.to_owned())
}

#[test]
fn text_between_marks_is_reasoning() {
    let parser = ReasoningParser::new(&tokenizer(&[]), &[]).unwrap();
    for (answer, reasoning, content) in [
        ("<think>\nTwo and two.\n</think>\n\n4", "Two and two.", "4"),
        (
            "\n<think>a </ b</think>c</think> <think>",
            "a </ b",
            "c</think> <think>",
        ),
        ("[THINK]a[b[/THINK] c", "a[b", "c"),
        ("<|channel>thought\na\n\nb<channel|>c", "a\n\nb", "c"),
        ("<think>\n\n</think>\n\n4", "", "4"),
        ("<think>cut here </thi", "cut here </thi", ""),
        ("<think> whole </think>\n ", "whole", ""),
        (
            "no <think>reasoning</think>",
            "",
            "no <think>reasoning</think>",
        ),
        ("  <thin", "", "  <thin"),
        ("<thin air>", "", "<thin air>"),
        (" ", "", " "),
        ("", "", ""),
    ] {
        assert_eq!(
            parse(&parser, answer),
            pair(reasoning, content),
            "{answer:?}"
        );
    }
}

#[test]
fn a_prompt_may_begin_the_reasoning() {
    let tokenizer = tokenizer(&["<think>", "</think>", "[THINK]"]);
    let answer = "\na</think>\n\nb";
    let parsed = |prompt: &[i64]| parse(&ReasoningParser::new(&tokenizer, prompt).unwrap(), answer);
    assert_eq!(parsed(&[0, 1]), pair("a", "b"));
    assert_eq!(parsed(&[1, 2]), pair("", answer));
    assert_eq!(parsed(&[0, 3]).1, "");
    assert_eq!(parsed(&[]), pair("", answer));
}

#[test]
fn text_is_returned_as_soon_as_it_is_certain() {
    let mut parser = ReasoningParser::new(&tokenizer(&[]), &[]).unwrap();
    assert!(!parser.is_reasoning());
    let text = parser.push("<think>\n one");
    assert_eq!(
        (text.reasoning.as_str(), parser.is_reasoning()),
        ("one", true)
    );
    assert_eq!(parser.push(" \n").reasoning, "");
    assert_eq!(parser.push("two</th").reasoning, " \ntwo");
    let text = parser.push("ink> three");
    assert_eq!(
        (text.reasoning.as_str(), text.content.as_str()),
        ("", "three")
    );
    assert!(!parser.is_reasoning());
    assert_eq!(parser.push(" \n").content, " \n");
}

#[test]
fn the_channels_of_harmony_are_separated() {
    let marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"];
    let tokenizer = tokenizer(&marks);
    // After `<|start|>assistant`.
    let parser = ReasoningParser::new(&tokenizer, &[1, 0, 3, 0, 1, 0]).unwrap();
    for (answer, reasoning, content) in [
        (
            "<|channel|>analysis<|message|>Two and two.<|start|>assistant<|channel|>final<|message|>4 <| 5",
            "Two and two.",
            "4 <| 5",
        ),
        ("<|channel|>final<|message|>4", "", "4"),
        ("<|message|>4", "", "4"),
        (
            "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|start|>assistant\
             <|channel|>commentary<|message|>Let me see.<|start|>assistant<|channel|>commentary to=functions.weather \
             <|constrain|>json<|message|>{\"city\": \"Paris\"}",
            "a\n\nb",
            "Let me see.\n\n<|channel|>commentary to=functions.weather<|message|>{\"city\": \"Paris\"}",
        ),
        (
            " to=functions.time<|channel|>commentary json<|message|>{}",
            "",
            "<|channel|>commentary to=functions.time<|message|>{}",
        ),
        (
            "<|channel|>analysis to=python code<|message|>1 + 1",
            "",
            "<|channel|>commentary to=python<|message|>1 + 1",
        ),
        ("<|channel|>analysis<|message|>cut <|sta", "cut <|sta", ""),
        (
            "<|channel|>analysis<|message|>a<|start|>assistant<|chan",
            "a",
            "",
        ),
        (
            "unlearned <|channel|>final<|message|>4",
            "",
            "unlearned \n\n4",
        ),
    ] {
        assert_eq!(
            parse(&parser, answer),
            pair(reasoning, content),
            "{answer:?}"
        );
    }
    // The prompt ends in the body of a message.
    let parser = ReasoningParser::new(&tokenizer, &[1, 0, 2, 0, 3]).unwrap();
    assert_eq!(parse(&parser, "4"), pair("", "4"));
    let parser = ReasoningParser::new(&tokenizer, &[0]).unwrap();
    assert_eq!(parse(&parser, "4"), pair("", "4"));
}

proptest! {
    /// `parse` compares pieces with the whole.
    #[test]
    fn pieces_do_not_matter_and_no_text_between_marks_is_lost(
        parts in proptest::collection::vec(
            proptest::sample::select(vec![
                "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>", "<|start|>", "assistant",
                "<|channel|>", "analysis", "final", " to=functions.f", "<|message|>", "x", "é", "<", "<|", "\n", " ",
            ]),
            0..12,
        ),
    ) {
        let answer = parts.concat();
        let harmony = tokenizer(&["<|start|>", "<|channel|>", "<|message|>"]);
        parse(&ReasoningParser::new(&harmony, &[1]).unwrap(), &answer);
        let (reasoning, content) = parse(&ReasoningParser::new(&tokenizer(&[]), &[]).unwrap(), &answer);
        let letters = |text: &str| text.matches(['x', 'é']).count();
        prop_assert_eq!(letters(&reasoning) + letters(&content), letters(&answer));
    }
}
