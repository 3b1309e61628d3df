//! Comparison of the codecs with the Python libraries, bit for bit; `tests/fixtures/gen_codecs.py` makes the
//! fixture.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::{dynamic, fp8};
use crate::tensors::bytes;
use crate::weight::{Magnitudes, Storage};
use crate::{BlockOptions, GroupOptions, QuantizedWeight, Scheme};
use overdrive_kernels::tensors::elements;

struct Fixture(HashMap<String, Tensor>);

impl Fixture {
    fn read() -> Self {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/codecs.safetensors"
        );
        let file = overdrive_safetensors::MappedFile::open(path).expect("gen_codecs.py makes it");
        let read = |tensor: overdrive_safetensors::StoredTensor<'_>| {
            let copy = tensor.copy_to_tensor(None, tch::Device::Cpu);
            (tensor.name().to_owned(), copy.expect("it is readable"))
        };
        Fixture(file.tensors().into_iter().map(read).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn get(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("{name} is in the file"))
    }

    fn floats(&self, name: &str) -> &[f32] {
        elements(self.get(name)).expect("floats")
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

/// Asserts equal bits, of any dtype.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.kind(), expected.kind(), "{what}");
    let [found, expected] = [found, expected].map(|tensor| {
        let flat = tensor.contiguous().flatten(0, -1);
        let bytes = flat.view_dtype(Kind::Uint8);
        Vec::<u8>::try_from(&bytes).expect("bytes")
    });
    assert_eq!(found.len(), expected.len(), "{what}");
    let different = found
        .iter()
        .zip(&expected)
        .enumerate()
        .filter(|(_, (a, b))| a != b);
    let different: Vec<_> = different.take(8).collect();
    assert!(different.is_empty(), "{what}: bytes {different:?}");
}

#[test]
fn four_bit_blocks_are_those_of_bitsandbytes() {
    let fixture = Fixture::read();
    let mut cases = 0;
    for name in ["plain", "bf16", "f16", "rest", "odd", "special"] {
        let weight = fixture.get(&format!("{name}.weight"));
        for book in ["nf4", "fp4"] {
            for block_size in [32, 64, 128, 4096] {
                let key = format!("{name}.{book}.{block_size}");
                for double_quant in [false, true] {
                    let part = if double_quant { ".nested" } else { "" };
                    if !fixture.has(&format!("{key}{part}.codes")) {
                        continue;
                    }
                    let options = BlockOptions {
                        block_size,
                        double_quant,
                    };
                    let scheme = match book {
                        "nf4" => Scheme::Nf4(options),
                        _ => Scheme::Fp4(options),
                    };
                    let quantized = QuantizedWeight::quantize(weight, scheme).expect("it fits");
                    let Storage::Blocks { codes, magnitudes } = &quantized.storage else {
                        panic!("blocks")
                    };
                    assert_same(codes, fixture.get(&format!("{key}.codes")), &key);
                    match magnitudes {
                        Magnitudes::Full(found) => {
                            assert_same(found, fixture.get(&format!("{key}.absmax")), &key);
                        }
                        Magnitudes::Quantized {
                            codes,
                            scales,
                            offset,
                            ..
                        } => {
                            let nested = |part| fixture.get(&format!("{key}.nested.{part}"));
                            assert_same(codes, nested("codes"), &key);
                            assert_same(scales, nested("absmax"), &key);
                            assert_same(&Tensor::from_slice(&[*offset]), nested("offset"), &key);
                        }
                    }
                    let numbers = format!("{key}{part}.numbers");
                    if fixture.has(&numbers) {
                        let found = quantized.dequantize(weight.kind()).expect("memory");
                        assert_same(&found, fixture.get(&numbers), &numbers);
                    }
                    cases += 1;
                }
            }
        }
    }
    // 2 books: 4 sizes of one weight and one of four, each twice, and one without double quantization.
    assert_eq!(cases, 2 * (2 * 8 + 1));
}

#[test]
fn books_are_those_of_bitsandbytes() {
    use super::code_book::Book;
    let fixture = Fixture::read();
    for book in [Book::Nf4, Book::Fp4] {
        let expected = fixture.floats(&format!("{}.quant_map", book.name()));
        assert_eq!(bits(book.numbers()), bits(expected), "{book:?}");
    }
    assert_eq!(
        bits(dynamic::code_book()),
        bits(fixture.floats("nested.quant_map"))
    );
}

#[test]
fn magnitudes_in_8_bits_are_those_of_bitsandbytes() {
    let fixture = Fixture::read();
    let magnitudes = fixture.floats("dynamic.magnitudes");
    let offset = fixture.floats("dynamic.offset")[0];
    let mut codes = vec![0; magnitudes.len()];
    let mut scales = vec![0.0; magnitudes.len() / dynamic::BLOCK];
    dynamic::quantize(magnitudes, offset, &mut codes, &mut scales).expect("finite");
    assert_eq!(codes, bytes(fixture.get("dynamic.codes")).expect("bytes"));
    assert_eq!(bits(&scales), bits(fixture.floats("dynamic.absmax")));
    let numbers = dynamic::dequantized(&codes, &scales, offset);
    assert_eq!(bits(&numbers), bits(fixture.floats("dynamic.numbers")));
}

#[test]
fn bytes_by_row_are_those_of_bitsandbytes() {
    let fixture = Fixture::read();
    for name in ["plain", "bf16", "f16", "rest"] {
        let weight = fixture.get(&format!("{name}.weight"));
        let quantized = QuantizedWeight::quantize(weight, Scheme::Int8Dynamic).expect("it fits");
        let Storage::Int8 { codes, scales } = &quantized.storage else {
            panic!("bytes")
        };
        assert_same(codes, fixture.get(&format!("{name}.int8.codes")), name);
        let largest = fixture.floats(&format!("{name}.int8.absmax"));
        let expected: Vec<f32> = largest.iter().map(|x| x / 127.0).collect();
        assert_eq!(
            bits(elements(scales).expect("floats")),
            bits(&expected),
            "{name}"
        );
    }
}

#[test]
fn eight_bit_floats_are_those_of_torch() {
    let fixture = Fixture::read();
    let numbers = fixture.floats("fp8.numbers");
    let expected = bytes(fixture.get("fp8.codes")).expect("bytes");
    for (x, code) in numbers.iter().zip(expected) {
        // Beyond 464 torch makes NaN of what is the largest number here.
        let expected = if x.abs() <= 464.0 {
            *code
        } else {
            0x7E | code & 0x80
        };
        assert_eq!(fp8::encode(*x), expected, "{x}");
    }
    // libtorch itself reads every code as this does.
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let theirs = Tensor::from_slice(&codes)
        .view_dtype(Kind::Float8e4m3fn)
        .to_kind(Kind::Float);
    for (code, theirs) in codes.iter().zip(elements::<f32>(&theirs).expect("floats")) {
        let ours = fp8::decode(*code);
        assert!(
            ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
            "{code}"
        );
    }
}

#[test]
fn groups_are_those_of_compressed_tensors() {
    let fixture = Fixture::read();
    let weight = fixture.get("plain.weight");
    for (bits_of_code, group_size) in [(4, 32), (4, 128), (8, 32)] {
        for symmetric in [true, false] {
            let name = if symmetric { "sym" } else { "asym" };
            let key = format!("plain.int{bits_of_code}.{group_size}.{name}");
            let options = GroupOptions {
                bits: bits_of_code,
                group_size,
                symmetric,
            };
            let quantized =
                QuantizedWeight::quantize_groups(weight, options, crate::GroupScales::Float);
            let quantized = quantized.expect("it fits");
            let Storage::Grouped {
                codes,
                scales,
                offsets,
                ..
            } = &quantized.storage
            else {
                panic!("groups")
            };
            assert_same(scales, fixture.get(&format!("{key}.scale")), &key);
            // Theirs are signed, one a byte.
            let middle = if bits_of_code == 4 { 8 } else { 128i64 };
            let expected = fixture.get(&format!("{key}.codes")).to_kind(Kind::Int64) + middle;
            let found = match bits_of_code {
                4 => Tensor::stack(
                    &[
                        codes.bitwise_and(15),
                        codes.bitwise_right_shift_tensor_scalar(4),
                    ],
                    -1,
                )
                .flatten(-2, -1)
                .to_kind(Kind::Int64),
                _ if symmetric => codes.to_kind(Kind::Int64) + 128,
                _ => codes.to_kind(Kind::Int64),
            };
            assert_eq!(found, expected, "{key}");
            if let Some(offsets) = offsets {
                let zero = fixture.get(&format!("{key}.zero")).to_kind(Kind::Float) + middle as f64;
                assert_same(offsets, &-(zero * &**scales), &key);
            }
            let numbers = format!("{key}.numbers");
            if fixture.has(&numbers) {
                let (found, expected) = (
                    quantized.dequantize(Kind::Float).expect("memory"),
                    fixture.get(&numbers),
                );
                if symmetric {
                    assert_same(&found, expected, &numbers);
                } else {
                    let step = scales
                        .unsqueeze(-1)
                        .expand([24, -1, group_size as i64], false);
                    let bound = step.reshape([24, 128]) * (256.0 * f64::from(f32::EPSILON));
                    let within = (found - expected).abs().le_tensor(&bound);
                    assert!(bool::try_from(within.all()).expect("one"), "{numbers}");
                }
            }
        }
    }
}

#[test]
fn rows_of_8_bit_floats_are_those_of_compressed_tensors() {
    let fixture = Fixture::read();
    let weight = fixture.get("plain.weight");
    let quantized = QuantizedWeight::quantize(weight, Scheme::Fp8).expect("it fits");
    let Storage::Fp8 { codes, scales } = &quantized.storage else {
        panic!("floats")
    };
    assert_same(codes, fixture.get("plain.fp8.codes"), "codes");
    assert_same(
        scales,
        &fixture.get("plain.fp8.scale").flatten(0, -1),
        "scales",
    );
}
