//! The default corpus: Rust sources that Cargo has already put on the machine.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::corpus::{Candidate, Skipped, find_files};
use crate::{Corpus, CorpusOptions, Error, Result, Sha256Digest};

/// Larger files are generated code, tables mostly, and not worth learning.
const MAX_FILE_BYTES: u64 = 128 << 10;
/// What one crate may contribute: bindings to operating systems, tens of megabytes of constants,
/// would be half of the text otherwise.
const MAX_CRATE_BYTES: u64 = 512 << 10;
const HINT: &str = "build any Cargo project with dependencies first (cargo fetch puts their sources \
                    there), or give text of your own";

impl Corpus {
    /// About `max_bytes` of the `.rs` files under `$CARGO_HOME/registry/src` (`~/.cargo` where it is
    /// not set): real text on any machine that has built this workspace.
    ///
    /// Files over 128 KiB (generated code), files with the content of another, and what a crate has
    /// beyond 512 KiB are left out. The part is taken in the order of a hash of the files' names, so
    /// it mixes all crates; names are relative to the registry's own folder, so the same crates give
    /// the same corpus on any machine. It changes when Cargo downloads or cleans crates.
    ///
    /// # Errors
    /// When there is no such folder, no file in it, or it cannot be read.
    pub fn cargo_registry(max_bytes: u64) -> Result<Self> {
        let options = CorpusOptions {
            extensions: Some(vec!["rs".to_owned()]),
            max_file_bytes: Some(MAX_FILE_BYTES),
            max_bytes: Some(max_bytes),
            skip_duplicates: true,
            ..CorpusOptions::default()
        };
        let Some(sources) = registry_sources() else {
            return Err(Error::EmptyCorpus {
                searched: "Cargo's registry (neither CARGO_HOME nor a home folder is set)"
                    .to_owned(),
                skipped: String::new(),
                hint: HINT,
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
            // One folder an index, whose name holds a hash that need not be the same everywhere.
            let mut indexes = Vec::new();
            for entry in std::fs::read_dir(sources).map_err(Error::io("read", sources))? {
                let path = entry.map_err(Error::io("read", sources))?.path();
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

/// At most [`MAX_CRATE_BYTES`] of each crate, whose folder is the first part of a file's name. Its
/// files are taken in the order of a hash of their names: of a large crate a mixture stays.
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
