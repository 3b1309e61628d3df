//! The layout of the cache, which Python's `huggingface_hub` shares:
//!
//! ```text
//! models--ORG--NAME/refs/main              the commit of the branch
//! models--ORG--NAME/blobs/ETAG             the content of a file
//! models--ORG--NAME/snapshots/COMMIT/FILE  a link to the content
//! models--ORG--NAME/listings/COMMIT.json   the names of all files that the hub has; only this crate knows it
//! .locks/models--ORG--NAME/ETAG.lock       the lock of a download
//! ```
//!
//! The folders of datasets begin with `datasets--`.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::files::{self, folder_of};
use overdrive_core::{Error as Common, Result};

use crate::client::Listing;
use crate::name::{HubName, is_commit};

/// The depth to which the folders of a repository are searched for files.
const MAX_DEPTH: usize = 4;

/// A snapshot in the cache, which may have only some of the files.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) folder: PathBuf,
    /// The names of the files that the hub has or, without its listing, of those in the cache.
    pub(crate) files: Vec<String>,
    /// `true` if `files` is the listing of the hub.
    pub(crate) is_listed: bool,
}

impl Snapshot {
    /// Checks that the cache has the content of files, or returns the clause that names the first one that is missing.
    pub(crate) fn check(&self, files: &[String]) -> std::result::Result<(), String> {
        match files.iter().find(|file| !self.folder.join(file).exists()) {
            Some(file) => Err(format!("{file} is not")),
            None => Ok(()),
        }
    }
}

/// The part of the cache that belongs to one repository.
#[derive(Debug)]
pub(crate) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub(crate) fn new(cache: &Path, name: &HubName) -> RepositoryCache {
        let kind = name.kind.plural();
        let name = format!("{kind}--{}", name.repository.replace('/', "--"));
        RepositoryCache {
            folder: cache.join(&name),
            locks: cache.join(".locks").join(name),
        }
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Returns the path of the lock for a download, after its folder is made.
    pub(crate) fn lock(&self, etag: &str) -> Result<PathBuf> {
        make_folder(&self.locks)?;
        Ok(self.locks.join(format!("{etag}.lock")))
    }

    /// Returns the commit that a revision had when it was last downloaded.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        // A cache that is up to date may be read-only.
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        make_folder(folder_of(&path))?;
        files::write(&path, commit.as_bytes())
    }

    /// Returns the snapshot that a revision had when it was last downloaded; `None` if the cache has nothing of it.
    pub(crate) fn stored(&self, revision: &str) -> Option<Snapshot> {
        let commit = self.commit(revision)?;
        let folder = self.snapshot(&commit);
        let mut files = Vec::new();
        list(&folder, "", 0, &mut files);
        files.sort();
        if files.is_empty() {
            return None;
        }
        let listing = self.listing(&commit);
        Some(Snapshot {
            folder,
            is_listed: listing.is_some(),
            files: listing.unwrap_or(files),
        })
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.folder.join("listings").join(format!("{commit}.json"))
    }

    fn listing(&self, commit: &str) -> Option<Vec<String>> {
        serde_json::from_slice(&fs::read(self.listing_path(commit)).ok()?).ok()
    }

    /// Stores the names of the files that the hub has. Without them the hub is asked again, so an error, as of a cache
    /// that may only be read, is none of the download.
    pub(crate) fn set_listing(&self, listing: &Listing) {
        let path = self.listing_path(&listing.commit);
        if self.listing(&listing.commit).as_ref() == Some(&listing.files) {
            return;
        }
        let text = serde_json::json!(listing.files).to_string();
        let written =
            make_folder(folder_of(&path)).and_then(|()| files::write(&path, text.as_bytes()));
        if let Err(error) = written {
            tracing::debug!("the list of files is not kept: {error}");
        }
    }

    /// Links the file `name` of a snapshot to its content, or moves the content there if the file system has no links.
    pub(crate) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(name);
        if pointer.exists() {
            return Ok(());
        }
        make_folder(folder_of(&pointer))?;
        let up = "../".repeat(2 + name.matches('/').count());
        if symlink(&format!("{up}blobs/{etag}"), &pointer) {
            return Ok(());
        }
        let blob = self.blob(etag);
        fs::rename(&blob, &pointer).map_err(Common::io("move", blob))
    }
}

pub(crate) fn make_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(Common::io("create the folder", folder))
}

/// Makes a link, which replaces a dangling one. Returns `false` if the file system has no links.
fn symlink(target: &str, pointer: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::io::ErrorKind::AlreadyExists;
        use std::os::unix::fs::symlink;
        match symlink(target, pointer) {
            Ok(()) => true,
            Err(error) if error.kind() == AlreadyExists => {
                // Another process may have made it in the meantime.
                pointer.exists()
                    || fs::remove_file(pointer).is_ok() && symlink(target, pointer).is_ok()
            }
            Err(_) => false,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = (target, pointer);
        false
    }
}

fn list(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let (path, name) = (entry.path(), format!("{prefix}{name}"));
        if path.is_file() {
            names.push(name);
        } else if path.is_dir() && depth < MAX_DEPTH {
            list(&path, &format!("{name}/"), depth + 1, names);
        }
    }
}
