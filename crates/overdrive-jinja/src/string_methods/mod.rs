//! The methods of Python's `str`.

mod case;
mod layout;
mod search;
mod split;
mod translate;

pub(crate) use case::{capitalize, is_lower, is_upper};
pub(crate) use layout::justified;
pub(crate) use search::replace;
pub(crate) use split::{lines, strip};

use crate::args::{Args, flag_or, given, int, int_or, text};
use crate::error::{Error, ErrorKind, Result};
use crate::format_spec::format_braces;
use crate::limits::check_names;
use crate::markup::escaped;
use crate::runtime::Runtime;
use crate::unicode::{
    casefold, is_alphabetic, is_alphanumeric, is_decimal, is_digit, is_identifier, is_numeric,
    is_printable, is_space,
};
use crate::value::{Text, Value};
use case::{is_titled, swapcase, title};
use layout::{expand_tabs, justify, zfill};
use search::{Searched, affix};
use split::{join, split};
use translate::{maketrans, translate};

/// The names of the methods. `encode` is missing, because a prompt has no use for bytes.
pub(crate) const NAMES: [&str; 46] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

/// Calls a method of a string.
pub(crate) fn call(
    runtime: &mut Runtime,
    this: &Text,
    name: &'static str,
    args: Args,
) -> Result<Value> {
    let word = &*this.text;
    let is = |test: fn(char) -> bool, args: Args| -> Result<Value> {
        args.none(name)?;
        Ok(Value::Bool(!word.is_empty() && word.chars().all(test)))
    };
    let made = |made: String, args: Args| -> Result<Value> {
        args.none(name)?;
        Ok(this.like(made))
    };
    match name {
        "capitalize" => made(capitalize(word), args),
        "casefold" => made(casefold(word), args),
        "lower" => made(word.to_lowercase(), args),
        "upper" => made(word.to_uppercase(), args),
        "swapcase" => made(swapcase(word), args),
        "title" => made(title(word), args),
        "isalnum" => is(is_alphanumeric, args),
        "isalpha" => is(is_alphabetic, args),
        "isdecimal" => is(is_decimal, args),
        "isdigit" => is(is_digit, args),
        "isnumeric" => is(is_numeric, args),
        "isspace" => is(is_space, args),
        "isascii" => args.none(name).map(|()| Value::Bool(word.is_ascii())),
        "isprintable" => {
            args.none(name)?;
            Ok(Value::Bool(word.chars().all(is_printable)))
        }
        "isidentifier" => {
            args.none(name)?;
            Ok(Value::Bool(is_identifier(word)))
        }
        "islower" => args.none(name).map(|()| Value::Bool(is_lower(word))),
        "isupper" => args.none(name).map(|()| Value::Bool(is_upper(word))),
        "istitle" => args.none(name).map(|()| Value::Bool(is_titled(word))),
        "center" | "ljust" | "rjust" => justify(runtime, this, name, args),
        "zfill" => {
            let [width] = args.unnamed(name, 1)?;
            zfill(runtime, this, required_int(width)?)
        }
        "count" => {
            let Searched { part, range } = Searched::new(name, args, word)?;
            let Some((from, to)) = range else {
                return Ok(Value::Int(0));
            };
            let within = &word[from..to];
            Ok(Value::from(match part.is_empty() {
                true => within.chars().count() + 1,
                false => within.matches(&*part).count(),
            }))
        }
        "find" | "index" | "rfind" | "rindex" => {
            let Searched { part, range } = Searched::new(name, args, word)?;
            let found = range.and_then(|(from, to)| {
                let within = &word[from..to];
                let at = match name.starts_with('r') {
                    true => within.rfind(&*part),
                    false => within.find(&*part),
                };
                at.map(|at| word[..from + at].chars().count())
            });
            match found {
                Some(at) => Ok(Value::from(at)),
                None if name.ends_with("find") => Ok(Value::Int(-1)),
                None => Err(Error::value("substring not found")),
            }
        }
        "startswith" | "endswith" => affix(name, args, word),
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"], 0)?;
            expand_tabs(runtime, this, int_or(size, 8)?)
        }
        "format" => format_braces(runtime, this, &args),
        "format_map" => {
            let [mapping] = args.unnamed(name, 1)?;
            let mut args = Args::default();
            if let Some(Value::Dict(dict)) = mapping {
                check_names(dict.entries.len())?;
                for (key, value) in &dict.entries {
                    args.named.push((key.to_text()?, value.clone()));
                }
            }
            format_braces(runtime, this, &args)
        }
        "join" => {
            let [items] = args.unnamed(name, 1)?;
            let items = items.unwrap_or(Value::None);
            join(runtime, this, &items)
        }
        "strip" | "lstrip" | "rstrip" => {
            let [letters] = args.unnamed(name, 0)?;
            let letters = given(letters);
            let letters = letters.as_ref().map(text).transpose()?;
            Ok(this.like(strip(word, letters, name)))
        }
        "maketrans" => maketrans(args),
        "translate" => {
            let [table] = args.unnamed(name, 1)?;
            translate(runtime, this, &table.unwrap_or(Value::None))
        }
        "partition" | "rpartition" => {
            let [by] = args.unnamed(name, 1)?;
            let by = by.unwrap_or(Value::None);
            let by = separator(&by)?;
            let found = match name {
                "partition" => word.split_once(by),
                _ => word.rsplit_once(by),
            };
            let parts = match found {
                Some((head, tail)) => [head, by, tail],
                None if name == "partition" => [word, "", ""],
                None => ["", "", word],
            };
            Value::tuple(parts.map(|part| this.like(part)).to_vec())
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = args.unnamed(name, 1)?;
            let affix = affix.unwrap_or(Value::None);
            let affix = text(&affix)?;
            let rest = match name {
                "removeprefix" => word.strip_prefix(affix),
                _ => word.strip_suffix(affix),
            };
            Ok(this.like(rest.unwrap_or(word)))
        }
        "replace" => {
            let [old, new, count] = args.unnamed(name, 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            text(&new)?;
            let new = match this.is_markup {
                true => escaped(&new)?,
                false => new.to_text()?.to_string(),
            };
            replace(runtime, this, text(&old)?, &new, int_or(count, -1)?)
        }
        "split" | "rsplit" => {
            let [by, most] = args.bind(name, ["sep", "maxsplit"], 0)?;
            let by = given(by);
            let by = by.as_ref().map(separator).transpose()?;
            let parts = match by {
                Some(by) => word.matches(by).count(),
                None => word.chars().filter(|letter| is_space(*letter)).count(),
            };
            runtime.reserve(parts + 1)?;
            let parts = split(word, by, int_or(most, -1)?, name == "rsplit");
            Value::list(parts.into_iter().map(|part| this.like(part)).collect())
        }
        "splitlines" => {
            let [keeps] = args.bind(name, ["keepends"], 0)?;
            let keeps = flag_or(keeps, false)?;
            let lines = lines(runtime, word)?;
            let line = |(line, end): (&str, usize)| {
                this.like(if keeps {
                    line
                } else {
                    &line[..line.len() - end]
                })
            };
            Value::list(lines.into_iter().map(line).collect())
        }
        _ => Err(Error::new(
            ErrorKind::Attribute,
            format!("a string has no method {name}"),
        )),
    }
}

fn required_int(value: Option<Value>) -> Result<i128> {
    int(&value.unwrap_or(Value::None))
}

/// Returns a separator, which must not be empty.
fn separator(value: &Value) -> Result<&str> {
    match text(value)? {
        "" => Err(Error::value("empty separator")),
        by => Ok(by),
    }
}
