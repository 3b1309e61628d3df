//! SentencePiece's compiled normalization: a double-array trie and the texts that it points to.

/// Checks that a reader of the map never leaves its trie or its texts, whatever the input.
///
/// The map consists of the trie's length in bytes, the trie in 32-bit units, and the texts, each followed by a
/// zero byte. The unit of a node holds the offset of its children; a child is at the offset XOR its letter.
pub(super) fn check(map: &[u8]) -> Result<(), String> {
    let (length, rest) = map
        .split_first_chunk::<4>()
        .ok_or("a map of at least 4 bytes")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > rest.len() || !length.is_multiple_of(4) {
        return Err(format!("a map whose trie of {length} bytes is whole"));
    }
    let (trie, texts) = rest.split_at(length);
    let (units, _) = trie.as_chunks::<4>();
    let unit = |node: usize| units.get(node).map(|bytes| u32::from_le_bytes(*bytes));
    let texts = std::str::from_utf8(texts).map_err(|_| "a map whose texts are UTF-8")?;
    let outside = "a map whose nodes lie within its trie";
    let mut seen = vec![false; units.len()];
    let mut nodes = vec![0];
    while let Some(node) = nodes.pop() {
        let value = unit(node).ok_or(outside)?;
        if std::mem::replace(&mut seen[node], true) {
            continue;
        }
        let offset = (value >> 10) << ((value & (1 << 9)) >> 6);
        let children = node ^ offset as usize;
        // A reader accesses the node of any letter before it knows whether the node exists.
        if children | 0xff >= units.len() {
            return Err(outside.to_owned());
        }
        for letter in 1..=0xff {
            let child = children ^ letter;
            let value = unit(child).ok_or(outside)?;
            if value & (1 << 31 | 0xff) != letter as u32 {
                continue;
            }
            nodes.push(child);
            if (value >> 8) & 1 == 1 {
                let offset = (value >> 10) << ((value & (1 << 9)) >> 6);
                let leaf = unit(child ^ offset as usize).ok_or(outside)?;
                if !texts.is_char_boundary((leaf & !(1 << 31)) as usize) {
                    return Err("a map whose leaves point to its texts".to_owned());
                }
            }
        }
    }
    Ok(())
}
