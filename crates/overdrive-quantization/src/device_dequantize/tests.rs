#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_profiling::OperatorCounts;

use super::*;
use crate::tiles::tests::as_on_a_gpu;
use crate::{GroupOptions, GroupScales, GroupedParts};

fn numbers(size: [i64; 2]) -> Tensor {
    let x = Tensor::arange(size[0] * size[1], (Kind::Float, Device::Cpu));
    ((x * 0.37).sin() + 0.3).view(size)
}

fn weight(scheme: &str, size: [i64; 2]) -> QuantizedWeight {
    QuantizedWeight::quantize(&numbers(size), scheme.parse().unwrap()).unwrap()
}

fn in_tiles(weight: &QuantizedWeight) -> QuantizedWeight {
    let tiled = Tiled::new(weight, as_on_a_gpu).unwrap().unwrap();
    QuantizedWeight {
        storage: Storage::Tiled(tiled),
        ..weight.shallow_clone()
    }
}

#[test]
fn slices_cover_all_rows_once() {
    let found: Vec<_> = slices(5, SLICE / 2).collect();
    assert_eq!(found, [(0, 2), (2, 2), (4, 1)]);
    // At least one row, however long.
    assert_eq!(slices(2, SLICE * 3).collect::<Vec<_>>(), [(0, 1), (1, 1)]);
    assert_eq!(slices(0, 8).count(), 0);
}

#[test]
fn weights_of_several_slices_are_those_of_the_codecs() {
    // A slice and a part, in rows and in blocks.
    let size = [SLICE / 4096 + 24, 4096];
    for scheme in ["nf4-single", "int4-g128"] {
        let weight = weight(scheme, size);
        let expected = weight.dequantize(Kind::BFloat16).unwrap();
        assert_eq!(
            dequantize(&weight, Kind::BFloat16).unwrap(),
            expected,
            "{scheme}"
        );
    }
}

#[test]
fn dense_weights_out_of_tiles_are_those_out_of_rows() {
    for group_size in [32, 64, 128] {
        for symmetric in [true, false] {
            for scales in [GroupScales::Half, GroupScales::Float] {
                let options = GroupOptions {
                    bits: 4,
                    group_size,
                    symmetric,
                };
                let rows = QuantizedWeight::quantize_groups(&numbers([24, 384]), options, scales);
                let rows = rows.unwrap();
                let tiles = in_tiles(&rows);
                // Products of scales in f16 are exact; those in f32 may be added with one rounding or two.
                let ulp = if symmetric || scales == GroupScales::Half {
                    0.0
                } else {
                    1.0
                };
                for (kind, digits) in [
                    (Kind::BFloat16, 8),
                    (Kind::Half, 11),
                    (Kind::Float, 24),
                    (Kind::Double, 24),
                ] {
                    let [rows, tiles] = [&rows, &tiles].map(|w| w.dequantize(kind).unwrap());
                    let apart = (tiles - &rows).abs().max().double_value(&[]);
                    let most = ulp * rows.abs().max().double_value(&[]) / 2f64.powi(digits - 1);
                    assert!(apart <= most, "{options:?} {scales:?} {kind:?}: {apart}");
                }
                let ids = Tensor::from_slice(&[23i64, 0, 7]);
                let [rows, tiles] = [&rows, &tiles].map(|w| w.rows(&ids, Kind::Half).unwrap());
                assert!(tiles.allclose(&rows, 1e-3, 0.0, false));
            }
        }
    }
}

#[test]
fn tiles_are_left_for_files_and_other_devices() {
    let rows = weight("int4-g32", [16, 96]);
    let tiles = in_tiles(&rows);
    let codes = |weight: &QuantizedWeight| weight.storage.codes().shallow_clone();
    assert_ne!(codes(&tiles).kind(), Kind::Uint8);
    assert_eq!(codes(&tiles.in_rows().unwrap()), codes(&rows));
    // The codes take the same bytes, and there are no others; the scales are there in bf16 as well.
    assert_eq!(tiles.bytes() - rows.bytes(), 16 * (96 / 32) * 4);
}

#[test]
fn reordered_columns_go_to_their_places() {
    let plain = weight("int4-g32-asym", [16, 64]);
    let Storage::Grouped {
        codes,
        scales,
        offsets,
        ..
    } = &plain.storage
    else {
        panic!("groups")
    };
    let order: Vec<i32> = (0..64).map(|place| (place * 7 + 3) % 64).collect();
    let rows = QuantizedWeight::from_grouped(GroupedParts {
        bits: 4,
        codes: codes.shallow_clone(),
        scales: scales.shallow_clone(),
        offsets: offsets.as_deref().map(Tensor::shallow_clone),
        order: Some(Tensor::from_slice(&order)),
    });
    let rows = rows.unwrap();
    let expected = rows.dequantize(Kind::Half).unwrap();
    assert_eq!(dequantize(&rows, Kind::Half).unwrap(), expected);
    assert_eq!(in_tiles(&rows).dequantize(Kind::Half).unwrap(), expected);
}

#[test]
fn a_slice_takes_few_launches_and_no_dense_weight_in_f32_is_made() {
    const SIZE: [i64; 2] = [256, 1024];
    let elements = (SIZE[0] * SIZE[1]) as f64;
    // The launches before, from the same counts: 10 for NF4, 14 with double quantization, 8 and 9 for groups.
    for (scheme, launches, most_bytes) in [
        ("nf4-single", 3, 14.7),
        ("nf4", 7, 15.2),
        ("int4-g128", 3, 14.6),
        ("int4-g128-asym", 3, 14.7),
        ("int8-g128", 2, 3.2),
        ("int8-weight", 1, 3.1),
        ("fp8", 2, 7.1),
    ] {
        let weight = weight(scheme, SIZE);
        // The tables are on the device from here on.
        let _ = dequantize(&weight, Kind::BFloat16).unwrap();
        let counts = OperatorCounts::new();
        let _ = dequantize(&weight, Kind::BFloat16).unwrap();
        let bytes = counts.bytes() as f64 / elements;
        println!(
            "{scheme}: {} launches, {bytes:.1} B a weight",
            counts.launches()
        );
        assert_eq!(
            counts.launches(),
            launches,
            "{scheme}: {:?}",
            counts.by_name()
        );
        assert!(bytes < most_bytes, "{scheme}: {bytes}");
    }
    let tiles = in_tiles(&weight("int4-g128", SIZE));
    let counts = OperatorCounts::new();
    let _ = tiles.dequantize(Kind::BFloat16).unwrap();
    assert_eq!(counts.launches(), 3, "{:?}", counts.by_name());
}

#[test]
fn tables_are_on_a_device_once() {
    let [first, second] = [(); 2].map(|()| Pairs::Less(8).on(Device::Cpu).unwrap());
    assert_eq!(first.data_ptr(), second.data_ptr());
    assert_eq!(first.double_value(&[0x21, 0]), 1.0 - 8.0);
    assert_eq!(first.double_value(&[0x21, 1]), 2.0 - 8.0);
}
