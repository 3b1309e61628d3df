use overdrive_optim::StateDict;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::manifest::MANIFEST;
use crate::{Error, Result};

/// Whose a part of a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The same on all ranks: rank 0 writes it, as `<name>.<format>`.
    Run,
    /// Each rank has its own, `<name>.rank-<n>.<format>`: random states, sharded optimizer states.
    Rank,
}

impl Scope {
    /// For errors.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Run => "once for all ranks",
            Self::Rank => "for each rank",
        }
    }
}

/// The files of one snapshot, part by part: what [`SnapshotManager::save`](crate::SnapshotManager::save)
/// takes. [`RunState`](crate::RunState) puts together those of a whole run.
///
/// Tensors are handles: they are copied when the snapshot is saved, and the caller may change them after.
#[derive(Debug)]
pub struct Contents {
    pub(crate) step: u64,
    pub(crate) metric: Option<f64>,
    pub(crate) parts: Vec<Part>,
}

#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) scope: Scope,
    pub(crate) content: Content,
}

#[derive(Debug)]
pub(crate) enum Content {
    /// `<name>.safetensors`.
    Tensors(Vec<(String, Tensor)>),
    /// `<name>.safetensors`, in the layout of overdrive-optim.
    State(StateDict),
    /// `<name>.json`.
    Document(Vec<u8>),
    /// A file of this very name.
    File(Vec<u8>),
}

impl Contents {
    /// The snapshot after `step` steps, as yet empty.
    pub fn at(step: u64) -> Contents {
        Contents {
            step,
            metric: None,
            parts: Vec::new(),
        }
    }

    /// Notes what the model is worth at this step, such as its loss on the evaluation data: the best
    /// snapshot is kept by it ([`SnapshotOptions::best`](crate::SnapshotOptions::best)).
    pub fn metric(&mut self, value: f64) -> &mut Contents {
        self.metric = Some(value);
        self
    }

    /// Adds tensors, as `<name>.safetensors`.
    ///
    /// # Errors
    /// [`Error::BadName`] for a name that is taken or cannot be a file's.
    pub fn tensors(
        &mut self,
        name: &str,
        scope: Scope,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<&mut Contents> {
        let tensors = tensors.into_iter().collect();
        self.part(name, scope, Content::Tensors(tensors))
    }

    /// Adds the state of an optimizer or of averages of weights, as `<name>.safetensors`.
    ///
    /// # Errors
    /// As for [`Contents::tensors`].
    pub fn state(&mut self, name: &str, scope: Scope, state: StateDict) -> Result<&mut Contents> {
        self.part(name, scope, Content::State(state))
    }

    /// Adds a small value, as `<name>.json`.
    ///
    /// # Errors
    /// As for [`Contents::tensors`], and [`Error::BadName`] for a value that JSON cannot hold.
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
        self.part(name, scope, Content::Document(bytes))
    }

    /// Adds a file as it is, under its own name: `config.json`, `tokenizer.json`. One for all ranks.
    ///
    /// # Errors
    /// As for [`Contents::tensors`].
    pub fn file(&mut self, name: &str, bytes: Vec<u8>) -> Result<&mut Contents> {
        self.part(name, Scope::Run, Content::File(bytes))
    }

    fn part(&mut self, name: &str, scope: Scope, content: Content) -> Result<&mut Contents> {
        let refuse = |reason| {
            let name = name.to_owned();
            Err(Error::BadName { name, reason })
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return refuse("letters, digits, `-`, `_` and dots make a file's name");
        }
        let part = Part {
            name: name.to_owned(),
            scope,
            content,
        };
        let file = part.file_name(0);
        if file == MANIFEST {
            return refuse("the list of files has this name");
        }
        if self.parts.iter().any(|other| other.file_name(0) == file) {
            return refuse("another part has this name");
        }
        self.parts.push(part);
        Ok(self)
    }
}

impl Part {
    /// The file that this rank's part is in.
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

/// `model.safetensors`, `random.rank-2.safetensors`.
pub(crate) fn file_name(name: &str, scope: Scope, rank: usize, format: &str) -> String {
    match scope {
        Scope::Run => format!("{name}.{format}"),
        Scope::Rank => format!("{name}.rank-{rank}.{format}"),
    }
}
