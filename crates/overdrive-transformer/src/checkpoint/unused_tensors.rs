use std::path::Path;

use overdrive_core::units::first_few;
use overdrive_safetensors::StoredTensor;

use crate::Result;

/// The ends of the names of tensors that older versions of transformers saved although nothing reads them.
const BUFFERS: [&str; 8] = [
    // Computed: rotary frequencies, and GPT-2's causal masks.
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    // Constants of encoders.
    ".position_ids",
    "embeddings.token_type_ids",
    // The version of a format, and a table of T5 that no layer has.
    "encoder.version",
    "decoder.version",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
];

/// Returns `true` for tensors that are not part of a model's weights and that it does not need.
pub(super) fn is_buffer(name: &str) -> bool {
    BUFFERS.iter().any(|end| name.ends_with(end))
}

/// The entries of the files that the model does not use, each with the reason, for one warning. Copies that equal the
/// tensor used in their place are not recorded.
#[derive(Debug, Default)]
pub(super) struct UnusedTensors(Vec<(String, String)>);

impl UnusedTensors {
    /// Records an entry.
    pub(super) fn add(&mut self, name: &str, reason: impl Into<String>) {
        self.0.push((name.to_owned(), reason.into()));
    }

    /// Records `copy`, which `used` replaces, unless the two have the same values.
    pub(super) fn compare(
        &mut self,
        copy: &StoredTensor<'_>,
        used: &StoredTensor<'_>,
    ) -> Result<()> {
        if !copy.has_same_values(used)? {
            let place = match copy.name() == used.name() {
                true => "that of the file that the index names".to_owned(),
                false => used.name().to_owned(),
            };
            self.add(
                copy.name(),
                format!("it differs from {place}, which is used"),
            );
        }
        Ok(())
    }

    /// Logs a warning with the entries of the folder `dir`, if there are any.
    pub(super) fn log(mut self, dir: &Path) {
        if self.0.is_empty() {
            return;
        }
        // A `HashMap` has no order, and the message should be the same in every run.
        self.0.sort();
        let listed = self.0.iter().map(|(name, why)| format!("{name} ({why})"));
        let listed: Vec<String> = listed.collect();
        tracing::warn!(
            "{} tensors in {} are not used: {}",
            listed.len(),
            dir.display(),
            first_few(&listed)
        );
    }
}
