//! The layout of the cache, which Python's `huggingface_hub` shares:
//!
//! ```text
//! models--ORG--NAME/refs/main              the commit of the branch
//! models--ORG--NAME/blobs/ETAG             the content of a file
//! models--ORG--NAME/snapshots/COMMIT/FILE  a link to the content
//! .locks/models--ORG--NAME/ETAG.lock       the lock of a download
//! ```
//!
//! The folders of datasets begin with `datasets--`.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::files::{self, folder_of};
use overdrive_core::{Error as Common, Result};

use crate::name::{HubName, is_commit};

/// The depth to which the folders of a repository are searched for files.
const MAX_DEPTH: usize = 4;

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

    /// Returns the names of the files of a snapshot whose content is in the cache.
    pub(crate) fn files(&self, commit: &str) -> Vec<String> {
        let mut names = Vec::new();
        list(&self.snapshot(commit), "", 0, &mut names);
        names.sort();
        names
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
