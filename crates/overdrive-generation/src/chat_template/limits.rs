//! The limits of a chat template, which comes with a model: steps, text, and the depth of values.
//!
//! The engine counts instructions itself. It neither bounds how deep values are nested nor how large they become:
//! a loop that assigns `[x]` to `x` would overflow the stack when the value is printed, compared or dropped. Each
//! assignment therefore passes its value through a filter of this module, and the remaining depth, which the
//! source spells out, fits a stack whose size follows from the length of the source.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

/// The largest source in bytes; the longest published templates have a tenth of it.
pub(super) const MAX_SOURCE_BYTES: usize = 256 << 10;

/// The most instructions of one rendering. A message of a conversation takes about a hundred, and the limit is
/// reached within a second.
const MAX_STEPS: u64 = 10_000_000;

/// The most text that a loop may collect from the template itself, in bytes.
const MAX_LITERAL_BYTES: u64 = 4 << 30;

/// The most text of one rendering, in bytes: some millions of tokens.
pub(super) const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// The depth to which macros, loops and includes may call one another.
const MAX_RECURSION: usize = 128;

/// The depth to which an assigned or printed value may be nested.
pub(super) const MAX_DEPTH: usize = 100;

/// The most elements, and blocks of 64 bytes of text, that assigned and printed values may have in one rendering.
const MAX_ELEMENTS: usize = 1 << 24;

/// The bytes of the stack on which a template is parsed and rendered: a base for macros, and a part for each byte
/// of the source, since two bytes can spell one more level of nesting.
const STACK_BASE: usize = 16 << 20;
const STACK_FOR_A_BYTE: usize = 2 << 10;

/// The filter of a value that is assigned to a variable.
const VARIABLE: &str = "overdrive_variable";
/// The filter of a value that is assigned to an attribute of a namespace.
const ATTRIBUTE: &str = "overdrive_attribute";

/// Sets the limits of an environment for the template `source`; returns the source with a check of every
/// assignment.
pub(super) fn set_limits(
    environment: &mut Environment<'_>,
    source: &str,
    syntax: SyntaxConfig,
) -> Result<String, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        let detail = format!(
            "it has {} bytes; a chat template must have at most {MAX_SOURCE_BYTES}",
            source.len()
        );
        return Err(Error::new(ErrorKind::InvalidOperation, detail));
    }
    let Scanned { source, literal } = scan(source, syntax);
    let steps = MAX_LITERAL_BYTES / (literal as u64).max(1);
    environment.set_fuel(Some(steps.min(MAX_STEPS)));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.add_filter(VARIABLE, |state: &mut State<'_, '_>, value: Value| {
        checked(state, &value, Target::Variable)
    });
    environment.add_filter(ATTRIBUTE, |state: &mut State<'_, '_>, value: Value| {
        checked(state, &value, Target::Attribute)
    });
    environment.set_formatter(
        |out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| {
            let value = checked(state, value, Target::Text)?;
            minijinja::escape_formatter(out, state, &value)
        },
    );
    Ok(source)
}

/// A source whose assignments are checked.
struct Scanned {
    source: String,
    /// The length of its longest piece of text outside of tags.
    literal: usize,
}

/// The position within a `set` tag.
enum Tag {
    /// In no such tag.
    Outside,
    /// After `{%`.
    Begun,
    /// Before `=`; `dotted` if the target is an attribute.
    Before { dotted: bool },
    /// After `=`, at this offset. `plain` as long as the value is only named, and not made.
    After {
        start: usize,
        dotted: bool,
        plain: bool,
    },
}

/// Passes the value of each `{% set target = value %}` through a filter.
fn scan(source: &str, syntax: SyntaxConfig) -> Scanned {
    let mut checked = String::with_capacity(source.len());
    let (mut tag, mut literal, mut copied, mut last) = (Tag::Outside, 0, 0, 0);
    for token in tokenize(source, false, syntax) {
        let Ok((token, span)) = token else {
            break; // The parser reports it with its line.
        };
        let end = span.end_offset as usize;
        tag = match (tag, &token) {
            (_, Token::TemplateData(text)) => {
                literal = literal.max(text.len());
                Tag::Outside
            }
            (_, Token::BlockStart) => Tag::Begun,
            (Tag::Begun, Token::Ident("set")) => Tag::Before { dotted: false },
            (Tag::Before { .. }, Token::Dot) => Tag::Before { dotted: true },
            (Tag::Before { dotted }, Token::Assign) => Tag::After {
                start: end,
                dotted,
                plain: true,
            },
            (
                Tag::After {
                    start,
                    dotted,
                    plain,
                },
                Token::BlockEnd,
            ) => {
                // A variable that names another value makes no deeper one; an attribute may contain itself.
                let value = source.get(start..last).unwrap_or_default();
                if (dotted || !plain) && !value.trim().is_empty() {
                    let filter = if dotted { ATTRIBUTE } else { VARIABLE };
                    checked.push_str(source.get(copied..start).unwrap_or_default());
                    // Two parentheses, as one around `1, 2` would be a call's.
                    checked.push_str(&format!(" (({value})) | {filter}"));
                    copied = last;
                }
                Tag::Outside
            }
            (
                Tag::After {
                    start,
                    dotted,
                    plain,
                },
                token,
            ) => Tag::After {
                start,
                dotted,
                plain: plain && is_plain(token),
            },
            (before @ Tag::Before { .. }, token) if !matches!(token, Token::BlockEnd) => before,
            _ => Tag::Outside,
        };
        last = end;
    }
    checked.push_str(source.get(copied..).unwrap_or_default());
    Scanned {
        source: checked,
        literal,
    }
}

/// Returns `true` for tokens that name values or compare them.
fn is_plain(token: &Token<'_>) -> bool {
    matches!(
        token,
        Token::Ident(_)
            | Token::Dot
            | Token::Str(_)
            | Token::String(_)
            | Token::Int(_)
            | Token::Int128(_)
            | Token::Float(_)
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
    )
}

/// The use of a checked value.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    Variable,
    Attribute,
    Text,
}

/// The elements of the values that were checked in a rendering.
#[derive(Default)]
struct Checked {
    elements: usize,
}

/// Returns the value with its lazy parts evaluated, after a check of its depth and size.
fn checked(state: &mut State<'_, '_>, value: &Value, target: Target) -> Result<Value, Error> {
    let mut elements = state.get_or_insert_extension(Checked::default()).elements;
    let evaluated = evaluate(value, 0, target, &mut elements)?;
    state.get_or_insert_extension(Checked::default()).elements = elements;
    Ok(evaluated.unwrap_or_else(|| value.clone()))
}

/// Checks a value; returns another one if a part of it was lazy. A slice of a slice of a slice shows its depth
/// only when it is read, so that a variable must not keep one.
fn evaluate(
    value: &Value,
    depth: usize,
    target: Target,
    elements: &mut usize,
) -> Result<Option<Value>, Error> {
    let refused = |detail: String| Err(Error::new(ErrorKind::InvalidOperation, detail));
    if depth > MAX_DEPTH {
        return refused(format!(
            "a value is nested more than {MAX_DEPTH} levels deep, the limit of a chat template"
        ));
    }
    *elements += 1 + value.as_str().map_or(0, |text| text.len() / 64);
    if *elements > MAX_ELEMENTS {
        return refused(format!(
            "its values have more than {MAX_ELEMENTS} elements together, the limit of one rendering; it probably \
             copies them in a loop"
        ));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut is_new = value.kind() == ValueKind::Iterable && target != Target::Text;
            let mut items = Vec::new();
            for item in value.try_iter()? {
                let own = evaluate(&item, depth + 1, target, elements)?;
                is_new |= own.is_some();
                items.push(own.unwrap_or(item));
            }
            Ok(is_new.then(|| match value.is_tuple() {
                true => Value::from(Tuple::from(items)),
                false => Value::from(items),
            }))
        }
        ValueKind::Map if is_namespace(value) => {
            // A namespace in a namespace could contain itself, and its depth would have no end.
            if target == Target::Attribute {
                return refused(
                    "a namespace is assigned to an attribute of a namespace; use a variable"
                        .to_owned(),
                );
            }
            Ok(None)
        }
        ValueKind::Map => {
            let (mut is_new, mut pairs) = (false, Vec::new());
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                let own = evaluate(&item, depth + 1, target, elements)?;
                is_new |= own.is_some();
                pairs.push((key, own.unwrap_or(item)));
            }
            Ok(is_new.then(|| Value::from_pairs(pairs)))
        }
        _ => Ok(None),
    }
}

fn is_namespace(value: &Value) -> bool {
    // The type is private to the engine.
    value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Runs `work` on a stack for a template with a source of `source_bytes` bytes.
pub(super) fn on_large_stack<T: Send>(
    source_bytes: usize,
    work: impl FnOnce() -> crate::Result<T> + Send,
) -> crate::Result<T> {
    let failed = |reason: String| Err(crate::Error::ChatTemplate(reason));
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("overdrive-template".to_owned())
            // Reserved, and taken from memory only as far as the stack is used.
            .stack_size(STACK_BASE + STACK_FOR_A_BYTE * source_bytes.min(MAX_SOURCE_BYTES))
            .spawn_scoped(scope, work);
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => {
                failed("its rendering panicked; the message is on standard error".to_owned())
            }
            Err(error) => failed(format!("no thread can be started for it: {error}")),
        }
    })
}

/// Collects rendered text up to [`MAX_OUTPUT_BYTES`].
#[derive(Default)]
pub(super) struct LimitedText {
    bytes: Vec<u8>,
    /// `true` once there was more text.
    pub(super) is_cut: bool,
}

impl LimitedText {
    pub(super) fn into_string(self) -> String {
        // The engine writes `str`s; nothing is replaced.
        String::from_utf8(self.bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

impl std::io::Write for LimitedText {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + text.len() > MAX_OUTPUT_BYTES {
            self.is_cut = true;
            return Err(std::io::Error::other("the text is too long"));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{SyntaxConfig, scan};

    #[test]
    fn every_assignment_of_a_made_value_is_checked_and_nothing_else_changes() {
        let syntax = || SyntaxConfig::builder().trim_blocks(true).build().unwrap();
        let scanned = |source| scan(source, syntax()).source;
        for same in [
            "a{% set x = message.content %}b",
            "{% set x %}text = [1]{% endset %}",
            "{# {% set x = [x] %} #}{% raw %}{% set x = [x] %}{% endraw %}",
            "{{ '{% set x = [x] %}' }}{% if a == [1] %}{% endif %}",
            "{% set x = ",
        ] {
            assert_eq!(scanned(same), same);
        }
        assert_eq!(
            scanned("é{%- set x = [x, '%}'] -%} \n{% set ns.y=ns %}{% set a, b = 1, 2 %}"),
            "é{%- set x = (( [x, '%}'])) | overdrive_variable -%} \n\
             {% set ns.y= ((ns)) | overdrive_attribute %}{% set a, b = (( 1, 2)) | overdrive_variable %}"
        );
    }
}
