//! Calls that a paged cache refuses.

use super::*;

#[test]
fn tensors_and_ids_that_do_not_fit_are_refused_by_name() {
    let mut cache = paged(4, 6);
    let (id, _) = cache.add(&[1, 2, 3]).unwrap();
    let gone = cache.fork(id).unwrap();
    cache.release(gone).unwrap();
    let message_of = |error: Error| error.to_string();
    assert!(
        message_of(cache.release(gone).unwrap_err()).starts_with("sequence 1 is not in this cache")
    );
    assert!(
        cache.len(gone).is_err() && cache.fork(gone).is_err() && cache.gather(gone, 0).is_err()
    );
    assert_eq!(cache.blocks_needed(gone, 5), 0);
    assert!(matches!(
        cache.gather(id, 2),
        Err(Error::NoSuchLayer { .. })
    ));
    assert!(matches!(
        cache.truncate(id, 1),
        Err(Error::TruncateBeyondEnd { len: 1, held: 0 })
    ));
    let twice = cache.batch(&[(id, &[1]), (id, &[2])]).unwrap_err();
    assert!(message_of(twice).starts_with("sequence 0 occurs twice in one step"));

    let mut batch = cache.batch(&[(id, &[1, 2])]).unwrap();
    let row = |heads, tokens, dim, kind| Tensor::zeros([1, heads, tokens, dim], (kind, CPU));
    let fitting = row(KV_HEADS, 2, DIM, Kind::Float);
    let values = row(KV_HEADS, 2, DIM + 1, Kind::Float);
    let query = row(HEADS, 2, DIM, Kind::Float);
    let mut of = |layer, key: &Tensor, value: &Tensor| {
        let plain = AttendOptions::default();
        message_of(batch.attend(layer, &query, key, value, &plain).unwrap_err())
    };
    assert!(of(2, &fitting, &values).starts_with("layer 2 does not exist in a cache of 2"));
    let long = row(KV_HEADS, 3, DIM, Kind::Float);
    let long_values = row(KV_HEADS, 3, DIM + 1, Kind::Float);
    assert!(of(0, &long, &long_values).contains("the 2 new tokens of all sequences of the step"));
    assert!(of(0, &fitting, &fitting).contains("like the tokens that layer 0 holds"));
    let half = row(KV_HEADS, 2, DIM, Kind::Half);
    assert!(of(0, &half, &values).contains("Half"));
    assert!(of(0, &fitting, &fitting.squeeze_dim(0)).contains("with the B, H and T of the keys"));
    let learned = fitting.copy().set_requires_grad(true);
    assert!(of(0, &learned, &values).contains("require a gradient"));
    let dense = batch.append(0, &fitting, &values).unwrap_err();
    assert!(message_of(dense).contains("call `attend` instead of `append`"));
    assert!(batch.fork().is_err() && batch.state().is_err() && batch.load_state(&[]).is_err());
    assert!(batch.reorder(&Tensor::from_slice(&[0_i64])).is_err());
    assert!(batch.truncate(1).is_err() && batch.truncate(-1).is_err());
    assert_eq!((batch.len(), KvCache::layers(&batch)), (0, LAYERS));
}

#[test]
fn configs_outside_their_range_are_named() {
    let of = |config: PagedCacheConfig| PagedCache::new(config).unwrap_err().to_string();
    for (key, config) in [
        (
            "layers",
            PagedCacheConfig {
                layers: 0,
                ..config(4, 6)
            },
        ),
        (
            "kv_heads",
            PagedCacheConfig {
                kv_heads: 0,
                ..config(4, 6)
            },
        ),
        (
            "head_dim",
            PagedCacheConfig {
                head_dim: -1,
                ..config(4, 6)
            },
        ),
        (
            "value_head_dim",
            PagedCacheConfig {
                value_head_dim: Some(0),
                ..config(4, 6)
            },
        ),
        ("block_size", config(0, 6)),
        ("num_blocks", config(4, 0)),
        ("num_blocks", config(4, usize::MAX)),
        (
            "kind",
            PagedCacheConfig {
                kind: Kind::Int8,
                ..config(4, 6)
            },
        ),
    ] {
        assert!(of(config).starts_with(&format!("`{key}` is ")), "{key}");
    }
}
