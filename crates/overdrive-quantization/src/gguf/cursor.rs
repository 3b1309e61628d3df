use super::value::{GgufArray, GgufValue};

/// How deep arrays of arrays may go. The format sets no limit; no writer goes beyond two.
const MAX_DEPTH: usize = 4;

/// Reads the header; every length is checked against what is left of the file before anything of that
/// length is made. Errors are sentences for [`Error::BadGguf`](crate::Error::BadGguf).
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    place: usize,
}

type Read<T> = Result<T, String>;

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, place: 0 }
    }

    /// Bytes read so far.
    pub(super) fn place(&self) -> usize {
        self.place
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.place
    }

    fn take(&mut self, count: usize) -> Read<&'a [u8]> {
        if count > self.left() {
            return Err(format!(
                "it ends at byte {}, within its header: {count} bytes were to follow byte {}",
                self.bytes.len(),
                self.place
            ));
        }
        let taken = &self.bytes[self.place..self.place + count];
        self.place += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Read<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Read<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn string(&mut self) -> Read<String> {
        let length = self.u64()?;
        let place = self.place;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = self.take(length)?;
        let text = std::str::from_utf8(bytes);
        text.map(str::to_owned)
            .map_err(|_| format!("the text at byte {place} is not UTF-8"))
    }

    pub(super) fn value(&mut self, kind: u32) -> Read<GgufValue> {
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
            other => return Err(format!("it has a value of the unknown type {other}")),
        })
    }

    fn bool(&mut self) -> Read<bool> {
        match self.array::<1>()?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("a truth value is {other}: expected 0 or 1")),
        }
    }

    fn list(&mut self, depth: usize) -> Read<GgufArray> {
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
            7 => GgufArray::Bool(self.many(count, 1, Cursor::bool)?),
            8 => GgufArray::String(self.many(count, 8, Cursor::string)?),
            9 if depth + 1 >= MAX_DEPTH => {
                return Err(format!("its arrays are nested more than {MAX_DEPTH} deep"));
            }
            // An inner array is at least its type and its length.
            9 => GgufArray::Array(self.many(count, 12, |cursor| cursor.list(depth + 1))?),
            10 => GgufArray::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => GgufArray::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => GgufArray::F64(self.numbers(count, f64::from_le_bytes)?),
            other => return Err(format!("it has an array of the unknown type {other}")),
        })
    }

    fn numbers<const N: usize, T>(&mut self, count: usize, from: fn([u8; N]) -> T) -> Read<Vec<T>> {
        let bytes = self.take(count.saturating_mul(N))?;
        let (numbers, _) = bytes.as_chunks::<N>();
        Ok(numbers.iter().map(|bytes| from(*bytes)).collect())
    }

    /// `count` items of at least `least` bytes each.
    fn many<T>(
        &mut self,
        count: usize,
        least: usize,
        mut read: impl FnMut(&mut Self) -> Read<T>,
    ) -> Read<Vec<T>> {
        if count.saturating_mul(least) > self.left() {
            return Err(format!(
                "an array of {count} items at byte {} is longer than the file",
                self.place
            ));
        }
        (0..count).map(|_| read(self)).collect()
    }
}
