//! The choice of the files of a dataset's configuration and split.

use std::collections::HashSet;

use serde::Deserialize;

use crate::name::is_relative_file;
use crate::select::listed;
use crate::{Error, Result};

/// The endings of files with records, before that of a compression.
const FORMATS: [&str; 9] = [
    "parquet", "jsonl", "ndjson", "json", "csv", "tsv", "txt", "arrow", "feather",
];
const COMPRESSIONS: [&str; 4] = ["gz", "zst", "xz", "bz2"];

/// The words for splits in the names of files and folders, as in Python's `datasets`.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// What is wanted of a dataset.
pub(crate) struct Choice<'a> {
    pub(crate) repository: &'a str,
    pub(crate) config: Option<&'a str>,
    /// `None`: `train`.
    pub(crate) split: Option<&'a str>,
}

/// The metadata of a dataset at the beginning of its README.
#[derive(Debug, Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    configs: Vec<Config>,
}

#[derive(Debug, Deserialize)]
struct Config {
    config_name: String,
    #[serde(default)]
    default: bool,
    #[serde(default)]
    data_files: Option<DataFiles>,
    #[serde(default)]
    data_dir: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum DataFiles {
    One(String),
    Many(Vec<String>),
    BySplit(Vec<SplitFiles>),
}

#[derive(Debug, Deserialize)]
struct SplitFiles {
    split: String,
    path: Patterns,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

/// Returns the files of the split, in order.
pub(crate) fn choose(
    names: &[String],
    readme: Option<&str>,
    choice: &Choice<'_>,
) -> Result<Vec<String>> {
    let mut data: Vec<&String> = names.iter().filter(|name| is_data(name)).collect();
    data.sort();
    let configs = readme.map(configs).unwrap_or_default();
    let split = choice.split.unwrap_or("train");
    let config = config_of(&configs, choice)?;
    let by_split = match config {
        Some(Config {
            data_files: Some(files),
            ..
        }) => by_pattern(&data, files),
        Some(config) => {
            let folder = config.data_dir.as_deref().unwrap_or(&config.config_name);
            let inside = in_folder(&data, folder);
            by_name(match inside.is_empty() {
                true => &data,
                false => &inside,
            })
        }
        None => match choice.config {
            None => by_name(&data),
            Some(folder) => by_name(&in_folder(&data, folder)),
        },
    };
    let found = by_split.iter().find(|(name, _)| name == split);
    if let Some((_, files)) = found.filter(|(_, files)| !files.is_empty()) {
        return Ok(files.clone());
    }
    let splits: Vec<&str> = by_split.iter().map(|(name, _)| name.as_str()).collect();
    let (file, found) = match (splits.is_empty(), choice.config) {
        (false, _) => (format!("split `{split}`"), splits.join(", ")),
        (true, Some(config)) => (
            format!("configuration `{config}`"),
            listed(
                data.iter()
                    .filter_map(|name| name.split_once('/'))
                    .map(|(folder, _)| folder),
            ),
        ),
        (true, None) => (
            "files of records (Parquet, JSON Lines, CSV or text)".to_owned(),
            listed(names.iter().map(String::as_str)),
        ),
    };
    Err(Error::NoFile {
        repository: choice.repository.to_owned(),
        file,
        found,
    })
}

/// Returns the first file that numbered files (`-00000-of-00003`) imply and that is not among `names`.
pub(crate) fn shard_missing(files: &[String], names: &[String]) -> Option<String> {
    let names: HashSet<&str> = names.iter().map(String::as_str).collect();
    let mut known = HashSet::new();
    files.iter().find_map(|file| {
        let mut marks = file.match_indices("-of-");
        marks.find_map(|(at, mark)| {
            let (before, after) = (&file[..at], &file[at + mark.len()..]);
            let stem = before.trim_end_matches(|letter: char| letter.is_ascii_digit());
            let digits = before.len() - stem.len();
            let end = after.trim_start_matches(|letter: char| letter.is_ascii_digit());
            let count = &after[..after.len() - end.len()];
            let all: usize = count.parse().ok().filter(|_| digits > 0)?;
            if !known.insert((stem, digits, count, end)) {
                return None;
            }
            let shard = |number: usize| format!("{stem}{number:0digits$}-of-{count}{end}");
            // Some are counted from 1.
            let first = usize::from(names.contains(shard(all).as_str()));
            let mut shards = (first..all.saturating_add(first)).map(shard);
            shards.find(|shard| !names.contains(shard.as_str()))
        })
    })
}

/// Returns the configurations in the metadata of a README; none if there is no metadata that can be read.
fn configs(readme: &str) -> Vec<Config> {
    let Some(rest) = readme.strip_prefix("---") else {
        return Vec::new();
    };
    let Some((metadata, _)) = rest.split_once("\n---") else {
        return Vec::new();
    };
    match serde_saphyr::from_str::<Metadata>(metadata) {
        Ok(metadata) => metadata.configs,
        Err(error) => {
            tracing::warn!(
                "the metadata of the dataset cannot be read, and its splits are those of its files: {error}"
            );
            Vec::new()
        }
    }
}

/// Returns the configuration that is wanted; `None` if the dataset declares none.
fn config_of<'c>(configs: &'c [Config], choice: &Choice<'_>) -> Result<Option<&'c Config>> {
    let named = |wanted: &str| configs.iter().find(|config| config.config_name == wanted);
    let found = match choice.config {
        Some(name) => named(name),
        None => configs
            .iter()
            .find(|config| config.default)
            .or_else(|| named("default"))
            .or_else(|| configs.first().filter(|_| configs.len() == 1)),
    };
    if found.is_some() || configs.is_empty() {
        return Ok(found);
    }
    let file = match choice.config {
        Some(name) => format!("configuration `{name}`"),
        None => "default configuration; name one as ORG/NAME/CONFIG".to_owned(),
    };
    Err(Error::NoFile {
        repository: choice.repository.to_owned(),
        file,
        found: listed(configs.iter().map(|config| config.config_name.as_str())),
    })
}

/// Returns `true` for the name of a file with records.
pub(crate) fn is_data(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let mut parts = lower.rsplit('.');
    let mut ending = parts.next().unwrap_or_default();
    if COMPRESSIONS.contains(&ending) {
        ending = parts.next().unwrap_or_default();
    }
    let file = lower.rsplit('/').next().unwrap_or_default();
    let describes = file.starts_with("dataset_info")
        || file.starts_with("license")
        || file.starts_with("readme");
    FORMATS.contains(&ending)
        && !describes
        && is_relative_file(name)
        && !name.split('/').any(|part| part.starts_with('.'))
}

fn in_folder<'n>(names: &[&'n String], folder: &str) -> Vec<&'n String> {
    let folder = format!("{}/", folder.trim_matches('/'));
    let inside =
        |name: &&&String| name.starts_with(&folder) || name.contains(&format!("/{folder}"));
    names.iter().filter(inside).copied().collect()
}

/// Returns the files of each split that a configuration names by patterns.
fn by_pattern(names: &[&String], files: &DataFiles) -> Vec<(String, Vec<String>)> {
    let matches = |patterns: &[String]| -> Vec<String> {
        let patterns: Vec<glob::Pattern> = patterns
            .iter()
            .filter_map(|pattern| glob::Pattern::new(pattern.trim_start_matches("./")).ok())
            .collect();
        let named = names
            .iter()
            .filter(|name| patterns.iter().any(|pattern| pattern.matches(name)));
        named.map(|name| (*name).clone()).collect()
    };
    let one = |patterns: &[String]| vec![("train".to_owned(), matches(patterns))];
    match files {
        DataFiles::One(pattern) => one(std::slice::from_ref(pattern)),
        DataFiles::Many(patterns) => one(patterns),
        DataFiles::BySplit(splits) => splits
            .iter()
            .map(|files| {
                let patterns = match &files.path {
                    Patterns::One(pattern) => std::slice::from_ref(pattern),
                    Patterns::Many(patterns) => patterns,
                };
                (files.split.clone(), matches(patterns))
            })
            .collect(),
    }
}

/// Returns the files of each split by the words in their names; all of them are `train` if no name has such a word.
fn by_name(names: &[&String]) -> Vec<(String, Vec<String>)> {
    let mut splits: Vec<(String, Vec<String>)> = Vec::new();
    for name in names {
        let lower = name.to_ascii_lowercase();
        let words: Vec<&str> = lower
            .split(|letter: char| !letter.is_ascii_alphanumeric())
            .collect();
        let is_of = |(_, known): &&(&str, &[&str])| words.iter().any(|word| known.contains(word));
        let Some((split, _)) = SPLITS.iter().find(is_of) else {
            continue;
        };
        match splits.iter_mut().find(|(known, _)| known == split) {
            Some((_, files)) => files.push((*name).clone()),
            None => splits.push(((*split).to_owned(), vec![(*name).clone()])),
        }
    }
    if splits.is_empty() && !names.is_empty() {
        splits.push((
            "train".to_owned(),
            names.iter().map(|name| (*name).clone()).collect(),
        ));
    }
    splits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        names: &[&str],
        readme: Option<&str>,
        config: Option<&str>,
        split: Option<&str>,
    ) -> std::result::Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let choice = Choice {
            repository: "org/name",
            config,
            split,
        };
        choose(&names, readme, &choice).map_err(|error| error.to_string())
    }

    #[test]
    fn splits_are_words_in_the_names_of_files_and_folders() {
        let names = [
            ".gitattributes",
            "README.md",
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/validation-00000-of-00001.parquet",
            "dev/latest.jsonl.zst",
            "constraints.txt",
        ];
        let train = chosen(&names, None, None, None).unwrap();
        assert_eq!(train, names[2..4]);
        let validation = chosen(&names, None, None, Some("validation")).unwrap();
        assert_eq!(validation, [names[4], names[5]]);
        let error = chosen(&names, None, None, Some("test")).unwrap_err();
        assert!(
            error.contains("no split `test`; it has train, validation"),
            "{error}"
        );
        assert_eq!(
            chosen(&["a.csv", "b/c.txt.gz"], None, None, None).unwrap(),
            ["a.csv", "b/c.txt.gz"]
        );
        let error = chosen(&["model.safetensors"], None, None, None).unwrap_err();
        assert!(error.contains("it has model.safetensors"), "{error}");
        let folders = ["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"];
        assert_eq!(
            chosen(&folders, None, Some("de"), None).unwrap(),
            ["de/train.jsonl"]
        );
        let error = chosen(&folders, None, Some("fr"), None).unwrap_err();
        assert!(
            error.contains("no configuration `fr`; it has de, en"),
            "{error}"
        );
    }

    #[test]
    fn configurations_are_those_of_the_readme() {
        let readme = "---\nlicense: mit\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small/part-*.jsonl\n  - split: extra\n    path:\n    - small/x.jsonl\n    - small/y.jsonl\n- config_name: large\n  default: true\n  data_files: large/*\n- config_name: folder\n  data_dir: other\n---\n# Title\n";
        let names = [
            "README.md",
            "large/a.parquet",
            "large/b.parquet",
            "other/test.csv",
            "other/train.csv",
            "small/part-0.jsonl",
            "small/part-1.jsonl",
            "small/x.jsonl",
            "small/y.jsonl",
        ];
        let of = |config, split| chosen(&names, Some(readme), config, split);
        assert_eq!(of(None, None).unwrap(), names[1..3]);
        assert_eq!(of(Some("small"), None).unwrap(), names[5..7]);
        assert_eq!(of(Some("small"), Some("extra")).unwrap(), names[7..]);
        assert_eq!(of(Some("folder"), None).unwrap(), [names[4]]);
        let error = of(Some("huge"), None).unwrap_err();
        assert!(
            error.contains("no configuration `huge`; it has folder, large, small"),
            "{error}"
        );
        let without_default = readme.replace("  default: true\n", "");
        let error = chosen(&names, Some(&without_default), None, None).unwrap_err();
        assert!(error.contains("name one as ORG/NAME/CONFIG"), "{error}");
        // Metadata that cannot be read does not hide the files.
        let broken = chosen(&names, Some("---\nconfigs: [\n---\n"), Some("other"), None);
        assert_eq!(broken.unwrap(), [names[4]]);
    }

    #[test]
    fn a_missing_shard_is_named() {
        let shard = |number: usize| format!("data/train-{number:05}-of-00003.parquet");
        let all: Vec<String> = (0..3).map(shard).collect();
        let missing = |files: &[String]| shard_missing(files, files);
        assert_eq!(missing(&all), None);
        assert_eq!(missing(&all[..2]), Some(shard(2)));
        assert_eq!(missing(&["a.jsonl".to_owned()]), None);
        // A pattern may choose some of the files that there are.
        assert_eq!(shard_missing(&all[1..], &all), None);
        for names in [
            [
                "en/c4-train.00000-of-00002.json.gz",
                "en/c4-train.00001-of-00002.json.gz",
            ],
            [
                "state-of-the-art/00000-of-00002.csv",
                "state-of-the-art/00001-of-00002.csv",
            ],
            ["part-1-of-2.txt", "part-2-of-2.txt"],
        ] {
            let names = names.map(str::to_owned);
            assert_eq!(missing(&names), None, "{names:?}");
            assert!(missing(&names[..1]).is_some(), "{names:?}");
        }
    }
}
