use std::path::Path;

use overdrive_distributed::ProcessGroup;
use serde_json::{Map, Value};

use super::FinetuneArguments;
use crate::layers::{self, Layers};
use crate::run_folder::on_main;
use crate::{
    ConfigFormat, Error, Result, RunFolder, config_format, diagnosis, foreign_keys, guide_keys,
};

/// Keys that are known under further names: those of TRL, PEFT, axolotl and Unsloth.
const ALIASES: [(&str, &str); 14] = [
    ("model", "model_name_or_path"),
    ("base_model", "model_name_or_path"),
    ("model_name", "model_name_or_path"),
    ("train_file", "data"),
    ("dataset_path", "data"),
    ("data_path", "data"),
    ("dataset", "data"),
    ("use_lora", "use_peft"),
    ("r", "lora_r"),
    ("lora_rank", "lora_r"),
    ("lora_target_modules", "target_modules"),
    ("lora_modules_to_save", "modules_to_save"),
    ("use_bnb_nested_quant", "bnb_4bit_use_double_quant"),
    ("max_samples", "max_train_samples"),
];

/// Sections whose keys count as if they stood outside, with what their keys are called there.
const SECTIONS: [(&str, &[(&str, &str)]); 7] = [
    ("quantization_config", &[]),
    ("bnb_config", &[]),
    ("quantization", &[]),
    ("peft_config", LORA),
    ("lora_config", LORA),
    ("lora", LORA),
    ("training_args", &[]),
];

const LORA: &[(&str, &str)] = &[
    ("r", "lora_r"),
    ("rank", "lora_r"),
    ("alpha", "lora_alpha"),
    ("dropout", "lora_dropout"),
];

/// Keys that say what a file is and ask for nothing here.
const IDLE: [&str; 7] = [
    "task_type",
    "lora_task_type",
    "peft_type",
    "quant_method",
    "bnb_4bit_quant_storage",
    "inference_mode",
    "trust_remote_code",
];

/// Keys of training from scratch that mean nothing here.
const NOT_HERE: [(&str, &str); 4] = [
    ("preset", "the model has its shape"),
    ("vocab_size", "the model has its tokenizer"),
    ("tokenizer", "the model has its tokenizer"),
    ("sample_by", "files of records have records"),
];

/// The configuration of a fine-tuning in layers, as [`Layers`] is that of a training: a file, on it
/// flags. Wrong keys, types and choices are named with the nearest right one.
///
/// ```
/// use overdrive_trainer::FinetuneLayers;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("qlora.yaml");
/// std::fs::write(
///     &file,
///     "model: models/small\ndata: train.jsonl\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n\
///      lora_r: 8\noptim: paged_adamw_8bit\nmax_seq_length: 512\n",
/// )?;
/// let arguments = FinetuneLayers::new().file(&file)?.resolve()?;
/// assert_eq!((arguments.lora_r, arguments.training.context_length), (8, 512));
///
/// std::fs::write(&file, "lora_rang: 8\n")?;
/// let error = FinetuneLayers::new().file(&file).unwrap_err().to_string();
/// assert!(error.ends_with("unknown key `lora_rang`; did you mean `lora_rank`?"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct FinetuneLayers {
    arguments: FinetuneArguments,
    notes: Vec<String>,
}

impl FinetuneLayers {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file: JSON, YAML or TOML by its extension.
    ///
    /// # Errors
    /// As [`Layers::file`].
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        self.layer(config_format::read(path)?, &path.display().to_string())
    }

    /// Adds keys and values; `origin` names them in errors.
    ///
    /// # Errors
    /// As [`Layers::layer`].
    pub fn layer(mut self, values: Value, origin: &str) -> Result<Self> {
        let Value::Object(values) = values else {
            return Err(Error::WrongType {
                origin: origin.to_owned(),
                key: "(the whole file)".to_owned(),
                given: diagnosis::describe(&values),
                expected: "keys with values".to_owned(),
            });
        };
        let mut values = flattened(values, origin)?;
        values = guide_keys::translate(values, origin, &mut self.notes)?;
        for (alias, key) in ALIASES {
            if let Some(value) = values.shift_remove(alias) {
                guide_keys::put(&mut values, alias, key, value, origin)?;
            }
        }
        IDLE.iter().for_each(|key| {
            values.shift_remove(*key);
        });
        let defaults = diagnosis::as_value(&FinetuneArguments::default())?;
        let training_defaults = diagnosis::as_value(&FinetuneArguments::default().training)?;
        let (mut own, mut training) = (Map::new(), Map::new());
        for (key, value) in values {
            if let Some((_, why)) = NOT_HERE.iter().find(|(other, _)| *other == key) {
                return Err(Error::Unsupported {
                    origin: origin.to_owned(),
                    given: value.to_string(),
                    way_out: format!("leave it out: {why}"),
                    key,
                });
            }
            if defaults.get(&key).is_some() {
                own.insert(key, value);
            } else if training_defaults.get(&key).is_some()
                || layers::aliases().any(|alias| alias == key)
                || foreign_keys::is_foreign(&key)
            {
                training.insert(key, value);
            } else {
                return Err(unknown(&key, &defaults, &training_defaults, origin));
            }
        }
        let mut merged = diagnosis::as_value(&self.arguments)?;
        layers::merge(&mut merged, Value::Object(own), &defaults);
        let below = self.arguments.training;
        self.arguments = diagnosis::read_arguments(merged, origin)?;
        let layers = Layers::on(below).layer(Value::Object(training), origin)?;
        self.arguments.training = layers.arguments().clone();
        Ok(self)
    }

    /// What keys in other spellings were taken for, a line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The configuration, validated.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn resolve(self) -> Result<FinetuneArguments> {
        self.arguments.validate()?;
        Ok(self.arguments)
    }
}

impl FinetuneArguments {
    /// All keys side by side, as a file has them.
    ///
    /// # Errors
    /// [`Error::Unwritable`].
    pub fn to_values(&self) -> Result<Value> {
        let mut values = diagnosis::as_value(self)?;
        let training = diagnosis::as_value(&self.training)?;
        if let (Value::Object(values), Value::Object(training)) = (&mut values, training) {
            values.extend(training.into_iter().filter(|(key, _)| {
                key != "model" && NOT_HERE.iter().all(|(other, _)| other != key)
            }));
        }
        Ok(values)
    }

    /// Makes the folder of the run, `output_dir` or a new one under `runs/`, and writes the
    /// configuration into it.
    ///
    /// # Errors
    /// As [`RunFolder::create`].
    pub fn create_folder(&self) -> Result<RunFolder> {
        self.write_into(RunFolder::make(&self.training, "finetune")?)
    }

    /// As [`RunFolder::open_or_create`], with the configuration of a fine-tuning.
    ///
    /// # Errors
    /// As [`RunFolder::open_or_create`].
    pub fn open_or_create_folder(&self, group: &ProcessGroup) -> Result<RunFolder> {
        on_main(group, || match RunFolder::to_resume(&self.training)? {
            Some(run) => self.write_into(run),
            None => self.create_folder(),
        })
    }

    fn write_into(&self, run: RunFolder) -> Result<RunFolder> {
        let mut stored = self.clone();
        stored.training.output_dir = Some(run.root().to_owned());
        let text = format!("{:#}\n", stored.to_values()?);
        let path = run.arguments();
        debug_assert_eq!(ConfigFormat::of(&path).ok(), Some(ConfigFormat::Json));
        std::fs::write(&path, text).map_err(Error::io("write", path))?;
        Ok(run)
    }
}

/// Sections opened.
fn flattened(mut values: Map<String, Value>, origin: &str) -> Result<Map<String, Value>> {
    for (section, names) in SECTIONS {
        if !values.get(section).is_some_and(Value::is_object) {
            continue;
        }
        let Some(Value::Object(inner)) = values.shift_remove(section) else {
            continue;
        };
        for (key, value) in inner {
            let name = names.iter().find(|(name, _)| *name == key);
            let outside = name.map_or(key.as_str(), |(_, outside)| outside).to_owned();
            guide_keys::put(
                &mut values,
                &format!("{section}.{key}"),
                &outside,
                value,
                origin,
            )?;
        }
    }
    Ok(values)
}

fn unknown(key: &str, own: &Value, training: &Value, origin: &str) -> Error {
    let names = [own, training].into_iter().filter_map(Value::as_object);
    let mut known: Vec<&str> = Vec::new();
    names.for_each(|keys| known.extend(keys.keys().map(String::as_str)));
    known.extend(ALIASES.iter().map(|(alias, _)| *alias));
    for alias in layers::aliases() {
        known.push(alias);
    }
    let hint = match diagnosis::nearest(key, known.into_iter()) {
        Some(name) => format!("; did you mean `{name}`?"),
        None => {
            "; no known key is near it, see `--help` and the guide's page on fine-tuning".to_owned()
        }
    };
    Error::UnknownKey {
        origin: origin.to_owned(),
        key: key.to_owned(),
        hint,
    }
}
