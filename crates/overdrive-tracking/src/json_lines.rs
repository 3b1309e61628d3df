//! A tracker that writes JSON Lines.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use overdrive_core::{Error as CommonError, files};

use crate::append_file::AppendFile;
use crate::{Result, StepMetrics, Tracker};

/// A tracker that appends each record to a file as one line of JSON.
///
/// Every line reaches the operating system in one write before [`Tracker::log`] returns, so a
/// program that is killed leaves complete lines. Only a power failure can truncate one: the
/// file is synced to disk by [`Tracker::finish`], not after each line. Lines that did not fit on a full
/// disk are written by the next call that finds space.
#[derive(Debug)]
pub struct JsonLines {
    file: AppendFile,
    path: PathBuf,
}

impl JsonLines {
    /// Creates a file, or truncates an existing one. Missing folders are created.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path.as_ref(), true)
    }

    /// Opens a file to append to, or creates it. A truncated last line is removed, so that the next
    /// record has its own line.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn append(path: impl AsRef<Path>) -> Result<Self> {
        Self::resume(path, u64::MAX)
    }

    /// Opens the file of a run that resumes from `step`: lines of later steps and a truncated last line are
    /// removed; other lines that are no record of a step stay. A missing file is created.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        // Bytes, not a string, because a truncated line may end within a character.
        let text = match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(CommonError::io("read", path))?,
        };
        let is_kept = |line: &&[u8]| match serde_json::from_slice::<StepMetrics>(line) {
            Ok(metrics) => metrics.step <= step,
            // Without its line break, it is one that a crash truncated.
            Err(_) => line.ends_with(b"\n"),
        };
        let lines = text.split_inclusive(|&byte| byte == b'\n');
        let kept: Vec<u8> = lines.filter(is_kept).flatten().copied().collect();
        if !text.starts_with(&kept) {
            files::write(path, &kept)?;
        } else if kept.len() < text.len() {
            // Only lines at the end are removed, which needs no space on a full disk.
            File::options()
                .write(true)
                .open(path)
                .and_then(|file| file.set_len(kept.len() as u64))
                .map_err(CommonError::io("truncate", path))?;
        }
        let mut tracker = Self::open(path, false)?;
        if kept.last().is_some_and(|&byte| byte != b'\n') {
            // Of the last record, only the line break was lost.
            tracker.append_bytes(b"\n")?;
        }
        Ok(tracker)
    }

    fn open(path: &Path, empty: bool) -> Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
        }
        if empty {
            File::create(path).map_err(CommonError::io("create", path))?;
        }
        // Append mode: two writes never overlap, also if another process has the file open.
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(CommonError::io("open", path))?;
        Ok(Self {
            file: AppendFile::new(file),
            path: path.to_owned(),
        })
    }

    fn append_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self
            .file
            .append(bytes)
            .map_err(CommonError::io("append to", &self.path))?)
    }
}

impl Tracker for JsonLines {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = metrics.to_json_line()?;
        line.push('\n');
        self.append_bytes(line.as_bytes())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self
            .file
            .sync()
            .map_err(CommonError::io("sync", &self.path))?)
    }
}
