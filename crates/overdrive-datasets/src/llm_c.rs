//! The header of llm.c's files of tokens.

use std::path::Path;

use crate::store_format::u32_at;
use crate::{Error, Result, TokenWidth};

/// The length of llm.c's header: 256 numbers of 4 bytes.
pub(crate) const HEADER_BYTES: usize = 1024;
/// The magic number and the version of llm.c's files, with the width of their tokens (`dev/data/data_common.py`).
const FORMATS: [(u32, u32, TokenWidth); 2] = [
    (20_240_520, 1, TokenWidth::U16),
    (20_240_801, 7, TokenWidth::U32),
];

/// Returns the width of the tokens of a file of llm.c; `None` if it is not one.
pub(crate) fn width(path: &Path, file: &[u8]) -> Result<Option<TokenWidth>> {
    let Some(header) = file.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let [magic, version, tokens] = [0, 4, 8].map(|at| u32_at(header, at));
    let mut formats = FORMATS.iter();
    let Some(&(_, _, width)) = formats.find(|format| (format.0, format.1) == (magic, version))
    else {
        return Ok(None);
    };
    let bytes = HEADER_BYTES as u64 + u64::from(tokens) * width.bytes() as u64;
    if bytes != file.len() as u64 {
        let problem = format!(
            "its llm.c header declares {tokens} tokens, so it should have {bytes} bytes, but it has {}; it was \
             truncated, write it again",
            file.len()
        );
        return Err(Error::damaged(path, problem));
    }
    Ok(Some(width))
}
