use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_core::files::FileMap;

use super::header::{HeaderReader, Parsed};
use super::split::Split;
use super::tensor::{GgufTensor, Info};
use super::tensor_type::GgufType;
use super::value::GgufValue;
use crate::Result;

/// The alignment of tensors, in bytes, in a file without `general.alignment`.
const ALIGNMENT: u64 = 32;
/// The largest number of dimensions of a tensor, ggml's limit.
const MAX_DIMENSIONS: u32 = 4;

/// A memory-mapped GGUF file, or the files of a split model as one.
///
/// The files must not change while they are mapped ([`FileMap`]).
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    metadata: BTreeMap<String, GgufValue>,
    /// The files, one unless the model is split.
    shards: Vec<Shard>,
}

/// One mapped file.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    map: FileMap,
    metadata: BTreeMap<String, GgufValue>,
    /// The position of the file in a split model.
    pub(super) split: Option<Split>,
    pub(super) tensors: Vec<Info>,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Shard> {
        let map = FileMap::open(path)?;
        let parse = || {
            let (metadata, tensors) = header(&map)?;
            let split = Split::read(&metadata)?;
            Ok((metadata, tensors, split))
        };
        let (metadata, tensors, split) =
            parse().map_err(|reason: String| overdrive_core::Error::parse("GGUF", path)(reason))?;
        Ok(Shard {
            path: path.to_path_buf(),
            map,
            metadata,
            split,
            tensors,
        })
    }

    fn view<'a>(&'a self, info: &'a Info) -> GgufTensor<'a> {
        GgufTensor {
            path: &self.path,
            info,
            shape: &info.shape,
            data: &self.map[info.start..info.end],
        }
    }
}

impl GgufFile {
    /// Maps the file, reads its metadata, and checks that every tensor is within the file; no tensor is read
    /// yet. Versions 2 and 3 in little-endian byte order are supported.
    ///
    /// A model in several files (`NAME-00001-of-00003.gguf`) can be opened by any of them; all must be in the same
    /// folder. Its metadata is that of the first file.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with `Io` if a file cannot be opened or mapped, and with
    /// `Parse` if it is truncated, damaged, of another format or version, or has tensors of a type that this
    /// crate does not read, and for a file of a split model that is missing or belongs to another model.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        let path = path.as_ref();
        let given = Shard::open(path)?;
        let mut shards = match given.split {
            None => vec![given],
            Some(split) => split.open_all(given)?,
        };
        let metadata = shards.first_mut().map(|first| &mut first.metadata);
        Ok(GgufFile {
            path: path.to_path_buf(),
            metadata: metadata.map(std::mem::take).unwrap_or_default(),
            shards,
        })
    }

    /// Returns the path that was passed to `open`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.metadata
    }

    /// Returns the value of `key` in the metadata.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// Returns all tensors, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = GgufTensor<'_>> {
        self.shards
            .iter()
            .flat_map(|shard| shard.tensors.iter().map(|info| shard.view(info)))
    }

    /// Returns the tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<GgufTensor<'_>> {
        self.tensors().find(|tensor| tensor.name() == name)
    }
}

type Header = (BTreeMap<String, GgufValue>, Vec<Info>);

fn header(bytes: &[u8]) -> Parsed<Header> {
    let mut reader = HeaderReader::new(bytes);
    let magic = reader.u32()?.to_le_bytes();
    if &magic != b"GGUF" {
        return Err(match bytes.starts_with(b"version https://git-lfs") {
            true => "it is a Git LFS pointer; download the file itself".to_owned(),
            false => "it does not begin with `GGUF`".to_owned(),
        });
    }
    match reader.u32()? {
        2 | 3 => {}
        // A small version with its bytes swapped is a big-endian file.
        version if version.swap_bytes() <= 3 => {
            return Err("it is big-endian; convert it to little-endian byte order".to_owned());
        }
        version => {
            return Err(format!(
                "its version is {version}; it must be 2 or 3; convert it with llama.cpp's `gguf` tools"
            ));
        }
    }
    let (tensors, values) = (reader.u64()?, reader.u64()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..values {
        let key = reader.string()?;
        let kind = reader.u32()?;
        let value = reader
            .value(kind)
            .map_err(|reason| format!("in the value of `{key}`: {reason}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("it has two values of `{key}`"));
        }
    }
    // Not allocated in advance: a damaged file may have any count.
    let mut infos: Vec<Info> = Vec::new();
    for _ in 0..tensors {
        infos.push(info(&mut reader)?);
    }
    // Sorting makes equal names neighbours.
    let mut names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("it has two tensors `{}`", twice[0]));
    }
    locate(&mut infos, &metadata, reader.position(), bytes.len())?;
    Ok((metadata, infos))
}

fn info(reader: &mut HeaderReader<'_>) -> Parsed<Info> {
    let name = reader.string()?;
    let wrong = |what: String| Err(format!("the tensor `{name}` {what}"));
    let dimensions = reader.u32()?;
    if dimensions > MAX_DIMENSIONS {
        return wrong(format!(
            "has {dimensions} dimensions; it must have at most {MAX_DIMENSIONS}"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(reader.u64()?);
    }
    let id = reader.u32()?;
    let kind = match GgufType::from_id(id) {
        Ok(kind) => kind,
        Err(name) => {
            return wrong(format!(
                "is of {name}, which is not supported; use one of {}",
                GgufType::names(|_| true)
            ));
        }
    };
    let offset = reader.u64()?;
    let elements = shape
        .iter()
        .try_fold(1u64, |product, &n| product.checked_mul(n));
    let elements = elements.filter(|&count| i64::try_from(count).is_ok());
    let Some(elements) = elements else {
        return wrong(format!("has the impossible shape {shape:?}"));
    };
    let (block, bytes) = (kind.block_size() as u64, kind.block_bytes() as u64);
    let width = shape.first().copied().unwrap_or(1);
    if !width.is_multiple_of(block) {
        return wrong(format!(
            "has rows of {width} elements; they must be a multiple of {block}, the block size of {kind}"
        ));
    }
    let Some(bytes) = (elements / block).checked_mul(bytes) else {
        return wrong(format!("has the impossible shape {shape:?}"));
    };
    // The product of the dimensions of an empty tensor does not bound the others.
    if shape.iter().any(|&n| i64::try_from(n).is_err()) {
        return wrong(format!("has the impossible shape {shape:?}"));
    }
    Ok(Info {
        shape: shape.iter().rev().map(|&n| n.cast_signed()).collect(),
        name,
        kind,
        offset,
        bytes,
        start: 0,
        end: 0,
    })
}

/// Computes the byte range of each tensor, after a header of `header` bytes in a file of `length`.
fn locate(
    infos: &mut [Info],
    metadata: &BTreeMap<String, GgufValue>,
    header: usize,
    length: usize,
) -> Parsed<()> {
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => match value.as_i64().map(i64::cast_unsigned) {
            // The bound keeps the sum with the header from overflowing.
            Some(given) if given.is_power_of_two() && given <= 1 << 30 => given,
            _ => return Err("its `general.alignment` is not a power of two".to_owned()),
        },
    };
    let data = (header as u64).next_multiple_of(alignment);
    for info in infos {
        if !info.offset.is_multiple_of(alignment) {
            return Err(format!(
                "the tensor `{}` begins at {}, which is not a multiple of the alignment, {alignment}",
                info.name, info.offset
            ));
        }
        let start = data.checked_add(info.offset);
        let end = start.and_then(|start| start.checked_add(info.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= length as u64 => {
                // Both are at most the length of the file, which is a `usize`.
                (info.start, info.end) = (start as usize, end as usize);
            }
            (Some(start), _) if info.bytes == 0 && start >= length as u64 => {
                // An empty tensor at the end: writers do not pad after the last one.
                (info.start, info.end) = (length, length);
            }
            _ => {
                return Err(format!(
                    "it is truncated: it has {length} bytes, and the tensor `{}` of {} bytes begins at {}",
                    info.name,
                    info.bytes,
                    start.map_or("an offset beyond 2^64".to_owned(), |start| start
                        .to_string())
                ));
            }
        }
    }
    Ok(())
}
