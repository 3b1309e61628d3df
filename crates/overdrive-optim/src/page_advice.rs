//! Advice to the operating system about the pages of mapped states.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use tch::Tensor;

use crate::Result;

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

/// Removes the pages of `bytes` from the memory of the process. They stay in the file, and in the
/// system's cache as long as it has room.
pub(crate) fn release(tensor: &Tensor, bytes: Range<u64>) -> Result<()> {
    #[cfg(unix)]
    advise(tensor, inner_pages(tensor, bytes), libc::MADV_DONTNEED)?;
    #[cfg(not(unix))]
    let _ = (tensor, bytes);
    Ok(())
}

/// Loads the pages of `bytes` for writing, in one call instead of a page fault for each. Has no effect on
/// systems without such a call, where page faults load them.
pub(crate) fn populate(tensor: &Tensor, bytes: Range<u64>) -> Result<()> {
    #[cfg(target_os = "linux")]
    match advise(
        tensor,
        inner_pages(tensor, bytes),
        libc::MADV_POPULATE_WRITE,
    ) {
        // Kernels before 5.14 do not know MADV_POPULATE_WRITE.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        result => result?,
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (tensor, bytes);
    Ok(())
}

/// Returns the addresses of the pages that lie completely in `bytes` of a tensor: the others may still be
/// in use. The last page of a tensor counts as complete, because no other tensor shares it.
#[cfg(unix)]
fn inner_pages(tensor: &Tensor, bytes: Range<u64>) -> Range<usize> {
    let page = page_bytes() as usize;
    let base = tensor.data_ptr() as usize;
    let size = crate::checks::bytes(tensor);
    let start = (base + bytes.start as usize).next_multiple_of(page);
    let end = base + bytes.end as usize;
    // Beyond the last element only padding follows, up to the end of the page.
    let end = if bytes.end == size {
        end.next_multiple_of(page)
    } else {
        end / page * page
    };
    start..end.max(start)
}

#[cfg(unix)]
fn advise(tensor: &Tensor, pages: Range<usize>, advice: libc::c_int) -> io::Result<()> {
    if pages.is_empty() {
        return Ok(());
    }
    let offset = pages.start - tensor.data_ptr() as usize;
    // SAFETY: the pages belong to the mapped file that the tensor keeps alive: complete ones within it,
    // and its last page, which no other tensor shares. Shared pages of a file lose no data by either
    // advice.
    let result = unsafe {
        let start = tensor.data_ptr().cast::<u8>().add(offset);
        libc::madvise(start.cast(), pages.len(), advice)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
