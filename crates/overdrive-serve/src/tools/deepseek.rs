//! The tool calls of DeepSeek's models: a name and JSON between tokens.

use serde_json::Value;

/// The mark that begins the calls.
pub(crate) const BEGIN: &str = "<｜tool▁calls▁begin｜>";
const END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

/// Reads the names and arguments of the calls; `None` if the text is anything else.
///
/// DeepSeek-V3 and R1 write `function`, the separator, the name, and the arguments as a block of code; DeepSeek-V3.1 writes the
/// name, the separator and the arguments.
pub(crate) fn read(text: &str) -> Option<Vec<(&str, Value)>> {
    let text = text.trim().strip_prefix(BEGIN)?;
    let text = text.split_once(END).map_or(text, |(calls, _)| calls);
    let calls = text.split(CALL).skip(1).map(|call| {
        let call = call.split_once(CALL_END).map_or(call, |(call, _)| call);
        let (first, rest) = call.split_once(SEPARATOR)?;
        let (name, arguments) = match rest.split_once("```json") {
            Some((name, block)) => (
                name,
                block.split_once("```").map_or(block, |(json, _)| json),
            ),
            None => (first, rest),
        };
        let arguments = serde_json::from_str(arguments.trim()).ok()?;
        Some((name.trim(), arguments))
    });
    calls.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_of_both_generations_are_read() {
        let block = |name: &str, arguments: &str| {
            format!("{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}")
        };
        let text = format!(
            "{BEGIN}{}\n{}{END}",
            block("a", "{\"b\": 1}"),
            block("c", "{}")
        );
        assert_eq!(
            read(&text),
            Some(vec![("a", json!({"b": 1})), ("c", json!({}))])
        );
        let text =
            format!("{BEGIN}{CALL}a{SEPARATOR}{{\"b\": \"```\"}}{CALL_END}{CALL}c{SEPARATOR}{{}}");
        assert_eq!(
            read(&text),
            Some(vec![("a", json!({"b": "```"})), ("c", json!({}))])
        );
        for wrong in [
            "a",
            &format!("{BEGIN}{CALL}a{{}}"),
            &format!("{BEGIN}{CALL}a{SEPARATOR}b"),
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
