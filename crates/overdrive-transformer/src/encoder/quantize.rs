use overdrive_nn::Embedding;

use super::EncoderHead;
use super::model::Encoder;
use crate::parameters::{ParameterRole, replace_weight};
use crate::quantize::quantize_parameter;
use crate::{QuantizeOptions, Result};

impl<H: EncoderHead> Encoder<H> {
    /// Quantizes the model in place, layer by layer: each dense weight is freed as soon as it is quantized. The
    /// classifier, or the output layer of a masked language model with the embedding that it shares, is quantized only
    /// with [`QuantizeOptions::head`]. To load a checkpoint without holding all dense weights in memory, see
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization).
    ///
    /// # Errors
    /// [`Error::Quantization`](crate::Error::Quantization) for a weight that does not fit the scheme or is not
    /// finite; [`overdrive_nn::Error::InUse`] while a graph needs the weights.
    pub fn quantize(&mut self, options: &QuantizeOptions) -> Result<()> {
        let tied = self.tied_head();
        for spec in self.specs() {
            let Some(scheme) = options.scheme_of(&spec, tied.is_some()) else {
                continue;
            };
            let Some(dense) = self.take_dense(&spec.name) else {
                // The weight is quantized already.
                continue;
            };
            let weight = quantize_parameter(&dense, &spec, scheme)?;
            drop(dense);
            let wanted = match (spec.role, tied) {
                (ParameterRole::Embedding, Some(head)) => {
                    let kind = self.kind();
                    let table = Embedding::quantized(weight.shallow_clone(), kind)?;
                    self.backbone.embedding = table;
                    head
                }
                _ => spec.module(),
            };
            replace_weight(self, wanted, weight)?;
        }
        Ok(())
    }
}
