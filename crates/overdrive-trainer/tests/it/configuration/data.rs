//! The keys about data and its loader.

use overdrive_trainer::{Layers, Preset, SequenceMode, TrainingArguments};

use crate::configuration::{error, file, resolve};

#[test]
fn documents_are_sequences_where_a_key_asks_for_what_only_they_have() {
    assert_eq!(
        resolve(&[]).expect("valid").sequence_mode(),
        SequenceMode::Windows
    );
    for text in [
        "packing: true",
        "padding_free: true",
        "group_by_length: true",
        "train_sampling_strategy: group_by_length",
        "pad_to_multiple_of: 8",
        "sequences: documents",
    ] {
        let (_folder, path) = file("run.yaml", text);
        let arguments = resolve(&["--config", &path]).expect(text);
        assert_eq!(arguments.sequence_mode(), SequenceMode::Documents, "{text}");
    }
    let (_folder, path) = file("run.yaml", "train_sampling_strategy: random");
    let arguments = resolve(&["--config", &path]).expect("valid");
    assert_eq!(arguments, Preset::Tiny.arguments());
}

#[test]
fn of_two_keys_that_exclude_one_another_the_upper_one_stays() {
    let (_folder, path) = file("run.yaml", "packing: true");
    let flags = [
        "--config",
        &path,
        "--group-by-length",
        "--length-column-name",
        "n",
    ];
    let arguments = resolve(&flags).expect("valid");
    assert!(arguments.group_by_length && !arguments.packing);
    assert_eq!(arguments.length_column_name, "n");
}

#[test]
fn hugging_faces_keys_of_the_loader_load_as_they_stand() {
    let text = "
dataloader_num_workers: 4
dataloader_prefetch_factor: 8
dataloader_pin_memory: false
dataloader_persistent_workers: true
dataloader_drop_last: true
length_column_name: length
remove_unused_columns: false
";
    let (_folder, path) = file("run.yaml", text);
    let arguments = resolve(&["--config", &path]).expect("loads");
    let expected = TrainingArguments {
        dataloader_num_workers: 4,
        dataloader_prefetch_factor: Some(8),
        dataloader_pin_memory: false,
        dataloader_drop_last: true,
        ..Preset::Tiny.arguments()
    };
    assert_eq!(arguments, expected);
}

#[test]
fn keys_without_effect_are_refused_with_the_reason() {
    for (text, expected) in [
        (
            "sequences: windows\ngroup_by_length: true",
            "`group_by_length` is true; it must be false with `sequences: windows`, which have the same length; drop it, or write `sequences: documents`",
        ),
        (
            "sequences: windows\npacking: true",
            "`packing` is true; it must be false with `sequences: windows`, which are always full; drop it, or write `sequences: documents`",
        ),
        (
            "sequences: windows\npad_to_multiple_of: 8",
            "`pad_to_multiple_of` is 8; it must be 1 with `sequences: windows`, which have no padding; drop it, or write `sequences: documents`",
        ),
        (
            "packing: true\ngroup_by_length: true",
            "`group_by_length` is true; it must be false with `packing`, whose rows are full anyway; drop one of the two",
        ),
        (
            "pad_to_multiple_of: 0",
            "`pad_to_multiple_of` is 0; it must be at least 1",
        ),
        (
            "dataloader_num_workers: 0\ndataloader_prefetch_factor: 2",
            "`dataloader_prefetch_factor` is 2; it must be left out with `dataloader_num_workers: 0`, because no worker prepares batches ahead; drop it, or give `dataloader_num_workers` 1 or more",
        ),
        (
            "dataloader_prefetch_factor: 0",
            "`dataloader_prefetch_factor` is 0; it must be at least 1",
        ),
        (
            "train_sampling_strategy: batch_rebalance",
            "run.yaml: `train_sampling_strategy` is `batch_rebalance`, which is not one of `random`, `group_by_length`",
        ),
        (
            "train_sampling_strategy: random\ngroup_by_length: true",
            "run.yaml: `train_sampling_strategy` and `group_by_length` are two names of the same key; remove one of them",
        ),
        (
            "dataloader_num_worker: 2",
            "run.yaml: unknown key `dataloader_num_worker`; did you mean `dataloader_num_workers`?",
        ),
        (
            "sample_by: lines",
            "run.yaml: `sample_by` is `lines`, which is not one of `document`, `line`; did you mean `line`?",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn fine_tuning_accepts_the_same_keys_except_those_without_effect() {
    let base = "model: base\ndata: a.jsonl\n";
    let read = |text: &str| {
        let (_folder, path) = file("run.yaml", &format!("{base}{text}"));
        Layers::finetune().file(&path).and_then(Layers::resolve)
    };
    let arguments = read(
        "group_by_length: true\ndataloader_num_workers: 2\ndataloader_drop_last: true\n\
         remove_duplicates: true\npad_to_multiple_of: 8\n",
    )
    .expect("loads");
    let training = arguments.training;
    assert!(training.group_by_length && training.dataloader_drop_last);
    assert!(training.remove_duplicates);
    assert_eq!(
        (training.dataloader_num_workers, training.pad_to_multiple_of),
        (2, 8)
    );
    for (text, expected) in [
        (
            "group_by_length: true\nlength_column_name: chars\n",
            "run.yaml: `length_column_name: chars` is not supported in fine-tuning; the tokens are counted when the file is opened: drop the key, `group_by_length` needs no column; to train from scratch, run: cargo run --release -p overdrive-examples --example train -- --config run.yaml",
        ),
        (
            "dataset_text_field: body\n",
            "run.yaml: `dataset_text_field: body` is not supported in fine-tuning; the format of a record is recognized by its field names: call the field `text`; to train from scratch, run: cargo run --release -p overdrive-examples --example train -- --config run.yaml",
        ),
        (
            "sequences: windows\n",
            "run.yaml: `sequences: windows` is not supported in fine-tuning; each example is a sequence: drop the key, and write `packing: true` for rows without padding; to train from scratch, run: cargo run --release -p overdrive-examples --example train -- --config run.yaml",
        ),
        (
            "packing: true\ngroup_by_length: true\n",
            "`group_by_length` is true; it must be false with `packing`, whose rows are full anyway; drop one of the two",
        ),
    ] {
        let found = read(text).expect_err(text).to_string();
        // Without the temporary folder of the file.
        let found: Vec<&str> = found
            .split(' ')
            .map(
                |word| match word.ends_with("run.yaml") || word.ends_with("run.yaml:") {
                    true => word.rsplit('/').next().unwrap_or(word),
                    false => word,
                },
            )
            .collect();
        assert_eq!(found.join(" "), expected);
    }
    // The same holds for a configuration that was not read from a file.
    let mut arguments = read("").expect("loads");
    arguments.training.dataset_text_field = "body".to_owned();
    let error = arguments.validate().expect_err("refused").to_string();
    assert!(error.contains("call the field `text`"), "{error}");
}
