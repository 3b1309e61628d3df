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
    what_cudnn_says_without_memory_is_a_lack_of_memory();
    counts_live_and_peak_bytes();
    a_freed_block_serves_the_next_tensor_of_its_size();
    a_limit_is_an_out_of_memory_error_and_nothing_is_lost();
    a_limit_counts_cached_blocks_and_returns_them_before_it_refuses();
    a_steady_loop_takes_no_block_from_the_system();
    phases_of_other_sizes_reserve_at_most_a_quarter_more_than_the_peak();
    the_memory_of_a_phase_that_is_over_returns_to_the_system();
    blocks_that_share_a_mapping_return_to_the_system_one_by_one();
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

fn what_cudnn_says_without_memory_is_a_lack_of_memory() {
    for (message, expected) in [
        (
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
            true,
        ),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", true),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", false),
    ] {
        let error = tch::TchError::Torch(message.to_owned());
        assert_eq!(is_out_of_memory(&error), expected, "{message}");
    }
}

fn stats() -> memory::MemoryStats {
    memory::stats(Device::Cpu).unwrap()
}

/// A tensor whose block has exactly `bytes`, the size of a class: the block begins with 64 bytes of its own.
fn block(bytes: u64) -> Tensor {
    let floats = i64::try_from((bytes - 64) / 4).unwrap();
    Tensor::empty([floats], (Kind::Float, Device::Cpu))
}

fn a_limit_counts_cached_blocks_and_returns_them_before_it_refuses() {
    memory::empty_cache(Device::Cpu).unwrap();
    let start = stats();
    drop(block(32 * MIB));
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 32 * MIB);
    // A lower limit returns what is cached at once, as far as necessary.
    let limit = start.reserved_bytes + 24 * MIB;
    memory::set_limit(Device::Cpu, Some(limit)).unwrap();
    assert_eq!(stats().reserved_bytes, start.reserved_bytes);
    // A block of another size takes the place of a cached one.
    drop(block(16 * MIB));
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 16 * MIB);
    let kept = block(10 * MIB);
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 10 * MIB);
    assert!(stats().peak_reserved_bytes >= start.reserved_bytes + 32 * MIB);
    // A refusal returns nothing that a smaller tensor could use.
    drop(block(8 * MIB));
    let refused = Tensor::f_empty([5 << 20], (Kind::Float, Device::Cpu)).unwrap_err();
    assert!(is_out_of_memory(&refused), "{refused}");
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 18 * MIB);
    // The scratch of kernels counts as tensors do.
    let mut scratch = memory::Scratch::new();
    scratch.set(13 * MIB);
    assert_eq!(stats().scratch_bytes, start.scratch_bytes + 13 * MIB);
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 23 * MIB);
    let refused = Tensor::f_empty([1 << 20], (Kind::Float, Device::Cpu)).unwrap_err();
    assert!(refused.to_string().contains("scratch"), "{refused}");
    drop(scratch);
    assert_eq!(stats().scratch_bytes, start.scratch_bytes);
    drop(block(8 * MIB));
    memory::set_limit(Device::Cpu, None).unwrap();
    drop(kept);
}

/// The tensors of a training step: those of the forward pass live until the backward pass has used them, whose own
/// have the same sizes and a few others.
fn step() {
    let sizes = [3, 1, 7, 2, 5, 4].map(|size| size * MIB);
    let mut saved = Vec::new();
    for _layer in 0..4 {
        for size in sizes {
            saved.push(block(size));
            drop(block(size / 2));
        }
    }
    while let Some(activation) = saved.pop() {
        let gradient = block(6 * MIB);
        drop(activation);
        drop((gradient, block(MIB)));
    }
}

fn a_steady_loop_takes_no_block_from_the_system() {
    memory::empty_cache(Device::Cpu).unwrap();
    (0..2).for_each(|_| step());
    let warm = stats();
    // Enough steps for several decays of the peak.
    let mut steps = 0;
    while stats().allocations < warm.allocations + 5 * (1 << 16) {
        step();
        steps += 1;
    }
    let after = stats();
    assert!(steps > 1000);
    assert_eq!(after.system_allocations, warm.system_allocations);
    assert_eq!(after.system_releases, warm.system_releases);
    assert_eq!(after.reserved_bytes, warm.reserved_bytes);
}

fn phases_of_other_sizes_reserve_at_most_a_quarter_more_than_the_peak() {
    memory::empty_cache(Device::Cpu).unwrap();
    let start = stats().reserved_bytes;
    memory::reset_peak(Device::Cpu).unwrap();
    let peak = 320 * MIB;
    for size in [10, 20, 40, 80, 16, 32] {
        let phase: Vec<Tensor> = (0..peak / (size * MIB))
            .map(|_| block(size * MIB))
            .collect();
        drop(phase);
    }
    // At every moment, of which this is the highest.
    let reserved = stats().peak_reserved_bytes;
    assert!(
        reserved <= (start + peak) * 5 / 4,
        "{reserved} of a peak of {peak}"
    );
}

fn the_memory_of_a_phase_that_is_over_returns_to_the_system() {
    memory::empty_cache(Device::Cpu).unwrap();
    let start = stats();
    let resident = resident_bytes();
    let phase: Vec<Tensor> = (0..32).map(|_| block(10 * MIB).fill_(1.0)).collect();
    drop(phase);
    assert_eq!(stats().reserved_bytes, start.reserved_bytes + 320 * MIB);
    // What comes after needs little.
    while stats().allocations < start.allocations + 10 * (1 << 16) {
        drop(block(4096));
    }
    let after = stats();
    assert!(
        after.reserved_bytes <= start.reserved_bytes + 64 * MIB,
        "{after:?}"
    );
    assert!(after.system_releases >= start.system_releases + 25);
    if let (Some(before), Some(now)) = (resident, resident_bytes()) {
        // The kernel counts pages of a thread in batches, and other memory of the process changes too.
        assert!(
            now < before + 96 * MIB,
            "{before} bytes were resident, {now} are"
        );
    }
}

fn blocks_that_share_a_mapping_return_to_the_system_one_by_one() {
    // Larger ones are unmapped, smaller ones give their pages back and are taken again.
    for (kib, count) in [(600, 512), (60, 5120), (60, 5120)] {
        memory::empty_cache(Device::Cpu).unwrap();
        let resident = resident_bytes();
        let reserved = stats().reserved_bytes;
        let (kept, freed): (Vec<_>, Vec<_>) = (0..count)
            .map(|index: i32| (index, block(kib << 10).fill_(f64::from(index % 7))))
            .partition(|(index, _)| index % 16 == 0);
        assert!(stats().reserved_bytes >= reserved + 300 * MIB);
        drop(freed);
        memory::empty_cache(Device::Cpu).unwrap();
        assert!(stats().reserved_bytes < reserved + 32 * MIB);
        for (index, block) in &kept {
            assert_eq!(block.min().double_value(&[]), f64::from(index % 7));
            assert_eq!(block.max().double_value(&[]), f64::from(index % 7));
        }
        if let (Some(before), Some(now)) = (resident, resident_bytes()) {
            assert!(
                now < before + 64 * MIB,
                "{kib} KiB: {before} bytes were resident, {now} are"
            );
        }
    }
}

/// Returns the bytes of the process in memory.
fn resident_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
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
