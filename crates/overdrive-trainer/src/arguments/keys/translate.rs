//! Translation of configurations of other projects into the keys of the table.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::translations::{REFUSED, Rule, SECTIONS, TRANSLATIONS, Translation};
use super::{rows, rows_of};
use crate::arguments::key::{Program, at, plain};
use crate::arguments::layers::sealed::Keyed;
use crate::{DpoArguments, Error, FinetuneArguments, Result, TrainingArguments};

/// The origin of the flags.
pub(in crate::arguments) const COMMAND_LINE: &str = "the command line";

/// The source of a layer of keys and values.
#[derive(Debug, Clone, Copy)]
pub(in crate::arguments) struct Source<'a> {
    /// The name of the source in errors.
    pub(in crate::arguments) origin: &'a str,
    /// The path of the source, if it is a file.
    pub(in crate::arguments) file: Option<&'a Path>,
    /// The program that reads it.
    pub(in crate::arguments) program: Program,
}

/// Moves every value to its key in the table, and drops keys that request nothing. Each translation adds a
/// line to `notes`.
///
/// # Errors
/// [`Error::GivenTwice`] for two spellings of one key with different values, [`Error::UnknownChoice`], and
/// [`Error::Unsupported`] for a key whose effect the program does not support.
pub(in crate::arguments) fn translate(
    mut values: Map<String, Value>,
    source: Source<'_>,
    notes: &mut Vec<String>,
) -> Result<Map<String, Value>> {
    Translator {
        values: &mut values,
        source,
        notes,
    }
    .run()?;
    refuse_unread(&mut values, source)?;
    Ok(values)
}

/// The translation of a layer.
struct Translator<'a> {
    values: &'a mut Map<String, Value>,
    source: Source<'a>,
    notes: &'a mut Vec<String>,
}

impl Translator<'_> {
    fn run(&mut self) -> Result<()> {
        self.open_sections()?;
        let renamed = self.rename_spellings()?;
        self.refuse_options()?;
        self.convert_checkpointing()?;
        let packing = self
            .values
            .get("packing")
            .filter(|value| !value.is_null())
            .cloned();
        if self.values.get("eval_packing") == Some(&packing.unwrap_or(Value::Bool(false))) {
            self.values.shift_remove("eval_packing");
        }
        for translation in TRANSLATIONS {
            for name in translation.names {
                self.apply(translation, name)?;
            }
        }
        for (steps, strategy) in [
            ("eval_steps", "eval_strategy"),
            ("save_steps", "save_strategy"),
        ] {
            if self.values.get(strategy) == Some(&Value::Bool(false)) {
                // YAML reads `no` as false.
                self.set(strategy, json!("no"));
            }
            if self.values.contains_key(strategy) {
                continue;
            }
            if self.values.get(steps).and_then(Value::as_f64) == Some(0.0) {
                self.notes.push(format!("`{steps}: 0` is `{strategy}: no`"));
                self.values.shift_remove(steps);
                self.set(strategy, json!("no"));
            } else if renamed.contains(&steps)
                || (self.source.origin == COMMAND_LINE && self.values.contains_key(steps))
            {
                // Projects with `eval_interval` have no separate key that enables evaluation, and a flag is meant to act.
                self.set(strategy, json!("steps"));
            }
        }
        // In other projects, switching a dtype off means fp32, and not an automatic choice.
        let is_off = |key: &str| self.values.get(key) == Some(&Value::Bool(false));
        if self.source.program == Program::Train
            && !self.values.contains_key("auto_precision")
            && (is_off("bf16") || is_off("fp16"))
        {
            self.set("auto_precision", json!(false));
        }
        Ok(())
    }

    fn open_sections(&mut self) -> Result<()> {
        for section in SECTIONS {
            for name in section.names {
                let Some(Value::Object(mut inner)) = self.values.get(*name).cloned() else {
                    continue;
                };
                self.values.shift_remove(*name);
                // Trainers with sections switch a section off with `enabled: false`, and keep its other
                // keys in the file.
                if inner.shift_remove("enabled") == Some(Value::Bool(false)) {
                    self.notes
                        .push(format!("`{name}` is not enabled, so it is ignored"));
                    continue;
                }
                if section.of_finetuning && self.source.program == Program::Train {
                    let (given, others) = (Value::Object(inner), &*self.values);
                    let readers = Program::FINETUNE;
                    return Err(other_program(
                        name,
                        &given,
                        readers,
                        "",
                        others,
                        self.source,
                    ));
                }
                self.notes
                    .push(format!("the keys of `{name}` are read as top-level keys"));
                for (key, value) in inner {
                    let renamed = section.inside.iter().find(|(inside, _)| *inside == key);
                    let outside = renamed.map_or(key.as_str(), |(_, outside)| outside);
                    self.put(&format!("{name}.{key}"), outside, value)?;
                }
            }
        }
        Ok(())
    }

    /// Renames alternative spellings, and returns the keys that were given under such a spelling.
    fn rename_spellings(&mut self) -> Result<Vec<&'static str>> {
        let mut renamed = Vec::new();
        for key in rows() {
            for spelling in key.spellings {
                // `model` is a folder in fine-tuning, but a section in training.
                if rows_of(self.source.program).any(|own| own.name == *spelling) {
                    continue;
                }
                if let Some(value) = self.values.shift_remove(*spelling) {
                    if value.is_null() && *spelling == "max_length" {
                        // TRL's `None`, unlike a missing key, is no truncation.
                        let remedy =
                            "give the largest number of tokens; longer examples are truncated";
                        return Err(self.unsupported(spelling, &value, remedy));
                    }
                    self.notes.push(format!("`{spelling}` is `{}`", key.name));
                    self.put(spelling, key.name, value)?;
                    renamed.push(key.name);
                }
            }
        }
        Ok(renamed)
    }

    fn refuse_options(&self) -> Result<()> {
        for (name, remedy) in REFUSED {
            let (key, option) = name.split_once('.').unwrap_or((*name, ""));
            let Some(options) = self.values.get(key) else {
                continue;
            };
            let value = at(options, option);
            if !value.is_null() && *value != Value::Bool(false) {
                return Err(self.unsupported(name, value, remedy));
            }
        }
        Ok(())
    }

    fn unsupported(&self, key: &str, value: &Value, remedy: &str) -> Error {
        Error::Unsupported {
            origin: self.source.origin.to_owned(),
            key: key.to_owned(),
            given: plain(value),
            by: "by overdrive-trainer",
            remedy: remedy.to_owned(),
        }
    }

    /// Converts the options of transformers' checkpointing that torch does not have.
    fn convert_checkpointing(&mut self) -> Result<()> {
        const KEY: &str = "gradient_checkpointing_kwargs";
        let Some(Value::Object(mut options)) = self.values.get(KEY).cloned() else {
            return Ok(());
        };
        // `true` has been refused.
        options.shift_remove("offload");
        let every = options.shift_remove("every_n_layers");
        if let Some(every) = every.filter(|every| !every.is_null()) {
            if options.contains_key("schedule") {
                return Err(Error::GivenTwice {
                    origin: self.source.origin.to_owned(),
                    first: format!("{KEY}.every_n_layers"),
                    second: format!("{KEY}.schedule"),
                });
            }
            let schedule = json!({ "every_nth": every });
            self.notes.push(format!(
                "`every_n_layers: {every}` is `schedule: {schedule}`"
            ));
            options.insert("schedule".to_owned(), schedule);
        }
        self.set(KEY, Value::Object(options));
        Ok(())
    }

    fn apply(&mut self, translation: &Translation, name: &str) -> Result<()> {
        let Some(value) = self.values.get(name).cloned() else {
            return Ok(());
        };
        let given = plain(&value);
        let short = given.to_lowercase();
        let short = short.trim_start_matches("torch.");
        // A device index has no effect: `cuda:0` is `cuda`.
        let short = short.split(':').next().unwrap_or_default();
        let meant = |rule: &&Rule| {
            rule.given.contains(&short) || (rule.given == ["N"] && value.is_number())
        };
        let Some(rule) = translation.rules.iter().find(meant) else {
            if value.is_null() {
                self.values.shift_remove(name);
            }
            if value.is_null() || rows().any(|key| key.name == name) {
                return Ok(());
            }
            let rules = translation.rules.iter();
            let choices = rules.filter_map(|rule| rule.given.first());
            return Err(Error::UnknownChoice {
                origin: self.source.origin.to_owned(),
                key: name.to_owned(),
                given,
                choices: choices.map(ToString::to_string).collect(),
                hint: String::new(),
            });
        };
        self.values.shift_remove(name);
        let Some((key, new)) = rule.sets else {
            self.notes.push(format!("`{name}: {given}` {}", rule.note));
            return Ok(());
        };
        let other = self.values.get(translation.unless);
        if other.is_some_and(|other| !other.is_null() && *other != Value::Bool(false)) {
            return Ok(());
        }
        // The rules of the table are valid JSON: a test parses all of them.
        let new = serde_json::from_str(new).unwrap_or(value);
        let (shown, note) = (plain(&new), rule.note);
        self.notes
            .push(format!("`{name}: {given}` is `{key}: {shown}`{note}"));
        self.put(name, key, new)
    }

    fn set(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
    }

    /// Inserts a value under `key`; a different value that is there already is an error.
    fn put(&mut self, from: &str, key: &str, value: Value) -> Result<()> {
        match self.values.get(key) {
            // `null` is a key that is not set.
            Some(_) if value.is_null() => Ok(()),
            Some(other) if *other != value && !other.is_null() => Err(Error::GivenTwice {
                origin: self.source.origin.to_owned(),
                first: from.to_owned(),
                second: key.to_owned(),
            }),
            _ => {
                self.set(key, value);
                Ok(())
            }
        }
    }
}

/// Drops the keys that `source.program` does not read and that request nothing.
///
/// # Errors
/// [`Error::Unsupported`], with the remedy, for an unread key that requests something.
pub(in crate::arguments) fn refuse_unread(
    values: &mut Map<String, Value>,
    source: Source<'_>,
) -> Result<()> {
    for key in rows().filter(|key| !key.is_read_by(source.program)) {
        let Some(value) = values.shift_remove(key.name) else {
            continue;
        };
        if !key.accepts(&value) {
            let (name, instead) = (key.name, key.instead);
            let readers: &[Program] = match takes(key.readers, name, &value) {
                true => key.readers,
                false => &[],
            };
            return Err(other_program(
                name, &value, readers, instead, values, source,
            ));
        }
    }
    Ok(())
}

/// Returns `true` if the first of the programs `readers` takes this value of the key.
fn takes(readers: &[Program], key: &str, value: &Value) -> bool {
    let values = Map::from_iter([(key.to_owned(), value.clone())]);
    match readers.first() {
        None => false,
        Some(Program::Train) => TrainingArguments::read(values, "").is_ok(),
        Some(Program::Finetune) => FinetuneArguments::read(values, "").is_ok(),
        Some(Program::Dpo) => DpoArguments::read(values, "").is_ok(),
    }
}

/// Returns the error of a key that only the programs `readers` read, with the command that runs one of them.
fn other_program(
    key: &str,
    value: &Value,
    readers: &[Program],
    instead: &str,
    others: &Map<String, Value>,
    source: Source<'_>,
) -> Error {
    let unsupported = |by, remedy| Error::Unsupported {
        origin: source.origin.to_owned(),
        key: key.to_owned(),
        given: plain(value),
        by,
        remedy,
    };
    let (program, aim) = match readers.first() {
        None if instead.is_empty() => {
            return unsupported("by overdrive-trainer", "leave it out".to_owned());
        }
        None => return unsupported("by overdrive-trainer", instead.to_owned()),
        Some(Program::Train) => ("train", "to train from scratch"),
        Some(Program::Finetune) => ("finetune", "to fine-tune"),
        Some(Program::Dpo) => ("dpo", "to train on preferences"),
    };
    let file = source.file.map_or_else(|| "FILE".to_owned(), shell_word);
    let by = match source.program {
        Program::Train => "in training from scratch",
        Program::Finetune => "in fine-tuning",
        Program::Dpo => "in preference training",
    };
    let mut command =
        format!("cargo run --release -p overdrive-examples --example {program} -- --config {file}");
    if source.program == Program::Train {
        let given = [
            ("model_name_or_path", " --model DIR"),
            ("data", " --data FILE"),
        ];
        for (needed, flag) in given {
            if needed != key && !others.contains_key(needed) {
                command += flag;
            }
        }
    }
    let between = if instead.is_empty() { "" } else { "; " };
    unsupported(by, format!("{instead}{between}{aim}, run: {command}"))
}

/// Quotes a path for a shell if it needs quotes.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:=@%".contains(c);
    match text.chars().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}
