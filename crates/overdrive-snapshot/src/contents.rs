use overdrive_optim::StateDict;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::manifest::MANIFEST;
use crate::{Error, Result};

/// The ranks that an entry of a snapshot belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The entry is the same on all ranks; rank 0 writes it, as `<name>.<format>`.
    Run,
    /// Each rank has its own entry, `<name>.rank-<n>.<format>`: random states, sharded optimizer states.
    Rank,
}

impl Scope {
    /// Returns the description of the scope in errors.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Run => "once for all ranks",
            Self::Rank => "for each rank",
        }
    }
}

/// The entries of one snapshot, each a file, for [`SnapshotManager::save`](crate::SnapshotManager::save).
/// [`RunState`](crate::RunState) collects those of a whole run.
///
/// Tensors are handles: they are copied when the snapshot is saved, and the caller may change them afterwards.
#[derive(Debug)]
pub struct Contents {
    pub(crate) step: u64,
    pub(crate) metric: Option<f64>,
    pub(crate) entries: Vec<Entry>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) scope: Scope,
    pub(crate) content: Content,
}

#[derive(Debug)]
pub(crate) enum Content {
    /// Tensors, stored as `<name>.safetensors`.
    Tensors(Vec<(String, Tensor)>),
    /// A state dict, stored as `<name>.safetensors` in the layout of overdrive-optim.
    State(StateDict),
    /// A value, stored as `<name>.json`.
    Document(Vec<u8>),
    /// A file that is stored under the entry's own name.
    File(Vec<u8>),
}

impl Contents {
    /// Returns empty contents for a snapshot after `step` steps.
    pub fn at(step: u64) -> Contents {
        Contents {
            step,
            metric: None,
            entries: Vec::new(),
        }
    }

    /// Sets the metric of the model at this step, such as its loss on the evaluation data. It selects the best
    /// snapshot ([`SnapshotOptions::best`](crate::SnapshotOptions::best)).
    pub fn metric(&mut self, value: f64) -> &mut Contents {
        self.metric = Some(value);
        self
    }

    /// Adds tensors, as `<name>.safetensors`.
    ///
    /// # Errors
    /// [`Error::BadName`] for a name that is in use or cannot be a file name.
    pub fn tensors(
        &mut self,
        name: &str,
        scope: Scope,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<&mut Contents> {
        let tensors = tensors.into_iter().collect();
        self.push(name, scope, Content::Tensors(tensors))
    }

    /// Adds the state dict of an optimizer or of averaged weights, as `<name>.safetensors`.
    ///
    /// # Errors
    /// As for [`Contents::tensors`].
    pub fn state(&mut self, name: &str, scope: Scope, state: StateDict) -> Result<&mut Contents> {
        self.push(name, scope, Content::State(state))
    }

    /// Adds a small value, serialized as `<name>.json`.
    ///
    /// # Errors
    /// Those of [`Contents::tensors`], and [`Error::BadName`] for a value that JSON cannot represent.
    pub fn document(
        &mut self,
        name: &str,
        scope: Scope,
        value: &impl Serialize,
    ) -> Result<&mut Contents> {
        let bytes = serde_json::to_vec_pretty(value).map_err(|_| Error::BadName {
            name: name.to_owned(),
            reason: "its value cannot be written as JSON",
        })?;
        self.push(name, scope, Content::Document(bytes))
    }

    /// Adds a file under its own name, such as `config.json` or `tokenizer.json`; rank 0 writes it.
    ///
    /// # Errors
    /// As for [`Contents::tensors`].
    pub fn file(&mut self, name: &str, bytes: Vec<u8>) -> Result<&mut Contents> {
        self.push(name, Scope::Run, Content::File(bytes))
    }

    fn push(&mut self, name: &str, scope: Scope, content: Content) -> Result<&mut Contents> {
        let refuse = |reason| {
            let name = name.to_owned();
            Err(Error::BadName { name, reason })
        };
        // A name must be a valid file name on every file system and must not lead out of the snapshot's folder.
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return refuse(
                "it must consist of letters, digits, `-`, `_` and dots, and not begin with a dot",
            );
        }
        let entry = Entry {
            name: name.to_owned(),
            scope,
            content,
        };
        let file = entry.file_name(0);
        if file == MANIFEST {
            return refuse("the snapshot's manifest has this name");
        }
        // The check is by file name: tensors and a document of the same name are different files.
        if self.entries.iter().any(|other| other.file_name(0) == file) {
            return refuse("another entry has this name");
        }
        self.entries.push(entry);
        Ok(self)
    }
}

impl Entry {
    /// Returns the name of the file that holds this rank's entry.
    pub(crate) fn file_name(&self, rank: usize) -> String {
        match &self.content {
            Content::Tensors(_) | Content::State(_) => {
                file_name(&self.name, self.scope, rank, "safetensors")
            }
            Content::Document(_) => file_name(&self.name, self.scope, rank, "json"),
            Content::File(_) => self.name.clone(),
        }
    }
}

/// Returns the file name of an entry: `model.safetensors`, `random.rank-2.safetensors`.
pub(crate) fn file_name(name: &str, scope: Scope, rank: usize, format: &str) -> String {
    match scope {
        Scope::Run => format!("{name}.{format}"),
        Scope::Rank => format!("{name}.rank-{rank}.{format}"),
    }
}
