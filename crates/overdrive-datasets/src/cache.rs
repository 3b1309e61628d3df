//! The cache of token stores, and the lock under which cached files are built.

use std::fs::File;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use overdrive_core::Error as CommonError;

use crate::build_tokens::{
    BuildOptions, BuildReport, DatasetDocuments, DocumentSource, build_with_source,
};
use crate::digest::FieldHasher;
use crate::token_store_writer::temp_name;
use crate::{
    Corpus, Dataset, Error, FORMAT_VERSION, Result, Sha256Digest, TokenStore, tokenizer_digest,
};

/// A token store from the cache.
#[derive(Debug)]
pub struct BuiltTokens {
    /// The opened store.
    pub store: TokenStore,
    /// The report of the build; `None` if the store was in the cache.
    pub report: Option<BuildReport>,
}

impl BuiltTokens {
    /// Returns `true` if the store was in the cache.
    pub fn was_cached(&self) -> bool {
        self.report.is_none()
    }
}

/// Tokenizes a corpus, or opens the store that an earlier call made of it.
///
/// The store's name in `cache_dir` is a hash of the files' names and contents, the tokenizer, the options and
/// the format version: if any of them changes, a new store is built, and no stale one is opened. A damaged
/// store is replaced. Several processes may call it at once: on a file system with locks the others wait for
/// the first, and otherwise each builds the same file. The cache is never cleaned; the folder or files in it
/// may be deleted at any time.
///
/// # Errors
/// Those of [`crate::build_tokens_to`], and an error if the cache folder cannot be written.
pub fn build_tokens(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    cache_dir: impl AsRef<Path>,
) -> Result<BuiltTokens> {
    build_cached(
        corpus,
        corpus.digest(),
        tokenizer,
        options,
        cache_dir.as_ref(),
    )
}

/// Tokenizes a dataset of texts, or opens the store that an earlier call made of it.
///
/// It works as [`build_tokens`], with each record as a document. `fingerprint` identifies the records: it is
/// that of the files ([`crate::RecordFiles::fingerprint`]), or, if a function makes the texts from the records,
/// [`crate::MapCache::fingerprint`] with a version of that function.
///
/// ```
/// use overdrive_datasets::{
///     BpeOptions, BuildOptions, Corpus, CorpusOptions, DatasetExt, JsonOptions, JsonRecords,
///     MapCache, build_dataset_tokens, train_bpe,
/// };
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("pairs.jsonl");
/// # std::fs::write(&path, "{\"q\": \"2+2 is what?\", \"a\": \"It is 4.\"}\n".repeat(50)).unwrap();
/// # let cache_dir = &dir.path().join("cache");
/// # let corpus = Corpus::from_paths([&path], &CorpusOptions { text_field: "q".into(), ..Default::default() })?;
/// # let tokenizer = train_bpe(&corpus, &BpeOptions { vocab_size: 270, ..Default::default() })?.tokenizer;
/// let pairs = JsonRecords::<serde_json::Value>::open([&path], &JsonOptions::default())?;
/// let input = pairs.records().fingerprint();
/// let key = MapCache { input, name: "question and answer", version: 1 }.fingerprint();
/// let texts = pairs.map(|pair| Ok(format!("{} {}", pair["q"], pair["a"])));
/// let built = build_dataset_tokens(&texts, key, &tokenizer, &BuildOptions::default(), cache_dir)?;
/// assert_eq!(built.store.document_count(), 50);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// Those of [`crate::build_dataset_tokens_to`], and an error if the cache folder cannot be written.
pub fn build_dataset_tokens<D>(
    dataset: &D,
    fingerprint: Sha256Digest,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    cache_dir: impl AsRef<Path>,
) -> Result<BuiltTokens>
where
    D: Dataset<Item = String> + ?Sized,
{
    // The prefix keeps these keys apart from those of a corpus, whose digest has another meaning.
    let source = FieldHasher::default()
        .field(b"dataset")
        .field(&fingerprint.0)
        .finish();
    build_cached(
        &DatasetDocuments(dataset),
        source,
        tokenizer,
        options,
        cache_dir.as_ref(),
    )
}

fn build_cached(
    chunks: &impl DocumentSource,
    source: Sha256Digest,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    cache_dir: &Path,
) -> Result<BuiltTokens> {
    // The format version is part of the key: a new version builds new files beside the old ones.
    let mut hasher = FieldHasher::default().field(&FORMAT_VERSION.to_le_bytes());
    hasher.add(&source.0);
    let tokenizer_digest = tokenizer_digest(tokenizer)?;
    hasher.add(&tokenizer_digest.0);
    options.add_to(&mut hasher);
    let key = hasher.finish();
    let path = cache_dir.join(format!("{}.tokens", key.short()));
    let open = || open_cached(&path, key, tokenizer_digest);
    let build = || build_with_source(&path, chunks, tokenizer, options, key);
    match cached(&path, open, build)? {
        Cached::Hit(store) => Ok(BuiltTokens {
            store,
            report: None,
        }),
        Cached::Built((store, report)) => Ok(BuiltTokens {
            store,
            report: Some(report),
        }),
    }
}

/// Returns the folder for token stores and trained tokenizers: `overdrive/tokens` in `$XDG_CACHE_HOME`, or in
/// the platform's cache folder (`~/.cache`; macOS: `~/Library/Caches`; Windows: `%LOCALAPPDATA%`).
///
/// # Errors
/// [`Error::NoCacheFolder`] if the environment names no such folder.
pub fn default_cache_dir() -> Result<PathBuf> {
    cache_folder("tokens")
}

/// Returns the folder `overdrive/<name>` in the user's cache folder.
pub(crate) fn cache_folder(name: &str) -> Result<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let in_home = |folder| Some(std::env::home_dir()?.join(folder));
    let (platform, tried) = if cfg!(target_os = "macos") {
        (in_home("Library/Caches"), "XDG_CACHE_HOME and HOME")
    } else if cfg!(windows) {
        (variable("LOCALAPPDATA"), "XDG_CACHE_HOME and LOCALAPPDATA")
    } else {
        (in_home(".cache"), "XDG_CACHE_HOME and HOME")
    };
    // The XDG specification requires that a relative path is ignored.
    let chosen = variable("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute())
        .or(platform);
    let base = chosen.ok_or(Error::NoCacheFolder { tried })?;
    Ok(base.join("overdrive").join(name))
}

/// A file that was in the cache, or that has been built.
pub(crate) enum Cached<H, B> {
    Hit(H),
    Built(B),
}

/// Opens the file at `path`, or builds it while holding its lock.
pub(crate) fn cached<H, B>(
    path: &Path,
    open: impl Fn() -> Result<Option<H>>,
    build: impl FnOnce() -> Result<B>,
) -> Result<Cached<H, B>> {
    // An existing file needs no lock, so that readers never wait for a build.
    if let Some(hit) = open()? {
        return Ok(Cached::Hit(hit));
    }
    let _lock = lock(path)?;
    // Another process may have built it while this one waited.
    if let Some(hit) = open()? {
        return Ok(Cached::Hit(hit));
    }
    build().map(Cached::Built)
}

fn open_cached(
    path: &Path,
    key: Sha256Digest,
    tokenizer: Sha256Digest,
) -> Result<Option<TokenStore>> {
    if !path.exists() {
        return Ok(None);
    }
    let opened = TokenStore::open(path).and_then(|store| {
        store.expect_tokenizer(tokenizer)?;
        Ok(store)
    });
    match opened {
        Ok(store) if store.source_digest() == Some(key) => Ok(Some(store)),
        Ok(_) => {
            tracing::warn!(
                "{} does not have the content of its name; building it again",
                path.display()
            );
            Ok(None)
        }
        // An unreadable file is not rebuilt: the disk or the permissions are at fault, and a build would fail too.
        Err(error) if error.io_path().is_some() => Err(error),
        Err(error) => {
            tracing::warn!("building again: {error}");
            Ok(None)
        }
    }
}

/// Locks the building of `path` against other processes, until the returned file is dropped.
fn lock(path: &Path) -> Result<Option<File>> {
    let lock_path = path.with_extension("lock");
    if let Some(folder) = lock_path.parent() {
        std::fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
    }
    let file = File::create(&lock_path).map_err(CommonError::io("create", &lock_path))?;
    match file.lock() {
        Ok(()) => {
            remove_leftovers(path);
            Ok(Some(file))
        }
        // Some network file systems have no locks. Two builds may then run at once; each writes a
        // temporary file of its own and renames it, so the result is the same.
        Err(error) => {
            tracing::debug!("no lock on {}: {error}", lock_path.display());
            Ok(None)
        }
    }
}

/// Removes the temporary files that killed builds of `path` left. Only the holder of the lock may call it,
/// since no other process writes then.
fn remove_leftovers(path: &Path) {
    let (start, end) = temp_name(path);
    let Some(entries) = path
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok())
    else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = name.starts_with(&start) && name.ends_with(end);
        // A leftover that cannot be removed only takes space, so it is not an error.
        if ours && let Err(error) = std::fs::remove_file(entry.path()) {
            tracing::debug!("cannot remove {}: {error}", entry.path().display());
        }
    }
}
