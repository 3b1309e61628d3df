//! Windows, splits and batches.

use std::collections::HashSet;

use crate::common::{counting_store, store};
use overdrive_datasets::{
    ConsecutiveBatches, DataLoader, DataLoaderOptions, Dataset, Error, LastShare, LastWindow,
    RandomWindows, SequentialWindows, Shard, ShardedBatches, SplitBy, SplitOptions, TokenDocuments,
    TokenView, TokenizedExample, WorkerOptions,
};
use proptest::prelude::*;

fn counting_view(dir: &std::path::Path, tokens: u32) -> TokenView {
    TokenView::new(counting_store(dir, tokens))
}

/// Returns a loader of windows whose passes have `batches` batches.
fn loader(
    windows: &RandomWindows,
    batch_size: usize,
    batches: usize,
    (rank, world_size): (usize, usize),
) -> DataLoader<Vec<TokenizedExample>> {
    let shard = Shard::new(rank, world_size, LastShare::Repeat).unwrap();
    let batches = ConsecutiveBatches::new(batch_size, batches).unwrap();
    let batches = ShardedBatches::new(batches, shard);
    DataLoader::with(windows.clone(), batches, Ok, WorkerOptions::default()).unwrap()
}

/// Returns the tokens of the next batches, across passes.
fn take(loader: &mut DataLoader<Vec<TokenizedExample>>, count: usize) -> Vec<Vec<i64>> {
    let batches = std::iter::repeat_with(|| loader.next_batch()).flatten();
    let tokens = |rows: Vec<TokenizedExample>| rows.into_iter().flat_map(|row| row.input_ids);
    batches
        .take(count)
        .map(|batch| tokens(batch.unwrap()).collect())
        .collect()
}

#[test]
fn the_labels_of_a_window_are_its_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 1000), 8, 3).unwrap();
    for number in 0..100 {
        let window = windows.get(number).unwrap();
        let start = windows.start(number as u64) as i64;
        assert_eq!(window.input_ids, (start..start + 8).collect::<Vec<_>>());
        assert_eq!(window.labels, window.input_ids);
        assert_eq!(window.learned_tokens(), 7);
    }
}

#[test]
fn random_windows_start_everywhere_equally_often() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 120), 20, 1337).unwrap();
    // 100 starts: 0..=99.
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
    // A pass of several processes ends for all of them after the same windows.
    let whole = take(&mut loader(&windows, 12, 2, (0, 1)), 5);
    let ranks: Vec<_> = (0..3)
        .map(|rank| take(&mut loader(&windows, 4, 6, (rank, 3)), 5))
        .collect();
    for (number, expected) in whole.iter().enumerate() {
        let parts: Vec<i64> = ranks.iter().flat_map(|rank| rank[number].clone()).collect();
        assert_eq!(&parts, expected);
    }
    // And as three accumulated batches of one process.
    let accumulated = take(&mut loader(&windows, 4, 6, (0, 1)), 15);
    assert_eq!(accumulated.concat(), whole.concat());
}

#[test]
fn a_resumed_run_sees_the_windows_of_one_that_did_not_stop() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 500), 4, 9).unwrap();
    let straight = take(&mut loader(&windows, 3, 4, (0, 1)), 12);

    let mut first = loader(&windows, 3, 4, (0, 1));
    assert_eq!(take(&mut first, 6), straight[..6]);
    // Through JSON, as a snapshot keeps it.
    let json = serde_json::to_string(&first.state_dict()).unwrap();
    assert_eq!(
        json,
        r#"{"epoch":1,"next_batch":2,"batches":4,"joint_batch_size":3}"#
    );
    let mut resumed = loader(&windows, 3, 4, (0, 1));
    resumed
        .load_state_dict(serde_json::from_str(&json).unwrap())
        .unwrap();
    assert_eq!(take(&mut resumed, 6), straight[6..]);

    // The windows have numbers, whatever the batch size: two batches of nine are the first six of three.
    let larger = take(&mut loader(&windows, 9, 4, (0, 1)), 3);
    assert_eq!(larger[2], straight[6..9].concat());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn kept_sequential_windows_predict_each_token_but_their_first_once(
        tokens in 2_u32..300, context in 2_usize..40, rows in 1_usize..6, world_size in 1_usize..4,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let view = counting_view(dir.path(), tokens);
        let windows = SequentialWindows::new(view, context, LastWindow::Keep).unwrap();
        let mut labels = Vec::new();
        for rank in 0..world_size {
            let options = DataLoaderOptions { batch_size: rows, ..DataLoaderOptions::default() };
            let batches = options.batches(windows.len()).unwrap();
            let shard = Shard::new(rank, world_size, LastShare::Uneven).unwrap();
            let batches = ShardedBatches::new(batches, shard);
            let mut loader = DataLoader::with(windows.clone(), batches, Ok, options.workers()).unwrap();
            for batch in loader.epoch() {
                for row in batch.unwrap() {
                    prop_assert_eq!(&row.labels, &row.input_ids);
                    prop_assert_eq!(row.learned_tokens(), row.labels.len() - 1);
                    labels.extend_from_slice(&row.labels[1..]);
                }
            }
        }
        labels.sort_unstable();
        let first_of_a_window = |token: &i64| token % context as i64 == 0;
        let expected: Vec<_> = (0..i64::from(tokens)).filter(|token| !first_of_a_window(token)).collect();
        prop_assert_eq!(labels, expected);
    }

    #[test]
    fn dropped_sequential_windows_are_all_full(tokens in 2_u32..300, context in 2_usize..40) {
        let dir = tempfile::tempdir().unwrap();
        let view = counting_view(dir.path(), tokens);
        match SequentialWindows::new(view, context, LastWindow::Drop) {
            Ok(windows) => {
                prop_assert_eq!(windows.len(), (tokens as usize - 1) / context);
                for index in 0..windows.len() {
                    let window = windows.get(index).unwrap();
                    prop_assert_eq!(window.input_ids[0] as usize, index * context);
                    prop_assert_eq!(window.learned_tokens(), context - 1);
                }
                prop_assert!(windows.get(windows.len()).is_err());
            }
            Err(error) => {
                prop_assert!(tokens as usize <= context);
                let too_few = matches!(error, Error::TooFew { unit: "tokens", .. });
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
            let rows = TokenDocuments::new(view);
            let ids: Vec<i64> = (0..rows.len()).flat_map(|row| rows.get(row).unwrap().input_ids).collect();
            prop_assert_eq!(ids, view.tokens(0..view.len()).unwrap());
            if view.len() > 5 {
                let windows = RandomWindows::new(view.clone(), 5, seed).unwrap();
                for number in 0..20 {
                    let window = windows.get(number).unwrap();
                    prop_assert!(window.input_ids.iter().all(|&d| numbers.contains(&(d as usize))));
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
    assert_eq!(windows.len(), 4);
    assert!(windows.at_most(0).is_err());
}

#[test]
fn drop_last_leaves_out_the_short_batch() {
    let dir = tempfile::tempdir().unwrap();
    let windows =
        SequentialWindows::new(counting_view(dir.path(), 71), 10, LastWindow::Drop).unwrap();
    let rows = |drop_last| {
        let options = DataLoaderOptions {
            batch_size: 3,
            drop_last,
            ..DataLoaderOptions::default()
        };
        let mut loader = DataLoader::new(windows.clone(), options).unwrap();
        let rows = loader.epoch().map(|batch| batch.unwrap().len());
        rows.collect::<Vec<_>>()
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
fn one_document_can_be_split_by_position_only() {
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
        "10 tokens are too few, at least 11 are needed; give more text or a shorter context"
    );
    for context in [0, 1] {
        let error = text(RandomWindows::new(view.clone(), context, 0).unwrap_err());
        assert!(
            error.starts_with(&format!("`context` is {context}; it must be at least 2")),
            "{error}"
        );
    }
    for (options, name) in [
        (
            DataLoaderOptions {
                batch_size: 0,
                ..Default::default()
            },
            "`batch_size` is 0; it must be positive",
        ),
        (
            DataLoaderOptions {
                world_size: 0,
                ..Default::default()
            },
            "`world_size` is 0; it must be at least 1",
        ),
        (
            DataLoaderOptions {
                rank: 2,
                world_size: 2,
                ..Default::default()
            },
            "`rank` is 2; it must be below `world_size`, 2",
        ),
    ] {
        let error = text(DataLoader::new(windows.clone(), options).unwrap_err());
        assert!(error.starts_with(name), "{error}");
    }
    assert!(
        text(ConsecutiveBatches::new(0, 1).unwrap_err())
            .starts_with("`batch_size` is 0; it must be positive")
    );
    for fraction in [0.0, 1.0, -0.1, f64::NAN] {
        let options = SplitOptions {
            validation_fraction: fraction,
            ..Default::default()
        };
        assert!(text(view.split(&options).unwrap_err()).starts_with("`validation_fraction` is "));
    }
}

#[test]
fn an_endless_dataset_is_read_ahead_by_threads_that_end_with_the_loader() {
    let dir = tempfile::tempdir().unwrap();
    let windows = RandomWindows::new(counting_view(dir.path(), 500), 4, 9).unwrap();
    let batches = |num_workers| {
        let options = DataLoaderOptions {
            batch_size: 8,
            num_workers,
            ..DataLoaderOptions::default()
        };
        let mut loader = DataLoader::new(windows.clone(), options).unwrap();
        let batches = loader.epoch().take(50).map(Result::unwrap);
        batches.collect::<Vec<_>>()
    };
    let direct = batches(0);
    assert_eq!(direct[49][7], windows.get(399).unwrap());
    assert_eq!(batches(1), direct);
    assert_eq!(batches(3), direct);
}

#[test]
fn rows_of_any_kind_make_batches_behind_a_pointer() {
    let dir = tempfile::tempdir().unwrap();
    let view = counting_view(dir.path(), 50);
    let kinds: [Box<dyn Dataset<Item = TokenizedExample>>; 3] = [
        Box::new(RandomWindows::new(view.clone(), 7, 0).unwrap()),
        Box::new(SequentialWindows::new(view.clone(), 7, LastWindow::Drop).unwrap()),
        Box::new(TokenDocuments::new(&view)),
    ];
    for rows in kinds {
        let expected = rows.get(0).unwrap();
        let options = DataLoaderOptions::default();
        let mut loader = DataLoader::new(std::sync::Arc::new(rows), options).unwrap();
        assert_eq!(loader.next_batch().unwrap().unwrap(), [expected]);
    }
}

#[test]
fn a_sample_of_documents_is_spread_over_all() {
    let dir = tempfile::tempdir().unwrap();
    let documents: Vec<Vec<u32>> = (0..10).map(|document| vec![document; 3]).collect();
    let all = TokenDocuments::new(&TokenView::new(store(dir.path(), 10, &documents)));
    assert_eq!((all.len(), all.lengths()), (10, vec![3; 10]));
    let some = all.clone().at_most(4);
    let numbers: Vec<_> = (0..some.len()).map(|index| some.number(index)).collect();
    assert_eq!(numbers, [Some(0), Some(2), Some(5), Some(7)]);
    assert_eq!(some.get(2).unwrap().labels, [5, 5, 5]);
    assert!(matches!(
        some.get(4),
        Err(Error::NoSuchRecord { index: 4, len: 4 })
    ));
    assert_eq!(all.at_most(99).len(), 10);
}

#[test]
fn views_of_several_stores_are_one_stream_with_consecutive_documents() {
    let dir = tempfile::tempdir().unwrap();
    let stores = [[5_u32, 1, 30, 2], [3, 4, 1, 20]].map(|lengths| {
        let folder = dir.path().join(lengths[0].to_string());
        std::fs::create_dir(&folder).unwrap();
        let documents: Vec<Vec<u32>> = lengths
            .iter()
            .map(|&len| (0..len).map(|at| len + at).collect())
            .collect();
        store(&folder, 100, &documents)
    });
    let views = stores.map(TokenView::new);
    let all = TokenView::concat(&views);
    let tokens = |view: &TokenView| view.tokens(0..view.len()).unwrap();
    assert_eq!(
        tokens(&all),
        [tokens(&views[0]), tokens(&views[1])].concat()
    );
    assert_eq!(
        all.document_numbers().collect::<Vec<_>>(),
        (0..8).collect::<Vec<_>>()
    );
    assert_eq!(
        all.text_bytes(),
        Some(views.iter().filter_map(TokenView::text_bytes).sum())
    );
    let documents = TokenDocuments::new(&all);
    assert_eq!(documents.lengths(), [5, 1, 30, 2, 3, 4, 1, 20]);
    assert_eq!(documents.get(4).unwrap().input_ids, [3, 4, 5]);
    assert!(all.document(8).is_none());
    // A slice across the border, and its split.
    let middle = all.slice(36..40).unwrap();
    assert_eq!(tokens(&middle), [2, 3, 3, 4]);
    assert_eq!(middle.document_count(), None);
    for seed in 0..20 {
        let options = SplitOptions {
            validation_fraction: 0.4,
            seed,
            by: SplitBy::Document,
        };
        let (train, held) = all.split(&options).unwrap();
        let mut numbers: Vec<usize> = train
            .document_numbers()
            .chain(held.document_numbers())
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..8).collect::<Vec<_>>());
        assert_eq!(train.len() + held.len(), all.len());
        let first = held.document_numbers().next().unwrap();
        let (store, document) = held.document(first).unwrap();
        let first: Vec<i64> = store
            .tokens(document.tokens)
            .unwrap()
            .into_iter()
            .map(i64::from)
            .collect();
        assert_eq!(held.tokens(0..first.len()).unwrap(), first);
    }
    // By position, the cut may lie within a store.
    let (train, held) = all
        .split(&SplitOptions {
            by: SplitBy::Position,
            ..SplitOptions::default()
        })
        .unwrap();
    assert_eq!([tokens(&train), tokens(&held)].concat(), tokens(&all));
    assert_eq!(
        TokenView::concat(&[middle, all.clone()]).document_count(),
        None
    );
}
