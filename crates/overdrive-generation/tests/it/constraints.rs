//! Tests of constraints.
use std::ops::ControlFlow;

use crate::support::{byte_tokenizer, encode, random_model, sampled};
use overdrive_constraints::{GrammarConstraint, GrammarVocabulary};
use overdrive_generation::{
    ChoiceConstraint, Constraint, FinishReason, GenerateOptions, GenerateOutput, GeneratedToken,
    GenerationConfig, TokenMask, generate_with_options,
};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

const END: i64 = 256;

fn vocabulary(tokenizer: &Tokenizer) -> GrammarVocabulary {
    // The model has three ids more than the tokenizer.
    GrammarVocabulary::new(tokenizer, 260, &[END]).unwrap()
}

fn run(
    tokenizer: &Tokenizer,
    constraints: Vec<Box<dyn Constraint>>,
    config: &GenerationConfig,
) -> GenerateOutput {
    let model = random_model(260, 1, 3);
    let prompts = vec![encode(tokenizer, "say: "); constraints.len()];
    let options = GenerateOptions {
        tokenizer: Some(tokenizer),
        constraints,
        ..GenerateOptions::default()
    };
    let config = GenerationConfig {
        eos_token_id: vec![END],
        ..config.clone()
    };
    let go_on = |_: GeneratedToken<'_>| ControlFlow::Continue(());
    generate_with_options(&model, &prompts, &config, &options, go_on).unwrap()
}

#[test]
fn a_regular_expression_is_matched_by_every_sample() {
    let tokenizer = byte_tokenizer();
    let vocabulary = vocabulary(&tokenizer);
    let pattern = r"(yes|no|é{2}), [0-9]{3}-[a-f]+!";
    let date = |text: &str| -> bool {
        let Some((word, rest)) = text.split_once(", ") else {
            return false;
        };
        let rest: Vec<char> = rest.chars().collect();
        ["yes", "no", "éé"].contains(&word)
            && rest.len() >= 6
            && rest[..3].iter().all(char::is_ascii_digit)
            && rest[3] == '-'
            && rest[4..rest.len() - 1]
                .iter()
                .all(|c| ('a'..='f').contains(c))
            && rest[rest.len() - 1] == '!'
    };
    let constraints = (0..6)
        .map(|_| Box::new(GrammarConstraint::regex(&vocabulary, pattern).unwrap()) as _)
        .collect();
    let output = run(&tokenizer, constraints, &sampled(200, 1));
    for (text, reason) in output.texts.iter().zip(&output.finish_reasons) {
        assert!(date(text), "{text:?}");
        assert!(
            matches!(reason, FinishReason::Constraint | FinishReason::EndOfText),
            "{reason:?}"
        );
    }
    let different: std::collections::HashSet<_> = output.texts.iter().collect();
    assert!(different.len() > 1, "{different:?}");
}

#[test]
fn a_json_schema_is_followed_by_every_sample() {
    let tokenizer = byte_tokenizer();
    let vocabulary = vocabulary(&tokenizer);
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let constraints = (0..4)
        .map(|_| Box::new(GrammarConstraint::json_schema(&vocabulary, &schema).unwrap()) as _)
        .collect();
    // JSON allows any amount of white space, and a random model may generate it without end.
    let space = encode(&tokenizer, " \n\r\t");
    let config = GenerationConfig {
        suppress_tokens: space,
        ..sampled(300, 2)
    };
    let output = run(&tokenizer, constraints, &config);
    for text in &output.texts {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        let object = value.as_object().unwrap();
        assert_eq!(object.len(), 3, "{text}");
        assert!(
            object["name"].as_str().unwrap().chars().count() <= 8,
            "{text}"
        );
        assert!(
            (0..=120).contains(&object["age"].as_i64().unwrap()),
            "{text}"
        );
        let tags = object["tags"].as_array().unwrap();
        assert!(
            tags.len() <= 3 && tags.iter().all(|t| t == "a" || t == "b"),
            "{text}"
        );
    }
}

#[test]
fn one_of_a_list_of_texts_is_chosen_by_greedy_search_and_by_samples() {
    let tokenizer = byte_tokenizer();
    let choices = ["red", "green", "greenish", "blue"];
    for config in [sampled(20, 5), crate::support::greedy(20)] {
        let constraints = (0..5)
            .map(|_| {
                Box::new(ChoiceConstraint::from_texts(&tokenizer, &choices, &[END]).unwrap()) as _
            })
            .collect();
        let output = run(&tokenizer, constraints, &config);
        for text in &output.texts {
            assert!(choices.contains(&text.as_str()), "{text:?}");
        }
    }
}

#[test]
fn a_mask_holds_what_may_come_next_and_a_fork_goes_its_own_way() {
    let tokenizer = byte_tokenizer();
    let vocabulary = vocabulary(&tokenizer);
    let mut constraint = GrammarConstraint::regex(&vocabulary, "ab?").unwrap();
    let id = |text: &str| encode(&tokenizer, text)[0];
    let allowed = |constraint: &mut dyn Constraint| {
        let mut mask = TokenMask::new(260);
        constraint.allowed(&mut mask).unwrap();
        (0..260)
            .filter(|&id| mask.is_allowed(id))
            .collect::<Vec<i64>>()
    };
    assert_eq!(allowed(&mut constraint), [id("a")]);
    constraint.advance(id("a")).unwrap();
    assert_eq!(allowed(&mut constraint), [id("b"), END]);
    let mut other = constraint.fork();
    other.advance(END).unwrap();
    assert!(other.is_finished() && !constraint.is_finished());
    constraint.advance(id("b")).unwrap();
    assert!(constraint.is_finished());
    assert_eq!(allowed(&mut constraint), [] as [i64; 0]);
}

#[test]
fn wrong_grammars_and_ends_are_refused_with_their_reason() {
    let tokenizer = byte_tokenizer();
    let vocabulary = vocabulary(&tokenizer);
    let message =
        |result: overdrive_generation::Result<GrammarConstraint>| result.unwrap_err().to_string();
    let error = message(GrammarConstraint::regex(&vocabulary, "(unclosed"));
    let why = "`(unclosed` is not a regular expression: unclosed group";
    assert_eq!(error, format!("constraint: {why}"));
    let schema = json!({"type": "no such type"});
    let error = message(GrammarConstraint::json_schema(&vocabulary, &schema));
    assert!(error.starts_with("constraint: "), "{error}");
    for ends in [&[][..], &[500]] {
        let error = GrammarVocabulary::new(&tokenizer, 260, ends)
            .unwrap_err()
            .to_string();
        assert!(error.contains("needs at least one, in 0..260"), "{error}");
    }
    let mut constraint = GrammarConstraint::regex(&vocabulary, "ab").unwrap();
    let error = constraint.advance(END).unwrap_err().to_string();
    assert!(error.contains("not complete"), "{error}");
}

#[test]
fn a_schema_of_which_every_text_would_contain_another_is_refused_with_the_reference() {
    let tokenizer = byte_tokenizer();
    let vocabulary = vocabulary(&tokenizer);
    for (schema, reference) in [
        (json!({"$ref": "#"}), "#"),
        (json!({"allOf": [{"type": "object"}, {"$ref": "#"}]}), "#"),
        (json!({"anyOf": [{"$ref": "#"}]}), "#"),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            "#/$defs/a",
        ),
        (
            json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
            "#",
        ),
        (
            json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
            "#",
        ),
    ] {
        let error = GrammarConstraint::json_schema(&vocabulary, &schema);
        let error = error.unwrap_err().to_string();
        let expected =
            format!("constraint: the JSON schema is infinitely recursive through {reference:?}");
        assert!(error.starts_with(&expected), "{schema}: {error}");
    }
    for schema in [
        json!({"type": "object", "properties": {"next": {"$ref": "#"}}}),
        json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        json!({"type": "array", "items": {"$ref": "#"}}),
        json!({
            "$ref": "#/$defs/tree",
            "$defs": {"tree": {"type": "object", "required": ["children", "left"], "properties": {
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
            }}},
        }),
    ] {
        let made = GrammarConstraint::json_schema(&vocabulary, &schema);
        assert!(made.is_ok(), "{schema}: {made:?}");
    }
}

#[test]
fn a_text_that_no_token_continues_is_an_error_of_one_line() {
    let tokenizer = byte_tokenizer();
    let quote = encode(&tokenizer, "\"");
    let vocabulary = GrammarVocabulary::new(&tokenizer, 260, &quote).unwrap();
    let schema = json!({"type": "string"});
    let mut constraint = GrammarConstraint::json_schema(&vocabulary, &schema).unwrap();
    let error = constraint.allowed(&mut TokenMask::new(260)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("no token continues the text"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}
