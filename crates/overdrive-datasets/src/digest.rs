//! SHA-256 digests as values.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use overdrive_core::Error as CommonError;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// A SHA-256 digest, displayed in hexadecimal.
///
/// Zeros stand for an unknown digest ([`Sha256Digest::UNKNOWN`]).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sha256Digest(pub [u8; 32]);

impl Sha256Digest {
    /// The value that stands for an unknown digest.
    pub const UNKNOWN: Self = Self([0; 32]);

    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns a digest of `bytes`, computed on all cores: the digest of the digests of blocks of 4 MiB.
    pub(crate) fn of_blocks(bytes: &[u8]) -> Self {
        const BLOCK: usize = 4 << 20;
        let blocks: Vec<Self> = bytes.par_chunks(BLOCK).map(Self::of).collect();
        let mut hasher = FieldHasher::default().field(&(bytes.len() as u64).to_le_bytes());
        blocks.iter().for_each(|block| hasher.add(&block.0));
        hasher.finish()
    }

    /// Returns a digest of the lengths of these files and of 64 evenly spaced blocks of each, the first and the last among
    /// them. It identifies files that are too large to be read, such as weights, all of which training changes.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if a file cannot be read.
    pub fn sampled(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> crate::Result<Self> {
        let mut sample = Vec::new();
        for path in paths {
            let path = path.as_ref();
            read_sample(path, &mut sample).map_err(CommonError::io("read", path))?;
        }
        Ok(Self::of(&sample))
    }

    /// Returns `true` for any value other than [`Sha256Digest::UNKNOWN`].
    pub fn is_known(&self) -> bool {
        *self != Self::UNKNOWN
    }

    /// Returns the first 128 bits in hexadecimal, which suffice for a file name that does not collide by chance.
    pub fn short(&self) -> String {
        let mut hex = self.to_string();
        hex.truncate(32);
        hex
    }

    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }
}

/// Appends the length of a file and evenly spaced blocks of it.
fn read_sample(path: &Path, into: &mut Vec<u8>) -> io::Result<()> {
    const BLOCKS: u64 = 64;
    const BYTES: u64 = 4096;
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    into.extend(bytes.to_le_bytes());
    let last = bytes.saturating_sub(BYTES);
    for block in 0..BLOCKS {
        let start = u128::from(last) * u128::from(block) / u128::from(BLOCKS - 1);
        file.seek(SeekFrom::Start(u64::try_from(start).unwrap_or(last)))?;
        Read::by_ref(&mut file).take(BYTES).read_to_end(into)?;
    }
    Ok(())
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A hasher of a sequence of fields. Each field is preceded by its length, so that different sequences of fields
/// never give the same bytes.
#[derive(Default)]
pub(crate) struct FieldHasher(Sha256);

impl FieldHasher {
    pub(crate) fn field(mut self, bytes: &[u8]) -> Self {
        self.add(bytes);
        self
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Sha256Digest {
        Sha256Digest::finish(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_abc_is_the_one_of_fips_180() {
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Sha256Digest::of(b"abc").to_string(), hex);
        assert_eq!(Sha256Digest::of(b"abc").short(), hex[..32]);
    }

    #[test]
    fn the_digest_of_blocks_depends_on_every_byte_and_on_the_length() {
        let mut bytes = vec![0; (8 << 20) + 1];
        let zeros = Sha256Digest::of_blocks(&bytes);
        assert_ne!(Sha256Digest::of_blocks(&bytes[1..]), zeros);
        for at in [0, 4 << 20, 8 << 20] {
            bytes[at] = 1;
            assert_ne!(Sha256Digest::of_blocks(&bytes), zeros, "byte {at}");
            bytes[at] = 0;
        }
        assert_eq!(Sha256Digest::of_blocks(&bytes), zeros);
    }

    #[test]
    fn fields_do_not_run_together() {
        let ab_c = FieldHasher::default().field(b"ab").field(b"c").finish();
        let a_bc = FieldHasher::default().field(b"a").field(b"bc").finish();
        assert_ne!(ab_c, a_bc);
    }
}
