//! The table of keys, and what is derived from it: other names, ranges, the resetting of keys in the layers below.

mod foreign;
#[cfg(test)]
mod tests;
mod translate;
mod translations;

use serde_json::{Map, Value};

pub(super) use translate::{COMMAND_LINE, Source, refuse_unread, translate};

use super::finetune::FINETUNE;
use super::key::{Key, Program, Range, at, plain};
use super::model::MODEL;
use super::preference::PREFERENCE;
use super::training::TRAINING;
use crate::Result;

/// The headings of the help, in its order.
const HEADINGS: [&str; 11] = [
    "Configuration",
    "Data",
    "Records",
    "Model",
    "Training",
    "Preferences",
    "Evaluation and snapshots",
    "Reports",
    "Adapters",
    "Quantization",
    "Machine",
];

impl Program {
    /// Returns `true` if a key has an effect on the program.
    pub(super) fn reads(self, name: &str) -> bool {
        rows_of(self).any(|key| key.name == name)
    }
}

/// Returns every row: in the order of the help, and then the keys of other projects.
fn rows() -> impl Iterator<Item = &'static Key> {
    let own = HEADINGS.into_iter().flat_map(|heading| {
        let all = [TRAINING, MODEL, FINETUNE, PREFERENCE]
            .into_iter()
            .flatten();
        all.filter(move |key| key.heading == heading)
    });
    let foreign = [
        foreign::KEYS,
        foreign::UNSET,
        foreign::OFF,
        foreign::WITHOUT_EFFECT,
    ];
    own.chain(foreign.into_iter().flatten())
}

/// Returns the rows that a program reads.
pub(super) fn rows_of(program: Program) -> impl Iterator<Item = &'static Key> {
    rows().filter(move |key| key.is_read_by(program))
}

/// Returns `true` for a key that may have a different value on each process.
pub(crate) fn differs_by_rank(name: &str) -> bool {
    rows().any(|key| key.per_rank && key.name == name)
}

/// Returns the keys that determine the numbering of the examples. A run may resume with changed values of all other
/// keys of training: steps, batch sizes, learning rate, logging, evaluation, precision, devices.
pub(crate) fn keys_of_the_order() -> Vec<&'static str> {
    let keys = rows().filter(|key| key.orders_data);
    keys.map(|key| key.name).collect()
}

/// Returns every name that a program reads, spellings included; keys of a section have dotted names.
pub(super) fn names(program: Program) -> impl Iterator<Item = &'static str> {
    let names = rows_of(program).map(|key| key.name);
    // Spellings of keys that only the other program reads are included, because their error is more precise.
    let spellings = rows().flat_map(|key| key.spellings.iter().copied());
    names.chain(spellings)
}

/// Resets the keys of the layers below that `values` contradicts. A key counts as set if it is true or above
/// 0; keys that the same layer sets are not reset.
pub(super) fn reset_excluded(
    below: &mut Map<String, Value>,
    values: &Map<String, Value>,
    defaults: &Value,
) {
    for key in rows() {
        let set = values.get(key.name).is_some_and(|value| {
            value.as_bool().unwrap_or(false) || value.as_f64().is_some_and(|number| number > 0.0)
        });
        for excluded in key.excludes.iter().copied() {
            if set && !values.contains_key(excluded) {
                below.insert(excluded.to_owned(), defaults[excluded].clone());
            }
        }
    }
}

/// Refuses a flag without effect, because its switch is off. In a file the keys stay: TRL and transformers write all of them.
///
/// # Errors
/// [`overdrive_core::Error::InvalidOption`].
pub(super) fn refuse_idle(flags: &Map<String, Value>, values: &Value) -> Result<()> {
    for key in rows() {
        let (needs, full) = match key.heading {
            "Adapters" if key.name != "use_peft" => ("use_peft", " (`--full` trains no adapters)"),
            _ => (key.needs, ""),
        };
        match flags.get(key.name) {
            Some(given) if *given != Value::Bool(false) && values[needs] == Value::Bool(false) => {
                let expected =
                    format!("left out without `{needs}`{full}, because it has no effect");
                return Err(overdrive_core::Error::option(key.name, plain(given), expected).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks each number of a configuration against the range of its key. `defaults` distinguishes a key that is
/// not set from NaN and infinities, which JSON also writes as `null`.
///
/// # Errors
/// [`overdrive_core::Error::InvalidOption`].
pub(super) fn check_ranges(values: &Value, defaults: &Value) -> Result<()> {
    for key in rows().filter(|key| key.range != Range::Any) {
        let value = at(values, key.name);
        let violation = match value.as_f64() {
            Some(number) => key.range.violation(number),
            None if value.is_null() && at(defaults, key.name).is_number() => {
                key.range.violation(f64::NAN)
            }
            None => None,
        };
        if let Some(expected) = violation {
            let given = if value.is_null() {
                "not a finite number".to_owned()
            } else {
                plain(value)
            };
            let expected = match key.instead {
                "" => expected,
                remedy => format!("{expected}; {remedy}"),
            };
            return Err(overdrive_core::Error::option(key.name, given, expected).into());
        }
    }
    Ok(())
}
