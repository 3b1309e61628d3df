//! Tasks shared out among libtorch's threads as these become free.

use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_sys::threads;

use super::problem::Shared;

/// How many tasks can run at once.
pub(super) fn workers() -> usize {
    threads::intra_op().max(1)
}

/// Runs tasks `0..count`, each with the part of `workspace` that its worker has to itself.
///
/// Tasks are started in order; which worker runs one differs from call to call, so a result must not
/// depend on it.
pub(super) fn for_each_task<R: Send>(
    count: usize,
    workspace: &mut [R],
    run: impl Fn(usize, &mut [R]) + Sync,
) {
    let workers = workers().min(count);
    if workers == 0 {
        return;
    }
    let share = workspace.len() / workers;
    let shared = Shared::new(workspace);
    let next = AtomicUsize::new(0);
    threads::parallel_for(workers, 1, |range| {
        for worker in range {
            // SAFETY: each worker's number is in one range of one thread, so no two share a part.
            let part = unsafe { shared.slice_mut(worker * share, share) };
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= count {
                    break;
                }
                run(task, part);
            }
        }
    });
}
