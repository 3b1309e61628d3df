//! The mode in which subnormal numbers are zero, on this thread and on libtorch's.

use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_sys::denormals::{
    flushes_denormals, flushing_denormals, set_flush_denormals, take_subnormal_operands,
};
use overdrive_sys::threads::{intra_op, parallel_for, with_team};
use tch::{Device, Kind, Tensor};

/// Enough elements that libtorch divides them among all its threads.
const MANY: i64 = 1 << 20;

/// Returns how many of libtorch's products of 1e-30 and 1e-10 are not zero: each of its threads computes some.
fn kept_products() -> i64 {
    let products = Tensor::full([MANY], 1e-30, (Kind::Float, Device::Cpu)) * 1e-10;
    // Counted by the bits: a comparison could take them for zero itself.
    let bits = products.view_dtype(Kind::Int);
    bits.count_nonzero_dim_intlist([0].as_slice())
        .int64_value(&[])
}

/// Returns `false` where the processor has no such mode.
fn has_mode() -> bool {
    flushing_denormals(flushes_denormals)
}

#[test]
fn a_subnormal_number_is_zero_in_the_mode_and_kept_outside() {
    let product = || black_box(1e-30_f32) * black_box(1e-10);
    let operand = || black_box(1e-40_f32) * black_box(1e10);
    if has_mode() {
        assert_eq!(flushing_denormals(product), 0.0);
        assert_eq!(flushing_denormals(operand), 0.0);
    }
    assert!(!flushes_denormals());
    assert!(product() > 0.0 && operand() > 0.0);
}

#[test]
fn the_mode_is_restored_by_the_outermost_call_and_after_a_panic() {
    flushing_denormals(|| {
        flushing_denormals(|| ());
        assert_eq!(flushes_denormals(), has_mode());
        let panicked = catch_unwind(|| flushing_denormals(|| panic!("inside")));
        assert!(panicked.is_err());
        assert_eq!(flushes_denormals(), has_mode());
    });
    assert!(!flushes_denormals());
    let panicked = catch_unwind(|| flushing_denormals(|| panic!("outside")));
    assert!(panicked.is_err() && !flushes_denormals());
}

#[test]
fn every_thread_of_a_loop_is_in_the_mode_and_leaves_it() {
    let ranges = || {
        let in_mode = AtomicUsize::new(0);
        parallel_for(intra_op(), 1, |range| {
            if flushes_denormals() {
                in_mode.fetch_add(range.len(), Ordering::Relaxed);
            }
        });
        in_mode.into_inner()
    };
    let all = if has_mode() { intra_op() } else { 0 };
    // By OpenMP's threads, on one thread, and by those of a team.
    assert_eq!(ranges(), all);
    parallel_for(1, 1, |_| assert_eq!(flushes_denormals(), has_mode()));
    with_team(|| {
        assert_eq!(flushes_denormals(), has_mode());
        assert_eq!(ranges(), all);
        assert_eq!(flushes_denormals(), has_mode());
    });
    assert!(!flushes_denormals());
    assert_eq!(kept_products(), MANY);
}

#[test]
fn every_thread_leaves_the_mode_after_a_panic() {
    let panics = || parallel_for(intra_op(), 1, |_| panic!("a bad range"));
    for region in [
        catch_unwind(panics),
        catch_unwind(|| with_team(panics)),
        catch_unwind(AssertUnwindSafe(|| with_team(|| panic!("a bad body")))),
    ] {
        assert!(region.is_err());
        assert!(!flushes_denormals());
        assert_eq!(kept_products(), MANY);
    }
}

#[test]
fn the_switch_reaches_all_threads_of_libtorch_and_those_that_start_later() {
    assert_eq!(kept_products(), MANY);
    assert_eq!(set_flush_denormals(true), has_mode());
    let kept = if has_mode() { 0 } else { MANY };
    assert_eq!(kept_products(), kept);
    // A loop finds the mode, and leaves it as it was.
    parallel_for(intra_op(), 1, |_| ());
    with_team(|| parallel_for(intra_op(), 1, |_| ()));
    assert_eq!(kept_products(), kept);
    // Elsewhere a thread may begin in the default mode.
    if cfg!(target_os = "linux") {
        let of_a_new_thread = std::thread::spawn(kept_products).join().unwrap();
        assert_eq!(of_a_new_thread, kept);
    }
    set_flush_denormals(false);
    assert_eq!(kept_products(), MANY);
}

#[test]
fn the_processor_records_subnormal_operands_on_all_threads() {
    let subnormal = Tensor::full([MANY], 1e-40, (Kind::Float, Device::Cpu));
    let normal = Tensor::full([MANY], 1e-4, (Kind::Float, Device::Cpu));
    let Some(_) = take_subnormal_operands() else {
        return;
    };
    let _product = &normal * 2.0;
    assert_eq!(take_subnormal_operands(), Some(false));
    // The last quarter, which is not this thread's where there are others.
    let mixed = Tensor::cat(&[&normal, &normal, &normal, &subnormal], 0);
    take_subnormal_operands();
    let _product = &mixed * 2.0;
    assert_eq!(take_subnormal_operands(), Some(true));
    assert_eq!(take_subnormal_operands(), Some(false));
    set_flush_denormals(true);
    let _product = &mixed * 2.0;
    set_flush_denormals(false);
    assert_eq!(take_subnormal_operands(), Some(false));
}
