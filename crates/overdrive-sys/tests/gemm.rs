//! Matrix products by each library: equal results up to rounding, transposed views, accumulation, errors.
//! A test target of its own, because the library is a setting of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_sys::gemm::{GemmLibrary, library, mm_into, set_library};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

// One test function: the library is a setting of the process.
#[test]
fn both_libraries_multiply_matrices_and_their_transposes_and_add() {
    for choice in [GemmLibrary::Torch, GemmLibrary::OneDnn] {
        set_library(choice);
        assert_eq!(library(), choice);
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
    assert_ne!(library(), GemmLibrary::Auto);

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
