//! Each record once.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::selection::{Rising, Selection};
use crate::{Dataset, Error, Result};

/// How duplicates are found.
#[derive(Debug, Clone, Default)]
pub struct DeduplicateOptions {
    /// Where hashes wait when they are more than fit 64 MiB: 24 bytes a record, removed at the end.
    /// Default: the folder for temporary files.
    pub temp_dir: Option<PathBuf>,
}

/// A dataset without the records that are equal to an earlier one.
#[derive(Debug, Clone)]
pub struct Deduplicated<D> {
    /// The first of each kind, in their order.
    pub records: Selection<D>,
    /// How many were left out.
    pub duplicates: usize,
}

/// Entries in memory at a time: 64 MiB.
const IN_MEMORY: usize = (64 << 20) / size_of::<Entry>();
/// On disk: sixteen bytes of hash and eight of the record's number.
const ENTRY: usize = 24;
/// Records hashed at a time.
const BLOCK: usize = 1 << 16;

/// A record's hash and its number.
type Entry = (u128, u64);

impl<D: Dataset> Selection<D> {
    /// The records of `dataset` whose `key` no earlier one has.
    ///
    /// Keys are compared by the first 128 bits of their SHA-256: a chance of one in 10^18 that among
    /// a trillion different records two are taken for one, and no way known to make it happen. All
    /// records are read once, on all cores. Memory is 64 MiB, one bit a record while it runs, and at
    /// most about two bytes for each that stays; what does not fit goes through temporary files. The
    /// outcome does not depend on the number of threads.
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
    /// When a record cannot be read, and when the disk refuses temporary files.
    pub fn deduplicate(
        dataset: D,
        key: impl Fn(&D::Item) -> Vec<u8> + Sync,
        options: &DeduplicateOptions,
    ) -> Result<Deduplicated<D>> {
        Self::deduplicate_with(dataset, key, options, IN_MEMORY)
    }

    fn deduplicate_with(
        dataset: D,
        key: impl Fn(&D::Item) -> Vec<u8> + Sync,
        options: &DeduplicateOptions,
        in_memory: usize,
    ) -> Result<Deduplicated<D>> {
        let len = dataset.len();
        let parts = len.div_ceil(in_memory.max(1)).next_power_of_two();
        let mut sink = match parts {
            0 | 1 => Sink::Memory(Vec::with_capacity(len)),
            _ => Sink::Files(Files::new(parts, options)?),
        };
        for start in (0..len).step_by(BLOCK) {
            let block = start..len.min(start + BLOCK);
            let hashes: Result<Vec<u128>> = block
                .clone()
                .into_par_iter()
                .map(|index| Ok(hash(&key(&dataset.get(index)?))))
                .collect();
            for (index, hash) in block.zip(hashes?) {
                sink.push((hash, index as u64))?;
            }
        }
        // One bit a record: whether an earlier one is equal.
        let mut drop = vec![0_u64; len.div_ceil(64)];
        let mut duplicates = 0;
        sink.for_each_part(in_memory, |entries| {
            // Equal hashes stand side by side then, the first record in front.
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
        let kept = Rising::new(kept);
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

enum Sink {
    Memory(Vec<Entry>),
    Files(Files),
}

/// Entries in files by the first bits of their hash, so that equal ones are in one file.
struct Files {
    folder: tempfile::TempDir,
    files: Vec<BufWriter<File>>,
}

impl Sink {
    fn push(&mut self, entry: Entry) -> Result<()> {
        match self {
            Self::Memory(entries) => entries.push(entry),
            Self::Files(files) => files.push(entry)?,
        }
        Ok(())
    }

    /// Hands over the entries of each part, whose equal ones `deduplicate` takes out; in pieces where
    /// one part has more than `in_memory`, so that a million equal records take no more room than one.
    fn for_each_part(
        self,
        in_memory: usize,
        mut deduplicate: impl FnMut(&mut Vec<Entry>),
    ) -> Result<()> {
        match self {
            Self::Memory(mut entries) => deduplicate(&mut entries),
            Self::Files(files) => {
                let mut entries = Vec::new();
                for number in 0..files.files.len() {
                    entries.clear();
                    files.read(number, &mut entries, in_memory, &mut deduplicate)?;
                    deduplicate(&mut entries);
                }
            }
        }
        Ok(())
    }
}

impl Files {
    fn new(parts: usize, options: &DeduplicateOptions) -> Result<Self> {
        let base = options.temp_dir.clone().unwrap_or_else(std::env::temp_dir);
        let folder = tempfile::Builder::new()
            .prefix("overdrive-deduplicate-")
            .tempdir_in(&base)
            .map_err(Error::io("create a folder in", &base))?;
        let mut files = Vec::with_capacity(parts);
        for number in 0..parts {
            let path = folder.path().join(number.to_string());
            // Reading goes through the same handle, so that nothing is opened twice.
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path);
            files.push(BufWriter::new(file.map_err(Error::io("create", &path))?));
        }
        Ok(Self { folder, files })
    }

    fn push(&mut self, (hash, index): Entry) -> Result<()> {
        // At least two parts, so the shift is below 128.
        let part = (hash >> (128 - self.files.len().trailing_zeros())) as usize;
        let mut bytes = [0; ENTRY];
        bytes[..16].copy_from_slice(&hash.to_le_bytes());
        bytes[16..].copy_from_slice(&index.to_le_bytes());
        self.files[part]
            .write_all(&bytes)
            .map_err(Error::io("write in", self.folder.path()))
    }

    fn read(
        &self,
        number: usize,
        entries: &mut Vec<Entry>,
        in_memory: usize,
        deduplicate: &mut impl FnMut(&mut Vec<Entry>),
    ) -> Result<()> {
        let mut limit = in_memory.max(1);
        let failed = || Error::io("read in", self.folder.path());
        let mut file = self.files[number].get_ref();
        // What the writer still holds comes behind what it has written.
        file.seek(SeekFrom::Start(0)).map_err(failed())?;
        let mut written =
            BufReader::with_capacity(1 << 18, file).chain(self.files[number].buffer());
        let mut bytes = [0; ENTRY];
        loop {
            match written.read_exact(&mut bytes) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(failed()(error)),
            }
            let (mut hash, mut index) = ([0; 16], [0; 8]);
            hash.copy_from_slice(&bytes[..16]);
            index.copy_from_slice(&bytes[16..]);
            entries.push((u128::from_le_bytes(hash), u64::from_le_bytes(index)));
            if entries.len() >= limit {
                deduplicate(entries);
                // What is left is different; if that is much, it needs the room.
                limit = in_memory.max(2 * entries.len());
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
        for in_memory in [usize::MAX, 150_000, 20_000] {
            let key = |number: &u64| number.to_le_bytes().to_vec();
            let once = Selection::deduplicate_with(
                Numbers(numbers.clone()),
                key,
                &DeduplicateOptions::default(),
                in_memory,
            )
            .unwrap();
            assert_eq!(once.duplicates, numbers.len() - expected.len());
            let places: Vec<usize> = (0..once.records.len())
                .map(|index| once.records.place(index).unwrap())
                .collect();
            assert_eq!(places, expected, "{in_memory}");
        }
    }

    #[test]
    fn many_equal_records_go_through_files_in_pieces() {
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
        assert!(matches!(result, Err(Error::Io { .. })));
    }
}
