//! Matrix products by the faster of the libraries that libtorch has inside.
//!
//! For fp32 on a CPU libtorch calls MKL. On AMD processors oneDNN, which lies in the same libtorch, is
//! 8 to 14 % faster (Zen 4, 2 cores: 220–227 against 195–208 GFLOP/s at 2048 rows), so it is taken
//! there. Sums are in another order, so results differ by rounding.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, check};
use crate::ffi;
use crate::function::handle;

/// Which library multiplies fp32 matrices on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum ProductLibrary {
    /// oneDNN on an AMD processor, libtorch's choice elsewhere.
    #[default]
    Auto = 0,
    /// oneDNN.
    OneDnn = 1,
    /// What libtorch itself calls (MKL, OpenBLAS, Accelerate).
    Torch = 2,
}

static CHOICE: AtomicU8 = AtomicU8::new(ProductLibrary::Auto as u8);

/// Sets the library for the whole process.
pub fn set_library(library: ProductLibrary) {
    CHOICE.store(library as u8, Ordering::Relaxed);
}

/// The library that [`mm_into`] takes for fp32 on the CPU, never `Auto`.
pub fn library() -> ProductLibrary {
    // SAFETY: a constant of the build.
    let available = || unsafe { ffi::od_onednn_available() != 0 };
    match CHOICE.load(Ordering::Relaxed) {
        1 => ProductLibrary::OneDnn,
        2 => ProductLibrary::Torch,
        _ => {
            static AUTO: OnceLock<bool> = OnceLock::new();
            if *AUTO.get_or_init(|| is_amd() && available()) {
                ProductLibrary::OneDnn
            } else {
                ProductLibrary::Torch
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

/// `out = left · right`, or `out += left · right` where `accumulate`, for matrices `(n, k)` and `(k, m)`
/// and a contiguous `(n, m)`.
///
/// `left` and `right` may be transposed views. Not recorded for backward.
///
/// # Errors
/// [`Error::BadArgument`] if shapes or dtypes do not fit, and libtorch's own.
pub fn mm_into(out: &Tensor, left: &Tensor, right: &Tensor, accumulate: bool) -> Result<()> {
    let (l, r, o) = (left.size(), right.size(), out.size());
    let fits = match (l.as_slice(), r.as_slice()) {
        (&[n, k], &[k2, m]) => k == k2 && o == [n, m],
        _ => false,
    };
    let kind = left.kind();
    if !fits || right.kind() != kind || out.kind() != kind || !out.is_contiguous() {
        return Err(Error::BadArgument {
            operation: "a matrix product".to_owned(),
            message: format!(
                "{kind:?} {l:?} times {:?} {r:?} into {:?} {o:?}: expected (n, k) times (k, m) into a \
                 contiguous (n, m), all of one dtype",
                right.kind(),
                out.kind()
            ),
        });
    }
    let one_dnn = kind == Kind::Float
        && out.device() == Device::Cpu
        && l.iter().chain(&r).all(|n| *n > 0)
        && library() == ProductLibrary::OneDnn;
    if one_dnn {
        let beta = if accumulate { 1.0 } else { 0.0 };
        // SAFETY: three valid handles; the shim writes to the elements of `out` only.
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
