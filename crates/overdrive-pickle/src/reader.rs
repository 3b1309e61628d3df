//! A reader of the bytes of a file, from front to back.

use crate::error::{Checked, bad};

#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], at: usize) -> Reader<'a> {
        Reader { bytes, at }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn take(&mut self, count: usize) -> Checked<&'a [u8]> {
        let end = self.at.checked_add(count);
        let Some(taken) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            return bad(format!("it ends within a value at byte {}", self.at));
        };
        self.at += count;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn byte(&mut self) -> Checked<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Checked<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Reads a text of `count` bytes.
    pub(crate) fn text(&mut self, count: usize) -> Checked<&'a str> {
        let bytes = self.take(count)?;
        std::str::from_utf8(bytes).or_else(|_| bad("a text in it is not UTF-8"))
    }

    /// Reads a text up to the end of the line.
    pub(crate) fn line(&mut self) -> Checked<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(length) = rest.iter().position(|&byte| byte == b'\n') else {
            return bad("it ends within a name");
        };
        let line = self.text(length)?;
        self.at += 1;
        Ok(line)
    }
}
