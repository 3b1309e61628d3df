//! The client's end of a connection: whether anybody still waits for the answer.
//!
//! A client that has closed its sending half (`nc -N`) and one that is gone look the same: of either, the end of the
//! stream is all that arrives. They differ when they are sent something, because the system of a client that is gone
//! refuses it. So from the end of the stream on the server sends once a second what means nothing: before an answer the
//! interim response `100 Continue`, which every client of HTTP/1.1 skips, and between the events of a stream a comment.
//! Clients of HTTP/1.0 know no interim responses; there TCP's keep-alive finds those that are gone.

use std::convert::Infallible;
use std::future::Future;
use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Version, header};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Interval, interval_at};

/// The interval of the checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// The silence after which TCP asks whether the client's machine knows the connection, and the interval after that. A
/// system forgets the connection of a program that is gone after about a minute.
const KEEPALIVE: Duration = Duration::from_secs(15);

const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// A line that begins with a colon is a comment in a stream of events.
const COMMENT: &[u8] = b": waiting\n\n";

/// A connection, which the server of HTTP reads and writes while the answers to its requests watch it.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    stream: Arc<TcpStream>,
    /// `false` while the server may have bytes that the system has not taken.
    is_flushed: Arc<AtomicBool>,
}

impl Peer {
    pub(crate) fn new(stream: TcpStream) -> Peer {
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE);
        // Failures of both only make the server slower: a token is a small packet and should not wait for the next one.
        let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        let _ = stream.set_nodelay(true);
        Peer {
            stream: Arc::new(stream),
            is_flushed: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Waits for the answer to a request. If the client goes away, drops `answer` and returns an error.
    pub(crate) async fn while_waiting(
        self,
        version: Version,
        answer: impl Future<Output = Result<Response, Infallible>>,
    ) -> io::Result<Response> {
        let mut answer = pin!(answer);
        let mut ticks = ticks();
        let response = loop {
            tokio::select! {
                biased;
                Ok(response) = &mut answer => break response,
                _ = ticks.tick() => if self.has_ended()? && version >= Version::HTTP_11 {
                    self.send_interim()?;
                },
            }
        };
        let events = HeaderValue::from_static(crate::answer::EVENT_STREAM);
        if response.headers().get(header::CONTENT_TYPE) != Some(&events) {
            return Ok(response);
        }
        Ok(response.map(|body| {
            Body::new(Watched {
                body,
                peer: self,
                ticks,
            })
        }))
    }

    /// Returns `true` if the client has closed its sending half, or both.
    ///
    /// # Errors
    /// An error if it is known to be gone.
    fn has_ended(&self) -> io::Result<bool> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        match SockRef::from(&*self.stream).peek(&mut [MaybeUninit::uninit()]) {
            Ok(bytes) => Ok(bytes == 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn send_interim(&self) -> io::Result<()> {
        // The rest of an earlier answer goes first, and its bytes serve as well.
        if !self.is_flushed.load(Ordering::SeqCst) {
            return Ok(());
        }
        match self.stream.try_write(INTERIM) {
            Ok(bytes) if bytes == INTERIM.len() => Ok(()),
            // Half of it would spoil the answer.
            Ok(_) => Err(ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn ticks() -> Interval {
    interval_at(Instant::now() + INTERVAL, INTERVAL)
}

impl AsyncRead for Peer {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|bytes| buffer.advance(bytes))),
            }
        }
    }
}

impl Peer {
    fn poll_writing(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        self.is_flushed.store(false, Ordering::SeqCst);
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            match write(&self.stream) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_writing(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_writing(cx, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// The server calls it when it has no bytes left.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_flushed.store(true, Ordering::SeqCst);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(Shutdown::Write))
    }
}

/// A stream of events whose client is watched between them.
struct Watched {
    body: Body,
    peer: Peer,
    ticks: Interval,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        loop {
            ready!(self.ticks.poll_tick(cx));
            match self.peer.has_ended() {
                Ok(false) => {}
                Ok(true) => {
                    let comment = Frame::data(Bytes::from_static(COMMENT));
                    return Poll::Ready(Some(Ok(comment)));
                }
                Err(error) => return Poll::Ready(Some(Err(axum::Error::new(error)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
