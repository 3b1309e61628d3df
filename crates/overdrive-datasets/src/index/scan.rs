//! The interface of the searches for records, and the threads that run them.

use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::range_source::read_error;
use crate::{Error, RecordNumber, Result};

/// The bytes that are searched: a whole file, or a part of one that begins with a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) data: &'a [u8],
    /// The offset of the first record: after a byte order mark.
    pub(crate) first: usize,
    /// The offset of the part in the file.
    pub(crate) base: u64,
    /// If `false`, the last record may go on after the part.
    pub(crate) ends_file: bool,
}

impl<'a> Part<'a> {
    pub(crate) fn whole(data: &'a [u8]) -> Self {
        Self {
            data,
            first: text_start(data),
            base: 0,
            ends_file: true,
        }
    }
}

/// A search for the records of a file format.
pub(crate) trait Scan: Sync {
    /// Passes the offset of each record's start to `sink`, in order. Returns the offset at which the last
    /// record ends, or the end of the part. Offsets are relative to the part. `path` is used in error messages.
    fn scan(
        &self,
        path: &Path,
        part: Part<'_>,
        threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64>;

    /// Returns `true` if a file can be searched in parts, each from the start of the last record of the one before. The
    /// search of other formats needs all bytes at once.
    fn is_streamed(&self) -> bool {
        true
    }

    /// Returns a key of everything that an index depends on besides the data: the format, its options, and a
    /// version that changes when the scan finds other records in the same data.
    fn key(&self) -> Vec<u8>;
}

/// The size of the chunks that are searched in parallel: large enough that the cost of passing them on is
/// negligible, small enough for the second-level cache.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// The byte order mark of UTF-8, which is not part of the first record.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Returns the offset of the first record, after a byte order mark.
pub(crate) fn text_start(data: &[u8]) -> usize {
    if data.starts_with(BOM) { BOM.len() } else { 0 }
}

/// Returns `true` for white space as JSON defines it.
pub(crate) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// Runs the jobs `0..jobs` on `threads` threads and passes their results to `sink` in order.
///
/// No job starts more than `ahead` jobs before the one that `sink` waits for, which bounds the memory however
/// long one job takes. An error of `sink` ends the run.
pub(crate) fn in_order<T: Send>(
    jobs: usize,
    threads: usize,
    ahead: usize,
    work: impl Fn(usize) -> T + Sync,
    mut sink: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    // With one thread the work is done in the caller's, without a queue.
    if threads <= 1 || jobs <= 1 {
        return (0..jobs).try_for_each(|job| sink(work(job)));
    }
    let queue = Queue {
        state: Mutex::new(State {
            next_job: 0,
            taken: 0,
            slots: VecDeque::new(),
            stopped: false,
        }),
        changed: Condvar::new(),
        jobs,
        ahead: ahead.max(1),
    };
    std::thread::scope(|scope| {
        // The scope joins the workers when this closure ends, also after an error or a panic, so the workers
        // must be stopped first.
        let _stop = StopOnDrop(&queue);
        for number in 0..threads.min(jobs) {
            std::thread::Builder::new()
                .name(format!("overdrive-scan-{number}"))
                .spawn_scoped(scope, || {
                    let _stop = StopOnDrop(&queue);
                    while let Some(job) = queue.take_job() {
                        queue.put(job, work(job));
                    }
                    // Reached only without a panic of `work`, so the other workers must not be stopped.
                    std::mem::forget(_stop);
                })
                .map_err(|error| Error::Threads {
                    threads: "the threads that index files",
                    problem: error.to_string(),
                })?;
        }
        for _ in 0..jobs {
            sink(queue.take_result().ok_or(Error::WorkerPanicked)?)?;
        }
        Ok(())
    })
}

struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    jobs: usize,
    ahead: usize,
}

struct State<T> {
    next_job: usize,
    /// The number of results that have been passed on; `slots[0]` is the result of the job with this number.
    taken: usize,
    slots: VecDeque<Option<T>>,
    stopped: bool,
}

impl<T> Queue<T> {
    fn lock(&self) -> std::sync::MutexGuard<'_, State<T>> {
        // The state is valid whenever the lock is released, so a poisoned lock is harmless.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        guard: std::sync::MutexGuard<'a, State<T>>,
    ) -> std::sync::MutexGuard<'a, State<T>> {
        self.changed
            .wait(guard)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_job(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            if state.stopped || state.next_job == self.jobs {
                return None;
            }
            if state.next_job < state.taken + self.ahead {
                state.next_job += 1;
                return Some(state.next_job - 1);
            }
            state = self.wait(state);
        }
    }

    fn put(&self, job: usize, result: T) {
        let mut state = self.lock();
        let slot = job - state.taken;
        while state.slots.len() <= slot {
            state.slots.push_back(None);
        }
        // Both the workers and the receiver wait for this condition, so all of them are woken.
        state.slots[slot] = Some(result);
        self.changed.notify_all();
    }

    fn take_result(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(result) = state.slots.front_mut().and_then(Option::take) {
                state.slots.pop_front();
                state.taken += 1;
                self.changed.notify_all();
                return Some(result);
            }
            if state.stopped {
                return None;
            }
            state = self.wait(state);
        }
    }
}

struct StopOnDrop<'a, T>(&'a Queue<T>);

impl<T> Drop for StopOnDrop<'_, T> {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.changed.notify_all();
    }
}

/// Returns the number of cores that the process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The size of the parts in which a stream is searched.
pub(crate) const PART_BYTES: usize = 8 << 20;

/// Searches a stream in parts of `part_bytes`, of which one is in memory, or more while a record is longer. The results
/// are those of [`Scan::scan`] over all bytes; the scan must be [streamed](Scan::is_streamed).
pub(crate) fn scan_stream(
    scan: &dyn Scan,
    path: &Path,
    reader: &mut dyn Read,
    part_bytes: usize,
    threads: usize,
    sink: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let mut buffer: Vec<u8> = Vec::new();
    let mut starts: Vec<u64> = Vec::new();
    let (mut base, mut records) = (0, 0);
    let mut size = part_bytes;
    loop {
        let missing = size.saturating_sub(buffer.len()) as u64;
        let read = reader.take(missing).read_to_end(&mut buffer);
        let read = read.map_err(read_error("read", path))? as u64;
        let part = Part {
            data: &buffer,
            first: if base == 0 { text_start(&buffer) } else { 0 },
            base,
            ends_file: read < missing,
        };
        starts.clear();
        let end = scan.scan(path, part, threads, &mut |start| {
            starts.push(start);
            Ok(())
        });
        let end = end.map_err(|error| error_of_part(error, base, records + starts.len()))?;
        // An archive may end before its file does.
        if part.ends_file || end < buffer.len() as u64 {
            starts.iter().try_for_each(|start| sink(base + start))?;
            return Ok(base + end);
        }
        match starts.split_last() {
            Some((&last, complete)) if last > 0 => {
                complete.iter().try_for_each(|start| sink(base + start))?;
                records += complete.len();
                buffer.drain(..last as usize);
                base += last;
                size = part_bytes;
            }
            // The only record does not end in this part, so that a larger one is needed.
            _ => size = buffer.len().saturating_mul(2).max(1),
        }
    }
}

/// Returns an error with the offset in the file for one with an offset in a part, which does not know the line either.
fn error_of_part(error: Error, base: u64, records: usize) -> Error {
    match error {
        Error::InvalidRecord {
            path,
            offset,
            problem,
            ..
        } if base > 0 => Error::InvalidRecord {
            path,
            number: RecordNumber::Record(records.saturating_sub(1)),
            offset: base + offset,
            problem,
        },
        error => error,
    }
}
