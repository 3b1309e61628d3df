//! Matrix products by the faster of the GEMM libraries inside libtorch.
//!
//! For fp32 on a CPU libtorch calls MKL. On AMD processors oneDNN, which the same libtorch contains, is 8 to
//! 14 % faster (Zen 4, 2 cores: 220–227 against 195–208 GFLOP/s at 2048 rows), so it is used there. The
//! libraries add in different orders, so their results differ by rounding.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use tch::{Device, Kind, Tensor};

use crate::error::{Result, check};
use crate::ffi;
use crate::function::handle;

/// The library that multiplies fp32 matrices on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum GemmLibrary {
    /// oneDNN on an AMD processor, libtorch's choice elsewhere. The default.
    #[default]
    Auto = 0,
    /// oneDNN.
    OneDnn = 1,
    /// The library that libtorch itself calls (MKL, OpenBLAS, Accelerate).
    Torch = 2,
}

static CHOICE: AtomicU8 = AtomicU8::new(GemmLibrary::Auto as u8);

/// Sets the library for the process.
pub fn set_library(library: GemmLibrary) {
    CHOICE.store(library as u8, Ordering::Relaxed);
}

/// Returns the library that [`mm_into`] uses for fp32 on the CPU; never `Auto`.
pub fn library() -> GemmLibrary {
    // SAFETY: a constant of the build.
    let available = || unsafe { ffi::od_onednn_available() != 0 };
    match CHOICE.load(Ordering::Relaxed) {
        1 => GemmLibrary::OneDnn,
        2 => GemmLibrary::Torch,
        _ => {
            // cpuid traps in virtual machines, which costs microseconds: it is asked once.
            static AUTO: OnceLock<bool> = OnceLock::new();
            if *AUTO.get_or_init(|| is_amd() && available()) {
                GemmLibrary::OneDnn
            } else {
                GemmLibrary::Torch
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    // "AuthenticAMD", in the order of the registers.
    [leaf.ebx, leaf.edx, leaf.ecx] == [0x6874_7541, 0x6974_6e65, 0x444d_4163]
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

/// Computes `out = left · right`, or `out += left · right` if `accumulate`, for matrices `(n, k)` and
/// `(k, m)` and a contiguous `out` of shape `(n, m)`.
///
/// All three have one dtype and device. `left` and `right` may be transposed views. The operation is not
/// recorded for backward.
///
/// # Errors
/// [`crate::Error::Common`] if shapes or dtypes do not fit, and libtorch's errors.
pub fn mm_into(out: &Tensor, left: &Tensor, right: &Tensor, accumulate: bool) -> Result<()> {
    let (l, r, o) = (left.size(), right.size(), out.size());
    let fits = match (l.as_slice(), r.as_slice()) {
        (&[n, k], &[k2, m]) => k == k2 && o == [n, m],
        _ => false,
    };
    if !fits || !out.is_contiguous() {
        let expected = format!(
            "a contiguous (n, m) for the product of matrices (n, k) and (k, m); these have shapes \
             {l:?} and {r:?}"
        );
        return Err(overdrive_core::Error::shape("out", o, expected).into());
    }
    let kind = left.kind();
    for (name, tensor) in [("right", right), ("out", out)] {
        if tensor.kind() != kind {
            let expected = format!("{kind:?} as `left`");
            return Err(overdrive_core::Error::dtype(name, tensor.kind(), expected).into());
        }
    }
    // libtorch's own callers of this function leave out matrices without elements.
    let one_dnn = kind == Kind::Float
        && out.device() == Device::Cpu
        && l.iter().chain(&r).all(|n| *n > 0)
        && library() == GemmLibrary::OneDnn;
    if one_dnn {
        let beta = if accumulate { 1.0 } else { 0.0 };
        // SAFETY: three valid handles; the shim writes only to the elements of `out`.
        let status =
            unsafe { ffi::od_onednn_matmul(handle(left), handle(right), handle(out), beta, 1.0) };
        return check(status, "a matrix product by oneDNN");
    }
    let _same = if accumulate {
        out.shallow_clone().f_addmm_(left, right)?
    } else {
        left.f_mm_out(out, right)?
    };
    Ok(())
}
