//! Methods of Python's values, which templates call.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The largest width of `zfill`: no prompt needs more.
const MAX_WIDTH: usize = 4096;

/// Calls a method that Jinja's values do not have: those of `minijinja_contrib`, and of `str` also `removeprefix`,
/// `removesuffix`, `partition`, `rpartition`, `rsplit` and `zfill`.
pub(super) fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(text) = value.as_str()
        && let Some(made) = of_text(text, method, args)
    {
        return made;
    }
    unknown_method_callback(state, value, method, args)
}

/// Calls a method of a text; `None` if it is not one of these.
fn of_text(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "removeprefix" => from_args(args)
            .map(|(affix,): (&str,)| Value::from(text.strip_prefix(affix).unwrap_or(text))),
        "removesuffix" => from_args(args)
            .map(|(affix,): (&str,)| Value::from(text.strip_suffix(affix).unwrap_or(text))),
        "partition" => separator(args).map(|by| match text.split_once(by) {
            Some((head, tail)) => tuple([head, by, tail]),
            None => tuple([text, "", ""]),
        }),
        "rpartition" => separator(args).map(|by| match text.rsplit_once(by) {
            Some((head, tail)) => tuple([head, by, tail]),
            None => tuple(["", "", text]),
        }),
        "rsplit" => rsplit(text, args),
        "zfill" => from_args(args).and_then(|(width,): (usize,)| zfill(text, width)),
        _ => return None,
    })
}

fn tuple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

/// Returns the one argument, a text that is not empty.
fn separator(args: &[Value]) -> Result<&str, Error> {
    let (by,) = from_args(args)?;
    not_empty(by)
}

fn not_empty(by: &str) -> Result<&str, Error> {
    match by.is_empty() {
        true => Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        false => Ok(by),
    }
}

/// `str.rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let by = by.or(named.get("sep")?).filter(|by| !by.is_none());
    let most = most.or(named.get("maxsplit")?).unwrap_or(-1);
    named.assert_all_used()?;
    // Negative: no limit.
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match &by {
        Some(by) => {
            let by = by.as_str().ok_or_else(|| {
                Error::new(ErrorKind::InvalidOperation, "the separator is not a text")
            })?;
            text.rsplitn(most.saturating_add(1), not_empty(by)?)
                .collect()
        }
        None => {
            let mut rest = text.trim_end();
            let mut parts = Vec::new();
            while parts.len() < most
                && let Some((head, tail)) = rest.rsplit_once(char::is_whitespace)
            {
                parts.push(tail);
                rest = head.trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Fills a number with zeros between its sign and its digits.
fn zfill(text: &str, width: usize) -> Result<Value, Error> {
    if width > MAX_WIDTH {
        let message = format!("zfill: the width {width} is larger than {MAX_WIDTH}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let missing = width.saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    Ok(Value::from(format!(
        "{sign}{}{digits}",
        "0".repeat(missing)
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::super::environment::{NAME, environment};

    fn render(source: &str) -> Result<String, minijinja::Error> {
        let environment = environment(source)?;
        let template = environment.get_template(NAME)?;
        template.render(minijinja::context! {s => "<t>x</t>"})
    }

    /// The expected texts are those of Jinja 3.1.6 with Python 3.11.
    #[test]
    fn methods_of_texts_are_those_of_python() {
        for (source, want) in [
            ("s.removeprefix('<t>')", "x</t>"),
            ("s.removesuffix('</t>')", "<t>x"),
            ("s.removeprefix('x')", "<t>x</t>"),
            ("'a.b.c'.rsplit('.', 1)", "['a.b', 'c']"),
            ("' a  b c '.rsplit(none, 1)", "[' a  b', 'c']"),
            ("' a  b '.rsplit()", "['a', 'b']"),
            ("'a.b.c'.rsplit('.')", "['a', 'b', 'c']"),
            ("'a b c'.rsplit(maxsplit=1)", "['a b', 'c']"),
            ("' a b  '.rsplit(none, 0)", "[' a b']"),
            ("''.rsplit()", "[]"),
            ("''.rsplit('.')", "['']"),
            ("'a=b=c'.partition('=')", "('a', '=', 'b=c')"),
            ("'abc'.partition('=')", "('abc', '', '')"),
            ("'a=b=c'.rpartition('=')", "('a=b', '=', 'c')"),
            ("'abc'.rpartition('=')", "('', '', 'abc')"),
            ("'7'.zfill(3)", "007"),
            ("'-7'.zfill(4)", "-007"),
            ("'1234'.zfill(3)", "1234"),
            ("'é'.zfill(2)", "0é"),
            ("' x '.strip()", "x"),
        ] {
            let text = render(&format!("{{{{ {source} }}}}"));
            assert_eq!(text.unwrap(), want, "{source}");
        }
        for source in [
            "''.partition('')",
            "'a'.rsplit('')",
            "'a'.rsplit(1)",
            "'a'.none()",
        ] {
            assert!(render(&format!("{{{{ {source} }}}}")).is_err(), "{source}");
        }
    }
}
