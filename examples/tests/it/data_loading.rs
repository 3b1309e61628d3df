//! Files of every format, documents as sequences, and loaders with any number of threads.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use overdrive::datasets::{Dataset, IGNORE_INDEX, LastWindow, Permutation, SequentialWindows};
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::tracking::{JsonLines, Trackers, read_metrics};
use overdrive::trainer::{
    Evaluation, RunOptions, RunSummary, SampleBy, SequenceMode, TextData, TrainingArguments,
    evaluate, new_model,
};
use tch::{Device, Tensor};

use crate::alone;
use crate::fit;

fn text(number: usize) -> String {
    let words = "the quick brown fox jumps over the lazy dog, says document ";
    format!("{}{number}.", words.repeat(1 + number % 7))
}

fn jsonl(records: usize) -> String {
    (0..records).fold(String::new(), |mut file, number| {
        let record =
            serde_json::json!({ "id": number, "text": text(number), "length": 1000 - number });
        writeln!(file, "{record}").unwrap();
        file
    })
}

fn csv(records: usize) -> String {
    (0..records).fold("id,text\n".to_owned(), |mut file, number| {
        writeln!(file, "{number},\"{}\"", text(number)).unwrap();
        file
    })
}

fn lines(records: usize) -> String {
    (0..records).map(|number| text(number) + "\n").collect()
}

fn arguments(folder: &Path, name: &str, content: &str) -> TrainingArguments {
    let file = folder.join(name);
    fs::write(&file, content).unwrap();
    TrainingArguments {
        max_steps: 6,
        per_device_train_batch_size: 4,
        per_device_eval_batch_size: 4,
        ..fit::tiny(file)
    }
}

/// Returns the data, and the log lines about it.
fn prepare(
    folder: &Path,
    arguments: &TrainingArguments,
) -> overdrive::trainer::Result<(TextData, String)> {
    let mut said = String::new();
    let data = TextData::prepare_in(&folder.join("cache"), arguments, |line| {
        said.push_str(line);
        said.push('\n');
    })?;
    Ok((data, said))
}

fn error(folder: &Path, arguments: &TrainingArguments) -> String {
    let error = prepare(folder, arguments).unwrap_err().to_string();
    error.replace(&format!("{}/", folder.display()), "")
}

fn train(folder: &Path, arguments: &TrainingArguments) -> RunSummary {
    let (data, _) = prepare(folder, arguments).unwrap();
    arguments.apply().unwrap();
    let mut model = new_model(arguments, &data, Device::Cpu).unwrap();
    let group = ProcessGroup::single();
    let options = RunOptions {
        precision: Some(Precision::Fp32),
        fingerprints: Some(data.fingerprints(arguments, &group).unwrap()),
        trackers: Trackers::new().with(JsonLines::create(folder.join("metrics.jsonl")).unwrap()),
        ..RunOptions::default()
    };
    let loader = data.train_loader(arguments, Device::Cpu).unwrap();
    let trained = fit::fit(
        arguments,
        &group,
        options,
        &mut model,
        loader,
        &mut |model| {
            let batches = data.validation_loader(arguments, Device::Cpu)?;
            let loss = evaluate(model, batches, Precision::Fp32, &group)?;
            Ok(Evaluation::new(loss))
        },
    );
    trained.unwrap().0
}

#[test]
fn losses_are_equal_for_any_number_of_workers() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let base = arguments(folder.path(), "a.jsonl", &jsonl(40));
    for change in [
        (|_: &mut TrainingArguments| {}) as fn(&mut TrainingArguments),
        |arguments| arguments.sequences = Some(SequenceMode::Documents),
        |arguments| arguments.group_by_length = true,
        |arguments| arguments.packing = true,
        |arguments| {
            arguments.padding_free = true;
            arguments.dataloader_drop_last = true;
            arguments.gradient_accumulation_steps = 2;
        },
    ] {
        let mut arguments = base.clone();
        change(&mut arguments);
        // More than one pass, so that the border between two is crossed.
        arguments.max_steps = 10;
        let losses = |workers, ahead| {
            let arguments = TrainingArguments {
                dataloader_num_workers: workers,
                dataloader_prefetch_factor: ahead,
                ..arguments.clone()
            };
            train(folder.path(), &arguments).losses
        };
        let without = losses(0, None);
        assert_eq!(without.len(), 10);
        assert!(without[9] < without[0], "{without:?}");
        assert_eq!(losses(1, None), without);
        assert_eq!(losses(2, Some(3)), without);
    }
}

#[test]
fn the_summary_compares_a_run_with_the_target_of_data_loading() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let arguments = arguments(folder.path(), "a.jsonl", &jsonl(40));
    let summary = train(folder.path(), &arguments);
    // A CPU has no target of a GPU. Whether this one is met depends on the machine.
    let [target] = summary.targets[..] else {
        panic!("{:?}", summary.targets)
    };
    let line = target.to_string();
    assert!(
        line.contains("data loading") && line.contains("at most 5%"),
        "{line}"
    );
    assert!(summary.to_string().contains(&line), "{summary}");
}

#[test]
fn an_epoch_has_each_window_of_a_token_store_once_in_an_order_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = arguments(folder.path(), "a.jsonl", &jsonl(40));
    let (data, _) = prepare(folder.path(), &arguments).unwrap();
    let windows = SequentialWindows::new(data.train.clone(), 32, LastWindow::Drop).unwrap();
    let mut batches = data.train_loader(&arguments, Device::Cpu).unwrap();
    let per_epoch = batches.batches_per_epoch();
    assert_eq!(per_epoch, windows.len().div_ceil(4));
    assert_eq!(per_epoch as u64, data.micro_batches_per_epoch(&arguments));
    let mut orders = Vec::new();
    for epoch in 0..3 {
        let permutation = Permutation::new(windows.len(), arguments.seed, epoch);
        let order: Vec<usize> = (0..windows.len())
            .map(|position| permutation.apply(position))
            .collect();
        let mut seen = vec![0; windows.len()];
        for numbers in order.chunks(4) {
            let batch = batches.next().unwrap().unwrap();
            let tokens: Vec<i64> = numbers
                .iter()
                .flat_map(|&number| windows.get(number).unwrap().input_ids)
                .collect();
            let mut labels = tokens.clone();
            labels
                .iter_mut()
                .step_by(32)
                .for_each(|first| *first = IGNORE_INDEX);
            let rows = numbers.len();
            let shape = [rows as i64, 32];
            assert_eq!(batch.input_ids, Tensor::from_slice(&tokens).view(shape));
            assert_eq!(batch.labels, Tensor::from_slice(&labels).view(shape));
            assert_eq!((batch.label_count, batch.tokens), (rows * 31, rows * 32));
            numbers.iter().for_each(|&number| seen[number] += 1);
        }
        assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
        orders.push(order);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
}

#[test]
fn an_epoch_has_each_row_of_documents_once_in_an_order_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    for change in [
        (|arguments: &mut TrainingArguments| {
            arguments.sequences = Some(SequenceMode::Documents);
        }) as fn(&mut TrainingArguments),
        |arguments| arguments.packing = true,
        |arguments| arguments.group_by_length = true,
    ] {
        let mut arguments = arguments(folder.path(), "a.jsonl", &jsonl(40));
        arguments.context_length = 64;
        change(&mut arguments);
        let (data, _) = prepare(folder.path(), &arguments).unwrap();
        let mut batches = data.train_loader(&arguments, Device::Cpu).unwrap();
        let mut tokens_of = || {
            let batches = batches.next_batches(usize::MAX).unwrap();
            let tokens = batches.iter().flat_map(|batch| {
                // The label is -100 where there is no token, and at the begin of a document.
                Vec::<i64>::try_from(batch.labels.view([-1])).unwrap()
            });
            tokens.collect::<Vec<_>>()
        };
        let epochs = [tokens_of(), tokens_of(), tokens_of()];
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
        let sorted = epochs.map(|mut tokens| {
            tokens.retain(|&token| token != IGNORE_INDEX);
            tokens.sort_unstable();
            tokens
        });
        assert!(!sorted[0].is_empty() && sorted[0] == sorted[1] && sorted[1] == sorted[2]);
    }
}

#[test]
fn one_text_trains_alike_out_of_lines_json_and_csv() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut losses = Vec::new();
    for (name, content) in [
        ("a.txt", lines(40)),
        ("a.jsonl", jsonl(40)),
        ("a.csv", csv(40)),
        (
            "a.tsv",
            csv(40).replace(",\"", "\t\"").replace("id,", "id\t"),
        ),
        (
            "a.json",
            format!("[{}]", jsonl(40).trim_end().replace('\n', ",\n  ")),
        ),
    ] {
        let arguments = TrainingArguments {
            sample_by: SampleBy::Line,
            ..arguments(folder.path(), name, &content)
        };
        let (_, said) = prepare(folder.path(), &arguments).unwrap();
        assert!(said.contains("40 records of 1 file,"), "{name}: {said}");
        losses.push(train(folder.path(), &arguments).losses);
    }
    for other in &losses[1..] {
        assert_eq!(other, &losses[0]);
    }
}

#[test]
fn the_error_of_a_missing_column_names_the_nearest_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "a.csv", &csv(9));
    arguments.dataset_text_field = "txet".to_owned();
    assert_eq!(
        error(folder.path(), &arguments),
        "a.csv has no column `txet`; did you mean `text`?; name the column with `--text-column NAME` (`dataset_text_field`)"
    );
    arguments.dataset_text_field = "content".to_owned();
    assert_eq!(
        error(folder.path(), &arguments),
        "a.csv has no column `content`; it has `id`, `text`; name the column with `--text-column NAME` (`dataset_text_field`)"
    );
    // Further down, the record is named.
    let broken = jsonl(5) + "{\"id\": 5, \"txt\": \"a\"}\n";
    let arguments = self::arguments(folder.path(), "b.jsonl", &broken);
    let text = error(folder.path(), &arguments);
    assert!(text.starts_with("b.jsonl, record 5 (byte "), "{text}");
    assert!(
        text.ends_with("it has no `text`; did you mean `txt`?"),
        "{text}"
    );
    let list = jsonl(5) + "{\"text\": [7]}\n";
    let arguments = self::arguments(folder.path(), "c.jsonl", &list);
    let text = error(folder.path(), &arguments);
    assert!(
        text.ends_with("`text` is a list; it must be a string, a number or a boolean"),
        "{text}"
    );
}

#[test]
fn files_of_several_formats_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "a.csv", &csv(9));
    let other = folder.path().join("b.jsonl");
    fs::write(&other, jsonl(9)).unwrap();
    arguments.data.push(other);
    assert_eq!(
        error(folder.path(), &arguments),
        "a.csv is CSV, but other files of `data` are not; give files of one format, or convert them to JSON Lines"
    );
    let mut arguments = arguments.clone();
    arguments.data = vec![folder.path().join("nowhere.csv")];
    let text = error(folder.path(), &arguments);
    assert!(text.starts_with("cannot open nowhere.csv: "), "{text}");
}

#[test]
fn equal_documents_are_left_out_before_they_are_tokenized_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let twice = jsonl(30).lines().fold(String::new(), |mut file, line| {
        writeln!(file, "{line}\n{line}").unwrap();
        file
    });
    let mut arguments = arguments(folder.path(), "a.jsonl", &twice);
    let documents = |data: &TextData| data.train.stores()[0].document_count();
    assert_eq!(
        documents(&prepare(folder.path(), &arguments).unwrap().0),
        60
    );
    arguments.remove_duplicates = true;
    for _run in 0..2 {
        let (data, said) = prepare(folder.path(), &arguments).unwrap();
        assert!(
            said.contains("30 records equal to an earlier one removed"),
            "{said}"
        );
        assert_eq!(documents(&data), 30);
    }

    let texts = folder.path().join("texts");
    fs::create_dir(&texts).unwrap();
    for number in 0..20 {
        fs::write(
            texts.join(format!("{number}.txt")),
            text(number % 10).repeat(9),
        )
        .unwrap();
    }
    arguments.data = vec![texts];
    let (data, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(
        said.contains("10 files equal to an earlier one removed"),
        "{said}"
    );
    assert_eq!(documents(&data), 10);
}

#[test]
fn grouping_pads_less_packing_and_padding_free_not_at_all() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // Without the column, which says nothing about these texts.
    let content = jsonl(320).replace("\"length\"", "\"n\"");
    let mut arguments = arguments(folder.path(), "a.jsonl", &content);
    arguments.context_length = 64;
    // Four groups of 64 documents of seven lengths.
    arguments.per_device_train_batch_size = 8;
    arguments.sequences = Some(SequenceMode::Documents);
    arguments.max_steps = -1;
    arguments.num_train_epochs = 1.0;
    let run = |change: &dyn Fn(&mut TrainingArguments)| {
        let mut arguments = arguments.clone();
        change(&mut arguments);
        train(folder.path(), &arguments)
    };
    let padded = run(&|_| {});
    let metrics = read_metrics(folder.path().join("metrics.jsonl"))
        .unwrap()
        .records;
    assert!(
        metrics
            .iter()
            .any(|step| step.padding.is_some_and(|part| part > 0.0))
    );
    let grouped = run(&|arguments| arguments.group_by_length = true);
    let packed = run(&|arguments| arguments.packing = true);
    let padding_free = run(&|arguments| arguments.padding_free = true);
    assert!(padded.padding() > 0.1, "{}", padded.padding());
    assert!(
        grouped.padding() < 0.5 * padded.padding(),
        "{}",
        grouped.padding()
    );
    assert_eq!((packed.padding(), padding_free.padding()), (0.0, 0.0));
    // A pass is a pass: the same tokens, in fewer steps where they are packed.
    assert_eq!(
        (grouped.tokens, padding_free.tokens),
        (padded.tokens, padded.tokens)
    );
    assert_eq!(packed.tokens, padded.tokens);
    assert!(packed.losses.len() < padded.losses.len());
}

#[test]
fn lengths_come_from_a_column_where_there_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "a.jsonl", &jsonl(40));
    arguments.group_by_length = true;
    let (data, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(said.contains("grouped by the column `length`"), "{said}");
    // The column counts down, whatever the texts' lengths are: the first document of the training part
    // is the longest by it, and so in the first batch.
    let first = data.train.document_numbers().next().unwrap();
    let document = data.train.document(first).unwrap().1.tokens;
    let start = data.train.stores()[0]
        .tokens(document.start..document.start + 1)
        .unwrap();
    let mut batches = data.train_loader(&arguments, Device::Cpu).unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert_eq!(batch.input_ids.int64_value(&[0, 0]), i64::from(start[0]));
    assert!(batch.padded_tokens() >= batch.tokens && batch.sequences == 4);

    arguments.length_column_name = "lenght".to_owned();
    assert_eq!(
        error(folder.path(), &arguments),
        "a.jsonl has no column `lenght`; did you mean `length`?; name the column with `--length-column-name NAME` (`length_column_name`)"
    );
    let mut arguments =
        self::arguments(folder.path(), "b.jsonl", &jsonl(40).replace("length", "n"));
    arguments.group_by_length = true;
    let (_, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(!said.contains("grouped by the column"), "{said}");
}

#[test]
fn a_run_reports_its_loader() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "a.jsonl", &jsonl(40));
    arguments.gradient_accumulation_steps = 2;
    arguments.dataloader_num_workers = 1;
    let summary = train(folder.path(), &arguments);
    let loading = summary.data_loading.unwrap();
    assert_eq!(loading.loader.unwrap().batches, 12);
    assert!((0.0..=1.0).contains(&loading.share), "{loading}");
    let records = read_metrics(folder.path().join("metrics.jsonl"))
        .unwrap()
        .records;
    assert_eq!(records.len(), 6);
    assert!(records.iter().all(|step| step.loader.unwrap().batches == 2));
    let waited: f64 = records
        .iter()
        .map(|step| step.loader.unwrap().wait_seconds)
        .sum();
    assert!((waited - loading.loader.unwrap().wait.as_secs_f64()).abs() < 1e-6);
}

#[test]
fn a_batch_that_is_never_full_cannot_be_the_only_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "a.jsonl", &jsonl(10));
    arguments.sequences = Some(SequenceMode::Documents);
    arguments.dataloader_drop_last = true;
    arguments.per_device_train_batch_size = 64;
    let text = error(folder.path(), &arguments);
    assert!(
        text.starts_with("`dataloader_drop_last` is true; it must be false for ")
            && text.contains("of a batch; drop it"),
        "{text}"
    );
    let mut arguments = self::arguments(folder.path(), "book.txt", &lines(40));
    arguments.sequences = Some(SequenceMode::Documents);
    let text = error(folder.path(), &arguments);
    assert!(text.contains("`sample_by: line`"), "{text}");
}

#[test]
fn folders_of_one_kind_are_records_and_others_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path(), "alone.txt", "");
    let parts = folder.path().join("parts");
    fs::create_dir_all(parts.join("more")).unwrap();
    fs::write(parts.join("a.jsonl"), jsonl(30)).unwrap();
    fs::write(parts.join("more/b.jsonl"), jsonl(10)).unwrap();
    fs::write(parts.join(".hidden.txt"), "nothing").unwrap();
    arguments.data = vec![parts.clone()];
    let (_, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(said.contains("40 records of 2 files"), "{said}");
    // A pattern is as good as a folder.
    arguments.data = vec![parts.join("*.jsonl")];
    let (_, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(said.contains("30 records of 1 file,"), "{said}");
    fs::write(parts.join("notes.md"), lines(9)).unwrap();
    arguments.data = vec![parts];
    let (data, said) = prepare(folder.path(), &arguments).unwrap();
    assert!(said.contains("3 files, "), "{said}");
    assert_eq!(data.train.stores()[0].document_count(), 41);
}
