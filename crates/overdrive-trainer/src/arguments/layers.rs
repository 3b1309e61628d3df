//! A configuration that is merged from layers: preset, file and flags.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Map, Value};

use super::choices::Preset;
use super::finetune::FinetuneArguments;
use super::format::{ConfigFormat, read_file};
use super::key::Program;
use super::keys::{self, Source};
use super::preference::{DpoArguments, DpoConfig};
use super::read::{SECTION, as_value, keys_of, read_arguments, wrong_type};
use super::training::TrainingArguments;
use crate::{Error, Result};
use overdrive_core::files;

/// A configuration that is read from keys and flags: [`TrainingArguments`], [`FinetuneArguments`] or [`DpoArguments`].
pub trait Configuration: sealed::Keyed {}

impl Configuration for TrainingArguments {}
impl Configuration for FinetuneArguments {}
impl Configuration for DpoArguments {}

pub(crate) mod sealed {
    use super::{Map, PathBuf, Program, Result, TrainingArguments, Value, fmt};

    pub trait Keyed: Clone + Default + fmt::Debug + 'static {
        const PROGRAM: Program;

        /// Returns the configuration below all layers, for the preset of this name.
        fn base(_preset: Option<&Value>) -> Self {
            Self::default()
        }

        /// Returns the keys and values of each preset, with its name.
        fn defaults() -> Vec<(&'static str, Value)> {
            vec![("", Self::default().values().unwrap_or_default())]
        }

        /// Returns all keys with their values, as in a file.
        fn values(&self) -> Result<Value>;

        /// Reads keys and values; a missing key gets its default.
        fn read(values: Map<String, Value>, origin: &str) -> Result<Self>;

        /// Checks the values by themselves and against each other.
        fn check(&self) -> Result<()>;

        /// Returns the configuration of the training itself.
        fn training(&self) -> &TrainingArguments;

        /// Returns the configuration of the training itself.
        fn training_mut(&mut self) -> &mut TrainingArguments;

        /// Returns the files and folders that a run reads, with their keys.
        fn inputs(&self) -> Vec<(&'static str, PathBuf)>;

        /// Returns the name of the run's folder before its number, without `output_dir`.
        fn run_name(&self) -> &'static str {
            "finetune"
        }
    }
}

/// A configuration that is merged from layers: a preset, a file over it, flags over the file. Each layer changes
/// only the keys that it contains.
///
/// Some keys reset a key of the layers below that would override or contradict them: `num_train_epochs`
/// resets `max_steps`, `warmup_ratio` resets `warmup_steps`, and of `bf16`, `fp16` and `fp8` the one in
/// the upper layer counts.
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
///
/// // The keys of fine-tuning also include those of TRL, PEFT and bitsandbytes.
/// std::fs::write(&file, "model: models/small\ndata: train.jsonl\nload_in_4bit: true\nlora_r: 8\n")?;
/// let arguments = Layers::finetune().file(&file)?.resolve()?;
/// assert_eq!((arguments.lora_r, arguments.load_in_4bit), (8, true));
///
/// std::fs::write(&file, "lora_rang: 8\n")?;
/// let error = Layers::finetune().file(&file).unwrap_err().to_string();
/// assert!(error.ends_with("unknown key `lora_rang`; did you mean `lora_rank`?"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Layers<A = TrainingArguments> {
    arguments: A,
    notes: Vec<String>,
}

impl Layers<TrainingArguments> {
    /// Starts from a preset of training.
    pub fn new(preset: Preset) -> Self {
        Self::on(preset.arguments())
    }
}

impl Layers<FinetuneArguments> {
    /// Starts from the defaults of fine-tuning.
    pub fn finetune() -> Self {
        Self::on(FinetuneArguments::default())
    }
}

impl<A: Configuration> Layers<A> {
    /// Starts from a configuration.
    pub fn on(arguments: A) -> Self {
        Self {
            arguments,
            notes: Vec::new(),
        }
    }

    /// Adds a configuration file: JSON, YAML or TOML by its extension. Relative paths in it are
    /// relative to the working directory, as on the command line. `null` is the default of a key, except that
    /// `max_length: null`, which is no truncation in TRL, is an error.
    ///
    /// # Errors
    /// Errors of reading the file, and for each invalid key or value an error that names it:
    /// [`Error::UnknownKey`], [`Error::WrongType`], [`Error::UnknownChoice`], [`Error::Unsupported`],
    /// [`Error::GivenTwice`].
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        self.add(read_file(path)?, &path.display().to_string(), Some(path))
    }

    /// Adds keys and values; `origin` names them in errors.
    ///
    /// # Errors
    /// As [`Layers::file`].
    pub fn layer(self, values: Value, origin: &str) -> Result<Self> {
        self.add(values, origin, None)
    }

    fn add(mut self, values: Value, origin: &str, file: Option<&Path>) -> Result<Self> {
        let Value::Object(values) = values else {
            let key = "(the whole file)".to_owned();
            return Err(wrong_type(origin, key, &values, SECTION));
        };
        let source = Source {
            origin,
            file,
            program: A::PROGRAM,
        };
        // Translated before the merge: the layers below have no alternative spellings, so only conflicts within
        // one file are found.
        let values = keys::translate(values, source, &mut self.notes)?;
        let defaults = A::default().values()?;
        let mut merged = self.arguments.values()?;
        if let Value::Object(below) = &mut merged {
            keys::reset_excluded(below, &values, &defaults);
        }
        merge(&mut merged, Value::Object(values), &defaults);
        if let Value::Object(merged) = merged {
            self.arguments = A::read(merged, origin)?;
        }
        Ok(self)
    }

    /// Returns a line for each key that was given under an alternative spelling.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the configuration so far, without validation.
    pub fn arguments(&self) -> &A {
        &self.arguments
    }

    /// Returns the validated configuration.
    ///
    /// # Errors
    /// [`Error::Common`] for a value outside its range.
    pub fn resolve(self) -> Result<A> {
        self.arguments.check()?;
        Ok(self.arguments)
    }
}

impl sealed::Keyed for TrainingArguments {
    const PROGRAM: Program = Program::Train;

    fn base(preset: Option<&Value>) -> Self {
        // An invalid name gets its error when its layer is read.
        let preset = preset.and_then(|name| serde_json::from_value(name.clone()).ok());
        let preset: Preset = preset.unwrap_or_default();
        preset.arguments()
    }

    fn defaults() -> Vec<(&'static str, Value)> {
        // All presets, because the help prints the default of each.
        let values = |preset: Preset| preset.arguments().values().unwrap_or_default();
        let presets = Preset::value_variants().iter();
        presets
            .map(|&preset| (preset.name(), values(preset)))
            .collect()
    }

    fn values(&self) -> Result<Value> {
        as_value(self)
    }

    fn read(values: Map<String, Value>, origin: &str) -> Result<Self> {
        read_arguments(&Value::Object(values), origin, Self::PROGRAM)
    }

    fn check(&self) -> Result<()> {
        self.validate()
    }

    fn training(&self) -> &TrainingArguments {
        self
    }

    fn training_mut(&mut self) -> &mut TrainingArguments {
        self
    }

    fn inputs(&self) -> Vec<(&'static str, PathBuf)> {
        let tokenizer = self.tokenizer.clone().map(|path| ("tokenizer", path));
        let data = self.data_paths().map(|path| ("data", path));
        data.chain(tokenizer).collect()
    }

    fn run_name(&self) -> &'static str {
        self.preset.name()
    }
}

impl sealed::Keyed for FinetuneArguments {
    const PROGRAM: Program = Program::Finetune;

    fn values(&self) -> Result<Value> {
        self.to_values()
    }

    fn read(values: Map<String, Value>, origin: &str) -> Result<Self> {
        Self::read_as(Self::PROGRAM, values, origin)
    }

    fn check(&self) -> Result<()> {
        self.validate()
    }

    fn training(&self) -> &TrainingArguments {
        &self.training
    }

    fn training_mut(&mut self) -> &mut TrainingArguments {
        &mut self.training
    }

    fn inputs(&self) -> Vec<(&'static str, PathBuf)> {
        let template = self.chat_template_path.clone();
        let own = template.map(|path| ("chat_template_path", path));
        let model = ("model_name_or_path", self.model_name_or_path.clone());
        let training = self.training.inputs().into_iter();
        training.chain([model]).chain(own).collect()
    }
}

impl sealed::Keyed for DpoArguments {
    const PROGRAM: Program = Program::Dpo;

    fn values(&self) -> Result<Value> {
        let mut values = self.finetune.to_values()?;
        if let Value::Object(values) = &mut values {
            values.extend(keys_of(&self.dpo)?);
        }
        Ok(values)
    }

    fn read(values: Map<String, Value>, origin: &str) -> Result<Self> {
        let (mut dpo, others) = split(values, &DpoConfig::default())?;
        // TRL writes a list, because it can add losses up.
        if let Some(Value::Array(losses)) = dpo.get_mut("loss_type")
            && losses.len() == 1
        {
            let only = losses.pop();
            dpo.insert("loss_type".to_owned(), only.unwrap_or_default());
        }
        Ok(Self {
            dpo: read_arguments(&Value::Object(dpo), origin, Self::PROGRAM)?,
            finetune: FinetuneArguments::read_as(Self::PROGRAM, others, origin)?,
        })
    }

    fn check(&self) -> Result<()> {
        self.finetune.validate()?;
        self.dpo.validate()
    }

    fn training(&self) -> &TrainingArguments {
        &self.finetune.training
    }

    fn training_mut(&mut self) -> &mut TrainingArguments {
        &mut self.finetune.training
    }

    fn inputs(&self) -> Vec<(&'static str, PathBuf)> {
        self.finetune.inputs()
    }
}

/// Divides keys and values into the keys of `own` and all others.
fn split(
    values: Map<String, Value>,
    own: &impl Serialize,
) -> Result<(Map<String, Value>, Map<String, Value>)> {
    let own = as_value(own)?;
    let all = values.into_iter();
    Ok(all.partition(|(key, _)| own.get(key).is_some()))
}

impl FinetuneArguments {
    /// Reads the keys of this struct, and all others as keys of `training`.
    fn read_as(program: Program, values: Map<String, Value>, origin: &str) -> Result<Self> {
        let (own, training) = split(values, &Self::default())?;
        let training = read_arguments(&Value::Object(training), origin, program)?;
        let own: Self = read_arguments(&Value::Object(own), origin, program)?;
        Ok(Self { training, ..own })
    }

    /// Returns all keys at the top level, as in a file.
    ///
    /// # Errors
    /// [`Error::Unwritable`](crate::Error::Unwritable).
    pub fn to_values(&self) -> Result<Value> {
        let mut values = as_value(self)?;
        if let (Value::Object(values), Value::Object(training)) =
            (&mut values, as_value(&self.training)?)
        {
            let read = training.into_iter();
            values.extend(read.filter(|(key, _)| Program::Finetune.reads(key)));
        }
        Ok(values)
    }
}

impl TrainingArguments {
    /// Returns the configuration as the text of a file.
    ///
    /// # Errors
    /// [`Error::Unwritable`]: TOML has no integers from 2⁶³ on, and no `null` for a key without a value to
    /// which the preset gives one.
    pub fn to_text(&self, format: ConfigFormat) -> Result<String> {
        let unwritable = |message| Error::Unwritable {
            format: format.name(),
            message,
        };
        let text = format.write(self).map_err(unwritable)?;
        // The other formats write `null`; in TOML the key would be left out and get the preset's value.
        if format == ConfigFormat::Toml {
            let values = format.parse(&text).map_err(unwritable)?;
            let again = Layers::new(self.preset).layer(values, "the written configuration")?;
            if again.arguments() != self {
                return Err(unwritable(format!(
                    "a key has no value here but one in the preset `{}`, and TOML has no `null`; write \
                     JSON or YAML",
                    self.preset
                )));
            }
        }
        Ok(text)
    }

    /// Writes the configuration to a file atomically, in the format of its extension. Reading it with
    /// [`Layers::file`](crate::Layers::file) returns an equal configuration.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`], [`Error::Unwritable`], [`Error::Common`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = self.to_text(ConfigFormat::of(path)?)?;
        Ok(files::write(path, text.as_bytes())?)
    }
}

/// Merges `upper` into `lower`, key by key. `null` stands for the default.
fn merge(lower: &mut Value, upper: Value, default: &Value) {
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
