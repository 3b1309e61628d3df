//! The command-line flags of a program, derived from the table of keys.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde_json::{Map, Value, json};

use super::format::read_file;
use super::key::{Key, List, Program, at, plain};
use super::keys::{COMMAND_LINE, refuse_idle, rows_of};
use super::layers::{Configuration, Layers};
use crate::error::listed;
use crate::{Error, Result};

/// A flag that sets several keys.
struct Shortcut {
    name: &'static str,
    help: &'static str,
    sets: fn() -> Value,
    conflicts: &'static [&'static str],
}

/// The characters that no name of a layer has.
const REGEX_CHARACTERS: [char; 13] = [
    '*', '+', '?', '(', ')', '[', ']', '{', '}', '|', '^', '$', '\\',
];

// Each row is on two lines, so that the table can be read as a table.
#[rustfmt::skip]
static OF_FINETUNING: [Shortcut; 2] = [
    Shortcut { name: "full", conflicts: &["qlora", "use_peft"], help: "Train all weights, without adapters",
        sets: || json!({ "use_peft": false, "load_in_4bit": false, "load_in_8bit": false }) },
    Shortcut { name: "qlora", conflicts: &["full"], help: "Quantize the weights to NF4 with double quantization, and train adapters",
        sets: || json!({ "use_peft": true, "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true }) },
];

/// The flags of a program: `--config FILE`, and one for each key of its configuration. They are flattened
/// into the program's own flags; [`TrainArgs`](crate::TrainArgs), [`FinetuneArgs`](crate::FinetuneArgs)
/// and [`DpoArgs`](crate::DpoArgs) are the instances.
///
/// ```
/// use clap::Parser;
/// use overdrive_trainer::TrainArgs;
///
/// #[derive(Parser)]
/// struct Flags {
///     #[command(flatten)]
///     train: TrainArgs,
/// }
///
/// let flags = Flags::parse_from(["train", "--preset", "small", "--steps", "20", "--bf16"]);
/// let arguments = flags.train.resolve()?;
/// assert_eq!(arguments.max_steps, 20);
/// assert!(arguments.bf16);
/// assert_eq!(arguments.model.hidden_size, 384); // the preset's
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
///
/// Flags override the file, and the file overrides the preset. A flag has the name of its key with dashes
/// (`--learning-rate`); a few also have a shorter one (`--steps` for `max_steps`), and every spelling that is
/// accepted in files is accepted as a flag (`--lr`).
#[derive(Debug, Clone, Default)]
pub struct ConfigArgs<A> {
    /// The configuration file.
    pub config: Option<PathBuf>,
    /// The values of the keys that the flags set.
    pub(super) values: Map<String, Value>,
    of: PhantomData<A>,
}

impl<A: Configuration> ConfigArgs<A> {
    /// Returns the validated configuration: flags over the file over the preset.
    ///
    /// # Errors
    /// As [`Layers::file`] for the file and [`Layers::resolve`] for the values.
    pub fn resolve(&self) -> Result<A> {
        Ok(self.resolve_with_notes()?.0)
    }

    /// Returns the configuration as [`resolve`](Self::resolve) does, and one line for each key that was given under an
    /// alternative spelling.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_with_notes(&self) -> Result<(A, Vec<String>)> {
        let in_file = match &self.config {
            Some(path) => read_file(path)?,
            None => Value::Null,
        };
        // The preset is the lowest layer, so its name is needed before the layers are read.
        let named = self.values.get("preset").or(in_file.get("preset"));
        let mut layers = Layers::on(A::base(named));
        if let Some(path) = &self.config {
            layers = layers.file(path)?;
        }
        let flags = Value::Object(self.values.clone());
        let layers = layers.layer(flags, COMMAND_LINE)?;
        let notes = layers.notes().iter();
        let notes = notes.map(|note| format!("configured  {note}")).collect();
        let arguments = layers.resolve()?;
        refuse_idle(&self.values, &arguments.values()?)?;
        Ok((arguments, notes))
    }
}

impl<A: Configuration> Args for ConfigArgs<A> {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help_heading("Configuration")
            .help("JSON, YAML or TOML file with the keys of Hugging Face's TrainingArguments, TRL, PEFT and BitsAndBytesConfig");
        let defaults = A::defaults();
        let mut command = command.arg(config);
        for shortcut in shortcuts::<A>() {
            let switch = Arg::new(shortcut.name).long(shortcut.name);
            let switch = switch.action(ArgAction::SetTrue).help(shortcut.help);
            command = command.arg(switch.conflicts_with_all(shortcut.conflicts));
        }
        for key in rows_of(A::PROGRAM) {
            for arg in key.args::<A>(&defaults) {
                command = command.arg(arg.help_heading(key.heading));
            }
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<A: Configuration> FromArgMatches for ConfigArgs<A> {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        if let Some(config) = matches.get_one::<PathBuf>("config") {
            self.config = Some(config.clone());
        }
        let mut given = Map::new();
        for shortcut in shortcuts::<A>() {
            if let (true, Value::Object(keys)) =
                (matches.get_flag(shortcut.name), (shortcut.sets)())
            {
                given.extend(keys);
            }
        }
        for key in rows_of(A::PROGRAM) {
            if let Some(value) = key.given(matches) {
                insert(&mut given, key.name, value);
            }
        }
        self.values.extend(given);
        Ok(())
    }
}

fn shortcuts<A: Configuration>() -> &'static [Shortcut] {
    match A::PROGRAM {
        Program::Train => &[],
        Program::Finetune | Program::Dpo => &OF_FINETUNING,
    }
}

/// Inserts a value under a dotted name.
fn insert(values: &mut Map<String, Value>, name: &str, value: Value) {
    match name.split_once('.') {
        None => {
            values.insert(name.to_owned(), value);
        }
        Some((section, inner)) => {
            let section = values.entry(section).or_insert_with(|| json!({}));
            if let Value::Object(section) = section {
                section.insert(inner.to_owned(), value);
            }
        }
    }
}

impl Key {
    /// Returns the name of the flag without its dashes, if the key has one.
    pub(super) fn long(&self) -> Option<String> {
        match self.flag {
            Some("") => None,
            Some(flag) => Some(flag.to_owned()),
            None => Some(self.leaf().replace('_', "-")),
        }
    }

    pub(super) fn leaf(&self) -> &'static str {
        self.name.rsplit('.').next().unwrap_or(self.name)
    }

    /// Returns the other names of the flag: the key and its spellings, with dashes and with underscores.
    fn aliases(&self, long: &str) -> BTreeSet<String> {
        let names = self.spellings.iter().copied().chain([self.leaf()]);
        let mut all: BTreeSet<String> = names
            .flat_map(|name| [name.to_owned(), name.replace('_', "-")])
            .collect();
        all.insert(long.replace('-', "_"));
        all.remove(long);
        all
    }

    /// Returns clap's arguments: one, or two for a switch, of which the second turns it off.
    fn args<A: Configuration>(&'static self, defaults: &[(&str, Value)]) -> Vec<Arg> {
        let Some(long) = self.long() else {
            return Vec::new();
        };
        let help = self.help_with_values::<A>(&long, defaults);
        let arg = Arg::new(self.name).long(&long).help(help);
        let excluded = rows_of(A::PROGRAM).filter(|other| self.excludes.contains(&other.name));
        let arg = arg.conflicts_with_all(excluded.map(|other| other.name));
        let arg = arg.aliases(self.aliases(&long));
        if self.value.is_empty() {
            let off = format!("no-{long}");
            let no = Arg::new(off_id(self.name)).long(&off).hide(true);
            let no = no.alias(off.replace('-', "_")).action(ArgAction::SetTrue);
            return vec![
                // Each overrides the other, so that the last one on the command line counts.
                arg.action(ArgAction::SetTrue)
                    .overrides_with(off_id(self.name)),
                no.overrides_with(self.name),
            ];
        }
        let arg = arg.value_name(self.value);
        vec![match self.list {
            List::Paths => arg.num_args(1..).action(ArgAction::Append),
            List::Names => arg
                .num_args(1..)
                .action(ArgAction::Append)
                .value_delimiter(','),
            // As in argparse, the last one on the command line counts.
            List::No => arg
                .overrides_with(self.name)
                .allow_negative_numbers(true)
                .value_parser(move |text: &str| self.parse::<A>(text)),
        }]
    }

    /// Returns the value of the key on the command line.
    fn given(&self, matches: &ArgMatches) -> Option<Value> {
        self.long()?;
        if self.value.is_empty() {
            let (on, off) = (
                matches.get_flag(self.name),
                matches.get_flag(&off_id(self.name)),
            );
            return (on || off).then_some(Value::Bool(on));
        }
        match self.list {
            List::Paths | List::Names => {
                let mut texts = matches.get_many::<String>(self.name)?;
                match texts.len() {
                    // As in PEFT, a text is a regular expression and a list has names.
                    1 if matches!(self.name, "target_modules" | "exclude_modules") => {
                        texts.next().map(|text| match text {
                            text if text.contains(REGEX_CHARACTERS) => Value::from(text.as_str()),
                            name => json!([name]),
                        })
                    }
                    _ => Some(texts.cloned().collect()),
                }
            }
            List::No => matches.get_one::<Value>(self.name).cloned(),
        }
    }

    /// Parses the value of a flag by the type of its key: as a string, a number, or JSON.
    fn parse<A: Configuration>(&self, text: &str) -> std::result::Result<Value, String> {
        let whole = text.parse::<i64>().ok().map(Value::from);
        let whole = whole.or_else(|| text.parse::<u64>().ok().map(Value::from));
        // serde_json would turn NaN and infinities into `null`.
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        let number = number.map(Value::from);
        let json = serde_json::from_str(text).ok();
        // Text is tried first: a name such as `no` or `1` must not become another type if the key accepts text.
        let candidates = [Some(Value::from(text)), whole, number, json];
        let mut error = None;
        for candidate in candidates.into_iter().flatten() {
            match self.try_value::<A>(candidate.clone()) {
                Ok(()) => return Ok(candidate),
                // A section is meant as one, so its mistake is the one to report.
                Err(wrong) if candidate.is_object() => error = Some(wrong),
                Err(wrong) => error = error.or(Some(wrong)),
            }
        }
        Err(match error {
            Some(Error::WrongType { expected, .. }) => format!("expected {expected}"),
            Some(Error::UnknownChoice { choices, hint, .. }) => {
                format!("it is not one of {}{hint}", listed(&choices))
            }
            other => other.map_or_else(String::new, |error| error.to_string()),
        })
    }

    pub(super) fn try_value<A: Configuration>(&self, value: Value) -> Result<()> {
        let mut values = Map::new();
        insert(&mut values, self.name, value);
        A::read(values, COMMAND_LINE).map(drop)
    }

    /// Returns the names that the key accepts, if its value is a name. They come from its type.
    pub(super) fn choices<A: Configuration>(&self) -> Vec<String> {
        match self.try_value::<A>(json!("?")) {
            Err(Error::UnknownChoice { choices, .. }) => choices,
            _ => Vec::new(),
        }
    }

    /// Returns the help with the choices and with the value of each preset, so that help and behaviour cannot
    /// differ.
    fn help_with_values<A: Configuration>(&self, long: &str, defaults: &[(&str, Value)]) -> String {
        let (mut help, written) = self.help(A::PROGRAM);
        let default = self.default_text(defaults);
        match default.or(written.map(str::to_owned)) {
            Some(on) if self.value.is_empty() && on == "true" => {
                help += &format!(" [default: on; off: --no-{long}]");
            }
            Some(default) if !self.value.is_empty() => help += &format!(" [default: {default}]"),
            _ => {}
        }
        let choices = self.choices::<A>();
        if !choices.is_empty() {
            help += &format!(" [possible values: {}]", choices.join(", "));
        }
        help
    }

    /// Returns the value of the key in each preset as text; `None` if no preset sets it.
    pub(super) fn default_text(&self, defaults: &[(&str, Value)]) -> Option<String> {
        let says_nothing = |value: &Value| match value {
            Value::Null => true,
            Value::Number(number) => number.as_f64().is_some_and(|number| number < 0.0),
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(keys) => keys.is_empty() || self.value == "JSON",
            Value::Bool(_) => false,
        };
        let values: Vec<_> = defaults
            .iter()
            .map(|(preset, values)| (*preset, at(values, self.name)))
            .collect();
        let (_, first) = values.first()?;
        if self.name == "preset" || values.iter().all(|(_, value)| says_nothing(value)) {
            return None;
        }
        let in_words = |value: &Value| match value {
            Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(", "),
            value => plain(value),
        };
        if values.iter().all(|(_, value)| value == first) {
            return Some(in_words(first));
        }
        let each = values.iter();
        let each = each.map(|(preset, value)| format!("{preset} {}", in_words(value)));
        Some(each.collect::<Vec<_>>().join(", "))
    }
}

/// Returns clap's id of the switch that turns another switch off.
fn off_id(name: &str) -> String {
    format!("no_{name}")
}
