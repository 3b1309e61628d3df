//! Fingerprints of the inputs of a run, which its snapshots store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;
use overdrive_datasets::{Sha256Digest, tokenizer_digest};
use overdrive_distributed::ProcessGroup;
use overdrive_snapshot::{Scope, Snapshot};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::arguments::{
    TrainingArguments, as_value, differs_by_rank, keys_of, keys_of_the_order, plain,
};
use crate::data::TextData;
use crate::{Error, Result};

/// The name of the entry in a snapshot.
const ENTRY: &str = "fingerprints";
/// The number of hexadecimal digits of a digest in errors, as in the line `corpus` of a run's output.
const SHOWN_DIGITS: usize = 12;
/// The keys of `config.json` that the weights do not depend on, or only through the tokenizer.
const FREE_MODEL_KEYS: [&str; 7] = [
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "vocab_size",
];

/// The inputs that decide what the state of a run means: the contents of its data, its tokenizer, the shape of its
/// model, and the arguments on which the order of the data depends. Snapshots store them, so that a run does not
/// resume with other inputs by accident, and the processes of a run compare theirs.
///
/// [`TextData::fingerprints`] and [`InstructionData::fingerprints`](crate::InstructionData::fingerprints) return them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprints(BTreeMap<String, String>);

impl Fingerprints {
    /// Sets the values that `keys` have among the arguments.
    pub(crate) fn set_keys(&mut self, arguments: &Map<String, Value>, keys: &[&str]) {
        for &key in keys {
            if let Some(value) = arguments.get(key) {
                self.set(key, plain(value));
            }
        }
    }

    pub(crate) fn set(&mut self, name: impl Into<String>, value: impl ToString) {
        self.0.insert(name.into(), value.to_string());
    }

    /// Returns the name and the content of the file that stores them in a snapshot.
    pub fn to_file(&self) -> (String, Vec<u8>) {
        // Names and values are strings, so the text is JSON.
        let text = format!("{:#}\n", json!(self.0));
        (file_name(), text.into_bytes())
    }

    /// Compares them with those of the other processes, each of which calls it.
    ///
    /// # Errors
    /// [`Error::RankDiffers`] on every process.
    fn compare_ranks(&self, group: &ProcessGroup) -> Result<()> {
        let all = group.all_gather_object(self)?;
        for (rank, other) in all.iter().enumerate().skip(1) {
            let describe = |name: &str, main: &str, other: &str| {
                format!("`{name}` is {other} on rank {rank} and {main} on rank 0")
            };
            let differences = all[0].differences(other, describe);
            if !differences.is_empty() {
                return Err(Error::RankDiffers { rank, differences });
            }
        }
        Ok(())
    }

    /// Compares the fingerprints with those of the other processes, all of which call this function, and with
    /// those of the run that is resumed.
    pub(crate) fn compared(
        self,
        group: &ProcessGroup,
        arguments: &TrainingArguments,
    ) -> Result<Self> {
        self.compare_ranks(group)?;
        // The snapshot is chosen and verified later, when the run's folder is open and has the arguments of this
        // start. If the run is refused here, the folder keeps its own arguments.
        for snapshot in arguments.listed_snapshots()? {
            match snapshot.file(&file_name()) {
                Ok(_) => {
                    self.check(&snapshot, arguments)?;
                    break;
                }
                // The run falls back past a damaged snapshot.
                Err(overdrive_snapshot::Error::Damaged { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self)
    }

    /// Checks that `snapshot` was saved with these inputs. Returns a warning if they could not be compared, or if
    /// they differ and `resume_with_changes` is set.
    ///
    /// # Errors
    /// [`Error::InputsDiffer`].
    pub(crate) fn check(
        &self,
        snapshot: &Snapshot,
        arguments: &TrainingArguments,
    ) -> Result<Option<String>> {
        if !snapshot.has(ENTRY, Scope::Run, 0) {
            return Ok(Some(format!(
                "{} has no fingerprints, because an earlier version saved it: data, tokenizer and arguments are \
                 not compared with those of this run",
                snapshot.path().display()
            )));
        }
        let saved: Self = snapshot.document(ENTRY, Scope::Run, 0)?;
        let describe = |name: &str, was: &str, is: &str| format!("`{name}` was {was} and is {is}");
        let differences = saved.differences(self, describe);
        let snapshot = snapshot.path();
        match differences.is_empty() {
            true => Ok(None),
            false if arguments.resume_with_changes => Ok(Some(format!(
                "the run resumes with other inputs than those of {}: {}",
                snapshot.display(),
                differences.join(", ")
            ))),
            false => Err(Error::InputsDiffer {
                snapshot: snapshot.to_owned(),
                differences,
            }),
        }
    }

    /// Describes each value that differs and that both fingerprints have. If one of them lacks a value, the
    /// version that saved the snapshot did not store it, or it belongs to a method that the other run does not use.
    fn differences(
        &self,
        other: &Self,
        describe: impl Fn(&str, &str, &str) -> String,
    ) -> Vec<String> {
        let common = self.0.iter().filter_map(|(name, own)| {
            let other = other.0.get(name)?;
            (own != other).then(|| describe(name, shown(own), shown(other)))
        });
        common.collect()
    }
}

/// Returns the name of the file in a snapshot.
fn file_name() -> String {
    format!("{ENTRY}.json")
}

/// Returns a value as errors show it: the beginning of a digest, or the whole value.
fn shown(value: &str) -> &str {
    let is_digest = value.len() == 64 && value.bytes().all(|byte| byte.is_ascii_hexdigit());
    match is_digest {
        true => &value[..SHOWN_DIGITS],
        false => value,
    }
}

impl TrainingArguments {
    /// Compares the arguments with those of the other processes, all of which call this function. Processes with
    /// different arguments would train without an error, or wait for each other forever.
    ///
    /// # Errors
    /// [`Error::RankDiffers`] on every process.
    pub(crate) fn compare_ranks(&self, group: &ProcessGroup) -> Result<()> {
        if group.world_size() == 1 {
            return Ok(());
        }
        let mut all = Fingerprints::default();
        for (key, value) in keys_of(self)? {
            match value {
                _ if differs_by_rank(&key) => {}
                Value::Object(section) => {
                    for (name, value) in section {
                        all.set(format!("{key}.{name}"), plain(&value));
                    }
                }
                value => all.set(key, plain(&value)),
            }
        }
        all.compare_ranks(group)
    }

    /// Returns the values of the keys that determine the numbering of the examples.
    pub(crate) fn order_fingerprints(&self) -> Result<Fingerprints> {
        let values = keys_of(self)?;
        let mut all = Fingerprints::default();
        all.set_keys(&values, &keys_of_the_order());
        // Options of a method that is off have no effect.
        if self.packing {
            all.set_keys(&values, &["packing_strategy"]);
        }
        if self.group_by_length {
            all.set_keys(&values, &["length_column_name"]);
        }
        Ok(all)
    }

    /// Returns the fingerprints of a run whose data and model are the program's own, and compares them as
    /// [`TextData::fingerprints`] does: those of the arguments that determine the order of the data.
    ///
    /// # Errors
    /// Those of [`TextData::fingerprints`].
    pub(crate) fn fingerprints(&self, group: &ProcessGroup) -> Result<Fingerprints> {
        self.order_fingerprints()?.compared(group, self)
    }
}

impl TextData {
    /// Returns the fingerprints of a run on this data, and compares them with those of the other processes and of
    /// the run that is resumed: each process of `group` calls it before the folder of the run is opened.
    ///
    /// The data is identified by its tokens, whatever the names and the times of the files are; another tokenizer
    /// therefore changes that fingerprint as well.
    ///
    /// # Errors
    /// [`Error::RankDiffers`] on every process if those of a process differ, [`Error::InputsDiffer`] if those of the
    /// run do and `resume_with_changes` is not set; an error if a process is lost.
    pub fn fingerprints(
        &self,
        arguments: &TrainingArguments,
        group: &ProcessGroup,
    ) -> Result<Fingerprints> {
        let mut all = arguments.order_fingerprints()?;
        let stores = self.train.stores().iter();
        let digests = stores.map(|store| match store.content_digest() {
            Some(data) => Ok(data),
            // Files of nanoGPT and llm.c have no checksum, and may be too large to read all of them.
            None => model_digest(store.path()),
        });
        let digests = digests.collect::<Result<Vec<Sha256Digest>>>()?;
        match digests.as_slice() {
            [one] => all.set("data", one),
            several => {
                let digests: Vec<String> = several.iter().map(ToString::to_string).collect();
                all.set("data", Sha256Digest::of(digests.concat().as_bytes()));
            }
        }
        if let Some(mixture) = &self.mixture {
            let weights = mixture.fingerprint(arguments, group.world_size())?;
            all.set("mixture", weights);
        }
        if let Some(tokenizer) = &self.tokenizer {
            all.set("tokenizer", tokenizer_digest(tokenizer)?);
        }
        if arguments.tokenizer.is_none() {
            all.set("vocab_size", arguments.vocab_size);
        }
        all.set("sequences", plain(&as_value(&arguments.sequence_mode())?));
        for (key, value) in keys_of(&arguments.model_config(self))? {
            if !FREE_MODEL_KEYS.contains(&key.as_str()) {
                all.set(format!("model.{key}"), plain(&value));
            }
        }
        all.compared(group, arguments)
    }
}

/// Returns a digest of the configuration of a model and of samples of its weight files, or of samples of one file, such
/// as a GGUF file.
pub(crate) fn model_digest(model: &Path) -> Result<Sha256Digest> {
    if model.is_file() {
        return Ok(Sha256Digest::sampled([model])?);
    }
    let entries = std::fs::read_dir(model).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(CommonError::io("list", model))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        let ends = path.extension();
        ends.is_some_and(|end| end == "safetensors" || end == "bin")
            || path.ends_with("config.json")
    });
    // The order of `read_dir` differs between machines.
    paths.sort();
    Ok(Sha256Digest::sampled(paths)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[(&str, &str)]) -> Fingerprints {
        let values = values.iter();
        Fingerprints(
            values
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    #[test]
    fn values_that_both_have_are_compared_and_digests_are_shortened() {
        let digests = ["a", "b"].map(|text| Sha256Digest::of(text.as_bytes()).to_string());
        let one = of(&[("data", &digests[0]), ("seed", "1"), ("removed", "x")]);
        let other = of(&[("data", &digests[1]), ("seed", "1"), ("added", "y")]);
        let found = one.differences(&other, |name, was, is| format!("{name} {was} {is}"));
        assert_eq!(found, ["data ca978112ca1b 3e23e8160039"]);
        let (name, bytes) = one.to_file();
        assert_eq!(name, "fingerprints.json");
        assert_eq!(serde_json::from_slice::<Fingerprints>(&bytes).unwrap(), one);
    }

    #[test]
    fn options_of_methods_that_are_off_are_not_compared() {
        let of = |packing, group_by_length| {
            let arguments = TrainingArguments {
                packing,
                group_by_length,
                ..TrainingArguments::default()
            };
            arguments.order_fingerprints().unwrap().0
        };
        let names: Vec<String> = of(false, false).into_keys().collect();
        let expected = "context_length group_by_length packing seed validation_fraction";
        assert_eq!(names.join(" "), expected);
        assert_eq!(of(true, false)["packing_strategy"], "bfd");
        assert_eq!(of(false, true)["length_column_name"], "length");
    }

    #[test]
    fn a_model_of_other_weights_or_another_configuration_has_another_digest() {
        let folder = tempfile::tempdir().unwrap();
        let weights = folder.path().join("model.safetensors");
        let digest = || model_digest(folder.path()).unwrap();
        // Larger than all of the blocks together, and smaller than one.
        for len in [1 << 20, 100] {
            std::fs::write(folder.path().join("config.json"), "{}").unwrap();
            std::fs::write(&weights, vec![7; len]).unwrap();
            let first = digest();
            std::fs::write(folder.path().join("notes.txt"), "not read").unwrap();
            assert_eq!(digest(), first);
            std::fs::write(&weights, vec![8; len]).unwrap();
            let second = digest();
            assert_ne!(second, first);
            std::fs::write(folder.path().join("config.json"), "[]").unwrap();
            assert_ne!(digest(), second);
        }
    }
}
