//! Claim: appending a token to a cache takes the same time whatever the cache holds, and attention over the
//! cache is the cost of a step; transformers' `DynamicCache` copies its whole content at every step.
//!
//! One layer of the 100M-parameter Llama of the claims (12 heads, 4 key heads of 64 channels), one row.
//! `append` appends a token and removes it again; `attend` also computes the attention of its query. `concat`
//! is the method of `DynamicCache`.
//!
//! Analysis: a token of this layer is 2 KiB of keys and values, so an append is a few microseconds of calls;
//! attention reads `past · 2` KiB (INT8 and INT4 a half and a third of it, with more arithmetic).

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use overdrive::kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, KvCache, PagedCache, PagedCacheConfig,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const HEADS: i64 = 12;
const KV_HEADS: i64 = 4;
const DIM: i64 = 64;
const PAST: [i64; 3] = [128, 1024, 4096];

fn entries(tokens: i64) -> (Tensor, Tensor) {
    let random = || Tensor::randn([1, KV_HEADS, tokens, DIM], F32);
    (random(), random())
}

fn filled(kind: CacheImplementation, past: i64) -> Box<dyn KvCache> {
    let shape = CacheShape {
        windows: vec![None],
        max_len: Some(past + 1),
        kv_heads: KV_HEADS,
        head_dim: DIM,
        window: Some(past),
        slack: 1,
        ..CacheShape::default()
    };
    let mut cache = kind.build(&shape).expect("the shape is whole");
    let (keys, values) = entries(past);
    cache.append(0, &keys, &values).expect("it has room");
    cache
}

fn append(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let mut group = criterion.benchmark_group("kv_append");
    let (keys, values) = entries(1);
    for past in PAST {
        let held = entries(past);
        group.bench_function(BenchmarkId::new("concat", past), |bench| {
            bench.iter(|| {
                let grown = |held: &Tensor, new: &Tensor| Tensor::cat(&[held, new], 2);
                (grown(&held.0, &keys), grown(&held.1, &values))
            });
        });
        for kind in [
            CacheImplementation::Dynamic,
            CacheImplementation::Static,
            CacheImplementation::Sliding,
        ] {
            let mut cache = filled(kind, past);
            group.bench_function(BenchmarkId::new(kind.to_string(), past), |bench| {
                bench.iter(|| {
                    let view = cache.append(0, &keys, &values).expect("room for one");
                    cache.truncate(past).expect("one was added");
                    view
                });
            });
        }
    }
}

fn attend(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let mut group = criterion.benchmark_group("kv_attend");
    let (keys, values) = entries(1);
    let query = Tensor::randn([1, HEADS, 1, DIM], F32);
    let options = AttendOptions::default();
    for past in PAST {
        for kind in CacheImplementation::ALL {
            let mut cache = filled(kind, past);
            let length = cache.len();
            group.bench_function(BenchmarkId::new(kind.to_string(), past), |bench| {
                bench.iter(|| {
                    let mixed = cache.attend(0, &query, &keys, &values, &options);
                    cache.truncate(length).expect("one was added");
                    mixed.expect("room for one")
                });
            });
        }
        let mut paged = PagedCache::new(PagedCacheConfig {
            layers: 1,
            kv_heads: KV_HEADS,
            head_dim: DIM,
            num_blocks: 2 + past as usize / 16,
            ..PagedCacheConfig::default()
        })
        .expect("a small pool");
        let ids: Vec<i64> = (0..past).collect();
        let (text, _) = paged.add(&ids).expect("a text");
        let mut batch = paged.batch(&[(text, &ids)]).expect("blocks for it");
        let (all_keys, all_values) = entries(past);
        let queries = Tensor::randn([1, HEADS, past, DIM], F32);
        let _mixed = batch
            .attend(0, &queries, &all_keys, &all_values, &options)
            .expect("its attention");
        batch.commit().expect("its only layer ran");
        group.bench_function(BenchmarkId::new("paged", past), |bench| {
            bench.iter(|| {
                // Not committed, so the token is removed again.
                let mut batch = paged.batch(&[(text, &[7])]).expect("a block");
                batch.attend(0, &query, &keys, &values, &options)
            });
        });
    }
}

criterion_group!(benches, append, attend);
criterion_main!(benches);
