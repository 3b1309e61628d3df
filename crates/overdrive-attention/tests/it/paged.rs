//! Attention over the blocks of a pool equals attention over the same keys in one piece.

use overdrive_attention::{
    Alignment, AttentionOptions, Backend, Error, PagedBlocks, PagedLayout, PagedSlots, Window,
    attention_paged, attention_with_lse, paged_write, paged_write_quantized,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn numbers(shape: &[i64], seed: i64, kind: Kind) -> Tensor {
    let count: i64 = shape.iter().product();
    let at = Tensor::arange(count, (Kind::Double, CPU)) + (seed * 1_000_003) as f64;
    let wild = (at * 12.9898).sin() * 43_758.545_3;
    ((wild.frac().abs() - 0.5) * 4.0)
        .reshape(shape)
        .to_kind(kind)
}

fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.size(), expected.size(), "{what}");
    if got.numel() == 0 {
        return;
    }
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    // Equal infinities, the log-sum-exp of a query that sees nothing, differ by nothing.
    let off = (&got - &expected).abs();
    let off = off.masked_fill(&got.eq_tensor(&expected), 0.0);
    let off = off.max().double_value(&[]);
    assert!(off < tolerance, "{what} is off by {off}");
}

/// Heads, key heads, key and value dim.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    kv_heads: i64,
    group: i64,
    key_dim: i64,
    value_dim: i64,
}

/// Texts whose keys are scattered over a pool in blocks, and the same keys in one piece.
struct Pool {
    keys: Tensor,
    values: Tensor,
    tables: Vec<Vec<u32>>,
    dense: Vec<(Tensor, Tensor)>,
}

impl Pool {
    /// Slots that no request owns are NaN, which shows in the result if they are read.
    fn new(sizes: Sizes, block_size: i64, key_lengths: &[usize], kind: Kind) -> Pool {
        let blocks: Vec<usize> = key_lengths
            .iter()
            .map(|keys| keys.div_ceil(block_size as usize))
            .collect();
        let total = blocks.iter().sum::<usize>() as i64 + 3;
        let shape = |dim| [total, sizes.kv_heads, block_size, dim];
        let pool = |dim| Tensor::full(shape(dim), f64::NAN, (kind, CPU));
        let (mut keys, mut values) = (pool(sizes.key_dim), pool(sizes.value_dim));
        // A stride that has no factor in common with `total` visits every block once, out of order.
        let stride = [7, 11, 13, 17]
            .into_iter()
            .find(|s| total % s != 0)
            .unwrap();
        let mut order = (0..total).map(|n| u32::try_from(n * stride % total).unwrap());
        let tables: Vec<Vec<u32>> = blocks
            .iter()
            .map(|count| order.by_ref().take(*count).collect())
            .collect();
        let mut dense = Vec::new();
        for (text, (length, table)) in (0..).zip(key_lengths.iter().zip(&tables)) {
            let rows = |dim, seed| numbers(&[*length as i64, sizes.kv_heads, dim], seed, kind);
            let (key, value) = (
                rows(sizes.key_dim, 100 + text),
                rows(sizes.value_dim, 200 + text),
            );
            let slot = |at: usize| {
                let block = table[at / block_size as usize] as usize;
                block * block_size as usize + at % block_size as usize
            };
            let slots = (0..*length).map(slot).collect();
            let slots = PagedSlots::new(slots, block_size as usize, CPU).unwrap();
            paged_write(&key, &mut keys, &slots).unwrap();
            paged_write(&value, &mut values, &slots).unwrap();
            let by_head = |rows: Tensor| rows.transpose(0, 1).unsqueeze(0);
            dense.push((by_head(key), by_head(value)));
        }
        Pool {
            keys,
            values,
            tables,
            dense,
        }
    }

    fn layout(&self, query_lengths: &[usize], key_lengths: &[usize]) -> PagedLayout {
        let (queries, keys) = (query_lengths.to_vec(), key_lengths.to_vec());
        let block_size = self.keys.size()[2] as usize;
        PagedLayout::new(self.tables.clone(), queries, keys, block_size, CPU).unwrap()
    }

    /// Each text alone over its dense keys.
    fn expected(
        &self,
        query: &Tensor,
        lengths: &[usize],
        options: &AttentionOptions<'_>,
    ) -> (Tensor, Tensor) {
        let (mut outputs, mut lses, mut start) = (Vec::new(), Vec::new(), 0);
        for (text, ((key, value), length)) in (0..).zip(self.dense.iter().zip(lengths)) {
            let alone = query.narrow(0, start, *length as i64);
            start += *length as i64;
            let slopes = options.alibi_slopes.map(|slopes| slopes.get(text));
            let options = AttentionOptions {
                alibi_slopes: slopes.as_ref(),
                backend: Backend::Math,
                ..*options
            };
            let alone = alone.transpose(0, 1).unsqueeze(0);
            let (output, lse) = attention_with_lse(&alone, key, value, &options).unwrap();
            outputs.push(output.squeeze_dim(0).transpose(0, 1));
            lses.push(lse.squeeze_dim(0));
        }
        (Tensor::cat(&outputs, 0), Tensor::cat(&lses, 1))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn blocks_of_a_pool_equal_the_same_keys_in_one_piece(
        texts in prop::collection::vec(
            (prop_oneof![Just(1_usize), 0..90_usize], 0..300_usize), 1..6),
        block_size in prop_oneof![Just(1_i64), Just(16), 2..40_i64],
        (kv_heads, group) in (1..3_i64, prop_oneof![Just(1_i64), Just(3), Just(7)]),
        // With and without a rest behind whole vectors.
        (key_dim, value_dim) in (prop_oneof![Just(64_i64), 1..40_i64], prop_oneof![Just(64_i64), 1..40_i64]),
        causal in any::<bool>(),
        left in prop_oneof![Just(None), (0..120_usize).prop_map(Some)],
        sink_tokens in 0..20_usize,
        (softcap, alibi, sinks, double, gathered) in any::<(bool, bool, bool, bool, bool)>(),
    ) {
        // New queries are among the keys.
        let query_lengths: Vec<usize> = texts.iter().map(|(queries, _)| *queries).collect();
        let key_lengths: Vec<usize> = texts.iter().map(|(queries, past)| queries + past).collect();
        let sizes = Sizes { kv_heads, group, key_dim, value_dim };
        let heads = kv_heads * group;
        let kind = if double { Kind::Double } else { Kind::Float };
        let pool = Pool::new(sizes, block_size, &key_lengths, kind);
        let total = query_lengths.iter().sum::<usize>() as i64;
        // A view with gaps, as a joint projection leaves it.
        let query = numbers(&[heads, total, key_dim + 3], 1, kind).narrow(2, 0, key_dim).transpose(0, 1);
        let slopes = alibi.then(|| numbers(&[texts.len() as i64, heads], 4, kind).abs());
        let logits = sinks.then(|| numbers(&[heads], 5, kind));
        let options = AttentionOptions {
            causal,
            window: Window { left, right: None },
            sink_tokens,
            softcap: softcap.then_some(3.0),
            alibi_slopes: slopes.as_ref(),
            sinks: logits.as_ref(),
            backend: if gathered { Backend::Math } else { Backend::Auto },
            ..AttentionOptions::default()
        };
        let layout = pool.layout(&query_lengths, &key_lengths);
        let (output, lse) =
            attention_paged(&query, &pool.keys, &pool.values, &layout, &options).unwrap();
        let (expected, expected_lse) = pool.expected(&query, &query_lengths, &options);
        // The same sums in another order; up to 40 channels of numbers up to 2.
        let tolerance = if double { 1e-11 } else { 5e-5 };
        assert_close(&output, &expected, tolerance, "output");
        assert_close(&lse, &expected_lse, tolerance, "lse");
    }
}

/// Returns codes of a pool, their scales and the dequantized pool, by libtorch's operators.
fn quantized_by_operators(pool: &Tensor, kind: Kind) -> (Tensor, Tensor, Tensor) {
    let largest = if kind == Kind::Int8 { 127.0 } else { 448.0 };
    let scales = pool.abs().amax([-1].as_slice(), true) / largest;
    let fitted = pool / &scales;
    let codes = match kind {
        Kind::Int8 => fitted.round().to_kind(kind),
        _ => fitted.to_kind(kind),
    };
    let back = codes.to_kind(Kind::Float) * &scales;
    (codes, scales.squeeze_dim(-1), back)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn codes_of_a_pool_are_read_as_the_elements_that_they_stand_for(
        texts in prop::collection::vec(
            (prop_oneof![Just(1_usize), 0..90_usize], 0..300_usize), 1..5),
        block_size in prop_oneof![Just(1_i64), Just(16), 2..40_i64],
        (kv_heads, group) in (1..3_i64, prop_oneof![Just(1_i64), Just(3), Just(7)]),
        (key_dim, value_dim) in (prop_oneof![Just(64_i64), 1..40_i64], prop_oneof![Just(64_i64), 1..40_i64]),
        left in prop_oneof![Just(None), (0..120_usize).prop_map(Some)],
        codes in prop_oneof![Just(Kind::Int8), Just(Kind::Float8e4m3fn)],
        kind in prop_oneof![Just(Kind::Float), Just(Kind::BFloat16)],
        gathered in any::<bool>(),
    ) {
        let query_lengths: Vec<usize> = texts.iter().map(|(queries, _)| *queries).collect();
        let key_lengths: Vec<usize> = texts.iter().map(|(queries, past)| queries + past).collect();
        let sizes = Sizes { kv_heads, group, key_dim, value_dim };
        let pool = Pool::new(sizes, block_size, &key_lengths, Kind::Float);
        let (keys, values) = (pool.keys.nan_to_num(0.5, None, None), pool.values.nan_to_num(0.5, None, None));
        let (key_codes, key_scales, keys) = quantized_by_operators(&keys, codes);
        let (value_codes, value_scales, values) = quantized_by_operators(&values, codes);
        let total = query_lengths.iter().sum::<usize>() as i64;
        let query = numbers(&[total, kv_heads * group, key_dim], 1, kind);
        let options = AttentionOptions {
            causal: true,
            window: Window { left, right: None },
            backend: if gathered { Backend::Math } else { Backend::Auto },
            ..AttentionOptions::default()
        };
        let layout = pool.layout(&query_lengths, &key_lengths);
        let blocks = |elements, scales| PagedBlocks { elements, scales: Some(scales) };
        let (output, lse) = attention_paged(
            &query,
            blocks(&key_codes, &key_scales),
            blocks(&value_codes, &value_scales),
            &layout,
            &options,
        ).unwrap();
        // In f32, because half precision would round the dequantized keys, which the kernel does not.
        let (expected, expected_lse) =
            attention_paged(&query.to_kind(Kind::Float), &keys, &values, &layout, &options).unwrap();
        let tolerance = match (kind, gathered) {
            (Kind::Float, _) => 1e-6,
            (_, false) => 0.01,
            (_, true) => 0.1,
        };
        assert_close(&output, &expected, tolerance, "output");
        assert_close(&lse, &expected_lse, tolerance, "lse");
    }

    #[test]
    fn rows_are_quantized_as_by_libtorchs_operators(
        (heads, dim) in (1..4_i64, prop_oneof![Just(64_i64), 1..40_i64]),
        slots in prop::sample::subsequence((0..24_usize).collect::<Vec<_>>(), 0..24).prop_shuffle(),
        codes in prop_oneof![Just(Kind::Int8), Just(Kind::Float8e4m3fn)],
        kind in prop_oneof![Just(Kind::Float), Just(Kind::BFloat16), Just(Kind::Half)],
    ) {
        let tokens = slots.len() as i64;
        let rows = numbers(&[tokens, heads, dim], 7, kind);
        let mut pool = Tensor::zeros([4, heads, 6, dim], (codes, CPU));
        let mut scales = Tensor::zeros([4, heads, 6], (Kind::Float, CPU));
        let of_slots = PagedSlots::new(slots.clone(), 6, CPU).unwrap();
        paged_write_quantized(&rows, &mut pool, &mut scales, &of_slots).unwrap();
        let (expected, expected_scales, _) = quantized_by_operators(&rows.to_kind(Kind::Float), codes);
        let pool = pool.view_dtype(Kind::Uint8);
        let expected = expected.view_dtype(Kind::Uint8);
        for (token, slot) in (0..).zip(&slots) {
            let (block, row) = ((slot / 6) as i64, (slot % 6) as i64);
            assert_eq!(pool.get(block).select(1, row), expected.get(token));
            assert_eq!(scales.get(block).select(1, row), expected_scales.get(token));
        }
    }
}

#[test]
fn quantized_blocks_that_do_not_fit_are_refused() {
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, CPU));
    let codes = Tensor::zeros([3, 2, 4, 8], (Kind::Int8, CPU));
    let scales = float(&[3, 2, 4]);
    let layout = PagedLayout::new(vec![vec![1]], vec![1], vec![3], 4, CPU).unwrap();
    let of = |query: &Tensor, keys: PagedBlocks<'_>, values: PagedBlocks<'_>| {
        attention_paged(query, keys, values, &layout, &AttentionOptions::causal())
            .unwrap_err()
            .to_string()
    };
    let blocks = PagedBlocks {
        elements: &codes,
        scales: Some(&scales),
    };
    let query = float(&[1, 2, 8]);
    let found = of(&query.to_kind(Kind::Double), blocks, blocks);
    assert!(found.contains("over quantized blocks"), "{found}");
    let dense = float(&[3, 2, 4, 8]);
    let found = of(&query, PagedBlocks::from(&dense), blocks);
    assert!(found.contains("both keys and values"), "{found}");
    let few = float(&[3, 2, 3]);
    let scaled = PagedBlocks {
        scales: Some(&few),
        ..blocks
    };
    let found = of(&query, blocks, scaled);
    assert!(found.contains("a scale for each row"), "{found}");
    let words = Tensor::zeros([3, 2, 4, 8], (Kind::Int, CPU));
    let other = PagedBlocks {
        elements: &words,
        ..blocks
    };
    let found = of(&query, other, other);
    assert!(found.contains("Int8 or Float8e4m3fn"), "{found}");

    let slots = PagedSlots::new(vec![0], 4, CPU).unwrap();
    let rows = float(&[1, 2, 8]);
    let mut pool = codes.copy();
    let write = |pool: &mut Tensor, scales: &mut Tensor| {
        paged_write_quantized(&rows, pool, scales, &slots)
            .unwrap_err()
            .to_string()
    };
    let found = write(&mut pool, &mut float(&[3, 2, 3]));
    assert!(found.contains("a scale for each row of codes"), "{found}");
    let found = write(&mut float(&[3, 2, 4, 8]), &mut float(&[3, 2, 4]));
    assert!(found.contains("Int8 or Float8e4m3fn"), "{found}");
}

fn decode(key_lengths: &[usize], sizes: Sizes, options: &AttentionOptions<'_>, tolerance: f64) {
    let pool = Pool::new(sizes, 16, key_lengths, Kind::Float);
    let queries = vec![1; key_lengths.len()];
    let heads = sizes.kv_heads * sizes.group;
    let shape = [key_lengths.len() as i64, heads, sizes.key_dim];
    let query = numbers(&shape, 1, Kind::Float);
    let layout = pool.layout(&queries, key_lengths);
    let (output, lse) =
        attention_paged(&query, &pool.keys, &pool.values, &layout, options).unwrap();
    let (expected, expected_lse) = pool.expected(&query, &queries, options);
    assert_close(&output, &expected, tolerance, "output");
    assert_close(&lse, &expected_lse, tolerance, "lse");
}

/// One text with one key head is one task: its keys are split among the threads.
#[test]
fn long_keys_that_are_split_among_threads_equal_the_whole() {
    let threads = tch::get_num_threads();
    tch::set_num_threads(4);
    let sizes = Sizes {
        kv_heads: 1,
        group: 3,
        key_dim: 64,
        value_dim: 64,
    };
    let options = AttentionOptions::causal();
    decode(&[5_003], sizes, &options, 5e-5);
    let windowed = AttentionOptions {
        window: Window::sliding(3_001),
        sink_tokens: 5,
        ..options
    };
    decode(&[5_003], sizes, &windowed, 5e-5);
    decode(&[5_003], Sizes { group: 8, ..sizes }, &windowed, 5e-5);
    tch::set_num_threads(threads);
}

#[test]
fn halves_are_read_from_blocks_too() {
    let sizes = Sizes {
        kv_heads: 2,
        group: 2,
        key_dim: 20,
        value_dim: 12,
    };
    // Relative to the rounding of the element type: 2^-11 and 2^-8, of numbers below 2.
    for (kind, tolerance) in [(Kind::Half, 2e-3), (Kind::BFloat16, 1.6e-2)] {
        let (query_lengths, key_lengths) = ([1, 40], [70, 55]);
        let pool = Pool::new(sizes, 8, &key_lengths, kind);
        let query = numbers(&[41, 4, 20], 1, kind);
        let layout = pool.layout(&query_lengths, &key_lengths);
        let options = AttentionOptions::causal();
        let (output, _) =
            attention_paged(&query, &pool.keys, &pool.values, &layout, &options).unwrap();
        let (expected, _) = pool.expected(&query, &query_lengths, &options);
        assert_eq!(output.kind(), kind);
        assert_close(&output, &expected, tolerance, "output");
    }
}

#[test]
fn no_text_gives_an_empty_result() {
    for backend in [Backend::Auto, Backend::Math] {
        let blocks = Tensor::zeros([2, 1, 4, 8], (Kind::Float, CPU));
        let query = Tensor::zeros([0, 2, 8], (Kind::Float, CPU));
        let layout = PagedLayout::new(vec![], vec![], vec![], 4, CPU).unwrap();
        let options = AttentionOptions {
            backend,
            ..AttentionOptions::causal()
        };
        let (output, lse) = attention_paged(&query, &blocks, &blocks, &layout, &options).unwrap();
        assert_eq!((output.size(), lse.size()), (vec![0, 2, 8], vec![2, 0]));
    }
}

fn refusal(
    query: &Tensor,
    tables: &[Vec<u32>],
    lengths: (&[usize], &[usize]),
    options: &AttentionOptions<'_>,
) -> Error {
    let blocks = Tensor::zeros([4, 2, 4, 8], (Kind::Float, CPU));
    let (queries, keys) = (lengths.0.to_vec(), lengths.1.to_vec());
    match PagedLayout::new(tables.to_vec(), queries, keys, 4, CPU) {
        Ok(layout) => attention_paged(query, &blocks, &blocks, &layout, options).unwrap_err(),
        Err(error) => error,
    }
}

#[test]
fn tables_and_lengths_that_do_not_fit_are_named() {
    let query = Tensor::zeros([2, 4, 8], (Kind::Float, CPU));
    let options = AttentionOptions::causal();
    let of = |tables: &[Vec<u32>], queries: &[usize], keys: &[usize]| {
        refusal(&query, tables, (queries, keys), &options).to_string()
    };
    assert_eq!(
        of(&[vec![0], vec![1]], &[1, 1], &[3]),
        "key_lengths: has 1 entries for 2 block tables"
    );
    assert_eq!(
        of(&[vec![0]], &[3], &[3]),
        "query_lengths: add up to 3, but there are 2 queries"
    );
    assert_eq!(
        of(&[vec![0], vec![1]], &[1, 1], &[3, 5]),
        "block_tables: sequence 1 has 5 keys, which need 2 blocks of 4, but its table has 1"
    );
    assert_eq!(
        of(&[vec![0], vec![3, 4]], &[1, 1], &[3, 5]),
        "block_tables: sequence 1 names block 4 of a pool of 4"
    );
    // What lies behind the keys that are asked for is not looked at.
    let blocks = Tensor::zeros([4, 2, 4, 8], (Kind::Float, CPU));
    let tables = || vec![vec![0, 9], vec![3]];
    let layout = PagedLayout::new(tables(), vec![1, 1], vec![3, 1], 4, CPU).unwrap();
    let (output, _) = attention_paged(&query, &blocks, &blocks, &layout, &options).unwrap();
    assert_eq!(output.abs().max().double_value(&[]), 0.0);
    let other = PagedLayout::new(tables(), vec![1, 1], vec![3, 1], 8, CPU).unwrap();
    let error = attention_paged(&query, &blocks, &blocks, &other, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "block_size: is 8, but the blocks of the pool have 4 rows"
    );
    assert!(PagedLayout::new(vec![], vec![], vec![], 0, CPU).is_err());
}

#[test]
fn options_that_make_no_sense_over_blocks_are_refused_by_name() {
    let query = Tensor::zeros([2, 4, 8], (Kind::Float, CPU));
    let mask = Tensor::zeros([1, 1, 2, 4], (Kind::Float, CPU));
    let of = |query: &Tensor, options: AttentionOptions<'_>| {
        refusal(query, &[vec![0]], (&[2], &[4]), &options).to_string()
    };
    let plain = AttentionOptions::causal();
    let masked = AttentionOptions {
        mask: Some(&mask),
        ..plain
    };
    assert!(of(&query, masked).starts_with("`mask` is set; it must be None over paged keys"));
    let dropped = AttentionOptions {
        dropout_p: 0.1,
        ..plain
    };
    assert!(of(&query, dropped).starts_with("`dropout_p` is 0.1; it must be 0 over paged keys"));
    let aligned = AttentionOptions {
        alignment: Alignment::TopLeft,
        ..plain
    };
    assert!(of(&query, aligned).starts_with("`alignment` is TopLeft; it must be BottomRight"));
    let learned = query.copy().set_requires_grad(true);
    assert!(of(&learned, plain).starts_with("`query` is a tensor that requires a gradient"));
}

#[test]
fn a_write_that_does_not_fit_says_so_and_writes_nothing() {
    let mut pool = Tensor::zeros([4, 2, 4, 8], (Kind::Float, CPU));
    let rows = |shape: &[i64], kind| Tensor::ones(shape, (kind, CPU));
    let slots = |slots: &[usize]| PagedSlots::new(slots.to_vec(), 4, CPU).unwrap();
    let mut of = |rows: &Tensor, slots: &PagedSlots| {
        paged_write(rows, &mut pool, slots).unwrap_err().to_string()
    };
    let fitting = rows(&[2, 2, 8], Kind::Float);
    assert_eq!(
        of(&fitting, &slots(&[0, 16])),
        "slots: slot 16 is outside a pool of 4 blocks of 4 tokens"
    );
    assert!(
        of(&fitting, &slots(&[0])).starts_with("`rows` has shape [2, 2, 8]; it must be [1, 2, 8]")
    );
    assert!(of(&rows(&[1, 2, 8], Kind::Half), &slots(&[0])).starts_with("`rows` is Half"));
    let other = PagedSlots::new(vec![0], 2, CPU).unwrap();
    assert!(of(&rows(&[1, 2, 8], Kind::Float), &other).starts_with("`pool` has shape"));
    assert!(PagedSlots::new(vec![0], 0, CPU).is_err());
    assert_eq!(pool.abs().max().double_value(&[]), 0.0);
}

/// A query has the same bits alone, where few rows share the keys and threads share their segments, and in a long
/// prompt beside other texts.
#[test]
fn a_query_has_the_same_bits_alone_and_beside_others() {
    let threads = tch::get_num_threads();
    let query_lengths = [80_usize, 1, 33];
    let key_lengths = [1100_usize, 700, 33];
    let windowed = AttentionOptions {
        window: Window {
            left: Some(600),
            right: None,
        },
        sink_tokens: 5,
        ..AttentionOptions::causal()
    };
    for (group, key_dim, value_dim) in [(1, 64, 64), (3, 64, 64), (4, 37, 40), (7, 24, 64)] {
        let sizes = Sizes {
            kv_heads: 2,
            group,
            key_dim,
            value_dim,
        };
        let pool = Pool::new(sizes, 16, &key_lengths, Kind::Float);
        let total = query_lengths.iter().sum::<usize>() as i64;
        let query = numbers(&[total, 2 * group, key_dim], 1, Kind::Float);
        for (threads, options) in [(1, AttentionOptions::causal()), (4, windowed)] {
            tch::set_num_threads(threads);
            let layout = pool.layout(&query_lengths, &key_lengths);
            let (together, _) =
                attention_paged(&query, &pool.keys, &pool.values, &layout, &options).unwrap();
            let mut first = 0;
            for (text, (queries, keys)) in query_lengths.into_iter().zip(key_lengths).enumerate() {
                for at in [0, queries / 2, queries - 1] {
                    let row = (first + at) as i64;
                    // The keys up to the query's own.
                    let tables = vec![pool.tables[text].clone()];
                    let seen = keys - queries + at + 1;
                    let layout = PagedLayout::new(tables, vec![1], vec![seen], 16, CPU).unwrap();
                    let query = query.narrow(0, row, 1);
                    let (alone, _) =
                        attention_paged(&query, &pool.keys, &pool.values, &layout, &options)
                            .unwrap();
                    assert_eq!(
                        alone,
                        together.narrow(0, row, 1),
                        "{sizes:?}, {threads} threads, text {text}, query {at}"
                    );
                }
                first += queries;
            }
        }
    }
    tch::set_num_threads(threads);
}
