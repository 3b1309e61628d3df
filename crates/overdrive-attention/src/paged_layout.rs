use overdrive_sys::transfer;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// The queries of each sequence of a step, and the blocks of its keys.
///
/// Create it once for all layers of a step: tables and lengths are checked and copied to the device only here.
#[derive(Debug)]
pub struct PagedLayout {
    pub(crate) block_tables: Vec<Vec<u32>>,
    pub(crate) query_lengths: Vec<usize>,
    pub(crate) key_lengths: Vec<usize>,
    pub(crate) block_size: usize,
    pub(crate) queries: usize,
    pub(crate) device: Device,
    /// The largest block that a sequence uses, and that sequence.
    largest: Option<(u32, usize)>,
    /// `true` if only the device knows the tables and lengths.
    pub(crate) is_of_device: bool,
    /// The tables and lengths on the device; `None` for a CPU, whose kernel reads the host's.
    pub(crate) on_device: Option<DeviceTables>,
}

/// The tables and lengths of the sequences that have queries, as tensors. The blocks of all sequences are numbered
/// consecutively, so that sequence `n` begins at key `key_starts[n]`.
#[derive(Debug)]
pub(crate) struct DeviceTables {
    /// The blocks of all sequences, concatenated, i32.
    pub(crate) blocks: Tensor,
    /// The cumulative numbers of queries, i32 `(N + 1,)`.
    pub(crate) query_starts: Tensor,
    /// The first key of each sequence among the keys of all blocks, and the total number of keys, i32 `(N + 1,)`.
    pub(crate) key_starts: Tensor,
    /// The number of keys of each sequence, i32 `(N,)`.
    pub(crate) key_counts: Tensor,
    pub(crate) longest_queries: i64,
    pub(crate) longest_keys: i64,
    /// `true` if every query has a key at its own position.
    pub(crate) every_query_has_a_key: bool,
    /// The offset of the blocks of each sequence, including sequences without queries.
    pub(crate) block_starts: Vec<i64>,
}

impl PagedLayout {
    /// Checks the layout of sequences over a pool on `device` whose blocks have `block_size` rows. All three lists have
    /// one entry for each sequence:
    ///
    /// - `block_tables`: the blocks that hold its keys, in order: key `k` is row `k % block_size` of block
    ///   `table[k / block_size]`. A table may be longer than its keys need;
    /// - `query_lengths`: the number of its queries; the queries of all sequences are concatenated;
    /// - `key_lengths`: the number of its keys, including those of its new queries.
    ///
    /// # Errors
    /// [`Error::PagedLayout`] for a block size of 0, lists of different lengths, and a table that is too short;
    /// [`Error::Tch`] if the device does not exist.
    pub fn new(
        block_tables: Vec<Vec<u32>>,
        query_lengths: Vec<usize>,
        key_lengths: Vec<usize>,
        block_size: usize,
        device: Device,
    ) -> Result<PagedLayout> {
        let error = |argument, problem: String| Err(Error::PagedLayout { argument, problem });
        if block_size == 0 {
            return error("block_size", "is 0, expected at least 1".to_owned());
        }
        let sequences = block_tables.len();
        for (name, lengths) in [
            ("query_lengths", &query_lengths),
            ("key_lengths", &key_lengths),
        ] {
            if lengths.len() != sequences {
                let count = lengths.len();
                return error(
                    name,
                    format!("has {count} entries for {sequences} block tables"),
                );
            }
        }
        let mut largest: Option<(u32, usize)> = None;
        for (sequence, (table, keys)) in block_tables.iter().zip(&key_lengths).enumerate() {
            let used = keys.div_ceil(block_size);
            let Some(blocks) = table.get(..used) else {
                let problem = format!(
                    "sequence {sequence} has {keys} keys, which need {used} blocks of {block_size}, but its table has {}",
                    table.len()
                );
                return error("block_tables", problem);
            };
            if let Some(block) = blocks.iter().max()
                && largest.is_none_or(|(largest, _)| *block > largest)
            {
                largest = Some((*block, sequence));
            }
        }
        let mut layout = PagedLayout {
            // Saturating, so that absurd lengths fail the check against the queries instead of overflowing.
            queries: (query_lengths.iter()).fold(0, |sum: usize, n| sum.saturating_add(*n)),
            block_tables,
            query_lengths,
            key_lengths,
            block_size,
            device,
            largest,
            is_of_device: false,
            on_device: None,
        };
        if device != Device::Cpu {
            layout.on_device = Some(layout.tables(device)?);
        }
        Ok(layout)
    }

    /// Returns `true` if a device supports layouts that only the device knows ([`of_device`](PagedLayout::of_device)):
    /// a GPU on which the kernels of overdrive-gpu are on.
    pub fn is_read_by(device: Device) -> bool {
        device.is_cuda() && matches!(overdrive_gpu::kernels(device), Ok(Some(_)))
    }

    /// Creates a layout of sequences of one query each from tensors on a GPU, for captured steps, which depend on no
    /// host values: each replay reads the current contents of the tensors. All are i32 and aligned to 16 bytes:
    ///
    /// - `blocks`: the blocks of all sequences, concatenated;
    /// - `key_starts (N,)`: the index in `blocks` of each sequence's first block, times `block_size`;
    /// - `key_counts (N,)`: the number of keys of each sequence, including its new one; at most `longest_keys`.
    ///
    /// The host does not check their contents. Only the decode kernel of overdrive-gpu supports such a layout
    /// ([`is_read_by`](PagedLayout::is_read_by)); otherwise [`attention_paged`](crate::attention_paged) fails.
    ///
    /// # Errors
    /// [`Error::PagedLayout`] for another dtype or shape; [`Error::Tch`] if memory runs out.
    pub fn of_device(
        blocks: &Tensor,
        key_starts: &Tensor,
        key_counts: &Tensor,
        longest_keys: usize,
        block_size: usize,
    ) -> Result<PagedLayout> {
        let device = blocks.device();
        let size = key_counts.size();
        for (argument, tensor) in [
            ("blocks", blocks),
            ("key_starts", key_starts),
            ("key_counts", key_counts),
        ] {
            let fits = argument == "blocks" || tensor.size() == size;
            if tensor.f_kind()? != Kind::Int || tensor.dim() != 1 || !fits {
                let (kind, found) = (tensor.f_kind()?, tensor.size());
                let problem = format!("is {kind:?} {found:?}, expected Int (N,)");
                return Err(Error::PagedLayout { argument, problem });
            }
        }
        let sequences = key_counts.numel();
        let rows = i64::try_from(sequences).unwrap_or(i64::MAX);
        Ok(PagedLayout {
            block_tables: vec![Vec::new(); sequences],
            query_lengths: vec![1; sequences],
            key_lengths: vec![longest_keys; sequences],
            block_size,
            queries: sequences,
            device,
            largest: None,
            is_of_device: true,
            on_device: Some(DeviceTables {
                blocks: blocks.shallow_clone(),
                query_starts: Tensor::f_arange(rows + 1, (Kind::Int, device))?,
                key_starts: key_starts.shallow_clone(),
                key_counts: key_counts.shallow_clone(),
                longest_queries: 1,
                longest_keys: i64::try_from(longest_keys).unwrap_or(i64::MAX),
                every_query_has_a_key: true,
                block_starts: Vec::new(),
            }),
        })
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.block_tables.len()
    }

    /// Returns `true` if there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.block_tables.is_empty()
    }

    /// Checks the layout against the number of queries and a pool of blocks.
    pub(crate) fn check(&self, queries: i64, blocks: i64, block_size: usize) -> Result<()> {
        let error = |argument, problem: String| Err(Error::PagedLayout { argument, problem });
        if block_size != self.block_size {
            let problem = format!(
                "is {}, but the blocks of the pool have {block_size} rows",
                self.block_size
            );
            return error("block_size", problem);
        }
        if i64::try_from(self.queries) != Ok(queries) {
            let problem = format!(
                "add up to {}, but there are {queries} queries",
                self.queries
            );
            return error("query_lengths", problem);
        }
        match self.largest {
            Some((block, sequence)) if i64::from(block) >= blocks => error(
                "block_tables",
                format!("sequence {sequence} names block {block} of a pool of {blocks}"),
            ),
            _ => Ok(()),
        }
    }

    /// Returns the number of blocks that hold keys of sequence `index`.
    pub(crate) fn used_blocks(&self, index: usize) -> usize {
        self.key_lengths[index].div_ceil(self.block_size)
    }

    /// Copies tables and lengths to `device`.
    pub(crate) fn tables(&self, device: Device) -> Result<DeviceTables> {
        let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let with_queries: Vec<usize> = (0..self.len())
            .filter(|index| self.query_lengths[*index] > 0)
            .collect();
        let (mut blocks, mut block_starts) = (Vec::new(), Vec::with_capacity(self.len()));
        for (index, table) in self.block_tables.iter().enumerate() {
            block_starts.push(blocks.len());
            let used = &table[..self.used_blocks(index)];
            blocks.extend(used.iter().map(|block| block.cast_signed()));
        }
        let mut query_starts = vec![0];
        let mut queries = 0;
        for &index in &with_queries {
            queries += self.query_lengths[index];
            query_starts.push(int(queries));
        }
        let starts = with_queries.iter().map(|index| block_starts[*index]);
        let mut key_starts: Vec<i32> = starts.map(|start| int(start * self.block_size)).collect();
        key_starts.push(int(blocks.len() * self.block_size));
        let counts = with_queries.iter().map(|index| self.key_lengths[*index]);
        let key_counts: Vec<i32> = counts.map(int).collect();
        // One copy for all of them, each aligned to 16 bytes.
        let parts = [&blocks, &query_starts, &key_starts, &key_counts];
        let mut all = Vec::new();
        for part in parts {
            all.extend_from_slice(part);
            all.resize(all.len().next_multiple_of(4), 0);
        }
        let all = transfer::to_device(Tensor::f_from_slice(&all)?, device)?;
        let mut start = 0;
        let mut next = |part: &Vec<i32>| {
            let (from, count) = (start, part.len());
            start += count.next_multiple_of(4);
            all.f_narrow(0, from as i64, count as i64)
        };
        let [block_table, query_starts, key_starts, key_counts] = [
            next(parts[0])?,
            next(parts[1])?,
            next(parts[2])?,
            next(parts[3])?,
        ];
        let longest = |lengths: &[usize]| {
            let used = with_queries.iter().map(|index| lengths[*index]);
            used.max().unwrap_or(0) as i64
        };
        Ok(DeviceTables {
            blocks: block_table,
            query_starts,
            key_starts,
            key_counts,
            longest_queries: longest(&self.query_lengths),
            longest_keys: longest(&self.key_lengths),
            every_query_has_a_key: with_queries
                .iter()
                .all(|index| self.key_lengths[*index] >= self.query_lengths[*index]),
            block_starts: block_starts.into_iter().map(|start| start as i64).collect(),
        })
    }
}
