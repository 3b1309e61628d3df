//! The table of configuration keys, and everything that is derived from it: alternative spellings, flags,
//! ranges and errors. A new key is a field of [`TrainingArguments`](crate::TrainingArguments) or
//! [`FinetuneArguments`](crate::FinetuneArguments) and a row in `table.rs`; a test fails if one of the two is
//! missing, or if no code reads the key.

mod flags;
mod foreign;
mod range;
mod spellings;
mod table;
#[cfg(test)]
mod tests;
mod translate;

use serde_json::{Map, Value};

pub use flags::ConfigArgs;
pub(crate) use range::check_ranges;
pub(crate) use translate::{Source, refuse_unread, translate};

use range::Range;

/// A program that reads a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Training from scratch.
    Train,
    /// Fine-tuning.
    Finetune,
}

impl Program {
    /// Returns `true` if a key has an effect on the program.
    pub(crate) fn reads(self, name: &str) -> bool {
        rows_of(self).any(|(_, key)| key.name == name)
    }
}

/// The programs that read a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    Both,
    Train,
    Finetune,
    /// No program: a key of another project, whose effect Overdrive does not have.
    Neither,
}

/// The values that a program accepts for a key that it does not read. `null` is always accepted.
#[derive(Debug, Clone, Copy)]
enum Harmless {
    /// Only `null`.
    Null,
    /// `null` and this value, as JSON: it requests nothing.
    Only(&'static str),
    /// Any value: the key is an option of another key.
    Any,
}

/// A row of the table.
#[derive(Debug)]
pub(crate) struct Key {
    /// The name in files. Keys of the section `model` are written `model.hidden_size`.
    name: &'static str,
    reader: Reader,
    /// The alternative names that are accepted.
    spellings: &'static [&'static str],
    /// The name of the flag, if it is not the key's with dashes; empty for a key without a flag.
    flag: Option<&'static str>,
    /// The name of the flag's value in the help; empty for a switch.
    value: &'static str,
    /// Set for a flag with several values; if `true`, they may also be separated by commas.
    list: Option<bool>,
    help: &'static str,
    /// The help in fine-tuning, if it differs.
    help_of_finetune: Option<&'static str>,
    range: Range,
    /// A key that this one contradicts: setting this one resets it in the layers below, and the flags conflict.
    excludes: &'static str,
    /// The values that a program accepts without reading the key.
    harmless: Harmless,
    /// The remedy in the error about a refused value.
    instead: &'static str,
}

const fn key(
    reader: Reader,
    name: &'static str,
    value: &'static str,
    range: Range,
    help: &'static str,
) -> Key {
    Key {
        name,
        reader,
        spellings: &[],
        flag: None,
        value,
        list: None,
        help,
        help_of_finetune: None,
        range,
        excludes: "",
        harmless: Harmless::Null,
        instead: "",
    }
}

/// Returns a key of another project. With a harmless value it is dropped, with any other it is an error.
const fn foreign(name: &'static str, harmless: Harmless, instead: &'static str) -> Key {
    let key = key(Reader::Neither, name, "", Range::Any, "").harmless(harmless);
    key.instead(instead)
}

impl Key {
    const fn also(mut self, spellings: &'static [&'static str]) -> Self {
        self.spellings = spellings;
        self
    }

    const fn flag(mut self, flag: &'static str) -> Self {
        self.flag = Some(flag);
        self
    }

    /// Makes the flag take several values.
    const fn paths(mut self) -> Self {
        self.list = Some(false);
        self
    }

    /// Makes the flag take several values, which may also be separated by commas.
    const fn names(mut self) -> Self {
        self.list = Some(true);
        self
    }

    const fn finetune(mut self, help: &'static str) -> Self {
        self.help_of_finetune = Some(help);
        self
    }

    const fn excludes(mut self, other: &'static str) -> Self {
        self.excludes = other;
        self
    }

    const fn harmless(mut self, harmless: Harmless) -> Self {
        self.harmless = harmless;
        self
    }

    const fn instead(mut self, remedy: &'static str) -> Self {
        self.instead = remedy;
        self
    }

    fn is_read_by(&self, program: Program) -> bool {
        match self.reader {
            Reader::Both => true,
            Reader::Train => program == Program::Train,
            Reader::Finetune => program == Program::Finetune,
            Reader::Neither => false,
        }
    }

    /// Returns `true` if a program that does not read the key may ignore this value.
    fn accepts(&self, value: &Value) -> bool {
        match self.harmless {
            // transformers writes `null` for keys that are not set.
            _ if value.is_null() => true,
            Harmless::Null => false,
            Harmless::Any => true,
            Harmless::Only(harmless) => match serde_json::from_str::<Value>(harmless) {
                // 0 and 0.0 are different JSON numbers, but the same value in a configuration.
                Ok(Value::Number(number)) => value.as_f64() == number.as_f64(),
                Ok(harmless) => *value == harmless,
                Err(_) => false,
            },
        }
    }
}

/// Returns every row with its heading in the help; the keys of other projects have none.
fn rows() -> impl Iterator<Item = (&'static str, &'static Key)> {
    let own = table::KEYS.iter();
    let own = own.flat_map(|(heading, keys)| keys.iter().map(move |key| (*heading, key)));
    own.chain(foreign::KEYS.iter().map(|key| ("", key)))
}

/// Returns the rows that a program reads.
fn rows_of(program: Program) -> impl Iterator<Item = (&'static str, &'static Key)> {
    rows().filter(move |(_, key)| key.is_read_by(program))
}

/// Returns every name that a program reads, spellings included; keys of a section have dotted names.
pub(crate) fn names(program: Program) -> impl Iterator<Item = &'static str> {
    let names = rows_of(program).map(|(_, key)| key.name);
    // Spellings of keys that only the other program reads are included, because their error is more precise.
    let spellings = rows().flat_map(|(_, key)| key.spellings.iter().copied());
    names.chain(spellings)
}

/// Resets the keys of the layers below that `values` contradicts. A key counts as set if it is true or above
/// 0; keys that the same layer sets are not reset.
pub(crate) fn reset_excluded(
    below: &mut Map<String, Value>,
    values: &Map<String, Value>,
    defaults: &Value,
) {
    for (_, key) in rows().filter(|(_, key)| !key.excludes.is_empty()) {
        let set = values.get(key.name).is_some_and(|value| {
            value.as_bool().unwrap_or(false) || value.as_f64().is_some_and(|number| number > 0.0)
        });
        if set && !values.contains_key(key.excludes) {
            below.insert(key.excludes.to_owned(), defaults[key.excludes].clone());
        }
    }
}

/// Returns the value at a dotted name.
fn at<'v>(values: &'v Value, name: &str) -> &'v Value {
    name.split('.').fold(values, |value, part| &value[part])
}

/// Returns a value as it is written in a sentence: strings without quotes.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        // JSON writes 100.0; people write 100.
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float != 0.0 && float.abs() < 1e-4 => {
                format!("{float:e}")
            }
            Some(float) if number.is_f64() => float.to_string(),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}
