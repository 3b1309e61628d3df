//! Tests of the engine. A target of its own, because these tests set the number of libtorch's threads,
//! which belongs to the process, to one: their models are too small for more.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

/// The shape of an engine's model is that of the causal language model in the field `$model`.
macro_rules! forwards_shape {
    ($model:tt) => {
        fn cache_shape(&self) -> overdrive_generation::Result<overdrive_generation::CacheShape> {
            Ok(self.$model.cache_shape())
        }

        fn vocab_size(&self) -> usize {
            let model: &overdrive_transformer::CausalLm = &self.$model;
            overdrive_generation::EngineModel::vocab_size(model)
        }

        fn context(&self) -> usize {
            self.$model.context()
        }
    };
}

mod adapters;
mod chat;
mod requests;
mod soak;
#[path = "../it/support.rs"]
mod support;
mod vision;
mod warm_up;
