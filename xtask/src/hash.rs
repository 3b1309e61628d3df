//! SHA-256 checks of files.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::failure::{Failure, Result};
use crate::progress;

/// Returns the SHA-256 of a file, in hexadecimal, and shows a progress bar.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let fail = |error: std::io::Error| Failure::io("could not read", path, &error);
    let mut file = File::open(path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    let bar = progress::bytes(length, "checking the hash");
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(fail)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        bar.inc(read as u64);
    }
    bar.finish_and_clear();
    Ok(hexadecimal(hash))
}

/// Returns the SHA-256 of bytes in memory, in hexadecimal.
pub(crate) fn of_bytes(bytes: &[u8]) -> String {
    hexadecimal(Sha256::new_with_prefix(bytes))
}

fn hexadecimal(hash: Sha256) -> String {
    let digest = hash.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Rejects a file whose hash is not `expected` and removes it, so that the next run fetches it again.
pub(crate) fn verify(path: &Path, expected: &str) -> Result<()> {
    let actual = sha256(path)?;
    if actual == expected {
        return Ok(());
    }
    let removed = match fs::remove_file(path) {
        Ok(()) => "it has been removed".to_owned(),
        Err(error) => format!("it could not be removed ({error})"),
    };
    Err(Failure::new(format!(
        "{} does not have the expected hash; {removed}\n  expected sha256 {expected}\n  got      \
         sha256 {actual}",
        path.display()
    ))
    .remedy(
        "Run the command again. If the error persists, the mirror or proxy between you and the \
         package index serves a different file; set LIBTORCH to a libtorch that you trust.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The SHA-256 of "abc", from FIPS 180-2.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn the_hash_is_the_one_of_the_standard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        fs::write(&path, "abc").unwrap();
        assert_eq!(sha256(&path).unwrap(), ABC);
        assert!(verify(&path, ABC).is_ok());
    }

    #[test]
    fn a_file_with_another_hash_is_removed_and_both_hashes_are_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abd");
        fs::write(&path, "abd").unwrap();
        let text = verify(&path, ABC).unwrap_err().to_string();
        assert!(
            text.contains(ABC) && text.contains("removed") && text.contains("again"),
            "{text}"
        );
        assert!(!path.exists());
    }
}
