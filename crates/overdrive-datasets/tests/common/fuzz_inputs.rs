//! The valid inputs of the fuzz targets, from fixtures or built in memory.

use std::io::Write;

use overdrive_datasets::{StoreOptions, TokenStoreWriter};

pub(super) fn token_store() -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a folder for temporary files");
    let path = dir.path().join("seed.tokens");
    let mut writer = TokenStoreWriter::create(&path, StoreOptions::new(300)).expect("a store");
    for document in [&[1, 2, 3][..], &[299], &[7; 50]] {
        writer
            .push_document(document, 10)
            .expect("tokens of the vocabulary");
    }
    writer.finish().expect("a store");
    std::fs::read(path).expect("the store")
}

/// Returns blocks of BGZF with their end marker, 40 bytes of data each.
pub(super) fn bgzip(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for block in data.chunks(40).chain([&[][..]]) {
        let mut encoder =
            flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(block).expect("a vector takes all");
        let deflated = encoder.finish().expect("a vector takes all");
        let size = 12 + 6 + deflated.len() + 8;
        out.extend([
            0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 6, 0, b'B', b'C', 2, 0,
        ]);
        out.extend(((size - 1) as u16).to_le_bytes());
        out.extend(deflated);
        let mut crc = flate2::Crc::new();
        crc.update(block);
        out.extend(crc.sum().to_le_bytes());
        out.extend((block.len() as u32).to_le_bytes());
    }
    out
}

/// Returns a frame of Zstandard for each 50 bytes of data, stored without compression.
pub(super) fn zstd_raw(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for block in data.chunks(50) {
        // A single segment whose size is one byte; one last block, raw.
        out.extend([0x28, 0xb5, 0x2f, 0xfd, 0x20, block.len() as u8]);
        let header = (block.len() as u32) << 3 | 1;
        out.extend(&header.to_le_bytes()[..3]);
        out.extend(block);
    }
    out
}
