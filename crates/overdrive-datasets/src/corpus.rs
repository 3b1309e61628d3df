//! The files of a corpus.

use std::collections::HashSet;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use overdrive_core::Error as CommonError;

use crate::digest::FieldHasher;
use crate::file_state::FileState;
use crate::index::text_start;
use crate::range_source::{DataReader, is_url, not_opened, read_error, registered_source};
use crate::records::files_in;
use crate::{Error, Result, Sha256Digest};

/// The format of a text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TextFormat {
    /// The whole file is one document.
    Plain,
    /// JSON Lines: each line is an object, and one of its fields is a document.
    JsonLines,
}

impl TextFormat {
    /// Returns the format for the extension; for an unsupported one, its name and the remedy.
    fn of(path: &Path) -> std::result::Result<Self, (&'static str, &'static str)> {
        let parquet =
            "convert it to JSON Lines (pandas: df.to_json(path, orient=\"records\", lines=True))";
        let unpack = "unpack it first";
        match extension_of(path).as_str() {
            "jsonl" | "ndjson" => Ok(Self::JsonLines),
            "parquet" => Err(("Parquet", parquet)),
            "arrow" | "feather" | "ipc" => Err(("Arrow", parquet)),
            "gz" | "zst" | "bz2" | "xz" | "zip" | "tar" | "tgz" => {
                Err(("a compressed file", unpack))
            }
            _ => Ok(Self::Plain),
        }
    }
}

/// One file of a corpus.
#[derive(Debug, Clone)]
pub struct CorpusFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The name relative to the folder that was given, with `/` between the components.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The format.
    pub format: TextFormat,
    /// The SHA-256 of the content.
    pub digest: Sha256Digest,
    /// The state of the file before it was hashed.
    #[cfg_attr(
        not(feature = "tokenizers"),
        allow(
            dead_code,
            reason = "the check is of a corpus that is read by a tokenizer"
        )
    )]
    state: FileState,
}

/// The selection of files of a [`Corpus`].
#[derive(Debug, Clone)]
pub struct CorpusOptions {
    /// The extensions of the files that are taken from folders (without the dot, in any case). Default:
    /// `None`, all text files.
    pub extensions: Option<Vec<String>>,
    /// The length of the largest file that is taken, in bytes. Default: `None`, no bound.
    pub max_file_bytes: Option<u64>,
    /// The approximate size of the corpus in bytes; it exceeds it by at most one file. The files are taken
    /// in the order of a hash of their names, so they are a mixture. Default: `None`, all files.
    pub max_bytes: Option<u64>,
    /// If `true`, files with the same content as an earlier one are left out. Default: `false`.
    pub skip_duplicates: bool,
    /// The field of a JSON Lines object that holds the document. Default: `text`.
    pub text_field: String,
}

impl Default for CorpusOptions {
    fn default() -> Self {
        Self {
            extensions: None,
            max_file_bytes: None,
            max_bytes: None,
            skip_duplicates: false,
            text_field: "text".to_owned(),
        }
    }
}

/// The numbers of files that were left out, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// The number of files that are not valid UTF-8.
    pub not_utf8: usize,
    /// The number of files in folders whose format is not supported; naming such a file is an error.
    pub unsupported: usize,
    /// The number of files larger than `max_file_bytes`.
    pub too_large: usize,
    /// The number of files with the same content as another.
    pub duplicates: usize,
    /// The number of empty files.
    pub empty: usize,
    /// The number of JSON Lines files in folders whose first record has no field `text_field`; naming such a
    /// file is an error.
    pub without_field: usize,
    /// The first files that are not UTF-8, not supported, or without the field.
    pub examples: Vec<PathBuf>,
}

impl Skipped {
    /// The number of files that are kept as examples: enough to recognize a pattern in a warning.
    const EXAMPLES: usize = 5;

    /// Returns the number of files that were left out for any reason.
    pub fn total(&self) -> usize {
        self.unreadable() + self.too_large + self.duplicates + self.empty
    }

    /// Returns the number of files that no option asked to leave out.
    fn unreadable(&self) -> usize {
        self.not_utf8 + self.unsupported + self.without_field
    }

    fn example(&mut self, path: &Path) {
        if self.examples.len() < Self::EXAMPLES {
            self.examples.push(path.to_owned());
        }
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.not_utf8, "not UTF-8"),
            (self.unsupported, "of an unsupported format"),
            (self.without_field, "JSON Lines without the text field"),
            (self.too_large, "too large"),
            (self.duplicates, "duplicates"),
            (self.empty, "empty"),
        ];
        let mut separator = "";
        for (count, reason) in counts.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{separator}{count} {reason}")?;
            separator = ", ";
        }
        for (index, path) in self.examples.iter().enumerate() {
            let before = if index == 0 { " (such as " } else { ", " };
            write!(f, "{before}{}", path.display())?;
        }
        if self.examples.is_empty() {
            Ok(())
        } else {
            write!(f, ")")
        }
    }
}

/// A list of text files in a fixed order, each identified by the hash of its content. A byte order mark at the
/// beginning of a file is not part of its text.
///
/// Making a corpus reads each file once, on all cores, to hash it and to leave out files that are not UTF-8;
/// afterwards the texts are streamed and never held in memory together.
#[derive(Debug, Clone)]
pub struct Corpus {
    files: Vec<CorpusFile>,
    skipped: Skipped,
    text_field: String,
}

/// A file that has been found and not read yet.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) format: TextFormat,
    /// If `true`, the file itself was given, not a folder that contains it.
    pub(crate) is_named: bool,
}

impl Corpus {
    /// Collects the files among `paths`, and those in the folders among them and in their subfolders.
    ///
    /// Folders are read in the order of names; hidden files (`.name`) in them are left out, and links are followed. A
    /// file that is reached twice, also by another path or a link, is taken once, under its first name. Files in
    /// folders that cannot be read as text are left out, with a warning: other formats, and JSON Lines whose first
    /// record has no field `text_field`.
    ///
    /// # Errors
    /// Returns an error if a path does not exist, cannot be read or names a file of an unsupported format, or if
    /// no file remains.
    pub fn from_paths<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &CorpusOptions,
    ) -> Result<Self> {
        let mut skipped = Skipped::default();
        let mut candidates = Vec::new();
        let mut searched = Vec::new();
        for root in paths {
            let root = root.as_ref();
            searched.push(root.display().to_string());
            find_files(root, options, &mut skipped, &mut candidates)?;
        }
        let hint = "give other files or folders, or other extensions";
        Self::from_candidates(candidates, skipped, options, &searched.join(", "), hint)
    }

    /// Returns the files, in the order in which they are read.
    pub fn files(&self) -> &[CorpusFile] {
        &self.files
    }

    /// Returns the sum of the files' lengths.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the numbers of files that were left out.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// Returns the field of JSON Lines that holds the text.
    pub fn text_field(&self) -> &str {
        &self.text_field
    }

    /// Returns a hash of everything that decides which text is read: names, lengths, contents, formats and order.
    /// The folder of the files does not matter.
    pub fn digest(&self) -> Sha256Digest {
        let mut hasher = FieldHasher::default()
            .field(b"corpus 1")
            .field(self.text_field.as_bytes());
        // The digest is used as a key across machines, so it must not depend on paths.
        for file in &self.files {
            hasher.add(file.name.as_bytes());
            hasher.add(&file.bytes.to_le_bytes());
            hasher.add(&file.digest.0);
            hasher.add(&[file.format as u8]);
        }
        hasher.finish()
    }

    /// Checks that no file has changed since it was listed. Callers that read only samples of the files need it;
    /// other callers compare the digest.
    ///
    /// # Errors
    /// [`Error::FileChanged`], or another error if a file is not there any more.
    pub fn check_unchanged(&self) -> Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|file| file.state.check(&file.path))
    }

    pub(crate) fn from_candidates(
        candidates: Vec<Candidate>,
        mut skipped: Skipped,
        options: &CorpusOptions,
        searched: &str,
        hint: &'static str,
    ) -> Result<Self> {
        let mut reached = HashSet::new();
        let mut files = Vec::with_capacity(candidates.len());
        for file in candidates {
            // One file has many paths: `a.txt`, `./a.txt`, a link to it.
            let path = &file.path;
            let key = match registered_source(path) {
                Some(_) => path.clone(),
                None => path.canonicalize().map_err(CommonError::io("read", path))?,
            };
            if reached.insert(key) {
                files.push(file);
            }
        }
        let candidates = files;
        let files = match options.max_bytes {
            None => read_all(&candidates, options, &mut skipped)?,
            Some(max_bytes) => {
                let order = candidates.iter().map(|file| file.name.clone()).enumerate();
                let mut order: Vec<_> = order
                    .map(|(at, name)| (Sha256Digest::of(name.as_bytes()), at))
                    .collect();
                // The order of the hashes is random but the same everywhere, and a larger `max_bytes` only adds files.
                order.sort_unstable();
                let mixed: Vec<_> = order
                    .iter()
                    .map(|(_, at)| (*at, candidates[*at].clone()))
                    .collect();
                read_up_to(max_bytes, &mixed, options, &mut skipped)?
            }
        };
        if files.is_empty() {
            let skipped = match skipped.total() {
                0 => String::new(),
                _ => format!("left out: {skipped}; "),
            };
            return Err(Error::NoData {
                searched: searched.to_owned(),
                problem: format!("{skipped}{hint}"),
            });
        }
        if skipped.unreadable() > 0 {
            tracing::warn!("left out of the corpus: {skipped}");
        }
        Ok(Self {
            files,
            skipped,
            text_field: options.text_field.clone(),
        })
    }
}

/// Adds the file `root`, or the files in the folder `root`, to `found`.
pub(crate) fn find_files(
    root: &Path,
    options: &CorpusOptions,
    skipped: &mut Skipped,
    found: &mut Vec<Candidate>,
) -> Result<()> {
    let source = registered_source(root);
    if source.is_none() && is_url(root) {
        return Err(not_opened(root));
    }
    let named = match &source {
        Some(source) => Some(source.len()),
        None => {
            let metadata = std::fs::metadata(root).map_err(CommonError::io("read", root))?;
            metadata.is_file().then_some(metadata.len())
        }
    };
    if let Some(bytes) = named {
        let format = TextFormat::of(root).map_err(|(format, hint)| {
            Error::invalid_file(root, format!("{format} is not supported here; {hint}"))
        })?;
        let name = root
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        found.push(Candidate {
            path: root.to_owned(),
            name,
            bytes,
            format,
            is_named: true,
        });
        return Ok(());
    }
    let extensions = options.extensions.iter().flatten();
    let extensions: Vec<&str> = extensions
        .map(|extension| extension.trim_start_matches('.'))
        .collect();
    for path in files_in(root, &extensions)? {
        let Ok(format) = TextFormat::of(&path) else {
            skipped.unsupported += 1;
            skipped.example(&path);
            continue;
        };
        let metadata = std::fs::metadata(&path).map_err(CommonError::io("read", &path))?;
        found.push(Candidate {
            name: relative_name(&path, root),
            path,
            bytes: metadata.len(),
            format,
            is_named: false,
        });
    }
    Ok(())
}

fn extension_of(path: &Path) -> String {
    path.extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase()
}

fn relative_name(path: &Path, root: &Path) -> String {
    let relative = path.strip_prefix(root).unwrap_or(path);
    let parts: Vec<_> = relative
        .components()
        .map(|part| part.as_os_str().to_string_lossy())
        .collect();
    parts.join("/")
}

/// The result of reading a file.
enum Content {
    Text {
        bytes: u64,
        digest: Sha256Digest,
        state: FileState,
    },
    NotUtf8,
    Empty,
    TooLarge,
    WithoutField,
}

/// Filters files by their contents, in order: a duplicate repeats an earlier file.
struct FileFilter<'a> {
    options: &'a CorpusOptions,
    skipped: &'a mut Skipped,
    seen: HashSet<Sha256Digest>,
}

impl FileFilter<'_> {
    fn accept(&mut self, file: &Candidate, content: Content) -> Option<CorpusFile> {
        let (bytes, digest, state) = match content {
            Content::Text {
                bytes,
                digest,
                state,
            } => (bytes, digest, state),
            Content::NotUtf8 => {
                self.skipped.not_utf8 += 1;
                self.skipped.example(&file.path);
                return None;
            }
            Content::Empty => {
                self.skipped.empty += 1;
                return None;
            }
            Content::TooLarge => {
                self.skipped.too_large += 1;
                return None;
            }
            Content::WithoutField => {
                self.skipped.without_field += 1;
                self.skipped.example(&file.path);
                return None;
            }
        };
        if self.options.skip_duplicates && !self.seen.insert(digest) {
            self.skipped.duplicates += 1;
            return None;
        }
        let Candidate {
            path, name, format, ..
        } = file.clone();
        Some(CorpusFile {
            path,
            name,
            bytes,
            format,
            digest,
            state,
        })
    }
}

fn read_all(
    candidates: &[Candidate],
    options: &CorpusOptions,
    skipped: &mut Skipped,
) -> Result<Vec<CorpusFile>> {
    let contents = candidates
        .par_iter()
        .map(|file| read_content(file, options));
    let contents: Vec<Content> = contents.collect::<Result<_>>()?;
    let mut filter = FileFilter {
        options,
        skipped,
        seen: HashSet::new(),
    };
    let files = candidates.iter().zip(contents);
    Ok(files
        .filter_map(|(file, content)| filter.accept(file, content))
        .collect())
}

/// Returns the first files of `mixed` with about `max_bytes` together, in their original order.
fn read_up_to(
    max_bytes: u64,
    mixed: &[(usize, Candidate)],
    options: &CorpusOptions,
    skipped: &mut Skipped,
) -> Result<Vec<CorpusFile>> {
    // Files are read in groups, in parallel; at most one group is read unnecessarily.
    const GROUP: usize = 512;
    let mut filter = FileFilter {
        options,
        skipped,
        seen: HashSet::new(),
    };
    let mut taken = Vec::new();
    let mut total = 0;
    'groups: for group in mixed.chunks(GROUP) {
        let contents = group
            .par_iter()
            .map(|(_, file)| read_content(file, options));
        let contents: Vec<Content> = contents.collect::<Result<_>>()?;
        for ((at, file), content) in group.iter().zip(contents) {
            if total >= max_bytes {
                break 'groups;
            }
            if let Some(file) = filter.accept(file, content) {
                total += file.bytes;
                taken.push((*at, file));
            }
        }
    }
    taken.sort_unstable_by_key(|(at, _)| *at);
    Ok(taken.into_iter().map(|(_, file)| file).collect())
}

/// Hashes a file and validates its UTF-8, block by block.
fn read_content(candidate: &Candidate, options: &CorpusOptions) -> Result<Content> {
    const BLOCK_BYTES: usize = 1 << 18;
    if options
        .max_file_bytes
        .is_some_and(|max| candidate.bytes > max)
    {
        return Ok(Content::TooLarge);
    }
    let path = &candidate.path;
    let mut file = DataReader::open(path)?;
    if !candidate.is_named
        && candidate.format == TextFormat::JsonLines
        && !first_record_has_field(path, &mut file, &options.text_field)?
    {
        return Ok(Content::WithoutField);
    }
    let state = match &file {
        // That of the open file: another may have its name by now.
        DataReader::File(file) => {
            FileState::of(&file.metadata().map_err(CommonError::io("read", path))?)
        }
        DataReader::Remote(_) => FileState::read(path)?,
    };
    // One byte more than the listed length, so that growth of an empty file is detected too.
    let mut block = vec![0; BLOCK_BYTES.min(candidate.bytes as usize + 1)];
    let mut hasher = Sha256::new();
    // The length is that of the bytes read: the file may have grown since it was listed.
    let mut bytes = 0;
    // The number of bytes at the start of the block that begin an incomplete character of the last block.
    let mut incomplete = 0;
    loop {
        if incomplete == block.len() {
            // A character has at most four bytes, so the incomplete one needs no more room.
            block.resize(block.len() + 4, 0);
        }
        let read = match file.read(&mut block[incomplete..]) {
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(read_error("read", path)(error)),
        };
        if read == 0 {
            break;
        }
        hasher.update(&block[incomplete..incomplete + read]);
        bytes += read as u64;
        let end = incomplete + read;
        incomplete = match std::str::from_utf8(&block[..end]) {
            Ok(_) => 0,
            // The block ends within a character, whose rest comes with the next block.
            Err(error) if error.error_len().is_none() => {
                block.copy_within(error.valid_up_to()..end, 0);
                end - error.valid_up_to()
            }
            Err(_) => return Ok(Content::NotUtf8),
        };
    }
    Ok(match bytes {
        0 => Content::Empty,
        _ if incomplete > 0 => Content::NotUtf8,
        _ => Content::Text {
            bytes,
            digest: Sha256Digest::finish(hasher),
            state,
        },
    })
}

/// Returns `false` if the first record of the JSON Lines `file` is valid JSON but has no field `field`, and leaves
/// the file at its start. A folder of sources may hold records for other purposes; a file that is damaged is not
/// one of them.
fn first_record_has_field(path: &Path, file: &mut DataReader, field: &str) -> Result<bool> {
    let io = |error| read_error("read", path)(error);
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while line.trim_ascii().is_empty() {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(io)? == 0 {
            break;
        }
        line.drain(..text_start(&line));
    }
    reader.rewind().map_err(io)?;
    Ok(match serde_json::from_slice(&line) {
        Ok(serde_json::Value::Object(record)) => record.contains_key(field),
        Ok(_) => false,
        Err(_) => true,
    })
}
