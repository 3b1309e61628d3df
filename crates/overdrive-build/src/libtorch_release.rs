//! The versions of libtorch that Overdrive works with, each with the version of tch that is made for it.

use std::fmt;

/// A version of libtorch and the version of `tch` and `torch-sys` that is made for it.
///
/// `torch-sys` accepts no other libtorch, so the `Cargo.lock` of a project decides which one it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Release {
    /// The version of libtorch, such as `2.11.0`.
    pub libtorch: &'static str,
    /// The version of `tch` and of `torch-sys`, such as `0.24.0`.
    pub tch: &'static str,
}

impl Release {
    /// All releases, the oldest first. There is no tch for libtorch 2.12.
    pub const ALL: [Release; 2] = [
        Release {
            libtorch: "2.11.0",
            tch: "0.24.0",
        },
        Release {
            libtorch: "2.13.0",
            tch: "0.26.0",
        },
    ];

    /// The release of the repository's own `Cargo.lock`.
    pub const DEFAULT: Release = Release::ALL[1];

    /// Returns the release with this libtorch: `2.11`, `2.11.0` or `2.11.0+cu130`.
    #[must_use]
    pub fn of_libtorch(version: &str) -> Option<Release> {
        find(version, |release| release.libtorch)
    }

    /// Returns the release with this `tch`: `0.24` or `0.24.0`.
    #[must_use]
    pub fn of_tch(version: &str) -> Option<Release> {
        find(version, |release| release.tch)
    }

    /// Returns the version of libtorch without the patch level: `2.11`.
    #[must_use]
    pub fn series(self) -> &'static str {
        series(self.libtorch)
    }

    /// Returns `true` for a libtorch that this release's `torch-sys` accepts: `2.11.0` and `2.11.0+cu130`, but not
    /// `2.11.1`.
    #[must_use]
    pub fn accepts(self, libtorch: &str) -> bool {
        crate::libtorch::without_suffix(libtorch) == self.libtorch
    }

    /// Returns all releases in words: "libtorch 2.11.0 (with tch 0.24.0) and libtorch …".
    #[must_use]
    pub fn in_words() -> String {
        Release::ALL
            .map(|release| release.to_string())
            .join(" and ")
    }
}

/// `libtorch 2.11.0 (with tch 0.24.0)`.
impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "libtorch {} (with tch {})", self.libtorch, self.tch)
    }
}

fn find(version: &str, of: impl Fn(&Release) -> &'static str) -> Option<Release> {
    let wanted = crate::libtorch::without_suffix(version);
    Release::ALL
        .into_iter()
        .find(|release| of(release) == wanted || series(of(release)) == wanted)
}

fn series(version: &'static str) -> &'static str {
    version
        .rsplit_once('.')
        .map_or(version, |(series, _)| series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_found_by_either_of_its_versions() {
        for (of_libtorch, of_tch) in [("2.11", "0.24"), ("2.13", "0.26")] {
            let release = Release::of_libtorch(of_libtorch).unwrap();
            assert_eq!(release.series(), of_libtorch);
            assert_eq!(Release::of_tch(of_tch), Some(release));
            assert_eq!(Release::of_tch(&format!("{of_tch}.0")), Some(release));
            let suffixed = format!("{of_libtorch}.0+cu130");
            assert_eq!(Release::of_libtorch(&suffixed), Some(release));
            assert!(release.accepts(&suffixed));
            assert!(!release.accepts(&format!("{of_libtorch}.1")));
        }
        for unknown in ["", "2", "2.12.0", "2.1", "2.11.1"] {
            assert_eq!(Release::of_libtorch(unknown), None, "{unknown}");
        }
    }
}
