//! The samples of texts that a tokenizer is trained on.

use std::io::{Read, Seek, SeekFrom};

use crate::documents::json_text;
use crate::index::text_start;
use crate::range_source::{DataReader, read_error};
use crate::{Corpus, CorpusFile, Dataset, Error, Result, Sha256Digest, TextFormat};
use overdrive_core::random::random_u64;

/// The size of the blocks that are sampled: small enough that a sample of 16 MiB is spread over 128 of them.
const BLOCK_BYTES: u64 = 128 << 10;
/// The stream of random numbers that choose blocks (see [`overdrive_core::random::random_u64`]).
const SAMPLE_STREAM: u32 = 0xB9E5;

/// The number of runs of records that are sampled of a dataset.
const RUNS: usize = 64;

impl Corpus {
    /// Returns the texts of about `bytes` bytes, spread over the whole corpus, or all texts if it is not larger. Blocks of
    /// 128 KiB are chosen by the contents of the files, so that the sample is the same on every machine.
    ///
    /// The last item is an error if a file has changed since it was listed.
    pub fn sample(&self, bytes: u64) -> impl Iterator<Item = Result<String>> + Send + '_ {
        let blocks = choose_blocks(self, bytes).into_iter();
        let texts = blocks.map(|block| read_block(self, block));
        texts.chain(error_of(|| self.check_unchanged()))
    }
}

/// Returns the texts of about `bytes` bytes of a dataset: runs of records that begin at 64 evenly spaced positions.
///
/// The last item is an error if a file has changed since it was opened.
pub fn sample_texts<D: Dataset<Item = String> + ?Sized>(
    dataset: &D,
    bytes: u64,
) -> impl Iterator<Item = Result<String>> + Send + '_ {
    let start = |run: usize| (dataset.len() as u128 * run as u128 / RUNS as u128) as usize;
    let records =
        (1..=RUNS).flat_map(move |run| (start(run - 1)..start(run)).map(move |at| (run, at)));
    let mut taken = 0_u128;
    let texts = records.filter_map(move |(run, record)| {
        // What a run leaves is for the next ones.
        if taken * RUNS as u128 >= u128::from(bytes) * run as u128 {
            return None;
        }
        let text = dataset.get(record);
        taken += text.as_ref().map_or(0, String::len) as u128;
        Some(text)
    });
    texts.chain(error_of(|| dataset.check_unchanged()))
}

/// Returns the error of a check that is made when the iterator is asked for it.
fn error_of(
    check: impl FnOnce() -> Result<()> + Send,
) -> impl Iterator<Item = Result<String>> + Send {
    std::iter::once_with(check).filter_map(|checked| checked.err().map(Err))
}

/// A byte range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    /// The index of the file in the corpus.
    file: usize,
    start: u64,
    end: u64,
}

impl Block {
    fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns blocks with a total size of about `sample_bytes`, spread over the whole corpus, or all blocks if
/// the corpus is not larger.
///
/// Each file is divided into blocks of 128 KiB (most files are one block), and the blocks with the lowest
/// random numbers are taken. The number depends on the file's content and the block's offset, so the sample is
/// the same on every machine.
fn choose_blocks(corpus: &Corpus, sample_bytes: u64) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (file, of) in corpus.files().iter().enumerate() {
        let starts = (0..of.bytes).step_by(BLOCK_BYTES as usize);
        blocks.extend(starts.map(|start| {
            let end = (start + BLOCK_BYTES).min(of.bytes);
            let rank = random_u64(seed_of(of.digest), SAMPLE_STREAM, start);
            (rank, Block { file, start, end })
        }));
    }
    if corpus.total_bytes() > sample_bytes {
        blocks.sort_unstable_by_key(|(rank, block)| (*rank, block.file, block.start));
        let mut total = 0;
        let enough = |(_, block): &(u64, Block)| {
            let before = total;
            total += block.bytes();
            before < sample_bytes
        };
        let taken = blocks.iter().copied().take_while(enough).collect();
        blocks = taken;
        // Restores the order of the corpus: reading a file's blocks in order is faster than jumping between files.
        blocks.sort_unstable_by_key(|(_, block)| (block.file, block.start));
    }
    blocks.into_iter().map(|(_, block)| block).collect()
}

fn seed_of(digest: Sha256Digest) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest.0[..8]);
    u64::from_le_bytes(first)
}

/// Returns the text of a block; in a file of several blocks, only the block's complete lines.
fn read_block(corpus: &Corpus, block: Block) -> Result<String> {
    let file = &corpus.files()[block.file];
    let bytes = read_range(file, block)?;
    // Incomplete lines at the block's ends are not read: they would cut a word, a character or a record in
    // two. Only a block that lies within one line is taken unchanged.
    let mut lines = bytes.as_slice();
    if block.start == 0 {
        lines = &lines[text_start(lines)..];
    } else {
        lines = match lines.iter().position(|&byte| byte == b'\n') {
            Some(at) => &lines[at + 1..],
            None => lines,
        };
    }
    if block.end < file.bytes {
        lines = match lines.iter().rposition(|&byte| byte == b'\n') {
            Some(at) => &lines[..=at],
            None => lines,
        };
    }
    match file.format {
        // Tokens are built only from valid UTF-8; a block that begins within a character is the exception.
        TextFormat::Plain => Ok(String::from_utf8_lossy(lines).into_owned()),
        TextFormat::JsonLines => {
            let records = lines.split(|&byte| byte == b'\n');
            // An invalid record is skipped here; it becomes an error with its line when the tokens are built.
            let texts = records.filter_map(|line| json_text(line, corpus.text_field()).ok()?);
            Ok(texts.collect::<Vec<_>>().join("\n"))
        }
    }
}

fn read_range(file: &CorpusFile, block: Block) -> Result<Vec<u8>> {
    let mut handle = DataReader::open(&file.path)?;
    handle
        .seek(SeekFrom::Start(block.start))
        .map_err(read_error("read", &file.path))?;
    let mut bytes = Vec::new();
    handle
        .take(block.bytes())
        .read_to_end(&mut bytes)
        .map_err(read_error("read", &file.path))?;
    if bytes.len() as u64 != block.bytes() {
        return Err(Error::FileChanged {
            path: file.path.clone(),
        });
    }
    Ok(bytes)
}
