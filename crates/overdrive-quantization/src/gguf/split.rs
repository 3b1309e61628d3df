//! Models in several files: the keys `split.no`, `split.count` and `split.tensors.count`, and the file names
//! `NAME-00001-of-00003.gguf`, as llama.cpp's `gguf-split` and the `gguf` package write them.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use overdrive_core::Error;

use super::file::Shard;
use super::header::Parsed;
use super::value::GgufValue;
use crate::Result;

/// The place of a file among those of a split model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Split {
    /// The index of the file, from 0.
    no: u16,
    /// The number of files.
    count: u16,
    /// The number of tensors of all files.
    tensors: u64,
}

impl Split {
    /// Reads the keys; `None` for a model in one file.
    pub(super) fn read(metadata: &BTreeMap<String, GgufValue>) -> Parsed<Option<Split>> {
        if !metadata.contains_key("split.count") {
            return Ok(None);
        }
        let count: u16 = integer(metadata, "split.count")?;
        if count <= 1 {
            return Ok(None);
        }
        let split = Split {
            no: integer(metadata, "split.no")?,
            count,
            tensors: integer(metadata, "split.tensors.count")?,
        };
        if split.no >= count {
            let no = split.no;
            return Err(format!("its `split.no` is {no}; it must be below {count}"));
        }
        Ok(Some(split))
    }

    /// Opens the other files of the model that `given` belongs to, and returns all in their order.
    pub(super) fn open_all(self, given: Shard) -> Result<Vec<Shard>> {
        let paths = self
            .paths(&given.path)
            .map_err(Error::parse("GGUF", &given.path))?;
        let mut given = Some(given);
        let mut shards = Vec::with_capacity(paths.len());
        for (no, path) in (0..).zip(paths) {
            let own = if no == self.no { given.take() } else { None };
            let shard = match own {
                Some(given) => given,
                None => Shard::open(&path)?,
            };
            let expected = Split { no, ..self };
            if shard.split != Some(expected) {
                let reason = self.foreign(no, shard.split);
                return Err(Error::parse("GGUF", &path)(reason).into());
            }
            shards.push(shard);
        }
        self.check_tensors(&shards)?;
        Ok(shards)
    }

    /// Returns the paths of all files, from that of this one.
    fn paths(self, given: &Path) -> Parsed<Vec<PathBuf>> {
        let name = given.file_name().and_then(|name| name.to_str());
        let end = self.end_of_name(self.no);
        let Some(prefix) = name.and_then(|name| name.strip_suffix(&end)) else {
            return Err(format!(
                "it is file {} of {} of a split model, but its name does not end in `{end}`; rename it, so that \
                 the other files can be found",
                self.no + 1,
                self.count
            ));
        };
        let path = |no| given.with_file_name(format!("{prefix}{}", self.end_of_name(no)));
        let paths: Vec<PathBuf> = (0..self.count).map(path).collect();
        let missing = paths.iter().filter(|path| !path.exists());
        let missing: Vec<String> = missing
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect();
        if missing.is_empty() {
            return Ok(paths);
        }
        Err(format!(
            "it is file {} of {} of a split model, but {} in its folder; put all files into one folder",
            self.no + 1,
            self.count,
            match &missing[..] {
                [name] => format!("{name} is missing"),
                names => format!("{} are missing", names.join(", ")),
            }
        ))
    }

    fn end_of_name(self, no: u16) -> String {
        format!("-{:05}-of-{:05}.gguf", u32::from(no) + 1, self.count)
    }

    /// Returns the reason why a file with the keys `found` is not file `no` of this model.
    fn foreign(self, no: u16, found: Option<Split>) -> String {
        let found = match found {
            None => "it has no `split.count`".to_owned(),
            Some(found) => format!(
                "it is file {} of {} of a model with {} tensors",
                found.no + 1,
                found.count,
                found.tensors
            ),
        };
        format!(
            "{found}; by its name it must be file {} of {} of a model with {} tensors",
            no + 1,
            self.count,
            self.tensors
        )
    }

    fn check_tensors(self, shards: &[Shard]) -> Result<()> {
        let mut names = HashSet::new();
        for shard in shards {
            for info in &shard.tensors {
                if !names.insert(info.name.as_str()) {
                    let reason = format!(
                        "another file of the split model also has the tensor `{}`",
                        info.name
                    );
                    return Err(Error::parse("GGUF", &shard.path)(reason).into());
                }
            }
        }
        if names.len() as u64 == self.tensors {
            return Ok(());
        }
        let reason = format!(
            "the {} files of the split model have {} tensors; `split.tensors.count` is {}",
            self.count,
            names.len(),
            self.tensors
        );
        let path = shards.first().map(|shard| shard.path.clone());
        Err(Error::parse("GGUF", path.unwrap_or_default())(reason).into())
    }
}

fn integer<T: TryFrom<i64>>(metadata: &BTreeMap<String, GgufValue>, key: &str) -> Parsed<T> {
    let value = metadata.get(key);
    let integer = value.and_then(GgufValue::as_i64);
    integer
        .and_then(|integer| T::try_from(integer).ok())
        .ok_or_else(|| {
            let found = value.map_or("missing".to_owned(), |value| format!("{value:?}"));
            format!("its `{key}` is {found}; it must be an integer in a split model")
        })
}
