//! The removal of duplicate records.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use overdrive_core::Error as CommonError;

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

/// The largest number of entries in memory: 64 MiB.
const MAX_MEMORY_ENTRIES: usize = (64 << 20) / size_of::<Entry>();
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
    /// bytes per kept record; more entries go to temporary files. The result does not depend on the number of
    /// threads.
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
        Self::deduplicate_with(dataset, key, options, MAX_MEMORY_ENTRIES)
    }

    fn deduplicate_with(
        dataset: D,
        key: impl Fn(&D::Item) -> Vec<u8> + Sync,
        options: &DeduplicateOptions,
        memory_entries: usize,
    ) -> Result<Deduplicated<D>> {
        let len = dataset.len();
        let partitions = len.div_ceil(memory_entries.max(1)).next_power_of_two();
        let mut sink = match partitions {
            0 | 1 => Entries::Memory(Vec::with_capacity(len)),
            _ => Entries::PartitionFiles(PartitionFiles::new(partitions, options)?),
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
        // One bit per record, set if an earlier record is equal.
        let mut drop = vec![0_u64; len.div_ceil(64)];
        let mut duplicates = 0;
        sink.for_each_partition(memory_entries, |entries| {
            // Sorting makes equal hashes neighbours, with the first record in front.
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
    folder: tempfile::TempDir,
    files: Vec<BufWriter<File>>,
}

impl Entries {
    fn push(&mut self, entry: Entry) -> Result<()> {
        match self {
            Self::Memory(entries) => entries.push(entry),
            Self::PartitionFiles(files) => files.push(entry)?,
        }
        Ok(())
    }

    /// Passes the entries of each partition to `deduplicate`, which removes equal ones. A partition of more than
    /// `memory_entries` is passed in blocks, so that a million equal records take no more memory than one.
    fn for_each_partition(
        self,
        memory_entries: usize,
        mut deduplicate: impl FnMut(&mut Vec<Entry>),
    ) -> Result<()> {
        match self {
            Self::Memory(mut entries) => deduplicate(&mut entries),
            Self::PartitionFiles(files) => {
                let mut entries = Vec::new();
                for number in 0..files.files.len() {
                    entries.clear();
                    files.read(number, &mut entries, memory_entries, &mut deduplicate)?;
                    deduplicate(&mut entries);
                }
            }
        }
        Ok(())
    }
}

impl PartitionFiles {
    fn new(partitions: usize, options: &DeduplicateOptions) -> Result<Self> {
        let base = options.temp_dir.clone().unwrap_or_else(std::env::temp_dir);
        let folder = tempfile::Builder::new()
            .prefix("overdrive-deduplicate-")
            .tempdir_in(&base)
            .map_err(CommonError::io("create a folder in", &base))?;
        let mut files = Vec::with_capacity(partitions);
        for number in 0..partitions {
            let path = folder.path().join(number.to_string());
            // The same handle is used for reading later.
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path);
            files.push(BufWriter::new(
                file.map_err(CommonError::io("create", &path))?,
            ));
        }
        Ok(Self { folder, files })
    }

    fn push(&mut self, (hash, index): Entry) -> Result<()> {
        // There are at least two partitions, so the shift is below 128.
        let partition = (hash >> (128 - self.files.len().trailing_zeros())) as usize;
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..16].copy_from_slice(&hash.to_le_bytes());
        bytes[16..].copy_from_slice(&index.to_le_bytes());
        let folder = self.folder.path();
        Ok(self.files[partition]
            .write_all(&bytes)
            .map_err(CommonError::io("write in", folder))?)
    }

    fn read(
        &self,
        number: usize,
        entries: &mut Vec<Entry>,
        memory_entries: usize,
        deduplicate: &mut impl FnMut(&mut Vec<Entry>),
    ) -> Result<()> {
        let mut limit = memory_entries.max(1);
        let failed = || CommonError::io("read in", self.folder.path());
        let mut file = self.files[number].get_ref();
        // The bytes that the writer still buffers follow those that it has written.
        file.seek(SeekFrom::Start(0)).map_err(failed())?;
        let mut written =
            BufReader::with_capacity(1 << 18, file).chain(self.files[number].buffer());
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
                // The remaining entries differ. If they are many, a larger limit keeps the number of passes low.
                limit = memory_entries.max(2 * entries.len());
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
        for memory_entries in [usize::MAX, 150_000, 20_000] {
            let key = |number: &u64| number.to_le_bytes().to_vec();
            let once = Selection::deduplicate_with(
                Numbers(numbers.clone()),
                key,
                &DeduplicateOptions::default(),
                memory_entries,
            )
            .unwrap();
            assert_eq!(once.duplicates, numbers.len() - expected.len());
            let indices: Vec<usize> = (0..once.records.len())
                .map(|index| once.records.source_index(index).unwrap())
                .collect();
            assert_eq!(indices, expected, "{memory_entries}");
        }
    }

    #[test]
    fn many_equal_records_are_read_from_files_in_blocks() {
        let numbers = Numbers((0..50_000).map(|i| i % 3).collect());
        let key = |number: &u64| number.to_le_bytes().to_vec();
        let options = DeduplicateOptions::default();
        let once = Selection::deduplicate_with(numbers, key, &options, 100).unwrap();
        assert_eq!((once.records.len(), once.duplicates), (3, 49_997));
        assert_eq!(once.records.get(2).unwrap(), 2);
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error() {
        let options = DeduplicateOptions {
            temp_dir: Some("/does/not/exist".into()),
        };
        let key = |number: &u64| number.to_le_bytes().to_vec();
        let result = Selection::deduplicate_with(Numbers(vec![1, 2, 3]), key, &options, 1);
        assert!(matches!(
            result,
            Err(crate::Error::Common(CommonError::Io { .. }))
        ));
    }
}
