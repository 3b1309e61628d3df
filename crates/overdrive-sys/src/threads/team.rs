//! A team of threads that stays together for many short loops.
//!
//! Its threads are those of one parallel region of OpenMP, so there is still one pool of them. Between loops they watch
//! a word of memory, while each region of OpenMP's own ends and begins with calls of the operating system.

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use super::{Loop, thread_limit};
use crate::denormals::flushing_denormals;
use crate::ffi;

/// The number of times that a thread polls for a loop before it begins to yield its core between polls.
// Some 50 microseconds, more than passes between two loops of a decoding step. Beside two busy programs on two cores
// such a step took 1.4 times as long with 200,000 polls, and six times as long with 100.
const POLLS: usize = 2000;

/// The loop is open to threads that have not taken part in it.
const OPEN: u64 = 1 << 31;

/// The state of a team that has ended.
const DISMISSED: u64 = u64::MAX;

thread_local! {
    /// The team that this thread leads, while it runs no loop.
    static LED: Cell<*const Team> = const { Cell::new(null()) };
}

/// Runs `body` on this thread, with libtorch's other threads standing by: a [`parallel_for`](super::parallel_for) in
/// it begins and ends in a fraction of a microsecond instead of two. A loop does not wait for a thread that the
/// operating system has stopped before it joined; the others do its share.
///
/// Use it for many short loops in a row, as in a decoding step. Operators that `body` calls give the same results,
/// but each runs on one thread, because OpenMP regards all of `body` as a parallel region. Inside such a region, or
/// inside another team, `body` simply runs. In every case subnormal numbers are treated as zero in `body`
/// ([`flushing_denormals`]), on all threads of the team.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use overdrive_sys::threads::{parallel_for, with_team};
///
/// let sum = AtomicUsize::new(0);
/// with_team(|| {
///     for _ in 0..10 {
///         parallel_for(100, 1, |range| {
///             sum.fetch_add(range.sum(), Ordering::Relaxed);
///         });
///     }
/// });
/// assert_eq!(sum.into_inner(), 49_500);
/// ```
pub fn with_team<R>(body: impl FnOnce() -> R) -> R {
    let threads = thread_limit();
    let body = || flushing_denormals(body);
    if threads == 1 {
        return body();
    }
    let (mut body, mut result) = (Some(body), None);
    let mut lead = || {
        if let Some(body) = body.take() {
            // Caught, so that the other threads are released.
            result = Some(catch_unwind(AssertUnwindSafe(body)));
        }
    };
    let region = Region {
        team: Team {
            state: AtomicU64::new(0),
            shared: AtomicPtr::new(null_mut()),
            threads,
        },
        lead: &raw mut lead as *mut dyn FnMut(),
    };
    // SAFETY: `region` outlives the call, which returns when every thread has; thread 0 alone, which is this one, uses
    // `lead`; no panic gets out: `lead` catches those of `body`, a loop those of its shares.
    unsafe {
        let region = (&raw const region).cast_mut().cast();
        ffi::od_parallel(i32::try_from(threads).unwrap_or(1), take_part, region);
    }
    match result {
        Some(Ok(result)) => result,
        Some(Err(payload)) => resume_unwind(payload),
        None => unreachable!(
            "thread 0 of a region is the one that begins it, and `od_parallel` runs it always"
        ),
    }
}

/// Runs the loop with the team that this thread leads, on up to `most` threads; returns `false` if there is none.
pub(super) fn run(work: &Loop<'_>, most: usize) -> bool {
    // Taken, so that loops within this one run on their threads.
    let led = LED.replace(null());
    if led.is_null() {
        return false;
    }
    // SAFETY: `take_part` clears the pointer before the team ends.
    unsafe { &*led }.run(work, most);
    LED.set(led);
    true
}

struct Region<'a> {
    team: Team,
    lead: *mut (dyn FnMut() + 'a),
}

/// Runs the part of a thread in a region.
unsafe extern "C" fn take_part(region: *mut c_void, thread: i32, _threads: i32) {
    // SAFETY: `with_team` passes its own region, alive until all threads return.
    let region = unsafe { &*region.cast::<Region<'_>>().cast_const() };
    if thread != 0 {
        return flushing_denormals(|| region.team.follow());
    }
    LED.set(&raw const region.team);
    // SAFETY: thread 0 alone uses it.
    unsafe { (*region.lead)() };
    LED.set(null());
    region.team.state.store(DISMISSED, Ordering::Release);
}

// Aligned to two lines of the cache, which processors fetch together: all that a thread reads when a loop begins.
#[repr(align(128))]
struct Team {
    /// From the highest bit: the number of the loop (32 bits), [`OPEN`], how many other threads are in it (31 bits).
    state: AtomicU64,
    /// The [`Shared`] loop, valid for the threads that are counted in `state`.
    shared: AtomicPtr<c_void>,
    threads: usize,
}

/// A loop, and which of its shares are taken.
struct Shared<'a> {
    work: &'a Loop<'a>,
    shares: usize,
    next: AtomicUsize,
}

impl Shared<'_> {
    fn take_shares(&self) {
        loop {
            let share = self.next.fetch_add(1, Ordering::Relaxed);
            if share >= self.shares {
                break;
            }
            self.work.run_share(share, self.shares);
        }
    }
}

impl Team {
    /// Runs a loop, as the thread that leads.
    fn run(&self, work: &Loop<'_>, most: usize) {
        let shares = self.threads.min(most);
        let shared = Shared {
            work,
            shares,
            next: AtomicUsize::new(1),
        };
        let pointer: *const Shared<'_> = &raw const shared;
        self.shared
            .store(pointer.cast_mut().cast(), Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> 32) + 1;
        self.state.store(number << 32 | OPEN, Ordering::Release);
        // The first share is this thread's, as in a region of OpenMP, so that it finds its data in its cache.
        work.run_share(0, shares);
        shared.take_shares();
        // From here on no thread joins, and `shared` ends when the last one has left.
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut polls = 0;
        while self.state.load(Ordering::Acquire) << 32 != 0 {
            pause(&mut polls);
        }
    }

    /// Takes part in loops until the team ends.
    fn follow(&self) {
        let (mut done, mut polls) = (0, 0);
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state == DISMISSED {
                return;
            }
            if state & OPEN == 0 || state >> 32 == done {
                pause(&mut polls);
                continue;
            }
            let counted =
                self.state
                    .compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
            if counted.is_err() {
                continue;
            }
            // SAFETY: stored before the loop was opened, and alive while this thread is counted.
            let shared = unsafe { &*self.shared.load(Ordering::Relaxed).cast::<Shared<'_>>() };
            shared.take_shares();
            self.state.fetch_sub(1, Ordering::Release);
            (done, polls) = (state >> 32, 0);
        }
    }
}

/// Waits for a moment.
fn pause(polls: &mut usize) {
    if *polls < POLLS {
        *polls += 1;
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
