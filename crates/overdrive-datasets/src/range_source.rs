//! Files that lie on a server and are read by range, under names that stand where paths do.
//!
//! This crate sends no request. A program opens a URL with a crate that does, such as overdrive-remote, which registers
//! the object here; from then on its name is a path like any other: [`crate::JsonRecords::open`] and all others take it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use overdrive_core::Error as CommonError;

use crate::digest::FieldHasher;
use crate::{Error, Result, Sha256Digest};

/// The bytes that a reader of a remote file asks for at once: a few blocks of a cache, and one request to a server.
const READ_BYTES: usize = 4 << 20;

/// An object on a server: bytes that do not change, of which any range can be read.
///
/// All methods may be called from several threads at once.
pub trait RangeSource: Send + Sync + std::fmt::Debug {
    /// Returns the length in bytes.
    fn len(&self) -> u64;

    /// Returns `true` if the object has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the version of the content, such as an ETag: another content has another version.
    fn version(&self) -> &str;

    /// Fills `out` with the bytes from `offset` on, which must not reach beyond [`len`](Self::len).
    ///
    /// # Errors
    /// [`Error::FileChanged`] if the server has another version now; [`Error::Remote`] if it does not answer.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Announces ranges that will be read soon. It returns at once; an error is left to the reading.
    fn prefetch(&self, ranges: &[Range<u64>]);

    /// Asks the server whether it still has this version.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn check_unchanged(&self) -> Result<()>;
}

static SOURCES: RwLock<BTreeMap<PathBuf, Arc<dyn RangeSource>>> = RwLock::new(BTreeMap::new());

/// Makes `source` the file with the name `path` in this process, in place of an earlier one. What is open keeps reading
/// the source that it was opened with.
///
/// Errors, logs and the keys of caches contain the name, so it must not contain a secret.
pub fn register_source(path: impl Into<PathBuf>, source: Arc<dyn RangeSource>) {
    // The map is valid whenever the lock is released.
    let mut sources = SOURCES.write().unwrap_or_else(PoisonError::into_inner);
    sources.insert(path.into(), source);
}

/// Returns the source that is registered as `path`; `None` for a file on this machine.
pub fn registered_source(path: impl AsRef<Path>) -> Option<Arc<dyn RangeSource>> {
    let sources = SOURCES.read().unwrap_or_else(PoisonError::into_inner);
    sources.get(path.as_ref()).cloned()
}

/// Returns `true` for a URL: letters, `://`, and something after it.
pub(crate) fn is_url(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let scheme = text
        .split_once("://")
        .filter(|(_, rest)| !rest.is_empty())
        .map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| {
        !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

/// Returns the error of a URL that nothing has opened.
pub(crate) fn not_opened(path: &Path) -> Error {
    // The query of a URL can be a secret.
    let text = path.to_string_lossy();
    let path = text.split(['?', '#']).next().unwrap_or_default();
    let problem = "it is a URL that nothing has opened; build the program with the feature `remote`, or in your own call \
                   `overdrive_remote::data_paths` first, or download the file and give its path";
    Error::Remote {
        path: path.into(),
        problem: problem.to_owned(),
    }
}

/// Returns the digest of the name and the version of an object, which stands for that of its content.
pub(crate) fn digest_of_source(path: &Path, source: &dyn RangeSource) -> Sha256Digest {
    FieldHasher::default()
        .field(b"remote 1")
        .field(path.as_os_str().as_encoded_bytes())
        .field(source.version().as_bytes())
        .field(&source.len().to_le_bytes())
        .finish()
}

/// A file of data that is read from a position on, on this machine or on a server.
#[derive(Debug)]
pub(crate) enum DataReader {
    File(File),
    Remote(RangeReader),
}

impl DataReader {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(match registered_source(path) {
            Some(source) => Self::Remote(RangeReader::new(source)),
            None => Self::File(File::open(path).map_err(CommonError::io("open", path))?),
        })
    }
}

impl Read for DataReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(out),
            Self::Remote(reader) => reader.read(out),
        }
    }
}

impl Seek for DataReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::File(file) => file.seek(to),
            Self::Remote(reader) => reader.seek(to),
        }
    }
}

/// A reader of an object. Its errors are those of the source, wrapped.
#[derive(Debug)]
pub(crate) struct RangeReader {
    source: Arc<dyn RangeSource>,
    at: u64,
}

impl RangeReader {
    pub(crate) fn new(source: Arc<dyn RangeSource>) -> Self {
        Self { source, at: 0 }
    }
}

impl Read for RangeReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.source.len().saturating_sub(self.at);
        // Both are lengths in memory, or below one.
        let bytes = left.min(out.len().min(READ_BYTES) as u64) as usize;
        if bytes > 0 {
            let read = self.source.read_at(self.at, &mut out[..bytes]);
            read.map_err(io::Error::other)?;
            self.at += bytes as u64;
        }
        Ok(bytes)
    }
}

impl Seek for RangeReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(back) => self.source.len().checked_add_signed(back),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

/// Copies what `reader` reads of the file `from` to `out`, and returns the number of bytes. An error of the reading is
/// that of `from`, as by [`read_error`], and an error of the writing that of `to`; each is an action and a path.
pub(crate) fn copy(
    mut reader: impl Read,
    from: (&'static str, &Path),
    out: impl Write,
    to: (&'static str, &Path),
) -> Result<u64> {
    let mut out = Target { out, to };
    io::copy(&mut reader, &mut out).map_err(read_error(from.0, from.1))
}

/// A writer whose errors carry an [`Error`] with their path, which distinguishes them from those of a reader.
struct Target<'a, W> {
    out: W,
    to: (&'static str, &'a Path),
}

impl<W> Target<'_, W> {
    fn error(&self, error: io::Error) -> io::Error {
        // The kind stays, since an interrupted call is made again.
        io::Error::new(
            error.kind(),
            Error::from(CommonError::io(self.to.0, self.to.1)(error)),
        )
    }
}

impl<W: Write> Write for Target<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes).map_err(|error| self.error(error))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush().map_err(|error| self.error(error))
    }
}

/// Returns a function for `map_err` of reading the file at `path`: the error of a source as it was, and any other as
/// that of the file.
pub(crate) fn read_error(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |error| match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => CommonError::io(action, path)(error).into(),
    }
}
