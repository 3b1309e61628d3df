//! Many sequences in one pool of blocks.

mod refusals;

use overdrive_attention::{AttentionOptions, Backend, attention_decode};
use overdrive_kv_cache::{
    AttendOptions, Error, KvCache, KvCacheDtype, PagedBatch, PagedCache, PagedCacheConfig,
    SequenceId,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const LAYERS: usize = 2;
const HEADS: i64 = 4;
const KV_HEADS: i64 = 2;
const DIM: i64 = 6;

fn config(block_size: i64, num_blocks: usize) -> PagedCacheConfig {
    PagedCacheConfig {
        layers: LAYERS,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        value_head_dim: Some(DIM + 1),
        block_size,
        num_blocks,
        ..PagedCacheConfig::default()
    }
}

fn paged(block_size: i64, num_blocks: usize) -> PagedCache {
    PagedCache::new(config(block_size, num_blocks)).unwrap()
}

/// Returns rows that depend on a token and all before it, as the keys of a model do: `(1, H, T, D)`.
fn rows(sequence: &[i64], from: usize, heads: i64, dim: i64, salt: i64) -> Tensor {
    let mut numbers = Vec::new();
    let mut sum = salt;
    for (at, token) in sequence.iter().enumerate() {
        sum = (sum * 31 + token * 7 + 3) % 10_007;
        if at >= from {
            let channel = |c: i64| ((sum * 13 + c * 101) % 997) as f32 / 500.0 - 1.0;
            numbers.extend((0..heads * dim).map(channel));
        }
    }
    let tokens = (sequence.len() - from) as i64;
    Tensor::from_slice(&numbers)
        .view([1, tokens, heads, dim])
        .transpose(1, 2)
}

fn keys(sequence: &[i64], from: usize, layer: usize) -> Tensor {
    rows(sequence, from, KV_HEADS, DIM, layer as i64)
}

fn values(sequence: &[i64], from: usize, layer: usize) -> Tensor {
    rows(sequence, from, KV_HEADS, DIM + 1, 50 + layer as i64)
}

fn queries(sequence: &[i64], from: usize, layer: usize) -> Tensor {
    rows(sequence, from, HEADS, DIM, 90 + layer as i64)
}

/// Runs all layers on a batch; `sequences` are given with their new tokens and the number of old ones.
fn run(
    batch: &mut PagedBatch<'_>,
    sequences: &[(Vec<i64>, usize)],
    options: &AttendOptions<'_>,
) -> Vec<Tensor> {
    (0..LAYERS)
        .map(|layer| {
            let row = |of: fn(&[i64], usize, usize) -> Tensor| {
                let new_tokens: Vec<Tensor> = sequences
                    .iter()
                    .map(|(sequence, past)| of(sequence, *past, layer))
                    .collect();
                Tensor::cat(&new_tokens, 2)
            };
            let (query, key, value) = (row(queries), row(keys), row(values));
            batch.attend(layer, &query, &key, &value, options).unwrap()
        })
        .collect()
}

fn step(cache: &mut PagedCache, new_tokens: &[(SequenceId, &[i64])]) -> Vec<Tensor> {
    let sequences: Vec<(Vec<i64>, usize)> = new_tokens
        .iter()
        .map(|(id, tokens)| {
            let past = cache.tokens(*id).unwrap();
            ([past, tokens].concat(), past.len())
        })
        .collect();
    let mut batch = cache.batch(new_tokens).unwrap();
    let attended = run(&mut batch, &sequences, &AttendOptions::default());
    batch.commit().unwrap();
    attended
}

fn assert_holds(cache: &PagedCache, id: SequenceId, sequence: &[i64]) {
    assert_eq!(cache.tokens(id).unwrap(), sequence);
    for layer in 0..LAYERS {
        let held = cache.gather(id, layer).unwrap();
        assert_eq!(held.keys, keys(sequence, 0, layer));
        assert_eq!(held.values, values(sequence, 0, layer));
    }
}

/// Returns the dense attention of the tokens from `past` on over the whole sequence.
fn alone(sequence: &[i64], past: usize, layer: usize, options: &AttentionOptions<'_>) -> Tensor {
    let query = queries(sequence, past, layer);
    let (key, value) = (keys(sequence, 0, layer), values(sequence, 0, layer));
    let math = AttentionOptions {
        backend: Backend::Math,
        ..*options
    };
    attention_decode(&query, &key, &value, None, &math)
        .unwrap()
        .0
}

fn assert_close(got: &Tensor, expected: &Tensor) {
    assert_eq!(got.size(), expected.size());
    let off = (got - expected).abs().max().double_value(&[]);
    // The same sums in another order, of numbers below 1.
    assert!(off < 1e-5, "off by {off}");
}

#[test]
fn an_offset_moves_the_positions_of_new_tokens_of_a_sequence_and_its_forks() {
    let mut cache = paged(4, 20);
    let (moved, other) = (cache.add(&[5, 6, 7]).unwrap().0, cache.add(&[8]).unwrap().0);
    step(&mut cache, &[(moved, &[5, 6, 7]), (other, &[8])]);
    cache.set_position_offset(moved, -2).unwrap();
    let fork = cache.fork(moved).unwrap();
    let row = |tensor: Tensor| Vec::<i64>::try_from(tensor.view([-1])).unwrap();
    let batch = cache
        .batch(&[(moved, &[9, 9]), (other, &[9]), (fork, &[9])])
        .unwrap();
    assert_eq!(row(batch.position_ids().unwrap()), [1, 2, 1, 1]);
    drop(batch);
    let mut inputs = cache.decode_inputs(4, 16).unwrap();
    let tokens = [(moved, 9), (other, 9), (fork, 9)];
    let decoding = cache.decode_step(&mut inputs, &tokens, 4).unwrap().unwrap();
    assert_eq!(row(decoding.position_ids().unwrap()), [1, 1, 1, 0]);
    drop(decoding);
    cache.set_position_offset(moved, -9).unwrap();
    let batch = cache.batch(&[(moved, &[9])]).unwrap();
    assert_eq!(row(batch.position_ids().unwrap()), [0]);
    drop(batch);
    cache.release(moved).unwrap();
    assert!(cache.set_position_offset(moved, 0).is_err());
}

#[test]
fn sequences_of_one_row_attend_to_themselves_only() {
    let mut cache = paged(4, 20);
    let sequences: [Vec<i64>; 3] = [(0..9).collect(), vec![30], (50..64).collect()];
    let ids = sequences
        .each_ref()
        .map(|sequence| cache.add(sequence).unwrap().0);
    let chunks = [(0, 5), (0, 1), (0, 14)];
    let new_tokens: Vec<(SequenceId, &[i64])> = (0..3)
        .map(|at| (ids[at], &sequences[at][chunks[at].0..chunks[at].1]))
        .collect();
    let batch = cache.batch(&new_tokens).unwrap();
    assert_eq!(batch.tokens(), 20);
    assert_eq!(batch.last_indices(), [4, 5, 19]);
    assert_eq!(batch.sequences().collect::<Vec<_>>(), ids);
    let row = |tensor: Tensor| Vec::<i64>::try_from(tensor.view([-1])).unwrap();
    let expected: Vec<i64> = [&sequences[0][..5], &sequences[1], &sequences[2]].concat();
    assert_eq!(row(batch.input_ids().unwrap()), expected);
    let expected: Vec<i64> = (0..5).chain(0..1).chain(0..14).collect();
    assert_eq!(row(batch.position_ids().unwrap()), expected);
    drop(batch);

    let attended = step(&mut cache, &new_tokens);
    // Then a chunk, a single token and nothing, in another order.
    let more = step(
        &mut cache,
        &[(ids[2], &[7]), (ids[0], &sequences[0][5..]), (ids[1], &[])],
    );
    for layer in 0..LAYERS {
        let options = AttentionOptions::causal();
        let expected: Vec<Tensor> = (0..3)
            .map(|at| alone(&sequences[at][..chunks[at].1], 0, layer, &options))
            .collect();
        assert_close(&attended[layer], &Tensor::cat(&expected, 2));
        let longer = [sequences[2].as_slice(), &[7]].concat();
        let expected = [
            alone(&longer, 14, layer, &options),
            alone(&sequences[0], 5, layer, &options),
        ];
        assert_close(&more[layer], &Tensor::cat(&expected, 2));
    }
    assert_holds(&cache, ids[0], &sequences[0]);
    assert_holds(&cache, ids[1], &sequences[1]);
    assert_eq!(cache.used_blocks(), 3 + 1 + 4);
}

#[test]
fn windows_and_softcaps_reach_the_kernel() {
    let sequence: Vec<i64> = (0..23).collect();
    let mut cache = paged(4, 20);
    let (id, _) = cache.add(&sequence).unwrap();
    let mut batch = cache.batch(&[(id, &sequence)]).unwrap();
    let options = AttendOptions {
        window: Some(6),
        softcap: Some(0.3),
        scale: Some(0.7),
        ..AttendOptions::default()
    };
    let attended = run(&mut batch, &[(sequence.clone(), 0)], &options);
    let expected = AttentionOptions {
        window: overdrive_attention::Window::sliding(6),
        softcap: Some(0.3),
        scale: Some(0.7),
        ..AttentionOptions::causal()
    };
    assert_close(&attended[1], &alone(&sequence, 0, 1, &expected));
    // The whole step again gives the same.
    batch.truncate(0).unwrap();
    assert_eq!(run(&mut batch, &[(sequence, 0)], &options)[1], attended[1]);
    let mask = Tensor::ones([1, 1, 23, 23], (Kind::Bool, CPU));
    batch.reset();
    let masked = AttendOptions {
        mask: Some(&mask),
        ..AttendOptions::default()
    };
    let row = keys(&[0; 23], 0, 0);
    let refused = batch.attend(0, &row, &row, &row, &masked).unwrap_err();
    assert!(
        refused.to_string().contains("cannot take a mask"),
        "{refused}"
    );
}

#[test]
fn a_prefix_is_found_in_whole_blocks_and_leaves_a_token_to_compute() {
    let mut cache = paged(4, 20);
    let sequence: Vec<i64> = (0..12).collect();
    let (first, cached) = cache.add(&sequence).unwrap();
    assert_eq!(cached, 0);
    // Found by nobody before the step is committed.
    assert_eq!(cache.cached_tokens(&sequence), 0);
    step(&mut cache, &[(first, &sequence)]);
    assert_eq!(cache.cached_tokens(&sequence), 8, "not all twelve");
    assert_eq!(cache.cached_tokens(&[&sequence[..], &[99]].concat()), 12);
    assert_eq!(cache.cached_tokens(&sequence[..5]), 4);
    assert_eq!(cache.cached_tokens(&sequence[..4]), 0);
    assert_eq!(
        cache.cached_tokens(&sequence[1..]),
        0,
        "the same tokens elsewhere"
    );
    assert_eq!(cache.cached_tokens(&[]), 0);

    let used = cache.used_blocks();
    let (second, cached) = cache.add(&sequence).unwrap();
    assert_eq!((cached, cache.used_blocks()), (8, used));
    assert_holds(&cache, second, &sequence[..8]);
    assert_eq!(
        (cache.statistics().hits, cache.statistics().misses),
        (8, 16)
    );

    // A released sequence can still be found, and so can its continuation.
    step(
        &mut cache,
        &[(second, &sequence[8..]), (first, &[50, 51, 52, 53])],
    );
    cache.release_all();
    assert_eq!((cache.used_blocks(), cache.sequences()), (0, 0));
    assert_eq!(cache.evictable_blocks(), 4);
    let longer = [&sequence[..], &[50, 51, 52, 53, 60]].concat();
    let (third, cached) = cache.add(&longer).unwrap();
    assert_eq!(cached, 16);
    assert_holds(&cache, third, &longer[..16]);
    cache.release(third).unwrap();
    cache.forget_prefixes();
    assert_eq!(cache.cached_tokens(&longer), 0);
    assert_eq!(cache.free_blocks(), 20);
    cache.audit().unwrap();
}

#[test]
fn without_prefix_caching_nothing_is_shared_or_kept() {
    let mut cache = PagedCache::new(PagedCacheConfig {
        enable_prefix_caching: false,
        ..config(2, 8)
    })
    .unwrap();
    for _ in 0..2 {
        let (id, cached) = cache.add(&[1, 2, 3, 4]).unwrap();
        assert_eq!(cached, 0);
        step(&mut cache, &[(id, &[1, 2, 3, 4])]);
    }
    assert_eq!((cache.used_blocks(), cache.evictable_blocks()), (4, 0));
    cache.release_all();
    assert_eq!((cache.free_blocks(), cache.evictable_blocks()), (8, 0));
}

#[test]
fn a_fork_copies_its_last_block_only_when_it_appends() {
    let mut cache = paged(4, 8);
    let sequence: Vec<i64> = (0..6).collect();
    let (first, _) = cache.add(&sequence).unwrap();
    step(&mut cache, &[(first, &sequence)]);
    let second = cache.fork(first).unwrap();
    assert_eq!((cache.used_blocks(), cache.statistics().copies), (2, 0));
    assert_eq!(cache.blocks_needed(second, 1), 1, "the copy");
    assert_eq!(cache.blocks_needed(second, 3), 2);
    step(&mut cache, &[(second, &[100])]);
    assert_eq!((cache.used_blocks(), cache.statistics().copies), (3, 1));
    assert_eq!(cache.blocks_needed(first, 1), 0, "alone again");
    step(&mut cache, &[(first, &[200])]);
    assert_holds(&cache, first, &[0, 1, 2, 3, 4, 5, 200]);
    assert_holds(&cache, second, &[0, 1, 2, 3, 4, 5, 100]);
    assert_eq!(cache.statistics().copies, 1);
}

#[test]
fn a_cache_of_codes_is_shared_forked_and_read_within_their_error() {
    for (dtype, error) in [
        (KvCacheDtype::Int8, 0.5 / 127.0),
        (KvCacheDtype::Fp8, 1.0 / 16.0),
    ] {
        let sizes = PagedCacheConfig {
            kv_cache_dtype: dtype,
            ..config(4, 8)
        };
        // A byte for each of 13 channels, and two scales.
        let bytes = (LAYERS * 2 * 4 * (13 + 8)) as u64;
        assert_eq!(sizes.bytes_per_block(), bytes);
        let mut cache = PagedCache::new(sizes).unwrap();
        let sequence: Vec<i64> = (0..6).collect();
        let (first, _) = cache.add(&sequence).unwrap();
        let attended = step(&mut cache, &[(first, &sequence)]);
        let second = cache.fork(first).unwrap();
        step(&mut cache, &[(second, &[100])]);
        step(&mut cache, &[(first, &[200])]);
        assert_eq!(cache.statistics().copies, 1);
        for (id, last) in [(first, 200), (second, 100)] {
            let tokens = [&sequence[..], &[last]].concat();
            for layer in 0..LAYERS {
                let held = cache.gather(id, layer).unwrap();
                let dense = [keys(&tokens, 0, layer), values(&tokens, 0, layer)];
                for (held, dense) in [held.keys, held.values].iter().zip(&dense) {
                    let largest = dense.abs().amax([-1].as_slice(), true);
                    let off = ((held - dense).abs() / largest).max().double_value(&[]);
                    assert!(off <= error * 1.001, "{dtype}: {off}");
                }
            }
        }
        for (layer, attended) in attended.iter().enumerate() {
            let dense = alone(&sequence, 0, layer, &AttentionOptions::causal());
            let off = (attended - dense).abs().max().double_value(&[]);
            assert!(off > 0.0 && off < 0.05, "{dtype}: {off}");
        }
        let (_, cached) = cache.add(&sequence).unwrap();
        assert_eq!(cached, 4);
        cache.audit().unwrap();
    }
    for dtype in KvCacheDtype::ALL {
        assert_eq!(dtype.name().parse::<KvCacheDtype>().unwrap(), dtype);
    }
    let unknown = "int4".parse::<KvCacheDtype>().unwrap_err().to_string();
    assert!(unknown.contains("auto, int8, fp8"), "{unknown}");
    let double = PagedCache::new(PagedCacheConfig {
        kind: Kind::Double,
        kv_cache_dtype: KvCacheDtype::Int8,
        ..config(4, 8)
    });
    let message = double.unwrap_err().to_string();
    assert!(
        message.contains("if kv_cache_dtype is int8 or fp8"),
        "{message}"
    );
}

#[test]
fn a_step_takes_all_its_blocks_or_none() {
    let mut cache = paged(4, 3);
    let (one, _) = cache.add(&[1; 6]).unwrap();
    let (two, _) = cache.add(&[2; 6]).unwrap();
    let refused = cache.batch(&[(one, &[1; 6]), (two, &[2; 6])]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the step needs 4 blocks, but 3 are free; run fewer sequences or tokens at once, release sequences, or raise `num_blocks`"
    );
    assert_eq!(cache.free_blocks(), 3);
    step(&mut cache, &[(one, &[1; 6])]);
    assert_eq!(cache.free_blocks(), 1);
    assert_holds(&cache, one, &[1; 6]);
}

#[test]
fn a_step_that_is_not_committed_has_not_happened() {
    let mut cache = paged(4, 6);
    let sequence: Vec<i64> = (0..6).collect();
    let (first, _) = cache.add(&sequence).unwrap();
    step(&mut cache, &[(first, &sequence)]);
    let second = cache.fork(first).unwrap();
    let mut batch = cache.batch(&[(first, &[8, 8, 8]), (second, &[9])]).unwrap();
    let sequences = [
        ([&sequence[..], &[8, 8, 8]].concat(), 6),
        ([&sequence[..], &[9]].concat(), 6),
    ];
    run(&mut batch, &sequences, &AttendOptions::default());
    drop(batch);
    cache.audit().unwrap();
    assert_holds(&cache, first, &sequence);
    assert_holds(&cache, second, &sequence);
    assert_eq!(cache.used_blocks(), 2);

    // Half run: a commit is refused, and undoes.
    let mut batch = cache.batch(&[(first, &[8])]).unwrap();
    let row = |heads, dim| Tensor::zeros([1, heads, 1, dim], (Kind::Float, CPU));
    let (key, value) = (row(KV_HEADS, DIM), row(KV_HEADS, DIM + 1));
    let query = row(HEADS, DIM);
    let plain = AttendOptions::default();
    assert_eq!(
        batch
            .attend(0, &query, &key, &value, &plain)
            .unwrap()
            .size()[3],
        DIM + 1
    );
    let twice = batch.attend(0, &query, &key, &value, &plain).unwrap_err();
    assert!(matches!(twice, Error::LayerTwice { layer: 0 }));
    let refused = batch.commit().unwrap_err();
    assert!(matches!(refused, Error::StepNotRun { layer: 1 }));
    assert_eq!(cache.len(first).unwrap(), 6);
    cache.audit().unwrap();
}

#[test]
fn bytes_are_those_of_the_pool() {
    let cache = paged(4, 6);
    // 2 layers, 2 heads, 6 + 7 channels of 4 bytes.
    assert_eq!(cache.bytes_per_token(), 208.0);
    assert_eq!((cache.bytes_per_block(), cache.bytes()), (832, 4_992));
    assert_eq!((cache.block_size(), cache.blocks_for(9)), (4, 3));
    let sized = config(4, 1).with_memory(10_000);
    assert_eq!(sized.num_blocks, 12);
    assert_eq!(config(4, 1).with_memory(0).num_blocks, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// The bookkeeping has a property test of its own; this one is about the content of the blocks.
    #[test]
    fn every_sequence_holds_its_own_keys_whatever_was_shared_copied_cut_or_evicted(
        actions in prop::collection::vec(
            (0..6_u8, any::<usize>(), prop::collection::vec(0..2_i64, 1..7), any::<bool>()), 1..40),
        block_size in 1..4_i64,
        blocks in 4..14_usize,
    ) {
        let mut cache = paged(block_size, blocks);
        let mut ids: Vec<SequenceId> = Vec::new();
        for (action, choice, tokens, flag) in actions {
            let picked = (!ids.is_empty()).then(|| choice % ids.len().max(1));
            match (action, picked) {
                (0, _) | (_, None) => ids.push(cache.add(&tokens).unwrap().0),
                (1, Some(at)) => ids.push(cache.fork(ids[at]).unwrap()),
                (2, Some(at)) => cache.release(ids.swap_remove(at)).unwrap(),
                (3, Some(at)) => {
                    let len = cache.len(ids[at]).unwrap();
                    cache.truncate(ids[at], choice % (len + 1)).unwrap();
                }
                (_, Some(at)) => {
                    // Two sequences with different tokens, if there are two.
                    let other: Vec<i64> = tokens.iter().map(|token| 1 - token).collect();
                    let mut new_tokens = vec![(ids[at], tokens.as_slice())];
                    let next = (at + 1) % ids.len();
                    if flag && next != at {
                        new_tokens.push((ids[next], other.as_slice()));
                    }
                    let sequences: Vec<(Vec<i64>, usize)> = new_tokens
                        .iter()
                        .map(|(id, tokens)| {
                            let past = cache.tokens(*id).unwrap();
                            ([past, *tokens].concat(), past.len())
                        })
                        .collect();
                    if let Ok(mut batch) = cache.batch(&new_tokens) {
                        let attended = run(&mut batch, &sequences, &AttendOptions::default());
                        if choice % 5 > 0 {
                            batch.commit().unwrap();
                        }
                        let expected: Vec<Tensor> = sequences
                            .iter()
                            .map(|(sequence, past)| alone(sequence, *past, 1, &AttentionOptions::causal()))
                            .collect();
                        assert_close(&attended[1], &Tensor::cat(&expected, 2));
                    }
                }
            }
            cache.audit().unwrap();
            for id in &ids {
                let sequence = cache.tokens(*id).unwrap().to_vec();
                if !sequence.is_empty() {
                    assert_holds(&cache, *id, &sequence);
                }
            }
        }
        cache.release_all();
        prop_assert_eq!(cache.free_blocks(), blocks);
        cache.audit().unwrap();
    }
}
