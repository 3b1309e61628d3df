//! The download of one file.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use overdrive_core::Error as Common;
use overdrive_core::files::{self, FileLock, folder_of};
use ureq::http::{HeaderMap, StatusCode, header};

use crate::cache::{RepositoryCache, make_folder};
use crate::client::{Attempt, Client, Failure, Listing, Remote};
use crate::{DownloadProgress, Error, Result};

const BUFFER: usize = 1 << 18;

/// The number of bytes of all downloads, and the callback that receives it.
pub(crate) struct Meter<'a> {
    callback: Option<&'a DownloadProgress>,
    finished: u64,
    total: u64,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(callback: Option<&'a DownloadProgress>) -> Meter<'a> {
        Meter {
            callback,
            finished: 0,
            total: 0,
        }
    }

    /// Adds the bytes of further files to the total.
    fn extend(&mut self, bytes: u64) {
        self.total += bytes;
    }

    fn at(&self, bytes: u64) {
        if let Some(callback) = self.callback {
            callback.report((self.finished + bytes).min(self.total), self.total);
        }
    }

    fn finish(&mut self, bytes: u64) {
        self.finished += bytes;
        self.at(0);
    }
}

/// A download into the cache.
pub(crate) struct Download<'a> {
    pub(crate) client: &'a Client<'a>,
    pub(crate) cache: &'a RepositoryCache,
    pub(crate) repository: &'a str,
    pub(crate) listing: &'a Listing,
    /// The folder of the snapshot.
    pub(crate) folder: PathBuf,
}

impl Download<'_> {
    /// Adds those of the files to the snapshot that it lacks.
    pub(crate) fn complete(&self, files: &[String], meter: &mut Meter<'_>) -> Result<()> {
        // First, so that the part that an interruption leaves does not count as complete.
        self.cache.set_listing(self.listing);
        let commit = &self.listing.commit;
        let missing = files.iter().filter(|file| !self.folder.join(file).exists());
        let remotes = missing.map(|file| self.client.repeat(|| self.client.remote(commit, file)));
        let remotes = remotes.collect::<Result<Vec<_>>>()?;
        meter.extend(remotes.iter().filter_map(|remote| remote.size).sum());
        remotes
            .iter()
            .try_for_each(|remote| self.fetch(remote, meter))
    }

    /// Adds a file to the snapshot. Its content is downloaded unless the cache already has it from another commit.
    fn fetch(&self, remote: &Remote, meter: &mut Meter<'_>) -> Result<()> {
        let blob = self.cache.blob(&remote.etag);
        make_folder(folder_of(&blob))?;
        // Waits for any other process that downloads the same file; the file then exists.
        let work = format!("downloading {} of {}", remote.name, self.repository);
        let lock = FileLock::acquire(self.cache.lock(&remote.etag)?, &work, |waiting| {
            tracing::warn!("{waiting}");
        })?;
        if !blob.exists() {
            // Where file locks do not work, each process writes its own file, which no other process resumes.
            let own = match lock.unsupported() {
                Some(_) => Some(files::unfinished(&blob)?),
                None => None,
            };
            let partial = match &own {
                Some(file) => file.path().to_owned(),
                None => blob.with_file_name(format!("{}.incomplete", remote.etag)),
            };
            self.download(remote, &partial, meter)?;
            fs::rename(&partial, &blob).map_err(Common::io("rename", &partial))?;
            files::sync_folder(folder_of(&blob))?;
        }
        self.cache
            .link(&self.listing.commit, &remote.name, &remote.etag)?;
        meter.finish(remote.size.unwrap_or(0));
        Ok(())
    }

    /// Downloads and verifies a file. After a transient error, the partial file is kept and resumed next time.
    fn download(&self, remote: &Remote, partial: &Path, meter: &Meter<'_>) -> Result<()> {
        let mut resumed = length(partial) > 0;
        loop {
            let result = self
                .client
                .repeat(|| self.attempt(remote, partial, meter))
                .and_then(
                    |length| match remote.checksum().difference(partial, length)? {
                        None => Ok(()),
                        Some(reason) => Err(self.damaged(remote, reason)),
                    },
                );
            match result {
                Err(Error::Damaged { .. }) if resumed => {
                    // The resumed part may be the damaged one, left by another process or a crash.
                    remove(partial)?;
                    resumed = false;
                }
                Err(error @ Error::Damaged { .. }) => {
                    remove(partial)?;
                    return Err(error);
                }
                result => return result,
            }
        }
    }

    /// Requests the missing part of a file and returns the length of the complete file.
    fn attempt(&self, remote: &Remote, partial: &Path, meter: &Meter<'_>) -> Attempt<u64> {
        let mut options = OpenOptions::new();
        // Not opened for appending: if two processes write despite the lock, they write the same bytes to the same
        // offsets.
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .open(partial);
        let mut file = file.map_err(Common::io("write", partial))?;
        let metadata = file.metadata().map_err(Common::io("read", partial))?;
        let mut have = metadata.len();
        if remote.size.is_some_and(|size| have > size) {
            have = restart(&mut file, partial)?;
        }
        if remote.size == Some(have) && (have > 0 || remote.size == Some(0)) {
            return Ok(have);
        }
        let response = self.client.open(&self.listing.commit, &remote.name, have)?;
        let resumes = response.status() == StatusCode::PARTIAL_CONTENT
            && range_start(response.headers()) == Some(have);
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE
            || (response.status() == StatusCode::PARTIAL_CONTENT && !resumes)
        {
            restart(&mut file, partial)?;
            let reason = "the server returned the wrong part of the file".to_owned();
            return Err(Failure::transient(self.damaged(remote, reason), false));
        }
        if !resumes {
            have = restart(&mut file, partial)?;
        }
        file.seek(SeekFrom::Start(have))
            .map_err(Common::io("write", partial))?;
        let stated = response.headers().get(header::CONTENT_LENGTH);
        let stated = stated.and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
        let size = remote.size.or(stated.map(|rest| have.saturating_add(rest)));
        if let (Some(size), Some(rest)) = (size, stated)
            && have.checked_add(rest) != Some(size)
        {
            let reason =
                format!("the server sends {rest} bytes after byte {have}; the file has {size}");
            return Err(self.damaged(remote, reason).into());
        }
        let mut body = response.into_body().into_reader();
        let done = self.copy(remote, &mut body, (&mut file, partial), (have, size), meter)?;
        file.sync_all().map_err(Common::io("write", partial))?;
        Ok(done)
    }

    /// Copies the body to the file, which already has `have` of `size` bytes.
    fn copy(
        &self,
        remote: &Remote,
        body: &mut impl Read,
        (file, partial): (&mut File, &Path),
        (have, size): (u64, Option<u64>),
        meter: &Meter<'_>,
    ) -> Attempt<u64> {
        let mut buffer = vec![0; BUFFER];
        let mut done = have;
        let broken = |done: u64, reason: String| {
            let url = self.client.file_url(&self.listing.commit, &remote.name);
            let reason = format!(
                "the connection ended after {done} bytes of {} ({reason})",
                remote.name
            );
            Failure::transient(Error::Unreachable { url, reason }, done > have)
        };
        loop {
            meter.at(done);
            let read = match body.read(&mut buffer) {
                Ok(read) => read,
                Err(error) => return Err(broken(done, error.to_string())),
            };
            if read == 0 {
                return match size {
                    Some(size) if done < size => Err(broken(done, format!("the file has {size}"))),
                    _ => Ok(done),
                };
            }
            done += read as u64;
            if size.is_some_and(|size| done > size) {
                let reason = format!("it is longer than {} bytes", size.unwrap_or(0));
                return Err(self.damaged(remote, reason).into());
            }
            file.write_all(&buffer[..read])
                .map_err(Common::io("write", partial))?;
        }
    }

    fn damaged(&self, remote: &Remote, reason: String) -> Error {
        Error::Damaged {
            repository: self.repository.to_owned(),
            file: remote.name.clone(),
            reason,
        }
    }
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn restart(file: &mut File, path: &Path) -> Result<u64> {
    file.set_len(0).map_err(Common::io("write", path))?;
    Ok(0)
}

fn remove(path: &Path) -> Result<()> {
    Ok(fs::remove_file(path).map_err(Common::io("delete", path))?)
}

/// Returns the first byte of `Content-Range: bytes 5-9/10`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    text.strip_prefix("bytes ")?
        .split('-')
        .next()?
        .trim()
        .parse()
        .ok()
}

/// Returns the path of the model in the snapshot.
pub(crate) fn entry(snapshot: PathBuf, file: Option<&str>) -> PathBuf {
    match file {
        Some(file) => snapshot.join(file),
        None => snapshot,
    }
}
