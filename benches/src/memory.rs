use std::hint::black_box;
use std::time::Instant;

/// More bytes than the caches of most processors hold.
pub const UNCACHED_BYTES: usize = 160 << 20;

/// Returns the bytes a second at which all threads together read memory: the best of 12 passes over
/// [`UNCACHED_BYTES`], because other work on the machine only takes from it.
pub fn read_bandwidth() -> f64 {
    let numbers = vec![1_u64; UNCACHED_BYTES / 8];
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    let part = numbers.len().div_ceil(threads);
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in numbers.chunks(part) {
                scope.spawn(|| {
                    let sums = part.chunks(64).fold([0_u64; 64], |mut sums, chunk| {
                        for (sum, number) in sums.iter_mut().zip(chunk) {
                            *sum ^= *number;
                        }
                        sums
                    });
                    black_box(sums);
                });
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    UNCACHED_BYTES as f64 / best
}
