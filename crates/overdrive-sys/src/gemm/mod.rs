//! Matrix products by the faster of the GEMM libraries inside libtorch.
//!
//! For fp32 on a CPU libtorch calls MKL; oneDNN, which the same libtorch contains, is faster for some shapes. On
//! AMD processors it is 8 to 14 % faster for nearly all (Zen 4, 2 cores: 220–227 against 195–208 GFLOP/s at 2048
//! rows), on Intel's for few: on a Sapphire Rapids 2048 × 384 × 384 runs at 302 GFLOP/s in oneDNN and 234 in MKL,
//! 2048 × 384 × 1024 at 304 and 326. So the library is chosen by the shape, from a [`LibraryTable`] that is
//! measured once for a processor and kept in the user's cache.
//!
//! The libraries add in different orders, so their results differ by rounding. The choice therefore never
//! changes while the stored table exists: a resumed run multiplies as the interrupted one did. The environment
//! variable `OVERDRIVE_GEMM` (`onednn`, `torch` or `auto`) forces one library for all shapes, without a
//! measurement.

mod library_table;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use tch::{Device, Kind, Tensor};

pub use library_table::LibraryTable;

use crate::error::{Result, check};
use crate::ffi;
use crate::function::handle;

/// The environment variable that sets the library.
const VARIABLE: &str = "OVERDRIVE_GEMM";

/// Matmuls with fewer multiplications are not worth a table lookup; they use the processor's default library, and do
/// not cause a measurement.
const MIN_PRODUCT: i64 = 1 << 24;

/// The library that multiplies fp32 matrices on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum GemmLibrary {
    /// The faster one for the shape: that of the [`LibraryTable`]; where it has none, oneDNN on an AMD
    /// processor and libtorch's choice elsewhere. The default.
    #[default]
    Auto = 0,
    /// oneDNN.
    OneDnn = 1,
    /// The library that libtorch itself calls (MKL, OpenBLAS, Accelerate).
    Torch = 2,
}

impl GemmLibrary {
    /// Returns the library of this name: `auto`, `onednn` or `torch`.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] for another name.
    pub fn from_name(name: &str) -> overdrive_core::Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "auto" | "" => Ok(Self::Auto),
            "onednn" => Ok(Self::OneDnn),
            "torch" => Ok(Self::Torch),
            _ => Err(overdrive_core::Error::option(
                VARIABLE,
                name,
                "auto, onednn or torch",
            )),
        }
    }

    /// Returns `true` if libtorch can multiply fp32 matrices with this library on this processor. It uses oneDNN only
    /// on processors that compute bf16, on x86-64 those with AVX-512.
    pub fn is_available(self) -> bool {
        self != Self::OneDnn || one_dnn_available()
    }
}

/// Stands for [`VARIABLE`] until the program sets a library.
const UNSET: u8 = u8::MAX;
static CHOICE: AtomicU8 = AtomicU8::new(UNSET);

/// Sets the library for the process; it takes precedence over the environment variable.
pub fn set_library(library: GemmLibrary) {
    CHOICE.store(library as u8, Ordering::Relaxed);
}

/// Returns the library that was set for the process; [`GemmLibrary::Auto`] if none was.
///
/// # Errors
/// [`crate::Error::Common`] if `OVERDRIVE_GEMM` is not the name of a library.
pub fn library() -> Result<GemmLibrary> {
    static NAMED: OnceLock<String> = OnceLock::new();
    match CHOICE.load(Ordering::Relaxed) {
        0 => Ok(GemmLibrary::Auto),
        1 => Ok(GemmLibrary::OneDnn),
        2 => Ok(GemmLibrary::Torch),
        // Read once, because the environment costs more than a small product.
        _ => {
            Ok(GemmLibrary::from_name(NAMED.get_or_init(|| {
                std::env::var(VARIABLE).unwrap_or_default()
            }))?)
        }
    }
}

/// Returns the library that [`mm_into`] uses for the product of these fp32 matrices on the CPU; never
/// [`GemmLibrary::Auto`].
///
/// # Errors
/// As [`library`], and [`crate::Error::Common`] if the library is not [available](GemmLibrary::is_available).
pub fn library_for(left: &Tensor, right: &Tensor) -> Result<GemmLibrary> {
    let chosen = library()?;
    if !chosen.is_available() {
        let expected = "auto or torch, because libtorch does not use oneDNN on this processor";
        return Err(overdrive_core::Error::option(VARIABLE, "onednn", expected).into());
    }
    if chosen != GemmLibrary::Auto {
        return Ok(chosen);
    }
    if let (&[n, k], &[_, m]) = (left.size().as_slice(), right.size().as_slice())
        && n.saturating_mul(k).saturating_mul(m) >= MIN_PRODUCT
    {
        let transposed = |tensor: &Tensor| tensor.stride().first() == Some(&1);
        let table = LibraryTable::of_this_processor();
        return Ok(table.library((n, k, m), transposed(left), transposed(right)));
    }
    Ok(default_library())
}

/// Returns the library that is faster for most shapes on this processor.
fn default_library() -> GemmLibrary {
    // cpuid traps in virtual machines, which costs microseconds: it is asked once.
    static DEFAULT: OnceLock<GemmLibrary> = OnceLock::new();
    *DEFAULT.get_or_init(|| match is_amd() && one_dnn_available() {
        true => GemmLibrary::OneDnn,
        false => GemmLibrary::Torch,
    })
}

/// Returns `true` if libtorch uses oneDNN for matmuls on this processor.
fn one_dnn_available() -> bool {
    // libtorch requires the instructions of bf16 for fp32 too, and refuses processors without them, such as AMD's
    // before Zen 4. Its conditions differ between versions and processors, so a matmul is tried.
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        // SAFETY: a constant of the build.
        let is_built = unsafe { ffi::od_onednn_available() != 0 };
        // A separate thread has no autocast, no dispatch mode and no gradient recording of the caller.
        is_built
            && std::thread::spawn(trial_product)
                .join()
                .is_ok_and(|tried| tried.is_ok())
    })
}

fn trial_product() -> Result<()> {
    let one = Tensor::f_ones([1, 1], (Kind::Float, Device::Cpu))?;
    multiply(GemmLibrary::OneDnn, &one.f_zeros_like()?, &one, &one, false)
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

/// Returns the dtype in which matrices of `kind` are best multiplied: f32 for bf16 and f16 on a processor without
/// instructions for them. libtorch emulates those, with AVX-512 at a third and with AVX2 at a fifth of the speed of f32.
pub fn product_kind(device: Device, kind: Kind) -> Kind {
    let has_instructions = match (device, kind) {
        (Device::Cpu, Kind::BFloat16) => has_bf16(),
        (Device::Cpu, Kind::Half) => has_f16(),
        _ => true,
    };
    if has_instructions { kind } else { Kind::Float }
}

#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(target_arch = "x86_64")]
fn has_f16() -> bool {
    is_x86_feature_detected!("avx512fp16")
}

#[cfg(target_arch = "aarch64")]
fn has_bf16() -> bool {
    std::arch::is_aarch64_feature_detected!("bf16")
}

#[cfg(target_arch = "aarch64")]
fn has_f16() -> bool {
    std::arch::is_aarch64_feature_detected!("fp16")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_bf16() -> bool {
    false
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_f16() -> bool {
    false
}

/// The elements of `right` that are converted at a time: enough for a product at full speed, few enough for the last
/// cache.
const CONVERTED: i64 = 1 << 20;

/// Computes the product in `kind`, by some columns of `right` at a time.
fn multiply_in(
    kind: Kind,
    out: &Tensor,
    left: &Tensor,
    right: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let left = left.f_to_kind(kind)?;
    let (inner, columns) = right.size2()?;
    let count = (CONVERTED / inner.max(1)).max(1);
    for first in (0..columns).step_by(count.unsigned_abs() as usize) {
        let count = count.min(columns - first);
        let right = right.f_narrow(1, first, count)?.f_to_kind(kind)?;
        let mut columns = out.f_narrow(1, first, count)?;
        let part = Tensor::f_empty([left.size()[0], count], (kind, out.device()))?;
        if accumulate {
            part.shallow_clone().f_copy_(&columns)?;
        }
        mm_into(&part, &left, &right, accumulate)?;
        columns.f_copy_(&part)?;
    }
    Ok(())
}

/// Computes `out = left · right`, or `out += left · right` if `accumulate`, for matrices `(n, k)` and
/// `(k, m)` and a contiguous `out` of shape `(n, m)`.
///
/// All three have one dtype and device. `left` and `right` may be transposed views. The operation is not
/// recorded for backward. Products are computed in [`product_kind`], whose results are rounded once.
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
    let kind = left.f_kind()?;
    for (name, tensor) in [("right", right), ("out", out)] {
        let other = tensor.f_kind()?;
        if other != kind {
            let expected = format!("{kind:?} as `left`");
            return Err(overdrive_core::Error::dtype(name, other, expected).into());
        }
    }
    let has_elements = l.iter().chain(&r).all(|size| *size > 0);
    let computed = product_kind(out.device(), kind);
    if computed != kind && has_elements {
        return multiply_in(computed, out, left, right, accumulate);
    }
    // libtorch's own callers of this function leave out matrices without elements.
    let has_choice = kind == Kind::Float && out.device() == Device::Cpu && has_elements;
    let library = match has_choice {
        true => library_for(left, right)?,
        false => GemmLibrary::Torch,
    };
    multiply(library, out, left, right, accumulate)
}

/// Computes the product by `library`; the operands are checked.
fn multiply(
    library: GemmLibrary,
    out: &Tensor,
    left: &Tensor,
    right: &Tensor,
    accumulate: bool,
) -> Result<()> {
    if library == GemmLibrary::OneDnn {
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
