//! The tool calls of Gemma 4: `<|tool_call>call:name{key:value,…}<tool_call|>`, with keys without quotes, and strings
//! between `<|"|>`.

use serde_json::{Map, Value};

/// The mark that begins a call.
pub(crate) const BEGIN: &str = "<|tool_call>";
const END: &str = "<tool_call|>";
const QUOTE: &str = "<|\"|>";
/// The deepest nesting of arguments that is read.
const MAX_DEPTH: usize = 64;

/// Reads the names and arguments of the calls, one after the other; `None` if the text is anything else.
pub(crate) fn read(text: &str) -> Option<Vec<(String, Map<String, Value>)>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while let Some(call) = rest.strip_prefix(BEGIN) {
        let (name, arguments) = call.trim_start().strip_prefix("call:")?.split_once('{')?;
        let mut reader = Reader(arguments);
        calls.push((name.trim().to_owned(), reader.object(0)?));
        // The last closing mark may be missing if the model ended its text instead.
        rest = reader.0.trim_start();
        rest = rest.strip_prefix(END).unwrap_or(rest).trim_start();
    }
    rest.is_empty().then_some(calls)
}

/// The text that has not been read.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn skip(&mut self, mark: &str) -> bool {
        let rest = self.0.trim_start().strip_prefix(mark);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    /// Reads the text up to one of `ends`, which stays.
    fn until(&mut self, ends: &[char]) -> Option<&'a str> {
        let (text, rest) = self.0.split_at(self.0.find(ends)?);
        self.0 = rest;
        Some(text.trim())
    }

    /// Reads the text between two quotes, if there is one.
    fn quoted(&mut self) -> Option<&'a str> {
        let (text, rest) = self.0.trim_start().strip_prefix(QUOTE)?.split_once(QUOTE)?;
        self.0 = rest;
        Some(text)
    }

    /// Reads an object after its opening brace.
    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut object = Map::new();
        if self.skip("}") {
            return Some(object);
        }
        loop {
            let key = match self.quoted() {
                Some(key) => key,
                None => self.until(&[':'])?,
            };
            if !self.skip(":") {
                return None;
            }
            object.insert(key.to_owned(), self.value(depth + 1)?);
            if self.skip("}") {
                return Some(object);
            }
            if !self.skip(",") {
                return None;
            }
        }
    }

    /// Reads a list after its opening bracket.
    fn list(&mut self, depth: usize) -> Option<Vec<Value>> {
        let mut list = Vec::new();
        if self.skip("]") {
            return Some(list);
        }
        loop {
            list.push(self.value(depth + 1)?);
            if self.skip("]") {
                return Some(list);
            }
            if !self.skip(",") {
                return None;
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        if let Some(text) = self.quoted() {
            return Some(text.into());
        }
        if self.skip("{") {
            return self.object(depth).map(Value::Object);
        }
        if self.skip("[") {
            return self.list(depth).map(Value::Array);
        }
        let bare = self.until(&[',', '}', ']'])?;
        // The template writes Python's values where JSON's have other names.
        match bare {
            "" => None,
            "None" => Some(Value::Null),
            word => match serde_json::from_str(word) {
                Ok(value) => Some(value),
                // A string without its quotes, which models write now and then.
                Err(_) => {
                    let is_word = !word.contains(char::is_whitespace) && !word.contains(QUOTE);
                    is_word.then(|| word.into())
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_of_every_type_are_read() {
        let text = "<|tool_call>call:make{a:<|\"|>x, {y}: \"z\"<|\"|>,b:-1.5,c:true,d:None,e:[1,<|\"|>two<|\"|>,[]],\
                    f:{<|\"|>g h<|\"|>:{}},i:bare}<tool_call|>\n<|tool_call>call:other{}";
        let calls = read(text).unwrap();
        let expected = json!({
            "a": "x, {y}: \"z\"", "b": -1.5, "c": true, "d": null, "e": [1, "two", []], "f": {"g h": {}}, "i": "bare",
        });
        assert_eq!(calls[0].0, "make");
        assert_eq!(Value::Object(calls[0].1.clone()), expected);
        assert_eq!(calls[1], ("other".to_owned(), Map::new()));
        let deep = format!("{BEGIN}call:deep{{a:{}", "[".repeat(100_000));
        for wrong in [
            "<|tool_call>call:a{b:1",
            "<|tool_call>call:a{b}",
            "<|tool_call>call:a{b:1 c:2}",
            "<|tool_call>call:a{b:<|\"|>open}",
            "<|tool_call>a{}",
            "<|tool_call>call:a",
            "<|tool_call>call:a{}<tool_call|> and text",
            "text",
            &deep,
        ] {
            assert_eq!(read(wrong), None, "{}", &wrong[..wrong.len().min(80)]);
        }
    }
}
