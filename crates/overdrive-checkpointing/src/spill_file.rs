//! A temporary file for tensors, without a name: it is gone when the last of them is.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Bytes that go through host memory at a time.
const CHUNK: i64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct SpillFile {
    file: File,
    space: Mutex<Space>,
}

#[derive(Debug, Default)]
struct Space {
    end: u64,
    /// Offsets of stretches that are free again, by their length: activations come back in the same
    /// sizes each step.
    holes: HashMap<u64, Vec<u64>>,
}

impl SpillFile {
    pub(crate) fn new(folder: Option<&Path>) -> Result<Arc<Self>> {
        let file = match folder {
            Some(folder) => tempfile::tempfile_in(folder),
            None => tempfile::tempfile(),
        };
        Ok(Arc::new(Self {
            file: file.map_err(failed("making it"))?,
            space: Mutex::default(),
        }))
    }

    fn space(&self) -> std::sync::MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the elements of `tensor` in their logical order.
    pub(crate) fn write(self: &Arc<Self>, tensor: &Tensor) -> Result<Spilled> {
        let flat = bytes_of(&tensor.f_to_device(Device::Cpu)?.f_contiguous()?)?;
        let len = flat.size()[0];
        let bytes = len.unsigned_abs();
        let offset = {
            let mut space = self.space();
            match space.holes.get_mut(&bytes).and_then(Vec::pop) {
                Some(offset) => offset,
                None => {
                    space.end += bytes;
                    space.end - bytes
                }
            }
        };
        // Owned from here on: a failure below frees the stretch.
        let spilled = Spilled {
            file: Arc::clone(self),
            offset,
            bytes,
        };
        let mut buffer = Vec::new();
        for start in (0..len).step_by(CHUNK as usize) {
            let part = flat.f_narrow(0, start, CHUNK.min(len - start))?;
            buffer.resize(part.numel(), 0);
            part.f_copy_data_u8(&mut buffer, part.numel())?;
            self.file
                .write_all_at(&buffer, offset + start.unsigned_abs())
                .map_err(failed("writing (is there room?)"))?;
        }
        Ok(spilled)
    }
}

fn failed(operation: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::File { operation, source }
}

/// The memory of a contiguous tensor as bytes, `(n)`.
fn bytes_of(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

/// A stretch of the file.
#[derive(Debug)]
pub(crate) struct Spilled {
    file: Arc<SpillFile>,
    offset: u64,
    bytes: u64,
}

impl Spilled {
    /// Reads into a contiguous tensor on the CPU, of the shape and dtype that was written.
    pub(crate) fn read(&self, into: &Tensor) -> Result<()> {
        let flat = bytes_of(into)?;
        let len = flat.size()[0];
        let mut buffer = Vec::new();
        for start in (0..len).step_by(CHUNK as usize) {
            let mut part = flat.f_narrow(0, start, CHUNK.min(len - start))?;
            buffer.resize(part.numel(), 0);
            self.file
                .file
                .read_exact_at(&mut buffer, self.offset + start.unsigned_abs())
                .map_err(failed("reading it back"))?;
            part.f_copy_(&Tensor::f_from_slice(&buffer)?)?;
        }
        Ok(())
    }
}

impl Drop for Spilled {
    fn drop(&mut self) {
        let mut space = self.file.space();
        space.holes.entry(self.bytes).or_default().push(self.offset);
    }
}
