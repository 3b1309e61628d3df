use std::future::{Future, pending};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use overdrive_core::check_option;
use overdrive_generation::{EngineHandle, GenerationConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::connections::serve;
use crate::pooler::Pooler;
use crate::routes::router;
use crate::shared::{Backend, Shared};
use crate::{Error, PoolingModel, Result, ServedModel, ServerOptions};

/// The number of threads that read requests and write answers. They do little; the CPU cores are for the engine.
const IO_THREADS: usize = 2;

/// The number of threads that tokenize prompts and compile grammars.
const PREPARING_THREADS: usize = 4;

/// The time that the server waits for its threads when it stops.
const END: Duration = Duration::from_secs(5);

/// An HTTP server with OpenAI's API over an engine.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

impl Server {
    /// Returns a server for `engine`, whose tokenizer is that of `model`.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range.
    pub fn new(engine: EngineHandle, model: ServedModel, options: ServerOptions) -> Result<Server> {
        Server::over(Backend::Engine(engine), model, options)
    }

    /// Returns a server of embeddings (`/v1/embeddings`) or of scores (`/v1/rerank`, `/v1/score`); its other routes
    /// that need an engine refuse every request. `name` is that of the model in the API.
    ///
    /// # Errors
    /// As for [`Server::new`]; [`Error::System`] if the system refuses the thread of the model.
    pub fn pooling(
        name: impl Into<Arc<str>>,
        model: PoolingModel,
        options: ServerOptions,
    ) -> Result<Server> {
        let served = ServedModel {
            format: model.format,
            ..ServedModel::new(name, model.tokenizer, GenerationConfig::default())
        };
        let backend = Backend::Pooler(Pooler::spawn(model.weights)?);
        Server::over(backend, served, options)
    }

    fn over(backend: Backend, model: ServedModel, options: ServerOptions) -> Result<Server> {
        options.validate()?;
        let expected = "a name for clients to use, of at least one character";
        check_option(
            !model.name.is_empty(),
            "served_model_name",
            "\"\"",
            expected,
        )?;
        let clash = backend.adapters().iter().find(|own| **own == model.name);
        let expected = "different from the names of the adapters";
        check_option(
            clash.is_none(),
            "served_model_name",
            format!("{:?}", model.name),
            expected,
        )?;
        let shared = Arc::new(Shared::new(backend, model, options));
        shared.model.config.validate()?;
        Ok(Server { shared })
    }

    pub(crate) fn into_shared(self) -> Arc<Shared> {
        self.shared
    }

    /// Returns the routes, for a program that has its own tokio runtime (with the timer enabled) and server. The limits
    /// on connections (`max_connections`, `header_timeout`, `write_timeout`) are then up to that program.
    pub fn router(&self) -> Router {
        router(Arc::clone(&self.shared))
    }

    /// Serves until SIGTERM or SIGINT. The server then accepts no further connections and waits up to `drain_timeout`
    /// for requests that have begun; a second signal cancels them at once.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses threads, signal handlers or the listener; [`Error::Cut`] if requests
    /// had to be cancelled.
    pub fn run(self, listener: TcpListener) -> Result<()> {
        let runtime = runtime()?;
        let failed = |source| Error::System {
            action: "wait for signals",
            source,
        };
        // Registered before the first request, so that no signal ends the program without draining.
        let context = runtime.enter();
        let mut first = Signals::new().map_err(failed)?;
        let mut second = Signals::new().map_err(failed)?;
        drop(context);
        let shutdown = async move { first.next().await };
        let hurry = async move {
            second.next().await;
            second.next().await;
        };
        self.serve(runtime, listener, shutdown, hurry)
    }

    /// Serves until `shutdown` is ready, and then stops as [`Server::run`] does after a signal.
    ///
    /// # Errors
    /// As for [`Server::run`].
    pub fn run_until(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<()> {
        self.serve(runtime()?, listener, shutdown, pending())
    }

    fn serve(
        self,
        runtime: Runtime,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
        hurry: impl Future<Output = ()>,
    ) -> Result<()> {
        let limit = self.shared.options.drain_timeout;
        let (begin, begun) = oneshot::channel();
        let drain = async move {
            shutdown.await;
            let _ended = begin.send(());
        };
        let late = async move {
            match begun.await {
                Ok(()) => tokio::time::sleep(limit).await,
                Err(_) => pending().await,
            }
        };
        let failed = |source| Error::System {
            action: "listen",
            source,
        };
        let result = runtime.block_on(async {
            listener.set_nonblocking(true).map_err(failed)?;
            let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
            tokio::select! {
                () = serve(listener, &self.shared, drain) => Ok(()),
                sequences = self.counted(late) => Err(Error::Cut {
                    sequences,
                    reason: format!("{} seconds after the signal", limit.as_secs_f64()),
                }),
                sequences = self.counted(hurry) => Err(Error::Cut {
                    sequences,
                    reason: "when the second signal came".to_owned(),
                }),
            }
        });
        // Drops the connections that are left, and cancels their requests.
        runtime.shutdown_timeout(END);
        match result {
            // Only connections without a request were open.
            Err(Error::Cut { sequences: 0, .. }) => Ok(()),
            result => result,
        }
    }

    /// Waits for `end`, and returns the number of sequences that are then in flight. A handler of `select!` could not
    /// count them: by then the connections and their requests are being dropped.
    async fn counted(&self, end: impl Future<Output = ()>) -> usize {
        end.await;
        self.shared.in_flight()
    }
}

pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .max_blocking_threads(PREPARING_THREADS)
        .thread_name("overdrive-serve")
        .enable_all()
        .build();
    runtime.map_err(|source| Error::System {
        action: "start the server's threads",
        source,
    })
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
