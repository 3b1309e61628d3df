use super::value::{GgufArray, GgufValue};

/// The maximum depth of nested arrays. The format sets no limit, so a damaged file could overflow the
/// stack; no writer uses more than two.
const MAX_DEPTH: usize = 4;

/// A reader of the header. Every length is checked against the rest of the file before anything of that
/// length is allocated.
#[derive(Debug)]
pub(super) struct HeaderReader<'a> {
    bytes: &'a [u8],
    position: usize,
}

/// A result whose errors are sentences for [`overdrive_core::Error::Parse`].
pub(super) type Parsed<T> = Result<T, String>;

impl<'a> HeaderReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        HeaderReader { bytes, position: 0 }
    }

    /// Returns the number of bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    fn take(&mut self, count: usize) -> Parsed<&'a [u8]> {
        if count > self.remaining() {
            return Err(format!(
                "it is truncated: it ends at byte {}, but its header needs {count} bytes from byte {} on",
                self.bytes.len(),
                self.position
            ));
        }
        let bytes = &self.bytes[self.position..self.position + count];
        self.position += count;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn string(&mut self) -> Parsed<String> {
        let length = self.u64()?;
        let position = self.position;
        // A length beyond `usize` fails in `take` as one beyond the file does.
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = self.take(length)?;
        let string = std::str::from_utf8(bytes);
        string
            .map(str::to_owned)
            .map_err(|_| format!("the string at byte {position} is not UTF-8"))
    }

    pub(super) fn value(&mut self, kind: u32) -> Parsed<GgufValue> {
        Ok(match kind {
            0 => GgufValue::U8(self.array::<1>()?[0]),
            1 => GgufValue::I8(i8::from_le_bytes(self.array()?)),
            2 => GgufValue::U16(u16::from_le_bytes(self.array()?)),
            3 => GgufValue::I16(i16::from_le_bytes(self.array()?)),
            4 => GgufValue::U32(self.u32()?),
            5 => GgufValue::I32(i32::from_le_bytes(self.array()?)),
            6 => GgufValue::F32(f32::from_le_bytes(self.array()?)),
            7 => GgufValue::Bool(self.bool()?),
            8 => GgufValue::String(self.string()?),
            9 => GgufValue::Array(self.list(0)?),
            10 => GgufValue::U64(self.u64()?),
            11 => GgufValue::I64(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::F64(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("it has a value of unknown type {other}")),
        })
    }

    fn bool(&mut self) -> Parsed<bool> {
        match self.array::<1>()?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("a boolean is {other}; it must be 0 or 1")),
        }
    }

    fn list(&mut self, depth: usize) -> Parsed<GgufArray> {
        let kind = self.u32()?;
        let count = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
        Ok(match kind {
            0 => GgufArray::U8(self.take(count)?.to_vec()),
            1 => GgufArray::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => GgufArray::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => GgufArray::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => GgufArray::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => GgufArray::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => GgufArray::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => GgufArray::Bool(self.items(count, 1, HeaderReader::bool)?),
            8 => GgufArray::String(self.items(count, 8, HeaderReader::string)?),
            9 if depth + 1 >= MAX_DEPTH => {
                return Err(format!("its arrays are nested more than {MAX_DEPTH} deep"));
            }
            // An inner array has at least its type and its length.
            9 => GgufArray::Array(self.items(count, 12, |reader| reader.list(depth + 1))?),
            10 => GgufArray::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => GgufArray::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => GgufArray::F64(self.numbers(count, f64::from_le_bytes)?),
            other => return Err(format!("it has an array of unknown type {other}")),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        count: usize,
        from: fn([u8; N]) -> T,
    ) -> Parsed<Vec<T>> {
        // Saturating: an overflow would pass the check of `take`.
        let bytes = self.take(count.saturating_mul(N))?;
        let (numbers, _) = bytes.as_chunks::<N>();
        Ok(numbers.iter().map(|bytes| from(*bytes)).collect())
    }

    /// Reads `count` items of at least `min_bytes` bytes each.
    fn items<T>(
        &mut self,
        count: usize,
        min_bytes: usize,
        mut read: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        if count.saturating_mul(min_bytes) > self.remaining() {
            return Err(format!(
                "an array of {count} items at byte {} is longer than the file",
                self.position
            ));
        }
        (0..count).map(|_| read(self)).collect()
    }
}
