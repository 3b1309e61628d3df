use std::str::FromStr;

use overdrive::core::Error;

/// A memory limit in bytes, written as `800MB`, `6GiB` or a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit(pub u64);

impl FromStr for MemoryLimit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.'));
        let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
        let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "kib" | "k" => 1024.0,
            "mib" | "m" => 1024.0 * 1024.0,
            "gib" | "g" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err(refused(text)),
        };
        let number: f64 = number.parse().map_err(|_| refused(text))?;
        let bytes = number * factor;
        // Above it, an f64 is no number of bytes any more.
        match bytes >= 1.0 && bytes < 2f64.powi(53) {
            true => Ok(Self(bytes as u64)),
            false => Err(refused(text)),
        }
    }
}

fn refused(text: &str) -> Error {
    Error::option(
        "memory_limit",
        text,
        "a number of bytes with a unit, such as 6GiB, 800MB or 1.5GB",
    )
}
