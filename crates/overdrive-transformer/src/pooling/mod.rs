//! One vector or one score for each sequence: pooling, embedding models and rerankers.

mod dense;
mod embedding_model;
mod modules;
mod pool;
mod reranker;
mod sequence;
mod task;

pub use embedding_model::EmbeddingModel;
pub(crate) use pool::pooled;
pub use pool::{Pooling, PoolingMode};
pub use reranker::Reranker;
pub use sequence::TokenSequence;
pub use task::PoolingTask;
