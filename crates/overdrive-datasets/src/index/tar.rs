//! The members of a tar archive, and the search for WebDataset samples.
//!
//! It reads the headers of POSIX.1-1988 (ustar) and POSIX.1-2001 (pax), and GNU's long names.

use std::ops::Range;
use std::path::Path;

use super::scan::{Part, Scan};
use crate::{Error, Result};

/// The size of a header, and the alignment of all members.
const BLOCK: usize = 512;

/// A file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// The range of the file's bytes.
    pub(crate) content: Range<usize>,
    /// The offset of the member's headers, or of those of folders and links before it.
    pub(crate) start: usize,
}

/// A reader of the regular files of an archive. It ends at the end mark or at the end of the bytes.
pub(crate) struct Members<'a> {
    data: &'a [u8],
    at: usize,
}

/// An error in an archive and its offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TarError {
    pub(crate) at: usize,
    pub(crate) problem: String,
    /// `true` if the bytes end too early.
    pub(crate) is_cut: bool,
}

impl<'a> Members<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    /// Returns the current offset: after the last member, or at the end mark.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Reads the next regular file; returns `None` at the end.
    pub(crate) fn next_file(&mut self) -> std::result::Result<Option<Member>, TarError> {
        let start = self.at;
        let (mut long_name, mut long_size) = (None::<String>, None::<u64>);
        loop {
            let at = self.at;
            let error = |problem: &str| TarError {
                at,
                problem: problem.to_owned(),
                is_cut: false,
            };
            let cut = |problem: &str| TarError {
                is_cut: true,
                ..error(problem)
            };
            if at == self.data.len() {
                return match (&long_name, &long_size) {
                    (None, None) => Ok(None),
                    _ => Err(cut("the archive ends between a header and its file")),
                };
            }
            let header = self
                .data
                .get(at..at + BLOCK)
                .ok_or_else(|| cut("the archive ends within a header"))?;
            if header.iter().all(|&byte| byte == 0) {
                return Ok(None);
            }
            check_sum(header).map_err(|problem| error(&problem))?;
            let kind = header[156];
            let is_file = matches!(kind, b'0' | 0 | b'7');
            let own_size = number(&header[124..136]);
            // A pax header's size applies to the file after it, and not to another header in between.
            let size = long_size.take_if(|_| is_file).or(own_size);
            let size = size
                .and_then(|size| usize::try_from(size).ok())
                .ok_or_else(|| error("the size in a header is not a number"))?;
            let content = at + BLOCK;
            // Links, folders and devices have no content, whatever size their header has.
            let stored = if matches!(kind, b'1'..=b'6') { 0 } else { size };
            let end = content
                // A damaged size may be close to 2^64, so the sum is checked.
                .checked_add(stored)
                .filter(|&end| end <= self.data.len())
                .ok_or_else(|| cut("the archive ends within a file: it was truncated"))?;
            // Some writers leave out the padding after the last file.
            self.at = end.next_multiple_of(BLOCK).min(self.data.len());
            let bytes = &self.data[content..end];
            match kind {
                b'x' => {
                    for (key, value) in pax_records(bytes) {
                        match key {
                            "path" => long_name = Some(value.to_owned()),
                            "size" => long_size = value.parse().ok(),
                            _ => {}
                        }
                    }
                }
                b'L' => long_name = Some(until_zero(bytes)),
                b'S' => {
                    return Err(error(
                        "sparse files are not supported; create the archive without them",
                    ));
                }
                _ if is_file => {
                    let name = long_name.take().unwrap_or_else(|| short_name(header));
                    // Before POSIX, a slash at the end of the name marked a folder.
                    if !name.ends_with('/') {
                        return Ok(Some(Member {
                            name,
                            content: content..end,
                            start,
                        }));
                    }
                }
                // The extended headers so far belonged to this folder, link or device.
                b'1'..=b'6' => (long_name, long_size) = (None, None),
                // Global headers, long names of links and unknown kinds are skipped.
                _ => {}
            }
        }
    }
}

/// Verifies the checksum of a header: the sum of all its bytes, with those of the checksum itself as spaces.
fn check_sum(header: &[u8]) -> std::result::Result<(), String> {
    let sum: u64 = header
        .iter()
        .enumerate()
        .map(|(at, &byte)| u64::from(if (148..156).contains(&at) { b' ' } else { byte }))
        .sum();
    match number(&header[148..156]) {
        Some(expected) if expected == sum => Ok(()),
        _ => Err(
            "the checksum of the header is wrong: the file is not a tar archive, or it is damaged"
                .to_owned(),
        ),
    }
}

/// Parses a number: octal digits, or GNU's form for large numbers, big-endian with the first bit set.
fn number(field: &[u8]) -> Option<u64> {
    if field.first()? & 0x80 != 0 {
        // GNU's form uses 12 bytes, of which only the last 8 fit u64.
        let (high, low) = field[1..].split_at(field.len().saturating_sub(9));
        if field[0] & 0x7f != 0 || high.iter().any(|&byte| byte != 0) {
            return None;
        }
        return Some(
            low.iter()
                .fold(0, |number, &byte| number << 8 | u64::from(byte)),
        );
    }
    let digits = until_zero(field);
    match digits.trim() {
        "" => Some(0),
        digits => u64::from_str_radix(digits, 8).ok(),
    }
}

fn until_zero(bytes: &[u8]) -> String {
    let end = memchr::memchr(0, bytes).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn short_name(header: &[u8]) -> String {
    let name = until_zero(&header[..100]);
    let prefix = match header[257..].starts_with(b"ustar\0") {
        true => until_zero(&header[345..500]),
        false => String::new(),
    };
    match prefix.is_empty() {
        true => name,
        false => format!("{prefix}/{name}"),
    }
}

/// Parses pax records of the form `length key=value\n`, up to the first that is invalid.
fn pax_records(mut bytes: &[u8]) -> Vec<(&str, &str)> {
    let mut records = Vec::new();
    while let Some((record, rest)) = pax_record(bytes) {
        records.push(record);
        bytes = rest;
    }
    records
}

fn pax_record(bytes: &[u8]) -> Option<((&str, &str), &[u8])> {
    let space = memchr::memchr(b' ', bytes)?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
    let record = std::str::from_utf8(record).ok()?.split_once('=')?;
    Some((record, &bytes[length..]))
}

/// Splits a file name into the key of its sample and its extension in lower case: `a/b/0001.seg.PNG` is `seg.png` of
/// `a/b/0001`. Returns `None` for a file that belongs to no sample, as in the library `webdataset`: one without an
/// extension (`README`), or a hidden one (`._0001.png`, which macOS adds).
pub(crate) fn split_name(name: &str) -> Option<(&str, String)> {
    let name = name.strip_prefix("./").unwrap_or(name);
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name[base..].find('.').filter(|&dot| dot > 0)?;
    Some((&name[..base + dot], name[base + dot + 1..].to_lowercase()))
}

/// The scan for samples of a WebDataset: consecutive files whose names differ only after the first dot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TarScan;

impl Scan for TarScan {
    fn scan(
        &self,
        path: &Path,
        part: Part<'_>,
        _threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut members = Members::new(part.data);
        let mut key: Option<String> = None;
        loop {
            let member = match members.next_file() {
                Err(error) if error.is_cut && !part.ends_file => return Ok(part.data.len() as u64),
                member => member.map_err(|error| {
                    let at = part.base + error.at as u64;
                    Error::invalid_file(path, format!("at byte {at}, {}", error.problem))
                })?,
            };
            let Some(member) = member else {
                return Ok(members.at() as u64);
            };
            let Some((sample, _)) = split_name(&member.name) else {
                continue;
            };
            if key.as_deref() != Some(sample) {
                key = Some(sample.to_owned());
                sink(member.start as u64)?;
            }
        }
    }

    fn key(&self) -> Vec<u8> {
        b"tar 2".to_vec()
    }
}
