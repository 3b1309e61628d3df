//! A tracker that writes JSON Lines.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
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
        let mut tracker = Self::open(path.as_ref(), false)?;
        tracker
            .repair_last_line()
            .map_err(CommonError::io("append to", &tracker.path))?;
        Ok(tracker)
    }

    /// Opens the file of a run that resumes from `step`: lines of later steps and a truncated last line are
    /// removed. A missing file is created.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`]; the file is unchanged then.
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        // Bytes, not a string, because a truncated line may end within a character.
        let text = match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(CommonError::io("read", path))?,
        };
        let is_kept = |line: &&[u8]| {
            let metrics = serde_json::from_slice::<StepMetrics>(line);
            metrics.is_ok_and(|metrics| metrics.step <= step)
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
        Self::append(path)
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
            .read(true)
            .append(true)
            .open(path)
            .map_err(CommonError::io("open", path))?;
        Ok(Self {
            file: AppendFile::new(file),
            path: path.to_owned(),
        })
    }

    fn repair_last_line(&mut self) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        let file = self.file.file();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut bytes)?;
        let complete = bytes
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |last| last + 1);
        let rest = &bytes[complete..];
        if rest.is_empty() {
            return Ok(());
        }
        if serde_json::from_slice::<StepMetrics>(rest).is_ok() {
            // Only its line break was lost.
            return file.write_all(b"\n");
        }
        file.set_len(complete as u64)
    }
}

impl Tracker for JsonLines {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = metrics.to_json_line()?;
        line.push('\n');
        Ok(self
            .file
            .append(line.as_bytes())
            .map_err(CommonError::io("append to", &self.path))?)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self
            .file
            .sync()
            .map_err(CommonError::io("sync", &self.path))?)
    }
}
