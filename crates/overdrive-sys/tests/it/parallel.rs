//! Parallel loops on libtorch's threads, and the elements of tensors as slices.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_core::panic_text;
use overdrive_sys::threads::{intra_op, parallel_for, with_team};
use overdrive_sys::{op, raw};
use tch::{Device, Kind, Tensor};

#[test]
fn every_index_is_visited_once_whatever_the_length_and_grain() {
    for len in [0, 1, 2, 7, 64, 1000, 1001] {
        for grain in [0, 1, 3, 100, 5000] {
            let seen: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            parallel_for(len, grain, |range| {
                for index in range {
                    seen[index].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn work_is_spread_over_the_threads_that_libtorch_has_and_short_work_is_not() {
    let threads = |len, grain| {
        let ids = Mutex::new(HashSet::new());
        parallel_for(len, grain, |_| {
            ids.lock().unwrap().insert(std::thread::current().id());
        });
        ids.into_inner().unwrap()
    };
    assert_eq!(threads(1 << 20, 1).len(), intra_op());
    assert_eq!(threads(100, 100).len(), 1);
}

#[test]
fn inside_a_parallel_region_work_stays_on_its_thread() {
    parallel_for(1 << 10, 1, |_| {
        let outer = std::thread::current().id();
        parallel_for(1 << 10, 1, |range| {
            assert_eq!(range, 0..1 << 10);
            assert_eq!(std::thread::current().id(), outer);
        });
    });
}

/// Lets the first and the last thread of a loop panic.
fn panics_reach_the_caller() {
    for bad in [0, 999] {
        let payload = catch_unwind(AssertUnwindSafe(|| {
            parallel_for(1000, 1, |range| {
                assert!(!range.contains(&bad), "index {bad} is bad")
            });
        }))
        .unwrap_err();
        assert_eq!(panic_text(&*payload), format!("index {bad} is bad"));
    }
}

#[test]
fn a_panic_on_any_thread_reaches_the_caller() {
    panics_reach_the_caller();
}

#[test]
#[allow(unsafe_code, reason = "the functions under test are unsafe")]
fn slices_are_the_elements_of_contiguous_cpu_tensors_only() {
    let x = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    // SAFETY: this thread alone has the tensor.
    unsafe {
        assert_eq!(
            raw::slice::<f32>(&x).unwrap(),
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        );
        raw::slice_mut::<f32>(&x).unwrap()[5] = -1.0;
        assert_eq!(x.double_value(&[1, 2]), -1.0);
        let dtype = raw::slice::<f64>(&x).unwrap_err().to_string();
        assert!(
            dtype.contains("expected a contiguous Double") && dtype.contains("Float"),
            "{dtype}"
        );
        let strides = raw::slice::<f32>(&x.tr()).unwrap_err().to_string();
        assert!(strides.contains("strides [1, 3]"), "{strides}");
        assert!(raw::slice::<f32>(&x.narrow(0, 0, 0)).unwrap().is_empty());
        let sparse = x.to_sparse(None, None::<i64>, None);
        let sparse = raw::slice::<f32>(&sparse).unwrap_err().to_string();
        assert!(sparse.contains("it is sparse"), "{sparse}");
        let undefined = raw::slice::<f32>(&Tensor::new()).unwrap_err().to_string();
        assert!(undefined.contains("reading the elements"), "{undefined}");
    }
}

#[test]
#[allow(unsafe_code, reason = "the functions under test are unsafe")]
fn slices_are_only_of_memory_that_holds_the_elements() {
    let x = Tensor::arange(6, (Kind::Float, Device::Cpu));
    // A tensor of 1000 elements over a storage of 6, as after the storage has shrunk.
    let arguments = [
        op::Value::Tensor(&x),
        op::Value::Ints(&[1000]),
        op::Value::Ints(&[1]),
        op::Value::Int(0),
    ];
    // SAFETY: the elements of the result are never read.
    let mut shrunk =
        unsafe { op::call_unchecked("inductor::_reinterpret_tensor", "", &arguments) }.unwrap();
    let shrunk = shrunk.remove(0).into_tensor().unwrap();
    let negated = x.internal_neg_view();
    let zeros = Tensor::internal_efficientzerotensor([3], (Kind::Float, Device::Cpu));
    let opaque = x.view([2, 3]).to_mkldnn();
    for (tensor, expected) in [
        (&shrunk, "do not lie in its storage"),
        (&negated, "negated or conjugated"),
        (&zeros, "do not lie in its storage"),
        (&opaque, "it is sparse"),
    ] {
        // SAFETY: this thread alone has the tensor.
        let slice = unsafe { raw::slice::<f32>(tensor) };
        let text = slice.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
        let text = raw::address(tensor).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    assert!(raw::data_address(&opaque).is_none() && raw::data_address(&Tensor::new()).is_none());
    let last = x.narrow(0, 5, 1);
    assert_eq!(
        raw::data_address(&last).unwrap().get() - raw::data_address(&x).unwrap().get(),
        20
    );
    // SAFETY: as above.
    assert_eq!(unsafe { raw::slice::<f32>(&last) }.unwrap(), [5.0]);
    assert!(raw::address(&x.view([2, 3]).tr()).is_ok());
}

#[test]
#[allow(unsafe_code, reason = "the functions under test are unsafe")]
fn the_elements_of_a_mask_may_be_any_byte() {
    let mask = Tensor::from_slice(&[0u8, 1, 2, 255]).view_dtype(Kind::Bool);
    // SAFETY: this thread alone has the tensor.
    let elements = unsafe { raw::slice::<raw::BoolByte>(&mask) }.unwrap();
    let seen: Vec<bool> = elements.iter().map(|element| element.get()).collect();
    assert_eq!(seen, [false, true, true, true]);
}

#[test]
fn a_team_runs_the_loops_of_its_body_and_their_panics_reach_the_caller() {
    let runs = with_team(|| {
        let mut runs = 0;
        for len in (0..2000).chain([100_000]) {
            let seen: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            parallel_for(len, len % 5, |range| {
                // Within a loop on several threads there is no team.
                if range != (0..len) {
                    let outer = std::thread::current().id();
                    parallel_for(len, 1, |_| assert_eq!(std::thread::current().id(), outer));
                }
                for index in range {
                    seen[index].fetch_add(1, Ordering::Relaxed);
                }
            });
            runs += seen
                .iter()
                .map(|n| n.load(Ordering::Relaxed))
                .sum::<usize>();
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
        panics_reach_the_caller();
        // The team goes on after a panic, and one in a team is the same one.
        with_team(|| parallel_for(10, 1, |_| ()));
        runs
    });
    assert_eq!(runs, 2000 * 1999 / 2 + 100_000);
    let payload = catch_unwind(|| with_team(|| panic!("the body is bad"))).unwrap_err();
    assert_eq!(panic_text(&*payload), "the body is bad");
}

#[test]
fn operators_in_a_team_have_the_modes_of_their_thread() {
    let x = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (recorded, unrecorded) = with_team(|| (x.mm(&x), tch::no_grad(|| x.mm(&x))));
    assert!(recorded.requires_grad() && !unrecorded.requires_grad());
    assert_eq!(recorded, unrecorded);
    assert_eq!(recorded.double_value(&[3, 5]), 64.0);
}

#[test]
fn a_team_loses_no_share_of_many_short_loops() {
    let done = AtomicUsize::new(0);
    with_team(|| {
        for _ in 0..20_000 {
            parallel_for(intra_op(), 1, |range| {
                done.fetch_add(range.len(), Ordering::Relaxed);
            });
        }
    });
    assert_eq!(done.into_inner(), 20_000 * intra_op());
}
