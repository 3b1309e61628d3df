//! Windows, splits and batches.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod common;

use std::collections::HashSet;

use common::{counting_store, store};
use overdrive_datasets::{
    BatchOptions, BatchState, Batches, Dataset, Error, IGNORE_INDEX, LastWindow, Prefetch,
    RandomWindows, SequentialWindows, SplitBy, SplitOptions, TokenView, Windows,
};
use proptest::prelude::*;

fn counting_view(dir: &std::path::Path, tokens: u32) -> TokenView {
    TokenView::new(counting_store(dir, tokens))
}

#[test]
fn labels_are_the_next_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 1000), 8, 3).unwrap();
    for number in 0..100 {
        let window = windows.window(number).unwrap();
        let start = windows.start(number) as i64;
        assert_eq!(window.input_ids, (start..start + 8).collect::<Vec<_>>());
        assert_eq!(window.labels, (start + 1..start + 9).collect::<Vec<_>>());
    }
}

#[test]
fn random_windows_start_everywhere_equally_often() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 120), 20, 1337).unwrap();
    // 100 starts: 0..=99, so that the last label is the last token.
    let (starts, draws) = (100, 100_000);
    let mut counts = vec![0_u32; starts];
    for number in 0..draws {
        counts[windows.start(number)] += 1;
    }
    let expected = draws as f64 / starts as f64;
    let chi_square: f64 = counts
        .iter()
        .map(|&n| (f64::from(n) - expected).powi(2) / expected)
        .sum();
    // 99 degrees of freedom: below 149 in 99.9% of all seeds, above 61 likewise.
    assert!(
        (61.0..149.0).contains(&chi_square),
        "chi square {chi_square}"
    );
}

#[test]
fn all_ranks_together_draw_the_windows_of_one_process_with_a_larger_batch() {
    let dir = tempfile::tempdir().unwrap();
    let view = counting_view(dir.path(), 500);
    let windows = RandomWindows::new(view, 4, 9).unwrap();
    let batches = |micro_batch_size, rank, world_size| {
        let options = BatchOptions {
            micro_batch_size,
            rank,
            world_size,
            ..BatchOptions::default()
        };
        Batches::new(windows.clone(), options).unwrap()
    };
    let whole: Vec<_> = batches(12, 0, 1)
        .take(5)
        .map(|batch| batch.unwrap().input_ids)
        .collect();
    let mut ranks: Vec<_> = (0..3).map(|rank| batches(4, rank, 3)).collect();
    for expected in &whole {
        let parts: Vec<i64> = ranks
            .iter_mut()
            .flat_map(|rank| rank.next().unwrap().unwrap().input_ids)
            .collect();
        assert_eq!(&parts, expected);
    }
    // And as three accumulated batches of one process.
    let accumulated: Vec<i64> = batches(4, 0, 1)
        .take(15)
        .flat_map(|batch| batch.unwrap().input_ids)
        .collect();
    assert_eq!(accumulated, whole.concat());
}

#[test]
fn a_resumed_run_sees_the_windows_of_one_that_did_not_stop() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 500), 4, 9).unwrap();
    let options = BatchOptions {
        micro_batch_size: 3,
        ..BatchOptions::default()
    };
    let straight: Vec<_> = Batches::new(windows.clone(), options)
        .unwrap()
        .take(10)
        .map(Result::unwrap)
        .collect();

    let mut first = Batches::new(windows.clone(), options).unwrap();
    let stopped = first.by_ref().take(4).last().unwrap().unwrap().state;
    assert_eq!(stopped, first.state());
    // Through JSON, as a snapshot keeps it.
    let json = serde_json::to_string(&stopped).unwrap();
    assert_eq!(json, r#"{"next_window":12}"#);
    let state: BatchState = serde_json::from_str(&json).unwrap();
    let rest: Vec<_> = Batches::resume(windows.clone(), options, state)
        .unwrap()
        .take(6)
        .map(Result::unwrap)
        .collect();
    assert_eq!(rest, straight[4..]);

    // With another micro-batch size too: the windows count, not the batches.
    let larger = BatchOptions {
        micro_batch_size: 9,
        ..options
    };
    let next = Batches::resume(windows, larger, state)
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let expected: Vec<i64> = straight[4..7]
        .iter()
        .flat_map(|b| b.input_ids.clone())
        .collect();
    assert_eq!(next.input_ids, expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn kept_sequential_windows_predict_each_token_but_the_first_once(
        tokens in 2_u32..300, context in 1_usize..40, rows in 1_usize..6, world_size in 1_usize..4,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let view = counting_view(dir.path(), tokens);
        let last = LastWindow::Keep { pad_token: 1 };
        let windows = SequentialWindows::new(view, context, last).unwrap();
        let mut labels = Vec::new();
        for rank in 0..world_size {
            let options = BatchOptions {
                micro_batch_size: rows, rank, world_size, ..BatchOptions::default()
            };
            for batch in Batches::new(windows.clone(), options).unwrap() {
                let batch = batch.unwrap();
                let predicted = batch.labels.iter().filter(|&&label| label != IGNORE_INDEX);
                prop_assert_eq!(predicted.count(), batch.label_count);
                for (input, label) in batch.input_ids.iter().zip(&batch.labels) {
                    if *label == IGNORE_INDEX {
                        prop_assert_eq!(*input, 1);
                    } else {
                        prop_assert_eq!(*label, input + 1);
                        labels.push(*label);
                    }
                }
            }
        }
        labels.sort_unstable();
        prop_assert_eq!(labels, (1..i64::from(tokens)).collect::<Vec<_>>());
    }

    #[test]
    fn dropped_sequential_windows_are_all_full(tokens in 2_u32..300, context in 1_usize..40) {
        let dir = tempfile::tempdir().unwrap();
        let view = counting_view(dir.path(), tokens);
        match SequentialWindows::new(view, context, LastWindow::Drop) {
            Ok(windows) => {
                prop_assert_eq!(windows.len(), (tokens as usize - 1) / context);
                for index in 0..windows.len() {
                    let window = windows.get(index).unwrap();
                    prop_assert_eq!(window.input_ids[0] as usize, index * context);
                    prop_assert!(window.labels.iter().all(|&label| label != IGNORE_INDEX));
                }
                prop_assert!(windows.get(windows.len()).is_err());
            }
            Err(error) => {
                prop_assert!(tokens as usize <= context);
                let too_few = matches!(error, Error::TooFewTokens { .. });
                prop_assert!(too_few);
            }
        }
    }

    #[test]
    fn a_split_is_a_partition_of_the_documents_and_windows_stay_on_their_side(
        lengths in prop::collection::vec(0_usize..30, 2..60),
        validation_fraction in 0.01_f64..0.99,
        seed in any::<u64>(),
    ) {
        // Each token of document d is d, so a token says which document it comes from.
        let documents: Vec<Vec<u32>> =
            lengths.iter().enumerate().map(|(d, &n)| vec![d as u32; n]).collect();
        let dir = tempfile::tempdir().unwrap();
        let all = TokenView::new(store(dir.path(), 60, &documents));
        let options = SplitOptions { validation_fraction, seed, ..SplitOptions::default() };
        let (train, validation) = all.split(&options).unwrap();

        let in_train: HashSet<usize> = train.document_numbers().collect();
        let in_validation: HashSet<usize> = validation.document_numbers().collect();
        prop_assert!(in_train.is_disjoint(&in_validation));
        prop_assert!(!in_train.is_empty() && !in_validation.is_empty());
        prop_assert_eq!(in_train.len() + in_validation.len(), documents.len());
        prop_assert_eq!(train.len() + validation.len(), all.len());
        for (view, numbers) in [(&train, &in_train), (&validation, &in_validation)] {
            let mut sorted: Vec<_> = numbers.iter().copied().collect();
            sorted.sort_unstable();
            let expected: Vec<i64> =
                sorted.iter().flat_map(|&d| documents[d].iter().map(|&t| t.into())).collect();
            prop_assert_eq!(view.tokens(0..view.len()).unwrap(), expected);
            prop_assert_eq!(view.text_bytes(), Some(3 * view.len() as u64));
            if view.len() > 5 {
                let windows = RandomWindows::new(view.clone(), 5, seed).unwrap();
                for number in 0..20 {
                    let window = windows.window(number).unwrap();
                    let tokens = window.input_ids.iter().chain(&window.labels);
                    prop_assert!(tokens.clone().all(|&d| numbers.contains(&(d as usize))));
                }
            }
        }
        // The same again.
        let (again, _) = all.split(&options).unwrap();
        prop_assert_eq!(again.document_numbers().collect::<HashSet<_>>(), in_train);
    }

    #[test]
    fn a_slice_of_a_view_is_the_slice_of_its_tokens(
        lengths in prop::collection::vec(0_usize..9, 2..30), a in any::<usize>(), b in any::<usize>(),
    ) {
        let documents: Vec<Vec<u32>> =
            lengths.iter().enumerate().map(|(d, &n)| vec![d as u32; n]).collect();
        let dir = tempfile::tempdir().unwrap();
        let all = TokenView::new(store(dir.path(), 60, &documents));
        let (train, _) = all.split(&SplitOptions { validation_fraction: 0.4, ..Default::default() })
            .unwrap();
        let (a, b) = (a % (train.len() + 1), b % (train.len() + 1));
        let range = a.min(b)..a.max(b);
        let slice = train.slice(range.clone()).unwrap();
        let tokens = train.tokens(0..train.len()).unwrap();
        prop_assert_eq!(slice.tokens(0..slice.len()).unwrap(), &tokens[range]);
    }
}

#[test]
fn evenly_spread_windows_reach_from_the_start_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let view = counting_view(dir.path(), 1001);
    let windows = SequentialWindows::new(view, 10, LastWindow::Drop)
        .unwrap()
        .at_most(4)
        .unwrap();
    let starts: Vec<_> = (0..4)
        .map(|i| windows.get(i).unwrap().input_ids[0])
        .collect();
    assert_eq!(starts, [0, 250, 500, 750]);
    assert_eq!(windows.count(), Some(4));
    assert!(windows.at_most(0).is_err());
}

#[test]
fn drop_last_leaves_out_the_short_batch() {
    let dir = tempfile::tempdir().unwrap();
    let windows =
        SequentialWindows::new(counting_view(dir.path(), 71), 10, LastWindow::Drop).unwrap();
    let rows = |drop_last| {
        let options = BatchOptions {
            micro_batch_size: 3,
            drop_last,
            ..BatchOptions::default()
        };
        let batches = Batches::new(windows.clone(), options).unwrap();
        batches.map(|batch| batch.unwrap().rows).collect::<Vec<_>>()
    };
    assert_eq!(rows(false), [3, 3, 1]);
    assert_eq!(rows(true), [3, 3]);
}

#[test]
fn the_share_of_validation_is_that_of_the_documents() {
    let dir = tempfile::tempdir().unwrap();
    let documents = vec![vec![1_u32]; 20_000];
    let all = TokenView::new(store(dir.path(), 2, &documents));
    let (_, validation) = all.split(&SplitOptions::default()).unwrap();
    // Binomial with n = 20,000 and p = 0.05: 1,000, standard deviation 31; five are allowed.
    let count = validation.document_count().unwrap();
    assert!((846..=1154).contains(&count), "{count} documents");
}

#[test]
fn one_document_is_split_by_position_and_only_so() {
    let dir = tempfile::tempdir().unwrap();
    let all = counting_view(dir.path(), 100);
    let by = |by| {
        all.split(&SplitOptions {
            validation_fraction: 0.1,
            seed: 0,
            by,
        })
    };
    let error = by(SplitBy::Document).unwrap_err();
    assert!(error.to_string().contains("SplitBy::Position"), "{error}");
    for by_position in [by(SplitBy::Position), by(SplitBy::Auto)] {
        let (train, validation) = by_position.unwrap();
        assert_eq!(train.tokens(0..90).unwrap(), (0..90).collect::<Vec<_>>());
        assert_eq!(
            validation.tokens(0..10).unwrap(),
            (90..100).collect::<Vec<_>>()
        );
        assert_eq!((train.len(), validation.len()), (90, 10));
        assert_eq!(
            (train.text_bytes(), validation.text_bytes()),
            (Some(270), Some(30))
        );
        let error = train.split(&SplitOptions::default()).unwrap_err();
        assert!(error.to_string().contains("cut by position"), "{error}");
    }
}

#[test]
fn bits_per_byte_counts_the_tokens_of_the_split() {
    let dir = tempfile::tempdir().unwrap();
    let all = TokenView::new(store(dir.path(), 60, &[vec![1; 10], vec![2; 20]]));
    // ln 2 nats a token is one bit a token; there are three bytes a token.
    let bits = all.bits_per_byte(std::f64::consts::LN_2).unwrap();
    assert!((bits - 1.0 / 3.0).abs() < 1e-12, "{bits}");
}

#[test]
fn options_outside_their_range_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let view = counting_view(dir.path(), 10);
    let windows = RandomWindows::new(view.clone(), 9, 0).unwrap();
    assert_eq!(windows.start(5), 0);
    let text = |error: Error| error.to_string();
    assert_eq!(
        text(RandomWindows::new(view.clone(), 10, 0).unwrap_err()),
        "10 tokens are too few for a window of 10 and its next-token labels (11 needed); give more \
         text or a shorter context"
    );
    assert!(text(RandomWindows::new(view.clone(), 0, 0).unwrap_err()).starts_with("context = 0"));
    for (options, name) in [
        (
            BatchOptions {
                micro_batch_size: 0,
                ..Default::default()
            },
            "micro_batch_size = 0",
        ),
        (
            BatchOptions {
                world_size: 0,
                ..Default::default()
            },
            "world_size = 0",
        ),
        (
            BatchOptions {
                rank: 2,
                world_size: 2,
                ..Default::default()
            },
            "rank = 2",
        ),
    ] {
        let error = text(Batches::new(windows.clone(), options).unwrap_err());
        assert!(error.starts_with(name), "{error}");
    }
    for fraction in [0.0, 1.0, -0.1, f64::NAN] {
        let options = SplitOptions {
            validation_fraction: fraction,
            ..Default::default()
        };
        assert!(text(view.split(&options).unwrap_err()).starts_with("validation_fraction"));
    }
}

#[test]
fn prefetched_items_are_the_same_in_the_same_order() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 500), 4, 9).unwrap();
    let batches = Batches::new(windows, BatchOptions::default()).unwrap();
    let direct: Vec<_> = batches.clone().take(50).map(Result::unwrap).collect();
    for depth in [0, 1, 7] {
        let prefetch = Prefetch::new(batches.clone().take(50), depth).unwrap();
        assert_eq!(prefetch.map(Result::unwrap).collect::<Vec<_>>(), direct);
    }
}

#[test]
fn a_dropped_prefetch_ends_its_thread_and_an_endless_iterator_with_it() {
    struct SetOnDrop(std::sync::mpsc::Sender<()>);
    impl Drop for SetOnDrop {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    let (sender, dropped) = std::sync::mpsc::channel();
    let guard = SetOnDrop(sender);
    let endless = std::iter::from_fn(move || {
        let _keep = &guard;
        Some(Ok(1))
    });
    let mut prefetch = Prefetch::new(endless, 3).unwrap();
    assert_eq!(prefetch.next().unwrap().unwrap(), 1);
    drop(prefetch);
    // Dropping joins the thread, so the iterator is gone already.
    dropped.try_recv().unwrap();
}

#[test]
fn a_panic_in_a_prefetched_iterator_is_an_error_and_then_the_end() {
    let items = (0..3).map(|i| if i < 2 { Ok(i) } else { panic!("on purpose") });
    let mut prefetch = Prefetch::new(items, 1).unwrap();
    assert_eq!(prefetch.next().unwrap().unwrap(), 0);
    assert_eq!(prefetch.next().unwrap().unwrap(), 1);
    assert!(matches!(prefetch.next(), Some(Err(Error::WorkerPanicked))));
    assert!(prefetch.next().is_none());
}

#[test]
fn windows_of_any_kind_make_batches_behind_a_pointer() {
    let dir = tempfile::tempdir().unwrap();
    let view = counting_view(dir.path(), 50);
    let kinds: [Box<dyn Windows>; 2] = [
        Box::new(RandomWindows::new(view.clone(), 7, 0).unwrap()),
        Box::new(SequentialWindows::new(view, 7, LastWindow::Drop).unwrap()),
    ];
    for windows in kinds {
        let expected = windows.window(0).unwrap();
        let options = BatchOptions {
            micro_batch_size: 1,
            ..BatchOptions::default()
        };
        let mut batches = Batches::new(std::sync::Arc::new(windows), options).unwrap();
        let batch = batches.next().unwrap().unwrap();
        assert_eq!(
            (batch.input_ids, batch.labels),
            (expected.input_ids, expected.labels)
        );
    }
}
