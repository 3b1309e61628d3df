use std::collections::BTreeMap;
use std::fs;

use sha2::{Digest, Sha256};

use super::source;
use crate::embedded::{PTX, Variant, images, table, target_for};

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_image_is_the_one_that_was_compiled() {
    let table = table().unwrap();
    for target in table.targets.keys() {
        let all = images(target).unwrap();
        let mut end = 0;
        for variant in &table.variants {
            let image = &variant.images[target];
            // One after another, without a gap.
            assert_eq!(image.offset, end);
            end += image.length;
            assert_eq!(
                sha256(&all[image.offset..end]),
                image.sha256,
                "{}",
                variant.symbol
            );
            assert!(
                image.shared <= 99 * 1024,
                "{} needs {}",
                variant.symbol,
                image.shared
            );
        }
        assert_eq!(end, all.len());
    }
}

#[test]
fn the_kernels_were_compiled_from_these_sources() {
    for (name, hash) in &table().unwrap().sources {
        let found = sha256(&fs::read(source(name)).unwrap());
        assert_eq!(
            &found, hash,
            "{name} was changed; run `cargo xtask kernels`"
        );
    }
}

#[test]
fn every_gpu_from_ampere_on_has_code() {
    let table = table().unwrap();
    for major in 8..16 {
        for minor in 0..10 {
            let target = target_for((major, minor)).unwrap();
            assert!(table.targets.contains_key(target), "{target}");
        }
    }
}

/// The size of a parameter of each type of the manifest.
fn bytes(kind: &str) -> usize {
    match kind {
        "i32" | "fp32" => 4,
        "i64" => 8,
        pointer => {
            assert!(pointer.starts_with('*'), "{pointer}");
            8
        }
    }
}

/// Returns the sizes of the parameters of the function in PTX.
fn parameters(ptx: &str, variant: &Variant) -> Vec<usize> {
    let entry = format!(".visible .entry {}(", variant.symbol);
    let (_, after) = ptx.split_once(&entry).expect("the PTX has the function");
    let (list, _) = after.split_once(')').expect("a list of parameters");
    let types = list.split(".param .").skip(1);
    types
        .map(|text| text[1..3].parse::<usize>().unwrap() / 8)
        .collect()
}

#[test]
fn the_arguments_of_the_table_are_the_parameters_in_the_ptx() {
    let (table, ptx) = (table().unwrap(), images(PTX).unwrap());
    for variant in &table.variants {
        let image = &variant.images[PTX];
        let text = std::str::from_utf8(&ptx[image.offset..image.offset + image.length]).unwrap();
        let text = text
            .strip_suffix('\0')
            .expect("the driver reads a C string");
        let mut expected: Vec<usize> = variant
            .arguments
            .iter()
            .map(|(_, kind)| bytes(kind))
            .collect();
        expected.extend(std::iter::repeat_n(8, table.hidden_pointers));
        assert_eq!(parameters(text, variant), expected, "{}", variant.symbol);
        assert!(
            text.contains(".target sm_80"),
            "older than every GPU that it is for"
        );
        assert!(
            text.contains(&format!(".reqntid {}", 32 * variant.warps)),
            "{}",
            variant.symbol
        );
    }
}

#[test]
fn every_dtype_and_mode_has_every_bucket() {
    let mut dtypes: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
    for variant in &table().unwrap().variants {
        let what = format!(
            "{} {} {:?}",
            variant.kernel, variant.aligned, variant.constants
        );
        // The largest heads in f32 do not fit into registers.
        let is_wide = variant.kernel == "decode_attention" && variant.constants["DIM"] == 256;
        if is_wide && variant.dtype != "f32" {
            continue;
        }
        *dtypes
            .entry(what)
            .or_default()
            .entry(&variant.dtype)
            .or_default() += 1;
    }
    for (what, dtypes) in dtypes {
        let mut expected = BTreeMap::from([("bf16", 1), ("f16", 1), ("f32", 1)]);
        // Products of few rows have one kernel for f32, and another for the tensor cores; f32 is not mixed with itself.
        if what.starts_with("few_bits") || what.contains("\"MIXED\": 1") {
            expected.remove("f32");
        } else if what.starts_with("few_rows") {
            expected.retain(|dtype, _| *dtype == "f32");
        }
        assert_eq!(dtypes, expected, "{what}");
    }
}
