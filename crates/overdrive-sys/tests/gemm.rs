//! Matrix products by each library: equal results up to rounding, transposed views, accumulation, errors.
//! A test target of its own, because the library is a setting of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Mutex;

use overdrive_sys::gemm::{GemmLibrary, LibraryTable, library, library_for, mm_into, set_library};
use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Held by the tests that multiply: one of them changes the library, which is a setting of the process.
static LIBRARY: Mutex<()> = Mutex::new(());

#[test]
fn both_libraries_multiply_matrices_and_their_transposes_and_add() {
    let _library = LIBRARY.lock().unwrap();
    for choice in [GemmLibrary::Torch, GemmLibrary::OneDnn] {
        set_library(choice);
        assert_eq!(library().unwrap(), choice);
        if !choice.is_available() {
            let one = Tensor::ones([1, 1], F32);
            let error = mm_into(&one.zeros_like(), &one, &one, false).unwrap_err();
            assert_eq!(
                error.to_string(),
                "`OVERDRIVE_GEMM` is onednn; it must be auto or torch, because libtorch does not use oneDNN on this \
                 processor"
            );
            continue;
        }
        for (n, k, m) in [(1, 1, 1), (3, 5, 7), (64, 48, 80), (0, 4, 5), (4, 0, 5)] {
            let (a, b) = (Tensor::randn([n, k], F32), Tensor::randn([k, m], F32));
            let expected = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
            let stored_transposed = |t: &Tensor| t.tr().contiguous().tr();
            for (left, right) in [
                (a.shallow_clone(), b.shallow_clone()),
                (stored_transposed(&a), b.shallow_clone()),
                (a.shallow_clone(), stored_transposed(&b)),
                (stored_transposed(&a), stored_transposed(&b)),
            ] {
                let out = Tensor::full([n, m], f64::NAN, F32);
                mm_into(&out, &left, &right, false).unwrap();
                let close = |factor: f64| {
                    let difference = out.to_kind(Kind::Double) - &expected * factor;
                    difference.numel() == 0 || difference.abs().max().double_value(&[]) < 1e-4
                };
                assert!(close(1.0), "{choice:?} {n} {k} {m}");
                mm_into(&out, &left, &right, true).unwrap();
                assert!(close(2.0), "{choice:?} {n} {k} {m}, added");
            }
        }
    }
    set_library(GemmLibrary::Auto);
    let (a, b) = (Tensor::ones([2, 3], F32), Tensor::ones([3, 4], F32));
    let chosen = library_for(&a, &b).unwrap();
    assert!(chosen != GemmLibrary::Auto && chosen.is_available());
    mm_into(&Tensor::zeros([2, 4], F32), &a, &b, false).unwrap();

    let (a, b) = (Tensor::zeros([2, 3], F32), Tensor::zeros([4, 5], F32));
    let error = mm_into(&Tensor::zeros([2, 5], F32), &a, &b, false).unwrap_err();
    assert!(
        error.to_string().contains("matrices (n, k) and (k, m)"),
        "{error}"
    );
    let double = Tensor::zeros([3, 5], (Kind::Double, Device::Cpu));
    let error = mm_into(&Tensor::zeros([2, 5], F32), &a, &double, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`right` is Double; it must be Float as `left`"
    );
}

/// On a processor without instructions for them, they are computed in f32, by several blocks of columns here.
#[test]
fn products_in_half_precision_are_those_of_f32_rounded_once() {
    let _library = LIBRARY.lock().unwrap();
    let (n, k, m) = (5, 700, 3_100);
    for (kind, epsilon) in [(Kind::BFloat16, 1.0 / 256.0), (Kind::Half, 1.0 / 2048.0)] {
        let a = Tensor::randn([n, k], F32).to_kind(kind);
        let b = Tensor::randn([m, k], F32).to_kind(kind).tr();
        let wide = |t: &Tensor| t.to_kind(Kind::Double);
        let exact = wide(&a).matmul(&wide(&b));
        let off = |out: &Tensor, factor: f64| {
            let difference = (wide(out) - &exact * factor).abs();
            // Relative to the largest result: the sum in f32 has an error too.
            (difference / exact.abs().max()).max().double_value(&[])
        };
        let out = Tensor::full([n, m], f64::NAN, (kind, Device::Cpu));
        mm_into(&out, &a, &b, false).unwrap();
        assert!(off(&out, 1.0) < epsilon, "{kind:?}");
        mm_into(&out, &a, &b, true).unwrap();
        assert!(off(&out, 2.0) < 3.0 * epsilon, "{kind:?}, added");
    }
}

#[test]
fn a_dtype_that_tch_does_not_know_is_an_error() {
    /// `at::ScalarType::UInt32`.
    const UINT32: i64 = 28;
    let unsigned = || {
        let arguments = [
            Value::Ints(&[2, 2]),
            Value::Int(UINT32),
            Value::None,
            Value::Device(Device::Cpu),
        ];
        let made = call("aten::empty", "memory_format", &arguments).unwrap();
        made.into_iter().next().unwrap().into_tensor().unwrap()
    };
    let floats = || Tensor::zeros([2, 2], F32);
    assert!(mm_into(&floats(), &unsigned(), &floats(), false).is_err());
    assert!(mm_into(&floats(), &floats(), &unsigned(), false).is_err());
    assert!(mm_into(&unsigned(), &floats(), &floats(), false).is_err());
}

fn figures(figures: &[(&str, f64)]) -> Vec<(String, f64)> {
    let owned = figures
        .iter()
        .map(|(name, ratio)| ((*name).to_owned(), *ratio));
    owned.collect()
}

#[test]
fn each_class_of_shapes_gets_the_library_that_was_measured_to_be_faster() {
    use GemmLibrary::{OneDnn, Torch};
    // libtorch's time divided by oneDNN's, as on a Sapphire Rapids.
    let ratios = figures(&[
        ("forward 384 384", 1.29),
        ("forward 384 1024", 0.93),
        ("forward 1024 384", 1.02),
        ("weight-gradient 384 4096", 1.2),
    ]);
    let table = LibraryTable::new(Torch, &ratios);
    let forward = |rows, inputs, outputs| table.library((rows, inputs, outputs), false, true);
    assert_eq!(forward(2048, 384, 384), OneDnn);
    assert_eq!(forward(300, 512, 128), OneDnn); // of the same class
    assert_eq!(forward(2048, 384, 1024), Torch);
    assert_eq!(forward(2048, 1024, 384), Torch); // 2 % faster is noise
    assert_eq!(forward(2048, 384, 8192), Torch); // not measured
    for few in [(255, 384, 384), (2048, 384, 127), (2048, 16, 384)] {
        assert_eq!(forward(few.0, few.1, few.2), Torch, "{few:?}");
    }
    // Of the weight (8192, 384): outputs x rows, rows x inputs.
    assert_eq!(table.library((8192, 2048, 384), true, false), OneDnn);
    assert_eq!(table.library((384, 2048, 8192), true, false), Torch);
    assert_eq!(table.library((2048, 384, 384), false, false), Torch);
    assert_eq!(table.library((384, 384, 384), true, true), Torch);

    let table = LibraryTable::new(OneDnn, &ratios);
    assert_eq!(table.library((2048, 384, 1024), false, true), Torch);
    assert_eq!(table.library((2048, 384, 384), false, true), OneDnn);
    assert_eq!(table, LibraryTable::new(OneDnn, &ratios));
}

#[test]
fn a_library_is_named_as_in_the_environment() {
    assert_eq!(
        GemmLibrary::from_name("OneDNN").unwrap(),
        GemmLibrary::OneDnn
    );
    assert_eq!(GemmLibrary::from_name("torch").unwrap(), GemmLibrary::Torch);
    assert_eq!(GemmLibrary::from_name("").unwrap(), GemmLibrary::Auto);
    assert_eq!(
        GemmLibrary::from_name("mkl").unwrap_err().to_string(),
        "`OVERDRIVE_GEMM` is mkl; it must be auto, onednn or torch"
    );
}
