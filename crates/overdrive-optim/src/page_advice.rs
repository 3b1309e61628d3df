//! Advice to the operating system about the pages of mapped states.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use overdrive_core::files::MappedRegion;
use tch::Tensor;

use crate::Result;

/// The last words of a process that cannot read a page of a state.
const LOST_PAGE: &str = "error: a state of the paged optimizer cannot be read: the disk of its file failed or is full; \
                         set `paging.folder` to another disk and start the program again";

/// Returns the bytes of a page, at least 4096. State tensors in a file start at multiples of it.
pub(crate) fn page_bytes() -> u64 {
    #[cfg(unix)]
    {
        // SAFETY: reads a constant of the system.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(size).unwrap_or(4096).max(4096)
    }
    #[cfg(not(unix))]
    4096
}

/// The part of a mapped file in which a state tensor lies.
///
/// It keeps a handle of its own of the file, so that the addresses do not depend on the state tensor.
#[derive(Debug)]
pub(crate) struct MappedPages {
    // Before the file: its addresses must be out of the registry when others may get them.
    _region: MappedRegion,
    file: Tensor,
    /// The bytes of the state tensor in the file; they start at a page.
    bytes: Range<u64>,
}

impl MappedPages {
    /// Returns the part `bytes` of `file`, which begins at a page.
    pub(crate) fn new(file: &Tensor, bytes: Range<u64>) -> Self {
        let start = file.data_ptr().addr();
        let addresses = start + bytes.start as usize..start + bytes.end as usize;
        Self {
            _region: MappedRegion::new(addresses, LOST_PAGE),
            file: file.shallow_clone(),
            bytes,
        }
    }

    /// Removes the pages of `bytes` of the state from the memory of the process. They stay in the file, and in
    /// the system's cache as long as it has room.
    pub(crate) fn release(&self, bytes: Range<u64>) -> Result<()> {
        #[cfg(unix)]
        self.advise(bytes, libc::MADV_DONTNEED)?;
        #[cfg(not(unix))]
        let _ = bytes;
        Ok(())
    }

    /// Loads the pages of `bytes` of the state for writing, in one call instead of a page fault for each. Has no
    /// effect on systems without such a call, where page faults load them.
    pub(crate) fn populate(&self, bytes: Range<u64>) -> Result<()> {
        #[cfg(target_os = "linux")]
        match self.advise(bytes, libc::MADV_POPULATE_WRITE) {
            // Kernels before 5.14 do not know MADV_POPULATE_WRITE.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            result => result?,
        }
        #[cfg(not(target_os = "linux"))]
        let _ = bytes;
        Ok(())
    }

    /// Returns the pages of the file that lie completely in `bytes` of the state: the others may still be in use.
    /// The last page of the state counts as complete, because no other state shares it.
    #[cfg(unix)]
    fn inner_pages(&self, bytes: Range<u64>) -> Range<u64> {
        let page = page_bytes();
        let start = (self.bytes.start + bytes.start).next_multiple_of(page);
        let end = self.bytes.start + bytes.end;
        // Beyond the last element only padding follows, up to the end of the page.
        let end = if end >= self.bytes.end {
            self.bytes.end.next_multiple_of(page)
        } else {
            end / page * page
        };
        let end = end.min(crate::checks::bytes(&self.file));
        start.min(end)..end
    }

    #[cfg(unix)]
    fn advise(&self, bytes: Range<u64>, advice: libc::c_int) -> io::Result<()> {
        let pages = self.inner_pages(bytes);
        if pages.is_empty() {
            return Ok(());
        }
        // SAFETY: whole pages within the mapped file, which starts at one and which `file` keeps mapped: its storage
        // cannot be resized, and this crate gives the handle to nobody who could replace it. Shared pages of a file
        // lose no data by either advice.
        let result = unsafe {
            let start = self.file.data_ptr().cast::<u8>().add(pages.start as usize);
            libc::madvise(start.cast(), (pages.end - pages.start) as usize, advice)
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}
