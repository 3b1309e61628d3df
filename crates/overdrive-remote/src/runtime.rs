//! The threads that send requests.

use std::future::Future;
use std::sync::{OnceLock, mpsc};

use tokio::runtime::{Builder, Runtime};

use crate::object::Failure;

/// Requests wait for the network; two threads verify and store what arrives.
const THREADS: usize = 2;

fn runtime() -> Result<&'static Runtime, Failure> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let started = RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("overdrive-remote")
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| format!("the threads for requests cannot be started: {error}"))
    });
    started
        .as_ref()
        .map_err(|problem| Failure::Problem(problem.clone()))
}

/// Runs a task in the background.
pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    // The first request of a file has started the threads, or failed.
    if let Ok(runtime) = runtime() {
        runtime.spawn(task);
    }
}

/// Runs a task and waits for its result. It may be called on any thread, those of another runtime included.
pub(crate) fn wait<T: Send + 'static>(
    task: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let (sender, receiver) = mpsc::channel();
    runtime()?.spawn(async move {
        // The receiver waits until it has the result.
        let _ = sender.send(task.await);
    });
    receiver
        .recv()
        .unwrap_or_else(|_| Err(Failure::Problem("a request panicked".to_owned())))
}
