//! Streaming the documents of a corpus, in pieces of bounded size.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use sha2::{Digest, Sha256};

use crate::{Corpus, CorpusFile, Error, Result, Sha256Digest, TextFormat};

/// A part of a document, or all of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    /// Whether the document ends here.
    pub(crate) ends_document: bool,
    /// Bytes of the file that this piece took.
    pub(crate) file_bytes: u64,
}

/// Hands all pieces of the corpus to `sink` in order, until it says `false`.
///
/// A document is one piece unless it is longer than `max_bytes`; then it is cut where [`cut`] says.
pub(crate) fn for_each_piece(
    corpus: &Corpus,
    max_bytes: usize,
    mut sink: impl FnMut(Piece) -> bool,
) -> Result<()> {
    for file in corpus.files() {
        let handle = File::open(&file.path).map_err(Error::io("open", &file.path))?;
        let reader = HashingReader {
            inner: handle,
            hasher: Sha256::new(),
        };
        let go_on = match file.format {
            TextFormat::Plain => plain_pieces(file, reader, max_bytes, &mut sink)?,
            TextFormat::JsonLines => {
                json_lines_pieces(file, corpus.text_field(), reader, max_bytes, &mut sink)?
            }
        };
        if !go_on {
            return Ok(());
        }
    }
    Ok(())
}

/// Hashes what is read, so that a file that changed since it was listed is noticed.
struct HashingReader {
    inner: File,
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

fn plain_pieces(
    file: &CorpusFile,
    mut reader: HashingReader,
    max_bytes: usize,
    sink: &mut impl FnMut(Piece) -> bool,
) -> Result<bool> {
    let mut pending: Vec<u8> = Vec::new();
    loop {
        // One byte more than the bound: the cut looks at what follows it.
        let missing = (max_bytes + 1).saturating_sub(pending.len()) as u64;
        let read = reader.by_ref().take(missing).read_to_end(&mut pending);
        read.map_err(Error::io("read", &file.path))?;
        if pending.len() <= max_bytes {
            break;
        }
        let rest = pending.split_off(cut(&pending, max_bytes));
        let piece = std::mem::replace(&mut pending, rest);
        if !sink(piece_of(file, piece, false)?) {
            return Ok(false);
        }
    }
    reader.check(file)?;
    Ok(sink(piece_of(file, pending, true)?))
}

fn piece_of(file: &CorpusFile, bytes: Vec<u8>, ends: bool) -> Result<Piece> {
    let file_bytes = bytes.len() as u64;
    // Listing the corpus found the file to be UTF-8, and `cut` never cuts a character.
    let text = String::from_utf8(bytes).map_err(|_| Error::FileChanged {
        path: file.path.clone(),
    })?;
    Ok(Piece {
        text,
        ends_document: ends,
        file_bytes,
    })
}

fn json_lines_pieces(
    file: &CorpusFile,
    field: &str,
    reader: HashingReader,
    max_bytes: usize,
    sink: &mut impl FnMut(Piece) -> bool,
) -> Result<bool> {
    let mut reader = BufReader::with_capacity(1 << 18, reader);
    let mut line = Vec::new();
    let (mut number, mut offset) = (0, 0);
    loop {
        line.clear();
        let read = reader
            .read_until(b'\n', &mut line)
            .map_err(Error::io("read", &file.path))?;
        if read == 0 {
            break;
        }
        number += 1;
        let text = json_text(&line, field).map_err(|problem| Error::BadRecord {
            path: file.path.clone(),
            line: number,
            offset,
            problem,
        })?;
        if let Some(text) = text
            && !cut_into_pieces(text, max_bytes, read as u64, sink)
        {
            return Ok(false);
        }
        offset += read as u64;
    }
    reader.into_inner().check(file)?;
    Ok(true)
}

/// The document of one line; `None` for a blank line and for an empty document.
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
        Some(_) => Err(format!("the field {field:?} is no string")),
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

/// Hands a document to `sink` in pieces of at most `max_bytes`; `file_bytes` is what it took of the
/// progress. Says `false` when `sink` does.
pub(crate) fn cut_into_pieces(
    mut text: String,
    max_bytes: usize,
    file_bytes: u64,
    sink: &mut (impl FnMut(Piece) -> bool + ?Sized),
) -> bool {
    while text.len() > max_bytes {
        let rest = text.split_off(cut(text.as_bytes(), max_bytes));
        let piece = std::mem::replace(&mut text, rest);
        if !sink(Piece {
            text: piece,
            ends_document: false,
            file_bytes: 0,
        }) {
            return false;
        }
    }
    sink(Piece {
        text,
        ends_document: true,
        file_bytes,
    })
}

/// Where to cut UTF-8 text that is longer than `max_bytes`, which is at least 8: at most `max_bytes`
/// from its start, at least half of that, and never inside a character.
///
/// Best is behind a line feed, or before a space, that stands directly between two visible ASCII
/// characters: there the pre-tokenizers of the GPT-2, GPT-4 and Llama-3 families begin a new word in
/// any case, so the tokens are those of the whole text. Else behind any line feed, else between any
/// two characters; there one or two tokens may differ from those of the whole text.
pub(crate) fn cut(text: &[u8], max_bytes: usize) -> usize {
    debug_assert!(text.len() > max_bytes && max_bytes >= 8);
    let visible = |at: usize| text.get(at).is_some_and(u8::is_ascii_graphic);
    let behind_line = |&at: &usize| text[at - 1] == b'\n';
    let between_lines = |&at: &usize| behind_line(&at) && visible(at - 2) && visible(at);
    let between_words = |&at: &usize| text[at] == b' ' && visible(at - 1) && visible(at + 1);
    let candidates = || (max_bytes / 2..=max_bytes).rev();
    candidates()
        .find(between_lines)
        .or_else(|| candidates().find(between_words))
        .or_else(|| candidates().find(behind_line))
        // Five places or more, and a character has at most four bytes: one of them starts one.
        .or_else(|| candidates().find(|&at| (text[at] & 0xC0) != 0x80))
        .unwrap_or(max_bytes)
}
