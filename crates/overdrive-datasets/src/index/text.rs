//! The search for lines, paragraphs and whole files of text.

use std::path::Path;

use memchr::memchr_iter;

use super::scan::{CHUNK_BYTES, Part, Scan, in_order, is_space};
use crate::Result;

/// The scan for lines, ended by `\n` or `\r\n`; the last one may have no end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LineScan {
    /// If `true`, lines of only white space are not records (JSON Lines).
    pub(crate) skip_blank: bool,
}

impl Scan for LineScan {
    fn scan(
        &self,
        _path: &Path,
        part: Part<'_>,
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let Part { data, first, .. } = part;
        let is_record =
            |start: usize| start < data.len() && !(self.skip_blank && is_blank(&data[start..]));
        scan_lines(data, first, threads, &is_record, sink)
    }

    fn key(&self) -> Vec<u8> {
        format!("lines 1, skip_blank {}", self.skip_blank).into_bytes()
    }
}

/// The scan for paragraphs: lines up to the next one of only white space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParagraphScan;

impl Scan for ParagraphScan {
    fn scan(
        &self,
        _path: &Path,
        part: Part<'_>,
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let Part { data, first, .. } = part;
        let is_record = |start: usize| {
            start < data.len()
                && !is_blank(&data[start..])
                && (start == first || is_after_blank(&data[first..start]))
        };
        scan_lines(data, first, threads, &is_record, sink)
    }

    fn key(&self) -> Vec<u8> {
        b"paragraphs 1".to_vec()
    }
}

/// The scan that takes the whole file as one record, unless it is empty.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DocumentScan;

impl Scan for DocumentScan {
    fn scan(
        &self,
        _path: &Path,
        part: Part<'_>,
        _threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let Part { data, first, .. } = part;
        if first < data.len() {
            sink(first as u64)?;
        }
        Ok(data.len() as u64)
    }

    fn is_streamed(&self) -> bool {
        false
    }

    fn key(&self) -> Vec<u8> {
        b"document 1".to_vec()
    }
}

/// Passes the starts of the lines that are records to `sink`.
fn scan_lines(
    data: &[u8],
    first: usize,
    threads: usize,
    is_record: &(impl Fn(usize) -> bool + Sync),
    sink: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<u64> {
    if is_record(first) {
        sink(first as u64)?;
    }
    let chunks = (data.len() - first).div_ceil(CHUNK_BYTES);
    // Line starts are kept relative to the chunk's start, which takes 4 bytes instead of 8.
    let find = |chunk: usize| {
        let start = first + chunk * CHUNK_BYTES;
        let end = data.len().min(start + CHUNK_BYTES);
        let mut found = Vec::with_capacity((end - start) / 32);
        for feed in memchr_iter(b'\n', &data[start..end]) {
            if is_record(start + feed + 1) {
                found.push(feed as u32 + 1);
            }
        }
        (start, found)
    };
    // Four chunks ahead per thread, so that no thread waits when one chunk has more lines than others.
    in_order(chunks, threads, 4 * threads, find, |(start, found)| {
        found
            .iter()
            .try_for_each(|&line| sink((start + line as usize) as u64))
    })?;
    Ok(data.len() as u64)
}

/// Returns `true` if the last line of `before`, which ends with a line feed, is blank.
fn is_after_blank(before: &[u8]) -> bool {
    let line = before.strip_suffix(b"\n").unwrap_or(before);
    line.iter()
        .rev()
        .find(|&&byte| !is_space(byte) || byte == b'\n')
        .is_none_or(|&byte| byte == b'\n')
}

/// Returns `true` if there is only white space before the next line feed.
fn is_blank(rest: &[u8]) -> bool {
    // The first byte nearly always decides, so a vectorized search would cost more than it saves.
    rest.iter()
        .find(|&&byte| !is_space(byte) || byte == b'\n')
        .is_none_or(|&byte| byte == b'\n')
}
