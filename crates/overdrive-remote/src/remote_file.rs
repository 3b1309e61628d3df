//! An object whose ranges are read through the cache of blocks.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use overdrive_datasets::{RangeSource, Result, Sha256Digest};
use tokio::sync::Semaphore;

use crate::RemoteOptions;
use crate::block_cache::{BlockCache, Cached, ObjectFolder};
use crate::object::{Failure, Object};
use crate::runtime;

/// The largest request in bytes: neighbouring blocks are requested together up to it.
const MAX_REQUEST_BYTES: u64 = 8 << 20;
/// The number of bytes that are requested ahead of a reader that goes through a file.
const MAX_AHEAD_BYTES: u64 = 32 << 20;
/// The largest number of blocks that are announced at once; later ones are requested when they are read.
const MAX_ANNOUNCED: usize = 1024;

/// An object on a server as a file of a dataset.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    object: Object,
    cache: Arc<BlockCache>,
    folder: ObjectFolder,
    block_bytes: u64,
    requests: Semaphore,
    state: Mutex<State>,
    /// A request has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The blocks that are being requested.
    in_flight: HashSet<u64>,
    /// The blocks whose last request failed, until they are read again.
    failed: HashMap<u64, Failure>,
    /// The last block of the last read, and the number of blocks that were read in order up to it.
    last: Option<u64>,
    in_order: u64,
    /// The first block that was not requested ahead of the reader.
    ahead_until: u64,
    has_changed: bool,
}

impl RemoteFile {
    pub(crate) fn new(
        object: Object,
        cache: Arc<BlockCache>,
        options: &RemoteOptions,
    ) -> RemoteFile {
        // The cache of another version, or of blocks of another size, is another one.
        let key = format!(
            "{}\n{}\n{}\n{}",
            object.name, object.version, object.bytes, options.block_bytes
        );
        RemoteFile(Arc::new(Inner {
            folder: cache.object(&Sha256Digest::of(key.as_bytes()).short()),
            object,
            cache,
            block_bytes: options.block_bytes,
            requests: Semaphore::new(options.connections),
            state: Mutex::default(),
            ended: Condvar::new(),
        }))
    }

    /// Requests the blocks that neither the cache nor the memory has, neighbours together.
    fn start(&self, blocks: impl IntoIterator<Item = u64>) {
        let inner = &self.0;
        let is_missing = |&block: &u64| {
            let is_known = {
                let state = inner.lock();
                state.in_flight.contains(&block) || inner.in_memory(block).is_some()
            };
            !is_known && !inner.cache.has(&inner.folder, block)
        };
        self.request(blocks.into_iter().filter(is_missing).collect());
    }

    /// Requests the blocks whether or not the cache has files for them, neighbours together.
    fn request(&self, missing: BTreeSet<u64>) {
        let inner = &self.0;
        let most = (MAX_REQUEST_BYTES / inner.block_bytes).max(1);
        let mut runs: Vec<Range<u64>> = Vec::new();
        {
            let mut state = inner.lock();
            for block in missing {
                // Another reader may have requested it meanwhile.
                if inner.in_memory(block).is_some() || !state.in_flight.insert(block) {
                    continue;
                }
                state.failed.remove(&block);
                match runs.last_mut() {
                    Some(run) if run.end == block && run.end - run.start < most => run.end += 1,
                    _ => runs.push(block..block + 1),
                }
            }
        }
        for run in runs {
            let inner = Arc::clone(inner);
            runtime::spawn(async move { inner.request(run).await });
        }
    }

    /// Copies the bytes of a block from `start` on into `out`, waiting for the block if necessary. `is_requested`: this
    /// read has requested it already.
    fn read_block(
        &self,
        block: u64,
        start: u64,
        out: &mut [u8],
        mut is_requested: bool,
    ) -> std::result::Result<(), Failure> {
        let inner = &self.0;
        loop {
            let mut state = inner.lock();
            while state.in_flight.contains(&block) {
                state = inner
                    .ended
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if state.has_changed {
                return Err(Failure::Changed);
            }
            if let Some(failure) = state.failed.remove(&block)
                && is_requested
            {
                return Err(failure);
            }
            // A request ahead of this read may have failed long ago, so that failure is none of this read.
            drop(state);
            if let Some(bytes) = inner.in_memory(block) {
                return copy(&bytes, start, out);
            }
            let length = inner.length(block);
            match inner.cache.read(&inner.folder, block, length, start, out) {
                Some(Cached::Copied) => return Ok(()),
                Some(Cached::Whole(bytes)) => {
                    let copied = copy(&bytes, start, out);
                    inner.cache.keep(&inner.folder, block, bytes);
                    return copied;
                }
                // Not there yet, removed in the meantime, or a file that cannot be read.
                None => {
                    self.request(BTreeSet::from([block]));
                    is_requested = true;
                }
            }
        }
    }

    /// Requests the blocks after a read that continues the one before.
    fn read_ahead(&self, first: u64, last: u64) {
        let inner = &self.0;
        let wanted = {
            let mut state = inner.lock();
            let continues = state
                .last
                .is_some_and(|before| first == before || first == before + 1);
            let before = state.last.filter(|_| continues).unwrap_or(last);
            state.last = Some(last);
            if !continues {
                (state.in_order, state.ahead_until) = (0, 0);
            }
            state.in_order += last - before;
            // A second block in order may be chance; from then on twice as much as was read is requested, up to a bound,
            // and the next part when half of that is left, so that requests are large.
            let ahead = (2 * state.in_order).min(MAX_AHEAD_BYTES / inner.block_bytes);
            if last == before || last + ahead / 2 < state.ahead_until {
                return;
            }
            let wanted = (last + 1).max(state.ahead_until)..(last + 1 + ahead).min(inner.blocks());
            state.ahead_until = wanted.end.max(state.ahead_until);
            wanted
        };
        self.start(wanted);
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is valid whenever the lock is released.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of blocks.
    fn blocks(&self) -> u64 {
        self.object.bytes.div_ceil(self.block_bytes)
    }

    /// Returns the length of a block; only the last one may be shorter than the others.
    fn length(&self, block: u64) -> u64 {
        let start = block * self.block_bytes;
        self.block_bytes
            .min(self.object.bytes.saturating_sub(start))
    }

    /// Requests neighbouring blocks and stores them.
    async fn request(&self, run: Range<u64>) {
        let start = run.start * self.block_bytes;
        let end = self.object.bytes.min(run.end * self.block_bytes);
        let result = match self.requests.acquire().await {
            Ok(_permit) => self.object.read(start..end).await,
            Err(_) => Err(Failure::Problem("the program ends".to_owned())),
        };
        for block in run {
            let bytes = result.as_ref().map(|bytes| {
                let from = (block * self.block_bytes - start) as usize;
                // A copy, so that a block does not keep the whole answer in memory.
                Bytes::copy_from_slice(&bytes[from..from + self.length(block) as usize])
            });
            if let Ok(bytes) = &bytes {
                // Other tasks go on while this thread writes.
                tokio::task::block_in_place(|| self.cache.write(&self.folder, block, bytes));
            }
            let failure = match bytes {
                Ok(bytes) => {
                    // Before its request ends, so that nobody requests it again.
                    self.cache.keep(&self.folder, block, bytes);
                    None
                }
                Err(failure) => Some(failure.clone()),
            };
            let mut state = self.lock();
            state.in_flight.remove(&block);
            if let Some(failure) = failure {
                state.has_changed |= failure == Failure::Changed;
                state.failed.insert(block, failure);
            }
            drop(state);
            self.ended.notify_all();
        }
    }

    fn in_memory(&self, block: u64) -> Option<Bytes> {
        self.cache.in_memory(&self.folder, block)
    }
}

impl RangeSource for RemoteFile {
    fn len(&self) -> u64 {
        self.0.object.bytes
    }

    fn version(&self) -> &str {
        &self.0.object.version
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let inner = &self.0;
        let name = &inner.object.name;
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > inner.object.bytes) {
            let problem = format!(
                "{} bytes from byte {offset} on were asked for, and it has {}",
                out.len(),
                inner.object.bytes
            );
            return Err(Failure::Problem(problem).error(name));
        }
        if out.is_empty() {
            return Ok(());
        }
        let first = offset / inner.block_bytes;
        let last = (offset + out.len() as u64 - 1) / inner.block_bytes;
        // The blocks of a range are requested together, as far as memory may hold them.
        let mut requested = first..first;
        if last > first {
            requested = first..last.min(first + MAX_ANNOUNCED as u64 - 1) + 1;
            self.start(requested.clone());
        }
        self.read_ahead(first, last);
        let mut rest = out;
        let mut start = offset - first * inner.block_bytes;
        for block in first..=last {
            let bytes = (inner.length(block) - start).min(rest.len() as u64);
            let (part, others) = rest.split_at_mut(bytes as usize);
            let read = self.read_block(block, start, part, requested.contains(&block));
            read.map_err(|failure| failure.error(name))?;
            rest = others;
            start = 0;
        }
        Ok(())
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        let bytes = self.0.block_bytes;
        let blocks: BTreeSet<u64> = ranges
            .iter()
            .filter(|range| range.start < range.end && range.end <= self.0.object.bytes)
            .flat_map(|range| range.start / bytes..=(range.end - 1) / bytes)
            .take(MAX_ANNOUNCED)
            .collect();
        self.start(blocks);
    }

    fn check_unchanged(&self) -> Result<()> {
        let inner = Arc::clone(&self.0);
        let checked = runtime::wait(async move { inner.object.check_unchanged().await });
        checked.map_err(|failure| failure.error(&self.0.object.name))
    }
}

/// Copies a part of a block.
fn copy(bytes: &Bytes, start: u64, out: &mut [u8]) -> std::result::Result<(), Failure> {
    let start = start as usize;
    match bytes.get(start..start + out.len()) {
        Some(part) => {
            out.copy_from_slice(part);
            Ok(())
        }
        None => Err(Failure::Problem("a cached block is too short".to_owned())),
    }
}
