//! Values other than tensors: what one rank knows, all get to know.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, ProcessGroup, Result};

impl ProcessGroup {
    /// The value of rank `root`, everywhere (`broadcast_object_list`); what the others pass is not looked
    /// at. It travels as JSON.
    ///
    /// # Errors
    /// [`Error::Value`] for one that JSON cannot hold; [`Error::Collective`].
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
        // Empty where it cannot be written, so that nobody waits.
        let sent = self.broadcast_bytes(bytes.as_deref().unwrap_or_default(), root)?;
        bytes?;
        Ok(serde_json::from_slice(&sent)?)
    }

    /// Everyone's value, in the order of the ranks (`all_gather_object`). They travel as JSON.
    ///
    /// # Errors
    /// As [`broadcast_object`](Self::broadcast_object).
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = serde_json::to_vec(value);
        let all = self.all_gather_bytes(bytes.as_deref().unwrap_or_default())?;
        bytes?;
        let values = all.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(values.collect::<std::result::Result<_, _>>()?)
    }

    /// Does something on rank 0 alone, such as making a folder, and gives its result to all. If it fails
    /// there it fails everywhere, and no rank waits for one that has gone. `what` completes "could not".
    ///
    /// # Errors
    /// [`Error::OnMain`] with the words of rank 0, on every rank; as
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
        what: &str,
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
            false => Outcome::Elsewhere,
        };
        match self.broadcast_object(&outcome, 0)? {
            Outcome::Done(value) => Ok(value),
            Outcome::Failed(message) => Err(Error::OnMain {
                what: what.to_owned(),
                message,
            }),
            Outcome::Elsewhere => Err(Error::OnMain {
                what: what.to_owned(),
                message: "it did not take part".to_owned(),
            }),
        }
    }
}

#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    Done(T),
    Failed(String),
    Elsewhere,
}
