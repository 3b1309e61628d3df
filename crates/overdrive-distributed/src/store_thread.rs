//! A thread for the requests of a monitor to the store.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use overdrive_sys::c10d::Store;

use crate::{Error, Result};

/// A thread that runs store requests one after another.
pub(crate) struct StoreThread {
    requests: mpsc::Sender<Request>,
    address: (String, u16),
    /// If `true`, the connection has ended and nothing listens at the address of the store: its process is gone. One
    /// that is stopped or slow keeps its connections.
    is_gone: Arc<AtomicBool>,
}

type Request = Box<dyn FnOnce(&mut Store) + Send>;

impl StoreThread {
    pub(crate) fn start(mut store: Store, address: (String, u16)) -> Result<Self> {
        let (requests, receiver) = mpsc::channel::<Request>();
        thread::Builder::new()
            .name("od-store".to_owned())
            .spawn(move || {
                for request in receiver {
                    request(&mut store);
                }
            })
            .map_err(|error| Error::Monitor {
                problem: error.to_string(),
            })?;
        Ok(Self {
            requests,
            address,
            is_gone: Arc::default(),
        })
    }

    /// Returns `true` if nothing listened at the address of the store when the last request failed.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst)
    }

    /// Runs a request and returns its result, or `None` if the store fails or does not answer in time.
    pub(crate) fn request<T: Send + 'static>(
        &self,
        timeout: Duration,
        request: impl FnOnce(&Store) -> overdrive_sys::Result<T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::channel();
        let (address, is_gone) = (self.address.clone(), Arc::clone(&self.is_gone));
        let request = move |store: &mut Store| {
            let answer = request(store).ok();
            let failed = answer.is_none();
            // The receiver is gone after a timeout.
            let _ = sender.send(answer);
            let is_lost = failed && !can_connect(&address, timeout);
            is_gone.store(is_lost, Ordering::SeqCst);
            // The network may have ended the connection.
            if failed
                && !is_lost
                && let Ok(fresh) = store.reconnected()
            {
                *store = fresh;
            }
        };
        self.requests.send(Box::new(request)).ok()?;
        receiver.recv_timeout(timeout).ok().flatten()
    }
}

/// Returns `true` if a process listens at the address.
fn can_connect((host, port): &(String, u16), timeout: Duration) -> bool {
    let addresses = (host.as_str(), *port).to_socket_addrs();
    // An address that cannot be looked up at the moment does not prove that the process is gone.
    addresses.map_or(true, |mut found| {
        found.any(|address| TcpStream::connect_timeout(&address, timeout).is_ok())
    })
}
