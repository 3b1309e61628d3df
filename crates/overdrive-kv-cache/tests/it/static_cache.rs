//! The static cache: exact, and at constant addresses.

use crate::reference::{
    Action, BATCH, Compared, DIM, HEADS, KV_HEADS, actions, attention, close, random, seen,
};
use overdrive_kv_cache::{AttendOptions, Error, KvCache, StaticCache, StaticCacheConfig};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

fn config(max_len: i64) -> StaticCacheConfig {
    StaticCacheConfig {
        layers: 2,
        batch: BATCH,
        max_len,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        ..Default::default()
    }
}

fn new(max_len: i64) -> StaticCache {
    StaticCache::new(config(max_len)).unwrap()
}

fn addresses(cache: &StaticCache) -> Vec<usize> {
    (0..cache.layers())
        .flat_map(|layer| {
            let (keys, values) = cache.buffers(layer).unwrap();
            [keys.data_ptr() as usize, values.data_ptr() as usize]
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_sequence_of_actions_equals_attention_over_everything(actions in actions(9)) {
        let mut compared = Compared::new(Box::new(new(100)), &[None; 2], 0);
        for action in actions {
            if matches!(action, Action::Append(tokens) if compared.len() + tokens > 100) {
                continue;
            }
            compared.run(action, || Box::new(new(100)), None)?;
        }
    }

    /// The step that would be captured: same tensors, same shapes, only their contents change.
    #[test]
    fn a_step_at_positions_of_the_device_equals_one_at_positions_of_the_host(
        prompts in proptest::collection::vec(1i64..6, 2),
        window in proptest::option::of(1i64..6),
    ) {
        let same_length = prompts[0] == prompts[1];
        let mut cache = new(12);
        // Rows of different lengths: the shorter one's columns behind its end are overwritten later.
        let longest = prompts.iter().copied().max().unwrap();
        let mut all: Vec<[Tensor; 2]> = Vec::new();
        for layer in 0..2 {
            let fill = [random(&[BATCH, KV_HEADS, longest, DIM], layer + 1), random(&[BATCH, KV_HEADS, longest, DIM], layer + 9)];
            cache.append(layer as usize, &fill[0], &fill[1]).unwrap();
            all.push(fill);
        }
        let at = addresses(&cache);
        let mut positions = Tensor::from_slice(&prompts).view([2, 1]);
        if same_length {
            positions = positions.get(0);
        }
        let options = AttendOptions { window, ..Default::default() };
        for step in 0..4u64 {
            for (layer, held) in all.iter_mut().enumerate() {
                let seed = 100 + step * 10 + layer as u64;
                let [q, k, v] = [HEADS, KV_HEADS, KV_HEADS].map(|heads| random(&[BATCH, heads, 1, DIM], seed * heads as u64));
                let found = cache.at(&positions).unwrap().attend(layer, &q, &k, &v, &options).unwrap();
                for row in 0..BATCH {
                    let len = prompts[row as usize] + step as i64;
                    let grown: Vec<Tensor> = held.iter().zip([&k, &v]).map(|(held, new)| {
                        let row = |t: &Tensor, n| t.narrow(0, row, 1).narrow(2, 0, n);
                        Tensor::cat(&[row(held, len.min(held.size()[2])), row(new, 1)], 2)
                    }).collect();
                    let one = |t: &Tensor| t.narrow(0, row, 1);
                    let expected = attention(&one(&q), &grown[0], &grown[1], &seen(len, len + 1, window, 0));
                    close(&one(&found), &expected, 1e-5)?;
                }
                // The reference keeps its rows as the cache does: written at each row's own position.
                for (held, new) in held.iter_mut().zip([&k, &v]) {
                    let wide = Tensor::zeros([BATCH, KV_HEADS, 1, DIM], (Kind::Float, Device::Cpu));
                    *held = Tensor::cat(&[&*held, &wide], 2);
                    for row in 0..BATCH {
                        let position = prompts[row as usize] + step as i64;
                        held.narrow(0, row, 1).narrow(2, position, 1).copy_(&new.narrow(0, row, 1));
                    }
                }
            }
            let _next = positions.g_add_scalar_(1);
        }
        prop_assert_eq!(addresses(&cache), at);
    }
}

#[test]
fn no_call_moves_the_tensors() {
    let mut cache = new(16);
    let at = addresses(&cache);
    let bytes = cache.bytes();
    assert_eq!(bytes, 2 * 2 * (BATCH * 16 * KV_HEADS * DIM * 4) as u64);
    let step = |cache: &mut StaticCache, rows: i64, tokens| {
        let token = random(&[rows, KV_HEADS, tokens, DIM], 1);
        for layer in 0..2 {
            cache.append(layer, &token, &token).unwrap();
        }
    };
    step(&mut cache, 2, 10);
    cache.reorder(&Tensor::from_slice(&[1i64, 1])).unwrap();
    cache.truncate(3).unwrap();
    let state = cache.state().unwrap();
    let state: Vec<_> = state
        .iter()
        .map(|(name, t)| (name.clone(), t.copy()))
        .collect();
    step(&mut cache, 2, 13);
    cache.reset();
    step(&mut cache, 1, 2); // a smaller batch
    cache.load_state(&state).unwrap();
    assert_eq!(
        (cache.len(), addresses(&cache), cache.bytes()),
        (3, at, bytes)
    );
    assert_eq!(cache.max_len(), Some(16));
}

#[test]
fn beams_grow_out_of_one_row() {
    let mut cache = new(8);
    let prompt = random(&[1, KV_HEADS, 3, DIM], 5);
    for layer in 0..2 {
        assert_eq!(
            cache.append(layer, &prompt, &prompt).unwrap().keys.size()[0],
            1
        );
    }
    cache.reorder(&Tensor::from_slice(&[0i64, 0])).unwrap();
    let token = random(&[2, KV_HEADS, 1, DIM], 6);
    let view = cache.append(0, &token, &token).unwrap();
    assert_eq!(view.keys.narrow(2, 0, 3), prompt.repeat([2, 1, 1, 1]));
    let error = cache
        .reorder(&Tensor::from_slice(&[0i64, 0, 1]))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "`rows` has shape [3]; it must be at most (2,), the `batch` of the cache"
    );
}

#[test]
fn appending_beyond_the_end_is_refused_and_changes_nothing() {
    let mut cache = new(4);
    let three = random(&[BATCH, KV_HEADS, 3, DIM], 1);
    for layer in 0..2 {
        cache.append(layer, &three, &three).unwrap();
    }
    let two = three.narrow(2, 0, 2);
    let error = cache.append(0, &two, &two).unwrap_err();
    assert!(matches!(
        error,
        Error::Full {
            capacity: 4,
            held: 3,
            new: 2
        }
    ));
    assert!(error.to_string().contains("2 more do not fit"));
    assert!(cache.advance(2).is_err());
    assert!(cache.advance(i64::MAX).is_err());
    assert_eq!(cache.len(), 3);
    let one = three.narrow(2, 0, 1);
    cache.append(0, &one, &one).unwrap();
    cache.append(1, &one, &one).unwrap();
    assert_eq!(cache.len(), 4);

    let other = random(&[BATCH, KV_HEADS + 1, 1, DIM], 1);
    assert!(cache.append(0, &other, &other).is_err());
    let wide = random(&[BATCH + 1, KV_HEADS, 1, DIM], 1);
    cache.reset();
    let error = cache.append(0, &wide, &wide).unwrap_err().to_string();
    assert!(
        error.contains("[2, 2, 8]") && error.contains("[3, 2, 8]"),
        "{error}"
    );
    let error = StaticCache::new(StaticCacheConfig {
        batch: 0,
        ..config(4)
    })
    .unwrap_err();
    assert!(error.to_string().contains("`batch` is 0"));
    let positions = Tensor::from_slice(&[0i32]);
    assert!(
        cache
            .at(&positions)
            .unwrap_err()
            .to_string()
            .contains("i64 of shape (T,)")
    );
    let far = Tensor::from_slice(&[4i64]);
    assert!(
        cache.append_at(0, &one, &one, &far).is_err(),
        "outside 0..4"
    );
}

#[test]
fn a_device_that_this_process_does_not_have_is_named() {
    let config = StaticCacheConfig {
        device: Device::Cuda(100),
        ..config(4)
    };
    let error = StaticCache::new(config).unwrap_err().to_string();
    assert!(
        error.starts_with("`device` is Cuda(100); it must be a device"),
        "{error}"
    );
}
