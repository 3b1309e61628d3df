//! Files mapped into memory, and the message of a program whose file is truncated while it reads it. This module has
//! the only unsafe code of the crate.
//!
//! The system ends a process that touches a page of a mapped file that is gone (SIGBUS), without a word about the file.
//! So each map is registered with its addresses and with the line to print, and a handler of the signal looks the
//! address up. The handler may neither lock nor allocate: the registry is a list of slots to which slots are only added,
//! and the lines are never freed.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::ErrorKind;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// A file mapped into memory for reading. The operating system loads its pages on first access and may drop them again,
/// so that a file may be much larger than memory.
///
/// The file must not change while it is mapped: the process would read other bytes. If it is truncated, an access to
/// the lost bytes ends the process with exit code 1 and a line on standard error that names the file; the same if the
/// disk fails. Replacing a file by a rename leaves the old one to its maps.
///
/// ```
/// use overdrive_core::files::{FileMap, write};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("a.tokens");
/// write(&path, b"abc")?;
/// assert_eq!(&FileMap::open(&path)?[1..], b"bc");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileMap {
    // Before the map: its addresses must be out of the registry when others may get them.
    _region: MappedRegion,
    map: Mmap,
}

impl FileMap {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<FileMap> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("read", path))?;
        FileMap::of(&file, path)
    }

    /// Maps the open file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of(file: &File, path: impl AsRef<Path>) -> Result<FileMap> {
        let path = path.as_ref();
        // The error of the system call is about devices.
        if file.metadata().is_ok_and(|data| data.is_dir()) {
            return Err(Error::io("read", path)(ErrorKind::IsADirectory.into()));
        }
        // SAFETY: the map is read-only and used only as bytes, for which every value is valid. `Mmap::map` requires that
        // the file does not change while it is mapped. The files that this project writes keep that: they are written
        // under a temporary name, renamed when complete and never changed afterwards. For the user's files it is the
        // user's responsibility, as with numpy.memmap and safetensors: changed bytes are other bytes, and an access to
        // lost ones ends the process.
        let map = unsafe { Mmap::map(file) }.map_err(Error::io("map", path))?;
        let start = map.as_ptr().addr();
        let line = format!(
            "error: {} was truncated, or its disk failed, while this program read it; restore the file and start the \
             program again",
            path.display()
        );
        Ok(FileMap {
            _region: MappedRegion::new(start..start + map.len(), &line),
            map,
        })
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// The addresses of a mapped file, registered with the line that the process prints when it ends because they cannot be
/// read. [`FileMap`] has one; it is for the maps that others make, such as libtorch.
#[derive(Debug)]
#[must_use = "the addresses are registered until it is dropped"]
pub struct MappedRegion {
    #[cfg(unix)]
    slot: &'static registry::Slot,
}

impl MappedRegion {
    /// Registers the addresses, which must stay mapped while this value exists.
    pub fn new(addresses: Range<usize>, line: &str) -> MappedRegion {
        #[cfg(not(unix))]
        let _ = (addresses, line);
        MappedRegion {
            #[cfg(unix)]
            slot: registry::add(addresses, line),
        }
    }
}

#[cfg(unix)]
impl Drop for MappedRegion {
    fn drop(&mut self) {
        registry::remove(self.slot);
    }
}

#[cfg(unix)]
mod registry {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
    use std::sync::{Mutex, Once, OnceLock, PoisonError};

    /// The place of one map in the list; free if `end` is 0.
    #[derive(Debug)]
    pub(super) struct Slot {
        start: AtomicUsize,
        end: AtomicUsize,
        line: AtomicPtr<String>,
        next: Option<&'static Slot>,
    }

    /// The slot that was added last; from it `next` leads to all others.
    static NEWEST: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

    /// The state of the registering threads, which the handler does not touch.
    static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
        free: Vec::new(),
        lines: BTreeMap::new(),
    });

    struct Registry {
        free: Vec<&'static Slot>,
        /// All lines, so that a file that is mapped again does not take memory again.
        lines: BTreeMap<String, &'static String>,
    }

    pub(super) fn add(addresses: Range<usize>, line: &str) -> &'static Slot {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
        let leaked = registry.lines.get(line).copied().unwrap_or_else(|| {
            let leaked: &'static String = Box::leak(Box::new(format!("{line}\n")));
            registry.lines.insert(line.to_owned(), leaked);
            leaked
        });
        let line = ptr::from_ref(leaked).cast_mut();
        if let Some(slot) = registry.free.pop() {
            slot.line.store(line, Ordering::Relaxed);
            slot.start.store(addresses.start, Ordering::Relaxed);
            // Last: the handler reads it first.
            slot.end.store(addresses.end, Ordering::Release);
            return slot;
        }
        // SAFETY: null, or a slot that the lines below have leaked.
        let next = unsafe { NEWEST.load(Ordering::Relaxed).as_ref() };
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            start: AtomicUsize::new(addresses.start),
            end: AtomicUsize::new(addresses.end),
            line: AtomicPtr::new(line),
            next,
        }));
        NEWEST.store(ptr::from_ref(slot).cast_mut(), Ordering::Release);
        slot
    }

    pub(super) fn remove(slot: &'static Slot) {
        slot.end.store(0, Ordering::Release);
        let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
        registry.free.push(slot);
    }

    /// Returns the line of the map in which an address lies.
    fn line_at(address: usize) -> Option<&'static String> {
        // SAFETY: null, or a slot that `add` has leaked.
        let mut next: Option<&'static Slot> = unsafe { NEWEST.load(Ordering::Acquire).as_ref() };
        while let Some(slot) = next {
            let end = slot.end.load(Ordering::Acquire);
            // The map cannot go away while a thread reads it, so its slot does not change.
            if address < end && address >= slot.start.load(Ordering::Relaxed) {
                // SAFETY: `add` stores only pointers to leaked lines.
                return unsafe { slot.line.load(Ordering::Relaxed).as_ref() };
            }
            next = slot.next;
        }
        None
    }

    /// The handling of the signal before this module's.
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

    fn install() {
        // SAFETY: plain C structures of integers, pointers and options, for which zeros are valid.
        let (mut previous, mut action): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: without a new action the call only writes the present one to `previous`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } != 0 {
            return;
        }
        let _first = PREVIOUS.set(previous);
        action.sa_sigaction = on_bus_error as *const () as usize;
        // On the stack for signals, which a thread with little of its own may have.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the action is initialized, and its handler only does what a handler may.
        unsafe {
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    }

    extern "C" fn on_bus_error(
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        _context: *mut libc::c_void,
    ) {
        static REPORTED: AtomicBool = AtomicBool::new(false);
        // SAFETY: the system passes a valid structure to a handler with SA_SIGINFO.
        let (address, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
        // Otherwise another process has sent the signal, and there is no address.
        let is_fault = code > 0;
        if let Some(line) = line_at(address).filter(|_| is_fault) {
            if !REPORTED.swap(true, Ordering::SeqCst) {
                // SAFETY: both calls are safe in a handler, and the line is never freed. Destructors would wait for the
                // thread that is in this handler.
                unsafe {
                    libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
                    libc::_exit(1);
                }
            }
            loop {
                // SAFETY: it waits until the thread above has ended the process.
                unsafe { libc::pause() };
            }
        }
        // A signal that was sent ends the process. An access elsewhere is repeated and handled as before, by the
        // standard library for example, which reports stack overflows.
        // SAFETY: both calls are safe in a handler; the action is one that the system has returned, or zeros, which
        // are the default action.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            let previous = PREVIOUS.get().filter(|_| is_fault).unwrap_or(&default);
            libc::sigaction(signal, previous, ptr::null_mut());
            if !is_fault {
                libc::raise(signal);
            }
        }
    }
}
