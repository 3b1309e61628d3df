//! Process-wide settings. One test, so that no other test is affected by them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_sys::cuda::CudaLibrary;
use overdrive_sys::matmul::{self, MatmulPrecision, Tf32};
use overdrive_sys::{build_info, cuda, memory, threads};
use tch::Device;

#[test]
fn settings_are_read_back_as_they_were_set() {
    for precision in [
        MatmulPrecision::High,
        MatmulPrecision::Medium,
        MatmulPrecision::Highest,
    ] {
        matmul::set_precision(precision).unwrap();
        assert_eq!(matmul::precision().unwrap(), precision);
    }
    for allow in [
        Tf32 {
            matmul: true,
            cudnn: false,
        },
        Tf32 {
            matmul: false,
            cudnn: true,
        },
    ] {
        matmul::set_tf32(allow).unwrap();
        assert_eq!(matmul::tf32().unwrap(), allow);
    }

    threads::set_intra_op(1).unwrap();
    assert_eq!(threads::intra_op(), 1);
    assert!(
        threads::set_intra_op(0)
            .unwrap_err()
            .to_string()
            .contains("at least 1")
    );
    assert!(threads::inter_op() >= 1);

    // The version of the headers that the shim was compiled with.
    let found = overdrive_build::libtorch().unwrap().version.unwrap();
    let running = build_info::libtorch_version().unwrap();
    assert!(running.starts_with(&found), "{running} {found}");
    assert!(!build_info::cpu_capability().unwrap().is_empty());

    match cuda::library().unwrap() {
        CudaLibrary::Loaded { path } => assert!(path.contains("libtorch_cuda"), "{path}"),
        CudaLibrary::Absent { detail } => {
            assert!(!detail.is_empty());
            let error = memory::stats(Device::Cuda(0)).unwrap_err().to_string();
            assert!(error.contains("no cuda back end is loaded"), "{error}");
            let error = cuda::compute_capability(0).unwrap_err().to_string();
            assert!(error.contains("CUDA"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}
