//! Flushing of subnormal (denormal) numbers to zero.
//!
//! Each instruction with an operand or a result between 0 and 2⁻¹²⁶ (f32; 2⁻¹⁰²² in f64) takes Intel's processors
//! over a hundred cycles instead of four. Training produces such numbers: the softmax weights of keys that a query
//! ignores, their gradients, the second moments of an optimizer. In the mode that this module sets, the processor
//! reads them as zero and writes zero in their place; all other results are the same. Overdrive's kernels always run
//! in this mode ([`flushing_denormals`]); libtorch's operators do after [`set_flush_denormals`].
//!
//! The mode belongs to a thread: the bits FTZ and DAZ of MXCSR on x86-64, the bit FZ of FPCR on aarch64. On other
//! processors these functions change nothing. On Linux, a new thread has the mode of the thread that starts it.
//!
//! # Rust and the mode
//!
//! Rust, like C++ without `FENV_ACCESS`, is compiled for the default mode, and its reference requires that code runs
//! in no other (see `core::arch::x86_64::_mm_setcsr`). The mode is set by inline assembly that counts as a memory
//! access, so the compiler moves neither the arithmetic between a kernel's loads and stores nor the result of a
//! closure across it. What it may still do, as with PyTorch's `set_flush_denormal`, is compute a constant ahead of
//! time or move an operation on registers across the switch: a subnormal result is then kept instead of flushed. No
//! other result changes.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::threads::on_each_thread;

/// Runs `body` in the mode on this thread, and restores the mode that the thread had, also after a panic.
///
/// It costs about 25 nanoseconds, or 8 if the mode is already set.
///
/// ```
/// use std::hint::black_box;
///
/// use overdrive_sys::denormals::{flushes_denormals, flushing_denormals};
///
/// let half_of_the_least = || black_box(f32::MIN_POSITIVE) * black_box(0.5);
/// let flushed = flushing_denormals(|| flushes_denormals().then(half_of_the_least));
/// assert!(flushed.is_none_or(|flushed| flushed == 0.0)); // `None` where the processor has no such mode
/// assert!(half_of_the_least() > 0.0);
/// ```
#[inline]
pub fn flushing_denormals<R>(body: impl FnOnce() -> R) -> R {
    let _restores = Guard::new();
    // Else the compiler may compute a result that is in a register after the mode is restored.
    black_box(body())
}

thread_local! {
    /// `true` inside of [`keeping_denormals`].
    static KEEPS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` without the mode on this thread, even if [`flushing_denormals`] is called inside it, and restores the
/// mode that the thread had, also after a panic. Use it for results that must match another library's bit for bit,
/// such as those of codecs.
pub fn keeping_denormals<R>(body: impl FnOnce() -> R) -> R {
    struct Restores {
        removed: control::Word,
        kept: bool,
    }
    impl Drop for Restores {
        fn drop(&mut self) {
            KEEPS.set(self.kept);
            if self.removed != 0 {
                control::write(control::read() | self.removed);
            }
        }
    }
    let before = control::read();
    let removed = control::FLUSH & before;
    if removed != 0 {
        control::write(before & !removed);
    }
    let _restores = Restores {
        removed,
        kept: KEEPS.replace(true),
    };
    black_box(body())
}

/// Sets or clears the mode on this thread and on the threads that run libtorch's operators for it; returns `false` if
/// the processor has no such mode.
///
/// It is the counterpart of `torch.set_flush_denormal`, which reaches the calling thread only. Call it when a program
/// starts. OpenMP has a set of threads for each thread that computes; threads that are started later (also those of the
/// autograd engine and of operators that run side by side) have the mode of the thread that starts them, but threads
/// that other threads have started before are not reached. Inside a parallel region it acts on this thread alone.
///
/// ```
/// // As the first thing in `main`.
/// overdrive_sys::denormals::set_flush_denormals(true);
/// ```
pub fn set_flush_denormals(flush: bool) -> bool {
    on_each_thread(&|| {
        let others = control::read() & !control::FLUSH;
        control::write(if flush {
            others | control::FLUSH
        } else {
            others
        });
    });
    control::FLUSH != 0
}

/// Returns `true` if this thread treats subnormal numbers as zero.
#[inline]
pub fn flushes_denormals() -> bool {
    control::FLUSH != 0 && control::read() & control::FLUSH == control::FLUSH
}

/// Returns `true` if an operation on this thread, or on one of libtorch's threads that work for it, has had a
/// subnormal operand since the last call, and clears the record: the processor's flag DE of MXCSR.
///
/// Operations in the mode do not count, because they read zero. `None` means that the processor keeps no such record;
/// only x86-64 does. Use it to diagnose a run that is slower than expected on an Intel processor.
pub fn take_subnormal_operands() -> Option<bool> {
    let seen = AtomicBool::new(false);
    on_each_thread(&|| {
        let state = control::read();
        if state & control::SUBNORMAL_OPERAND != 0 {
            seen.store(true, Ordering::Relaxed);
            control::write(state & !control::SUBNORMAL_OPERAND);
        }
    });
    (control::SUBNORMAL_OPERAND != 0).then(|| seen.into_inner())
}

/// The mode, until it is dropped. It stays inside [`flushing_denormals`], and so on its thread.
struct Guard {
    /// The bits that were not set before.
    added: control::Word,
}

impl Guard {
    #[inline(always)]
    fn new() -> Self {
        let before = control::read();
        let added = match KEEPS.get() {
            true => 0,
            false => control::FLUSH & !before,
        };
        // Writing takes longer than reading, and kernels call each other.
        if added != 0 {
            control::write(before | added);
        }
        Guard { added }
    }
}

impl Drop for Guard {
    #[inline(always)]
    fn drop(&mut self) {
        if self.added != 0 {
            // Read anew, because the register also holds the flags that the operations in between have raised.
            control::write(control::read() & !self.added);
        }
    }
}

/// The control register of the floating-point unit: `read`, `write`, and the bits in it that are used here.
#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    pub(super) type Word = u32;
    /// Flush-to-zero (bit 15) for results, and denormals-are-zero (bit 6) for operands.
    pub(super) const FLUSH: Word = 1 << 15 | 1 << 6;
    /// DE: an operand was subnormal. It stays until it is cleared.
    pub(super) const SUBNORMAL_OPERAND: Word = 1 << 1;

    // Assembly, because `_mm_getcsr` and `_mm_setcsr` are deprecated in its favour.

    #[inline(always)]
    pub(super) fn read() -> Word {
        let mut word: Word = 0;
        // SAFETY: it stores four bytes to `word`.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
        }
        word
    }

    #[inline(always)]
    pub(super) fn write(word: Word) {
        // SAFETY: `word` was read from the register, and the bits that are changed exist in each x86-64 processor, so
        // it does not fault. What it means for compiled code is in the documentation of the module.
        unsafe {
            asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    pub(super) type Word = u64;
    /// FZ, for operands and results of f32 and f64. (FZ16 is for arithmetic in f16, which is not used.)
    pub(super) const FLUSH: Word = 1 << 24;
    /// There is none: IDC is raised for the operands that the mode reads as zero.
    pub(super) const SUBNORMAL_OPERAND: Word = 0;

    #[inline(always)]
    pub(super) fn read() -> Word {
        let word: Word;
        // SAFETY: it reads a register. Without `nomem`, so that loads and stores stay on their side.
        unsafe {
            asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags));
        }
        word
    }

    #[inline(always)]
    pub(super) fn write(word: Word) {
        // SAFETY: `word` was read from the register, and only FZ is changed. What it means for compiled code is in the
        // documentation of the module.
        unsafe {
            asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags));
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub(super) type Word = u32;
    pub(super) const FLUSH: Word = 0;
    pub(super) const SUBNORMAL_OPERAND: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_: Word) {}
}
