//! The memory of optimizers.

use super::DecoderShape;

/// The state of an optimizer, in bytes per weight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
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
        let weights = shape.weights();
        let bytes = match self {
            Self::AdamW => 8.0 * weights,
            // Two bytes per weight, and two fp32 scales for each block of 256; embeddings keep fp32 states.
            Self::AdamW8bit => {
                let quantized = weights - shape.embedding();
                8.0 * shape.embedding() + 2.0 * quantized + 2.0 * 4.0 * (quantized / 256.0).ceil()
            }
            Self::PagedAdamW | Self::Sgd => 0.0,
            Self::SgdMomentum | Self::Lion => 4.0 * weights,
            Self::Adafactor => 4.0 * rows_and_columns(shape),
            Self::Muon => {
                let matrices = shape.layers as f64 * shape.block_weights();
                4.0 * matrices + 8.0 * (weights - matrices)
            }
            Self::Other(bytes) => bytes.max(0.0) * weights,
        };
        bytes as u64
    }

    /// Returns the bytes that the update needs in addition to weights, gradients and states.
    pub(super) fn working_bytes(self, shape: &DecoderShape) -> f64 {
        match self {
            // The update of one matrix, and the matrix products of its Newton-Schulz iteration.
            Self::Muon => {
                let (hidden, intermediate) = (shape.hidden as f64, shape.intermediate as f64);
                4.0 * 4.0 * hidden * intermediate.max(hidden)
            }
            Self::Adafactor => 4.0 * shape.embedding(),
            _ => 0.0,
        }
    }
}

/// Returns the sum of rows and columns of all matrices.
fn rows_and_columns(shape: &DecoderShape) -> f64 {
    let (hidden, queries, keys) = (shape.hidden as f64, shape.queries(), shape.keys());
    let attention = 2.0 * (queries + hidden) + 2.0 * (keys + hidden);
    let feed_forward = 3.0 * (shape.intermediate as f64 + hidden) * shape.expert_count();
    let table = shape.vocabulary as f64 + hidden;
    shape.layers as f64 * (attention + feed_forward) + shape.tables() * table + shape.norms()
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
