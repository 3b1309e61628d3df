//! Batches of instruction data: padded, end to end and packed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_datasets::{
    Batch, BatchSampler, DataLoader, DataLoaderOptions, Dataset, DeviceLoader, EncodeOptions,
    IGNORE_INDEX, InstructionDataset, InstructionEncoder, InstructionOptions, LengthGroupedBatches,
    PackPlan, PackingStrategy, RowLayout, SequenceRows, collate,
};
use proptest::prelude::*;
use serde_json::json;
use tch::{Device, Tensor};

/// Writes records whose answers have this many letters.
fn write(dir: &Path, letters: &[usize]) -> PathBuf {
    let line = |(index, &count): (usize, &usize)| {
        let answer: String = (0..count)
            .map(|at| char::from(b'a' + ((at * 7 + index) % 26) as u8))
            .collect();
        json!({"prompt": format!("{index}: "), "response": answer}).to_string()
    };
    let lines: Vec<String> = letters.iter().enumerate().map(line).collect();
    let path = dir.join("data.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn open(dir: &Path, letters: &[usize], max_seq_length: usize) -> Arc<InstructionDataset> {
    let tokenizer = crate::common::tokenizer();
    let end = tokenizer.token_to_id("<|endoftext|>");
    let options = EncodeOptions {
        max_seq_length,
        ..EncodeOptions::default()
    };
    let encoder = InstructionEncoder::new(tokenizer, None, end, options).unwrap();
    let path = write(dir, letters);
    let data = InstructionDataset::open([path], encoder, InstructionOptions::default());
    Arc::new(data.unwrap())
}

/// The way in which examples become batches.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// `None`: an example a row.
    packed: Option<PackingStrategy>,
    layout: RowLayout,
    group_by_length: bool,
    shuffle: bool,
}

const PADDED: Kind = Kind {
    packed: None,
    layout: RowLayout::Padded {
        pad_token: 0,
        multiple_of: 1,
    },
    group_by_length: false,
    shuffle: true,
};

fn loader(
    data: &Arc<InstructionDataset>,
    kind: Kind,
    batch_size: usize,
    seed: u64,
) -> DeviceLoader<Batch> {
    let capacity = data.encoder().options().max_seq_length;
    let plan = match kind.packed {
        Some(strategy) => PackPlan::new(data.lengths(), capacity, strategy).unwrap(),
        None => PackPlan::one_each(data.lengths(), capacity).unwrap(),
    };
    let options = DataLoaderOptions {
        batch_size,
        seed,
        shuffle: kind.shuffle,
        ..DataLoaderOptions::default()
    };
    let batches: Box<dyn BatchSampler> = match kind.group_by_length {
        true => {
            let lengths: Vec<u32> = (0..plan.len())
                .map(|row| plan.row_tokens(row) as u32)
                .collect();
            let batches = LengthGroupedBatches::new(lengths, batch_size, false, seed);
            Box::new(batches.unwrap())
        }
        false => Box::new(options.batches(plan.len()).unwrap()),
    };
    let rows = SequenceRows::new(Arc::clone(data), Arc::new(plan));
    let collate = move |rows: Vec<_>| collate(&rows, kind.layout);
    let loader = DataLoader::with(rows, batches, collate, options.workers()).unwrap();
    DeviceLoader::new(loader, Device::Cpu)
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.view([-1])).unwrap()
}

fn optional(tensor: Option<&Tensor>) -> Option<Vec<i64>> {
    tensor.map(numbers)
}

#[test]
fn padded_rows_are_filled_up_on_the_right_and_masked() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(dir.path(), &[2, 9, 4], 1024);
    let kind = Kind {
        layout: RowLayout::Padded {
            pad_token: 5,
            multiple_of: 8,
        },
        shuffle: false,
        ..PADDED
    };
    let batch = loader(&data, kind, 2, 0).next().unwrap().unwrap();
    let width = (data.lengths()[1] as usize).next_multiple_of(8);
    assert_eq!(batch.input_ids.size(), [2, width as i64]);
    for row in [0, 1] {
        let example = data.get(row).unwrap();
        let len = example.input_ids.len();
        let part = |tensor: &Tensor| numbers(&tensor.get(row as i64));
        assert_eq!(part(&batch.input_ids)[..len], example.input_ids);
        assert!(part(&batch.input_ids)[len..].iter().all(|&id| id == 5));
        assert_eq!(part(&batch.labels)[..len], example.labels);
        let padding = &part(&batch.labels)[len..];
        assert!(padding.iter().all(|&label| label == IGNORE_INDEX));
        let mask = part(batch.attention_mask.as_ref().unwrap());
        assert_eq!(mask.iter().sum::<i64>() as usize, len);
        assert!(mask[..len].iter().all(|&mask| mask == 1));
    }
    let learned = |i| data.get(i).unwrap().learned_tokens();
    assert_eq!(batch.label_count, learned(0) + learned(1));
    // Each row is one sequence that begins at position 0.
    assert!(batch.sequence_lengths.is_empty() && batch.position_ids.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_pass_holds_every_example_once_whatever_the_layout(
        letters in prop::collection::vec(1_usize..40, 1..24),
        batch_size in 1_usize..5,
        kind in 0_usize..5,
        group_by_length in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let data = open(dir.path(), &letters, 32);
        let packed = |strategy| Kind { packed: Some(strategy), layout: RowLayout::EndToEnd, ..PADDED };
        let kind = [
            PADDED,
            Kind { layout: RowLayout::EndToEnd, ..PADDED },
            packed(PackingStrategy::Bfd),
            packed(PackingStrategy::BfdSplit),
            packed(PackingStrategy::Wrapped),
        ][kind];
        let mut batches = loader(&data, Kind { group_by_length, ..kind }, batch_size, seed);
        for _epoch in 0..2 {
            let mut tokens: HashMap<i64, i64> = HashMap::new();
            let mut count = 0;
            for batch in batches.by_ref() {
                let batch = batch.unwrap();
                prop_assert_eq!(batch.labels.size(), batch.input_ids.size());
                let (ids, labels) = (numbers(&batch.input_ids), numbers(&batch.labels));
                let counted = labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
                prop_assert_eq!(batch.label_count, counted);
                let mask = optional(batch.attention_mask.as_ref());
                let real = |at: usize| mask.as_ref().is_none_or(|mask| mask[at] == 1);
                prop_assert_eq!((0..ids.len()).filter(|&at| real(at)).count(), batch.tokens);
                if kind.layout == RowLayout::EndToEnd {
                    prop_assert_eq!(batch.input_ids.size(), [1, batch.tokens as i64]);
                    prop_assert!(mask.is_none());
                    prop_assert_eq!(batch.sequence_lengths.iter().sum::<i64>() as usize, batch.tokens);
                    prop_assert_eq!(batch.sequence_lengths.len(), batch.sequences);
                    let positions = optional(batch.position_ids.as_ref()).unwrap();
                    let mut start = 0;
                    for &length in &batch.sequence_lengths {
                        prop_assert!((1..=32).contains(&length));
                        prop_assert_eq!(labels[start], IGNORE_INDEX);
                        let positions = &positions[start..start + length as usize];
                        prop_assert!(positions.iter().copied().eq(0..length));
                        start += length as usize;
                    }
                } else {
                    prop_assert!(batch.sequence_lengths.is_empty());
                }
                count += batch.tokens;
                for (at, id) in ids.iter().enumerate() {
                    if real(at) {
                        *tokens.entry(*id).or_default() += 1;
                    }
                }
            }
            for index in 0..data.len() {
                for id in data.get(index).unwrap().input_ids {
                    *tokens.get_mut(&id).unwrap() -= 1;
                }
            }
            prop_assert!(tokens.values().all(|&left| left == 0));
            prop_assert_eq!(count as u64, data.report().tokens);
        }
    }
}

#[test]
fn orders_change_with_the_pass_and_resume_where_they_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(dir.path(), &[4; 30], 1024);
    let whole = |batch: overdrive_datasets::Result<Batch>| {
        let batch = batch.unwrap();
        let mask = optional(batch.attention_mask.as_ref());
        let counts = (batch.tokens, batch.sequences, batch.label_count);
        (
            numbers(&batch.input_ids),
            numbers(&batch.labels),
            mask,
            counts,
        )
    };
    let endless = || loader(&data, PADDED, 4, 3).endless();
    let all: Vec<_> = endless().take(16).map(whole).collect();
    assert_ne!(all[0], all[8]);
    let mut stopped = endless();
    stopped.by_ref().take(5).for_each(drop);
    let mut resumed = endless();
    resumed.load_state_dict(stopped.state_dict()).unwrap();
    assert_eq!(resumed.take(11).map(whole).collect::<Vec<_>>(), all[5..]);
    // A pass has each row once.
    let once = Kind {
        shuffle: false,
        ..PADDED
    };
    assert_eq!(loader(&data, once, 4, 3).count(), 8);
}

#[test]
fn grouping_by_length_and_packing_leave_less_padding() {
    let dir = tempfile::tempdir().unwrap();
    let letters: Vec<usize> = (0..2000_usize)
        .map(|i| 4 + (i * 7919 % 19).pow(2))
        .collect();
    let data = open(dir.path(), &letters, 1024);
    let fill = |kind: Kind| {
        let (mut tokens, mut places) = (0, 0);
        for batch in loader(&data, kind, 8, 0) {
            let batch = batch.unwrap();
            tokens += batch.tokens;
            places += batch.padded_tokens();
        }
        tokens as f64 / places as f64
    };
    let grouped = Kind {
        group_by_length: true,
        ..PADDED
    };
    let (plain, grouped) = (fill(PADDED), fill(grouped));
    let packed = PackPlan::new(data.lengths(), 1024, PackingStrategy::Bfd).unwrap();
    assert!(plain < 0.65, "{plain}");
    assert!(grouped > 0.93, "{grouped}");
    assert!(packed.fill() > 0.95, "{}", packed.fill());
}
