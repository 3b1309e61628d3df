//! A map whose results are kept on disk.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cache::{Cached, cache_folder, cached};
use crate::digest::FieldHasher;
use crate::token_store_writer::{folder_of, temp_file};
use crate::{
    Dataset, Error, IndexOptions, JsonLayout, JsonOptions, JsonRecords, Result, Sha256Digest,
};

/// Where results are kept, and how they are computed.
#[derive(Debug, Clone, Default)]
pub struct CacheOptions {
    /// The folder. `None` (the default): `overdrive/maps` in the user's cache folder.
    pub folder: Option<PathBuf>,
    /// How many threads compute. `None` (the default): one a core. The results are the same.
    pub threads: Option<usize>,
    /// How the file of results is indexed.
    pub index: IndexOptions,
}

/// What the results of a map depend on: name it, and what was computed once is read from disk.
///
/// The key is the fingerprint of the input, the function's name and its version. The code of a
/// function cannot be looked into: change the version when you change the function.
///
/// ```
/// use overdrive_datasets::{CacheOptions, Dataset, MapCache, TextLines, TextOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, "one two\nthree\n").unwrap();
/// # let options = CacheOptions { folder: Some(dir.path().join("maps")), ..CacheOptions::default() };
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// let cache = MapCache { input: lines.records().fingerprint(), name: "words", version: 1 };
/// let split = |line: String| Ok(line.split(' ').map(str::to_owned).collect::<Vec<_>>());
/// let words = cache.map(&lines, split, &options)?;
/// assert_eq!(words.get(0)?, ["one", "two"]);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapCache<'a> {
    /// What the records are: [`crate::RecordFiles::fingerprint`], or that of the map before this one
    /// ([`MapCache::fingerprint`]).
    pub input: Sha256Digest,
    /// What the function does, in a word.
    pub name: &'a str,
    /// Changes when the function does.
    pub version: u32,
}

/// Records computed before their results are written: bounds memory.
const BLOCK: usize = 4096;

impl MapCache<'_> {
    /// Names the results, as the input of a further map.
    pub fn fingerprint(&self) -> Sha256Digest {
        FieldHasher::default()
            .field(b"map 1")
            .field(&self.input.0)
            .field(self.name.as_bytes())
            .field(&self.version.to_le_bytes())
            .finish()
    }

    /// Applies `function` to all records on all cores, once, and gives the results as a dataset.
    ///
    /// They are kept as JSON Lines, one result a line, in a file that appears under its name when it
    /// is complete. Several processes may call this at once: one computes, the others wait.
    ///
    /// # Errors
    /// When a record cannot be read, `function` fails or its result is no JSON (a map whose keys are
    /// no strings, say), and when the disk refuses. Nothing is kept then.
    pub fn map<D, T>(
        &self,
        dataset: &D,
        function: impl Fn(D::Item) -> Result<T> + Sync,
        options: &CacheOptions,
    ) -> Result<JsonRecords<T>>
    where
        D: Dataset + ?Sized,
        T: Serialize + DeserializeOwned + Send,
    {
        let folder = match &options.folder {
            Some(folder) => folder.clone(),
            None => cache_folder("maps")?,
        };
        let path = folder.join(format!("{}.jsonl", self.fingerprint().short()));
        let open = || Ok(path.exists().then_some(()));
        let build = || write(&path, dataset, function, options.threads);
        // Either way the file is there then, whole.
        match cached(&path, open, build)? {
            Cached::Hit(()) | Cached::Built(()) => {}
        }
        let json = JsonOptions {
            layout: JsonLayout::Lines,
            index: options.index.clone(),
        };
        let results = JsonRecords::open([&path], &json)?;
        if results.len() != dataset.len() {
            return Err(Error::UnreadableRecord {
                path,
                record: results.len(),
                offset: results.records().report().data_bytes,
                problem: format!(
                    "{} results for {} records: the file was changed, or the input has another \
                     fingerprint than it says; delete the file",
                    results.len(),
                    dataset.len()
                ),
            });
        }
        Ok(results)
    }
}

fn write<D: Dataset + ?Sized, T: Serialize + Send>(
    path: &Path,
    dataset: &D,
    function: impl Fn(D::Item) -> Result<T> + Sync,
    threads: Option<usize>,
) -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new()
        // 0 stands for one a core.
        .num_threads(threads.unwrap_or(0))
        .thread_name(|index| format!("overdrive-map-{index}"))
        .build()
        .map_err(|error| Error::Threads {
            what: "the threads that map records",
            problem: error.to_string(),
        })?;
    let folder = folder_of(path);
    let file = temp_file(path).map_err(Error::io("create a file in", folder))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let line = |index: usize| -> Result<Vec<u8>> {
        let result = function(dataset.get(index)?)?;
        let mut line = serde_json::to_vec(&result).map_err(|error| Error::UnreadableRecord {
            path: path.to_owned(),
            record: index,
            offset: 0,
            problem: format!("the result cannot be kept as JSON: {error}"),
        })?;
        line.push(b'\n');
        Ok(line)
    };
    for start in (0..dataset.len()).step_by(BLOCK) {
        let block = start..dataset.len().min(start + BLOCK);
        let lines: Result<Vec<Vec<u8>>> =
            pool.install(|| block.into_par_iter().map(line).collect());
        for line in lines? {
            out.write_all(&line).map_err(Error::io("write", path))?;
        }
    }
    let file = out
        .into_inner()
        .map_err(|error| Error::io("write", path)(error.into_error()))?;
    crate::token_store_writer::persist(file, path)
}
