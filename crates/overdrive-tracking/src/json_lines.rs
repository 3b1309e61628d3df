//! Metrics as JSON Lines.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;

use crate::{Result, StepMetrics, Tracker};

/// Appends each record to a file as one line of JSON.
///
/// Every line reaches the operating system in one write before [`Tracker::log`] returns, so a
/// program that is killed leaves whole lines. (Only a machine that loses power can cut one off: the
/// file is not synced to the disk a line at a time. [`Tracker::finish`] syncs it.)
#[derive(Debug)]
pub struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    /// Starts a new file; one that is there is emptied. Missing folders are made.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path.as_ref(), true)
    }

    /// Goes on with a file, or starts it. A last line that was cut off is removed, so that the next
    /// record stands on its own line.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`].
    pub fn append(path: impl AsRef<Path>) -> Result<Self> {
        let mut tracker = Self::open(path.as_ref(), false)?;
        tracker
            .mend_last_line()
            .map_err(CommonError::io("append to", &tracker.path))?;
        Ok(tracker)
    }

    /// Goes on after `step`: what the file says of later steps, and a last line that was cut off, is
    /// removed. A file that is not there is started.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`]; the file is then as it was.
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.map_err(CommonError::io("read", path))?,
        };
        let done = |line: &&str| {
            let metrics = serde_json::from_str::<StepMetrics>(line);
            metrics.is_ok_and(|metrics| metrics.step <= step)
        };
        let kept: String = text.split_inclusive('\n').filter(done).collect();
        if kept != text {
            // Under another name first: a kill in between must not cost the lines that stay.
            let beside = path.with_extension("jsonl.tmp");
            fs::write(&beside, &kept).map_err(CommonError::io("write", &beside))?;
            fs::rename(&beside, path).map_err(CommonError::io("write", path))?;
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
        let file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(CommonError::io("open", path))?;
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    fn mend_last_line(&mut self) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(0))?;
        self.file.read_to_end(&mut bytes)?;
        let whole = bytes
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |last| last + 1);
        let rest = &bytes[whole..];
        if rest.is_empty() {
            return Ok(());
        }
        if serde_json::from_slice::<StepMetrics>(rest).is_ok() {
            return self.file.write_all(b"\n");
        }
        self.file.set_len(whole as u64)
    }
}

impl Tracker for JsonLines {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = metrics.to_json_line()?;
        line.push('\n');
        Ok(self
            .file
            .write_all(line.as_bytes())
            .map_err(CommonError::io("append to", &self.path))?)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self
            .file
            .sync_data()
            .map_err(CommonError::io("sync", &self.path))?)
    }
}
