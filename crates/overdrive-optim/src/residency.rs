//! Advice to the system about the pages of mapped states.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

use tch::Tensor;

use crate::Result;

/// Bytes of a page, at least: parts of a file start at multiples.
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

/// Lets the pages of `bytes` go from the process: they stay in the file, and in the system's cache for
/// as long as it has room.
pub(crate) fn release(tensor: &Tensor, bytes: Range<u64>) -> Result<()> {
    // A page that is only partly of this range may still be in use.
    #[cfg(unix)]
    advise(tensor, inner_pages(tensor, bytes), libc::MADV_DONTNEED)?;
    #[cfg(not(unix))]
    let _ = (tensor, bytes);
    Ok(())
}

/// Brings the pages of `bytes` in, to be written, in one call instead of a fault for each. Without
/// effect where the system cannot: faults then do it.
pub(crate) fn populate(tensor: &Tensor, bytes: Range<u64>) -> Result<()> {
    #[cfg(target_os = "linux")]
    match advise(
        tensor,
        inner_pages(tensor, bytes),
        libc::MADV_POPULATE_WRITE,
    ) {
        // Kernels before 5.14 do not know it.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        result => result?,
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (tensor, bytes);
    Ok(())
}

/// The whole pages in `bytes` of a tensor, as addresses. The last page of a part belongs to it alone.
#[cfg(unix)]
fn inner_pages(tensor: &Tensor, bytes: Range<u64>) -> Range<usize> {
    let page = page_bytes() as usize;
    let base = tensor.data_ptr() as usize;
    let size = crate::checks::bytes(tensor);
    let start = (base + bytes.start as usize).next_multiple_of(page);
    let end = base + bytes.end as usize;
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
    // SAFETY: the pages belong to the mapped file that the tensor keeps alive: whole ones within it,
    // and of its last page the rest that no other part has. Shared pages of a file lose nothing by
    // either advice.
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
