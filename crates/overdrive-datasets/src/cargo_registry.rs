//! The default corpus: Rust sources that Cargo has already put on the machine.

use std::collections::HashMap;
use std::path::PathBuf;

use overdrive_core::Error as CommonError;

use crate::corpus::{Candidate, Skipped, find_files};
use crate::{Corpus, CorpusOptions, Error, Result, Sha256Digest};

/// The largest file that is taken: larger ones are generated code, mostly tables.
const MAX_FILE_BYTES: u64 = 128 << 10;
/// The maximum size that one crate contributes: otherwise bindings to operating systems, with tens of
/// megabytes of constants, would be half of the text.
const MAX_CRATE_BYTES: u64 = 512 << 10;
const HINT: &str = "build any Cargo project with dependencies first (cargo fetch puts their sources \
                    there), or give text of your own";

impl Corpus {
    /// Collects about `max_bytes` of the `.rs` files under `$CARGO_HOME/registry/src` (`~/.cargo` if it is not
    /// set): real text on any machine that has built this workspace.
    ///
    /// Files over 128 KiB (generated code), duplicates, and files of a crate beyond 512 KiB are left out. Files
    /// are taken in the order of a hash of their names, so the corpus mixes all crates. Names are relative to the
    /// registry's folder, so the same crates give the same corpus on any machine. The corpus changes when Cargo
    /// downloads or removes crates.
    ///
    /// # Errors
    /// Returns an error if the folder does not exist, has no such files, or cannot be read.
    pub fn cargo_registry(max_bytes: u64) -> Result<Self> {
        let options = CorpusOptions {
            extensions: Some(vec!["rs".to_owned()]),
            max_file_bytes: Some(MAX_FILE_BYTES),
            max_bytes: Some(max_bytes),
            skip_duplicates: true,
            ..CorpusOptions::default()
        };
        let Some(sources) = registry_sources() else {
            let searched = "Cargo's registry (neither CARGO_HOME nor a home folder is set)";
            return Err(Error::NoData {
                searched: searched.to_owned(),
                problem: HINT.to_owned(),
            });
        };
        Self::from_registry(&sources, &options)
    }

    pub(crate) fn from_registry(
        sources: &std::path::Path,
        options: &CorpusOptions,
    ) -> Result<Self> {
        let mut skipped = Skipped::default();
        let mut found = Vec::new();
        if sources.is_dir() {
            // Each index has a folder, whose name contains a hash that may differ between machines. It is left
            // out of the files' names.
            let mut indexes = Vec::new();
            for entry in std::fs::read_dir(sources).map_err(CommonError::io("read", sources))? {
                let path = entry.map_err(CommonError::io("read", sources))?.path();
                if path.is_dir() {
                    indexes.push(path);
                }
            }
            indexes.sort_unstable();
            for index in indexes {
                find_files(&index, options, &mut skipped, &mut found)?;
            }
        }
        let searched = sources.display().to_string();
        Self::from_candidates(share_by_crate(found), skipped, options, &searched, HINT)
    }
}

/// Keeps at most [`MAX_CRATE_BYTES`] of each crate, whose folder is the first component of a file's name. The
/// files are taken in the order of a hash of their names, so that a large crate contributes a mixture.
fn share_by_crate(mut files: Vec<Candidate>) -> Vec<Candidate> {
    files.retain(|file| file.bytes <= MAX_FILE_BYTES);
    let mut order: Vec<_> = (0..files.len())
        .map(|at| (Sha256Digest::of(files[at].name.as_bytes()), at))
        .collect();
    order.sort_unstable();
    let mut taken: HashMap<String, u64> = HashMap::new();
    let mut kept = vec![false; files.len()];
    for (_, at) in order {
        let file = &files[at];
        let folder = file.name.split('/').next().unwrap_or_default();
        let bytes = taken.entry(folder.to_owned()).or_default();
        if *bytes + file.bytes <= MAX_CRATE_BYTES {
            *bytes += file.bytes;
            kept[at] = true;
        }
    }
    let mut kept = kept.into_iter();
    files.retain(|_| kept.next().unwrap_or(false));
    files
}

fn registry_sources() -> Option<PathBuf> {
    let set = std::env::var_os("CARGO_HOME")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from);
    let home = set.or_else(|| Some(std::env::home_dir()?.join(".cargo")))?;
    Some(home.join("registry").join("src"))
}
