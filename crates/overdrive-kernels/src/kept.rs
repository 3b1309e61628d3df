//! Buffers that a thread reuses from call to call.

use std::cell::{Cell, RefCell};

use overdrive_sys::memory::Scratch;

/// The largest number of bytes that a thread keeps in all of its [`Kept`] together.
pub const MAX_KEPT_BYTES: usize = 32 << 20;

thread_local! {
    static KEPT_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The buffers of a kernel.
pub trait Buffers: Default {
    /// Returns the size of their memory in bytes.
    fn bytes(&self) -> usize;
}

/// Returns the size of a vector's memory in bytes.
pub fn capacity_bytes<T>(vector: &Vec<T>) -> usize {
    vector.capacity() * size_of::<T>()
}

/// The buffers of a kernel that a thread reuses from call to call, since the system clears new memory page by page.
/// Use it in a `thread_local!`.
///
/// They count as [`scratch_bytes`](overdrive_sys::memory::MemoryStats::scratch_bytes). All buffers of a thread together
/// take at most [`MAX_KEPT_BYTES`]; larger ones are freed after the call.
///
/// ```
/// use overdrive_kernels::{Buffers, Kept, capacity_bytes};
///
/// #[derive(Default)]
/// struct Sums(Vec<f32>);
///
/// impl Buffers for Sums {
///     fn bytes(&self) -> usize {
///         capacity_bytes(&self.0)
///     }
/// }
///
/// thread_local! {
///     static SUMS: Kept<Sums> = const { Kept::new() };
/// }
///
/// let first = Kept::with(&SUMS, |sums| {
///     sums.0.resize(100, 0.0);
///     sums.0.as_ptr()
/// });
/// assert_eq!(first, Kept::with(&SUMS, |sums| sums.0.as_ptr()));
/// ```
pub struct Kept<B> {
    buffers: Cell<Option<B>>,
    counted: RefCell<Scratch>,
}

impl<B> std::fmt::Debug for Kept<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The buffers cannot be formatted without taking them out.
        let counted = self.counted.borrow();
        f.debug_struct("Kept")
            .field("counted", &*counted)
            .finish_non_exhaustive()
    }
}

impl<B> Default for Kept<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B> Kept<B> {
    /// Creates an empty `Kept`.
    #[must_use]
    pub const fn new() -> Self {
        Kept {
            buffers: Cell::new(None),
            counted: RefCell::new(Scratch::new()),
        }
    }
}

impl<B: Buffers> Kept<B> {
    /// Calls `body` with the buffers of the last call on this thread, or with new ones.
    #[inline(always)]
    pub fn with<R>(
        slot: &'static std::thread::LocalKey<Self>,
        body: impl FnOnce(&mut B) -> R,
    ) -> R {
        let mut buffers = Self::take(slot);
        let result = body(&mut buffers);
        Self::put(slot, buffers);
        result
    }

    /// Takes the buffers of the last call on this thread, or new buffers if there are none.
    pub fn take(slot: &'static std::thread::LocalKey<Self>) -> B {
        slot.try_with(|kept| kept.buffers.take())
            .ok()
            .flatten()
            .unwrap_or_default()
    }

    /// Keeps buffers for the next call on this thread, unless they are too large.
    pub fn put(slot: &'static std::thread::LocalKey<Self>, buffers: B) {
        // Both fail in a thread that is ending, which keeps nothing.
        let _ = slot.try_with(|kept| {
            let bytes = buffers.bytes();
            kept.count(bytes).then(|| kept.buffers.set(Some(buffers)))
        });
    }

    /// Counts buffers of `bytes`; returns `false` without counting them if they would exceed the thread's limit.
    fn count(&self, bytes: usize) -> bool {
        let mut counted = self.counted.borrow_mut();
        let before = usize::try_from(counted.bytes()).unwrap_or(0);
        // Nearly always the same buffers are returned.
        if bytes == before {
            return true;
        }
        let others = KEPT_BYTES.try_with(|kept| kept.get().saturating_sub(before));
        let Ok(others) = others else {
            counted.set(0);
            return false;
        };
        let fits = bytes.saturating_add(others) <= MAX_KEPT_BYTES;
        let counts = if fits { bytes } else { 0 };
        counted.set(counts as u64);
        KEPT_BYTES.set(others + counts);
        fits
    }
}

#[cfg(test)]
mod tests {
    use overdrive_sys::memory;
    use tch::Device;

    use super::*;

    #[derive(Default)]
    struct Bytes(Vec<u8>);

    impl Buffers for Bytes {
        fn bytes(&self) -> usize {
            capacity_bytes(&self.0)
        }
    }

    thread_local! {
        static FIRST: Kept<Bytes> = const { Kept::new() };
        static SECOND: Kept<Bytes> = const { Kept::new() };
    }

    fn scratch() -> u64 {
        memory::stats(Device::Cpu).unwrap().scratch_bytes
    }

    /// Keeps `bytes`; returns the counted bytes of the process.
    fn keep(slot: &'static std::thread::LocalKey<Kept<Bytes>>, bytes: usize) -> u64 {
        Kept::with(slot, |buffers| buffers.0 = Vec::with_capacity(bytes));
        scratch()
    }

    // One test, because the count is that of the process.
    #[test]
    fn kept_buffers_are_counted_and_limited_and_end_with_their_thread() {
        let start = scratch();
        let of_thread = std::thread::spawn(move || {
            assert_eq!(keep(&FIRST, 1000), start + 1000);
            assert_eq!(
                keep(&SECOND, MAX_KEPT_BYTES - 1000),
                start + MAX_KEPT_BYTES as u64
            );
            // One byte too many for both: the second is freed, the first stays.
            assert_eq!(keep(&SECOND, MAX_KEPT_BYTES - 999), start + 1000);
            Kept::with(&FIRST, |buffers| assert_eq!(buffers.0.capacity(), 1000));
            Kept::with(&SECOND, |buffers| assert_eq!(buffers.0.capacity(), 0));
            assert_eq!(keep(&FIRST, 0), start);
            keep(&SECOND, 77)
        });
        assert_eq!(of_thread.join().unwrap(), start + 77);
        assert_eq!(scratch(), start);
        // The system's memory for tensors includes it.
        let reserved = memory::stats(Device::Cpu).unwrap().reserved_bytes;
        std::thread::spawn(move || {
            keep(&FIRST, 5000);
            assert_eq!(
                memory::stats(Device::Cpu).unwrap().reserved_bytes,
                reserved + 5000
            );
        })
        .join()
        .unwrap();
    }
}
