//! Files that are damaged or inconsistent.

use std::collections::BTreeMap;

use overdrive_quantization::QuantizationConfig;
use overdrive_safetensors::{MappedFile, write};
use proptest::prelude::*;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{fixture, modules};

/// Writes the tensors of a valid file after `change`, and returns the error of reading them, or "read".
fn reading(module: &str, change: impl Fn(&mut BTreeMap<String, Tensor>, &mut Value)) -> String {
    let file = fixture();
    let mut config: Value =
        serde_json::from_str(&file.metadata()[&format!("config.{module}")]).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = file
        .tensors()
        .into_iter()
        .filter_map(|tensor| {
            let part = tensor
                .name()
                .strip_prefix(&format!("{module}."))?
                .to_owned();
            Some((part, tensor.copy_to_tensor(None, Device::Cpu).unwrap()))
        })
        .collect();
    change(&mut tensors, &mut config);
    let tensors: Vec<(String, Tensor)> = tensors
        .into_iter()
        .map(|(part, tensor)| (format!("{module}.{part}"), tensor))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.safetensors");
    write(&path, &tensors, &BTreeMap::new()).unwrap();
    let file = MappedFile::open(&path).unwrap();
    match QuantizationConfig::from_json(&config) {
        Ok(config) => match config.read_weight(&file, module) {
            Ok(weight) => {
                drop(weight.dequantize(Kind::Float).unwrap());
                "read".to_owned()
            }
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    }
}

fn state(tensors: &mut BTreeMap<String, Tensor>, change: impl Fn(&mut Value)) {
    let name = "weight.quant_state.bitsandbytes__nf4";
    let bytes = Vec::<u8>::try_from(&tensors[name]).unwrap();
    let mut state: Value = serde_json::from_slice(&bytes).unwrap();
    change(&mut state);
    let bytes = state.to_string().into_bytes();
    tensors.insert(name.to_owned(), Tensor::from_slice(&bytes));
}

#[test]
fn inconsistent_files_are_refused_with_the_reason() {
    type Change = fn(&mut BTreeMap<String, Tensor>, &mut Value);
    let cases: [(&str, Change, &str); 22] = [
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["blocksize"] = json!(128)),
            "[24]",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["blocksize"] = json!(48)),
            "power of two from 32",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([24, 256])),
            "[3072]",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([i64::MAX, 2])),
            "both sizes positive",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([-24, -128])),
            "both sizes positive",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([3072])),
            "it must be (O, I)",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["quant_type"] = json!("fp4")),
            "describes fp4",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["nested_blocksize"] = json!(64)),
            "blocks of 256",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["nested_offset"] = Value::Null),
            "the offset None",
        ),
        (
            "bnb_nf4",
            |t, _| drop(t.remove("weight.absmax")),
            "no tensor `bnb_nf4.weight.absmax`",
        ),
        (
            "bnb_nf4",
            |t, _| {
                drop(
                    t.get("weight.nested_absmax")
                        .unwrap()
                        .shallow_clone()
                        .fill_(f64::NAN),
                )
            },
            "NaN at index 0",
        ),
        (
            "bnb_nf4",
            |t, _| {
                drop(
                    t.get("weight.quant_map")
                        .unwrap()
                        .shallow_clone()
                        .fill_(0.5),
                )
            },
            "its code book has 0.5",
        ),
        (
            "bnb_nf4",
            |t, _| {
                t.insert(
                    "weight.quant_state.bitsandbytes__nf4".into(),
                    Tensor::from_slice(b"{}"),
                );
            },
            "not bitsandbytes' JSON",
        ),
        ("bnb_int8", |t, _| drop(t.remove("SCB")), "did not quantize"),
        (
            "bnb_int8",
            |t, _| drop(t.get("SCB").unwrap().shallow_clone().fill_(f64::INFINITY)),
            "inf at index 0",
        ),
        (
            "ct_int4",
            |t, _| {
                t.insert("weight_shape".into(), Tensor::from_slice(&[24i64, 1 << 40]));
            },
            "does not match",
        ),
        (
            "ct_int4",
            |_, c| c["config_groups"]["group_0"]["weights"]["group_size"] = json!(64),
            "[24, 2]",
        ),
        (
            "ct_int4_asym",
            |t, _| drop(t.remove("weight_zero_point")),
            "weight_zero_point",
        ),
        (
            "ct_fp8",
            |t, _| {
                drop(
                    t.get("weight")
                        .unwrap()
                        .view_dtype(Kind::Uint8)
                        .get(0)
                        .fill_(0x7F),
                )
            },
            "a code that is NaN",
        ),
        (
            "gptq_4_act",
            |t, _| drop(t.get("g_idx").unwrap().shallow_clone().fill_(1)),
            "does not assign",
        ),
        (
            "gptq_4_act",
            |t, _| drop(t.get("g_idx").unwrap().get(0).fill_(-5)),
            "does not assign",
        ),
        (
            "awq_4",
            |t, _| {
                t.insert("qzeros".into(), Tensor::from_slice(&[1i32; 9]).view([3, 3]));
            },
            "[4, 3]",
        ),
    ];
    for (module, change, expected) in cases {
        let found = reading(module, change);
        assert!(
            found.contains(expected),
            "{module}: {found}, expected {expected}"
        );
    }
}

/// A way to damage a tensor.
#[derive(Debug, Clone)]
enum Damage {
    Remove,
    Bytes(Vec<u8>),
    Shorter(usize),
    Shape(Vec<i64>),
    Kind(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::Remove),
        prop::collection::vec(any::<u8>(), 1..40).prop_map(Damage::Bytes),
        (1usize..200).prop_map(Damage::Shorter),
        prop::collection::vec(0i64..40, 0..4).prop_map(Damage::Shape),
        (0usize..6).prop_map(Damage::Kind),
    ]
}

fn damaged(tensor: &Tensor, damage: &Damage) -> Option<Tensor> {
    let kind = tensor.kind();
    let size = kind.elt_size_in_bytes();
    let flat = tensor.contiguous().flatten(0, -1);
    let mut bytes = Vec::<u8>::try_from(flat.view_dtype(Kind::Uint8)).unwrap();
    let mut shape = tensor.size();
    match damage {
        Damage::Remove => return None,
        Damage::Bytes(noise) => {
            for (at, byte) in noise.iter().enumerate() {
                let place = (at * 7919 + usize::from(*byte) * 31) % bytes.len().max(1);
                if let Some(slot) = bytes.get_mut(place) {
                    *slot = *byte;
                }
            }
        }
        Damage::Shorter(by) => {
            bytes.truncate(bytes.len().saturating_sub(*by) / size * size);
            shape = vec![(bytes.len() / size) as i64];
        }
        Damage::Shape(new) => {
            let count: i64 = new.iter().product();
            bytes.resize(count.unsigned_abs() as usize * size, 0x5A);
            shape.clone_from(new);
        }
        Damage::Kind(index) => {
            let kinds = [
                Kind::Uint8,
                Kind::Int8,
                Kind::Int,
                Kind::Float,
                Kind::Half,
                Kind::Int64,
            ];
            return Some(tensor.to_kind(kinds[*index]));
        }
    }
    Some(Tensor::from_data_size(&bytes, &shape, kind))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_are_read_or_refused_without_a_panic(
        module in any::<prop::sample::Index>(),
        target in any::<prop::sample::Index>(),
        damage in damage(),
    ) {
        let names = modules(&fixture());
        let module = module.get(&names);
        reading(module, |tensors, _| {
            let parts: Vec<String> = tensors.keys().cloned().collect();
            let part = target.get(&parts);
            let tensor = tensors.remove(part).unwrap();
            if let Some(tensor) = damaged(&tensor, &damage) {
                tensors.insert(part.clone(), tensor);
            }
        });
    }

    #[test]
    fn inconsistent_states_are_read_or_refused_without_a_panic(
        block in prop_oneof![Just(64i64), any::<i64>(), 0i64..5000],
        shape in prop::collection::vec(prop_oneof![any::<i64>(), 0i64..4000], 0..4),
        offset in any::<f64>(),
        nested in prop_oneof![Just(256i64), any::<i64>()],
    ) {
        reading("bnb_nf4", |tensors, _| {
            state(tensors, |state| {
                state["blocksize"] = json!(block);
                state["shape"] = json!(shape);
                state["nested_offset"] = json!(offset);
                state["nested_blocksize"] = json!(nested);
            });
        });
    }

    #[test]
    fn inconsistent_configurations_are_read_or_refused_without_a_panic(
        module in any::<prop::sample::Index>(),
        bits in any::<u8>(),
        group in prop_oneof![-2i64..300, any::<i64>()],
        strategy in prop_oneof![Just("group"), Just("channel"), Just("tensor"), Just("block")],
        symmetric in any::<bool>(),
    ) {
        let names = modules(&fixture());
        let module: &String = module.get(&names);
        reading(module, |_, config| {
            match config["quant_method"].as_str() {
                Some("compressed-tensors") => {
                    let weights = &mut config["config_groups"]["group_0"]["weights"];
                    weights["num_bits"] = json!(if bits % 2 == 0 { 4 } else { 8 });
                    weights["group_size"] = json!(group);
                    weights["strategy"] = json!(strategy);
                    weights["symmetric"] = json!(symmetric);
                }
                _ => {
                    config["group_size"] = json!(group);
                    config["bits"] = json!(if symmetric { 4 } else { bits });
                }
            }
        });
    }
}
