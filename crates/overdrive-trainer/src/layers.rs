//! Preset, file and flags on top of one another.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{
    Error, Preset, Result, TrainingArguments, config_format, diagnosis, foreign_keys, guide_keys,
};

/// A configuration in layers: a preset, on it a file, on it flags. Each layer changes only what it
/// names.
///
/// Some keys push out a key of the layers below that would otherwise win over them or contradict
/// them, because whoever writes one means it: `num_train_epochs` pushes out `max_steps`,
/// `warmup_ratio` pushes out `warmup_steps`, and of `bf16` and `fp16` the upper one stays.
///
/// ```
/// use overdrive_trainer::{Layers, Preset};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("run.yaml");
/// std::fs::write(&file, "learning_rate: 1e-3\nmodel:\n  num_hidden_layers: 4\n")?;
///
/// let arguments = Layers::new(Preset::Tiny).file(&file)?.resolve()?;
/// assert_eq!(arguments.learning_rate, 1e-3);
/// assert_eq!(arguments.model.num_hidden_layers, 4);
/// assert_eq!(arguments.model.hidden_size, 256); // the preset's
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Layers {
    arguments: TrainingArguments,
    notes: Vec<String>,
}

/// Keys that are known under further names: those of TRL, of older transformers, and our flags'.
const ALIASES: [(&str, &str); 11] = [
    ("max_seq_length", "context_length"),
    ("max_length", "context_length"),
    ("block_size", "context_length"),
    ("evaluation_strategy", "eval_strategy"),
    ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("per_gpu_eval_batch_size", "per_device_eval_batch_size"),
    ("no_cuda", "use_cpu"),
    ("text_column", "dataset_text_field"),
    ("text_column_name", "dataset_text_field"),
    ("text_field", "dataset_text_field"),
    ("deduplicate", "remove_duplicates"),
];

/// A key that is set above nothing (`true`, or more than 0), and what it resets below it.
const PUSHED_OUT: [(&str, &str); 7] = [
    ("num_train_epochs", "max_steps"),
    ("warmup_ratio", "warmup_steps"),
    ("warmup_steps", "warmup_ratio"),
    ("bf16", "fp16"),
    ("fp16", "bf16"),
    ("packing", "group_by_length"),
    ("group_by_length", "packing"),
];

impl Layers {
    /// The lowest layer.
    pub fn new(preset: Preset) -> Self {
        Self {
            arguments: preset.arguments(),
            notes: Vec::new(),
        }
    }

    /// Adds a configuration file: JSON, YAML or TOML by its extension. Relative paths in it are
    /// relative to the working directory, as on the command line.
    ///
    /// # Errors
    /// Those of reading, and each wrong key or value with its name: [`Error::UnknownKey`],
    /// [`Error::WrongType`], [`Error::UnknownChoice`], [`Error::Unsupported`],
    /// [`Error::GivenTwice`].
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        self.layer(config_format::read(path)?, &path.display().to_string())
    }

    /// Adds a layer of keys and values; `origin` names it in errors.
    ///
    /// # Errors
    /// As [`Layers::file`].
    pub fn layer(mut self, values: Value, origin: &str) -> Result<Self> {
        let Value::Object(values) = values else {
            return Err(Error::WrongType {
                origin: origin.to_owned(),
                key: "(the whole file)".to_owned(),
                given: diagnosis::describe(&values),
                expected: "keys with values".to_owned(),
            });
        };
        let mut values = guide_keys::translate(values, origin, &mut self.notes)?;
        rename_aliases(&mut values, origin)?;
        take_sampling_strategy(&mut values, origin)?;
        foreign_keys::refuse_or_drop(&mut values, origin)?;
        let defaults = diagnosis::as_value(&TrainingArguments::default())?;
        refuse_other_shapes(&values, &defaults, origin)?;
        let mut merged = diagnosis::as_value(&self.arguments)?;
        if let Value::Object(below) = &mut merged {
            push_out(below, &values, &defaults);
        }
        merge(&mut merged, Value::Object(values), &defaults);
        self.arguments = diagnosis::read_arguments(merged, origin)?;
        Ok(self)
    }

    /// On a configuration that there is already.
    pub(crate) fn on(arguments: TrainingArguments) -> Self {
        Self {
            arguments,
            notes: Vec::new(),
        }
    }

    /// What keys in other spellings than Hugging Face's were taken for, a line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The configuration so far, not validated.
    pub fn arguments(&self) -> &TrainingArguments {
        &self.arguments
    }

    /// The configuration, validated.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn resolve(self) -> Result<TrainingArguments> {
        self.arguments.validate()?;
        Ok(self.arguments)
    }
}

/// The preset that a file names, if it names one that there is.
pub(crate) fn preset_of(path: &Path) -> Result<Option<Preset>> {
    let values = config_format::read(path)?;
    let named = values
        .get("preset")
        .filter(|value| !value.is_null())
        .cloned();
    // A name that is wrong gets its error when the file is read as a layer.
    Ok(named.and_then(|name| serde_json::from_value(name).ok()))
}

/// The known key that a further name stands for.
pub(crate) fn aliases() -> impl Iterator<Item = &'static str> {
    let aliases = ALIASES.iter().map(|(alias, _)| *alias);
    aliases.chain(guide_keys::spellings())
}

fn rename_aliases(values: &mut Map<String, Value>, origin: &str) -> Result<()> {
    for (alias, key) in ALIASES {
        let Some(value) = values.remove(alias) else {
            continue;
        };
        match values.get(key) {
            Some(other) if *other != value => {
                return Err(Error::GivenTwice {
                    origin: origin.to_owned(),
                    first: alias.to_owned(),
                    second: key.to_owned(),
                });
            }
            _ => values.insert(key.to_owned(), value),
        };
    }
    Ok(())
}

/// What was `group_by_length` is one of the strategies of transformers 5.
fn take_sampling_strategy(values: &mut Map<String, Value>, origin: &str) -> Result<()> {
    let key = "train_sampling_strategy";
    let grouped = match values.get(key).and_then(Value::as_str) {
        Some("group_by_length") => true,
        Some("random") => false,
        _ => return Ok(()),
    };
    match values.get("group_by_length").and_then(Value::as_bool) {
        Some(other) if other != grouped => Err(Error::GivenTwice {
            origin: origin.to_owned(),
            first: key.to_owned(),
            second: "group_by_length".to_owned(),
        }),
        _ => {
            values.shift_remove(key);
            values.insert("group_by_length".to_owned(), grouped.into());
            Ok(())
        }
    }
}

/// Serde would take a list for a struct, value by value.
fn refuse_other_shapes(values: &Map<String, Value>, defaults: &Value, origin: &str) -> Result<()> {
    let other = values.iter().find(|(key, value)| {
        defaults[key.as_str()].is_object() && !value.is_object() && !value.is_null()
    });
    let Some((key, value)) = other else {
        return Ok(());
    };
    Err(Error::WrongType {
        origin: origin.to_owned(),
        key: key.clone(),
        given: diagnosis::describe(value),
        expected: "keys with values".to_owned(),
    })
}

fn push_out(below: &mut Map<String, Value>, values: &Map<String, Value>, defaults: &Value) {
    for (key, loser) in PUSHED_OUT {
        let set = values.get(key).is_some_and(|value| {
            value.as_bool().unwrap_or(false) || value.as_f64().is_some_and(|number| number > 0.0)
        });
        if set && !values.contains_key(loser) {
            below.insert(loser.to_owned(), defaults[loser].clone());
        }
    }
}

/// Puts `upper` on `lower`, key by key. `null` stands for the default.
pub(crate) fn merge(lower: &mut Value, upper: Value, default: &Value) {
    match (lower, upper) {
        (lower, Value::Null) => *lower = default.clone(),
        (Value::Object(lower), Value::Object(upper)) => {
            for (key, value) in upper {
                let default = &default[key.as_str()];
                merge(lower.entry(key).or_insert(Value::Null), value, default);
            }
        }
        (lower, upper) => *lower = upper,
    }
}
