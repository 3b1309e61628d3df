//! The memory of optimizers.

use serde::{Deserialize, Serialize};

use super::DecoderShape;

/// The state of an optimizer, in bytes per weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerMemory {
    /// Two fp32 moments: 8.
    #[default]
    AdamW,
    /// Two moments of 8 bits and a scale for every 256: 2.03; two fp32 moments for the embedding: 8.
    AdamW8bit,
    /// AdamW with moments in host memory or a file: 0 on the device.
    PagedAdamW,
    /// Plain SGD without state: 0.
    Sgd,
    /// One fp32 buffer: 4.
    SgdMomentum,
    /// One fp32 moment: 4.
    Lion,
    /// A row and a column of the second moment for each matrix, no first moment.
    Adafactor,
    /// One fp32 buffer for the blocks' matrices: 4; AdamW for embeddings and head: 8.
    Muon,
    /// Any other, in bytes per weight: fp32 master weights of bf16 ones are 4 more, an average of the
    /// weights (EMA) is 4 more.
    Other(f64),
}

impl OptimizerMemory {
    /// Returns the bytes of its state for a model.
    pub fn bytes(self, shape: &DecoderShape) -> u64 {
        let weights = shape.parameters();
        match self {
            Self::AdamW => 8 * weights,
            // Two bytes per weight, and two fp32 scales for each block of 256; embeddings keep fp32 states.
            Self::AdamW8bit => {
                let quantized = weights - shape.embedding();
                8 * shape.embedding() + 2 * quantized + 2 * 4 * quantized.div_ceil(256)
            }
            Self::PagedAdamW | Self::Sgd => 0,
            Self::SgdMomentum | Self::Lion => 4 * weights,
            Self::Adafactor => 4 * rows_and_columns(shape),
            Self::Muon => {
                let matrices = shape.layers * shape.block_weights();
                4 * matrices + 8 * (weights - matrices)
            }
            Self::Other(bytes) => (bytes.max(0.0) * weights as f64) as u64,
        }
    }

    /// Returns the bytes that the update needs in addition to weights, gradients and states.
    pub(super) fn working_bytes(self, shape: &DecoderShape) -> u64 {
        match self {
            // The update of one matrix, and the matrix products of its Newton-Schulz iteration.
            Self::Muon => 4 * 4 * shape.hidden * shape.intermediate.max(shape.hidden),
            Self::Adafactor => 4 * shape.embedding(),
            _ => 0,
        }
    }
}

/// Returns the sum of rows and columns of all matrices.
fn rows_and_columns(shape: &DecoderShape) -> u64 {
    let (hidden, queries, keys) = (shape.hidden, shape.queries(), shape.keys());
    let attention = 2 * (queries + hidden) + 2 * (keys + hidden);
    let feed_forward = 3 * (shape.intermediate + hidden) * shape.expert_count();
    let heads = if shape.tied_embeddings { 1 } else { 2 };
    shape.layers * (attention + feed_forward) + heads * (shape.vocabulary + hidden) + shape.norms()
}

#[cfg(test)]
mod tests {
    use super::super::tests::tiny;
    use super::*;

    #[test]
    fn states_have_the_bytes_a_weight_that_their_papers_say() {
        let weights = tiny().parameters() as f64;
        for (optimizer, expected) in [
            (OptimizerMemory::AdamW, 8.0),
            (OptimizerMemory::AdamW8bit, 3.111),
            (OptimizerMemory::PagedAdamW, 0.0),
            (OptimizerMemory::Sgd, 0.0),
            (OptimizerMemory::SgdMomentum, 4.0),
            (OptimizerMemory::Lion, 4.0),
            (OptimizerMemory::Muon, 4.73),
            (OptimizerMemory::Other(12.0), 12.0),
        ] {
            let a_weight = optimizer.bytes(&tiny()) as f64 / weights;
            assert!(
                (a_weight - expected).abs() < 0.01,
                "{optimizer:?}: {a_weight}"
            );
        }
        assert!(OptimizerMemory::Adafactor.bytes(&tiny()) < 4 * tiny().parameters() / 50);
    }
}
