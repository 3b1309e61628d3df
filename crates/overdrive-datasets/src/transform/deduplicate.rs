//! The removal of duplicate records.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::PathBuf;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use overdrive_core::Error as CommonError;
use overdrive_core::files::{self, UnfinishedFolder};

use super::selection::{Selection, SortedIndices};
use crate::{Dataset, Result};

/// The options of [`Selection::deduplicate`].
#[derive(Debug, Clone, Default)]
pub struct DeduplicateOptions {
    /// The folder of the temporary files with the hashes, if they do not fit 64 MiB: 24 bytes per record.
    /// Default: `None`, the system's folder for temporary files.
    pub temp_dir: Option<PathBuf>,
}

/// A dataset without duplicates.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Deduplicated<D> {
    /// The first of each set of equal records, in their order.
    pub records: Selection<D>,
    /// The number of records that were removed.
    pub duplicates: usize,
}

/// The limits of memory.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// The largest number of entries that are sorted at once.
    entries: usize,
    /// The size in bytes of the buffer of each partition, whose entries are not written yet.
    buffer_bytes: usize,
}

/// 64 MiB, and 32 KiB (the capacity of a vector doubles) for each partition; a billion records have 512 partitions.
const LIMITS: Limits = Limits {
    entries: (64 << 20) / size_of::<Entry>(),
    buffer_bytes: ENTRY_BYTES << 10,
};
/// The size of an entry on disk: sixteen bytes of hash and eight of the record's index.
const ENTRY_BYTES: usize = 24;
/// The number of records that are hashed before their entries are stored, which bounds the memory.
const BLOCK_RECORDS: usize = 1 << 16;

/// The hash and the index of a record.
type Entry = (u128, u64);

impl<D: Dataset> Selection<D> {
    /// Keeps the records of `dataset` whose `key` no earlier record has.
    ///
    /// Keys are compared by the first 128 bits of their SHA-256: among a trillion different records, the probability
    /// that two are taken for equal is about 10^-15, and no way to construct such records is known. All records are
    /// read once, on all cores. It takes 64 MiB of memory, one bit per record while it runs, and at most about two
    /// bytes per kept record; more entries go to temporary files, with 16 MiB of buffers for a billion records. One of
    /// these files is open at a time. The result does not depend on the number of threads.
    ///
    /// ```
    /// use overdrive_datasets::{Dataset, DeduplicateOptions, Selection, TextLines, TextOptions};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("lines.txt");
    /// std::fs::write(&path, "a\nb\na\nc\nb\n").unwrap();
    /// let lines = TextLines::open([&path], &TextOptions::default())?;
    /// let once = Selection::deduplicate(lines, |line| line.clone().into_bytes(), &DeduplicateOptions::default())?;
    /// assert_eq!(once.duplicates, 2);
    /// assert_eq!(once.records.get(2)?, "c");
    /// # Ok::<(), overdrive_datasets::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if a record cannot be read, or if temporary files cannot be written.
    pub fn deduplicate(
        dataset: D,
        key: impl Fn(&D::Item) -> Vec<u8> + Sync,
        options: &DeduplicateOptions,
    ) -> Result<Deduplicated<D>> {
        Self::deduplicate_with(dataset, key, options, LIMITS)
    }

    fn deduplicate_with(
        dataset: D,
        key: impl Fn(&D::Item) -> Vec<u8> + Sync,
        options: &DeduplicateOptions,
        limits: Limits,
    ) -> Result<Deduplicated<D>> {
        let len = dataset.len();
        let partitions = len.div_ceil(limits.entries.max(1)).next_power_of_two();
        let mut sink = match partitions {
            0 | 1 => Entries::Memory(Vec::with_capacity(len)),
            _ => Entries::PartitionFiles(PartitionFiles::new(partitions, options, limits)?),
        };
        for start in (0..len).step_by(BLOCK_RECORDS) {
            let block = start..len.min(start + BLOCK_RECORDS);
            let hashes: Result<Vec<u128>> = block
                .clone()
                .into_par_iter()
                .map(|index| Ok(hash(&key(&dataset.get(index)?))))
                .collect();
            for (index, hash) in block.zip(hashes?) {
                sink.push((hash, index as u64))?;
            }
        }
        dataset.check_unchanged()?;
        // One bit per record, set if an earlier record is equal.
        let mut drop = vec![0_u64; len.div_ceil(64)];
        let mut duplicates = 0;
        sink.for_each_partition(|entries| {
            // Sorting places equal hashes next to each other, with the first record in front.
            entries.par_sort_unstable();
            entries.dedup_by(|later, first| {
                let is_equal = later.0 == first.0;
                if is_equal {
                    let index = later.1 as usize;
                    drop[index / 64] |= 1 << (index % 64);
                    duplicates += 1;
                }
                is_equal
            });
        })?;
        let kept = (0..len).filter(|index| drop[index / 64] >> (index % 64) & 1 == 0);
        let kept = SortedIndices::new(kept);
        Ok(Deduplicated {
            records: Self::listed(dataset, kept),
            duplicates,
        })
    }
}

fn hash(key: &[u8]) -> u128 {
    let digest: [u8; 32] = Sha256::digest(key).into();
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    u128::from_be_bytes(first)
}

enum Entries {
    Memory(Vec<Entry>),
    PartitionFiles(PartitionFiles),
}

/// Entries in files by the first bits of their hash, so that equal entries are in the same file.
struct PartitionFiles {
    folder: UnfinishedFolder,
    /// The entries of each partition that follow those in its file. A file is opened for each write: a billion records
    /// have 512 partitions, and a process may often have no more than 1024 open files.
    buffers: Vec<Vec<u8>>,
    limits: Limits,
}

impl Entries {
    fn push(&mut self, entry: Entry) -> Result<()> {
        match self {
            Self::Memory(entries) => entries.push(entry),
            Self::PartitionFiles(files) => files.push(entry)?,
        }
        Ok(())
    }

    /// Passes the entries of each partition to `deduplicate`, which removes equal ones. A partition with more than
    /// the limit is passed in blocks, so that a million equal records take no more memory than one.
    fn for_each_partition(self, mut deduplicate: impl FnMut(&mut Vec<Entry>)) -> Result<()> {
        match self {
            Self::Memory(mut entries) => deduplicate(&mut entries),
            Self::PartitionFiles(files) => {
                let mut entries = Vec::new();
                for number in 0..files.buffers.len() {
                    entries.clear();
                    files.read(number, &mut entries, &mut deduplicate)?;
                    deduplicate(&mut entries);
                }
            }
        }
        Ok(())
    }
}

impl PartitionFiles {
    fn new(partitions: usize, options: &DeduplicateOptions, limits: Limits) -> Result<Self> {
        let base = options.temp_dir.clone().unwrap_or_else(std::env::temp_dir);
        // The name lets a later program recognize the folder if this one is killed.
        let folder = files::unfinished_folder(base.join("deduplicate"))?;
        let files = Self {
            folder,
            buffers: vec![Vec::new(); partitions],
            limits,
        };
        for number in 0..partitions {
            let path = files.path(number);
            File::create_new(&path).map_err(CommonError::io("create", &path))?;
        }
        Ok(files)
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.path().join(number.to_string())
    }

    fn push(&mut self, (hash, index): Entry) -> Result<()> {
        // There are at least two partitions, so the shift is below 128.
        let partition = (hash >> (128 - self.buffers.len().trailing_zeros())) as usize;
        let buffer = &mut self.buffers[partition];
        buffer.extend_from_slice(&hash.to_le_bytes());
        buffer.extend_from_slice(&index.to_le_bytes());
        if buffer.len() < self.limits.buffer_bytes {
            return Ok(());
        }
        let path = self.path(partition);
        let file = File::options().append(true).open(&path);
        file.and_then(|mut file| file.write_all(&self.buffers[partition]))
            .map_err(CommonError::io("write", path))?;
        self.buffers[partition].clear();
        Ok(())
    }

    fn read(
        &self,
        number: usize,
        entries: &mut Vec<Entry>,
        deduplicate: &mut impl FnMut(&mut Vec<Entry>),
    ) -> Result<()> {
        let mut limit = self.limits.entries.max(1);
        let path = self.path(number);
        let failed = || CommonError::io("read", &path);
        let file = File::open(&path).map_err(failed())?;
        let mut written =
            BufReader::with_capacity(1 << 18, file).chain(self.buffers[number].as_slice());
        let mut bytes = [0; ENTRY_BYTES];
        loop {
            match written.read_exact(&mut bytes) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(failed()(error).into()),
            }
            let (mut hash, mut index) = ([0; 16], [0; 8]);
            hash.copy_from_slice(&bytes[..16]);
            index.copy_from_slice(&bytes[16..]);
            entries.push((u128::from_le_bytes(hash), u64::from_le_bytes(index)));
            if entries.len() >= limit {
                deduplicate(entries);
                // The remaining entries differ. If there are many of them, a larger limit keeps the number of
                // passes low.
                limit = self.limits.entries.max(2 * entries.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use overdrive_core::random::uniform_below;

    struct Numbers(Vec<u64>);

    impl Dataset for Numbers {
        type Item = u64;

        fn len(&self) -> usize {
            self.0.len()
        }

        fn get(&self, index: usize) -> Result<u64> {
            Ok(self.0[index])
        }
    }

    #[test]
    fn the_first_of_each_kind_stays_with_and_without_files() {
        let numbers: Vec<u64> = (0..150_000)
            .map(|i| uniform_below(60_000, 1, 0, i))
            .collect();
        let mut seen = std::collections::HashSet::new();
        let expected: Vec<usize> = (0..numbers.len())
            .filter(|&index| seen.insert(numbers[index]))
            .collect();
        for entries in [usize::MAX, 150_000, 20_000] {
            let limits = Limits { entries, ..LIMITS };
            let key = |number: &u64| number.to_le_bytes().to_vec();
            let once = Selection::deduplicate_with(
                Numbers(numbers.clone()),
                key,
                &DeduplicateOptions::default(),
                limits,
            )
            .unwrap();
            assert_eq!(once.duplicates, numbers.len() - expected.len());
            let indices: Vec<usize> = (0..once.records.len())
                .map(|index| once.records.source_index(index).unwrap())
                .collect();
            assert_eq!(indices, expected, "{entries}");
        }
    }

    #[test]
    fn many_equal_records_are_read_from_files_in_blocks() {
        let key = |number: &u64| number.to_le_bytes().to_vec();
        let options = DeduplicateOptions::default();
        for buffer_bytes in [LIMITS.buffer_bytes, 1] {
            let limits = Limits {
                entries: 100,
                buffer_bytes,
            };
            let numbers = Numbers((0..50_000).map(|i| i % 3).collect());
            let once = Selection::deduplicate_with(numbers, key, &options, limits).unwrap();
            assert_eq!((once.records.len(), once.duplicates), (3, 49_997));
            assert_eq!(once.records.get(2).unwrap(), 2);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn no_partition_keeps_its_file_open() {
        let base = tempfile::tempdir().unwrap();
        let options = DeduplicateOptions {
            temp_dir: Some(base.path().to_owned()),
        };
        let limits = Limits {
            entries: 1,
            buffer_bytes: 1,
        };
        let mut files = PartitionFiles::new(1 << 12, &options, limits).unwrap();
        for index in 0..5_000 {
            files.push((hash(&u64::to_le_bytes(index)), index)).unwrap();
        }
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let open = open.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
        assert_eq!(
            open.filter(|path| path.starts_with(base.path()) && path.is_file())
                .count(),
            0
        );

        let mut indices = Vec::new();
        let collect = |entries: &mut Vec<Entry>| {
            indices.extend(entries.drain(..).map(|(_, index)| index));
        };
        Entries::PartitionFiles(files)
            .for_each_partition(collect)
            .unwrap();
        indices.sort_unstable();
        assert!(indices.into_iter().eq(0..5_000));
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error() {
        let options = DeduplicateOptions {
            temp_dir: Some("/does/not/exist".into()),
        };
        let key = |number: &u64| number.to_le_bytes().to_vec();
        let limits = Limits {
            entries: 1,
            ..LIMITS
        };
        let result = Selection::deduplicate_with(Numbers(vec![1, 2, 3]), key, &options, limits);
        assert!(matches!(
            result,
            Err(crate::Error::Common(CommonError::Io { .. }))
        ));
    }
}
