//! The Jinja environment that transformers sets up for chat templates.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use overdrive_core::text::line_feeds;

use super::limits::set_limits;
use super::python_json::tojson;
use super::python_methods::python_method;

/// The variable that makes `{% generation %}` leave marks in the text.
pub(super) const MARKING: &str = "overdrive_marks_generation";

/// The marks of the beginning and the end of the assistant's text: Unicode noncharacters, which no
/// message contains.
pub(super) const MARKS: (char, char) = ('\u{fdd0}', '\u{fdd1}');

/// The name of the template in its environment.
pub(super) const NAME: &str = "chat_template";

/// Returns an environment that holds the template.
pub(super) fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        // transformers compiles templates with `trim_blocks` and `lstrip_blocks`; without them newlines
        // would differ.
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax.clone());
    // A prompt is not HTML.
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    // Templates call methods of Python's str, list and dict: `strip`, `items`, `startswith`.
    environment.set_unknown_method_callback(python_method);
    // To Jinja an undefined value is empty: templates count the `tool_calls` of a message without any.
    let length = |value: Value| match value.is_undefined() {
        true => Ok(0),
        false => filters::length(&value),
    };
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("items", |value: Value| match value.is_undefined() {
        true => Ok(Value::from(Vec::<Value>::new())),
        false => filters::items(&value),
    });
    // Whatever has a length and elements, which in Python are texts and mappings, too.
    environment.add_test("sequence", |value: Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Map)
            || minijinja::tests::is_sequence(&value)
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter(MARKING, marked);
    environment.add_function("raise_exception", |message: String| -> Result<(), Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", strftime_now);
    // Jinja's lexer does so too: a template that was saved with `\r\n`, or that a JSON file holds with it, gives the same
    // text as one with `\n`.
    let source = with_filters_for_generation_tags(&line_feeds(source));
    let source = set_limits(&mut environment, &source, syntax)?;
    environment.add_template_owned(NAME, source)?;
    Ok(environment)
}

/// Returns the local time in Python's format codes.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: {error}"),
        )
    })
}

/// Puts the text between generation tags between marks, if marks are wanted.
fn marked(state: &State<'_, '_>, text: String) -> String {
    match state.lookup(MARKING).is_some_and(|wanted| wanted.is_true()) {
        true => format!("{}{text}{}", MARKS.0, MARKS.1),
        false => text,
    }
}

/// Replaces `{% generation %}`, which encloses the assistant's text for a loss mask, by a block whose
/// text goes through [`marked`].
fn with_filters_for_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        // An unclosed tag is left to the parser, which reports its line.
        // Searched behind the opening, which shares its `%` with the closing in `{%}`.
        let Some(length) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let close = 2 + length;
        let inner = &tag[2..close];
        let word = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let plain = match word {
            "generation" => Some(format!("filter {MARKING}")),
            "endgeneration" => Some("endfilter".to_owned()),
            _ => None,
        };
        out.push_str("{%");
        match plain {
            Some(plain) => out.push_str(&inner.replacen(word, &plain, 1)),
            None => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &tag[close + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::{NAME, environment, with_filters_for_generation_tags};

    /// The expected texts are those of Jinja 3.1.6.
    #[test]
    fn undefined_values_are_empty_and_texts_and_mappings_are_sequences_as_in_jinja() {
        let source = "{{ m.x|length }}{{ m.x|count }}{{ m.x|items|list }}{{ 'abc'|length }}{{ m|items|list }} \
                      {{ 'a' is sequence }} {{ m is sequence }} {{ [] is sequence }} {{ 1 is sequence }} \
                      {{ none is sequence }}";
        let environment = environment(source).unwrap();
        let template = environment.get_template(NAME).unwrap();
        let text = template.render(minijinja::context! {m => minijinja::context! {a => 1}});
        assert_eq!(text.unwrap(), "00[]3[('a', 1)] True True True False False");
        let wrong = super::environment("{{ 1|length }}").unwrap();
        let wrong = wrong.get_template(NAME).unwrap();
        assert!(wrong.render(()).is_err());
    }

    /// The expected text is that of Jinja 3.1.6.
    #[test]
    fn line_ends_of_a_template_are_line_feeds_whatever_its_file_has() {
        let source = "{% for m in [1, 2] %}\n<{{ m }}>\n\n{{ 'a\nb' }}{% endfor %}\n\n";
        for source in [
            source.to_owned(),
            source.replace('\n', "\r\n"),
            source.replace('\n', "\r"),
        ] {
            let environment = environment(&source).unwrap();
            let text = environment.get_template(NAME).unwrap().render(()).unwrap();
            assert_eq!(text, "<1>\n\na\nb<2>\n\na\nb", "{source:?}");
        }
    }

    #[test]
    fn generation_tags_become_filters_and_nothing_else_changes() {
        let source = "a{%- if x == '%' %}b{% generation -%} c {%- endgeneration %}{% set generation = 1 %}{%";
        let want = "a{%- if x == '%' %}b{% filter overdrive_marks_generation -%} c {%- endfilter %}{% set generation = 1 %}{%";
        assert_eq!(with_filters_for_generation_tags(source), want);
    }

    /// Found by `cargo xtask fuzz chat_template`.
    #[test]
    fn a_tag_whose_opening_and_closing_share_a_character_is_left_to_the_parser() {
        for source in ["{%}", "a{%}b{% generation", "{%}{% x %}"] {
            assert_eq!(with_filters_for_generation_tags(source), source);
        }
    }
}
