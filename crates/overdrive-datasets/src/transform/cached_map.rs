//! A map whose results are cached on disk.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

use overdrive_core::{Error as CommonError, files};

use crate::cache::{Cached, cache_folder, cached};
use crate::digest::FieldHasher;
use crate::{
    Dataset, Error, IndexOptions, JsonLayout, JsonOptions, JsonRecords, RecordNumber, Result,
    Sha256Digest,
};

/// The options of [`MapCache::map`].
#[derive(Debug, Clone, Default)]
pub struct CacheOptions {
    /// The folder of the results. `None` (the default) is `overdrive/maps` in the user's cache folder.
    pub folder: Option<PathBuf>,
    /// The number of threads that compute; the results do not depend on it. `None` (the default) uses one per
    /// core.
    pub threads: Option<usize>,
    /// The options of the index of the file of results.
    pub index: IndexOptions,
}

/// The key of a map's results, by which results that were computed once are read from disk.
///
/// It consists of the fingerprint of the input and the name and version of the function. Increase the version when
/// the function changes, since its code cannot be compared.
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
    /// The fingerprint of the records: [`crate::RecordFiles::fingerprint`], or that of the previous map
    /// ([`MapCache::fingerprint`]).
    pub input: Sha256Digest,
    /// The name of the function.
    pub name: &'a str,
    /// The version of the function.
    pub version: u32,
}

/// The number of records that are computed before their results are written, which bounds the memory.
const BLOCK_RECORDS: usize = 4096;

impl MapCache<'_> {
    /// Returns the fingerprint of the results, as the input of a further map.
    pub fn fingerprint(&self) -> Sha256Digest {
        FieldHasher::default()
            .field(b"map 1")
            .field(&self.input.0)
            .field(self.name.as_bytes())
            .field(&self.version.to_le_bytes())
            .finish()
    }

    /// Applies `function` to all records once, on all cores, and returns the results as a dataset.
    ///
    /// The results are stored as JSON Lines in a file that gets its name when it is complete. Several processes may
    /// call it at once: one computes and the others wait.
    ///
    /// # Errors
    /// Returns an error if a record cannot be read, `function` fails, its result cannot be written as JSON (for
    /// example a map whose keys are not strings), or the file cannot be written. Nothing is cached then.
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
        // In both cases the complete file exists now.
        match cached(&path, open, build)? {
            Cached::Hit(()) | Cached::Built(()) => {}
        }
        let json = JsonOptions {
            layout: JsonLayout::Lines,
            index: options.index.clone(),
        };
        let results = JsonRecords::open([&path], &json)?;
        if results.len() != dataset.len() {
            return Err(Error::DamagedFile {
                path,
                problem: format!(
                    "it has {} results for {} records: the file was changed, or the fingerprint of the input \
            is not that of these records; delete the file",
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
        // Rayon starts one thread per core for 0.
        .num_threads(threads.unwrap_or(0))
        .thread_name(|index| format!("overdrive-map-{index}"))
        .build()
        .map_err(|error| Error::Threads {
            threads: "the threads that map records",
            problem: error.to_string(),
        })?;
    let file = files::unfinished(path)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let line = |index: usize| -> Result<Vec<u8>> {
        let result = function(dataset.get(index)?)?;
        let mut line = serde_json::to_vec(&result).map_err(|error| Error::InvalidRecord {
            path: path.to_owned(),
            number: RecordNumber::Record(index),
            offset: 0,
            problem: format!("the result cannot be written as JSON: {error}"),
        })?;
        line.push(b'\n');
        Ok(line)
    };
    for start in (0..dataset.len()).step_by(BLOCK_RECORDS) {
        let block = start..dataset.len().min(start + BLOCK_RECORDS);
        let lines: Result<Vec<Vec<u8>>> =
            pool.install(|| block.into_par_iter().map(line).collect());
        // The results of a block are written in the order of the records, whichever thread computed them.
        for line in lines? {
            out.write_all(&line)
                .map_err(CommonError::io("write", path))?;
        }
    }
    let file = out
        .into_inner()
        .map_err(|error| CommonError::io("write", path)(error.into_error()))?;
    Ok(files::commit(file, path)?)
}
