//! Translation of configurations of other projects into the keys of the table.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::translations::{Rule, SECTIONS, TRANSLATIONS, Translation};
use super::{rows, rows_of};
use crate::arguments::key::{Key, Program, Reader, plain};
use crate::{Error, Result};

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
    open_sections(&mut values, source, notes)?;
    let renamed = rename_spellings(&mut values, source, notes)?;
    for translation in TRANSLATIONS {
        for name in translation.names {
            apply(translation, name, &mut values, source, notes)?;
        }
    }
    for (steps, strategy) in [
        ("eval_steps", "eval_strategy"),
        ("save_steps", "save_strategy"),
    ] {
        if values.get(strategy) == Some(&Value::Bool(false)) {
            // YAML reads `no` as false.
            values.insert(strategy.to_owned(), json!("no"));
        }
        if values.contains_key(strategy) {
            continue;
        }
        if values.get(steps).and_then(Value::as_f64) == Some(0.0) {
            notes.push(format!("`{steps}: 0` is `{strategy}: no`"));
            values.shift_remove(steps);
            values.insert(strategy.to_owned(), json!("no"));
        } else if renamed.contains(&steps)
            || (source.origin == COMMAND_LINE && values.contains_key(steps))
        {
            // Projects with `eval_interval` have no separate key that enables evaluation, and a flag is meant to act.
            values.insert(strategy.to_owned(), json!("steps"));
        }
    }
    // In other projects, switching a dtype off means fp32, and not an automatic choice.
    let is_off = |key: &str| values.get(key) == Some(&Value::Bool(false));
    if source.program == Program::Train
        && !values.contains_key("auto_precision")
        && (is_off("bf16") || is_off("fp16"))
    {
        values.insert("auto_precision".to_owned(), json!(false));
    }
    refuse_unread(&mut values, source)?;
    Ok(values)
}

fn open_sections(
    values: &mut Map<String, Value>,
    source: Source<'_>,
    notes: &mut Vec<String>,
) -> Result<()> {
    for section in SECTIONS {
        for name in section.names {
            let Some(Value::Object(mut inner)) = values.get(*name).cloned() else {
                continue;
            };
            values.shift_remove(*name);
            // Trainers with sections switch a section off with `enabled: false`, and keep its other
            // keys in the file.
            if inner.shift_remove("enabled") == Some(Value::Bool(false)) {
                notes.push(format!("`{name}` is not enabled, so it is ignored"));
                continue;
            }
            if section.of_finetuning && source.program == Program::Train {
                let given = Value::Object(inner);
                return Err(other_program(
                    name,
                    &given,
                    Reader::Finetune,
                    "",
                    values,
                    source,
                ));
            }
            notes.push(format!("the keys of `{name}` are read as top-level keys"));
            for (key, value) in inner {
                let renamed = section.inside.iter().find(|(inside, _)| *inside == key);
                let outside = renamed.map_or(key.as_str(), |(_, outside)| outside);
                put(values, &format!("{name}.{key}"), outside, value, source)?;
            }
        }
    }
    Ok(())
}

/// Renames alternative spellings, and returns the keys that were given under such a spelling.
fn rename_spellings(
    values: &mut Map<String, Value>,
    source: Source<'_>,
    notes: &mut Vec<String>,
) -> Result<Vec<&'static str>> {
    let mut renamed = Vec::new();
    for key in rows() {
        for spelling in key.spellings {
            // `model` is a folder in fine-tuning, but a section in training.
            if rows_of(source.program).any(|own| own.name == *spelling) {
                continue;
            }
            if let Some(value) = values.shift_remove(*spelling) {
                notes.push(format!("`{spelling}` is `{}`", key.name));
                put(values, spelling, key.name, value, source)?;
                renamed.push(key.name);
            }
        }
    }
    Ok(renamed)
}

fn apply(
    translation: &Translation,
    name: &str,
    values: &mut Map<String, Value>,
    source: Source<'_>,
    notes: &mut Vec<String>,
) -> Result<()> {
    let Some(value) = values.get(name).cloned() else {
        return Ok(());
    };
    let given = plain(&value);
    let short = given.to_lowercase();
    let short = short.trim_start_matches("torch.");
    // A device index has no effect: `cuda:0` is `cuda`.
    let short = short.split(':').next().unwrap_or_default();
    let meant =
        |rule: &&Rule| rule.given.contains(&short) || (rule.given == ["N"] && value.is_number());
    let Some(rule) = translation.rules.iter().find(meant) else {
        if value.is_null() {
            values.shift_remove(name);
        }
        if value.is_null() || rows().any(|key| key.name == name) {
            return Ok(());
        }
        let choices = translation
            .rules
            .iter()
            .filter_map(|rule| rule.given.first());
        return Err(Error::UnknownChoice {
            origin: source.origin.to_owned(),
            key: name.to_owned(),
            given,
            choices: choices.map(ToString::to_string).collect(),
            hint: String::new(),
        });
    };
    values.shift_remove(name);
    let Some((key, new)) = rule.sets else {
        notes.push(format!("`{name}: {given}` {}", rule.note));
        return Ok(());
    };
    let other = values.get(translation.unless);
    if other.is_some_and(|other| !other.is_null() && *other != Value::Bool(false)) {
        return Ok(());
    }
    // The rules of the table are valid JSON: a test parses all of them.
    let new = serde_json::from_str(new).unwrap_or(value);
    notes.push(format!(
        "`{name}: {given}` is `{key}: {}`{}",
        plain(&new),
        rule.note
    ));
    put(values, name, key, new, source)
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
            return Err(refusal(key, &value, values, source));
        }
    }
    Ok(())
}

fn refusal(key: &Key, value: &Value, others: &Map<String, Value>, source: Source<'_>) -> Error {
    if key.reader != Reader::None {
        return other_program(key.name, value, key.reader, key.instead, others, source);
    }
    Error::Unsupported {
        origin: source.origin.to_owned(),
        key: key.name.to_owned(),
        given: plain(value),
        by: "by overdrive-trainer",
        remedy: match key.instead {
            "" => "leave it out".to_owned(),
            instead => instead.to_owned(),
        },
    }
}

/// Returns the error of a key that only the programs `reader` read, with the command that runs one of them.
fn other_program(
    key: &str,
    value: &Value,
    reader: Reader,
    instead: &str,
    others: &Map<String, Value>,
    source: Source<'_>,
) -> Error {
    let file = source.file.map_or_else(|| "FILE".to_owned(), shell_word);
    let by = match source.program {
        Program::Train => "in training from scratch",
        Program::Finetune => "in fine-tuning",
        Program::Dpo => "in preference training",
    };
    let (program, aim) = match reader {
        Reader::Dpo => ("dpo", "to train on preferences"),
        Reader::Finetune => ("finetune", "to fine-tune"),
        _ => ("train", "to train from scratch"),
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
    Error::Unsupported {
        origin: source.origin.to_owned(),
        key: key.to_owned(),
        given: plain(value),
        by,
        remedy: format!("{instead}{between}{aim}, run: {command}"),
    }
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

/// Inserts a value under `key`; a different value that is there already is an error.
fn put(
    values: &mut Map<String, Value>,
    from: &str,
    key: &str,
    value: Value,
    source: Source<'_>,
) -> Result<()> {
    match values.get(key) {
        Some(other) if *other != value => Err(Error::GivenTwice {
            origin: source.origin.to_owned(),
            first: from.to_owned(),
            second: key.to_owned(),
        }),
        _ => {
            values.insert(key.to_owned(), value);
            Ok(())
        }
    }
}
