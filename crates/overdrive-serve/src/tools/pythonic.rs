//! Tool calls as Python code, which OLMo 3 writes: `name(key=value, …)`.

use serde_json::{Map, Number, Value};

/// The deepest nesting of arguments that is read.
const MAX_DEPTH: usize = 64;

/// Reads calls with keyword arguments that are literals, one after the other, as vLLM's parser does; `None` if the text is
/// anything else. JSON's words `true`, `false` and `null` are literals too.
pub(crate) fn read(text: &str) -> Option<Vec<(String, Map<String, Value>)>> {
    let mut reader = Reader(text);
    let mut calls = Vec::new();
    while !reader.0.trim_start().is_empty() {
        let name = reader.name()?;
        if !reader.skip('(') {
            return None;
        }
        let arguments = reader.items(')', 0, |reader, depth| {
            let key = reader.name()?;
            let value = reader.skip('=').then(|| reader.value(depth))??;
            Some((key.to_owned(), value))
        })?;
        calls.push((name.to_owned(), arguments.into_iter().collect()));
    }
    Some(calls)
}

/// The text that has not been read.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn skip(&mut self, mark: char) -> bool {
        let rest = self.0.trim_start().strip_prefix(mark);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    /// Reads the characters that fit; at least one.
    fn take(&mut self, fits: impl Fn(char) -> bool) -> Option<&'a str> {
        let text = self.0.trim_start();
        let end = text.find(|c| !fits(c)).unwrap_or(text.len());
        let (taken, rest) = text.split_at(end);
        self.0 = rest;
        (!taken.is_empty()).then_some(taken)
    }

    fn name(&mut self) -> Option<&'a str> {
        self.take(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
    }

    /// Reads items up to the closing mark, separated by commas, of which the last may be followed by nothing.
    fn items<T>(
        &mut self,
        end: char,
        depth: usize,
        item: impl Fn(&mut Self, usize) -> Option<T>,
    ) -> Option<Vec<T>> {
        if depth > MAX_DEPTH {
            return None;
        }
        let mut items = Vec::new();
        while !self.skip(end) {
            items.push(item(self, depth + 1)?);
            if !self.skip(',') {
                return self.skip(end).then_some(items);
            }
        }
        Some(items)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if self.skip('[') {
            return Some(self.items(']', depth, Reader::value)?.into());
        }
        if self.skip('(') {
            return Some(self.items(')', depth, Reader::value)?.into());
        }
        if self.skip('{') {
            let items = self.items('}', depth, |reader, depth| {
                let key = reader.string()?;
                Some((key, reader.skip(':').then(|| reader.value(depth))??))
            })?;
            return Some(Value::Object(items.into_iter().collect()));
        }
        if self.0.trim_start().starts_with(['"', '\'']) {
            return self.string().map(Value::String);
        }
        match self.take(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_'))? {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Value::Null),
            number => match number.parse::<i64>() {
                Ok(number) => Some(number.into()),
                Err(_) => Number::from_f64(number.parse().ok()?).map(Value::Number),
            },
        }
    }

    /// Reads a string in double or single quotes.
    fn string(&mut self) -> Option<String> {
        let quote = ['"', '\''].into_iter().find(|&quote| self.skip(quote))?;
        let mut text = String::new();
        let mut rest = self.0.chars();
        loop {
            match rest.next()? {
                c if c == quote => break,
                '\\' => escape(&mut rest, &mut text)?,
                c => text.push(c),
            }
        }
        self.0 = rest.as_str();
        Some(text)
    }
}

/// Appends the character of an escape sequence; Python keeps the backslash of an unknown one.
fn escape(rest: &mut std::str::Chars, text: &mut String) -> Option<()> {
    let digits = match rest.next()? {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        c => {
            match c {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                '\\' | '"' | '\'' => text.push(c),
                c => text.extend(['\\', c]),
            }
            return Some(());
        }
    };
    let (hex, after) = rest.as_str().split_at_checked(digits)?;
    text.push(char::from_u32(u32::from_str_radix(hex, 16).ok()?)?);
    *rest = after.chars();
    Some(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_are_literals() {
        let text = r#"
make(a="x, \"y\"", b='it\'s\n\u00e9\d', c=-1, d=2.5e3, e=True, f=None, g=[1, (2,), []], h={"k": {'l': false}}, )
files.read_all()
"#;
        let calls = read(text).unwrap();
        let expected = json!({
            "a": "x, \"y\"", "b": "it's\né\\d", "c": -1, "d": 2500.0, "e": true, "f": null, "g": [1, [2], []],
            "h": {"k": {"l": false}},
        });
        assert_eq!(calls[0].0, "make");
        assert_eq!(Value::Object(calls[0].1.clone()), expected);
        assert_eq!(calls[1], ("files.read_all".to_owned(), Map::new()));
        assert_eq!(read(" \n"), Some(vec![]));
        let deep = format!("a(b={}", "[".repeat(100_000));
        for wrong in [
            "a",
            "a(",
            "a(1)",
            "a(b)",
            "a(b=)",
            "a(b=1",
            "a(b=1 c=2)",
            "a(b='c)",
            "a(b=c)",
            "a(b='\\u12')",
            "a() and",
            "a(b={1: 2})",
            "(b=1)",
            &deep,
        ] {
            assert_eq!(read(wrong), None, "{}", &wrong[..wrong.len().min(80)]);
        }
    }
}
