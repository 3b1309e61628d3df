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

/// What a chunk holds, if it begins in a state.
struct Found {
    begin: State,
    /// Line feeds that end a row, counted from the chunk's start.
    feeds: Vec<u32>,
    end: State,
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
        let chunk = |number: usize| {
            let start = first + number * CHUNK;
            start..data.len().min(start + CHUNK)
        };
        // Whether a chunk begins inside of quotes is known when the chunks before it are. Until then
        // it is guessed from the chunk's first quotes, which nearly always tell; where the guess was
        // wrong, the chunk is searched again.
        let find = |number: usize| {
            let range = chunk(number);
            let begin = self.guess(data, first, range.clone());
            (number, self.find(data, first, range, begin))
        };
        let mut state = State::Outside;
        in_order(chunks, threads, 4 * threads, find, |(number, found)| {
            let range = chunk(number);
            if state == State::BehindQuote && Some(data[range.start]) != self.quote {
                state = State::Outside;
            }
            let found = match found.begin == state {
                true => found,
                false => self.find(data, first, range.clone(), state),
            };
            state = found.end;
            found
                .feeds
                .iter()
                .map(|&feed| range.start + feed as usize + 1)
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
    /// The state in which a chunk probably begins: a quote that stands only behind a delimiter or a
    /// line end opens a field, one that stands only in front of one closes it.
    fn guess(&self, data: &[u8], first: usize, range: Range<usize>) -> State {
        let Some(quote) = self.quote else {
            return State::Outside;
        };
        let is_border = |at: usize| matches!(data[at], b'\n' | b'\r') || data[at] == self.delimiter;
        for at in memchr_iter(quote, &data[range.clone()]).map(|at| range.start + at) {
            let opens = at == first || is_border(at - 1);
            let closes = at + 1 == data.len() || is_border(at + 1);
            match (opens, closes) {
                (true, false) => return State::Outside,
                (false, true) => return State::Inside,
                // A doubled quote, an empty field, or one between two delimiters that are text.
                _ => {}
            }
        }
        State::Outside
    }

    fn find(&self, data: &[u8], first: usize, range: Range<usize>, begin: State) -> Found {
        let start = range.start;
        let mut feeds = Vec::with_capacity(range.len() / 64);
        let row_end = |feed| feeds.push((feed - start) as u32);
        let end = match self.quote {
            Some(quote) => self.walk(quote, data, first, range, begin, row_end),
            None => {
                let found = memchr_iter(b'\n', &data[range]);
                found.map(|feed| start + feed).for_each(row_end);
                State::Outside
            }
        };
        Found { begin, feeds, end }
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
