//! The connections of a server: their number, and the time in which a request must begin.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use crate::routes::{router, router_when_full};
use crate::shared::Shared;

/// The connections beyond `max_connections` that are answered at once; further ones are closed without an answer.
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
    let refusals = Arc::new(Semaphore::new(REFUSALS));
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
            // Ended connections are taken out of the set; it would grow otherwise.
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
        let seat = Arc::clone(&seats).try_acquire_owned();
        let (routes, seat, is_kept) = match seat {
            Ok(seat) => (open.clone(), seat, true),
            Err(_) => match Arc::clone(&refusals).try_acquire_owned() {
                Ok(seat) => (full.clone(), seat, false),
                Err(_) => continue,
            },
        };
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(options.header_timeout)
            .keep_alive(is_kept);
        connections.spawn(connection(stream, builder, routes, stopped.clone(), seat));
    }
    drop(listener);
    drop(stop);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection; after the end of `stopped`, only until the answer to the present request.
async fn connection(
    stream: TcpStream,
    builder: http1::Builder,
    routes: Router,
    mut stopped: watch::Receiver<()>,
    _seat: OwnedSemaphorePermit,
) {
    // A token is a small packet, which should not wait for the next one. Without it the server is only slower.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(routes);
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // An error is the client's: it has disconnected, or sent something that is not HTTP.
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
