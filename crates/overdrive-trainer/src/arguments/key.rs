//! What is known of a key besides its type: the programs that read it, its other names, its flag, its range, its help.

use serde_json::Value;

/// A program that reads a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Training from scratch.
    Train,
    /// Fine-tuning.
    Finetune,
    /// Preference training, which reads the keys of fine-tuning too.
    Dpo,
}

/// The programs that read a key, under the names of the tables.
impl Program {
    pub(super) const ALL: &[Self] = &[Self::Train, Self::Finetune, Self::Dpo];
    pub(super) const TRAIN: &[Self] = &[Self::Train];
    pub(super) const FINETUNE: &[Self] = &[Self::Finetune, Self::Dpo];
    pub(super) const DPO: &[Self] = &[Self::Dpo];
}

/// The values that a program accepts for a key that it does not read. `null` is always accepted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Harmless {
    /// Only `null`.
    Null,
    /// `null` and these values, as JSON: they request nothing.
    Only(&'static [&'static str]),
    /// Any value: the key is an option of another key.
    Any,
}

/// The number of values of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    /// One value.
    No,
    /// Several values.
    Paths,
    /// Several values, which may also be separated by commas.
    Names,
}

/// A row of the table of keys: the properties of a key besides its type and its default.
#[derive(Debug)]
pub(super) struct Key {
    /// The name in files. Keys of the section `model` are written `model.hidden_size`.
    pub(super) name: &'static str,
    /// The heading in the help; the keys of other projects have none.
    pub(super) heading: &'static str,
    /// The programs that read it; empty for a key of another project whose effect Overdrive does not support.
    pub(super) readers: &'static [Program],
    /// The alternative names that are accepted.
    pub(super) spellings: &'static [&'static str],
    /// The name of the flag, if it is not the key's with dashes; empty for a key without a flag.
    pub(super) flag: Option<&'static str>,
    /// The name of the flag's value in the help; empty for a switch.
    pub(super) value: &'static str,
    pub(super) list: List,
    /// The documentation of the field.
    pub(super) documentation: &'static str,
    /// The documentation in fine-tuning, if it differs.
    pub(super) help_of_finetune: Option<&'static str>,
    pub(super) range: Range,
    /// The keys that this one contradicts: setting this one resets them in the layers below, and the flags conflict.
    pub(super) excludes: &'static [&'static str],
    /// The switch without which the key has no effect; empty for most keys.
    pub(super) needs: &'static str,
    /// The values that a program accepts without reading the key.
    pub(super) harmless: Harmless,
    /// The remedy in the error about a refused value.
    pub(super) instead: &'static str,
    /// If `true`, each process may have its own value, such as a path, a number of threads, or an option of what
    /// one process does alone.
    pub(super) per_rank: bool,
    /// If `true`, the key determines the numbering of the examples, so a run can resume only with the same value.
    pub(super) orders_data: bool,
}

/// Declares a struct of arguments under the headings of the help. A field has its documentation, of which the sentences
/// before its default are the help of its flag; its default after `=`; and its row of the table of keys after `=>`: the
/// programs that read it, the name of its flag's value (empty for a switch), and those of the other properties of [`Key`]
/// that it has. The names of the keys start with the section after `in`. Fields in `hidden` are not keys.
macro_rules! options {
    (
        $(#[$meta:meta])*
        pub struct $name:ident, keys $table:ident in $section:literal {
            $($heading:literal => {
                $(
                    $(#[doc = $doc:literal])+
                    $(#[serde($($serde:tt)*)])?
                    $field:ident: $type:ty = $default:expr
                        => $readers:ident($value:literal $(, $property:ident: $set:expr)*);
                )*
            })*
            $(hidden {
                $($(#[$hidden_meta:meta])* $hidden:ident: $hidden_type:ty = $hidden_default:expr;)*
            })?
        }
    ) => {
        $(#[$meta])*
        pub struct $name {
            $($(
                $(#[doc = $doc])+
                $(#[serde($($serde)*)])?
                pub $field: $type,
            )*)*
            $($($(#[$hidden_meta])* pub $hidden: $hidden_type,)*)?
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($($field: $default,)*)*
                    $($($hidden: $hidden_default,)*)?
                }
            }
        }

        /// The rows of these keys.
        pub(super) static $table: &[super::key::Key] = &[
            $($(
                super::key::Key {
                    name: concat!($section, stringify!($field)),
                    heading: $heading,
                    readers: super::key::Program::$readers,
                    value: $value,
                    documentation: concat!($($doc),+),
                    $($property: $set,)*
                    ..super::key::Key::NONE
                },
            )*)*
        ];
    };
}
pub(super) use options;

/// Returns the row of another project's key. A harmless value is dropped; any other value is an error.
pub(super) const fn foreign(name: &'static str, harmless: Harmless, instead: &'static str) -> Key {
    Key {
        name,
        harmless,
        instead,
        ..Key::NONE
    }
}

impl Key {
    /// A row without properties.
    pub(super) const NONE: Self = Self {
        name: "",
        heading: "",
        readers: &[],
        spellings: &[],
        flag: None,
        value: "",
        list: List::No,
        documentation: "",
        help_of_finetune: None,
        range: Range::Any,
        excludes: &[],
        needs: "",
        harmless: Harmless::Null,
        instead: "",
        per_rank: false,
        orders_data: false,
    };

    /// Returns the help of the key in a program, and the effect of a missing value if its documentation describes it.
    pub(super) fn help(&self, program: Program) -> (String, Option<&'static str>) {
        let own = self.help_of_finetune;
        let own = own.filter(|_| program != Program::Train);
        let text = own.unwrap_or(self.documentation).trim();
        let (text, default) = text.split_once(" Default").unwrap_or((text, ""));
        let text = text.trim_end_matches('.');
        let shorter = text.strip_prefix("If `true`, ");
        let text = shorter.or(text.strip_prefix("The ")).unwrap_or(text);
        let mut help = text.to_owned();
        if let Some(first) = help.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        (
            help,
            default
                .strip_prefix(": ")
                .map(|default| default.trim_end_matches('.')),
        )
    }

    pub(super) fn is_read_by(&self, program: Program) -> bool {
        self.readers.contains(&program)
    }

    /// Returns `true` if a program that does not read the key may ignore this value.
    pub(super) fn accepts(&self, value: &Value) -> bool {
        match self.harmless {
            // transformers writes `null` for keys that are not set.
            _ if value.is_null() => true,
            Harmless::Null => false,
            Harmless::Any => true,
            Harmless::Only(all) => all.iter().any(|harmless| {
                match serde_json::from_str::<Value>(harmless) {
                    // 0 and 0.0 are different JSON numbers, but the same value in a configuration.
                    Ok(Value::Number(number)) => value.as_f64() == number.as_f64(),
                    Ok(harmless) => *value == harmless,
                    Err(_) => false,
                }
            }),
        }
    }
}

/// The range of a numeric key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
    Any,
    /// Above 0.
    Positive,
    /// At least 0.
    NotNegative,
    /// At least 0 and below 1.
    BelowOne,
    /// Above 0 and below 1.
    Between,
    /// From 0 to 1.
    Fraction,
    /// At least this integer, and at most 2^31 - 1, as sizes in libtorch are.
    AtLeast(u32),
    /// At most this integer.
    AtMost(u32),
    /// From 1 to this integer.
    UpTo(u32),
    /// A time in seconds above 0 and at most 10^9, so that adding it to a clock cannot overflow.
    Seconds,
    /// An integer number of steps from 1, or a fraction of the run below 1.
    Steps,
    /// As `Steps`, or 0 for none.
    StepsOrZero,
}

impl Range {
    /// Returns the allowed values if `number` is not among them, to complete "it must be".
    pub(super) fn violation(self, number: f64) -> Option<String> {
        let unless = |allowed: bool, expected: &str| (!allowed).then(|| expected.to_owned());
        match self {
            Self::Any => None,
            Self::Positive => unless(number > 0.0, "positive"),
            Self::NotNegative => unless(number >= 0.0, "0 or positive"),
            Self::BelowOne => unless((0.0..1.0).contains(&number), "at least 0 and below 1"),
            Self::Between => unless(number > 0.0 && number < 1.0, "above 0 and below 1"),
            Self::Fraction => unless((0.0..=1.0).contains(&number), "a fraction from 0 to 1"),
            Self::AtMost(most) => unless(number <= f64::from(most), &format!("at most {most}")),
            Self::UpTo(most) => unless(
                (1.0..=f64::from(most)).contains(&number),
                &format!("from 1 to {most}"),
            ),
            Self::AtLeast(_) if number > f64::from(i32::MAX) => {
                Some(format!("at most {}", i32::MAX))
            }
            Self::AtLeast(least) => {
                unless(number >= f64::from(least), &format!("at least {least}"))
            }
            Self::Seconds => unless(
                number > 0.0 && number <= 1e9,
                "positive, and at most 1000000000 seconds (31 years)",
            ),
            Self::StepsOrZero if number == 0.0 => None,
            Self::Steps | Self::StepsOrZero if number >= 1.0 => unless(
                number.fract() == 0.0,
                "a whole number of steps, or a fraction of the run below 1",
            ),
            Self::Steps => Self::Positive.violation(number),
            Self::StepsOrZero => Self::NotNegative.violation(number),
        }
    }
}

/// Returns the value at a dotted name.
pub(super) fn at<'v>(values: &'v Value, name: &str) -> &'v Value {
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
