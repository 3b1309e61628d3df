//! Arrow IPC, in which files and streams are sequences of messages.
//!
//! The layout is specified in "Arrow Columnar Format, serialization and interprocess communication".

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::FileDecoder;
use arrow_ipc::{Block as IpcBlock, MessageHeader, RecordBatch as IpcRecordBatch, root_as_message};
use overdrive_core::files::FileMap;

use super::{Block, TableFile};
use crate::Error;

#[derive(Debug)]
pub(super) struct ArrowFile {
    map: Arc<FileMap>,
    decoder: FileDecoder,
    /// The location of each record batch.
    batches: Vec<IpcBlock>,
    blocks: Vec<Block>,
}

/// A message: its header and the location of the header and the body.
struct Message<'a> {
    location: IpcBlock,
    header: arrow_ipc::Message<'a>,
    end: usize,
}

/// The marker before the length of a message, since version 0.15 of Arrow.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// The largest number of bytes of a decompressed buffer. A column of text or numbers with offsets of 32 bits has half of it
/// at most.
const MOST_BYTES: i64 = 1 << 32;

impl ArrowFile {
    /// Reads the headers of all messages, and the dictionaries.
    pub(super) fn open(map: Arc<FileMap>) -> Result<Self, String> {
        // The file format is the stream format between two magic strings, the first one padded to 8 bytes.
        let start = if map.starts_with(b"ARROW1") { 8 } else { 0 };
        let neither = "it is neither Parquet nor Arrow IPC";
        let first = next_message(&map, start)
            .map_err(|problem| format!("{neither} ({problem})"))?
            .ok_or(neither)?;
        let schema = first
            .header
            .header_as_schema()
            .ok_or("its first message is not a schema")?;
        let schema = Arc::new(try_fb_to_schema(schema).map_err(|error| error.to_string())?);
        let mut decoder = FileDecoder::new(schema, first.header.version());
        let (mut batches, mut blocks, mut dictionaries) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = first.end;
        while let Some(message) = next_message(&map, at)? {
            let location = message.location;
            match message.header.header_type() {
                MessageHeader::RecordBatch => {
                    let batch = message.header.header_as_record_batch();
                    let rows = batch.map_or(0, |batch| batch.length());
                    let rows =
                        usize::try_from(rows).map_err(|_| format!("a batch of {rows} rows"))?;
                    if rows > 0 {
                        blocks.push(Block {
                            rows,
                            offset: at as u64,
                            group: batches.len(),
                            first: 0,
                        });
                    }
                    batches.push(location);
                }
                MessageHeader::DictionaryBatch => {
                    let batch = message.header.header_as_dictionary_batch();
                    let batch = batch.ok_or("a dictionary without a header")?;
                    // All dictionaries are read on opening, so one cannot replace another later.
                    if !batch.isDelta() && dictionaries.contains(&batch.id()) {
                        return Err(
                            "it replaces a dictionary in mid-stream, which is not supported; \
                                    write it with unified dictionaries, or as Parquet"
                                .to_owned(),
                        );
                    }
                    dictionaries.push(batch.id());
                    decoder
                        .read_dictionary(&location, &bytes(&map, &location)?)
                        .map_err(|error| error.to_string())?;
                }
                _ => {}
            }
            at = message.end;
        }
        Ok(Self {
            map,
            decoder,
            batches,
            blocks,
        })
    }
}

impl TableFile for ArrowFile {
    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn read(&self, block: &Block) -> crate::Result<RecordBatch> {
        let location = self.batches.get(block.group);
        let location = location.ok_or_else(|| Error::other("no such batch"))?;
        let bytes = bytes(&self.map, location).map_err(Error::other)?;
        let batch = self.decoder.read_record_batch(location, &bytes);
        batch
            .map_err(Error::other)?
            .ok_or_else(|| Error::other("an empty message where a batch should be"))
    }
}

/// Returns a copy of the bytes of a message: its columns may outlive the map.
fn bytes(map: &[u8], location: &IpcBlock) -> Result<Buffer, String> {
    let start = location.offset() as usize;
    let header = location.metaDataLength() as usize;
    let length = header + location.bodyLength() as usize;
    let bytes = start
        .checked_add(length)
        .and_then(|end| map.get(start..end))
        .ok_or_else(|| format!("the file ends within the message at byte {start}"))?;
    if let Some(message) = next_message(map, start)? {
        let dictionary = message.header.header_as_dictionary_batch();
        let batch = dictionary.and_then(|dictionary| dictionary.data());
        let batch = batch.or(message.header.header_as_record_batch());
        check_lengths(batch, &bytes[header..])
            .map_err(|problem| format!("the message at byte {start} {problem}"))?;
    }
    Ok(Buffer::from(bytes))
}

/// Checks the lengths that compressed buffers begin with: arrow-ipc allocates as many bytes before it decompresses, and a
/// failed allocation ends the process.
fn check_lengths(batch: Option<IpcRecordBatch<'_>>, body: &[u8]) -> Result<(), String> {
    let compressed = batch.filter(|batch| batch.compression().is_some());
    let buffers = compressed.and_then(|batch| batch.buffers());
    for buffer in buffers.into_iter().flatten() {
        let start = usize::try_from(buffer.offset()).unwrap_or(usize::MAX);
        let prefix = body.get(start..).and_then(<[u8]>::first_chunk::<8>);
        let Some(prefix) = prefix.filter(|_| buffer.length() >= 8) else {
            // An empty buffer, or one that arrow-ipc refuses.
            continue;
        };
        let length = i64::from_le_bytes(*prefix);
        if length > MOST_BYTES {
            return Err(format!(
                "has a column of {length} bytes, of which at most {MOST_BYTES} are read; it is damaged, or needs smaller \
                 batches"
            ));
        }
    }
    Ok(())
}

/// Reads the header of the message at `at`; returns `None` at the end of the stream.
fn next_message(map: &[u8], at: usize) -> Result<Option<Message<'_>>, String> {
    let cut = || format!("the file ends within the message at byte {at}");
    let rest = map.get(at..).unwrap_or_default();
    if rest.is_empty() {
        return Ok(None);
    }
    let number = |bytes: &[u8]| {
        bytes
            .first_chunk::<4>()
            .map(|bytes| u32::from_le_bytes(*bytes))
    };
    // Before version 0.15 of Arrow there was no continuation marker.
    let prefix = if rest.starts_with(&CONTINUATION) {
        8
    } else {
        4
    };
    let length = number(rest.get(prefix - 4..).unwrap_or_default()).ok_or_else(cut)? as usize;
    if length == 0 {
        return Ok(None);
    }
    let header = rest.get(prefix..prefix + length).ok_or_else(cut)?;
    let header = root_as_message(header).map_err(|error| format!("at byte {at}: {error}"))?;
    let metadata = i32::try_from(prefix + length).map_err(|_| cut())?;
    let body = usize::try_from(header.bodyLength()).map_err(|_| cut())?;
    let end = at
        .checked_add(prefix + length)
        .and_then(|start| start.checked_add(body))
        .filter(|&end| end <= map.len())
        .ok_or_else(cut)?;
    Ok(Some(Message {
        location: IpcBlock::new(at as i64, metadata, body as i64),
        header,
        end,
    }))
}
