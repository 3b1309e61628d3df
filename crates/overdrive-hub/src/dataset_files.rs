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
/// The pattern of what separates words, as in Python's `datasets`.
const SEPARATOR: &str = "[-._ 0-9]";

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
    let mut data: Vec<&str> = names.iter().map(String::as_str).collect();
    data.retain(|name| is_data(name));
    data.sort_unstable();
    let configs = readme.map(configs).unwrap_or_default();
    let split = choice.split.unwrap_or("train");
    let (folder, files) = match config_of(&configs, choice)? {
        Some(config) => (config.data_dir.as_deref(), config.data_files.as_ref()),
        // Without a list of configurations, each folder is one.
        None => (choice.config, None),
    };
    let folder = match folder
        .unwrap_or_default()
        .trim_start_matches("./")
        .trim_matches('/')
    {
        "" => String::new(),
        folder => format!("{folder}/"),
    };
    // Patterns and words are those of the paths in the folder.
    let inside: Vec<&str> = data
        .iter()
        .filter_map(|name| name.strip_prefix(&folder))
        .collect();
    let mut by_split = match files {
        Some(files) => by_pattern(&inside, files),
        None => by_name(&inside),
    };
    by_split.retain(|(_, files)| !files.is_empty());
    if let Some((_, files)) = by_split.iter().find(|(name, _)| name == split) {
        return Ok(files.iter().map(|file| format!("{folder}{file}")).collect());
    }
    let splits: Vec<&str> = by_split.iter().map(|(name, _)| name.as_str()).collect();
    let (file, found) = match (splits.is_empty(), choice.config) {
        (false, _) => (format!("split `{split}`"), splits.join(", ")),
        (true, Some(config)) => (
            format!("configuration `{config}`"),
            listed(
                matching(&data, &["**".to_owned()])
                    .iter()
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

/// Returns `true` for the name of a file in a format of records.
pub(crate) fn is_data(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let mut parts = lower.rsplit('.');
    let mut ending = parts.next().unwrap_or_default();
    if COMPRESSIONS.contains(&ending) {
        ending = parts.next().unwrap_or_default();
    }
    FORMATS.contains(&ending) && is_relative_file(name)
}

/// Returns `true` for the name, without its folder, of a file that describes a dataset or a model.
fn is_description(file: &str) -> bool {
    let file = file.to_ascii_lowercase();
    ["config.json", "dataset_dict.json"].contains(&file.as_str())
        || ["dataset_info", "license", "readme"]
            .iter()
            .any(|start| file.starts_with(start))
}

/// Returns `false` for a file that Python's `datasets` ignores although its name matches `pattern`, because the pattern
/// does not name the part for which it is ignored: a file that describes the dataset, a part that begins with `.`, or a
/// folder that begins with `__`.
fn is_requested(name: &str, pattern: &str) -> bool {
    let split = |path| str::rsplit_once(path, '/').unwrap_or(("", path));
    let ((folder, file), (pattern_folder, pattern_file)) = (split(name), split(pattern));
    let starting = |path: &str, start: &str| {
        let parts = path.split('/').filter(|part| part.starts_with(start));
        // `.` and `..` are no names.
        parts.filter(|part| !matches!(*part, "." | "..")).count()
    };
    // As in Python, the parts are counted: the others match.
    starting(name, ".") == starting(pattern, ".")
        && starting(folder, "__") == starting(pattern_folder, "__")
        && (file == pattern_file || !is_description(file))
}

/// Returns the files of each split that a configuration names by patterns.
fn by_pattern<'n>(names: &[&'n str], files: &DataFiles) -> Vec<(String, Vec<&'n str>)> {
    let one = |patterns: &[String]| vec![("train".to_owned(), matching(names, patterns))];
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
                (files.split.clone(), matching(names, patterns))
            })
            .collect(),
    }
}

/// Returns the files of each split by their names, with the rules of Python's `datasets`, of which the first one that
/// finds a file counts: names of shards in `data`; words in the names of folders; words in the names of files; all files
/// are `train`.
fn by_name<'n>(names: &[&'n str]) -> Vec<(String, Vec<&'n str>)> {
    // No pattern below names a part for which a file is ignored.
    let names = matching(names, &["**".to_owned()]);
    let mut splits: Vec<(String, Vec<&str>)> = Vec::new();
    for name in &names {
        let Some(split) = split_of_shard(name) else {
            continue;
        };
        match splits.iter_mut().find(|(known, _)| known == split) {
            Some((_, files)) => files.push(name),
            None => splits.push((split.to_owned(), vec![name])),
        }
    }
    let of_words = |patterns: &dyn Fn(&str) -> Vec<String>| -> Vec<(String, Vec<&'n str>)> {
        let files = |words: &[&str]| {
            let patterns: Vec<String> = words.iter().flat_map(|word| patterns(word)).collect();
            matching(&names, &patterns)
        };
        let splits = SPLITS.map(|(split, words)| (split.to_owned(), files(words)));
        splits
            .into_iter()
            .filter(|(_, files)| !files.is_empty())
            .collect()
    };
    if splits.is_empty() {
        splits = of_words(&|word| {
            let starts = [word.to_owned(), format!("*{SEPARATOR}{word}")];
            let folder = |start: String| {
                [
                    format!("**/{start}/**"),
                    format!("**/{start}{SEPARATOR}*/**"),
                ]
            };
            starts.into_iter().flat_map(folder).collect()
        });
    }
    if splits.is_empty() {
        splits = of_words(&|word| {
            vec![
                format!("**/{word}{SEPARATOR}*"),
                format!("**/*{SEPARATOR}{word}{SEPARATOR}*"),
            ]
        });
    }
    if splits.is_empty() {
        splits.push(("train".to_owned(), names));
    }
    splits
}

/// Returns the split of a file `data/SPLIT-00000-of-00001.parquet`; `None` for other names.
fn split_of_shard(name: &str) -> Option<&str> {
    let file = name
        .strip_prefix("data/")
        .filter(|file| !file.contains('/'))?;
    let is_number = |text: Option<&str>| {
        text.is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
    };
    file.rmatch_indices("-of-").find_map(|(at, mark)| {
        let after = at + mark.len();
        let number = at.checked_sub(5)?;
        let is_shard = is_number(file.get(number..at)) && is_number(file.get(after..after + 5));
        let split = file.get(..number).filter(|_| is_shard)?.strip_suffix('-')?;
        (!split.is_empty()).then_some(split)
    })
}

/// Returns the files that match one of the patterns and are [requested](is_requested) by it, as in Python: in the order
/// of the patterns, and then of the names. `*` matches within a folder and `**` over any number of folders. Each file
/// is there once.
fn matching<'n>(names: &[&'n str], patterns: &[String]) -> Vec<&'n str> {
    let options = glob::MatchOptions {
        require_literal_separator: true,
        ..glob::MatchOptions::new()
    };
    let mut found = Vec::new();
    let mut known = HashSet::new();
    for pattern in patterns {
        match glob::Pattern::new(pattern.trim_start_matches("./")) {
            Ok(glob) => found.extend(names.iter().filter(|name| {
                glob.matches_with(name, options)
                    && is_requested(name, pattern)
                    && known.insert(**name)
            })),
            Err(error) => tracing::warn!(
                "the pattern `{pattern}` in the metadata of the dataset names no file: {error}"
            ),
        }
    }
    found
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
        assert_eq!(validation, [names[4]]);
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

    /// The expected values are those of `datasets` 5.2.0 in Python.
    #[test]
    fn splits_by_names_are_those_of_python() {
        type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a [&'a str])]);
        let cases: [Case<'_>; 14] = [
            (
                &["test1.jsonl", "train1.jsonl", "train2.jsonl"],
                &[
                    ("train", &["train1.jsonl", "train2.jsonl"]),
                    ("test", &["test1.jsonl"]),
                ],
            ),
            (
                &[
                    "data/test_sft-00000-of-00001.parquet",
                    "data/train_gen-00000-of-00001.parquet",
                    "data/train_sft-00000-of-00001.parquet",
                ],
                &[
                    ("test_sft", &["data/test_sft-00000-of-00001.parquet"]),
                    ("train_gen", &["data/train_gen-00000-of-00001.parquet"]),
                    ("train_sft", &["data/train_sft-00000-of-00001.parquet"]),
                ],
            ),
            (
                &[
                    "data/a-00000-of-00001.parquet",
                    "data/extra.parquet",
                    "data/train-00000-of-00001-b.parquet",
                ],
                &[
                    ("a", &["data/a-00000-of-00001.parquet"]),
                    ("train", &["data/train-00000-of-00001-b.parquet"]),
                ],
            ),
            (
                &[
                    "x/data/train-00000-of-00001.parquet",
                    "x/data/train_sft-00000-of-00001.parquet",
                ],
                &[(
                    "train",
                    &[
                        "x/data/train-00000-of-00001.parquet",
                        "x/data/train_sft-00000-of-00001.parquet",
                    ],
                )],
            ),
            (
                &["b.jsonl", "train.jsonl", "train/a.jsonl"],
                &[("train", &["train/a.jsonl"])],
            ),
            (
                &["Test.csv", "Train.csv"],
                &[("train", &["Test.csv", "Train.csv"])],
            ),
            (
                &["train-test.csv", "x.csv"],
                &[
                    ("train", &["train-test.csv"]),
                    ("test", &["train-test.csv"]),
                ],
            ),
            (
                &[
                    "a-train.csv",
                    "b/train.csv",
                    "train.csv",
                    "trainer.csv",
                    "training.csv",
                ],
                &[(
                    "train",
                    &["b/train.csv", "train.csv", "a-train.csv", "training.csv"],
                )],
            ),
            (
                &["2test3/y.csv", "my_train-data/x.csv", "mytest/x.csv"],
                &[
                    ("train", &["my_train-data/x.csv"]),
                    ("test", &["2test3/y.csv"]),
                ],
            ),
            (
                &["dev.csv", "train\u{e9}.csv"],
                &[("validation", &["dev.csv"])],
            ),
            (&["dev.csv", "train+x.csv"], &[("validation", &["dev.csv"])]),
            (
                &[
                    "__pycache__/train.jsonl",
                    "config.json",
                    "dataset_dict.json",
                    "x.jsonl",
                ],
                &[("train", &["x.jsonl"])],
            ),
            (
                &[
                    "other.jsonl",
                    "test.jsonl",
                    "train.jsonl",
                    "validation.v2.jsonl",
                ],
                &[
                    ("train", &["train.jsonl"]),
                    ("validation", &["validation.v2.jsonl"]),
                    ("test", &["test.jsonl"]),
                ],
            ),
            (&["test.csv", "train[1].csv"], &[("test", &["test.csv"])]),
        ];
        for (names, expected) in cases {
            let names: Vec<&str> = names.iter().copied().filter(|name| is_data(name)).collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|(split, files)| ((*split).to_owned(), files.to_vec()))
                .collect();
            assert_eq!(by_name(&names), expected);
        }
        // The folder of a configuration is where names begin, and no folder elsewhere has its name.
        let names = ["data/test.jsonl", "data/train.jsonl", "x/data/train.jsonl"];
        assert_eq!(
            chosen(&names, None, Some("data"), None).unwrap(),
            [names[1]]
        );
        let names = [
            "data/data/test-00000-of-00001.parquet",
            "data/data/train-00000-of-00001.parquet",
        ];
        assert_eq!(
            chosen(&names, None, Some("data"), None).unwrap(),
            [names[1]]
        );
        let error = chosen(&["train/de/test.jsonl"], None, Some("train/de"), None).unwrap_err();
        assert!(error.contains("no split `train`; it has test"), "{error}");
    }

    /// The expected values are those of `datasets` 5.2.0 in Python, except that a file is there once.
    #[test]
    fn patterns_are_those_of_python() {
        let names = ["a.jsonl", "sub/b.jsonl", "sub/s/c.jsonl"];
        for (patterns, expected) in [
            (&["*.jsonl"][..], &["a.jsonl"][..]),
            (&["**/*.jsonl"], &names),
            (&["**"], &names),
            (&["sub/**"], &names[1..]),
            (&["sub/*"], &names[1..2]),
            (&["sub"], &[]),
            (&["**.jsonl"], &[]),
            (&["./a.jsonl"], &names[..1]),
            (&["{a,b}.jsonl"], &[]),
            (&["[!b].jsonl"], &names[..1]),
            (
                &["sub/b.jsonl", "*.jsonl", "a.jsonl"],
                &["sub/b.jsonl", "a.jsonl"],
            ),
        ] {
            let patterns: Vec<String> =
                patterns.iter().map(|&pattern| pattern.to_owned()).collect();
            assert_eq!(matching(&names, &patterns), expected, "{patterns:?}");
        }
    }

    /// The expected values are those of `datasets` 5.2.0 in Python.
    #[test]
    fn files_that_are_ignored_by_default_are_read_if_they_are_named() {
        let names = [
            ".hidden/a.jsonl",
            ".x.jsonl",
            "__s__/__t__/a.jsonl",
            "__s__/a.jsonl",
            "__train.jsonl",
            "a.jsonl",
            "config.json",
            "sub/config.json",
        ];
        for (pattern, expected) in [
            ("**", &["__train.jsonl", "a.jsonl"][..]),
            ("*", &["__train.jsonl", "a.jsonl"]),
            ("./*.jsonl", &["__train.jsonl", "a.jsonl"]),
            ("*.json", &[]),
            ("config.json", &["config.json"]),
            ("sub/*", &[]),
            ("**/config.json", &["config.json", "sub/config.json"]),
            ("*/a.jsonl", &[]),
            ("__s__/*", &["__s__/a.jsonl"]),
            ("__s__/**", &["__s__/a.jsonl"]),
            ("__*/a.jsonl", &["__s__/a.jsonl"]),
            ("__s__/__*/*", &["__s__/__t__/a.jsonl"]),
            (".*", &[".x.jsonl"]),
            (".hidden/*", &[".hidden/a.jsonl"]),
            (".*/*", &[".hidden/a.jsonl"]),
        ] {
            assert_eq!(
                matching(&names, &[pattern.to_owned()]),
                expected,
                "{pattern}"
            );
        }
        let of = |names: &[&str], config: &str| {
            let readme = format!("---\nconfigs:\n- config_name: default\n  {config}\n---\n");
            chosen(names, Some(&readme), None, None)
        };
        for (config, file) in [
            (
                "data_files: __splits__/train.jsonl",
                "__splits__/train.jsonl",
            ),
            ("data_files: config.json", "config.json"),
            ("data_dir: __v2__", "__v2__/x.jsonl"),
            ("data_dir: .v3", ".v3/x.jsonl"),
        ] {
            assert_eq!(
                of(&[file, "other.csv"], config).unwrap(),
                [file],
                "{config}"
            );
        }
        // In the folder of a configuration, the same files are ignored as elsewhere.
        let names = [
            "__v2__/.x.jsonl",
            "__v2__/__s__/a.jsonl",
            "__v2__/config.json",
        ];
        assert!(of(&names, "data_dir: __v2__").is_err());
        let names = ["__train.jsonl", "test.jsonl"];
        assert_eq!(chosen(&names, None, None, None).unwrap(), names[..1]);
    }

    #[test]
    fn configurations_are_those_of_the_readme() {
        let readme = "---\nlicense: mit\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small/part-*.jsonl\n  - split: extra\n    path:\n    - small/x.jsonl\n    - small/y.jsonl\n- config_name: large\n  default: true\n  data_files: large/*\n- config_name: folder\n  data_dir: other\n- config_name: both\n  data_dir: small\n  data_files: part-1*\n---\n# Title\n";
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
        // As in Python, patterns are those of paths in `data_dir`.
        assert_eq!(of(Some("both"), None).unwrap(), [names[6]]);
        let error = of(Some("huge"), None).unwrap_err();
        assert!(
            error.contains("no configuration `huge`; it has both, folder, large, small"),
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
