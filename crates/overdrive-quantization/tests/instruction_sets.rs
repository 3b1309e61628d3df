//! Codes and linear layers with each instruction set that `OVERDRIVE_SIMD` names, against those of the widest: the
//! test runs itself again with the variable set, since it is read once.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use overdrive_kernels::InstructionSet;
use overdrive_quantization::{
    Activations, GroupOptions, GroupScales, QuantizationConfig, QuantizedWeight, Scheme,
    instruction_set, linear,
};
use overdrive_safetensors::{MappedFile, write};
use tch::{Device, Kind, Tensor};

/// The variable with the path that the second run writes to; the first run does not have it.
const OUT: &str = "OVERDRIVE_TEST_OUT";

const SCHEMES: [&str; 14] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4",
    "int4-g32",
    "int4-g32-asym",
    "int8-g32",
    "int8-g16-asym",
    "nf4",
    "nf4-single",
    "nf4-b32-single",
    "fp4",
    "fp4-b128-single",
    "fp8",
];

/// Returns numbers that need no generator.
fn numbers(seed: i64, size: [i64; 2]) -> Tensor {
    let count = size[0] * size[1];
    let x = (Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed * 1000) * 12.9898;
    let x = x.sin() * 43_758.545_3;
    ((&x - x.floor()) * 2 - 1).view(size).to_kind(Kind::Float)
}

/// Returns a weight with rows that are special cases of the codecs.
fn weight(size: [i64; 2]) -> Tensor {
    let weight = numbers(1, size);
    let _ = weight.get(0).fill_(0.0);
    let _ = weight.get(1).fill_(1e-39);
    let _ = weight.get(2).abs_();
    let _ = weight.get(3).g_mul_scalar_(1e20);
    weight
}

/// Returns the tensors of this process: `codes.…`, which must be equal bit for bit, and `outputs.…`, whose
/// tolerance depends on the scheme.
fn made() -> Vec<(String, Tensor)> {
    let mut made = Vec::new();
    // Rows of whole vectors and others, with blocks that cross rows.
    for size in [[37, 256], [9, 768]] {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let dense = weight(size).clamp(-6e4, 6e4).to_kind(kind);
            for name in SCHEMES {
                let scheme: Scheme = name.parse().unwrap();
                let mut weights = vec![QuantizedWeight::quantize(&dense, scheme).unwrap()];
                if let Scheme::Grouped(options) = scheme {
                    let groups = |options: GroupOptions| {
                        QuantizedWeight::quantize_groups(&dense, options, GroupScales::Float)
                    };
                    weights.push(groups(options).unwrap());
                }
                for (index, weight) in weights.iter().enumerate() {
                    let key = format!("{size:?}.{kind:?}.{name}.{index}");
                    let layout = QuantizationConfig::for_scheme(scheme, Vec::new());
                    for (part, tensor) in layout.write_weight(weight, "w").unwrap() {
                        let bytes = tensor.contiguous().flatten(0, -1).view_dtype(Kind::Uint8);
                        made.push((format!("codes.{key}.{part}"), bytes));
                    }
                    let back = weight.dequantize(Kind::Float).unwrap();
                    made.push((format!("codes.{key}"), back));
                    let back = weight.dequantize(kind).unwrap().view_dtype(match kind {
                        Kind::Float => Kind::Int,
                        _ => Kind::Int16,
                    });
                    made.push((format!("codes.{key}.rounded"), back));
                }
            }
        }
        let dense = numbers(2, size);
        for name in SCHEMES {
            let weight = QuantizedWeight::quantize(&dense, name.parse().unwrap()).unwrap();
            for rows in [1, 3, 8, 33] {
                let x = numbers(3, [rows, size[1]]);
                let key = format!("{name}.{size:?}.{rows}");
                let y = linear(&x, &weight, None).unwrap();
                made.push((format!("outputs.{key}"), y));
                for (prefix, activations) in
                    [("float", Activations::Float), ("bytes", Activations::Int8)]
                {
                    let weight = weight.shallow_clone().with_activations(activations);
                    // FP8 takes no activations in 8 bits.
                    if let Ok(weight) = weight {
                        let y = linear(&x, &weight, None).unwrap();
                        made.push((format!("outputs.{prefix}-{key}"), y));
                    }
                }
            }
        }
    }
    made
}

/// Does nothing unless the test below runs it.
#[test]
fn the_second_run_writes_its_tensors() {
    let Some(out) = std::env::var_os(OUT) else {
        return;
    };
    let metadata = BTreeMap::from([("set".to_owned(), instruction_set().to_owned())]);
    write(Path::new(&out), &made(), &metadata).unwrap();
}

fn made_with(set: &str) -> MappedFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made.safetensors");
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .arg("the_second_run_writes_its_tensors")
        .env("OVERDRIVE_SIMD", set)
        .env(OUT, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{set}: {said}");
    // The mapped memory outlives the folder.
    MappedFile::open(&path).unwrap()
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

/// Returns the tolerance of the outputs of two sets, relative to the largest output.
fn tolerance(key: &str) -> f64 {
    match key {
        // Sums of products of codes are exact, and everything after them is rounded alike.
        _ if key.starts_with("int8.") => 0.0,
        // Portable code takes words where the other sets take bytes, unless bytes are asked for.
        _ if ["int4", "int8-g", "nf4", "fp4"]
            .iter()
            .any(|scheme| key.starts_with(scheme)) =>
        {
            1e-2
        }
        // Sums in f32 of up to 768 products, in another order.
        _ => 1e-5,
    }
}

#[test]
fn every_instruction_set_has_the_same_codes_and_nearly_the_same_outputs() {
    let expected: BTreeMap<String, Tensor> = made().into_iter().collect();
    for set in InstructionSet::available().map(InstructionSet::name) {
        let file = made_with(set);
        assert_eq!(file.metadata()["set"], set);
        assert_eq!(file.tensors().len(), expected.len());
        for (name, expected) in &expected {
            let found = file.tensor(name).unwrap();
            let found = found.copy_to_tensor(None, Device::Cpu).unwrap();
            if let Some(key) = name.strip_prefix("outputs.") {
                let difference = largest(&(&found - expected)) / largest(expected);
                assert!(difference <= tolerance(key), "{set} {name}: {difference:e}");
            } else {
                assert_eq!(&found, expected, "{set} {name}");
            }
        }
    }
}
