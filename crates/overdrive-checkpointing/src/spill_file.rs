//! A temporary file for tensors. It has no name, so the system deletes it with its last handle.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_core::Error;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// The bytes of the buffer between a tensor and the file. Large enough for sequential disk accesses,
/// small beside the tensors that are offloaded.
const CHUNK_BYTES: i64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct SpillFile {
    file: File,
    /// The folder of the file, for messages.
    folder: PathBuf,
    space: Mutex<FreeSpace>,
}

#[derive(Debug, Default)]
struct FreeSpace {
    /// The length of the file.
    end: u64,
    /// The offsets of free blocks by their length, a [`block_len`]. Blocks are neither split nor joined: activations have
    /// similar sizes in each step.
    free_blocks: HashMap<u64, Vec<u64>>,
}

impl SpillFile {
    pub(crate) fn new(folder: Option<&Path>) -> Result<Arc<Self>> {
        let folder = folder.map_or_else(std::env::temp_dir, Path::to_path_buf);
        let file = tempfile::tempfile_in(&folder)
            .map_err(Error::io("create a file for offloaded tensors in", &folder))?;
        Ok(Arc::new(Self {
            file,
            folder,
            space: Mutex::default(),
        }))
    }

    fn space(&self) -> std::sync::MutexGuard<'_, FreeSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the elements of `tensor` in their logical order.
    pub(crate) fn write(self: &Arc<Self>, tensor: &Tensor) -> Result<FileBlock> {
        let flat = bytes_of(&tensor.f_to_device(Device::Cpu)?.f_contiguous()?)?;
        let len = flat.size()[0];
        let bytes = block_len(len.unsigned_abs());
        let offset = {
            let mut space = self.space();
            match space.free_blocks.get_mut(&bytes).and_then(Vec::pop) {
                Some(offset) => offset,
                None => {
                    space.end += bytes;
                    space.end - bytes
                }
            }
        };
        // Created before writing, so that an error below frees the block.
        let block = FileBlock {
            file: Arc::clone(self),
            offset,
            bytes,
        };
        let mut buffer = Vec::new();
        for start in (0..len).step_by(CHUNK_BYTES as usize) {
            let chunk = flat.f_narrow(0, start, CHUNK_BYTES.min(len - start))?;
            buffer.resize(chunk.numel(), 0);
            chunk.f_copy_data_u8(&mut buffer, chunk.numel())?;
            self.file
                .write_all_at(&buffer, offset + start.unsigned_abs())
                .map_err(Error::io("write offloaded tensors in", &self.folder))?;
        }
        Ok(block)
    }
}

/// Returns the length of the block for a tensor of so many bytes, one of eight lengths per doubling: batches of many
/// lengths use the same blocks, and at most an eighth of a block is lost.
fn block_len(bytes: u64) -> u64 {
    let step = bytes.next_power_of_two() / 16;
    bytes.next_multiple_of(step.max(1))
}

/// Returns the memory of a contiguous tensor as bytes, `(n)`.
fn bytes_of(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

/// The block of a file that holds a tensor. It is freed when this is dropped.
#[derive(Debug)]
pub(crate) struct FileBlock {
    file: Arc<SpillFile>,
    offset: u64,
    bytes: u64,
}

impl FileBlock {
    /// Reads into a contiguous tensor on the CPU that has the shape and dtype of the one that was written.
    pub(crate) fn read(&self, into: &Tensor) -> Result<()> {
        let flat = bytes_of(into)?;
        let len = flat.size()[0];
        let mut buffer = Vec::new();
        for start in (0..len).step_by(CHUNK_BYTES as usize) {
            let mut chunk = flat.f_narrow(0, start, CHUNK_BYTES.min(len - start))?;
            buffer.resize(chunk.numel(), 0);
            self.file
                .file
                .read_exact_at(&mut buffer, self.offset + start.unsigned_abs())
                .map_err(Error::io("read offloaded tensors in", &self.file.folder))?;
            chunk.f_copy_(&Tensor::f_from_slice(&buffer)?)?;
        }
        Ok(())
    }
}

impl Drop for FileBlock {
    fn drop(&mut self) {
        let mut space = self.file.space();
        space
            .free_blocks
            .entry(self.bytes)
            .or_default()
            .push(self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_over_many_lengths_uses_the_blocks_of_few() {
        let file = SpillFile::new(None).unwrap();
        for len in 1000..=2000 {
            let tensor = Tensor::arange(len, (Kind::Float, Device::Cpu));
            let block = file.write(&tensor).unwrap();
            let read = tensor.zeros_like();
            block.read(&read).unwrap();
            assert_eq!(read, tensor);
        }
        let end = file.space().end;
        assert!(end <= 10 * 8192, "{end}");
    }

    #[test]
    fn a_block_is_at_most_an_eighth_longer_than_its_tensor() {
        for bytes in 0..5000 {
            let block = block_len(bytes);
            assert!(
                bytes <= block && block <= bytes + bytes / 8,
                "{bytes}: {block}"
            );
            assert_eq!(block_len(block), block);
        }
    }
}
