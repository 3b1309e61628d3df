//! The inputs of decoding steps at fixed addresses.

use overdrive_attention::{PagedLayout, PagedSlots};
use overdrive_sys::transfer::copy_to;
use tch::{Device, Kind, Tensor};

use super::block_tables::{PreparedSequence, SequenceId};
use super::cache::{PagedCache, to_i64};
use super::{PagedBatch, PagedStep};
use crate::{Error, Result};

/// The alignment of the parts of the tensor, 16 bytes, in words.
const ALIGNMENT: usize = 4;

/// The inputs of a decoding step over a [`PagedCache`], one new token for each of some sequences, in a tensor at a
/// fixed address: a captured step reads from it, and each replay finds the next tokens there.
///
/// [`PagedCache::decode_step`] fills it in one copy. Since a graph has a fixed number of rows, a step may have more
/// rows than sequences: the padding rows compute their own tokens in a block of the pool that no sequence uses.
///
/// ```
/// use overdrive_kv_cache::{AttendOptions, KvCache, PagedCache, PagedCacheConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut cache = PagedCache::new(PagedCacheConfig { head_dim: 8, ..PagedCacheConfig::default() })?;
/// let mut inputs = cache.decode_inputs(4, 100)?; // up to 4 sequences of up to 100 tokens
/// let (first, _) = cache.add(&[5])?;
/// let (second, _) = cache.add(&[7])?;
///
/// // Two sequences in a step of four rows.
/// let mut step = cache.decode_step(&mut inputs, &[(first, 5), (second, 7)], 4)?.unwrap();
/// assert_eq!(step.input_ids()?.size(), [1, 4]);
/// let random = || Tensor::randn([1, 1, 4, 8], (Kind::Float, Device::Cpu));
/// let attended = step.batch()?.attend(0, &random(), &random(), &random(), &AttendOptions::default())?;
/// assert_eq!(attended.size(), [1, 1, 4, 8]);
/// step.commit();
/// assert_eq!((cache.len(first)?, cache.len(second)?), (1, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PagedDecodeInputs {
    /// All inputs as i32: the i64 parts come first, each value as two words.
    words: Tensor,
    /// The values that were last copied to `words`.
    host: Vec<i32>,
    parts: Parts,
    block_size: usize,
    longest: usize,
    /// The block of padding rows.
    padding: i32,
}

/// The offsets of the parts, in words.
#[derive(Debug, Clone, Copy)]
struct Parts {
    rows: usize,
    /// The blocks of all sequences, which come last.
    table: usize,
}

impl Parts {
    /// Returns the beginning of an i64 part: ids, positions, and the block and row of each new token.
    fn long(self, number: usize) -> usize {
        2 * number * self.rows
    }

    fn key_starts(self) -> usize {
        self.long(4)
    }

    fn key_counts(self) -> usize {
        self.key_starts() + self.rows
    }

    fn blocks(self) -> usize {
        self.key_counts() + self.rows
    }

    fn end(self) -> usize {
        self.blocks() + self.table
    }
}

impl PagedDecodeInputs {
    /// Returns the largest number of rows of a step.
    pub fn rows(&self) -> usize {
        self.parts.rows
    }

    /// Returns the size of the tensor in bytes.
    pub fn bytes(&self) -> u64 {
        4 * self.parts.end() as u64
    }

    /// Writes the inputs of a step of `rows` rows. Returns `false`, without writing anything, if there is no room for
    /// the blocks or if a sequence exceeds the maximum length.
    fn load(&mut self, prepared: &[PreparedSequence], rows: usize) -> Result<bool> {
        let parts = self.parts;
        // A padding row has one key, its own, in the padding block.
        let used: usize = prepared.iter().map(|new| new.table.len()).sum();
        let fits = prepared.len() <= rows
            && rows <= parts.rows
            && used < parts.table
            && prepared.iter().all(|new| new.past < self.longest);
        if !fits {
            return Ok(false);
        }
        self.host.clear();
        self.host.resize(parts.blocks() + used + 1, 0);
        let block_size = self.block_size;
        let host = &mut self.host;
        let mut end = 0;
        for row in 0..rows {
            let [id, position, block, slot] = match prepared.get(row) {
                Some(new) => {
                    let block = new.table.get(new.past / block_size).copied().unwrap_or(0);
                    let id = new.tokens.first().copied().unwrap_or(0);
                    [
                        id,
                        new.position,
                        block.into(),
                        to_i64(new.past % block_size),
                    ]
                }
                None => [0, 0, self.padding.into(), 0],
            };
            for (part, number) in [id, position, block, slot].into_iter().enumerate() {
                // Little-endian; no number is negative or has more than 31 bits.
                host[parts.long(part) + 2 * row] = int(number);
            }
            // The padding rows share the last entry of the table.
            let (start, count) = match prepared.get(row) {
                Some(new) => (end, to_i64(new.past + 1)),
                None => (used, 1),
            };
            host[parts.key_starts() + row] = int(to_i64(start * block_size));
            host[parts.key_counts() + row] = int(count);
            if let Some(new) = prepared.get(row) {
                for (at, block) in new.table.iter().enumerate() {
                    host[parts.blocks() + end + at] = int((*block).into());
                }
                end += new.table.len();
            }
        }
        host[parts.blocks() + used] = self.padding;
        let host = Tensor::f_from_slice(host)?;
        copy_to(&host, &self.words.f_narrow(0, 0, to_i64(host.numel()))?)?;
        Ok(true)
    }

    fn longs(&self, part: usize, rows: usize) -> Result<Tensor> {
        let words = self
            .words
            .f_narrow(0, to_i64(self.parts.long(part)), to_i64(2 * rows))?;
        Ok(words.f_view_dtype(Kind::Int64)?)
    }

    fn ints(&self, start: usize, count: usize) -> Result<Tensor> {
        Ok(self.words.f_narrow(0, to_i64(start), to_i64(count))?)
    }

    fn slots(&self, rows: usize) -> Result<PagedSlots> {
        let (blocks, places) = (self.longs(2, rows)?, self.longs(3, rows)?);
        Ok(PagedSlots::of_device(&blocks, &places, self.block_size)?)
    }

    fn layout(&self, rows: usize) -> Result<PagedLayout> {
        let parts = self.parts;
        let starts = self.ints(parts.key_starts(), rows)?;
        let counts = self.ints(parts.key_counts(), rows)?;
        let blocks = self.ints(parts.blocks(), parts.table)?;
        if self.words.device() != Device::Cpu {
            let (longest, size) = (self.longest, self.block_size);
            return Ok(PagedLayout::of_device(
                &blocks, &starts, &counts, longest, size,
            )?);
        }
        // The CPU kernel needs the tables of this step on the host.
        let read = |tensor: &Tensor| Ok::<_, Error>(Vec::<i32>::try_from(tensor)?);
        let (starts, counts, blocks) = (read(&starts)?, read(&counts)?, read(&blocks)?);
        let natural = |number: i32| usize::try_from(number).unwrap_or(0);
        let counts: Vec<usize> = counts.into_iter().map(natural).collect();
        let table = |(start, count): (&i32, &usize)| {
            let first = natural(*start) / self.block_size;
            let blocks = &blocks[first..first + count.div_ceil(self.block_size)];
            blocks.iter().map(|block| block.cast_unsigned()).collect()
        };
        let tables = starts.iter().zip(&counts).map(table).collect();
        let queries = vec![1; rows];
        Ok(PagedLayout::new(
            tables,
            queries,
            counts,
            self.block_size,
            Device::Cpu,
        )?)
    }
}

fn int(number: i64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

impl PagedCache {
    /// Returns `true` if steps over a cache on `device` can be captured. This requires an attention that reads the
    /// tables on the device, as the kernels of overdrive-gpu do.
    pub fn can_be_captured(device: Device) -> bool {
        PagedLayout::is_read_by(device)
    }

    /// Allocates the inputs of decoding steps of up to `rows` sequences with up to `longest` tokens each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with recurrent layers, whose states move between steps; [`Error::Tch`] if memory runs out.
    pub fn decode_inputs(&self, rows: usize, longest: usize) -> Result<PagedDecodeInputs> {
        if self.config().recurrent_layers() > 0 {
            return Err(Error::Unsupported {
                cache: "a paged cache with recurrent layers",
                what: "run steps at fixed addresses",
                hint: "its states move between steps; run each step with `batch`",
            });
        }
        let rows = rows.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let blocks = self.num_blocks();
        // Shared blocks occur once for each sequence; steps with more entries than fit are not captured.
        let most = rows.saturating_mul(self.blocks_for(longest));
        let table = most.min(2 * blocks) + rows;
        let parts = Parts {
            rows,
            table: table.next_multiple_of(ALIGNMENT),
        };
        let device = self.device();
        Ok(PagedDecodeInputs {
            words: Tensor::f_zeros([to_i64(parts.end())], (Kind::Int, device))?,
            host: Vec::new(),
            parts,
            block_size: self.block_size(),
            longest,
            // The pool has one block more than its tables use.
            padding: int(to_i64(blocks)),
        })
    }

    /// Begins a step with one new token for each of some sequences, as [`batch`](PagedCache::batch) does, and copies
    /// its inputs to `inputs`, with `rows` rows in total. Returns `None`, without any change, if they do not fit into
    /// `inputs`.
    ///
    /// # Errors
    /// As for [`batch`](PagedCache::batch).
    pub fn decode_step<'a>(
        &'a mut self,
        inputs: &'a mut PagedDecodeInputs,
        new_tokens: &[(SequenceId, i64)],
        rows: usize,
    ) -> Result<Option<PagedDecodeStep<'a>>> {
        let new_tokens: Vec<(SequenceId, &[i64])> = new_tokens
            .iter()
            .map(|(id, token)| (*id, std::slice::from_ref(token)))
            .collect();
        let step = self.step(&new_tokens)?;
        match inputs.load(step.prepared(), rows)? {
            true => Ok(Some(PagedDecodeStep { step, inputs, rows })),
            // Dropping the step frees its blocks.
            false => Ok(None),
        }
    }
}

/// A decoding step over a [`PagedCache`], from [`PagedCache::decode_step`]. Dropping it cancels the step.
#[derive(Debug)]
pub struct PagedDecodeStep<'a> {
    step: PagedStep<'a>,
    inputs: &'a PagedDecodeInputs,
    rows: usize,
}

impl PagedDecodeStep<'_> {
    /// Returns the new tokens, i64 `(1, rows)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn input_ids(&self) -> Result<Tensor> {
        Ok(self.inputs.longs(0, self.rows)?.f_unsqueeze(0)?)
    }

    /// Returns the position of each token in its sequence, i64 `(1, rows)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn position_ids(&self) -> Result<Tensor> {
        Ok(self.inputs.longs(1, self.rows)?.f_unsqueeze(0)?)
    }

    /// Returns the cache with which to run the model, any number of times. The work on a GPU depends only on the
    /// contents of the inputs.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn batch(&mut self) -> Result<PagedBatch<'_>> {
        let (slots, layout) = (
            self.inputs.slots(self.rows)?,
            self.inputs.layout(self.rows)?,
        );
        Ok(PagedBatch::new(self.step.without_tokens(), slots, layout))
    }

    /// Replaces the new tokens by those of a tensor on the same device, i32 or i64 `(N,)`, without reading it on the
    /// host.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn set_input_ids(&self, ids: &Tensor) -> Result<()> {
        let mut to = self.inputs.longs(0, ids.numel())?;
        Ok(to.f_copy_(ids)?)
    }

    /// Adds the new tokens to their sequences. Call it after running the model or replaying its captured step.
    pub fn commit(self) {
        // Without states, of which `decode_inputs` has refused any, nothing can fail.
        let _ = self.step.commit();
    }

    /// Ends the borrow of the cache, which keeps the new tokens separate until [`PagedCache::land`].
    pub fn launch(self) {
        self.step.launch();
    }
}
