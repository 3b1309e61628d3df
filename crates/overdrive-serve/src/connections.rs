//! The connections of a server: their number, and the timeouts for sending a request and reading the answer.

use std::collections::VecDeque;
use std::future::Future;
use std::io::ErrorKind;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_io_timeout::TimeoutStream;

use crate::peer::Peer;
use crate::routes::{router, router_when_full};
use crate::shared::Shared;

/// The number of connections beyond `max_connections` that are open at once. A further one replaces the oldest, so that
/// idle connections do not keep the operator's probes out.
const REFUSALS: usize = 64;

/// The pause after the system has refused a connection, because it has no file descriptors left.
const PAUSE: Duration = Duration::from_secs(1);

/// Serves connections until `shutdown` is ready, and waits for the requests that have begun.
pub(crate) async fn serve(
    listener: TcpListener,
    shared: &Arc<Shared>,
    shutdown: impl Future<Output = ()>,
) {
    let options = &shared.options;
    let seats = Arc::new(Semaphore::new(options.max_connections));
    let mut refused: VecDeque<AbortHandle> = VecDeque::new();
    let (open, full) = (
        router(Arc::clone(shared)),
        router_when_full(Arc::clone(shared)),
    );
    let (stop, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // Ended connections are removed, so that the set does not grow.
            Some(_) = connections.join_next() => continue,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_of_the_client(error.kind()) => continue,
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let seat = Arc::clone(&seats).try_acquire_owned().ok();
        let is_kept = seat.is_some();
        let routes = if is_kept { &open } else { &full };
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(options.header_timeout)
            // A client may close its sending half when it has asked: `Peer` finds out whether it waits.
            .half_close(true)
            .keep_alive(is_kept);
        let limit = options.write_timeout;
        let serving = connection(
            stream,
            limit,
            builder,
            routes.clone(),
            stopped.clone(),
            seat,
        );
        let handle = connections.spawn(serving);
        if !is_kept {
            refused.retain(|one| !one.is_finished());
            if refused.len() == REFUSALS
                && let Some(oldest) = refused.pop_front()
            {
                oldest.abort();
            }
            refused.push_back(handle);
        }
    }
    drop(listener);
    drop(stop);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection; once `stopped` has ended, only until the current request is answered.
async fn connection(
    stream: TcpStream,
    write_timeout: Duration,
    builder: http1::Builder,
    routes: Router,
    mut stopped: watch::Receiver<()>,
    _seat: Option<OwnedSemaphorePermit>,
) {
    let peer = Peer::new(stream);
    let mut stream = TimeoutStream::new(peer.clone());
    stream.set_write_timeout(Some(write_timeout));
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let version = request.version();
        peer.clone().while_waiting(version, routes.call(request))
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(Box::pin(stream)), service));
    // Errors here are the client's: it has disconnected, stopped reading, or sent something other than HTTP.
    tokio::select! {
        _ended = serving.as_mut() => return,
        _stopped = stopped.changed() => {}
    }
    serving.as_mut().graceful_shutdown();
    let _ended = serving.await;
}

/// Returns `true` for an error of one connection, after which the next one can be accepted at once.
fn is_of_the_client(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset
    )
}
