//! A file with the index of its records, which is opened if it fits the data and built otherwise.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use overdrive_core::Error as CommonError;
use overdrive_core::files::{self, FileMap};

use super::compressed::{Blocks, Compression, unpack_to_temporary_file};
use super::format::{HEADER_BYTES, Header, Identity, damaged_index};
use super::scan::cores;
use super::{OffsetTable, OffsetsWriter, PART_BYTES, Part, Scan, scan_stream};
use crate::cache::{Cached, cache_dir, cached, commit_with_digest, is_intact};
use crate::digest::FieldHasher;
use crate::file_state::FileState;
use crate::range_source::{RangeReader, RangeSource, copy, digest_of_source, registered_source};
use crate::{Error, RecordNumber, Result, Sha256Digest};

/// The smallest file that gets an index file: smaller ones are searched faster than an index is opened.
const MIN_INDEXED_BYTES: u64 = 1 << 20;

/// The location of index files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum IndexLocation {
    /// The folder `overdrive/indexes` in the user's cache folder (see [`crate::cache_dir`]). The default.
    #[default]
    Cache,
    /// A folder of the caller's choice, also for the unpacked content of files that are on this machine.
    Folder(PathBuf),
    /// The folder of the data; the index files are hidden and end in `.ovidx`.
    Beside,
    /// No index files: the index is built in memory each time. The unpacked content of a compressed file still goes to
    /// the user's cache folder, as with `Cache`.
    Memory,
}

/// The options of indexing files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// The location of index files. If it cannot be written, the index is built in memory with a warning. Files
    /// below 1 MiB get no index file.
    pub location: IndexLocation,
    /// The number of threads that search a file; the index does not depend on it. `None` (the default) uses
    /// one per core.
    pub threads: Option<usize>,
    /// If `true`, the index is built even if an existing one fits. Default: `false`.
    pub rebuild: bool,
    /// If `true`, every compressed file is unpacked once, into `overdrive/unpacked` in the user's cache folder or into
    /// [`IndexLocation::Folder`], and read from there. If `false` (the default), files in blocks are read in place, block
    /// by block (gzip of bgzip, Zstandard in frames of at most 16 MiB), and only the others are unpacked.
    pub unpack: bool,
}

/// A report on opening one or several files.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct IndexReport {
    /// The number of records in all files.
    pub records: u64,
    /// The number of files.
    pub files: u64,
    /// The size of all files (unpacked), in bytes.
    pub data_bytes: u64,
    /// The size of all indexes, in bytes. They are mapped, so at most this much is resident.
    pub index_bytes: u64,
    /// The size of the files that were searched now, in bytes; the others had an index.
    pub built_bytes: u64,
    /// The duration of the search, including the writing of the index.
    pub build_time: Duration,
}

impl IndexReport {
    /// Returns the size of the indexes per record, in bytes; 0 without records.
    pub fn bytes_per_record(&self) -> f64 {
        self.index_bytes as f64 / (self.records as f64).max(1.0)
    }

    /// Returns the speed of the search in gigabytes (10^9 bytes) per second; `None` if all indexes existed.
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
    /// The file that the user named.
    pub(crate) path: PathBuf,
    /// The file with the data: the same, or the unpacked one.
    data_path: PathBuf,
    data: Data,
    /// The length of the data, unpacked if the file is compressed.
    data_bytes: u64,
    header: Header,
    index: IndexBytes,
    scan_key: Vec<u8>,
}

/// The data of a file, before its records are found.
struct Opened {
    data: Data,
    data_bytes: u64,
    identity: Identity,
}

#[derive(Debug)]
enum Data {
    /// A mapped file.
    Mapped(FileMap),
    /// A mapped file that is compressed in blocks.
    Blocks(FileMap, Blocks),
    /// An object on a server.
    Remote(Arc<dyn RangeSource>),
    /// A file that is opened for each record, because a process can map only a limited number of files.
    OnDemand,
}

#[derive(Debug)]
enum IndexBytes {
    Mapped(FileMap),
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
    /// Opens a file. If `keep_mapped` is `false`, its records are read instead of mapped.
    pub(crate) fn open(
        path: &Path,
        scan: &dyn Scan,
        options: &IndexOptions,
        keep_mapped: bool,
    ) -> Result<(Self, IndexReport)> {
        if let Some(source) = registered_source(path) {
            return Self::open_source(path, source, scan, options);
        }
        let file = File::open(path).map_err(CommonError::io("open", path))?;
        let metadata = file.metadata().map_err(CommonError::io("read", path))?;
        // Opening a folder succeeds on Unix; the error of reading it would be less clear.
        if metadata.is_dir() {
            let is_folder = std::io::Error::from(std::io::ErrorKind::IsADirectory);
            return Err(CommonError::io("read", path)(is_folder).into());
        }
        let map = FileMap::of(&file, path)?;
        let scan_key = scan.key();
        // All paths of a file share one index; a path that cannot be resolved has its own index.
        let true_path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let identity = Identity::of(&true_path, FileState::of(&metadata), &map, &scan_key);
        let data = match Compression::of(path, &map)? {
            None => Data::Mapped(map),
            Some(compression) => {
                let blocks = match options.unpack {
                    true => None,
                    false => Blocks::find(path, compression, &map)?,
                };
                let Some(blocks) = blocks else {
                    let folder = match &options.location {
                        IndexLocation::Folder(folder) => folder.clone(),
                        _ => cache_dir("unpacked")?,
                    };
                    let (key, reader) = (identity.unpacked_key(), compression.reader(&map[..]));
                    let check = || identity.state.check(path);
                    let unpacked = unpack_to_cache(path, key, &folder, reader, check)?;
                    let (mut file, report) = Self::open(&unpacked, scan, options, keep_mapped)?;
                    // Error messages name the file that the user gave, and not the unpacked one.
                    file.path = path.to_owned();
                    return Ok((file, report));
                };
                Data::Blocks(map, blocks)
            }
        };
        let data = Opened {
            data_bytes: match &data {
                Data::Blocks(_, blocks) => blocks.unpacked_bytes(),
                _ => metadata.len(),
            },
            data,
            identity,
        };
        let (mut file, report) = Self::with_index(path, data, scan, options)?;
        if !keep_mapped && matches!(file.data, Data::Mapped(_)) {
            file.data = Data::OnDemand;
        }
        Ok((file, report))
    }

    /// Opens an object on a server. A compressed one is unpacked into the cache.
    fn open_source(
        path: &Path,
        source: Arc<dyn RangeSource>,
        scan: &dyn Scan,
        options: &IndexOptions,
    ) -> Result<(Self, IndexReport)> {
        if let Some(unpacked) = unpacked_source(path, &source)? {
            let (mut file, report) = Self::open(&unpacked, scan, options, true)?;
            file.path = path.to_owned();
            return Ok((file, report));
        }
        let data = Opened {
            identity: Identity::of_source(path, source.as_ref(), &scan.key()),
            data_bytes: source.len(),
            data: Data::Remote(source),
        };
        Self::with_index(path, data, scan, options)
    }

    fn with_index(
        path: &Path,
        opened: Opened,
        scan: &dyn Scan,
        options: &IndexOptions,
    ) -> Result<(Self, IndexReport)> {
        let Opened {
            data,
            data_bytes,
            identity,
        } = opened;
        let is_remote = matches!(data, Data::Remote(_));
        let builder = Builder {
            path,
            data: &data,
            data_bytes,
            identity,
            scan,
            threads: options.threads.map_or_else(cores, |threads| threads.max(1)),
        };
        let started = Instant::now();
        // Without an index file, even a small object would be read over the network again.
        let index_path = match &options.location {
            _ if data_bytes < MIN_INDEXED_BYTES && !is_remote => None,
            // The folder of an object is on its server.
            IndexLocation::Beside if is_remote => {
                index_path(path, identity.key(), &IndexLocation::Cache)?
            }
            location => index_path(path, identity.key(), location)?,
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
            data_path: path.to_owned(),
            data_bytes,
            scan_key: scan.key(),
            data,
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

    /// Returns the number of records.
    pub(crate) fn len(&self) -> usize {
        // The last offset is the end of the last record; `decode` made sure that it exists.
        self.header.offsets.count as usize - 1
    }

    /// Returns a digest of the content and of its division into records. It reads the whole file, on all cores.
    pub(crate) fn fingerprint(&self) -> Result<Sha256Digest> {
        let content = match &self.data {
            Data::Mapped(map) | Data::Blocks(map, _) => Sha256Digest::of_blocks(map),
            // Reading all of an object over the network would take longer than training on it may.
            Data::Remote(source) => digest_of_source(&self.path, source.as_ref()),
            Data::OnDemand => Sha256Digest::of_blocks(&FileMap::open(&self.data_path)?),
        };
        let hasher = FieldHasher::default().field(&content.0);
        Ok(hasher.field(&self.scan_key).finish())
    }

    /// Checks that the file has not changed since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        if let Data::Remote(source) = &self.data {
            return source.check_unchanged();
        }
        self.header.identity.state.check(&self.data_path)
    }

    /// Returns the byte range of record `index`, from its start to that of the next one.
    pub(crate) fn range(&self, index: usize) -> Result<Range<u64>> {
        let (blocks, directory) = self.header.offset_bytes(self.index.as_slice());
        let table = OffsetTable::new(blocks, directory, self.header.offsets.count as usize);
        table
            .pair(index)
            .filter(|range| range.start <= range.end && range.end <= self.data_bytes)
            .ok_or_else(|| {
                damaged_index(&self.path, &format!("its entry of record {index} is wrong"))
            })
    }

    /// Returns the number of line feeds before an offset, for error messages. It reads all data before it.
    #[cfg(feature = "tokenizers")]
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

    /// Returns the offset and the bytes of record `index`.
    pub(crate) fn bytes(&self, index: usize) -> Result<(u64, Cow<'_, [u8]>)> {
        let range = self.range(index)?;
        Ok((range.start, self.read(&range, index)?))
    }

    /// Returns the object with the data, if it is on a server.
    pub(crate) fn source(&self) -> Option<&Arc<dyn RangeSource>> {
        match &self.data {
            Data::Remote(source) => Some(source),
            _ => None,
        }
    }

    /// Announces that records will be read soon, if the data are on a server; those that do not exist are left out.
    pub(crate) fn prefetch(&self, records: &[usize]) {
        if let Some(source) = self.source() {
            // The error of a damaged index is that of the reading.
            let ranges = records.iter().filter_map(|&record| self.range(record).ok());
            source.prefetch(&ranges.collect::<Vec<_>>());
        }
    }

    /// Reads a range of the data, for record `index`.
    fn read(&self, range: &Range<u64>, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(match &self.data {
            // `range` is within the length of the map: its callers have checked it against `data_bytes`.
            Data::Mapped(map) => Cow::Borrowed(&map[range.start as usize..range.end as usize]),
            Data::Blocks(map, blocks) => Cow::Owned(blocks.read(map, range).map_err(
                |problem| Error::InvalidRecord {
                    path: self.path.clone(),
                    number: RecordNumber::Record(index),
                    offset: range.start,
                    problem,
                },
            )?),
            Data::Remote(source) => Cow::Owned(read_source(source.as_ref(), range.clone())?),
            Data::OnDemand => Cow::Owned(read_range(&self.data_path, range)?),
        })
    }
}

/// Reads a range of an object on a server.
pub(crate) fn read_source(source: &dyn RangeSource, range: Range<u64>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; range.end.saturating_sub(range.start) as usize];
    source.read_at(range.start, &mut bytes)?;
    Ok(bytes)
}

/// Returns the file with the unpacked content of a compressed object, unpacking it if necessary; `None` for an object
/// that is not compressed.
pub(crate) fn unpacked_source(
    path: &Path,
    source: &Arc<dyn RangeSource>,
) -> Result<Option<PathBuf>> {
    // The longest magic number of a compression has 8 bytes.
    let start = read_source(source.as_ref(), 0..source.len().min(8))?;
    let Some(compression) = Compression::of(path, &start)? else {
        return Ok(None);
    };
    let name = FieldHasher::default()
        .field(b"unpacked remote 1")
        .field(&digest_of_source(path, source.as_ref()).0)
        .finish();
    let packed = BufReader::with_capacity(1 << 20, RangeReader::new(Arc::clone(source)));
    let (reader, folder) = (compression.reader(packed), cache_dir("unpacked")?);
    unpack_to_cache(path, name, &folder, reader, || source.check_unchanged()).map(Some)
}

/// Returns the file with the unpacked content of the compressed one at `path`: what `reader` reads, unless `folder` has
/// it under `key`. `check` finds a change of the file in the meantime.
fn unpack_to_cache(
    path: &Path,
    key: Sha256Digest,
    folder: &Path,
    reader: Box<dyn Read + '_>,
    check: impl FnOnce() -> Result<()>,
) -> Result<PathBuf> {
    let unpacked = folder.join(format!("{}.unpacked", key.short()));
    let open = || Ok(is_intact(&unpacked)?.then_some(()));
    let build = || {
        let (from, to) = (path.display(), unpacked.display());
        tracing::info!("unpacking {from} into {to}; delete it when it is no longer needed");
        let mut file = files::unfinished(&unpacked)?;
        let bytes = copy(reader, ("unpack", path), &mut file, ("write", &unpacked))?;
        check()?;
        commit_with_digest(file, &unpacked)?;
        tracing::info!("{from} has {bytes} bytes unpacked, in {to}");
        Ok(())
    };
    match cached(&unpacked, open, build)? {
        Cached::Hit(()) | Cached::Built(()) => Ok(unpacked),
    }
}

fn read_range(path: &Path, range: &Range<u64>) -> Result<Vec<u8>> {
    let mut file = File::open(path).map_err(CommonError::io("open", path))?;
    file.seek(SeekFrom::Start(range.start))
        .map_err(CommonError::io("read", path))?;
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact(&mut bytes)
        .map_err(CommonError::io("read", path))?;
    Ok(bytes)
}

/// Returns the path of the index of the file at `path`; `None` if it is not written to a file.
fn index_path(path: &Path, key: Sha256Digest, location: &IndexLocation) -> Result<Option<PathBuf>> {
    let name = format!("{}.ovidx", key.short());
    Ok(match location {
        IndexLocation::Memory => None,
        IndexLocation::Cache => Some(cache_dir("indexes")?.join(name)),
        IndexLocation::Folder(folder) => Some(folder.join(name)),
        IndexLocation::Beside => {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            // The beginning of the key distinguishes the indexes of one file in several formats.
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

    /// Opens or builds the index at `index_path`; the second value is `true` if the index was built now.
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
            // An index file only saves time, so a location that cannot be written is not an error. An
            // error of the data itself, or of a temporary file with its content, is one.
            Err(error)
                if error
                    .io_path()
                    .is_some_and(|path| path != self.path && path != std::env::temp_dir()) =>
            {
                tracing::warn!("the index is kept in memory: {error}");
                Ok((self.build_in_memory()?, true))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the index file, if it is valid and belongs to the data.
    fn open_fitting(&self, index_path: &Path) -> Result<Option<FileMap>> {
        if !index_path.exists() {
            return Ok(None);
        }
        let map = FileMap::open(index_path)?;
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

    /// Writes the index under a temporary name and renames it. It is not synced: an index that a power cut has
    /// damaged fails its checksums and is built again.
    fn build_file(&self, index_path: &Path) -> Result<FileMap> {
        let file = files::unfinished(index_path)?;
        // The parts of a large index are written through one buffer, and the header last.
        let mut out = BufWriter::with_capacity(1 << 18, file);
        out.write_all(&[0; HEADER_BYTES])
            .map_err(CommonError::io("write", index_path))?;
        let (out, header) = self.write(out, index_path)?;
        let mut file = out
            .into_inner()
            .map_err(|error| CommonError::io("write", index_path)(error.into_error()))?;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&header.encode()))
            .map_err(CommonError::io("write", index_path))?;
        file.persist(index_path)
            .map_err(|error| CommonError::io("rename a file to", index_path)(error.error))?;
        Ok(FileMap::open(index_path)?)
    }

    /// Searches the data and writes the blocks and the directory to `out`.
    fn write<W: Write>(&self, out: W, out_path: &Path) -> Result<(W, Header)> {
        let mut offsets = OffsetsWriter::new(out);
        let mut push = |offset| -> Result<()> {
            Ok(offsets
                .push(offset)
                .map_err(CommonError::io("write", out_path))?)
        };
        let scan = |data: &[u8], push: &mut dyn FnMut(u64) -> Result<()>| {
            let whole = Part::whole(data);
            self.scan.scan(self.path, whole, self.threads, push)
        };
        let end = match self.data {
            Data::Mapped(map) => scan(map, &mut push),
            // The search needs all bytes at once: they are unpacked to a temporary file and mapped.
            Data::Blocks(map, blocks) => {
                let expected = blocks.unpacked_bytes();
                let file =
                    unpack_to_temporary_file(blocks.compression(), self.path, map, expected)?;
                scan(&FileMap::of(&file, self.path)?, &mut push)
            }
            Data::Remote(source) => {
                let mut reader = RangeReader::new(Arc::clone(source));
                if self.scan.is_streamed() {
                    let (scan, threads) = (self.scan, self.threads);
                    scan_stream(scan, self.path, &mut reader, PART_BYTES, threads, &mut push)
                } else {
                    // The search needs all bytes at once: they are copied to a temporary file and mapped.
                    let folder = std::env::temp_dir();
                    let mut file = tempfile::tempfile()
                        .map_err(CommonError::io("create a file in", &folder))?;
                    let to = ("write to a file in", folder.as_path());
                    copy(reader, ("read", self.path), &mut file, to)?;
                    scan(&FileMap::of(&file, self.path)?, &mut push)
                }
            }
            Data::OnDemand => scan(&FileMap::open(self.path)?, &mut push),
        }?;
        push(end)?;
        let (out, offsets) = offsets
            .finish()
            .map_err(CommonError::io("write", out_path))?;
        // An index of data that changed during the search could be wrong without notice.
        match self.data {
            Data::Remote(source) => source.check_unchanged()?,
            _ => self.identity.state.check(self.path)?,
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
