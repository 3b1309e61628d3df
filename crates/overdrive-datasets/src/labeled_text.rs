//! Texts with the classes that they belong to.

use std::path::Path;

use overdrive_core::check_option;

use crate::transform::{split_indices, test_len};
use crate::{FieldRecords, FieldRow, Result};

/// The texts of a file with the class of each, in memory: the data of a sequence classifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabeledTexts {
    /// The texts.
    pub texts: Vec<String>,
    /// The class of each text, an index into `labels`.
    pub classes: Vec<i64>,
    /// The names of the classes: numbers in numerical order, other names in alphabetical order.
    pub labels: Vec<String>,
}

impl LabeledTexts {
    /// Reads the columns `text` and `label` of a file in one of the formats of [`FieldRecords`], according to its
    /// extension. A label is a string, a number or a boolean; white space around it is removed. `labels` are the classes
    /// of an existing model; `None` takes those of the file.
    ///
    /// ```
    /// use overdrive_datasets::LabeledTexts;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("rows.csv");
    /// std::fs::write(&path, "text,label\n\"Well, hello\",greeting\nSee you,farewell\n").unwrap();
    /// let data = LabeledTexts::open(&path, "text", "label", None)?;
    /// assert_eq!(data.labels, ["farewell", "greeting"]);
    /// assert_eq!((&*data.texts[0], data.classes[0]), ("Well, hello", 1));
    /// # Ok::<(), overdrive_datasets::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, a row lacks a column, a label is blank or not one of `labels`, or,
    /// without `labels`, if all rows have the same label.
    pub fn open(
        path: impl AsRef<Path>,
        text: &str,
        label: &str,
        labels: Option<&[String]>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let records = FieldRecords::open([path])?;
        records.check_column("text_column", text)?;
        records.check_column("label_column", label)?;
        let rows = (0..records.len()).map(|index| {
            let row = records.row(index)?;
            let own = checked_label(&row, label, labels)?;
            Ok((row.required_text(text)?.into_owned(), own))
        });
        let rows = rows.collect::<Result<Vec<(String, String)>>>()?;
        let expected = "a file with at least one row";
        check_option(!rows.is_empty(), "data", path.display(), expected)?;
        let labels = match labels {
            Some(labels) => labels.to_vec(),
            None => {
                let names = names(rows.iter().map(|(_, label)| label.as_str()));
                let count = rows.len();
                check_option(
                    names.len() >= 2,
                    label.to_owned(),
                    format!("{} in all {count} rows of {}", names[0], path.display()),
                    "one of at least two classes, because a classifier with a single class learns nothing; name the \
                     column of the labels, or add rows of another class",
                )?;
                if let Some(number) = measured(&names) {
                    let found = format!("{number} and other numbers in {}", path.display());
                    let expected = "a class: these are values of a regression, which is not supported; name the column of \
                                    the labels, or round the numbers to classes";
                    return Err(
                        overdrive_core::Error::option(label.to_owned(), found, expected).into(),
                    );
                }
                names
            }
        };
        let (mut texts, mut classes) = (Vec::new(), Vec::new());
        for (text, own) in rows {
            // Each label was checked against the given classes, or the classes come from the file.
            let class = labels.iter().position(|label| *label == own);
            texts.push(text);
            classes.push(class.unwrap_or_default() as i64);
        }
        Ok(Self {
            texts,
            classes,
            labels,
        })
    }

    /// Returns the number of texts.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Returns `true` if there is no text.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Returns the indices of the training texts and of the test texts, at least one of each. `held_out`, at least 0 and
    /// below 1, is the share of the test texts. The split is a function of the seed and the number of texts.
    ///
    /// # Errors
    /// Returns an error for a share out of its range, fewer than two texts, or training texts that are all of one
    /// class.
    pub fn split(&self, held_out: f64, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
        check_option(
            (0.0..1.0).contains(&held_out),
            "held_out",
            held_out,
            "at least 0 and below 1",
        )?;
        let len = self.len();
        check_option(
            len >= 2,
            "data",
            format!("{len} rows"),
            "at least two, to train and to test",
        )?;
        let tested = test_len(len, held_out).clamp(1, len - 1);
        let (train, test) = split_indices(len, tested, seed);
        let first = self.classes[train[0]];
        check_option(
            self.labels.len() < 2 || train.iter().any(|&index| self.classes[index] != first),
            "held_out",
            format!(
                "{held_out}, which with seed {seed} leaves {} rows to train on",
                train.len()
            ),
            format!(
                "a share that leaves rows of at least two classes (these are all {}); or change the seed",
                self.labels[first as usize]
            ),
        )?;
        Ok((train, test))
    }
}

/// Returns the different names in their order.
fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<&str> = all.collect();
    names.sort_unstable();
    names.dedup();
    let number = |name: &&str| name.parse::<i64>().ok();
    if names.iter().all(|name| number(name).is_some()) {
        names.sort_by_key(number);
    }
    names.into_iter().map(str::to_owned).collect()
}

/// Returns one of the names with a fraction if all are numbers: transformers trains a regression on such labels.
fn measured(names: &[String]) -> Option<&str> {
    let numbers: Option<Vec<f64>> = names.iter().map(|name| name.parse().ok()).collect();
    let at = numbers?
        .iter()
        .position(|number| number.is_finite() && number.fract() != 0.0)?;
    Some(&names[at])
}

/// Returns the label of a row in the column `column`, without the white space around it.
fn checked_label(row: &FieldRow<'_>, column: &str, labels: Option<&[String]>) -> Result<String> {
    let label = row.required_text(column)?;
    let label = label.trim();
    match labels {
        _ if label.is_empty() => Err(row.error(format!(
            "`{column}` is blank; it must be the name of a class: fill it in, or remove the row"
        ))),
        Some(labels) if labels.iter().all(|known| known != label) => Err(row.error(format!(
            "`{column}` is {label}; it must be one of {}",
            labels.join(", ")
        ))),
        _ => Ok(label.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dataset, DatasetExt, InMemory};

    fn open(name: &str, content: &str, labels: Option<&[String]>) -> Result<LabeledTexts> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        LabeledTexts::open(&path, "text", "label", labels)
    }

    #[test]
    fn labels_are_the_names_of_the_file_in_order_or_those_of_a_model() {
        let json = "{\"text\": \"a\", \"label\": 10}\n{\"text\": \"b\", \"label\": 9}\n";
        let data = open("rows.jsonl", json, None).unwrap();
        assert_eq!(data.labels, ["9", "10"]);
        assert_eq!(data.classes, [1, 0]);
        let words = open("rows.tsv", "label\ttext\nspam\tx\nham\ty\nspam\tz\n", None).unwrap();
        assert_eq!(
            (words.labels.join(" "), words.classes),
            ("ham spam".to_owned(), vec![1, 0, 1])
        );
        let own = ["yes".to_owned(), "no".to_owned()];
        let data = open("rows.csv", "text,label\nx,no\n", Some(&own)).unwrap();
        assert_eq!((data.labels, data.classes), (own.to_vec(), vec![1]));
    }

    #[test]
    fn rows_that_do_not_fit_are_refused_with_what_is_allowed() {
        let message =
            |name, content: &str, labels| open(name, content, labels).unwrap_err().to_string();
        let column = message("rows.csv", "title,label\nx,1\n", None);
        assert!(
            column.starts_with("`text_column` is text; it must be one of title, label"),
            "{column}"
        );
        let own = ["yes".to_owned()];
        let label = message("rows.csv", "text,label\nx,no\n", Some(&own));
        let problem = "rows.csv, record 0 (byte 11): `label` is no; it must be one of yes";
        assert!(label.ends_with(problem), "{label}");
        let rows = "{\"text\": \"x\", \"label\": 1}\n{\"text\": \"x\"}\n";
        let missing = message("rows.jsonl", rows, None);
        let problem = "rows.jsonl, record 1 (byte 26): `label` is missing; it must be a string, a number or a boolean";
        assert!(missing.ends_with(problem), "{missing}");
        for (name, content) in [
            ("rows.csv", "text,label\nx,yes\ny, \nz,no\n"),
            (
                "rows.jsonl",
                "{\"text\": \"x\", \"label\": \"yes\"}\n{\"text\": \"y\", \"label\": \" \"}\n",
            ),
        ] {
            let blank = message(name, content, None);
            let of_row = format!("{name}, record 1 (byte ");
            assert!(blank.contains(&of_row), "{blank}");
            assert!(
                blank.ends_with("`label` is blank; it must be the name of a class: fill it in, or remove the row"),
                "{blank}"
            );
        }
        // The rows of JSON have no common columns: the first one may lack what the others have.
        let rows = "{\"text\": \"x\"}\n{\"text\": \"y\", \"label\": 1}\n";
        let missing = message("rows.jsonl", rows, None);
        let problem = "rows.jsonl, record 0 (byte 0): `label` is missing; it must be a string, a number or a boolean";
        assert!(missing.ends_with(problem), "{missing}");
        assert!(message("rows.csv", "text,label\n", None).contains("at least one row"));
        // The columns are those of the header, whatever follows it.
        for rows in ["", "a\n"] {
            let column = message("rows.csv", &format!("title,label\n{rows}"), None);
            assert!(column.starts_with("`text_column` is text"), "{column}");
        }
    }

    #[test]
    fn numbers_with_fractions_are_no_classes() {
        let error = open("rows.csv", "text,label\nx,0.0\ny,0.33\nz,1\n", None).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("`label` is 0.33 and other numbers in "),
            "{error}"
        );
        assert!(error.contains("regression"), "{error}");
        for classes in ["text,label\nx,0.0\ny,1.0\n", "text,label\nx,0.5\ny,half\n"] {
            open("rows.csv", classes, None).unwrap();
        }
    }

    #[test]
    fn labels_of_one_class_are_refused_in_the_file_and_in_the_part_to_train_on() {
        let one = open("rows.csv", "text,label\nx,good\ny,good\n", None).unwrap_err();
        let one = one.to_string();
        assert!(
            one.starts_with("`label` is good in all 2 rows of "),
            "{one}"
        );
        assert!(one.contains("name the column of the labels, or add rows of another class"));
        // The classes of a model may have no rows.
        let own = ["good".to_owned(), "bad".to_owned()];
        let one = open("rows.csv", "text,label\nx,good\ny,good\n", Some(&own)).unwrap();
        assert_eq!(one.classes, [0, 0]);

        let two = open("rows.csv", "text,label\nx,good\ny,bad\n", None).unwrap();
        let train = two.split(0.5, 1).unwrap_err().to_string();
        assert!(
            train.starts_with(
                "`held_out` is 0.5, which with seed 1 leaves 1 rows to train on; it must be a share"
            ),
            "{train}"
        );
    }

    #[test]
    fn rows_of_old_spreadsheets_end_with_carriage_returns() {
        let data = open("rows.csv", "text,label\rx,good\ry,bad\r", None).unwrap();
        assert_eq!(data.texts, ["x", "y"]);
        assert_eq!(data.classes, [1, 0]);
    }

    #[test]
    fn a_split_keeps_every_text_once_and_is_a_function_of_its_seed() {
        let content: String = (0..10).map(|row| format!("{row},{}\n", row % 2)).collect();
        let data = open("rows.csv", &format!("text,label\n{content}"), None).unwrap();
        let (train, test) = data.split(0.3, 1).unwrap();
        assert_eq!((train.len(), test.len()), (7, 3));
        // The same records as of any other dataset.
        let split = InMemory((0..10).collect::<Vec<usize>>())
            .split(0.3, 1)
            .unwrap();
        let mut same: Vec<usize> = (0..3).map(|index| split.test.get(index).unwrap()).collect();
        same.sort_unstable();
        assert_eq!(test, same);
        let mut all = [train.clone(), test.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!(data.split(0.3, 1).unwrap(), (train.clone(), test));
        assert_ne!(data.split(0.3, 2).unwrap().0, train);
        assert_eq!(data.split(0.0, 1).unwrap().1.len(), 1);
        assert!(
            data.split(1.0, 1)
                .unwrap_err()
                .to_string()
                .starts_with("`held_out` is 1")
        );
    }
}
