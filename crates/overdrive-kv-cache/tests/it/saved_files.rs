//! Every kind of cache by its name, and in a file.

use crate::reference::random;
use overdrive_kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, Error, KvCache, load, save,
};
use tch::{Device, Tensor};

fn shape() -> CacheShape {
    CacheShape {
        windows: vec![None, Some(16)],
        batch: 2,
        max_len: Some(400),
        kv_heads: 2,
        head_dim: 8,
        window: Some(32),
        sinks: 4,
        ..Default::default()
    }
}

fn step(cache: &mut dyn KvCache, tokens: i64, seed: u64) -> Vec<Tensor> {
    (0..cache.layers())
        .map(|layer| {
            let [q, k, v] = [4, 2, 2]
                .map(|heads| random(&[2, heads, tokens, 8], seed * heads as u64 + layer as u64));
            cache
                .attend(layer, &q, &k, &v, &AttendOptions::default())
                .unwrap()
        })
        .collect()
}

#[test]
fn a_loaded_cache_continues_as_the_saved_one() {
    let folder = tempfile::tempdir().unwrap();
    for kind in CacheImplementation::ALL {
        let path = folder.path().join(format!("{kind}.safetensors"));
        let mut cache = kind.build(&shape()).unwrap();
        let empty = kind.build(&shape()).unwrap();
        save(&*empty, &path).unwrap();
        load(&mut *cache, &path, Device::Cpu).unwrap();
        assert_eq!(cache.len(), 0, "{kind}: an empty one");

        for (seed, tokens) in (1..).zip([300, 1, 7, 1]) {
            step(&mut *cache, tokens, seed);
        }
        save(&*cache, &path).unwrap();
        let mut loaded = kind.build(&shape()).unwrap();
        step(&mut *loaded, 3, 77); // replaced by the load
        load(&mut *loaded, &path, Device::Cpu).unwrap();
        assert_eq!(loaded.len(), 309);
        for seed in 10..13 {
            let (found, expected) = (step(&mut *loaded, 1, seed), step(&mut *cache, 1, seed));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.allclose(expected, 1e-6, 1e-6, false), "{kind}");
            }
        }
        assert_eq!(loaded.bytes_per_token(), cache.bytes_per_token());
    }
}

#[test]
fn a_file_of_another_kind_is_refused_with_both_named() {
    let folder = tempfile::tempdir().unwrap();
    for kind in CacheImplementation::ALL {
        let path = folder.path().join("cache.safetensors");
        let mut cache = kind.build(&shape()).unwrap();
        step(&mut *cache, 5, 1);
        save(&*cache, &path).unwrap();
        for other in CacheImplementation::ALL {
            let mut target = other.build(&shape()).unwrap();
            step(&mut *target, 2, 1);
            let result = load(&mut *target, &path, Device::Cpu);
            if other == kind {
                result.unwrap();
                continue;
            }
            let Error::OtherCache {
                key,
                found,
                expected,
                ..
            } = result.unwrap_err()
            else {
                panic!("another error");
            };
            assert!(key == "cache" || key == "nbits");
            assert_ne!(found, expected);
            assert_eq!(target.len(), 2, "unchanged");
        }
        let mut fewer = kind
            .build(&CacheShape {
                windows: vec![None],
                ..shape()
            })
            .unwrap();
        let error = load(&mut *fewer, &path, Device::Cpu)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("layers \"2\" and this cache has layers \"1\""),
            "{error}"
        );

        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let mut target = kind.build(&shape()).unwrap();
        assert!(matches!(
            load(&mut *target, &path, Device::Cpu),
            Err(Error::File(_))
        ));
    }
}

#[test]
fn names_are_those_of_transformers() {
    for kind in CacheImplementation::ALL {
        assert_eq!(
            kind.to_string().parse::<CacheImplementation>().unwrap(),
            kind
        );
    }
    let named = |name: &str| name.parse::<CacheImplementation>();
    assert_eq!(named("growing").unwrap(), CacheImplementation::Dynamic);
    assert_eq!(named("sliding").unwrap(), CacheImplementation::Sliding);
    assert_eq!(named("quantized").unwrap(), CacheImplementation::Int4);
    let error = named("paged").unwrap_err().to_string();
    assert!(
        error.contains("\"paged\"") && error.contains("sliding_window"),
        "{error}"
    );
    let unbounded = CacheShape {
        max_len: None,
        ..shape()
    };
    let error = CacheImplementation::Static
        .build(&unbounded)
        .unwrap_err()
        .to_string();
    assert!(error.contains("`max_len` is not given"), "{error}");
}
