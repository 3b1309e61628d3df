//! The documents of a corpus, streamed in chunks of bounded size.

use std::io::{BufRead, BufReader, Read};

use sha2::{Digest, Sha256};

use crate::index::text_start;
use crate::range_source::{DataReader, read_error};
use crate::{Corpus, CorpusFile, Error, RecordNumber, Result, Sha256Digest, TextFormat};

/// The length of the byte order mark of UTF-8.
const BOM_BYTES: u64 = 3;

/// A chunk of a document, or a whole one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) text: String,
    /// If `true`, the document ends with this chunk.
    pub(crate) ends_document: bool,
    /// The number of bytes of the file that this chunk covers, for the progress bar.
    pub(crate) file_bytes: u64,
}

/// Passes all chunks of the corpus to `sink` in order, until it returns `false`.
///
/// A document is one chunk unless it is longer than `max_bytes`; then it is split at [`split_position`].
pub(crate) fn for_each_chunk(
    corpus: &Corpus,
    max_bytes: usize,
    mut sink: impl FnMut(Chunk) -> bool,
) -> Result<()> {
    for file in corpus.files() {
        let reader = HashingReader {
            inner: DataReader::open(&file.path)?,
            hasher: Sha256::new(),
        };
        let go_on = match file.format {
            TextFormat::Plain => plain_chunks(file, reader, max_bytes, &mut sink)?,
            TextFormat::JsonLines => {
                json_lines_chunks(file, corpus.text_field(), reader, max_bytes, &mut sink)?
            }
        };
        if !go_on {
            return Ok(());
        }
    }
    Ok(())
}

/// A reader that hashes the bytes it reads, to detect that a file has changed since it was listed.
struct HashingReader {
    inner: DataReader,
    hasher: Sha256,
}

impl HashingReader {
    fn check(self, file: &CorpusFile) -> Result<()> {
        match Sha256Digest::finish(self.hasher) == file.digest {
            true => Ok(()),
            false => Err(Error::FileChanged {
                path: file.path.clone(),
            }),
        }
    }
}

impl Read for HashingReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

fn plain_chunks(
    file: &CorpusFile,
    mut reader: HashingReader,
    max_bytes: usize,
    sink: &mut impl FnMut(Chunk) -> bool,
) -> Result<bool> {
    let mut pending: Vec<u8> = Vec::new();
    // A byte order mark is not part of the text. It is removed before the first chunk is read, so that the chunks
    // equal those of the same file without the mark.
    let read = reader.by_ref().take(BOM_BYTES).read_to_end(&mut pending);
    read.map_err(read_error("read", &file.path))?;
    pending.drain(..text_start(&pending));
    loop {
        // One byte more than the bound, since the split depends on the byte after it.
        let missing = max_bytes.saturating_add(1).saturating_sub(pending.len()) as u64;
        let read = reader.by_ref().take(missing).read_to_end(&mut pending);
        read.map_err(read_error("read", &file.path))?;
        if pending.len() <= max_bytes {
            break;
        }
        // The reader has hashed all bytes before they are split, so the split does not affect the check.
        let rest = pending.split_off(split_position(&pending, max_bytes));
        let chunk = std::mem::replace(&mut pending, rest);
        if !sink(chunk_of(file, chunk, false)?) {
            return Ok(false);
        }
    }
    reader.check(file)?;
    Ok(sink(chunk_of(file, pending, true)?))
}

fn chunk_of(file: &CorpusFile, bytes: Vec<u8>, ends: bool) -> Result<Chunk> {
    let file_bytes = bytes.len() as u64;
    // The file was valid UTF-8 when the corpus was listed, and no character is split.
    let text = String::from_utf8(bytes).map_err(|_| Error::FileChanged {
        path: file.path.clone(),
    })?;
    Ok(Chunk {
        text,
        ends_document: ends,
        file_bytes,
    })
}

fn json_lines_chunks(
    file: &CorpusFile,
    field: &str,
    reader: HashingReader,
    max_bytes: usize,
    sink: &mut impl FnMut(Chunk) -> bool,
) -> Result<bool> {
    // The size of a line is unknown; this buffer holds most lines and few system calls.
    let mut reader = BufReader::with_capacity(1 << 18, reader);
    let mut line = Vec::new();
    let (mut number, mut offset) = (0, 0);
    loop {
        line.clear();
        let read = reader
            .read_until(b'\n', &mut line)
            .map_err(read_error("read", &file.path))?;
        if read == 0 {
            break;
        }
        number += 1;
        let start = if number == 1 { text_start(&line) } else { 0 };
        let text = json_text(&line[start..], field).map_err(|problem| Error::InvalidRecord {
            path: file.path.clone(),
            number: RecordNumber::Line(number),
            offset,
            problem,
        })?;
        if let Some(text) = text
            && !split_into_chunks(text, max_bytes, read as u64, sink)
        {
            return Ok(false);
        }
        offset += read as u64;
    }
    reader.into_inner().check(file)?;
    Ok(true)
}

/// Returns the document of one line; `None` for a blank line and for an empty document.
pub(crate) fn json_text(line: &[u8], field: &str) -> std::result::Result<Option<String>, String> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let value: serde_json::Value = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let serde_json::Value::Object(mut object) = value else {
        return Err("expected a JSON object on each line".to_owned());
    };
    match object.remove(field) {
        Some(serde_json::Value::String(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        Some(_) => Err(format!("the field {field:?} is not a string")),
        None => {
            let mut fields: Vec<_> = object.keys().map(String::as_str).collect();
            fields.sort_unstable();
            let has = fields.join(", ");
            Err(format!(
                "there is no field {field:?}; it has {has} (set CorpusOptions::text_field)"
            ))
        }
    }
}

/// Passes a document to `sink` in chunks of at most `max_bytes`, with `file_bytes` as the progress of the whole.
/// Returns `false` if `sink` does.
pub(crate) fn split_into_chunks(
    mut text: String,
    max_bytes: usize,
    file_bytes: u64,
    sink: &mut (impl FnMut(Chunk) -> bool + ?Sized),
) -> bool {
    while text.len() > max_bytes {
        let rest = text.split_off(split_position(text.as_bytes(), max_bytes));
        let chunk = std::mem::replace(&mut text, rest);
        if !sink(Chunk {
            text: chunk,
            ends_document: false,
            file_bytes: 0,
        }) {
            return false;
        }
    }
    sink(Chunk {
        text,
        ends_document: true,
        file_bytes,
    })
}

/// Returns the position at which to split UTF-8 text that is longer than `max_bytes` (at least 8): at most
/// `max_bytes` from its start, at least half of that, and never within a character.
///
/// It prefers the position after a line feed, or before a space, that lies directly between two visible ASCII
/// characters: there the pre-tokenizers of the GPT-2, GPT-4 and Llama-3 families begin a new word in any case,
/// so the tokens are those of the whole text. Otherwise it splits after any line feed, or else between any two
/// characters; there one or two tokens may differ from those of the whole text.
pub(crate) fn split_position(text: &[u8], max_bytes: usize) -> usize {
    debug_assert!(text.len() > max_bytes && max_bytes >= 8);
    let visible = |at: usize| text.get(at).is_some_and(u8::is_ascii_graphic);
    let after_line = |&at: &usize| text[at - 1] == b'\n';
    let between_lines = |&at: &usize| after_line(&at) && visible(at - 2) && visible(at);
    let between_words = |&at: &usize| text[at] == b' ' && visible(at - 1) && visible(at + 1);
    let candidates = || (max_bytes / 2..=max_bytes).rev();
    candidates()
        .find(between_lines)
        .or_else(|| candidates().find(between_words))
        .or_else(|| candidates().find(after_line))
        // There are at least five candidates and a character has at most four bytes, so one of them starts one.
        .or_else(|| candidates().find(|&at| (text[at] & 0xC0) != 0x80))
        .unwrap_or(max_bytes)
}
