//! The search for rows of CSV (RFC 4180), in which a line end between quotes does not end a row.

use std::ops::Range;
use std::path::Path;

use memchr::{memchr, memchr_iter, memchr2_iter, memchr3};

use super::scan::{CHUNK_BYTES, Part, Scan, in_order};
use crate::{Error, RecordNumber, Result};

/// The scan for rows of CSV or TSV; empty lines are not rows. Rows end with `\n`, `\r\n` or `\r`, which a file may mix.
///
/// A quote opens a quoted field only where a field begins; within one, two quotes are a quote, and one ends it.
/// A quote in the middle of an unquoted field is an ordinary character. Python's `csv` and the `csv` crate do
/// the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CsvScan {
    pub(crate) delimiter: u8,
    /// The quote; `None` makes quotes ordinary characters.
    pub(crate) quote: Option<u8>,
    /// The maximum size of a row in bytes, including the line ends after it.
    pub(crate) max_row_bytes: u64,
}

/// The state of the parser before a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Outside of quotes.
    Outside,
    /// Within quotes.
    Inside,
    /// After a quote that ends the field, unless another follows.
    AfterQuote,
}

/// The rows of a chunk, provided that it begins in the state `begin`.
struct ChunkRows {
    begin: State,
    /// The offsets of the last byte of each line end that ends a row, relative to the chunk's start.
    line_ends: Vec<u32>,
    end: State,
}

impl Scan for CsvScan {
    fn scan(
        &self,
        path: &Path,
        part: Part<'_>,
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let Part { data, first, .. } = part;
        // The start of the row that has not ended yet.
        let mut row_start = first;
        let is_row = |start: usize| start < data.len() && !matches!(data[start], b'\n' | b'\r');
        if is_row(first) {
            sink(first as u64)?;
        }
        let chunks = (data.len() - first).div_ceil(CHUNK_BYTES);
        let chunk = |number: usize| {
            let start = first + number * CHUNK_BYTES;
            start..data.len().min(start + CHUNK_BYTES)
        };
        // Whether a chunk begins within quotes depends on all chunks before it. To search them in parallel,
        // the state is guessed from the chunk's first quotes, which is nearly always right; a chunk with a
        // wrong guess is searched again.
        let find = |number: usize| {
            let range = chunk(number);
            let begin = self.guess(data, first, range.clone());
            (number, self.find(data, first, range, begin))
        };
        let mut state = State::Outside;
        in_order(chunks, threads, 4 * threads, find, |(number, found)| {
            let range = chunk(number);
            // At a chunk's border the decision about a doubled quote depends on the next chunk's first byte.
            if state == State::AfterQuote && Some(data[range.start]) != self.quote {
                state = State::Outside;
            }
            let found = match found.begin == state {
                true => found,
                false => self.find(data, first, range.clone(), state),
            };
            state = found.end;
            let rows = found
                .line_ends
                .iter()
                .map(|&line_end| range.start + line_end as usize + 1)
                .filter(|&row| is_row(row));
            for row in rows {
                self.check_row(path, data, row_start..row)?;
                row_start = row;
                sink(row as u64)?;
            }
            // Checked at once, because an unclosed quote turns the rest of the file into one row.
            self.check_row(path, data, row_start..range.end)
        })?;
        Ok(data.len() as u64)
    }

    fn key(&self) -> Vec<u8> {
        let Self {
            delimiter,
            quote,
            max_row_bytes,
        } = self;
        // The limit is part of the key: an index with longer rows must not be used under a lower one.
        format!("csv 2, delimiter {delimiter}, quote {quote:?}, rows up to {max_row_bytes}")
            .into_bytes()
    }
}

impl CsvScan {
    /// Checks the length of a row, or of its part up to here.
    fn check_row(&self, path: &Path, data: &[u8], row: Range<usize>) -> Result<()> {
        if row.len() as u64 <= self.max_row_bytes {
            return Ok(());
        }
        let before = 0..row.start;
        let line_ends = memchr2_iter(b'\n', b'\r', &data[before]).filter(|&at| ends_line(data, at));
        let line = line_ends.count() as u64 + 1;
        Err(Error::InvalidRecord {
            path: path.to_owned(),
            number: RecordNumber::Line(line),
            offset: row.start as u64,
            problem: format!(
                "the row that begins here has more than {} bytes: a quoted field in it probably does not end. \
                 Close the quote, or set CsvOptions::quote to None if quotes are ordinary characters, or \
                 CsvOptions::max_row_bytes to a larger number",
                self.max_row_bytes
            ),
        })
    }

    /// Returns the state in which a chunk probably begins. A quote after a delimiter or line end, but not before
    /// one, opens a field; a quote before a delimiter or line end, but not after one, closes a field.
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
                // A doubled quote, an empty field, or a quote between two delimiters that are text does not
                // decide the state.
                _ => {}
            }
        }
        State::Outside
    }

    fn find(&self, data: &[u8], first: usize, range: Range<usize>, begin: State) -> ChunkRows {
        let start = range.start;
        // A guess of the number of rows: 64 bytes per row.
        let mut line_ends = Vec::with_capacity(range.len() / 64);
        let row_end = |line_end| line_ends.push((line_end - start) as u32);
        let end = match self.quote {
            Some(quote) => self.walk(quote, data, first, range, begin, row_end),
            None => {
                let found = memchr2_iter(b'\n', b'\r', &data[range]).map(|at| start + at);
                found.filter(|&at| ends_line(data, at)).for_each(row_end);
                State::Outside
            }
        };
        ChunkRows {
            begin,
            line_ends,
            end,
        }
    }

    /// Passes the last byte of each line end that ends a row to `row_end`; returns the state after the range.
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
                State::AfterQuote if rest[0] == quote => {
                    at += 1;
                    state = State::Inside;
                }
                State::AfterQuote => state = State::Outside,
                State::Inside => {
                    // Within quotes only the next quote matters, so memchr skips everything else.
                    let Some(found) = memchr(quote, rest) else {
                        return state;
                    };
                    at += found + 1;
                    state = State::AfterQuote;
                }
                State::Outside => {
                    let Some(found) = memchr3(quote, b'\n', b'\r', rest) else {
                        return state;
                    };
                    at += found;
                    if data[at] != quote {
                        if ends_line(data, at) {
                            row_end(at);
                        }
                    } else if at == first || [b'\n', b'\r', self.delimiter].contains(&data[at - 1])
                    {
                        state = State::Inside;
                    }
                    at += 1;
                }
            }
        }
        state
    }
}

/// Returns `true` if the line feed or carriage return at `at` is the last byte of a line end: all but the carriage
/// return of `\r\n`.
fn ends_line(data: &[u8], at: usize) -> bool {
    data[at] == b'\n' || data.get(at + 1) != Some(&b'\n')
}
