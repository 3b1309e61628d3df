//! Blocks of objects on disk, which all processes of a machine share.
//!
//! A block is a file `OBJECT/NUMBER` with the bytes and their CRC-32C, written under a temporary name and renamed. So a
//! process may read, write and remove blocks at any time, without locks: a file is whole or missing. The time of a file is
//! that of its last use.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use overdrive_core::files;

/// The length of the checksum after the bytes.
const CHECKSUM_BYTES: u64 = 4;
/// A process looks at the size of the cache after it has written this share of it, and then removes blocks until a
/// quarter is free: eight processes that do so at any time stay within the limit.
const SHARE: u64 = 32;
/// The size of the blocks in memory, over all objects: those that readers are about to read.
const MEMORY_BYTES: u64 = 256 << 20;

/// The cache of the blocks of all objects.
#[derive(Debug)]
pub(crate) struct BlockCache {
    folder: PathBuf,
    limit: u64,
    /// The number of bytes that this process has written since it last looked at the size of the cache.
    written: AtomicU64,
    /// Blocks whose time of last use is recent, and those that this process has found intact.
    blocks: Mutex<Known>,
    memory: Mutex<Memory>,
    has_warned: AtomicBool,
}

/// Blocks in memory, by object and number.
#[derive(Debug, Default)]
struct Memory {
    blocks: HashMap<(u64, u64), Bytes>,
    /// The newest last.
    order: VecDeque<(u64, u64)>,
    bytes: u64,
}

/// The blocks that a process knows of, by object and number.
#[derive(Debug, Default)]
struct Known {
    used: HashSet<(u64, u64)>,
    intact: HashSet<(u64, u64)>,
}

/// The folder of an object in the cache.
#[derive(Debug)]
pub(crate) struct ObjectFolder {
    path: PathBuf,
    /// A number of the object in this process.
    number: u64,
}

/// The bytes of a cached block that a reader gets.
pub(crate) enum Cached {
    /// All bytes: they were read to compare the checksum.
    Whole(Bytes),
    /// The range that was asked for is in the caller's memory.
    Copied,
}

impl BlockCache {
    pub(crate) fn new(folder: PathBuf, limit: u64) -> BlockCache {
        BlockCache {
            folder,
            limit,
            // The first block that is written makes the process look at what others have left.
            written: AtomicU64::new(u64::MAX / 2),
            blocks: Mutex::default(),
            memory: Mutex::default(),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns the folder of an object with this key, which is a digest of 128 bits in hexadecimal.
    pub(crate) fn object(&self, key: &str) -> ObjectFolder {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        ObjectFolder {
            path: self.folder.join(key),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Copies the bytes of a block of `length` bytes from `start` on into `out`, or returns all of them; `None` if the
    /// cache does not have the block, or its file cannot be read.
    pub(crate) fn read(
        &self,
        object: &ObjectFolder,
        block: u64,
        length: u64,
        start: u64,
        out: &mut [u8],
    ) -> Option<Cached> {
        let mut file = File::open(object.block(block)).ok()?;
        self.touch(&file, object, block);
        let key = (object.number, block);
        let is_known = self.known().intact.contains(&key);
        if is_known {
            // Another process may have replaced the file by the same bytes, or removed it.
            let moved = file.seek(SeekFrom::Start(start));
            if moved.and_then(|_| file.read_exact(out)).is_ok() {
                return Some(Cached::Copied);
            }
            self.known().intact.remove(&key);
        } else if let Some(bytes) = intact(&mut file, length) {
            self.known().intact.insert(key);
            return Some(Cached::Whole(bytes));
        }
        tracing::warn!(
            "{} is damaged; it is downloaded again",
            object.block(block).display()
        );
        // The new block replaces it in any case.
        let _ = std::fs::remove_file(object.block(block));
        None
    }

    /// Returns `true` if the cache has a file for the block.
    pub(crate) fn has(&self, object: &ObjectFolder, block: u64) -> bool {
        object.block(block).exists()
    }

    /// Returns a block in memory; `None` if only the disk or the server may have it.
    pub(crate) fn in_memory(&self, object: &ObjectFolder, block: u64) -> Option<Bytes> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.blocks.get(&(object.number, block)).cloned()
    }

    /// Keeps a block in memory, in place of the oldest ones of all objects.
    pub(crate) fn keep(&self, object: &ObjectFolder, block: u64, bytes: Bytes) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.keep((object.number, block), bytes, MEMORY_BYTES);
    }

    /// Stores a block. A cache that cannot be written costs time only, so that an error is a warning.
    pub(crate) fn write(&self, object: &ObjectFolder, block: u64, bytes: &Bytes) {
        match self.try_write(object, block, bytes) {
            Ok(()) => {
                let mut known = self.known();
                known.intact.insert((object.number, block));
                known.used.insert((object.number, block));
            }
            Err(error) if !self.has_warned.swap(true, Ordering::Relaxed) => {
                tracing::warn!(
                    "blocks cannot be cached in {}: {error}; they are downloaded each time. Free some space, or set \
                     OVERDRIVE_REMOTE_CACHE to another folder",
                    self.folder.display()
                );
            }
            Err(_) => {}
        }
    }

    fn try_write(&self, object: &ObjectFolder, block: u64, bytes: &Bytes) -> io::Result<()> {
        std::fs::create_dir_all(&object.path)?;
        let path = object.block(block);
        let mut file = files::unfinished(&path).map_err(io::Error::other)?;
        file.write_all(bytes)?;
        file.write_all(&crc32c::crc32c(bytes).to_le_bytes())?;
        file.persist(&path).map_err(|error| error.error)?;
        let bytes = bytes.len() as u64 + CHECKSUM_BYTES;
        let written = self.written.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if written > self.limit / SHARE {
            self.written.store(0, Ordering::Relaxed);
            self.remove_oldest()?;
        }
        Ok(())
    }

    /// Sets the time of a block's last use, once between two looks at the size of the cache.
    fn touch(&self, file: &File, object: &ObjectFolder, block: u64) {
        if self.known().used.insert((object.number, block)) {
            // A file of another user keeps its time: it is removed earlier.
            let _ = file.set_modified(SystemTime::now());
        }
    }

    /// Removes the blocks that were used longest ago, if all together take more space than is allowed.
    fn remove_oldest(&self) -> io::Result<()> {
        self.known().used.clear();
        let mut blocks = Vec::new();
        let mut total = 0;
        for object in folders(&self.folder)? {
            for entry in std::fs::read_dir(&object).into_iter().flatten().flatten() {
                if !is_block(&entry.path()) {
                    continue;
                }
                // Another process may remove the file at any time.
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                total += metadata.len();
                blocks.push((
                    metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                    metadata.len(),
                    entry.path(),
                ));
            }
        }
        if total <= self.limit / 4 * 3 + self.limit / SHARE {
            return Ok(());
        }
        blocks.sort_unstable();
        for (_, bytes, path) in blocks {
            if total <= self.limit / 4 * 3 {
                break;
            }
            let _ = std::fs::remove_file(&path);
            total -= bytes;
        }
        for object in folders(&self.folder)? {
            // Only an empty folder can be removed.
            let _ = std::fs::remove_dir(object);
        }
        Ok(())
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        // The sets are valid whenever the lock is released.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn keep(&mut self, key: (u64, u64), bytes: Bytes, limit: u64) {
        self.bytes += bytes.len() as u64;
        match self.blocks.insert(key, bytes) {
            Some(before) => self.bytes -= before.len() as u64,
            None => self.order.push_back(key),
        }
        while self.bytes > limit && self.order.len() > 1 {
            let oldest = self.order.pop_front();
            let removed = oldest.and_then(|oldest| self.blocks.remove(&oldest));
            self.bytes -= removed.map_or(0, |removed| removed.len() as u64);
        }
    }
}

impl ObjectFolder {
    fn block(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:08}"))
    }
}

/// Returns the bytes of a block if the file has their length and checksum.
fn intact(file: &mut File, length: u64) -> Option<Bytes> {
    let mut bytes = Vec::with_capacity((length + CHECKSUM_BYTES) as usize);
    file.take(length + CHECKSUM_BYTES + 1)
        .read_to_end(&mut bytes)
        .ok()?;
    if bytes.len() as u64 != length + CHECKSUM_BYTES {
        return None;
    }
    let checksum = bytes.split_off(length as usize);
    (crc32c::crc32c(&bytes).to_le_bytes() == checksum[..]).then(|| bytes.into())
}

/// Returns the folders of objects. The user may have chosen a folder with other files, which are left alone.
fn folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?;
    let folders = entries.flatten().map(|entry| entry.path());
    Ok(folders
        .filter(|path| is_object(path) && path.is_dir())
        .collect())
}

/// Returns `true` for the name of an object's folder: 128 bits in hexadecimal.
fn is_object(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.len() == 32 && name.iter().all(u8::is_ascii_hexdigit)
}

/// Returns `true` for the name of a block: its number.
fn is_block(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.len() >= 8 && name.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn read(cache: &BlockCache, object: &ObjectFolder, block: u64) -> Option<Vec<u8>> {
        let mut out = vec![0; 1000];
        Some(match cache.read(object, block, 1000, 0, &mut out)? {
            Cached::Whole(bytes) => bytes.to_vec(),
            Cached::Copied => out,
        })
    }

    #[test]
    fn the_least_recently_used_blocks_go_and_the_limit_holds() {
        let folder = tempfile::tempdir().unwrap();
        let cache = BlockCache::new(folder.path().to_owned(), 10_000);
        let object = cache.object(KEY);
        let bytes = |block: u64| Bytes::from(vec![block as u8; 1000]);
        for block in 0..7 {
            cache.write(&object, block, &bytes(block));
            // Times of files may have steps of some milliseconds.
            let old = SystemTime::now() - std::time::Duration::from_secs(100 - block);
            let file = File::open(object.block(block)).unwrap();
            file.set_modified(old).unwrap();
        }
        // A block that is used now outlives the others.
        assert_eq!(read(&cache, &object, 0), Some(bytes(0).to_vec()));
        for block in 7..10 {
            cache.write(&object, block, &bytes(block));
        }
        let kept: Vec<u64> = (0..10).filter(|&block| cache.has(&object, block)).collect();
        assert!(kept.contains(&0) && kept.contains(&9), "{kept:?}");
        assert!(!kept.contains(&1), "{kept:?}");
        assert!(kept.len() as u64 * 1004 <= 10_000, "{kept:?}");
    }

    #[test]
    fn only_blocks_are_removed_from_the_folder_of_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let cache = BlockCache::new(folder.path().to_owned(), 3000);
        let object = cache.object(KEY);
        let others = [folder.path().join("photos"), object.path.clone()].map(|folder| {
            std::fs::create_dir_all(&folder).unwrap();
            folder.join("00000000.jpg")
        });
        for other in &others {
            std::fs::write(other, [0; 5000]).unwrap();
            File::open(other)
                .unwrap()
                .set_modified(SystemTime::UNIX_EPOCH)
                .unwrap();
        }
        for block in 0..9 {
            cache.write(&object, block, &Bytes::from(vec![0; 1000]));
        }
        assert!(!cache.has(&object, 0) && cache.has(&object, 8));
        assert!(others.iter().all(|other| other.exists()));
    }

    #[test]
    fn the_memory_of_all_objects_has_one_limit() {
        let mut memory = Memory::default();
        let block = |number: u64| Bytes::from(vec![number as u8; 1000]);
        for number in 0..9 {
            memory.keep((number % 3, number), block(number), 4000);
        }
        memory.keep((2, 8), block(8), 4000);
        let kept: Vec<u64> = memory.order.iter().map(|&(_, number)| number).collect();
        assert_eq!((kept, memory.bytes), (vec![5, 6, 7, 8], 4000));
        assert_eq!(memory.blocks.len(), 4);
        // The newest stays, however large it is.
        memory.keep((0, 9), Bytes::from(vec![0; 5000]), 4000);
        assert_eq!((memory.order.len(), memory.bytes), (1, 5000));
    }

    #[test]
    fn a_damaged_block_is_not_returned() {
        let folder = tempfile::tempdir().unwrap();
        let cache = BlockCache::new(folder.path().to_owned(), 1 << 20);
        let object = cache.object(KEY);
        cache.write(&object, 3, &Bytes::from(vec![7; 1000]));
        assert!(read(&cache, &object, 3).is_some());
        let mut content = std::fs::read(object.block(3)).unwrap();
        content[500] ^= 1;
        std::fs::write(object.block(3), &content).unwrap();
        // A process that has not seen the block intact compares its checksum.
        let other = BlockCache::new(folder.path().to_owned(), 1 << 20);
        let object = other.object(KEY);
        assert!(read(&other, &object, 3).is_none());
        assert!(!other.has(&object, 3));
    }

    #[test]
    fn a_block_that_was_intact_and_is_cut_off_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = BlockCache::new(folder.path().to_owned(), 1 << 20);
        let object = cache.object(KEY);
        let bytes = Bytes::from(vec![7; 1000]);
        cache.write(&object, 3, &bytes);
        std::fs::write(object.block(3), []).unwrap();
        assert!(read(&cache, &object, 3).is_none());
        assert!(!cache.has(&object, 3));
        cache.write(&object, 3, &bytes);
        assert_eq!(read(&cache, &object, 3), Some(bytes.to_vec()));
    }
}
