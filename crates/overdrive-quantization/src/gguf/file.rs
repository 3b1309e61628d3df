use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::cursor::Cursor;
use super::mapped::map;
use super::tensor::{GgufTensor, Info};
use super::tensor_type::GgufType;
use super::value::GgufValue;
use crate::{Error, Result};

/// How tensors are aligned in a file that does not say.
const ALIGNMENT: u64 = 32;
/// The most dimensions of a tensor; ggml's limit is 4.
const MAX_DIMENSIONS: u32 = 4;

/// A GGUF file in memory, read by the system as its pages are touched.
///
/// The file must not be cut short while it is mapped: touching the lost pages would end the process.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, GgufValue>,
    tensors: Vec<Info>,
}

impl GgufFile {
    /// Maps the file, reads its metadata, and checks that every tensor lies within it; no tensor is read
    /// yet. Versions 2 and 3, little endian.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or mapped, [`Error::BadGguf`] when it is cut short,
    /// damaged, of another format or version, or has tensors of a type that this crate does not read.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        let path = path.as_ref();
        let map = map(path)?;
        let (metadata, tensors) = header(&map).map_err(|reason| Error::BadGguf {
            path: path.to_path_buf(),
            reason,
        })?;
        Ok(GgufFile {
            path: path.to_path_buf(),
            map,
            metadata,
            tensors,
        })
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of its metadata.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.metadata
    }

    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// Every tensor, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = GgufTensor<'_>> {
        self.tensors.iter().map(|info| self.view(info))
    }

    /// The tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<GgufTensor<'_>> {
        let info = self.tensors.iter().find(|info| info.name == name)?;
        Some(self.view(info))
    }

    fn view<'a>(&'a self, info: &'a Info) -> GgufTensor<'a> {
        GgufTensor {
            path: &self.path,
            info,
            data: &self.map[info.start..info.end],
        }
    }
}

/// Errors are sentences for [`Error::BadGguf`].
type Read<T> = std::result::Result<T, String>;
type Header = (BTreeMap<String, GgufValue>, Vec<Info>);

fn header(bytes: &[u8]) -> Read<Header> {
    let mut cursor = Cursor::new(bytes);
    let magic = cursor.u32()?.to_le_bytes();
    if &magic != b"GGUF" {
        return Err(match bytes.starts_with(b"version https://git-lfs") {
            true => "it is a Git LFS pointer and not the file itself".to_owned(),
            false => "it does not begin with `GGUF`".to_owned(),
        });
    }
    match cursor.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => {
            return Err(
                "it is big-endian: write it with little-endian numbers, as most are".to_owned(),
            );
        }
        version => {
            return Err(format!(
                "its version is {version}: expected 2 or 3; llama.cpp's `gguf` tools convert it"
            ));
        }
    }
    let (tensors, values) = (cursor.u64()?, cursor.u64()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..values {
        let key = cursor.string()?;
        let kind = cursor.u32()?;
        let value = cursor
            .value(kind)
            .map_err(|reason| format!("in the value of `{key}`: {reason}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("it has two values of `{key}`"));
        }
    }
    let mut infos: Vec<Info> = Vec::new();
    for _ in 0..tensors {
        infos.push(info(&mut cursor)?);
    }
    let mut names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("it has two tensors `{}`", twice[0]));
    }
    place(&mut infos, &metadata, cursor.place(), bytes.len())?;
    Ok((metadata, infos))
}

fn info(cursor: &mut Cursor<'_>) -> Read<Info> {
    let name = cursor.string()?;
    let wrong = |what: String| Err(format!("the tensor `{name}` {what}"));
    let dimensions = cursor.u32()?;
    if dimensions > MAX_DIMENSIONS {
        return wrong(format!(
            "has {dimensions} dimensions: expected at most {MAX_DIMENSIONS}"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(cursor.u64()?);
    }
    let id = cursor.u32()?;
    let kind = match GgufType::from_id(id) {
        Ok(kind) => kind,
        Err(name) => {
            return wrong(format!(
                "is of {name}, which is not read here; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and \
                 Q2_K to Q6_K are"
            ));
        }
    };
    let offset = cursor.u64()?;
    let numbers = shape
        .iter()
        .try_fold(1u64, |product, &n| product.checked_mul(n));
    let numbers = numbers.filter(|&count| i64::try_from(count).is_ok());
    let Some(numbers) = numbers else {
        return wrong(format!("has the impossible shape {shape:?}"));
    };
    let (block, bytes) = (kind.block_size() as u64, kind.block_bytes() as u64);
    let width = shape.first().copied().unwrap_or(1);
    if !width.is_multiple_of(block) {
        return wrong(format!(
            "has rows of {width} numbers, and blocks of {kind} have {block}"
        ));
    }
    let Some(bytes) = (numbers / block).checked_mul(bytes) else {
        return wrong(format!("has the impossible shape {shape:?}"));
    };
    // A dimension of an empty tensor may be anything.
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

/// Finds where the tensors lie, after a header of `header` bytes in a file of `length`.
fn place(
    infos: &mut [Info],
    metadata: &BTreeMap<String, GgufValue>,
    header: usize,
    length: usize,
) -> Read<()> {
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => match value.as_i64().map(i64::cast_unsigned) {
            Some(given) if given.is_power_of_two() && given <= 1 << 30 => given,
            _ => return Err("its `general.alignment` is not a power of two".to_owned()),
        },
    };
    let data = (header as u64).next_multiple_of(alignment);
    for info in infos {
        if !info.offset.is_multiple_of(alignment) {
            return Err(format!(
                "the tensor `{}` begins at {}, which is no multiple of the alignment, {alignment}",
                info.name, info.offset
            ));
        }
        let start = data.checked_add(info.offset);
        let end = start.and_then(|start| start.checked_add(info.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= length as u64 => {
                // Both are at most the length of the file, which is in memory.
                (info.start, info.end) = (start as usize, end as usize);
            }
            (Some(start), _) if info.bytes == 0 && start >= length as u64 => {
                // An empty tensor at the end, after which nobody has filled up.
                (info.start, info.end) = (length, length);
            }
            _ => {
                return Err(format!(
                    "it is cut short: {length} bytes, and the tensor `{}` of {} bytes is to begin at {}",
                    info.name,
                    info.bytes,
                    start.map_or("none".to_owned(), |start| start.to_string())
                ));
            }
        }
    }
    Ok(())
}
