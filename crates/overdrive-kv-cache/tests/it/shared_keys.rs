//! Layers that attend to the keys and values of another layer, and layers with heads of their own sizes.

use overdrive_attention::{AttentionOptions, Window, attention};
use overdrive_kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, Error, KvCache, LayerHeads, PagedCache,
    PagedCacheConfig, StaticCache, StaticCacheConfig,
};
use tch::{Device, Kind, Tensor};

const HEADS: i64 = 4;
const LAYERS: [LayerHeads; 2] = [
    LayerHeads {
        kv_heads: 2,
        head_dim: 8,
    },
    LayerHeads {
        kv_heads: 1,
        head_dim: 16,
    },
];
const WINDOWS: [Option<i64>; 2] = [Some(6), None];

/// Returns numbers that depend on the place and the salt: `(1, H, T, D)`.
fn numbers(heads: i64, from: i64, tokens: i64, dim: i64, salt: i64) -> Tensor {
    let size = [tokens, heads, dim];
    let start = from * heads * dim;
    let all = Tensor::arange_start(
        start,
        start + size.iter().product::<i64>(),
        (Kind::Float, Device::Cpu),
    );
    let all = (all * 0.37 + salt as f64).sin() * 1.5;
    all.view(size).transpose(0, 1).unsqueeze(0)
}

/// The attention of the last `tokens` queries of layer `layer` over all keys up to `end`.
fn expected(layer: usize, query: &Tensor, end: i64) -> Tensor {
    let LayerHeads { kv_heads, head_dim } = LAYERS[layer];
    let keys = numbers(kv_heads, 0, end, head_dim, layer as i64);
    let values = numbers(kv_heads, 0, end, head_dim, 10 + layer as i64);
    let window = WINDOWS[layer].map_or_else(Window::default, |n| Window::sliding(n as usize));
    let options = AttentionOptions {
        window,
        scale: Some(1.0),
        ..AttentionOptions::causal()
    };
    attention(query, &keys, &values, &options).unwrap()
}

fn options(layer: usize, keep: bool) -> AttendOptions<'static> {
    AttendOptions {
        window: WINDOWS[layer],
        scale: Some(1.0),
        keep,
        ..AttendOptions::default()
    }
}

/// Runs steps of `steps` tokens: both layers attend, and then two more layers attend to their keys and values.
fn check(cache: &mut dyn KvCache, start: i64, tokens: i64, bound: f64, what: &str) {
    let end = start + tokens;
    let query = |layer: usize, salt| numbers(HEADS, start, tokens, LAYERS[layer].head_dim, salt);
    for (layer, LayerHeads { kv_heads, head_dim }) in LAYERS.into_iter().enumerate() {
        let keys = numbers(kv_heads, start, tokens, head_dim, layer as i64);
        let values = numbers(kv_heads, start, tokens, head_dim, 10 + layer as i64);
        let query = query(layer, 20);
        let options = options(layer, true);
        let own = cache
            .attend(layer, &query, &keys, &values, &options)
            .unwrap();
        let difference = (own - expected(layer, &query, end))
            .abs()
            .max()
            .double_value(&[]);
        assert!(difference < bound, "{what}, layer {layer}: {difference}");
    }
    // After both, since what one layer keeps must outlive the append of the next.
    for (layer, salt) in [(0, 30), (1, 40), (0, 50)] {
        let query = query(layer, salt);
        let shared = cache
            .attend_shared(layer, &query, &options(layer, false))
            .unwrap();
        let difference = (shared - expected(layer, &query, end))
            .abs()
            .max()
            .double_value(&[]);
        assert!(difference < bound, "{what}, shared {layer}: {difference}");
    }
}

#[test]
fn layers_attend_to_what_another_layer_attended_to_in_the_step() {
    for implementation in CacheImplementation::ALL {
        let shape = CacheShape {
            windows: WINDOWS.to_vec(),
            max_len: Some(64),
            layer_heads: LAYERS.to_vec(),
            group_size: 8,
            residual_length: 8,
            ..CacheShape::default()
        };
        // Keys and values of up to 1.5 are rounded.
        let bound = match implementation {
            CacheImplementation::Int8 => 0.1,
            CacheImplementation::Int4 => 1.0,
            _ => 1e-5,
        };
        let mut cache = implementation.build(&shape).unwrap();
        let mut start = 0;
        for tokens in [5, 1, 20, 1, 1, 7, 1] {
            let what = format!("{implementation} at {start}");
            check(&mut *cache, start, tokens, bound, &what);
            start += tokens;
        }
        assert_eq!(cache.len(), start);
        // What was kept is of the last step, and does not outlive a change of the cache.
        cache.reset();
        let query = numbers(HEADS, 0, 1, LAYERS[0].head_dim, 0);
        let error = cache
            .attend_shared(0, &query, &options(0, false))
            .unwrap_err();
        assert!(
            matches!(error, Error::NotKept { layer: 0 }),
            "{implementation}: {error}"
        );
        let error = cache
            .attend_shared(7, &query, &options(0, false))
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::NotKept { layer: 7 } | Error::NoSuchLayer { layer: 7, .. }
            ),
            "{implementation}: {error}"
        );
    }
}

#[test]
fn a_step_at_the_positions_of_a_tensor_shares_keys_as_well() {
    let mut cache = StaticCache::new(StaticCacheConfig {
        layers: 2,
        max_len: 32,
        layer_heads: LAYERS.to_vec(),
        ..StaticCacheConfig::default()
    })
    .unwrap();
    check(&mut cache, 0, 9, 1e-5, "prompt");
    for position in 9..12 {
        let positions = Tensor::from_slice(&[position]);
        let mut step = cache.at(&positions).unwrap();
        check(&mut step, position, 1, 1e-5, "step");
        cache.advance(1).unwrap();
    }
}

#[test]
fn a_pool_of_blocks_has_the_heads_of_each_layer() {
    let config = PagedCacheConfig {
        layers: 2,
        layer_heads: LAYERS.to_vec(),
        block_size: 4,
        num_blocks: 8,
        ..PagedCacheConfig::default()
    };
    // Keys and values of 2 · 8 and of 1 · 16 channels, 4 tokens, f32.
    assert_eq!(config.bytes_per_block(), 2 * (16 + 16) * 4 * 4);
    let mut cache = PagedCache::new(config.clone()).unwrap();
    let tokens: Vec<i64> = (0..11).collect();
    let (id, _) = cache.add(&tokens).unwrap();
    let mut start = 0;
    for count in [7, 1, 3] {
        let mut step = cache.batch(&[(id, &tokens[start..start + count])]).unwrap();
        let query = numbers(HEADS, start as i64, count as i64, LAYERS[0].head_dim, 0);
        let error = step
            .attend_shared(0, &query, &options(0, false))
            .unwrap_err();
        assert!(matches!(error, Error::NotKept { layer: 0 }), "{error}");
        check(&mut step, start as i64, count as i64, 1e-5, "paged");
        step.commit().unwrap();
        start += count;
    }
    let mut step = cache.batch(&[(id, &[1])]).unwrap();
    let wrong = numbers(2, 0, 1, 8, 0);
    let query = numbers(HEADS, 0, 1, 8, 0);
    let error = step
        .attend(1, &query, &wrong, &wrong, &options(1, false))
        .unwrap_err();
    assert!(error.to_string().contains("[1, 1, 16]"), "{error}");
    drop(step);
    for (layer_heads, part) in [
        (LAYERS[..1].to_vec(), "one entry for each of 2 layers"),
        (
            vec![
                LAYERS[0],
                LayerHeads {
                    kv_heads: 1,
                    head_dim: 0,
                },
            ],
            "`layer_heads.head_dim` is 0",
        ),
    ] {
        let wrong = PagedCacheConfig {
            layer_heads: layer_heads.clone(),
            ..config.clone()
        };
        let message = wrong.validate().unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
        let wrong = StaticCacheConfig {
            layers: 2,
            layer_heads,
            ..StaticCacheConfig::default()
        };
        let message = StaticCache::new(wrong).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
