//! The launches of every variant, as `kernels/check.py` repeats them with Triton's interpreter.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::decode::decode;
use super::delta_rule::delta_rule;
use super::source;
use super::stand_in::StandIn;
use crate::embedded::{PTX, Variant, images, table};
use crate::{
    Activation, AdamFactors, CodedAverage, EightBitNumbers, EightBitWeight, FourBitNumbers,
    FourBitScales, FourBitWeight, Fp8Format, LossTerms, RotaryTables,
};

const KINDS: [Kind; 3] = [Kind::Float, Kind::Half, Kind::BFloat16];

static BOOK: [f32; 16] = [0.5; 16];

pub(super) fn empty(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::empty(shape, (kind, Device::Cpu))
}

fn norms(stand_in: &StandIn, kind: Kind) {
    // A width for each bucket, and of each kind more than one block of rows, the last one not full.
    for (rows, width) in [
        (19, 48),
        (9, 128),
        (7, 400),
        (5, 1024),
        (5, 1040),
        (3, 4096),
        (7, 5120),
        (3, 16384),
    ] {
        let (x, weight) = (empty(&[rows, width], kind), empty(&[width], kind));
        for add in [false, true] {
            let norm = stand_in
                .kernels
                .rms_norm(kind, width, add)
                .unwrap()
                .unwrap();
            let extra = add.then(|| empty(&[rows, width], kind));
            let out = norm.forward(&x, extra.as_ref(), &weight, 1e-5).unwrap();
            assert_eq!(out.x.data_ptr() == x.data_ptr(), !add);
            let gradients = norm.backward(&out.x, &weight, &out.inverse, &x, extra.as_ref());
            let gradients = gradients.unwrap();
            let (dx, dw) = (gradients.dx, gradients.dw);
            assert_eq!(
                (dx.size(), dw.size(), dw.kind()),
                (vec![rows, width], vec![width], Kind::Float)
            );
            assert!(gradients.narrow.is_none());
        }
        mixed_norms(stand_in, kind, rows, width);
    }
}

fn mixed_norms(stand_in: &StandIn, low: Kind, rows: i64, width: i64) {
    let norm = stand_in.kernels.add_rms_norm_mixed(low, width).unwrap();
    let Some(norm) = norm else {
        return assert_eq!(low, Kind::Float);
    };
    let wide = |shape: &[i64]| empty(shape, Kind::Float);
    let (x, weight, residual) = (
        wide(&[rows, width]),
        wide(&[width]),
        empty(&[rows, width], low),
    );
    let out = norm.forward(&x, Some(&residual), &weight, 1e-5).unwrap();
    assert_eq!((out.y.kind(), out.x.kind()), (low, Kind::Float));
    let short = residual.narrow(0, 0, 1);
    assert!(norm.forward(&x, Some(&short), &weight, 1e-5).is_err());
    assert!(
        norm.backward(&out.x, &weight, &out.inverse, &short, None)
            .is_err()
    );
    for extra in [None, Some(&x)] {
        let found = norm
            .backward(&out.x, &weight, &out.inverse, &residual, extra)
            .unwrap();
        let narrow = found.narrow.unwrap();
        assert_eq!((found.dx.kind(), narrow.kind()), (Kind::Float, low));
        assert_eq!(narrow.size(), [rows, width]);
    }
}

fn gates(stand_in: &StandIn, kind: Kind) {
    use Activation::{Gelu, GeluTanh, Relu, Silu};
    for activation in [Silu, Gelu, GeluTanh, Relu] {
        for (rows, width) in [(3, 48), (2, 1040)] {
            let gate = stand_in
                .kernels
                .gate(kind, width, activation)
                .unwrap()
                .unwrap();
            let (joint, y) = (empty(&[rows, 2 * width], kind), empty(&[rows, width], kind));
            assert_eq!(gate.joint(&joint).unwrap().size(), [rows, width]);
            assert_eq!(
                gate.joint_backward(&joint, &y).unwrap().size(),
                [rows, 2 * width]
            );
            assert_eq!(gate.pair(&y, &y).unwrap().size(), [rows, width]);
            let _ = gate.pair_backward(&y, &y, &y).unwrap();
            let short = y.narrow(0, 0, 1);
            assert!(gate.pair(&y, &short).is_err());
            assert!(gate.pair_backward(&y, &y, &short).is_err());
            assert!(gate.joint(&y).is_err());
        }
    }
}

fn rotations(stand_in: &StandIn, kind: Kind) {
    // The dimension of a head, its pairs, and for each bucket one whose numbers are multiples of 16 and one whose are not.
    for (dim, pairs) in [
        (64, 32),
        (80, 16),
        (12, 5),
        (128, 64),
        (160, 48),
        (96, 48),
        (100, 50),
        (256, 128),
        (202, 101),
    ] {
        for interleaved in [false, true] {
            let rotary = stand_in
                .kernels
                .rotary(kind, dim, pairs, interleaved)
                .unwrap()
                .unwrap();
            let (batch, length, heads, kv_heads) = (2, 3, 5, 2);
            let shared = empty(&[length, pairs], Kind::Float);
            let own = empty(&[batch, length, pairs], Kind::Float);
            for table in [&shared, &own] {
                let tables = RotaryTables {
                    cos: table,
                    sin: table,
                };
                let qkv = empty(&[batch, length, (heads + 2 * kv_heads) * dim], kind);
                let [q, k, v] = rotary.split(&qkv, [heads, kv_heads], tables).unwrap();
                assert!(rotary.split(&qkv, [0, 0], tables).is_err());
                assert!(
                    rotary
                        .split(&qkv.narrow(1, 0, 2), [heads, kv_heads], tables)
                        .is_err()
                );
                assert_eq!(q.size(), [batch, length, heads, dim]);
                assert_eq!(
                    (k.size(), v.size()),
                    (vec![batch, length, kv_heads, dim], k.size())
                );
                // Gradients as attention leaves them: one as (B, H, T, D), one with room between its heads.
                let dq = empty(&[batch, heads, length, dim], kind).transpose(1, 2);
                let dk = empty(&[batch, length, kv_heads, dim + 16], kind).narrow(3, 0, dim);
                let joint = rotary.split_backward([&dq, &dk, &v], tables).unwrap();
                assert_eq!(joint.size(), qkv.size());
                assert_eq!(rotary.rotate(&dq, tables, false).unwrap().size(), q.size());
            }
        }
    }
}

fn losses(stand_in: &StandIn, kind: Kind) {
    for classes in [4112, 96, 5003, 33] {
        for (softcap, label_smoothing, z_loss) in
            [(None, 0.0, 0.0), (None, 0.1, 1e-3), (Some(20.0), 0.0, 1e-2)]
        {
            let terms = LossTerms {
                ignore_index: -100,
                label_smoothing,
                z_loss,
                softcap,
            };
            let loss = stand_in
                .kernels
                .cross_entropy(kind, classes, terms)
                .unwrap()
                .unwrap();
            let labels = empty(&[6], Kind::Int64);
            let mut logits = empty(&[6, classes], kind);
            let (losses, lse) = loss.losses(&logits, &labels).unwrap();
            assert_eq!((losses.kind(), lse.size()), (Kind::Float, vec![6]));
            let factor = empty(&[1], Kind::Float);
            loss.gradient(&mut logits, &labels, &lse, &factor, 0.5)
                .unwrap();
            let _ = loss
                .losses_and_gradient(&mut logits, &labels, 0.25)
                .unwrap();
        }
    }
}

fn adam(stand_in: &StandIn, kind: Kind) {
    for count in [2 * 1024, 1303] {
        let step = stand_in.kernels.adam8(kind, count).unwrap().unwrap();
        let (parameter, gradient) = (empty(&[count], kind), empty(&[count], kind));
        let new = || {
            let blocks = (count + 255) / 256;
            [
                empty(&[count], Kind::Uint8),
                empty(&[blocks], Kind::Float),
                empty(&[256], Kind::Float),
                empty(&[255], Kind::Float),
            ]
        };
        let (a, s) = (new(), new());
        let factors = AdamFactors {
            betas: (0.9, 0.999),
            rests: (0.1, 0.001),
            decay: 0.99,
            step_size: 0.02,
            correction2: 1.5,
            eps: 1e-8,
        };
        let average = CodedAverage {
            codes: &a[0],
            scales: &a[1],
            book: &a[2],
            bounds: &a[3],
        };
        let squares = CodedAverage {
            codes: &s[0],
            scales: &s[1],
            book: &s[2],
            bounds: &s[3],
        };
        step.step(&parameter, &gradient, average, squares, &factors)
            .unwrap();
        let short = gradient.narrow(0, 1, count - 1);
        let refused = step.step(&parameter, &short, average, squares, &factors);
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("`gradient` has shape")
        );
    }
}

fn fp8(stand_in: &StandIn, kind: Kind) {
    for (rows, width) in [(16, 64), (70, 144)] {
        for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
            for columns in [false, true] {
                let x = empty(&[rows, width], kind);
                let matrix = stand_in
                    .kernels
                    .to_fp8(&x, format, columns)
                    .unwrap()
                    .unwrap();
                assert_eq!(matrix.codes.size(), [rows, width]);
                let padded = (rows + 15) / 16 * 16;
                let expected = columns.then(|| vec![width, padded]);
                assert_eq!(matrix.columns.map(|columns| columns.size()), expected);
            }
        }
    }
    // More blocks than partial maxima.
    let large = empty(&[1040, 4112], kind);
    let matrix = stand_in.kernels.to_fp8(&large, Fp8Format::E5m2, false);
    assert!(matrix.unwrap().is_some());
    let narrow = empty(&[16, 24], kind);
    let refused = stand_in.kernels.to_fp8(&narrow, Fp8Format::E4m3, true);
    assert!(refused.unwrap().is_none());
}

/// Returns numbers of rows: for f32 one of each kernel and several blocks, for the others one of each kernel.
fn rows_of(kind: Kind) -> &'static [i64] {
    match kind {
        Kind::Float => &[1, 2, 7],
        _ => &[1, 7, 13, 37],
    }
}

fn four_bit(stand_in: &StandIn, kind: Kind) {
    for (outputs, inputs, group) in match kind {
        Kind::Float => [(9, 96, 32), (6, 1152, 64), (7, 1280, 128)],
        // With the two multiprocessors of the stand-in, some of them are computed by several programs.
        _ => [(9, 1056, 32), (70, 2112, 64), (18, 2176, 128)],
    } {
        let groups = outputs * inputs / group;
        let codes = empty(&[outputs * inputs / 2], Kind::Uint8);
        let [full, half] = [Kind::Float, Kind::Half].map(|kind| empty(&[groups], kind));
        let nested = [
            empty(&[groups], Kind::Uint8),
            empty(&[256], Kind::Float),
            empty(&[(groups + 255) / 256], Kind::Float),
        ];
        let mut all = Vec::new();
        for scales in [&full, &half] {
            let given = FourBitScales::Full(scales);
            all.extend([
                (given, FourBitNumbers::Centered),
                (given, FourBitNumbers::Offset(scales)),
            ]);
        }
        let [inner, book, scales] = &nested;
        let nested = FourBitScales::Nested {
            codes: inner,
            book,
            scales,
            offsets: &[
                (outputs / 3, 0.25),
                (1, -0.125),
                (outputs - outputs / 3 - 1, 0.5),
            ],
        };
        all.push((FourBitScales::Full(&full), FourBitNumbers::Book(&BOOK)));
        all.push((nested, FourBitNumbers::Book(&BOOK)));
        for (scales, numbers) in all {
            let weight = FourBitWeight {
                codes: &codes,
                scales,
                numbers,
                outputs,
                inputs,
                group,
            };
            let is_nested = matches!(scales, FourBitScales::Nested { .. });
            let kernels = stand_in.kernels.four_bit(kind, &weight).unwrap();
            if is_nested && kind == Kind::Float {
                assert!(kernels.is_none());
                continue;
            }
            let kernels = kernels.unwrap();
            for &rows in rows_of(kind) {
                let y = kernels.product(&empty(&[rows, inputs], kind), &weight);
                let most = match numbers {
                    FourBitNumbers::Offset(_) => 16,
                    _ => 64,
                };
                let expected = (rows <= most).then(|| vec![rows, outputs]);
                assert_eq!(y.unwrap().map(|y| y.size()), expected);
            }
            let many = kernels.product(&empty(&[65, inputs], kind), &weight);
            assert!(many.unwrap().is_none());
            let dense = kernels.dequantize(&weight).unwrap();
            assert_eq!(
                dense.map(|dense| dense.size()),
                (!is_nested).then(|| vec![outputs, inputs])
            );
            let short = FourBitWeight {
                outputs: outputs + 1,
                ..weight
            };
            assert!(kernels.dequantize(&short).is_err(), "the codes are too few");
        }
    }
}

fn eight_bit(stand_in: &StandIn, kind: Kind) {
    let weights = [
        (EightBitNumbers::Integer, 6, 528, 0),
        (EightBitNumbers::Integer, 5, 2049, 0),
        (EightBitNumbers::Integer, 21, 2064, 0),
        (EightBitNumbers::Float, 21, 2064, 0),
        (EightBitNumbers::Integer, 9, 1056, 32),
        (EightBitNumbers::Integer, 6, 2112, 64),
        (EightBitNumbers::Integer, 7, 2176, 128),
    ];
    for (numbers, outputs, inputs, group) in weights {
        let is_float = numbers == EightBitNumbers::Float;
        let codes = empty(
            &[outputs, inputs],
            if is_float { Kind::Uint8 } else { Kind::Int8 },
        );
        let scales = match group {
            0 => empty(&[outputs], Kind::Float),
            _ => empty(&[outputs, inputs / group], Kind::Half),
        };
        let weight = EightBitWeight {
            codes: &codes,
            scales: &scales,
            numbers,
        };
        let kernels = stand_in.kernels.eight_bit(kind, &weight).unwrap();
        let is_simple = !is_float && group == 0;
        if kind == Kind::Float && !is_simple {
            assert!(kernels.is_none());
            continue;
        }
        let kernels = kernels.unwrap();
        for &rows in rows_of(kind) {
            let y = kernels.product(&empty(&[rows, inputs], kind), &weight);
            let takes = kind == Kind::Float || inputs % 16 == 0;
            let expected = takes.then(|| vec![rows, outputs]);
            assert_eq!(y.unwrap().map(|y| y.size()), expected);
        }
        let dense = kernels.dequantize(&weight).unwrap();
        assert_eq!(
            dense.map(|dense| dense.size()),
            is_simple.then(|| vec![outputs, inputs])
        );
        let wrong = empty(&[outputs + 1], Kind::Float);
        let other = EightBitWeight {
            scales: &wrong,
            ..weight
        };
        assert!(kernels.dequantize(&other).is_err(), "too many scales");
    }
}

/// Returns the variants by the hash that the stand-in has for their PTX.
fn by_hash() -> BTreeMap<String, &'static Variant> {
    let ptx = images(PTX).unwrap();
    let hash = |variant: &Variant| {
        let image = &variant.images[PTX];
        let text = &ptx[image.offset..image.offset + image.length - 1];
        let hash = text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        format!("{hash:016x}")
    };
    let variants = &table().unwrap().variants;
    variants
        .iter()
        .map(|variant| (hash(variant), variant))
        .collect()
}

/// Returns what `check.py` needs of a launch, after a check of the rest.
fn described(line: &str, variants: &BTreeMap<String, &'static Variant>) -> Value {
    let fields: Vec<&str> = line.split(' ').collect();
    let variant = variants[fields[1]];
    let number = |text: &str| text.parse::<i64>().unwrap();
    assert_eq!(fields[2], variant.symbol);
    assert_eq!(number(fields[5]), 32 * i64::from(variant.warps));
    assert_eq!(number(fields[6]), i64::from(variant.images[PTX].shared));
    let (values, hidden) = fields[7..].split_at(variant.arguments.len());
    assert_eq!(hidden, ["0", "0"], "the scratch memory that no kernel uses");
    let mut scalars = serde_json::Map::new();
    for (text, (name, kind)) in values.iter().zip(&variant.arguments) {
        match kind.as_str() {
            "fp32" => drop(scalars.insert(name.clone(), json!(text.parse::<f64>().unwrap()))),
            "i32" | "i64" => drop(scalars.insert(name.clone(), json!(number(text)))),
            _ => assert!(
                number(text) != 0 && number(text) % 16 == 0,
                "{name}: {line}"
            ),
        }
    }
    json!({
        "kernel": variant.kernel, "dtype": variant.dtype, "aligned": variant.aligned,
        "constants": variant.constants, "blocks": [number(fields[3]), number(fields[4])], "scalars": scalars,
    })
}

#[test]
fn every_variant_is_launched_as_the_interpreter_proves_it() {
    let stand_in = StandIn::new(103);
    for kind in KINDS {
        norms(&stand_in, kind);
        gates(&stand_in, kind);
        rotations(&stand_in, kind);
        losses(&stand_in, kind);
        adam(&stand_in, kind);
        fp8(&stand_in, kind);
        four_bit(&stand_in, kind);
        eight_bit(&stand_in, kind);
        decode(&stand_in, kind);
        delta_rule(&stand_in, kind);
    }
    let variants = by_hash();
    let log = stand_in.take();
    let launches = log.iter().filter(|line| line.starts_with("launch"));
    let launched: BTreeSet<&str> = launches.clone().map(|line| &line[7..23]).collect();
    for (hash, variant) in &variants {
        // No attention in f32 has heads of 256, whose splits would be combined.
        let is_unused = variant.kernel == "decode_combine"
            && variant.dtype == "f32"
            && variant.constants["DIM"] == 256;
        let found = launched.contains(hash.as_str()) || is_unused;
        assert!(found, "{} {:?}", variant.kernel, variant.constants);
    }
    let mut launches: Vec<String> = launches
        .map(|line| described(line, &variants).to_string())
        .collect();
    launches.dedup();
    let text = format!("[\n{}\n]\n", launches.join(",\n"));
    let path = source("launches.json");
    if std::env::var_os("OVERDRIVE_WRITE_LAUNCHES").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    let (new, old): (Vec<_>, Vec<_>) = (text.lines().collect(), committed.lines().collect());
    for (new, old) in new.iter().zip(&old) {
        assert_eq!(new, old, "after a change, run `cargo xtask kernels`");
    }
    assert_eq!(
        new.len(),
        old.len(),
        "after a change, run `cargo xtask kernels`"
    );
}
