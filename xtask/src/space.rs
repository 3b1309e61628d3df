//! Free disk space.

use std::path::Path;

use crate::failure::{DISK_FULL, Failure, Result};

/// Returns the free bytes of the disk of `path`; `None` if the system does not report them.
pub(crate) fn free(path: &Path) -> Option<u64> {
    // The folder may not exist yet; its nearest ancestor is on the same disk.
    let there = path.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail * disk.f_frsize)
}

/// Returns an error if the disk of `path` has less than `needed` bytes free.
pub(crate) fn require(path: &Path, needed: u64) -> Result<()> {
    match free(path) {
        Some(free) if free < needed => Err(Failure::new(format!(
            "the disk of {} has {} free, but fetching libtorch temporarily needs {}",
            path.display(),
            megabytes(free),
            megabytes(needed),
        ))
        .remedy(DISK_FULL)),
        _ => Ok(()),
    }
}

/// Formats bytes in a readable unit.
pub(crate) fn megabytes(bytes: u64) -> String {
    if bytes >= 10_000_000_000 {
        format!("{} GB", bytes / 1_000_000_000)
    } else {
        format!("{} MB", bytes / 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_too_small_is_said_with_both_numbers() {
        let text = require(&std::env::temp_dir(), u64::MAX)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("free") && text.contains("XDG_CACHE_HOME"),
            "{text}"
        );
        assert!(require(&std::env::temp_dir(), 0).is_ok());
    }
}
