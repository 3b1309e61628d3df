//! An index is opened where there is one that fits the data, and built where there is none.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memmap2::Mmap;

use super::format::{HEADER_BYTES, Header, Identity};
use super::packed::{Blocks, Packing, unpack_for_now};
use super::scan::cores;
use super::{OffsetTable, OffsetsWriter, Scan};
use crate::cache::{Cached, cache_folder, cached};
use crate::mmap::{map_file, map_opened};
use crate::token_store_writer::{folder_of, persist, temp_file};
use crate::{Error, Result, Sha256Digest};

/// Smaller files are searched anew each time: that takes less than opening a file would.
const SMALL_BYTES: u64 = 1 << 20;

/// Where index files are kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum IndexLocation {
    /// In `overdrive/indexes` of the user's cache folder (see [`crate::default_cache_dir`]).
    #[default]
    Cache,
    /// In a folder of the caller's choice.
    Folder(PathBuf),
    /// Beside the data, as hidden files that end in `.ovidx`.
    Beside,
    /// Nowhere: built in memory each time.
    Memory,
}

/// How files are indexed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// Where index files are kept. When the folder cannot be written, the index is built in memory
    /// and a warning says so. Files below 1 MiB get no index file in any case.
    pub location: IndexLocation,
    /// How many threads search a file. `None` (the default): one a core. The index is the same.
    pub threads: Option<usize>,
    /// Builds anew even where an index fits. Default: false.
    pub rebuild: bool,
    /// Unpacks compressed files once, into `overdrive/unpacked` of the user's cache folder, and reads
    /// them from there. Default: false, and they are read where they are, block by block, which takes
    /// files in blocks: gzip by bgzip, Zstandard in frames of at most 16 MiB.
    pub unpack: bool,
}

/// What opening one or many files found and did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct IndexReport {
    /// Records in all files.
    pub records: u64,
    /// Files.
    pub files: u64,
    /// Bytes of all files.
    pub data_bytes: u64,
    /// Bytes of all indexes. They are mapped, so at most so many are resident.
    pub index_bytes: u64,
    /// Bytes of the files that were searched now; the others had an index.
    pub built_bytes: u64,
    /// How long the search took, the writing of the index included.
    pub build_time: Duration,
}

impl IndexReport {
    /// Bytes of index a record; 0 without records.
    pub fn bytes_per_record(&self) -> f64 {
        self.index_bytes as f64 / (self.records as f64).max(1.0)
    }

    /// Gigabytes (10^9 bytes) a second of the search; `None` when all indexes were there.
    pub fn build_gb_per_s(&self) -> Option<f64> {
        (self.built_bytes > 0)
            .then(|| self.built_bytes as f64 / 1e9 / self.build_time.as_secs_f64())
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.files += other.files;
        self.data_bytes += other.data_bytes;
        self.index_bytes += other.index_bytes;
        self.built_bytes += other.built_bytes;
        self.build_time += other.build_time;
    }
}

/// A file and the index of its records.
#[derive(Debug)]
pub(crate) struct IndexedFile {
    pub(crate) path: PathBuf,
    data: Data,
    /// Unpacked, where the file is compressed.
    data_bytes: u64,
    header: Header,
    index: IndexBytes,
    fingerprint: Sha256Digest,
}

#[derive(Debug)]
enum Data {
    Mapped(Mmap),
    /// Compressed in blocks.
    Blocks(Mmap, Blocks),
    /// Of more files than a process may map: opened for each record.
    OnDemand,
}

#[derive(Debug)]
enum IndexBytes {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl IndexBytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Memory(bytes) => bytes,
        }
    }
}

impl IndexedFile {
    /// Opens a file. With `keep_mapped` false its records are read instead of mapped.
    pub(crate) fn open(
        path: &Path,
        scan: &dyn Scan,
        options: &IndexOptions,
        keep_mapped: bool,
    ) -> Result<(Self, IndexReport)> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read", path))?;
        if metadata.is_dir() {
            let is_folder = std::io::Error::from(std::io::ErrorKind::IsADirectory);
            return Err(Error::io("read", path)(is_folder));
        }
        let map = map_opened(&file, path)?;
        let scan_key = scan.key();
        // The same file has the same index from wherever it is named; and without a true name, an
        // index of its own.
        let true_path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let identity = Identity::of(&true_path, &metadata, &map, &scan_key);
        let data = match Packing::of(path, &map)? {
            None => Data::Mapped(map),
            Some(packing) if options.unpack => {
                let unpacked = unpacked(packing, path, &map, identity)?;
                let (mut file, report) = Self::open(&unpacked, scan, options, keep_mapped)?;
                // Messages name the file that the user knows.
                file.path = path.to_owned();
                return Ok((file, report));
            }
            Some(packing) => {
                let blocks = Blocks::find(path, packing, &map)?;
                Data::Blocks(map, blocks)
            }
        };
        let data_bytes = match &data {
            Data::Blocks(_, blocks) => blocks.plain_bytes(),
            Data::Mapped(_) | Data::OnDemand => metadata.len(),
        };
        let builder = Builder {
            path,
            data: &data,
            data_bytes,
            identity,
            scan,
            threads: options.threads.map_or_else(cores, |threads| threads.max(1)),
        };
        let started = Instant::now();
        let index_path = if data_bytes < SMALL_BYTES {
            None
        } else {
            index_path(path, identity.key(), &options.location)?
        };
        let (index, was_built) = match index_path {
            None => (builder.build_in_memory()?, true),
            Some(index_path) => builder.open_or_build(&index_path, options.rebuild)?,
        };
        let build_time = match was_built {
            true => started.elapsed(),
            false => Duration::ZERO,
        };
        let header = Header::decode(index.as_slice(), path, data_bytes)?;
        let file = Self {
            path: path.to_owned(),
            data_bytes,
            fingerprint: identity.content(&scan_key),
            data: match data {
                Data::Mapped(_) if !keep_mapped => Data::OnDemand,
                data => data,
            },
            header,
            index,
        };
        let report = IndexReport {
            records: file.len() as u64,
            files: 1,
            data_bytes,
            index_bytes: file.index.as_slice().len() as u64,
            built_bytes: if was_built { data_bytes } else { 0 },
            build_time,
        };
        Ok((file, report))
    }

    /// The number of records.
    pub(crate) fn len(&self) -> usize {
        // One more offset is where the last record ends; `decode` found at least that one.
        self.header.offsets.count as usize - 1
    }

    /// Changes when the content, or the way it is cut into records, does.
    pub(crate) fn fingerprint(&self) -> Sha256Digest {
        self.fingerprint
    }

    /// Where record `index` is: from its start to that of the next one.
    pub(crate) fn range(&self, index: usize) -> Result<Range<u64>> {
        let (pieces, directory) = self.header.parts(self.index.as_slice());
        let table = OffsetTable::new(pieces, directory, self.header.offsets.count as usize);
        table
            .pair(index)
            .filter(|range| range.start <= range.end && range.end <= self.data_bytes)
            .ok_or_else(|| Error::DamagedIndex {
                path: self.path.clone(),
                problem: format!("record {index} is not where its index says"),
            })
    }

    /// How many line feeds come before a place, which is within the data: for messages about records. It
    /// reads what is in front of it.
    pub(crate) fn line_feeds_before(&self, offset: u64) -> Result<u64> {
        const BLOCK: u64 = 1 << 20;
        let mut feeds = 0;
        let mut start = 0;
        while start < offset {
            let end = offset.min(start + BLOCK);
            let bytes = self.read(&(start..end), 0)?;
            feeds += memchr::memchr_iter(b'\n', &bytes).count() as u64;
            start = end;
        }
        Ok(feeds)
    }

    /// The bytes of record `index` and where they start.
    pub(crate) fn bytes(&self, index: usize) -> Result<(u64, Cow<'_, [u8]>)> {
        let range = self.range(index)?;
        Ok((range.start, self.read(&range, index)?))
    }

    /// A range within the data, for record `index`.
    fn read(&self, range: &Range<u64>, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(match &self.data {
            // `range` is within the length that the map had when it was made.
            Data::Mapped(map) => Cow::Borrowed(&map[range.start as usize..range.end as usize]),
            Data::Blocks(map, blocks) => Cow::Owned(blocks.read(map, range).map_err(
                |problem| Error::UnreadableRecord {
                    path: self.path.clone(),
                    record: index,
                    offset: range.start,
                    problem,
                },
            )?),
            Data::OnDemand => Cow::Owned(read_range(&self.path, range)?),
        })
    }
}

fn read_range(path: &Path, range: &Range<u64>) -> Result<Vec<u8>> {
    use std::io::Read;
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    file.seek(SeekFrom::Start(range.start))
        .map_err(Error::io("read", path))?;
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact(&mut bytes)
        .map_err(Error::io("read", path))?;
    Ok(bytes)
}

/// The file that holds what is in a compressed one, unpacked where it was not there yet.
fn unpacked(packing: Packing, path: &Path, data: &[u8], identity: Identity) -> Result<PathBuf> {
    let name = format!("{}.unpacked", identity.content(b"unpacked 1").short());
    let unpacked = cache_folder("unpacked")?.join(name);
    let open = || Ok(unpacked.exists().then_some(()));
    let build = || {
        let folder = folder_of(&unpacked);
        let mut file = temp_file(&unpacked).map_err(Error::io("create a file in", folder))?;
        packing
            .unpack(data, &mut file)
            .map_err(Error::io("unpack", path))?;
        persist(file, &unpacked)
    };
    match cached(&unpacked, open, build)? {
        Cached::Hit(()) | Cached::Built(()) => Ok(unpacked),
    }
}

/// Where the index of the file at `path` is kept; `None`: nowhere.
fn index_path(path: &Path, key: Sha256Digest, location: &IndexLocation) -> Result<Option<PathBuf>> {
    let name = format!("{}.ovidx", key.short());
    Ok(match location {
        IndexLocation::Memory => None,
        IndexLocation::Cache => Some(cache_folder("indexes")?.join(name)),
        IndexLocation::Folder(folder) => Some(folder.join(name)),
        IndexLocation::Beside => {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            // The key's beginning keeps the indexes of several formats apart.
            let name = format!(".{file}.{}.ovidx", &key.short()[..8]);
            Some(path.with_file_name(name))
        }
    })
}

struct Builder<'a> {
    path: &'a Path,
    data: &'a Data,
    data_bytes: u64,
    identity: Identity,
    scan: &'a dyn Scan,
    threads: usize,
}

impl Builder<'_> {
    fn build_in_memory(&self) -> Result<IndexBytes> {
        let bytes = vec![0; HEADER_BYTES];
        let mut out = std::io::Cursor::new(bytes);
        out.set_position(HEADER_BYTES as u64);
        let (out, header) = self.write(out, self.path)?;
        let mut bytes = out.into_inner();
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        Ok(IndexBytes::Memory(bytes))
    }

    /// The index at `index_path`, and whether it was built now.
    fn open_or_build(&self, index_path: &Path, rebuild: bool) -> Result<(IndexBytes, bool)> {
        let open = || {
            if rebuild {
                Ok(None)
            } else {
                self.open_fitting(index_path)
            }
        };
        let build = || self.build_file(index_path);
        match cached(index_path, open, build) {
            Ok(Cached::Hit(map)) => Ok((IndexBytes::Mapped(map), false)),
            Ok(Cached::Built(map)) => Ok((IndexBytes::Mapped(map), true)),
            // The cache is a convenience: data in a folder, or on a disk, that takes no file is read
            // all the same. What is wrong with the data itself stays an error.
            Err(error @ Error::Io { .. }) if !error.is_io_of(self.path) => {
                tracing::warn!("the index is kept in memory: {error}");
                Ok((self.build_in_memory()?, true))
            }
            Err(error) => Err(error),
        }
    }

    /// The index file, if it is sound and belongs to the data.
    fn open_fitting(&self, index_path: &Path) -> Result<Option<Mmap>> {
        if !index_path.exists() {
            return Ok(None);
        }
        let map = map_file(index_path)?;
        match Header::decode(&map, index_path, self.data_bytes) {
            Ok(header) if header.identity == self.identity => Ok(Some(map)),
            Ok(_) => {
                tracing::info!("{} changed; indexing it again", self.path.display());
                Ok(None)
            }
            Err(error) => {
                tracing::warn!("indexing {} again: {error}", self.path.display());
                Ok(None)
            }
        }
    }

    /// Writes the index under another name and renames it. It is not synced: after a power cut its
    /// checksums tell whether it arrived, and it is built again if it did not.
    fn build_file(&self, index_path: &Path) -> Result<Mmap> {
        let folder = folder_of(index_path);
        let file = temp_file(index_path).map_err(Error::io("create a file in", folder))?;
        let mut out = BufWriter::with_capacity(1 << 18, file);
        out.write_all(&[0; HEADER_BYTES])
            .map_err(Error::io("write", index_path))?;
        let (out, header) = self.write(out, index_path)?;
        let mut file = out
            .into_inner()
            .map_err(|error| Error::io("write", index_path)(error.into_error()))?;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&header.encode()))
            .map_err(Error::io("write", index_path))?;
        file.persist(index_path)
            .map_err(|error| Error::io("rename a file to", index_path)(error.error))?;
        map_file(index_path)
    }

    /// Searches the data and writes pieces and directory to `out`.
    fn write<W: Write>(&self, out: W, out_path: &Path) -> Result<(W, Header)> {
        let mut offsets = OffsetsWriter::new(out);
        let mut push = |offset| offsets.push(offset).map_err(Error::io("write", out_path));
        let scan = |data: &[u8], push: &mut dyn FnMut(u64) -> Result<()>| {
            self.scan.scan(self.path, data, self.threads, push)
        };
        let end = match self.data {
            Data::Mapped(map) => scan(map, &mut push),
            // The search needs all bytes at once, in the map of a file that is gone afterwards.
            Data::Blocks(map, blocks) => {
                let file = unpack_for_now(blocks.packing(), self.path, map)?;
                scan(&map_opened(&file, self.path)?, &mut push)
            }
            Data::OnDemand => scan(&map_file(self.path)?, &mut push),
        }?;
        push(end)?;
        let (out, offsets) = offsets.finish().map_err(Error::io("write", out_path))?;
        let now = std::fs::metadata(self.path).map_err(Error::io("read", self.path))?;
        if !self.identity.fits(&now) {
            return Err(Error::FileChanged {
                path: self.path.to_owned(),
            });
        }
        Ok((
            out,
            Header {
                identity: self.identity,
                offsets,
            },
        ))
    }
}
