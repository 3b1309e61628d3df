//! A libtorch that is ready for use, and its record.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::Libtorch;
#[cfg(test)]
use overdrive_build::Source;
use overdrive_core::print_line;

use crate::failure::{Failure, Result};
use crate::record::{Choice, Record};
use crate::torch;

/// A libtorch that is ready for use, and the work that was done for it.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) libtorch: Libtorch,
    pub(crate) root: PathBuf,
    pub(super) choice: Choice,
    /// The origin of the libtorch, for messages.
    pub(super) how: String,
    pub(super) recorded: bool,
}

impl Found {
    pub(super) fn new(libtorch: Libtorch, choice: Choice) -> Self {
        let root = libtorch
            .lib_dir
            .parent()
            .unwrap_or(&libtorch.lib_dir)
            .to_path_buf();
        let how = format!("from {}", libtorch.source);
        Self {
            libtorch,
            root,
            choice,
            how,
            recorded: false,
        }
    }

    pub(crate) fn report(&self) {
        let kind = if self.libtorch.cuda { "CUDA" } else { "CPU" };
        let version = self
            .libtorch
            .version
            .as_deref()
            .unwrap_or("of unknown version");
        print_line(format_args!(
            "libtorch {version} ({kind}) is at {} ({})",
            self.root.display(),
            self.how
        ));
        if let Some(release) = torch::other() {
            print_line(format_args!(
                "`cargo xtask … --torch {}` builds with it, in target/torch-{}; plain cargo builds with the \
                 tch of Cargo.lock, which `cargo update tch --precise {}` changes",
                release.series(),
                release.series(),
                release.tch
            ));
            return;
        }
        let done = if self.recorded {
            "now records"
        } else {
            "records"
        };
        print_line(format_args!(
            ".cargo/libtorch.toml {done} it: cargo build, test, run and bench now work"
        ));
        print_line(
            "for a project of your own: cargo xtask new DIR, or cargo xtask setup --project DIR",
        );
    }

    /// Writes the record into the `.cargo` folder of another project.
    pub(crate) fn record_in(&self, project: &Path) -> Result<()> {
        let folder = project.join(".cargo");
        fs::create_dir_all(&folder)
            .map_err(|error| Failure::io("could not create", &folder, &error))?;
        self.record().write(project).map(drop)
    }

    pub(super) fn record(&self) -> Record {
        Record {
            libtorch: self.root.clone(),
            choice: self.choice,
        }
    }

    #[cfg(test)]
    pub(crate) fn for_test(root: &Path) -> Self {
        Self::new(Libtorch::at(root, Source::Cache), Choice::Cpu)
    }
}
