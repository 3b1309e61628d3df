//! The checksums that the hub states.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use overdrive_core::{Error as Common, Result};
use sha1::{Digest as _, Sha1};
use sha2::{Digest as _, Sha256};

/// The checksum of a file's content, as the hub's ETag states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// The SHA-256 of a file in large file storage (LFS, Xet).
    Sha256(String),
    /// Git's blob hash of a file in the Git repository.
    Git(String),
    /// No known checksum, from servers other than the hub: only the length is verified.
    Unknown,
}

impl Checksum {
    pub(crate) fn of_etag(etag: &str) -> Checksum {
        let hex = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match etag.len() {
            64 if hex => Checksum::Sha256(etag.to_ascii_lowercase()),
            40 if hex => Checksum::Git(etag.to_ascii_lowercase()),
            _ => Checksum::Unknown,
        }
    }

    /// Returns the difference between the file at `path` and this checksum; `None` if they agree.
    pub(crate) fn difference(&self, path: &Path, length: u64) -> Result<Option<String>> {
        let (name, expected, found) = match self {
            Checksum::Unknown => return Ok(None),
            Checksum::Sha256(expected) => {
                let mut hasher = Sha256::new();
                each_chunk(path, |chunk| hasher.update(chunk))?;
                ("SHA-256", expected, hex(&hasher.finalize()))
            }
            Checksum::Git(expected) => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {length}\0").as_bytes());
                each_chunk(path, |chunk| hasher.update(chunk))?;
                ("Git hash", expected, hex(&hasher.finalize()))
            }
        };
        let differs = *expected != found;
        Ok(differs.then(|| format!("its {name} is {found}, and the hub states {expected}")))
    }
}

fn each_chunk(path: &Path, mut take: impl FnMut(&[u8])) -> Result<()> {
    let mut file = File::open(path).map_err(Common::io("read", path))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(Common::io("read", path))? {
            0 => return Ok(()),
            length => take(&buffer[..length]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_equal_those_of_git_and_sha256sum() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a");
        std::fs::write(&path, "hello\n").expect("writes");
        // `git hash-object a` and `sha256sum a`.
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for sum in [git, sha256] {
            let checked = Checksum::of_etag(sum).difference(&path, 6);
            assert_eq!(checked.expect("reads"), None, "{sum}");
            let wrong = format!("0{}", &sum[1..]);
            let checked = Checksum::of_etag(&wrong).difference(&path, 6);
            let reason = checked.expect("reads").expect("a difference");
            assert!(reason.contains(sum) && reason.contains(&wrong), "{reason}");
        }
        assert_eq!(Checksum::of_etag("abc"), Checksum::Unknown);
        assert_eq!(Checksum::of_etag(&"g".repeat(64)), Checksum::Unknown);
    }
}
