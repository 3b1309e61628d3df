//! The TF32 switches: one test, because they belong to the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_precision::Precision;
use overdrive_precision::tf32::{self, MatmulPrecision};

#[test]
fn tf32_is_switched_for_the_process() {
    for allowed in [true, false] {
        tf32::allow(allowed).unwrap();
        assert_eq!(tf32::is_allowed().unwrap(), allowed);
    }
    Precision::Tf32.apply().unwrap();
    assert!(tf32::is_allowed().unwrap());
    Precision::Fp32.apply().unwrap();
    assert!(!tf32::is_allowed().unwrap());
    tf32::set_float32_matmul_precision(MatmulPrecision::High).unwrap();
    assert_eq!(
        tf32::float32_matmul_precision().unwrap(),
        MatmulPrecision::High
    );
    tf32::set_float32_matmul_precision(MatmulPrecision::Highest).unwrap();
}
