//! The key-value store of a process group, served by one of the machines over TCP.

use std::ffi::c_char;
use std::net::TcpListener;
use std::ptr;
use std::time::Duration;

use super::{c_string, c_strings, ffi, millis, pointers};
use crate::error::{Error, Result, check};

/// The role of a process in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRole {
    /// The process listens on all network interfaces, holds the values, and is a client of itself. libtorch's
    /// store has no authentication: whoever reaches the port can read and change the values.
    Server,
    /// Like [`Server`](Self::Server), but the process listens on the address of the host only: with a loopback
    /// address, nothing outside of the machine can connect.
    LocalServer,
    /// The process connects to the server.
    Client,
}

/// A key-value store shared by processes (`torch.distributed.TCPStore`).
///
/// A handle is one connection, which serves one call at a time: while one call waits for a key, all others
/// wait too. [`reconnected`](Self::reconnected) opens a second connection.
#[derive(Debug)]
pub struct Store {
    pub(super) raw: *mut ffi::RawStore,
}

// SAFETY: libtorch's store locks around each operation on its connection.
unsafe impl Send for Store {}
// SAFETY: as above; the handle itself is never changed after construction.
unsafe impl Sync for Store {}

impl Store {
    /// Listens at `host:port` or connects to it, and returns the store and its port. A server with port 0
    /// chooses a free port. `timeout` limits connecting and each call that waits for
    /// a key.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the port is in use or the server does not answer in time.
    pub fn tcp(host: &str, port: u16, role: StoreRole, timeout: Duration) -> Result<(Self, u16)> {
        let operation = "opening a TCP store";
        // libtorch binds to all interfaces, so that the socket of one interface is made here.
        let listener = match role {
            StoreRole::LocalServer => Some(listen(host, port, operation)?),
            StoreRole::Server | StoreRole::Client => None,
        };
        let (listener, port) = match listener {
            Some((listener, port)) => (into_descriptor(listener), port),
            None => (-1, port),
        };
        let host = c_string(host, operation)?;
        let (mut raw, mut bound) = (ptr::null_mut(), 0);
        // SAFETY: the host is a C string that outlives the call; the out-parameters are locals; the listener is an
        // open socket that nothing else owns, or -1.
        let status = unsafe {
            ffi::od_store_tcp(
                host.as_ptr(),
                port,
                i32::from(role != StoreRole::Client),
                listener,
                millis(timeout),
                &raw mut raw,
                &raw mut bound,
            )
        };
        check(status, operation)?;
        Ok((Self { raw }, bound))
    }

    /// Returns a handle to the same connection that puts `prefix/` before every key.
    ///
    /// # Errors
    /// [`crate::Error::BadArgument`] for a zero byte.
    pub fn prefixed(&self, prefix: &str) -> Result<Self> {
        let operation = "prefixing a store";
        let prefix = c_string(prefix, operation)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the store is alive, the prefix a C string that outlives the call.
        let status = unsafe { ffi::od_store_prefix(self.raw, prefix.as_ptr(), &raw mut raw) };
        check(status, operation)?;
        Ok(Self { raw })
    }

    /// Opens a second connection to the same server, with the same prefix.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server does not answer.
    pub fn reconnected(&self) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the store is alive.
        let status = unsafe { ffi::od_store_clone(self.raw, &raw mut raw) };
        check(status, "opening a second connection to a store")?;
        Ok(Self { raw })
    }

    /// Sets the value of `key`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let operation = format!("setting {key:?} in the store");
        let key = c_string(key, &operation)?;
        // SAFETY: the store is alive; key and value outlive the call.
        let status =
            unsafe { ffi::od_store_set(self.raw, key.as_ptr(), value.as_ptr(), value.len()) };
        check(status, &operation)
    }

    /// Waits until `key` has a value, and returns it.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if that takes longer than the timeout or the server is gone.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let operation = format!("getting {key:?} from the store");
        let key = c_string(key, &operation)?;
        let (mut out, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the store is alive; the key outlives the call; the out-parameters are locals.
        let status =
            unsafe { ffi::od_store_get(self.raw, key.as_ptr(), &raw mut out, &raw mut len) };
        check(status, &operation)?;
        // SAFETY: the call succeeded and returned `len` bytes.
        Ok(unsafe { take_bytes(out, len) })
    }

    /// Sets `key` to `desired` if its value is `expected`, or if it is absent and `expected` is empty.
    /// Returns the value of the key afterwards.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server is gone.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let operation = format!("setting {key:?} in the store");
        let key = c_string(key, &operation)?;
        let (mut out, mut len) = (ptr::null_mut(), 0);
        // SAFETY: as in `get`; both values outlive the call.
        let status = unsafe {
            ffi::od_store_compare_set(
                self.raw,
                key.as_ptr(),
                expected.as_ptr(),
                expected.len(),
                desired.as_ptr(),
                desired.len(),
                &raw mut out,
                &raw mut len,
            )
        };
        check(status, &operation)?;
        // SAFETY: the call succeeded and returned `len` bytes.
        Ok(unsafe { take_bytes(out, len) })
    }

    /// Adds to the integer at `key`, which starts at 0, and returns the sum.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server is gone.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let operation = format!("adding to {key:?} in the store");
        let key = c_string(key, &operation)?;
        let mut out = 0;
        // SAFETY: the store is alive; the key outlives the call.
        let status = unsafe { ffi::od_store_add(self.raw, key.as_ptr(), amount, &raw mut out) };
        check(status, &operation)?;
        Ok(out)
    }

    /// Returns `true` if all `keys` have values.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server is gone.
    pub fn check<S: AsRef<str>>(&self, keys: &[S]) -> Result<bool> {
        let operation = "checking keys in the store";
        let keys = c_strings(keys, operation)?;
        let pointers = pointers(&keys);
        let mut out = 0;
        // SAFETY: the store is alive; the keys outlive the call.
        let status = unsafe {
            ffi::od_store_check(self.raw, pointers.as_ptr(), pointers.len(), &raw mut out)
        };
        check(status, operation)?;
        Ok(out != 0)
    }

    /// Waits until all `keys` have values.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if that takes longer than `timeout` or the server is gone.
    pub fn wait<S: AsRef<str>>(&self, keys: &[S], timeout: Duration) -> Result<()> {
        let operation = "waiting for keys in the store";
        let keys = c_strings(keys, operation)?;
        let pointers = pointers(&keys);
        // SAFETY: the store is alive; the keys outlive the call.
        let status = unsafe {
            ffi::od_store_wait(self.raw, pointers.as_ptr(), pointers.len(), millis(timeout))
        };
        check(status, operation)
    }

    /// Removes `key`, and returns `true` if it existed.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the server is gone.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let operation = format!("deleting {key:?} from the store");
        let key = c_string(key, &operation)?;
        let mut out = 0;
        // SAFETY: the store is alive; the key outlives the call.
        let status = unsafe { ffi::od_store_delete(self.raw, key.as_ptr(), &raw mut out) };
        check(status, &operation)?;
        Ok(out != 0)
    }
}

/// Returns a socket that listens on one address, and its port.
fn listen(host: &str, port: u16, operation: &str) -> Result<(TcpListener, u16)> {
    let opened = TcpListener::bind((host, port))
        .and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
    match opened {
        Ok((port, listener)) => Ok((listener, port)),
        Err(error) => Err(Error::Torch {
            operation: operation.to_owned(),
            message: format!("cannot listen at {host}:{port}: {error}"),
        }),
    }
}

/// Returns the descriptor of a socket, which the caller then owns.
#[cfg(unix)]
fn into_descriptor(listener: TcpListener) -> i32 {
    std::os::fd::IntoRawFd::into_raw_fd(listener)
}

/// Returns no descriptor: sockets have none here, so that libtorch opens its own.
#[cfg(not(unix))]
fn into_descriptor(_: TcpListener) -> i32 {
    -1
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_store_free(self.raw) }
    }
}

/// # Safety
/// `text` points to `len` bytes that the shim allocated, and is not used again.
unsafe fn take_bytes(text: *mut c_char, len: usize) -> Vec<u8> {
    // SAFETY: the caller's promise; freed here, once.
    unsafe {
        let bytes = std::slice::from_raw_parts(text.cast::<u8>(), len).to_vec();
        crate::ffi::od_string_free(text);
        bytes
    }
}
