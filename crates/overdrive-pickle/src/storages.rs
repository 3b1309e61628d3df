//! The offsets of the pickle and the storages in a file.

use std::collections::HashMap;
use std::io::Cursor;
use std::ops::Range;

use zip::{CompressionMethod, ZipArchive};

use crate::error::{Checked, bad};
use crate::machine::{Machine, Value, Values};
use crate::reader::Reader;

/// The longest pickle that is read, in bytes; a large model has a few megabytes.
const MAX_PICKLE: usize = 64 << 20;
/// The pickled magic number of files from before PyTorch 1.6.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const OLD_VERSION: i128 = 1001;
const ZIP: &[u8] = b"PK\x03\x04";
const GIT_LFS_POINTER: &[u8] = b"version https://git-lfs";

/// The values of a file, and the ranges of its storages by their keys.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) values: Values,
    pub(crate) storages: HashMap<String, Range<usize>>,
}

/// Reads the values of a file.
pub(crate) fn contents(bytes: &[u8]) -> Checked<Contents> {
    if bytes.starts_with(GIT_LFS_POINTER) {
        return bad("it is a Git LFS pointer and not the file itself");
    }
    match bytes.starts_with(ZIP) {
        true => of_archive(bytes),
        false => of_old_file(bytes),
    }
}

/// Reads a zip archive of PyTorch 1.6 or later: `NAME/data.pkl`, and storages in `NAME/data/KEY`.
fn of_archive(bytes: &[u8]) -> Checked<Contents> {
    let mut archive = match ZipArchive::new(Cursor::new(bytes)) {
        Ok(archive) => archive,
        Err(error) => return bad(format!("the zip archive is damaged ({error})")),
    };
    let mut entries = HashMap::new();
    for index in 0..archive.len() {
        let entry = match archive.by_index(index) {
            Ok(entry) => entry,
            Err(error) => return bad(format!("the zip archive is damaged ({error})")),
        };
        let Ok(name) = entry.name().map(|name| name.into_owned()) else {
            return bad("a name in the zip archive is not UTF-8");
        };
        // Storages are read in place.
        if entry.compression() != CompressionMethod::Stored {
            return bad(format!(
                "`{name}` is compressed, which torch.save does not do"
            ));
        }
        let start = entry
            .data_start()
            .and_then(|start| usize::try_from(start).ok());
        let length = usize::try_from(entry.size()).ok();
        let end = start
            .zip(length)
            .and_then(|(start, length)| start.checked_add(length));
        match start.zip(end).filter(|&(_, end)| end <= bytes.len()) {
            Some((start, end)) => entries.insert(name, start..end),
            None => return bad(format!("`{name}` extends beyond the end of the file")),
        };
    }
    let pickles = entries.keys().filter(|name| {
        name.strip_suffix("/data.pkl")
            .is_some_and(|folder| !folder.contains('/'))
    });
    // The choice among several is deterministic.
    let Some(pickle) = pickles.min().cloned() else {
        return bad("the zip archive has no data.pkl");
    };
    let folder = pickle.trim_end_matches("data.pkl");
    if let Some(order) = entries.get(&format!("{folder}byteorder"))
        && bytes.get(order.clone()) != Some(b"little")
    {
        return bad("its numbers are not little-endian");
    }
    let range = entries[&pickle].clone();
    if range.len() > MAX_PICKLE {
        return bad(format!(
            "its pickle has {} bytes; the limit is {MAX_PICKLE}",
            range.len()
        ));
    }
    let values = Machine::run(&mut Reader::new(&bytes[..range.end], range.start))?;
    let prefix = format!("{folder}data/");
    let storages = entries
        .into_iter()
        .filter_map(|(name, range)| Some((name.strip_prefix(&prefix)?.to_owned(), range)));
    Ok(Contents {
        values,
        storages: storages.collect(),
    })
}

/// Reads a file from before PyTorch 1.6: five pickles (a magic number, a version, a description of the system, the
/// values and the keys of the storages), then for each storage its number of elements and the elements.
fn of_old_file(bytes: &[u8]) -> Checked<Contents> {
    let none = "it is neither a zip archive nor a file from before PyTorch 1.6";
    let end = bytes.len().min(MAX_PICKLE);
    let mut reader = Reader::new(&bytes[..end], 0);
    // Pickle protocol 2; without this check, a file of another format would be parsed at length.
    if !bytes.starts_with(&[0x80, 2]) {
        return bad(none);
    }
    for expected in [MAGIC, OLD_VERSION] {
        let values = Machine::run(&mut reader)?;
        if !matches!(values.get(values.result), Value::Int(found) if *found == expected) {
            return bad(none);
        }
    }
    check_system(&Machine::run(&mut reader)?)?;
    let values = Machine::run(&mut reader)?;
    let keys = Machine::run(&mut reader)?;
    let Value::List(ids) = keys.get(keys.result) else {
        return bad("the keys of its storages are not a list");
    };
    let mut storages = HashMap::new();
    let mut reader = Reader::new(bytes, reader.position());
    let lengths = storage_lengths(&values);
    for &id in ids {
        let Value::Text(key) = keys.get(id) else {
            return bad("the key of a storage is not a string");
        };
        let Some(&(elements, length)) = lengths.get(key) else {
            return bad(format!("no tensor uses the storage {key}"));
        };
        let stated = i64::from_le_bytes(reader.array()?);
        if usize::try_from(stated) != Ok(elements) {
            return bad(format!(
                "the storage {key} has {stated} elements, but {elements} in the pickle"
            ));
        }
        let start = reader.position();
        reader.take(length)?;
        storages.insert(key.clone(), start..start + length);
    }
    Ok(Contents { values, storages })
}

fn check_system(values: &Values) -> Checked<()> {
    let Value::Dict(items) = values.get(values.result) else {
        return bad("its description of the system is not a dictionary");
    };
    let big = items.iter().any(|&(key, value)| {
        matches!(values.get(key), Value::Text(key) if key == "little_endian")
            && !matches!(values.get(value), Value::Bool(true))
    });
    if big {
        return bad("its numbers are not little-endian");
    }
    Ok(())
}

/// Returns the number of elements and the number of bytes of each storage that the values describe.
fn storage_lengths(values: &Values) -> HashMap<&String, (usize, usize)> {
    let storages = values.storages();
    let lengths =
        storages.filter_map(|storage| Some((&storage.key, (storage.elements, storage.bytes()?))));
    lengths.collect()
}
