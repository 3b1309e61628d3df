//! CSV by RFC 4180: a line feed between quotes does not end a row.

use std::ops::Range;
use std::path::Path;

use memchr::{memchr, memchr_iter, memchr2};

use super::scan::{Scan, in_order, text_start};
use crate::Result;

const CHUNK: usize = 1 << 20;

/// Rows of CSV or TSV; empty lines are no rows.
///
/// A quote opens a quoted field where a field begins, and only there; inside one, two quotes are a
/// quote, and one ends it. A quote in the middle of a plain field is a character like any other. That
/// is what Python's `csv` and the `csv` crate do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CsvScan {
    pub(crate) delimiter: u8,
    /// `None`: quotes are characters like any other.
    pub(crate) quote: Option<u8>,
}

/// What the bytes before a place say about the byte there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Outside,
    Inside,
    /// Behind a quote that ends the field, unless another follows.
    BehindQuote,
}

/// What a chunk holds.
struct Found {
    /// Line feeds that end a row, counted from the chunk's start.
    feeds: Vec<u32>,
    end: State,
}

/// What a chunk holds for each state that it may begin in; `None` where that cannot be.
struct Chunk {
    start: usize,
    outside: Found,
    inside: Option<Found>,
    /// Only where it differs from `outside`: where the chunk begins with a quote.
    behind_quote: Option<Found>,
}

impl Scan for CsvScan {
    fn scan(
        &self,
        _path: &Path,
        data: &[u8],
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let first = text_start(data);
        let is_row = |start: usize| {
            start < data.len() && data[start] != b'\n' && !data[start..].starts_with(b"\r\n")
        };
        if is_row(first) {
            sink(first as u64)?;
        }
        let chunks = (data.len() - first).div_ceil(CHUNK);
        // Whether a chunk begins inside of quotes is known when the chunks before it are. So it is
        // searched for each case at once, and the sink takes the one that came true. Chunks without
        // a quote, in most files nearly all, need one search.
        let find = |chunk: usize| {
            let start = first + chunk * CHUNK;
            self.find(data, first, start..data.len().min(start + CHUNK))
        };
        let mut state = State::Outside;
        in_order(chunks, threads, 4 * threads, find, |chunk| {
            let found = match state {
                State::Outside => None,
                State::Inside => chunk.inside,
                State::BehindQuote => chunk.behind_quote,
            };
            let found = found.unwrap_or(chunk.outside);
            state = found.end;
            found
                .feeds
                .iter()
                .map(|&feed| chunk.start + feed as usize + 1)
                .filter(|&row| is_row(row))
                .try_for_each(|row| sink(row as u64))
        })?;
        Ok(data.len() as u64)
    }

    fn key(&self) -> Vec<u8> {
        let Self { delimiter, quote } = self;
        format!("csv 1, delimiter {delimiter}, quote {quote:?}").into_bytes()
    }
}

impl CsvScan {
    fn find(&self, data: &[u8], first: usize, range: Range<usize>) -> Chunk {
        let start = range.start;
        let quote = self
            .quote
            .filter(|&quote| memchr(quote, &data[range.clone()]).is_some());
        let Some(quote) = quote else {
            let feeds = memchr_iter(b'\n', &data[range]);
            return Chunk {
                start,
                outside: Found {
                    feeds: feeds.map(|feed| feed as u32).collect(),
                    end: State::Outside,
                },
                inside: Some(Found {
                    feeds: Vec::new(),
                    end: State::Inside,
                }),
                behind_quote: None,
            };
        };
        let walk = |state| {
            let mut feeds = Vec::new();
            let row_end = |feed| feeds.push((feed - start) as u32);
            let end = self.walk(quote, data, first, range.clone(), state, row_end);
            Found { feeds, end }
        };
        let is_first = start == first;
        Chunk {
            start,
            outside: walk(State::Outside),
            inside: (!is_first).then(|| walk(State::Inside)),
            behind_quote: (!is_first && data[start] == quote).then(|| walk(State::BehindQuote)),
        }
    }

    /// Hands the line feeds that end rows to `row_end`; gives the state behind the range.
    fn walk(
        &self,
        quote: u8,
        data: &[u8],
        first: usize,
        range: Range<usize>,
        mut state: State,
        mut row_end: impl FnMut(usize),
    ) -> State {
        let mut at = range.start;
        while at < range.end {
            let rest = &data[at..range.end];
            match state {
                State::BehindQuote if rest[0] == quote => {
                    at += 1;
                    state = State::Inside;
                }
                State::BehindQuote => state = State::Outside,
                State::Inside => {
                    let Some(found) = memchr(quote, rest) else {
                        return state;
                    };
                    at += found + 1;
                    state = State::BehindQuote;
                }
                State::Outside => {
                    let Some(found) = memchr2(quote, b'\n', rest) else {
                        return state;
                    };
                    at += found;
                    if data[at] == b'\n' {
                        row_end(at);
                    } else if at == first || [b'\n', self.delimiter].contains(&data[at - 1]) {
                        state = State::Inside;
                    }
                    at += 1;
                }
            }
        }
        state
    }
}
