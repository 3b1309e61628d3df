//! The CPU allocator. One test, because the statistics are those of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_sys::{Error, is_out_of_memory, memory, op};
use tch::{Device, Kind, Tensor};

const MIB: u64 = 1 << 20;

fn floats(mib: u64) -> Tensor {
    Tensor::empty(
        [i64::try_from(mib * MIB / 4).unwrap()],
        (Kind::Float, Device::Cpu),
    )
}

fn allocated() -> u64 {
    memory::stats(Device::Cpu).unwrap().allocated_bytes
}

#[test]
fn the_cpu_allocator_counts_caches_and_limits() {
    counts_live_and_peak_bytes();
    a_freed_block_serves_the_next_tensor_of_its_size();
    a_limit_is_an_out_of_memory_error_and_nothing_is_lost();
    survives_many_threads();
    sizes_of_every_magnitude_are_aligned_and_do_not_overlap();
}

fn counts_live_and_peak_bytes() {
    memory::reset_peak(Device::Cpu).unwrap();
    let start = allocated();
    let a = floats(8);
    let b = floats(4);
    assert_eq!(allocated() - start, 12 * MIB);
    drop(a);
    let stats = memory::stats(Device::Cpu).unwrap();
    assert_eq!(stats.allocated_bytes - start, 4 * MIB);
    assert_eq!(stats.peak_allocated_bytes - start, 12 * MIB);
    memory::reset_peak(Device::Cpu).unwrap();
    assert_eq!(
        memory::stats(Device::Cpu).unwrap().peak_allocated_bytes - start,
        4 * MIB
    );
    drop(b);
    assert_eq!(allocated(), start);
    // A view holds its base alive; it is not counted twice.
    let view = floats(2).narrow(0, 0, 10);
    assert_eq!(allocated() - start, 2 * MIB);
    drop(view);
}

fn a_freed_block_serves_the_next_tensor_of_its_size() {
    drop(floats(16));
    let reserved = memory::stats(Device::Cpu).unwrap().reserved_bytes;
    for _ in 0..10 {
        let t = floats(16);
        assert_eq!(memory::stats(Device::Cpu).unwrap().reserved_bytes, reserved);
        drop(t);
    }
    memory::empty_cache(Device::Cpu).unwrap();
    let emptied = memory::stats(Device::Cpu).unwrap();
    assert!(emptied.reserved_bytes + 16 * MIB <= reserved);
    assert!(emptied.reserved_bytes >= emptied.allocated_bytes);

    memory::set_cpu_caching(false).unwrap();
    drop(floats(16));
    assert_eq!(
        memory::stats(Device::Cpu).unwrap().reserved_bytes,
        emptied.reserved_bytes
    );
    memory::set_cpu_caching(true).unwrap();
}

fn a_limit_is_an_out_of_memory_error_and_nothing_is_lost() {
    let start = allocated();
    memory::set_limit(Device::Cpu, Some(start + 10 * MIB)).unwrap();
    let kept = floats(8);
    let through_tch =
        Tensor::f_zeros([i64::try_from(MIB).unwrap()], (Kind::Float, Device::Cpu)).unwrap_err();
    assert!(is_out_of_memory(&through_tch), "{through_tch}");
    assert!(through_tch.to_string().contains("limit"), "{through_tch}");
    let ours = op::call("aten::clone", "", &[op::Value::Tensor(&kept)]).unwrap_err();
    assert!(matches!(ours, Error::OutOfMemory { .. }), "{ours}");
    assert!(is_out_of_memory(&ours));
    assert!(is_out_of_memory(&std::io::Error::other(Wrapped(ours))));
    assert_eq!(allocated() - start, 8 * MIB);
    memory::set_limit(Device::Cpu, None).unwrap();
    drop(floats(32));
    drop(kept);
    let cuda = memory::set_limit(Device::Cuda(0), Some(1))
        .unwrap_err()
        .to_string();
    assert!(cuda.contains("it must be Cpu"), "{cuda}");
}

fn survives_many_threads() {
    let start = allocated();
    let threads: Vec<_> = (0..8)
        .map(|seed: i64| {
            std::thread::spawn(move || {
                let mut kept: Vec<Tensor> = Vec::new();
                for step in 0..2_000i64 {
                    let size = 1 + (seed * 7919 + step * 104_729) % 50_000;
                    let t = Tensor::full([size], step, (Kind::Int64, Device::Cpu));
                    assert_eq!(t.int64_value(&[size - 1]), step);
                    kept.push(t);
                    if kept.len() > 16 {
                        let _ = kept.swap_remove(usize::try_from(step).unwrap() % 16);
                    }
                }
                // The last one is freed on another thread than it was made on.
                kept.pop()
            })
        })
        .collect();
    let last: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    drop(last);
    assert_eq!(allocated(), start);
}

fn sizes_of_every_magnitude_are_aligned_and_do_not_overlap() {
    let start = allocated();
    let mut tensors: Vec<(Tensor, i64)> = Vec::new();
    for shift in 0..24 {
        for delta in [-1i64, 0, 1, 63, 64, 65] {
            let bytes = ((1i64 << shift) + delta).max(1);
            let t = Tensor::full([bytes], shift, (Kind::Uint8, Device::Cpu));
            assert_eq!(t.data_ptr() as usize % 64, 0, "{bytes} bytes");
            tensors.push((t, shift));
        }
    }
    for (t, shift) in &tensors {
        assert_eq!(t.min().int64_value(&[]), *shift);
        assert_eq!(t.max().int64_value(&[]), *shift);
    }
    drop(tensors);
    assert_eq!(allocated(), start);
    assert_eq!(Tensor::empty([0], (Kind::Float, Device::Cpu)).numel(), 0);
}

/// An error type that passes another through, as a crate above this one does.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Wrapped(Error);
