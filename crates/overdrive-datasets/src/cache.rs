//! The cache of token stores, and the lock under which cached files are built.

use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
#[cfg(feature = "tokenizers")]
use tokenizers::Tokenizer;

use overdrive_core::Error as CommonError;
use overdrive_core::files::{self, FileLock, FileMap};

#[cfg(feature = "tokenizers")]
use crate::build_tokens::{
    BuildOptions, BuildReport, DatasetDocuments, DocumentSource, build_with_source,
};
#[cfg(feature = "tokenizers")]
use crate::digest::FieldHasher;
use crate::file_state::FileState;
#[cfg(feature = "tokenizers")]
use crate::{Corpus, Dataset, FORMAT_VERSION, TokenStore, tokenizer_digest};
use crate::{Error, Result, Sha256Digest};

/// A token store from the cache.
#[derive(Debug)]
#[cfg(feature = "tokenizers")]
#[non_exhaustive]
pub struct BuiltTokens {
    /// The opened store.
    pub store: TokenStore,
    /// The report of the build; `None` if the store was in the cache.
    pub report: Option<BuildReport>,
}

#[cfg(feature = "tokenizers")]
impl BuiltTokens {
    /// Returns `true` if the store was in the cache.
    pub fn was_cached(&self) -> bool {
        self.report.is_none()
    }
}

/// Tokenizes a corpus, or opens the store that an earlier call made of it.
///
/// The store's name in `cache_dir` is a hash of the files' names and contents, the tokenizer, the options and
/// the format version: if any of them changes, a new store is built, and no stale one is opened. A store that does not
/// have its checksums is replaced. Several processes may call it at once: on a file system with locks the others wait
/// for the first, and log a warning that names it after two seconds; otherwise each builds the same file. The cache is
/// never cleaned; the folder or files in it may be deleted at any time.
///
/// # Errors
/// Those of [`crate::build_tokens_to`], and [`Error::CacheFolder`] if this process may not write to the cache folder.
#[cfg(feature = "tokenizers")]
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
/// # let tokenizer = train_bpe(corpus.sample(16 << 20), &BpeOptions { vocab_size: 270, ..Default::default() })?.tokenizer;
/// let pairs = JsonRecords::<serde_json::Value>::open([&path], &JsonOptions::default())?;
/// let input = pairs.records().fingerprint()?;
/// let key = MapCache { input, name: "question and answer", version: 1 }.fingerprint();
/// let texts = pairs.map(|pair| Ok(format!("{} {}", pair["q"], pair["a"])));
/// let built = build_dataset_tokens(&texts, key, &tokenizer, &BuildOptions::default(), cache_dir)?;
/// assert_eq!(built.store.document_count(), 50);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// Those of [`crate::build_dataset_tokens_to`], and [`Error::CacheFolder`] if this process may not write to the cache
/// folder.
#[cfg(feature = "tokenizers")]
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
    // The prefix distinguishes these keys from those of a corpus, whose digest has another meaning.
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

#[cfg(feature = "tokenizers")]
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

/// Returns the folder `overdrive/<name>` in `$XDG_CACHE_HOME`, or in the platform's cache folder (`~/.cache`; macOS:
/// `~/Library/Caches`). Token stores and trained tokenizers are in `tokens`.
///
/// # Errors
/// [`Error::NoCacheFolder`] if the environment names no such folder.
pub fn cache_dir(name: &str) -> Result<PathBuf> {
    let in_home = match cfg!(target_os = "macos") {
        true => "Library/Caches",
        false => ".cache",
    };
    // The XDG specification requires that a relative path, such as an empty one, is ignored.
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| Some(std::env::home_dir()?.join(in_home)))
        .ok_or(Error::NoCacheFolder {
            tried: "XDG_CACHE_HOME and HOME",
        })?;
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
    let cached = || {
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
    };
    cached().map_err(|error: Error| error.of_cache(files::folder_of(path)))
}

/// Renames a complete file to its name in the cache and writes its digest beside it, for formats that contain no
/// digest.
pub(crate) fn commit_with_digest(file: NamedTempFile, path: &Path) -> Result<()> {
    let digest = Sha256Digest::of_blocks(&FileMap::of(file.as_file(), path)?);
    files::commit(file, path)?;
    write_digest(path, &digest.to_string(), FileState::read(path)?)
}

/// Writes the digest of a file of the cache, and the state that the file had when it had this digest.
fn write_digest(path: &Path, digest: &str, state: FileState) -> Result<()> {
    let content = format!("{digest}\n{state}\n");
    Ok(files::write(digest_path(path), content.as_bytes())?)
}

/// Returns `true` if the file is in the cache with the content that [`commit_with_digest`] has written. The content is
/// read only if the length or a time of the file is another one.
pub(crate) fn is_intact(path: &Path) -> Result<bool> {
    if !path.exists() {
        return Ok(false);
    }
    let digest_path = digest_path(path);
    let stored = match std::fs::read(&digest_path) {
        Ok(stored) => stored,
        // A build that was killed before it wrote the digest leaves none.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(CommonError::io("read", digest_path)(error).into()),
    };
    let stored = String::from_utf8_lossy(&stored);
    let (digest, known) = stored.split_once('\n').unwrap_or((&stored, ""));
    let state = FileState::read(path)?;
    if known.trim_ascii() == state.to_string() {
        return Ok(true);
    }
    let found = Sha256Digest::of_blocks(&FileMap::open(path)?).to_string();
    let is_intact = digest == found;
    if is_intact {
        // A copy of the cache has other times. If they cannot be written, the next call reads the content again.
        let _ = write_digest(path, digest, state);
    } else {
        tracing::warn!(
            "{} does not have its checksum; making it again",
            path.display()
        );
    }
    Ok(is_intact)
}

/// Returns the path of the digest of a file of the cache.
fn digest_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".digest");
    name.into()
}

#[cfg(feature = "tokenizers")]
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
        // Without this check, training on corrupted tokens would go unnoticed.
        store.verify()?;
        Ok(store)
    });
    match opened {
        Ok(store) if store.source_digest() == Some(key) => Ok(Some(store)),
        Ok(_) => {
            tracing::warn!(
                "{} does not match its name; building it again",
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

/// Locks the building of `path` against other processes, until the returned lock is dropped.
fn lock(path: &Path) -> Result<FileLock> {
    let lock_path = path.with_extension("lock");
    let folder = files::folder_of(path);
    std::fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let lock = FileLock::acquire(&lock_path, &format!("building {name}"), |waiting| {
        tracing::warn!("{waiting}");
    })?;
    if let Some(error) = lock.unsupported() {
        // Two builds may then run at once; each writes an unfinished file of its own and renames it, so the
        // result is the same.
        tracing::debug!("no lock on {}: {error}", lock_path.display());
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_of_a_cached_file_is_read_only_after_its_length_or_a_time_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cached");
        let commit = |content: &[u8]| {
            let file = files::unfinished(&path).unwrap();
            std::fs::write(file.path(), content).unwrap();
            commit_with_digest(file, &path).unwrap();
        };
        commit(b"the content");
        assert!(is_intact(&path).unwrap());
        // Another digest in its place shows whether the content is read.
        let written = std::fs::read_to_string(digest_path(&path)).unwrap();
        let other = Sha256Digest::of_blocks(b"other").to_string();
        let (digest, state) = written.split_once('\n').unwrap();
        std::fs::write(digest_path(&path), format!("{other}\n{state}")).unwrap();
        assert!(is_intact(&path).unwrap());
        let touch = || {
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH)
                .unwrap();
        };
        touch();
        assert!(!is_intact(&path).unwrap());
        // With the right digest, the new times are those of the content from then on.
        std::fs::write(digest_path(&path), format!("{digest}\n")).unwrap();
        assert!(is_intact(&path).unwrap());
        assert_ne!(
            std::fs::read_to_string(digest_path(&path)).unwrap(),
            written
        );
        std::fs::write(&path, b"THE CONTENT").unwrap();
        touch();
        assert!(!is_intact(&path).unwrap());
        std::fs::remove_file(digest_path(&path)).unwrap();
        assert!(!is_intact(&path).unwrap());
    }
}
