//! Attention of a few queries: its launches, and what no kernel takes.

use tch::{Kind, Tensor};

use super::launches::empty;
use super::stand_in::StandIn;
use crate::{CodedHeads, Decode, DecodeLayout, PagedWrite};

/// Returns a call without limits over keys and values in one tensor.
fn decode_call<'a>(
    query: &'a Tensor,
    keys: &'a Tensor,
    values: &'a Tensor,
    layout: DecodeLayout<'a>,
) -> Decode<'a> {
    Decode {
        query,
        keys,
        values,
        layout,
        left: None,
        right: Some(0),
        scale: 0.125,
        softcap: None,
        sinks: None,
    }
}

/// Writes new keys, strided as in a joint projection, and values of a tensor of their own.
fn written(stand_in: &StandIn, kind: Kind, dim: i64) {
    let (tokens, heads) = (3, 2);
    let joint = empty(&[tokens, 4 * heads, dim], kind);
    let pool = || empty(&[tokens + 1, heads, 16, dim], kind);
    let (values, key_pool, value_pool) = (empty(&[tokens, heads, dim], kind), pool(), pool());
    let (blocks, places) = (empty(&[tokens], Kind::Int64), empty(&[tokens], Kind::Int64));
    let call = PagedWrite {
        keys: &joint.narrow(1, 0, heads),
        values: &values,
        key_pool: &key_pool,
        value_pool: &value_pool,
        blocks: &blocks,
        places: &places,
    };
    assert!(stand_in.kernels.paged_write(&call).unwrap());
    let other = PagedWrite {
        values: &values.to_kind(Kind::Double),
        ..call
    };
    assert!(!stand_in.kernels.paged_write(&other).unwrap());
}

/// Launches every variant of the decode kernels.
pub(super) fn decode(stand_in: &StandIn, kind: Kind) {
    let run = |call: &Decode<'_>| {
        let (y, lse) = stand_in.kernels.decode(call).unwrap().unwrap();
        let size = call.query.size();
        assert_eq!((y.size(), y.kind()), (size.clone(), kind));
        assert_eq!(
            (lse.size(), lse.kind()),
            (vec![size[1], size[0]], Kind::Float)
        );
    };
    let dims: &[i64] = match kind {
        Kind::Float => &[16, 64, 80, 128],
        _ => &[64, 96, 128, 192, 256],
    };
    for (&dim, number) in dims.iter().zip(0..) {
        let (batch, heads, kv_heads, queries) = [
            (1, 5, 1, 1),
            (2, 4, 2, 3),
            (3, 4, 4, 1),
            (1, 6, 1, 4),
            (4, 2, 1, 1),
        ][number];
        let total = batch * queries;
        // Of several tokens as a transposed view; a cache with room behind its rows.
        let query = empty(&[heads, total, dim], kind).transpose(0, 1);
        let cache = || empty(&[batch + 1, kv_heads, 300, dim], kind).narrow(0, 0, batch);
        let (keys, values) = (cache(), cache());
        let counts = empty(&[batch], Kind::Int);
        let rows = DecodeLayout::Rows { counts: &counts };
        let plain = decode_call(&query, &keys, &values, rows);
        let sinks = empty(&[heads], kind);
        run(&plain);
        run(&Decode {
            left: Some(70),
            softcap: Some(3.0),
            sinks: Some(&sinks),
            ..plain
        });
        run(&Decode {
            right: None,
            ..plain
        });

        // Sequences of 3, 2 and 1 queries.
        let query = empty(&[6, heads, dim], kind);
        let pool = || empty(&[40, kv_heads, 16, dim], kind);
        let (keys, values) = (pool(), pool());
        let int = |count: i64| empty(&[count], Kind::Int);
        let (table, starts, counts) = (int(30), int(4), int(3));
        let paged = |longest_keys| DecodeLayout::Paged {
            blocks: &table,
            key_starts: &starts,
            query_starts: &starts,
            counts: &counts,
            longest_queries: 3,
            longest_keys,
        };
        // Too few keys for a second split.
        run(&decode_call(&query, &keys, &values, paged(60)));
        let plain = decode_call(&query, &keys, &values, paged(290));
        run(&plain);
        run(&Decode {
            left: Some(40),
            softcap: Some(5.0),
            ..plain
        });

        // Too few keys for a second split.
        let query = empty(&[7, 4, dim], kind);
        let cache = || empty(&[7, 2, 100, dim], kind);
        let (keys, values, counts) = (cache(), cache(), empty(&[7], Kind::Int));
        let rows = DecodeLayout::Rows { counts: &counts };
        run(&decode_call(&query, &keys, &values, rows));
        written(stand_in, kind, dim);

        if !matches!(dim, 64 | 128 | 256) {
            continue;
        }
        // A tail in a buffer with room, and none.
        for (coded, tail) in [(192, 45), (64, 0)] {
            let query = empty(&[batch * queries, heads, dim], kind);
            let whole = || empty(&[batch, kv_heads, 100, dim], kind).narrow(2, 0, tail);
            let (keys, values) = (whole(), whole());
            let codes = || empty(&[batch, kv_heads, 256, dim], Kind::Uint8);
            let lines = |lines, n| empty(&[batch, kv_heads, lines, 2 * n], Kind::Float);
            let (key_codes, key_lines) = (codes(), lines(4, dim));
            let (value_codes, value_lines) = (codes(), lines(256, dim / 64));
            let layout = DecodeLayout::Coded {
                keys: CodedHeads {
                    codes: &key_codes,
                    lines: &key_lines,
                },
                values: CodedHeads {
                    codes: &value_codes,
                    lines: &value_lines,
                },
                coded,
            };
            let call = decode_call(&query, &keys, &values, layout);
            run(&call);
            run(&Decode {
                left: Some(100),
                softcap: Some(4.0),
                ..call
            });
        }
    }
    // Attention takes no wider heads in f32, but a pool does.
    written(stand_in, kind, 192);
}

#[test]
fn a_decode_that_no_kernel_takes_is_left_to_libtorch_and_one_that_does_not_fit_is_an_error() {
    let stand_in = StandIn::new(90);
    let counts = empty(&[2], Kind::Int);
    let rows = DecodeLayout::Rows { counts: &counts };
    let cpu = |shape: &[i64]| empty(shape, Kind::Float);
    let taken = |query: &Tensor, keys: &Tensor| {
        let call = decode_call(query, keys, keys, rows);
        stand_in.kernels.decode(&call)
    };
    let (query, keys) = (cpu(&[2, 4, 64]), cpu(&[2, 2, 100, 64]));
    assert!(taken(&query, &keys).unwrap().is_some());
    stand_in.take();
    for (query, keys) in [
        // f64, heads of an odd size or too wide in f32, too many queries, keys whose channels are apart.
        (query.to_kind(Kind::Double), keys.to_kind(Kind::Double)),
        (cpu(&[2, 4, 40]), cpu(&[2, 2, 100, 40])),
        (cpu(&[2, 4, 256]), cpu(&[2, 2, 100, 256])),
        (cpu(&[34, 4, 64]), keys.shallow_clone()),
        (query.shallow_clone(), cpu(&[2, 2, 64, 100]).transpose(2, 3)),
    ] {
        assert!(taken(&query, &keys).unwrap().is_none(), "{query:?}");
    }
    let message = |query: &Tensor, keys: &Tensor| taken(query, keys).unwrap_err().to_string();
    let three = message(&cpu(&[2, 3, 64]), &keys);
    assert!(three.contains("`keys`"), "{three}");
    let odd = message(&cpu(&[3, 4, 64]), &keys);
    assert!(odd.contains("number of queries"), "{odd}");
    let half = decode_call(&query, &keys, &query, rows);
    assert!(stand_in.kernels.decode(&half).is_err());
    assert!(stand_in.take().is_empty(), "nothing was launched");
}

#[test]
fn the_number_of_splits_depends_on_the_capacity_and_not_on_the_lengths() {
    let stand_in = StandIn::new(90);
    let query = empty(&[1, 4, 64], Kind::Half);
    let grids = |capacity: i64| {
        let keys = empty(&[1, 1, capacity, 64], Kind::Half);
        let mut grids = Vec::new();
        for count in [0, 1, capacity as i32] {
            let counts = Tensor::from_slice(&[count]);
            let rows = DecodeLayout::Rows { counts: &counts };
            let call = decode_call(&query, &keys, &keys, rows);
            let _ = stand_in.kernels.decode(&call).unwrap().unwrap();
            let log = stand_in.take();
            let mut launches = log.iter().filter(|line| line.starts_with("launch"));
            let split = launches.next().unwrap();
            assert!(split.contains("decode_attention"), "{split}");
            let fields: Vec<&str> = split.split(' ').collect();
            grids.push([fields[3].to_owned(), fields[4].to_owned()]);
        }
        grids.dedup();
        assert_eq!(grids.len(), 1);
        grids.remove(0)
    };
    // The stand-in has two multiprocessors, for which four programs are made.
    assert_eq!(grids(100), ["1", "1"]);
    assert_eq!(grids(300), ["1", "3"]);
    assert_eq!(grids(30_000), ["1", "4"]);
}
