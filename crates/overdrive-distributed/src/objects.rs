//! Collectives of serializable values.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, ProcessGroup, Result};

impl ProcessGroup {
    /// Returns the value of rank `root` on every rank (`broadcast_object_list`); the values of the other ranks
    /// are ignored. Values are sent as JSON.
    ///
    /// # Errors
    /// [`Error::Value`] for a value that JSON cannot represent; [`Error::Collective`].
    ///
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// let name = group.broadcast_object(&format!("run-{}", group.rank()), 0)?;
    /// assert_eq!(name, "run-0");
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<T> {
        let bytes = if self.rank() == root {
            serde_json::to_vec(value)
        } else {
            Ok(Vec::new())
        };
        // A failed serialization is sent as no bytes, so that the other ranks do not wait.
        let sent = self.broadcast_bytes(bytes.as_deref().unwrap_or_default(), root)?;
        bytes?;
        Ok(serde_json::from_slice(&sent)?)
    }

    /// Returns the values of all ranks, in rank order (`all_gather_object`). Values are sent as JSON.
    ///
    /// # Errors
    /// As [`broadcast_object`](Self::broadcast_object).
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = serde_json::to_vec(value);
        let all = self.all_gather_bytes(bytes.as_deref().unwrap_or_default())?;
        bytes?;
        // A rank that could not serialize its value has sent no bytes, which fails here on all ranks.
        let values = all.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(values.collect::<std::result::Result<_, _>>()?)
    }

    /// Runs `body` on rank 0 only, for example to create a folder, and returns its result on all ranks. An
    /// error on rank 0 is an error on every rank, so no rank waits for one that has stopped. `action`
    /// completes "could not".
    ///
    /// # Errors
    /// [`Error::OnMain`] with the message of rank 0, on every rank; as
    /// [`broadcast_object`](Self::broadcast_object).
    ///
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// let length = group.on_main("read the file", || {
    ///     std::fs::read("/nowhere").map(|bytes| bytes.len())
    /// });
    /// assert!(length.unwrap_err().to_string().starts_with("rank 0 could not read the file: "));
    /// ```
    pub fn on_main<T, E>(
        &self,
        action: &str,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
        E: std::fmt::Display,
    {
        let outcome = match self.is_main() {
            true => match body() {
                Ok(value) => Outcome::Done(value),
                Err(error) => Outcome::Failed(error.to_string()),
            },
            false => Outcome::NotRun,
        };
        match self.broadcast_object(&outcome, 0)? {
            Outcome::Done(value) => Ok(value),
            Outcome::Failed(message) => Err(Error::OnMain {
                action: action.to_owned(),
                message,
            }),
            Outcome::NotRun => Err(Error::OnMain {
                action: action.to_owned(),
                message: "it did not take part".to_owned(),
            }),
        }
    }
}

#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    Done(T),
    Failed(String),
    NotRun,
}
