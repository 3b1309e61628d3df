//! The table agrees with the fields, the code that reads them, the flags and the guide.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command, FromArgMatches};
use serde_json::{Value, json};

use super::translations::{SECTIONS, TRANSLATIONS};
use super::{rows, rows_of};
use crate::arguments::key::{Harmless, Key, Program, Range, at, plain};
use crate::arguments::layers::sealed::Keyed;
use crate::{
    ConfigArgs, Configuration, DpoArguments, DpoConfig, Error, FinetuneArguments, Layers,
    TrainingArguments,
};

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fields(arguments: &Value) -> BTreeSet<String> {
    let keys = arguments.as_object().unwrap().iter();
    let dotted = keys.flat_map(|(key, value)| match value {
        Value::Object(inner) if key == "model" => {
            let inner = inner.keys().map(|name| format!("model.{name}"));
            inner.chain([key.clone()]).collect::<Vec<_>>()
        }
        _ => vec![key.clone()],
    });
    dotted.collect()
}

fn names_of(readers: &[&[Program]]) -> BTreeSet<String> {
    let rows = rows().filter(|key| readers.contains(&key.readers));
    rows.map(|key| key.name.to_owned()).collect()
}

#[test]
fn every_field_has_a_row_and_every_row_a_field() {
    let training = serde_json::to_value(TrainingArguments::default()).unwrap();
    assert_eq!(fields(&training), names_of(&[Program::ALL, Program::TRAIN]));
    let tuning = serde_json::to_value(FinetuneArguments::default()).unwrap();
    assert_eq!(fields(&tuning), names_of(&[Program::FINETUNE]));
    let preference = serde_json::to_value(DpoConfig::default()).unwrap();
    assert_eq!(fields(&preference), names_of(&[Program::DPO]));
}

#[test]
fn no_name_has_two_meanings_and_every_excluded_key_exists() {
    let mut names = BTreeSet::new();
    for key in rows() {
        assert!(names.insert(key.name), "{} twice", key.name);
        for spelling in key.spellings {
            // `model` is a section of training, and the folder of the model in fine-tuning.
            assert!(
                *spelling == "model" || names.insert(spelling),
                "{spelling} twice"
            );
        }
        for excluded in key.excludes {
            assert!(rows().any(|other| other.name == *excluded), "{excluded}");
        }
    }
    let sections = SECTIONS.iter().flat_map(|section| section.names);
    for section in sections {
        assert!(!names.contains(section), "{section}");
    }
}

#[test]
fn the_json_of_the_table_is_json() {
    for key in rows() {
        if let Harmless::Only(all) = key.harmless {
            for json in all {
                serde_json::from_str::<Value>(json).expect(key.name);
            }
        }
    }
    for rule in TRANSLATIONS
        .iter()
        .flat_map(|translation| translation.rules)
    {
        if let Some((key, json)) = rule.sets {
            assert!(rows().any(|row| row.name == key), "{key}");
            assert!(
                json == "N" || serde_json::from_str::<Value>(json).is_ok(),
                "{json}"
            );
        }
    }
}

/// Returns Rust source without comments, tests and checks of values: the rest affects the run.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let mut parts = text.split("fn validate");
    let mut code = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        code += part.split_once("\n    }\n").map_or("", |(_, after)| after);
    }
    code
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("keys") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns `true` if the code has `.field` of a configuration.
fn reads(code: &str, field: &str) -> bool {
    let owners = ["arguments", "self", "training", "model", "how", "config"];
    code.match_indices(&format!(".{field}")).any(|(at, found)| {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let after = code[at + found.len()..].chars().next();
        // A method call with the same name does not read the field.
        let whole = !after.is_some_and(|c| is_name(c) || c == '(');
        // rustfmt may break the line before the field.
        let before = code[..at].trim_end();
        whole
            && owners.iter().any(|owner| {
                let rest = before.strip_suffix(owner);
                rest.is_some_and(|rest| !rest.chars().next_back().is_some_and(is_name))
            })
    })
}

#[test]
fn every_key_is_read_by_code_that_changes_the_run() {
    let mut files = Vec::new();
    sources(&here().join("src"), &mut files);
    sources(&here().join("../../examples"), &mut files);
    let code: String = files.iter().map(|path| code(path)).collect();
    for key in rows().filter(|key| !key.readers.is_empty()) {
        let field = key.leaf();
        let read = reads(&code, field);
        assert!(read, "`{}` is accepted, and no code reads it", key.name);
    }
    assert!(!reads("a.self.seeds; myself.seed; self.seed()", "seed"));
    assert!(reads("self.training\n    .seed;", "seed"));
}

fn command<A: Configuration>() -> Command {
    ConfigArgs::<A>::augment_args(Command::new("program"))
}

#[test]
fn the_flags_of_all_programs_are_valid_and_have_a_help() {
    command::<TrainingArguments>().debug_assert();
    command::<FinetuneArguments>().debug_assert();
    command::<DpoArguments>().debug_assert();
    let help = command::<TrainingArguments>()
        .render_long_help()
        .to_string();
    for part in [
        "[default: adamw_torch_fused] [possible values: adamw_torch",
        "Number of threads that prepare batches; it does not change the batches. With 0 each batch is prepared on request [default: 1]",
        "Norms, rotary embeddings, gates and the loss use one fused kernel each [default: on; off: --no-fused-kernels]",
        "--hidden-size <N>",
        "[default: tiny 256, small 384]",
    ] {
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(part), "{part} is missing in {help}");
    }
    let help = command::<FinetuneArguments>()
        .render_long_help()
        .to_string();
    assert!(
        help.contains("Highest learning rate of the schedule [default: 0.0002]"),
        "{help}"
    );
    assert!(help.contains("--qlora") && !help.contains("--vocab-size"));
}

/// Returns what a file with this value of the key sets it to, if the value is valid.
fn read<A: Configuration>(key: &Key, value: &Value) -> Option<Value> {
    let values = match key.name.split_once('.') {
        Some((section, inner)) => json!({ section: { inner: value } }),
        None => json!({ (key.name): value }),
    };
    let values = values.as_object().unwrap().clone();
    let read = A::read(values, "a file").ok()?.values().unwrap();
    Some(at(&read, key.name).clone())
}

/// Returns a valid value of the key that is not its default.
fn other_value<A: Configuration>(key: &Key) -> Value {
    let values = A::default().values().unwrap();
    let now = at(&values, key.name).clone();
    let choices = key.choices::<A>();
    let mut candidates: Vec<Value> = choices.into_iter().map(Value::from).collect();
    candidates.extend([json!(!now.as_bool().unwrap_or(false)), json!(2), json!(0.5)]);
    candidates.extend([
        json!("other"),
        json!(["other"]),
        json!({"power": 2.0}),
        json!({"q_proj": 2}),
        json!({"policy": "matmuls"}),
    ]);
    let fits = |value: &&Value| read::<A>(key, value).is_some_and(|read| read != now);
    candidates.iter().find(fits).expect(key.name).clone()
}

/// Gives `key` the value under each of its names, and checks what is read.
fn flags_reach_their_keys<A: Configuration>() {
    for key in rows_of(A::PROGRAM) {
        let Some(long) = key.long() else { continue };
        let names = key.spellings.iter().copied();
        let names: BTreeSet<String> = names
            .chain([key.leaf(), long.as_str()])
            .flat_map(|name| [name.replace('-', "_"), name.replace('_', "-")])
            .collect();
        let cases: Vec<(String, Value)> = if key.value.is_empty() {
            let on = names.into_iter().map(|name| (name, json!(true)));
            let off = format!("no-{long}");
            let off = [off.replace('-', "_"), off].map(|name| (name, json!(false)));
            on.chain(off).collect()
        } else {
            let value = other_value::<A>(key);
            names
                .into_iter()
                .map(|name| (name, value.clone()))
                .collect()
        };
        for (name, value) in cases {
            let mut words = vec!["program".to_owned(), format!("--{name}")];
            match &value {
                Value::Bool(_) if key.value.is_empty() => {}
                Value::Array(list) => words.extend(list.iter().map(plain)),
                value => words.push(plain(value)),
            }
            let matches = command::<A>().try_get_matches_from(&words).expect(&name);
            let args = ConfigArgs::<A>::from_arg_matches(&matches).expect(&name);
            // The value may be the default too.
            let values = Value::Object(args.values.clone());
            assert!(!at(&values, key.name).is_null(), "--{name} sets nothing");
            let given = A::read(args.values, "the command line").expect(&name);
            let given = at(&given.values().unwrap(), key.name).clone();
            // A name alone is a list of one on the command line.
            let list = Value::Array(vec![value.clone()]);
            assert!(
                read::<A>(key, &value) == Some(given.clone()) || given == list,
                "--{name}: {given} instead of {value}"
            );
        }
    }
}

#[test]
fn every_flag_reaches_its_key_under_each_of_its_names() {
    flags_reach_their_keys::<TrainingArguments>();
    flags_reach_their_keys::<DpoArguments>();
}

#[test]
fn a_wrong_value_of_a_flag_is_an_error_of_the_command_line() {
    let error = |words: &[&str]| {
        let words = ["program"].iter().chain(words);
        let error = command::<TrainingArguments>().try_get_matches_from(words);
        error.unwrap_err().to_string()
    };
    let text = error(&["--learning-rate", "fast"]);
    assert!(
        text.contains("--learning-rate <X>': expected a number"),
        "{text}"
    );
    let text = error(&["--optim", "adamw_8bits"]);
    assert!(text.contains("did you mean `adamw_8bit`?"), "{text}");
    let text = error(&["--epochs", "2", "--steps", "3"]);
    assert!(text.contains("cannot be used with"), "{text}");
}

#[test]
fn a_value_outside_its_range_is_refused_by_the_name_of_its_key() {
    for key in rows_of(Program::Train).filter(|key| key.range != Range::Any) {
        let outside = [
            json!(-1),
            json!(0),
            json!(1),
            json!(2),
            json!(1.5),
            json!(-1.0),
        ];
        let mut refused = 0;
        for value in outside {
            let mut values = serde_json::Map::new();
            match key.name.split_once('.') {
                Some((section, inner)) => {
                    values.insert(section.to_owned(), json!({ inner: value }));
                }
                None => {
                    values.insert(key.name.to_owned(), value);
                }
            }
            let layers = Layers::on(TrainingArguments::default());
            let layers = layers.layer(Value::Object(values), "a file");
            match layers.and_then(Layers::resolve) {
                Err(Error::Common(overdrive_core::Error::InvalidOption { option, .. }))
                    if option == key.name =>
                {
                    refused += 1;
                }
                // Unsigned integers cannot be -1, and 0 steps mean `no`.
                Err(Error::WrongType { .. }) => refused += 1,
                _ => {}
            }
        }
        assert!(refused > 0, "{}", key.name);
    }
}

mod guide {
    use super::*;

    /// Compares the text between two comments of a page; with `OVERDRIVE_WRITE_TABLES` set, writes it.
    fn check(page: &str, block: &str, expected: &str) {
        let path = here().join("../../docs/src").join(page);
        let text = fs::read_to_string(&path).unwrap();
        let begin = format!("<!-- {block}: made from the table of keys -->\n");
        let end = format!("<!-- end of {block} -->");
        let (before, rest) = text.split_once(&begin).expect(block);
        let (found, after) = rest.split_once(&end).expect(block);
        if std::env::var_os("OVERDRIVE_WRITE_TABLES").is_some() {
            fs::write(&path, format!("{before}{begin}{expected}{end}{after}")).unwrap();
        } else {
            assert!(
                found == expected,
                "the table `{block}` of docs/src/{page} differs from the keys; write it with \
                 OVERDRIVE_WRITE_TABLES=1 cargo test -p overdrive-trainer --lib keys"
            );
        }
    }

    fn code<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
        let quoted = names.into_iter().map(|name| format!("`{name}`"));
        quoted.collect::<Vec<_>>().join(", ")
    }

    fn default_of(key: &Key) -> String {
        let (_, written) = key.help(Program::Train);
        let text = |defaults: Vec<(&str, Value)>| {
            let text = key.default_text(&defaults);
            text.or(written.map(str::to_owned)).unwrap_or_default()
        };
        let train = text(TrainingArguments::defaults());
        let tune = text(FinetuneArguments::defaults());
        match key.readers {
            Program::FINETUNE => tune,
            Program::DPO => text(DpoArguments::defaults()),
            Program::ALL if tune != train && !tune.is_empty() => {
                format!("{train}; {tune} in fine-tuning")
                    .trim_start_matches("; ")
                    .to_owned()
            }
            _ => train,
        }
    }

    fn all_keys() {
        let mut table =
            "| key | flag | default | read by | description |\n|---|---|---|---|---|\n".to_owned();
        for key in rows().filter(|key| !key.readers.is_empty()) {
            let reader = match key.readers {
                Program::ALL => "all",
                Program::TRAIN => "`train`",
                Program::DPO => "`dpo`",
                _ => "`finetune`",
            };
            let flag = key
                .long()
                .map_or_else(String::new, |long| format!("`--{long}`"));
            let (help, _) = key.help(Program::Train);
            // A browser breaks lines at spaces only, and JSON has none.
            let default = default_of(key).replace(",\"", ", \"");
            table += &format!(
                "| `{}` | {flag} | {default} | {reader} | {help} |\n",
                key.name
            );
        }
        check("configs.md", "all keys", &table);
    }

    fn spellings() {
        let mut table = "| in the file | meaning |\n|---|---|\n".to_owned();
        for key in rows().filter(|key| !key.spellings.is_empty()) {
            let spellings = code(key.spellings.iter().copied());
            table += &format!("| {spellings} | `{}` |\n", key.name);
        }
        for translation in TRANSLATIONS {
            let names = code(translation.names.iter().copied());
            for rule in translation.rules {
                let given = code(rule.given.iter().copied());
                let means = match rule.sets {
                    Some((key, json)) => format!("`{key}: {json}`{}", rule.note),
                    None => rule.note.to_owned(),
                };
                table += &format!("| {names}: {given} | {means} |\n");
            }
        }
        for section in SECTIONS {
            let names = code(section.names.iter().copied());
            let mut means = "its keys are read as top-level keys".to_owned();
            for (inside, outside) in section.inside {
                means += &format!("; `{inside}` is `{outside}`");
            }
            table += &format!("| section {names} | {means} |\n");
        }
        check("configs.md", "spellings", &table);
    }

    fn keys_without_effect() {
        let mut table = "| key | accepted | instead |\n|---|---|---|\n".to_owned();
        for key in rows().filter(|key| key.readers.is_empty()) {
            let accepted = match key.harmless {
                Harmless::Any => "any value, without effect".to_owned(),
                Harmless::Only(all) => code(all.iter().copied()),
                Harmless::Null => "`null`".to_owned(),
            };
            table += &format!("| `{}` | {accepted} | {} |\n", key.name, key.instead);
        }
        check("configs.md", "keys without effect", &table);
    }

    /// One test for all tables, because they are in one page.
    #[test]
    fn the_tables_of_the_page_on_configurations_are_those_of_the_keys() {
        all_keys();
        spellings();
        keys_without_effect();
    }

    /// Returns the names between backticks, each up to a colon or a space.
    fn names(cell: &str) -> Vec<&str> {
        let quoted = cell.split('`').skip(1).step_by(2);
        quoted
            .filter_map(|name| name.split([':', ' ']).next())
            .collect()
    }

    #[test]
    fn the_tables_of_all_pages_name_existing_keys_and_flags() {
        let (mut keys, mut flags) = (0, 0);
        for entry in fs::read_dir(here().join("../../docs/src")).unwrap() {
            let path = entry.unwrap().path();
            let Ok(text) = fs::read_to_string(&path) else {
                continue;
            };
            let tables = text.split("\n| key |").skip(1);
            for table in tables.filter_map(|table| table.split("\n\n").next()) {
                let has_flags = table.starts_with(" flag |");
                for row in table.lines().skip(2).filter(|row| row.starts_with('|')) {
                    let cells: Vec<&str> = row.split('|').collect();
                    let found: Vec<&Key> = names(cells[1])
                        .into_iter()
                        .map(|name| {
                            let key = rows().find(|key| key.name == name);
                            key.unwrap_or_else(|| panic!("{}: no key `{name}`", path.display()))
                        })
                        .collect();
                    keys += found.len();
                    for flag in names(cells[2]).into_iter().filter(|_| has_flags) {
                        let flag = flag.trim_start_matches("--").trim_start_matches("no-");
                        let known = found.iter().any(|key| key.long().as_deref() == Some(flag));
                        assert!(
                            known,
                            "{}: no flag `--{flag}` of these keys",
                            path.display()
                        );
                        flags += 1;
                    }
                }
            }
        }
        assert!(keys > 150 && flags > 90, "{keys} keys, {flags} flags");
    }

    #[test]
    fn the_page_on_training_names_every_optimizer() {
        let page = fs::read_to_string(here().join("../../docs/src/training.md")).unwrap();
        let row = page
            .lines()
            .find(|line| line.starts_with("| `optim` "))
            .unwrap();
        let optim = rows().find(|key| key.name == "optim").unwrap();
        for name in optim.choices::<TrainingArguments>() {
            let arguments: TrainingArguments =
                serde_json::from_value(json!({ "optim": name })).unwrap();
            // An alias is written as the name that it stands for.
            let canonical = serde_json::to_value(arguments.optim).unwrap();
            let canonical = plain(&canonical);
            assert!(
                row.contains(&format!("`{canonical}`")),
                "{canonical} is missing in {row}"
            );
        }
    }
}
