//! The cache of encoded examples.

use std::path::PathBuf;

use overdrive_core::Error as CommonError;

use super::dataset::InstructionOptions;
use super::encoder::InstructionEncoder;
use super::example_file::FORMAT_VERSION;
use crate::digest::FieldHasher;
use crate::{Result, Sha256Digest, tokenizer_digest};

/// The cache of [`InstructionDataset::open_cached`](crate::InstructionDataset::open_cached). It is never cleaned; the
/// folder or files in it may be deleted at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExampleCache {
    /// The folder of the files, such as `tokens` of [`cache_dir`](crate::cache_dir).
    pub folder: PathBuf,
    /// The digest of everything that decides the text of a conversation: the chat template with its special tokens.
    /// A [`ChatFormat`](crate::ChatFormat) is code and cannot be compared.
    pub format: Sha256Digest,
}

impl ExampleCache {
    /// Returns the key of the examples of records with the digest `content`.
    pub(super) fn key(
        &self,
        content: Sha256Digest,
        encoder: &InstructionEncoder,
        options: InstructionOptions,
    ) -> Result<Sha256Digest> {
        // The number of records is part of the content.
        let options =
            serde_json::to_vec(&(encoder.options(), options.on_bad_record, options.answer));
        let options = options.map_err(CommonError::parse("JSON", &self.folder))?;
        let hasher = FieldHasher::default()
            .field(b"examples")
            .field(&FORMAT_VERSION.to_le_bytes())
            .field(&content.0)
            .field(&tokenizer_digest(encoder.tokenizer())?.0)
            .field(&[u8::from(encoder.has_chat_template())])
            .field(&self.format.0)
            .field(format!("{:?}", encoder.end_of_text()).as_bytes())
            .field(&options);
        Ok(hasher.finish())
    }

    pub(super) fn path(&self, key: Sha256Digest) -> PathBuf {
        self.folder.join(format!("{}.examples", key.short()))
    }
}
