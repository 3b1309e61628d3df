//! The arguments about data: sequences, loading, packing, and the sources of a mixture with the schedule of their weights.

use std::path::{Path, PathBuf};

use overdrive_datasets::{DataLoaderOptions, PackPlan, RowLayout};

use super::choices::SequenceMode;
use super::training::TrainingArguments;
use crate::Result;
use crate::error::{invalid, refuse};

impl TrainingArguments {
    /// Returns the kind of a training sequence: `sequences` if it is set, else documents if another key needs
    /// them.
    pub fn sequence_mode(&self) -> SequenceMode {
        self.sequences.unwrap_or(match self.asks_for_documents() {
            Some(_) => SequenceMode::Documents,
            None => SequenceMode::Windows,
        })
    }

    /// Returns the first key that has no effect on windows, with its value, its neutral value and the reason.
    fn asks_for_documents(&self) -> Option<(&'static str, String, &'static str, &'static str)> {
        let multiple = self.pad_to_multiple_of;
        #[rustfmt::skip]
        let keys = [
            (self.packing, "packing", "true".to_owned(), "false", "are always full"),
            (self.padding_free, "padding_free", "true".to_owned(), "false", "have no padding"),
            (self.group_by_length, "group_by_length", "true".to_owned(), "false", "have the same length"),
            (multiple != 1, "pad_to_multiple_of", multiple.to_string(), "1", "have no padding"),
        ];
        let set = keys.into_iter().find(|(is_set, ..)| *is_set);
        set.map(|(_, key, value, neutral, why)| (key, value, neutral, why))
    }

    /// Checks the keys about data against each other.
    pub(crate) fn validate_loading(&self) -> Result<()> {
        if self.sequences == Some(SequenceMode::Windows)
            && let Some((key, value, neutral, why)) = self.asks_for_documents()
        {
            let expected = format!(
                "{neutral} with `sequences: windows`, which {why}; drop it, or write `sequences: documents`"
            );
            return invalid(key, value, expected);
        }
        let prefetch = self.dataloader_prefetch_factor;
        #[rustfmt::skip]
        refuse(&[
            (self.packing && self.group_by_length, "group_by_length", &true,
                "false with `packing`, whose rows are full anyway; drop one of the two"),
            (self.dataset_text_field.is_empty(), "dataset_text_field", &"empty",
                "the name of the column that holds the text; give it with `--text-column NAME`"),
            (prefetch.is_some() && self.dataloader_num_workers == 0, "dataloader_prefetch_factor", &prefetch.unwrap_or(0),
                "left out with `dataloader_num_workers: 0`, because no worker prepares batches ahead; drop it, or give `dataloader_num_workers` 1 or more"),
        ])?;
        Ok(())
    }

    /// Returns the loader options for batches of `batch_size` rows.
    pub(crate) fn loader_options(&self, batch_size: u64) -> DataLoaderOptions {
        let defaults = DataLoaderOptions::default();
        DataLoaderOptions {
            batch_size: usize::try_from(batch_size).unwrap_or(usize::MAX),
            seed: self.seed,
            num_workers: self.dataloader_num_workers,
            prefetch_factor: self
                .dataloader_prefetch_factor
                .unwrap_or(defaults.prefetch_factor),
            drop_last: self.dataloader_drop_last,
            ..defaults
        }
    }

    /// Returns the number of tokens of the longest row.
    pub(crate) fn context(&self) -> usize {
        usize::try_from(self.context_length).unwrap_or(usize::MAX)
    }

    /// Returns the number of rows of `max_eval_batches` batches.
    pub(crate) fn max_eval_rows(&self) -> usize {
        self.max_eval_batches.map_or(usize::MAX, |batches| {
            let rows = batches.saturating_mul(self.per_device_eval_batch_size);
            usize::try_from(rows).unwrap_or(usize::MAX)
        })
    }

    /// Returns the number of micro-batches of all processes in an epoch of this many rows.
    pub(crate) fn micro_batches_of(&self, rows: usize) -> u64 {
        let (rows, size) = (rows as u64, self.per_device_train_batch_size.max(1));
        match self.dataloader_drop_last {
            true => rows / size,
            false => rows.div_ceil(size),
        }
    }

    /// Returns the layout of the rows of a training batch.
    pub(crate) fn row_layout(&self, pad_token: u32) -> RowLayout {
        if self.packing || self.padding_free {
            return RowLayout::EndToEnd;
        }
        RowLayout::Padded {
            pad_token,
            multiple_of: self.pad_to_multiple_of,
        }
    }

    /// Returns the plan that assigns sequences of these lengths to training rows.
    pub(crate) fn pack_plan(&self, lengths: &[u32]) -> Result<PackPlan> {
        let capacity = self.context();
        Ok(match self.packing {
            true => PackPlan::new(lengths, capacity, self.packing_strategy)?,
            false => PackPlan::one_each(lengths, capacity)?,
        })
    }
}

/// Returns `true` if the name of `path` is that of a file of tokens.
pub(crate) fn is_token_file(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| ["bin", "tokens"].contains(&extension))
}

/// Weights that hold after a number of optimizer steps, one for each source.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MixtureStage {
    pub(crate) steps: u64,
    pub(crate) weights: Vec<f64>,
}

impl TrainingArguments {
    /// Returns the sources of `data` with their weights, `PATH:WEIGHT` each; none if `data` has no weights and so is a
    /// single source.
    ///
    /// # Errors
    /// An error if only some of the paths have a weight.
    pub(crate) fn mixture_sources(&self) -> Result<Vec<(PathBuf, f64)>> {
        let sources: Vec<_> = self.data.iter().filter_map(|path| weighted(path)).collect();
        if sources.is_empty() || sources.len() == self.data.len() {
            return Ok(sources);
        }
        let without = self.data.iter().find(|path| weighted(path).is_none());
        let expected = "a path with its weight, such as text.jsonl:0.3, because other paths have one; give all of them a \
                        weight, or none";
        invalid(
            "data",
            without.map_or_else(String::new, |path| path.display().to_string()),
            expected,
        )
    }

    /// Returns the stages of `data_schedule`, in order.
    pub(crate) fn mixture_schedule(&self) -> Result<Vec<MixtureStage>> {
        let sources = self.mixture_sources()?.len();
        let mut stages: Vec<MixtureStage> = Vec::new();
        for text in &self.data_schedule {
            let Some(stage) = stage(text) else {
                let expected = "STEPS:WEIGHT,WEIGHT,…, such as 2000:0.2,0.8: the weights after that number of steps";
                return invalid("data_schedule", text, expected);
            };
            if stage.weights.len() != sources {
                let expected = match sources {
                    0 => "left out, because the paths of `data` have no weights; or give each path a weight".to_owned(),
                    _ => format!("a stage with {sources} weights, one for each path of `data`"),
                };
                return invalid("data_schedule", text, expected);
            }
            let before = stages.last().map_or(0, |last| last.steps);
            if stage.steps <= before {
                let expected = format!(
                    "a stage that begins after more than {before} steps; list the stages in ascending order"
                );
                return invalid("data_schedule", text, expected);
            }
            stages.push(stage);
        }
        Ok(stages)
    }

    /// Checks the keys of a mixture against each other.
    pub(super) fn validate_mixture(&self) -> Result<()> {
        let sources = self.mixture_sources()?;
        self.mixture_schedule()?;
        if sources.is_empty() {
            return Ok(());
        }
        let negative = sources.iter().find(|(_, weight)| *weight < 0.0);
        let negative = negative.map(|(path, weight)| format!("{}:{weight}", path.display()));
        let negative = negative.unwrap_or_default();
        #[rustfmt::skip]
        refuse(&[
            (!negative.is_empty(), "data", &negative, "a path with a weight of 0 or more"),
            (self.group_by_length, "group_by_length", &true,
                "false for a mixture, whose order its weights decide; drop it, or drop the weights of `data`"),
        ])?;
        Ok(())
    }

    /// Replaces the paths of `data` by those that `find` returns for them, such as the files of a dataset that has a name on
    /// the hub. The sources of a mixture are passed one by one, and keep their weights.
    ///
    /// # Errors
    /// Those of `find`; [`overdrive_core::Error::InvalidOption`] if a source with a weight is not one path.
    pub fn find_data<E: From<overdrive_core::Error>>(
        &mut self,
        find: impl Fn(&[PathBuf]) -> std::result::Result<Vec<PathBuf>, E>,
    ) -> std::result::Result<(), E> {
        if self.data.iter().all(|path| weighted(path).is_none()) {
            self.data = find(&self.data)?;
            return Ok(());
        }
        for source in &mut self.data {
            // Without a weight among others that have one, it is an error of the mixture.
            let Some((path, weight)) = weighted(source) else {
                continue;
            };
            let found = find(&[path])?;
            let [file] = found.as_slice() else {
                let expected = format!(
                    "a source of one file, and this one has {}; tokenize it and give the file of tokens with the weight",
                    found.len()
                );
                return Err(
                    overdrive_core::Error::option("data", source.display(), expected).into(),
                );
            };
            *source = format!("{}:{weight}", file.display()).into();
        }
        Ok(())
    }

    /// Returns the paths of `data` without their weights.
    pub(crate) fn data_paths(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let path = |path: &PathBuf| weighted(path).map_or_else(|| path.clone(), |(path, _)| path);
        self.data.iter().map(path)
    }
}

/// Returns the path and the weight of `PATH:WEIGHT`; `None` for a path without a weight, and for a file whose name ends
/// like one.
pub(super) fn weighted(path: &Path) -> Option<(PathBuf, f64)> {
    let (source, weight) = path.to_str()?.rsplit_once(':')?;
    let weight: f64 = weight.parse().ok()?;
    let is_weight = weight.is_finite() && !source.is_empty() && !path.exists();
    is_weight.then(|| (PathBuf::from(source), weight))
}

fn stage(text: &str) -> Option<MixtureStage> {
    let (steps, weights) = text.split_once(':')?;
    let weights = weights.split(',').map(|weight| {
        let weight: f64 = weight.trim().parse().ok()?;
        (weight.is_finite() && weight >= 0.0).then_some(weight)
    });
    Some(MixtureStage {
        steps: steps.trim().parse().ok()?,
        weights: weights.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(data: &[&str], schedule: &[&str]) -> TrainingArguments {
        TrainingArguments {
            data: data.iter().map(PathBuf::from).collect(),
            data_schedule: schedule.iter().map(|&text| text.to_owned()).collect(),
            ..TrainingArguments::default()
        }
    }

    #[test]
    fn a_weight_follows_the_last_colon_unless_a_file_has_that_name() {
        let sources = of(&["a:b.jsonl:0.7", "b/*.txt:3"], &[]).mixture_sources();
        let expected = [
            (PathBuf::from("a:b.jsonl"), 0.7),
            (PathBuf::from("b/*.txt"), 3.0),
        ];
        assert_eq!(sources.unwrap(), expected);
        assert!(
            of(&["c:\\text", "b.txt", "d:inf"], &[])
                .mixture_sources()
                .unwrap()
                .is_empty()
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes:2");
        std::fs::write(&file, "text").unwrap();
        assert_eq!(weighted(&file), None);
        assert_eq!(
            weighted(&folder.path().join("notes:3")),
            Some((folder.path().join("notes"), 3.0))
        );
    }

    #[test]
    fn what_is_found_for_a_source_has_its_weight() {
        let find = |paths: &[PathBuf]| -> Result<Vec<PathBuf>> {
            let files = |path: &PathBuf| match path.ends_with("many") {
                true => vec!["x".into(), "y".into()],
                false => vec![path.join("z")],
            };
            Ok(paths.iter().flat_map(files).collect())
        };
        let mut arguments = of(&["org/many", "https://h:80/a"], &[]);
        arguments.find_data(find).unwrap();
        assert_eq!(
            arguments.data,
            ["x", "y", "https://h:80/a/z"].map(PathBuf::from)
        );
        let mut arguments = of(&["a:0.7", "https://h:80/b:2"], &[]);
        arguments.find_data(find).unwrap();
        assert_eq!(
            arguments.data,
            ["a/z:0.7", "https://h:80/b/z:2"].map(PathBuf::from)
        );
        let error = of(&["a:1", "org/many:2"], &[]).find_data(find).unwrap_err();
        let expected = "`data` is org/many:2; it must be a source of one file, and this one has 2";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn contradictions_are_errors_with_a_way_out() {
        let schedule = of(&["a:1", "b:1"], &["10:0,1", "20: 1, 0.5"]).mixture_schedule();
        let steps: Vec<_> = schedule.unwrap().iter().map(|stage| stage.steps).collect();
        assert_eq!(steps, [10, 20]);
        for (data, schedule, expected) in [
            (
                &["a:1", "b"][..],
                &[][..],
                "`data` is b; it must be a path with its weight",
            ),
            (
                &["a:1", "b:-1"],
                &[],
                "`data` is b:-1; it must be a path with a weight of 0 or more",
            ),
            (
                &["a:1", "b:1"],
                &["10"],
                "`data_schedule` is 10; it must be STEPS:WEIGHT",
            ),
            (
                &["a:1", "b:1"],
                &["10:1"],
                "it must be a stage with 2 weights",
            ),
            (
                &["a:1", "b:1"],
                &["10:1,2", "10:2,1"],
                "after more than 10 steps",
            ),
            (
                &["a", "b"],
                &["10:1,2"],
                "it must be left out, because the paths of `data` have no weights",
            ),
        ] {
            let error = of(data, schedule)
                .validate_mixture()
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
        let mut arguments = of(&["a:1", "b:1"], &[]);
        arguments.group_by_length = true;
        let error = arguments.validate_mixture().unwrap_err().to_string();
        assert!(error.contains("drop the weights of `data`"), "{error}");
    }
}
