/// A value of a GGUF file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// 8 bits, unsigned.
    U8(u8),
    /// 8 bits.
    I8(i8),
    /// 16 bits, unsigned.
    U16(u16),
    /// 16 bits.
    I16(i16),
    /// 32 bits, unsigned.
    U32(u32),
    /// 32 bits.
    I32(i32),
    /// A float of 32 bits.
    F32(f32),
    /// True or false.
    Bool(bool),
    /// Text.
    String(String),
    /// Many of one type.
    Array(GgufArray),
    /// 64 bits, unsigned.
    U64(u64),
    /// 64 bits.
    I64(i64),
    /// A float of 64 bits.
    F64(f64),
}

/// An array of a GGUF file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufArray {
    /// Of 8 bits, unsigned.
    U8(Vec<u8>),
    /// Of 8 bits.
    I8(Vec<i8>),
    /// Of 16 bits, unsigned.
    U16(Vec<u16>),
    /// Of 16 bits.
    I16(Vec<i16>),
    /// Of 32 bits, unsigned.
    U32(Vec<u32>),
    /// Of 32 bits.
    I32(Vec<i32>),
    /// Of floats of 32 bits.
    F32(Vec<f32>),
    /// Of truth values.
    Bool(Vec<bool>),
    /// Of texts.
    String(Vec<String>),
    /// Of arrays.
    Array(Vec<GgufArray>),
    /// Of 64 bits, unsigned.
    U64(Vec<u64>),
    /// Of 64 bits.
    I64(Vec<i64>),
    /// Of floats of 64 bits.
    F64(Vec<f64>),
}

impl GgufValue {
    /// The number, of any integer type, where it fits.
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

    /// The number, of any type of float or integer.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            GgufValue::F32(x) => Some(x.into()),
            GgufValue::F64(x) => Some(x),
            _ => self.as_i64().map(|n| n as f64),
        }
    }

    /// The truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            GgufValue::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// The text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            GgufValue::String(text) => Some(text),
            _ => None,
        }
    }

    /// The texts of an array.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            GgufValue::Array(GgufArray::String(texts)) => Some(texts),
            _ => None,
        }
    }

    /// The numbers of an array, of any integer type up to 32 bits or of 64 signed ones.
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
            GgufArray::I64(numbers) => all(numbers),
            _ => None,
        }
    }

    /// The truth values of an array.
    pub fn as_bools(&self) -> Option<&[bool]> {
        match self {
            GgufValue::Array(GgufArray::Bool(truths)) => Some(truths),
            _ => None,
        }
    }
}
