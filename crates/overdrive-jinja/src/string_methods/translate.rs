//! `str.maketrans` and `str.translate`.

use crate::args::{Args, int, text};
use crate::error::{Error, ErrorKind, Result};
use crate::runtime::Runtime;
use crate::value::{Text, Value};

pub(super) fn maketrans(args: Args) -> Result<Value> {
    let [from, to, removed] = args.unnamed("maketrans", 1)?;
    let code = |letter: char| Value::Int(i128::from(u32::from(letter)));
    let Some(to) = to else {
        let Some(Value::Dict(dict)) = from else {
            let detail = "if you give only one argument to maketrans it must be a dict";
            return Err(Error::type_error(detail));
        };
        let pairs = dict.entries.iter().map(|(key, value)| {
            let key = match key {
                Value::Str(text) => {
                    let mut letters = text.text.chars();
                    match (letters.next(), letters.next()) {
                        (Some(letter), None) => code(letter),
                        _ => {
                            let detail = "string keys in translate table must be of length 1";
                            return Err(Error::value(detail));
                        }
                    }
                }
                key => Value::Int(int(key)?),
            };
            Ok((key, value.clone()))
        });
        return Value::dict(pairs.collect::<Result<Vec<_>>>()?);
    };
    let from = from.unwrap_or(Value::None);
    let (from, to) = (text(&from)?, text(&to)?);
    if from.chars().count() != to.chars().count() {
        let detail = "the first two maketrans arguments must have equal length";
        return Err(Error::value(detail));
    }
    let mut pairs: Vec<(Value, Value)> = from
        .chars()
        .zip(to.chars())
        .map(|(from, to)| (code(from), code(to)))
        .collect();
    if let Some(removed) = removed {
        pairs.extend(text(&removed)?.chars().map(|c| (code(c), Value::None)));
    }
    Value::dict(pairs)
}

pub(super) fn translate(runtime: &mut Runtime, this: &Text, table: &Value) -> Result<Value> {
    let mut out = String::new();
    for letter in this.text.chars() {
        let key = Value::Int(i128::from(u32::from(letter)));
        match crate::operators::item(table, &key) {
            Ok(Value::None) => {}
            Ok(Value::Str(text)) => out.push_str(&text.text),
            Ok(value) => {
                let code = u32::try_from(int(&value)?).ok().and_then(char::from_u32);
                let letter = code
                    .ok_or_else(|| Error::value("character mapping must be in range(0x110000)"))?;
                out.push(letter);
            }
            Err(error) if error.kind == ErrorKind::Lookup => out.push(letter),
            Err(error) => return Err(error),
        }
        runtime.check_text(out.len())?;
    }
    runtime.reserve_text(out.len())?;
    Ok(this.like(out))
}
