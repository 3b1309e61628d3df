//! The files that programs read and write, of which `-` is standard input or output.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::path::Path;

use anyhow::Context;
use overdrive::core::{Error, Result, check_not_read, check_option, files};
use serde::Serialize;

/// Checks that the file `path`, which the flag `flag` gives, can lie where it is to be written, so that a program finds a
/// wrong path before it loads a model.
///
/// # Errors
/// [`overdrive::core::Error::InvalidOption`] if `path` is a folder, or its folder does not exist.
pub fn check_output_file(flag: &'static str, path: &Path) -> Result<()> {
    let folder = files::folder_of(path);
    let expected = format!("in a folder that exists; create {} first", folder.display());
    check_option(folder.is_dir(), flag, path.display(), expected)?;
    let expected = "a file; this is a folder: add a name";
    check_option(!path.is_dir(), flag, path.display(), expected)
}

/// Returns a reader of the file `path` and the name of the file for errors.
///
/// # Errors
/// The error of opening the file.
pub fn open_input(path: &Path) -> anyhow::Result<(Box<dyn BufRead>, String)> {
    if path == Path::new("-") {
        return Ok((Box::new(stdin().lock()), "standard input".to_owned()));
    }
    let name = path.display().to_string();
    let file = File::open(path).map_err(Error::io("open", path))?;
    Ok((Box::new(BufReader::new(file)), name))
}

/// A file of JSON Lines that a program writes.
pub struct JsonLines {
    /// `None` is standard output.
    file: Option<File>,
    name: String,
    /// The length of the file in bytes.
    written: u64,
}

impl fmt::Debug for JsonLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLines").finish_non_exhaustive()
    }
}

impl JsonLines {
    /// Checks the output file `path` of `flag` before a model is loaded: it is not the `input` of `--input`, and can lie where
    /// it is to be written.
    ///
    /// # Errors
    /// [`overdrive::core::Error::InvalidOption`] with the way out.
    pub fn check(flag: &'static str, path: &Path, input: (&str, &Path)) -> Result<()> {
        check_not_read(flag, path, &[input])?;
        match path == Path::new("-") {
            true => Ok(()),
            false => check_output_file(flag, path),
        }
    }

    /// Creates the file.
    ///
    /// # Errors
    /// The error of creating it.
    pub fn create(path: &Path) -> anyhow::Result<JsonLines> {
        let (file, name) = match path == Path::new("-") {
            true => (None, "cannot write to standard output".to_owned()),
            false => {
                let name = format!("cannot write {}", path.display());
                (
                    Some(File::create(path).with_context(|| name.clone())?),
                    name,
                )
            }
        };
        Ok(JsonLines {
            file,
            name,
            written: 0,
        })
    }

    /// Writes a line. After an error the file ends with the line before.
    ///
    /// # Errors
    /// The error of writing it.
    pub fn write(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        // In one write: a program that is killed leaves no part of a line.
        let mut text = serde_json::to_vec(value)?;
        text.push(b'\n');
        let Some(file) = &mut self.file else {
            let mut out = stdout().lock();
            let written = out.write_all(&text).and_then(|()| out.flush());
            return written.with_context(|| self.name.clone());
        };
        if let Err(error) = file.write_all(&text) {
            // A full disk takes a part of a line. What is no file, such as a pipe, has no length to set.
            let _cut = file.set_len(self.written);
            return Err(error).with_context(|| self.name.clone());
        }
        self.written += text.len() as u64;
        Ok(())
    }
}
