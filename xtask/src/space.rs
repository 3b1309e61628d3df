//! Free disk space.

use std::path::Path;
use std::process::Command;

use crate::failure::{DISK_FULL, Failure, Result};

/// Returns the free bytes of the disk of `path`, from POSIX `df`, because the standard library has no such
/// function; `None` without `df`.
pub(crate) fn free(path: &Path) -> Option<u64> {
    // The folder may not exist yet; its nearest ancestor is on the same disk.
    let there = path.ancestors().find(|path| path.exists())?;
    let output = Command::new("df")
        .arg("-Pk")
        .arg(there)
        .env("LC_ALL", "C")
        .output()
        .ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(df: &str) -> Option<u64> {
    let line = df.lines().nth(1)?;
    let kilobytes: u64 = line.split_whitespace().nth(3)?.parse().ok()?;
    Some(kilobytes * 1024)
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
    fn the_fourth_column_of_df_is_free_kilobytes() {
        let df = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                  /dev/vda 264188500 19000000 76543210 21% /home/with space\n";
        assert_eq!(parse(df), Some(76_543_210 * 1024));
        assert_eq!(parse(""), None);
    }
}
