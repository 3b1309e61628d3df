/// A value of a GGUF file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// An unsigned integer of 8 bits.
    U8(u8),
    /// A signed integer of 8 bits.
    I8(i8),
    /// An unsigned integer of 16 bits.
    U16(u16),
    /// A signed integer of 16 bits.
    I16(i16),
    /// An unsigned integer of 32 bits.
    U32(u32),
    /// A signed integer of 32 bits.
    I32(i32),
    /// A float of 32 bits.
    F32(f32),
    /// A boolean.
    Bool(bool),
    /// A string.
    String(String),
    /// An array of one type.
    Array(GgufArray),
    /// An unsigned integer of 64 bits.
    U64(u64),
    /// A signed integer of 64 bits.
    I64(i64),
    /// A float of 64 bits.
    F64(f64),
}

/// An array of a GGUF file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufArray {
    /// Unsigned integers of 8 bits.
    U8(Vec<u8>),
    /// Signed integers of 8 bits.
    I8(Vec<i8>),
    /// Unsigned integers of 16 bits.
    U16(Vec<u16>),
    /// Signed integers of 16 bits.
    I16(Vec<i16>),
    /// Unsigned integers of 32 bits.
    U32(Vec<u32>),
    /// Signed integers of 32 bits.
    I32(Vec<i32>),
    /// Floats of 32 bits.
    F32(Vec<f32>),
    /// Booleans.
    Bool(Vec<bool>),
    /// Strings.
    String(Vec<String>),
    /// Arrays.
    Array(Vec<GgufArray>),
    /// Unsigned integers of 64 bits.
    U64(Vec<u64>),
    /// Signed integers of 64 bits.
    I64(Vec<i64>),
    /// Floats of 64 bits.
    F64(Vec<f64>),
}

impl GgufValue {
    /// Returns the number of the type in a file.
    pub(super) fn id(&self) -> u32 {
        match self {
            GgufValue::U8(_) => 0,
            GgufValue::I8(_) => 1,
            GgufValue::U16(_) => 2,
            GgufValue::I16(_) => 3,
            GgufValue::U32(_) => 4,
            GgufValue::I32(_) => 5,
            GgufValue::F32(_) => 6,
            GgufValue::Bool(_) => 7,
            GgufValue::String(_) => 8,
            GgufValue::Array(_) => 9,
            GgufValue::U64(_) => 10,
            GgufValue::I64(_) => 11,
            GgufValue::F64(_) => 12,
        }
    }

    /// Returns the number of an integer value, or `None` for another type or a number that does not fit.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            GgufValue::U8(n) => Some(n.into()),
            GgufValue::I8(n) => Some(n.into()),
            GgufValue::U16(n) => Some(n.into()),
            GgufValue::I16(n) => Some(n.into()),
            GgufValue::U32(n) => Some(n.into()),
            GgufValue::I32(n) => Some(n.into()),
            GgufValue::U64(n) => n.try_into().ok(),
            GgufValue::I64(n) => Some(n),
            _ => None,
        }
    }

    /// Returns the number of a float or integer value.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            GgufValue::F32(x) => Some(x.into()),
            GgufValue::F64(x) => Some(x),
            _ => self.as_i64().map(|n| n as f64),
        }
    }

    /// Returns the boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            GgufValue::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            GgufValue::String(string) => Some(string),
            _ => None,
        }
    }

    /// Returns the strings of an array.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            GgufValue::Array(GgufArray::String(strings)) => Some(strings),
            _ => None,
        }
    }

    /// Returns the numbers of an array of integers; `None` if one exceeds an `i64`, and for other types.
    pub fn as_i64s(&self) -> Option<Vec<i64>> {
        fn all<T: Copy + Into<i64>>(numbers: &[T]) -> Option<Vec<i64>> {
            Some(numbers.iter().map(|&n| n.into()).collect())
        }
        let GgufValue::Array(array) = self else {
            return None;
        };
        match array {
            GgufArray::U8(numbers) => all(numbers),
            GgufArray::I8(numbers) => all(numbers),
            GgufArray::U16(numbers) => all(numbers),
            GgufArray::I16(numbers) => all(numbers),
            GgufArray::U32(numbers) => all(numbers),
            GgufArray::I32(numbers) => all(numbers),
            GgufArray::U64(numbers) => numbers.iter().map(|&n| n.try_into().ok()).collect(),
            GgufArray::I64(numbers) => all(numbers),
            _ => None,
        }
    }

    /// Returns the booleans of an array.
    pub fn as_bools(&self) -> Option<&[bool]> {
        match self {
            GgufValue::Array(GgufArray::Bool(values)) => Some(values),
            _ => None,
        }
    }
}
