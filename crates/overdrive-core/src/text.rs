//! Decoding of text files, with or without a byte order mark and with the line endings of any system.
//!
//! Programs read all text through [`read`], [`decode`] or [`Lines`], so that the same file gives the same text
//! whichever editor saved it, and errors name the file and the line.

use std::borrow::Cow;
use std::io::{BufRead, ErrorKind};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The byte order mark of UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads a UTF-8 text file, without its byte order mark. Lines end with `\n`, even where the file has `\r\n` or `\r`,
/// as in Python.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("prompts.txt");
/// std::fs::write(&path, b"\xef\xbb\xbfone\r\ntwo\r\n")?;
/// assert_eq!(overdrive_core::text::read(&path)?, "one\ntwo\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Io`] if the file cannot be read; [`Error::Parse`] with the line if it is not UTF-8.
pub fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    decode(std::fs::read(path).map_err(Error::io("read", path))?, path)
}

/// Reads a text file as [`read`] does; `None` if it does not exist.
///
/// # Errors
/// As for [`read`], except for a missing file.
pub fn read_optional(path: impl AsRef<Path>) -> Result<Option<String>> {
    match read(path) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

/// Decodes the content of a file as [`read`] does. `path` identifies the file in errors.
///
/// # Errors
/// [`Error::Parse`] with the line if it is not UTF-8.
pub fn decode(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<String> {
    decode_from(bytes, path.as_ref(), 1)
}

/// Decodes bytes whose first line has the number `first_line`.
fn decode_from(mut bytes: Vec<u8>, path: &Path, first_line: usize) -> Result<String> {
    let invalid = |problem: String| Error::parse("UTF-8 text", path)(problem);
    if first_line == 1 && (bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff")) {
        return Err(invalid("it is UTF-16; save it as UTF-8".to_owned()));
    }
    if first_line == 1 && bytes.starts_with(BOM) {
        bytes.drain(..BOM.len());
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let (before, rest) = error.as_bytes().split_at(at);
        // The bytes before this one are valid.
        let before = String::from_utf8_lossy(before);
        let line = first_line + line_feeds(&before).matches('\n').count();
        invalid(format!(
            "line {line} has the byte 0x{:02x}, which is not UTF-8; save it as UTF-8",
            rest.first().copied().unwrap_or_default()
        ))
    })?;
    Ok(match line_feeds(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(changed) => changed,
    })
}

/// Returns the text with `\n` in place of `\r\n` and `\r`.
pub fn line_feeds(text: &str) -> Cow<'_, str> {
    match text.contains('\r') {
        true => Cow::Owned(text.replace("\r\n", "\n").replace('\r', "\n")),
        false => Cow::Borrowed(text),
    }
}

/// The lines of a stream, such as the standard input of a conversation, without their line endings. A line that is
/// not UTF-8 gives an error, and the iteration continues with the next line.
///
/// ```
/// use overdrive_core::text::Lines;
///
/// let mut lines = Lines::new(&b"one\r\n\xe9\ntwo"[..], "standard input");
/// assert_eq!(lines.next().unwrap()?, "one");
/// let error = lines.next().unwrap().unwrap_err().to_string();
/// assert!(error.starts_with("standard input is not valid UTF-8 text: line 2 has the byte 0xe9"));
/// assert_eq!(lines.next().unwrap()?, "two");
/// assert!(lines.next().is_none());
/// # Ok::<(), overdrive_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Lines<R> {
    reader: R,
    name: PathBuf,
    line: usize,
    failed: bool,
}

impl<R: BufRead> Lines<R> {
    /// Returns the lines of `reader`; `name` identifies it in errors.
    pub fn new(reader: R, name: impl Into<PathBuf>) -> Self {
        Self {
            reader,
            name: name.into(),
            line: 0,
            failed: false,
        }
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = Result<String>;

    /// Returns the next line: [`Error::Parse`] if it is not UTF-8, after which other lines follow, and [`Error::Io`]
    /// once if the stream cannot be read, which ends the iteration.
    fn next(&mut self) -> Option<Result<String>> {
        let mut bytes = Vec::new();
        match self.reader.read_until(b'\n', &mut bytes) {
            _ if self.failed => return None,
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) => {
                self.failed = true;
                return Some(Err(Error::io("read", &self.name)(error)));
            }
        }
        self.line += 1;
        if bytes.ends_with(b"\n") {
            bytes.pop();
            if bytes.ends_with(b"\r") {
                bytes.pop();
            }
        }
        Some(decode_from(bytes, &self.name, self.line))
    }
}

/// Returns serde's message about a text that is one line of a file, with the column alone: the line within the text would
/// look like one of the file.
///
/// ```
/// let message = "expected value at line 1 column 4";
/// assert_eq!(overdrive_core::text::in_one_line(message), "expected value in column 4");
/// ```
pub fn in_one_line(message: &str) -> String {
    message.replace(" at line 1 column ", " in column ")
}

/// Returns what a value must be, from serde's message about a value of another type; `None` if the message does not say
/// it.
///
/// ```
/// let message = "invalid type: string \"x\", expected f64";
/// assert_eq!(overdrive_core::text::expected_by_serde(message), Some("a number"));
/// ```
pub fn expected_by_serde(message: &str) -> Option<&str> {
    // The value before it may contain the word too.
    let (_, expected) = message.rsplit_once("expected ")?;
    Some(type_in_words(expected))
}

/// Returns the words for a type as serde describes it, which are those of Rust.
pub fn type_in_words(expected: &str) -> &str {
    match expected {
        "a boolean" => "true or false",
        "i8" | "i16" | "i32" | "i64" | "isize" => "an integer",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a non-negative integer",
        "f32" | "f64" => "a number",
        "path string" | "a borrowed string" => "a string",
        "a sequence" => "a list",
        "a map" => "an object",
        "key to be a number in quotes" => "an object whose keys are numbers in quotes",
        "string or map" => "a name",
        text if text.starts_with("struct ") => "an object",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(bytes: &[u8]) -> Result<String> {
        decode(bytes.to_vec(), "a.txt")
    }

    #[test]
    fn marks_and_line_ends_of_any_system_give_the_same_text() {
        for bytes in [
            &b"a\n\nb\n"[..],
            b"a\r\n\r\nb\r\n",
            b"a\r\rb\r",
            b"a\r\n\nb\r",
            b"\xef\xbb\xbfa\r\n\r\nb\n",
        ] {
            assert_eq!(decoded(bytes).expect("text"), "a\n\nb\n", "{bytes:?}");
        }
        // Only the first mark is one.
        assert_eq!(
            decoded(b"\xef\xbb\xbfa\xef\xbb\xbf").expect("text"),
            "a\u{feff}"
        );
        assert_eq!(decoded(b"").expect("text"), "");
    }

    #[test]
    fn other_encodings_are_errors_with_the_file_and_the_line() {
        for (bytes, problem) in [
            (
                &b"a\r\nb\rcaf\xe9\n"[..],
                "line 3 has the byte 0xe9, which is not UTF-8; save it as UTF-8",
            ),
            (b"\xff\xfea\0", "it is UTF-16; save it as UTF-8"),
            (b"\xfe\xff\0a", "it is UTF-16; save it as UTF-8"),
        ] {
            let error = decoded(bytes).expect_err("no UTF-8").to_string();
            assert_eq!(error, format!("a.txt is not valid UTF-8 text: {problem}"));
        }
        assert!(read_optional("/nowhere/a.txt").expect("no error").is_none());
        assert!(read("/nowhere/a.txt").is_err());
    }

    #[test]
    fn lines_continue_after_a_line_of_another_encoding_and_end_after_a_failed_read() {
        struct Failing;
        impl std::io::Read for Failing {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("unplugged"))
            }
        }
        use std::io::{BufReader, Read};
        let stream = (&b"\xef\xbb\xbfone\n\xff\xfe\n\ntwo\r\n"[..]).chain(Failing);
        let lines: Vec<_> = Lines::new(BufReader::new(stream), "stdin").collect();
        let said = |index: usize| match &lines[index] {
            Ok(line) => line.clone(),
            Err(error) => error.to_string(),
        };
        assert_eq!(said(0), "one");
        assert!(said(1).contains("line 2 has the byte 0xff"), "{}", said(1));
        assert_eq!((said(2), said(3)), (String::new(), "two".to_owned()));
        assert_eq!(said(4), "cannot read stdin: unplugged");
        assert_eq!(lines.len(), 5);
    }
}
