//! A map whose results are cached on disk.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

use overdrive_core::{Error as CommonError, files};

use super::batched_map::Batches;
use crate::cache::{Cached, cache_dir, cached, commit_with_digest, is_intact};
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
/// let cache = MapCache { input: lines.records().fingerprint()?, name: "words", version: 1 };
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
    /// Returns an error if a record cannot be read, a file of the records changes meanwhile, `function` fails, its
    /// result cannot be stored as JSON (for example a map whose keys are not strings, or a number that is NaN or
    /// infinite), or the file cannot be written. Nothing is cached then.
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
        let path = self.path(options)?;
        let result = |index: usize| {
            let converted = function(dataset.get(index)?);
            Ok(vec![converted.map_err(|error| error.of_record(index))?])
        };
        let unchanged = || dataset.check_unchanged();
        let results = results(&path, dataset.len(), 1, result, unchanged, options)?;
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

    /// Applies `function` to batches of `batch_size` records once, on all cores, and returns the results as a dataset:
    /// `datasets.Dataset.map(batched=True)`. The function may return any number of results for a batch.
    ///
    /// The results are stored as those of [`MapCache::map`]. The size of the batches is not part of the key: increase
    /// the version if the results depend on it.
    ///
    /// # Errors
    /// Those of [`MapCache::map`]; an error of `function` names the range of the batch's records
    /// ([`Error::Batch`]). Returns an error for a `batch_size` of 0.
    pub fn map_batched<D, T>(
        &self,
        dataset: &D,
        batch_size: usize,
        function: impl Fn(Vec<D::Item>) -> Result<Vec<T>> + Sync,
        options: &CacheOptions,
    ) -> Result<JsonRecords<T>>
    where
        D: Dataset + ?Sized,
        T: Serialize + DeserializeOwned + Send,
    {
        let batches = Batches::new(dataset, batch_size, function)?;
        let results_of = |batch: usize| batches.results(batch);
        results(
            &self.path(options)?,
            batches.len(),
            batch_size,
            results_of,
            || batches.dataset().check_unchanged(),
            options,
        )
    }

    fn path(&self, options: &CacheOptions) -> Result<PathBuf> {
        let folder = match &options.folder {
            Some(folder) => folder.clone(),
            None => cache_dir("maps")?,
        };
        Ok(folder.join(format!("{}.jsonl", self.fingerprint().short())))
    }
}

/// Returns the results at `path`. If the file is missing or damaged, `results_of` computes them for `batches`
/// batches of `batch_size` records, and `unchanged` then checks that the files of the records have not changed.
fn results<T: Serialize + DeserializeOwned + Send>(
    path: &Path,
    batches: usize,
    batch_size: usize,
    results_of: impl Fn(usize) -> Result<Vec<T>> + Sync,
    unchanged: impl Fn() -> Result<()>,
    options: &CacheOptions,
) -> Result<JsonRecords<T>> {
    let open = || Ok(is_intact(path)?.then_some(()));
    let build = || {
        let file = write(path, batches, batch_size, results_of, options.threads)?;
        unchanged()?;
        commit_with_digest(file, path)
    };
    // In both cases the complete file exists now.
    match cached(path, open, build)? {
        Cached::Hit(()) | Cached::Built(()) => {}
    }
    let json = JsonOptions {
        layout: JsonLayout::Lines,
        index: options.index.clone(),
    };
    JsonRecords::open([path], &json)
}

fn write<T: Serialize + DeserializeOwned>(
    path: &Path,
    batches: usize,
    batch_size: usize,
    results_of: impl Fn(usize) -> Result<Vec<T>> + Sync,
    threads: Option<usize>,
) -> Result<NamedTempFile> {
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
    let lines = |batch: usize| -> Result<Vec<u8>> {
        let invalid = |problem: String| Error::InvalidRecord {
            path: path.to_owned(),
            number: RecordNumber::Record(batch * batch_size),
            offset: 0,
            problem,
        };
        let mut lines = Vec::new();
        for result in results_of(batch)? {
            let start = lines.len();
            serde_json::to_writer(&mut lines, &result).map_err(|error| {
                invalid(format!("the result cannot be written as JSON: {error}"))
            })?;
            // serde_json writes NaN and infinity as null, which cannot be read back as a number.
            let written = &lines[start..];
            if memchr::memmem::find(written, b"null").is_some()
                && let Err(error) = serde_json::from_slice::<T>(written)
            {
                return Err(invalid(format!(
                    "the result cannot be read back from JSON, which has no NaN or infinity: {error}"
                )));
            }
            lines.push(b'\n');
        }
        Ok(lines)
    };
    let step = BLOCK_RECORDS.div_ceil(batch_size);
    for start in (0..batches).step_by(step) {
        let block = start..batches.min(start + step);
        let block: Vec<Result<Vec<u8>>> =
            pool.install(|| block.into_par_iter().map(&lines).collect());
        // The results of a block are written in the order of the records, whichever thread computed them.
        for lines in block {
            out.write_all(&lines?)
                .map_err(CommonError::io("write", path))?;
        }
    }
    let file = out
        .into_inner()
        .map_err(|error| CommonError::io("write", path)(error.into_error()))?;
    Ok(file)
}
