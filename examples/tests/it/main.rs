//! Small runs of the example programs in this process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod adapter;
mod changed_inputs;
mod classify;
mod data_loading;
mod dpo;
mod end_of_text;
mod finetune;
#[path = "../fit/mod.rs"]
mod fit;
mod full_disk;
mod generation_flags;
mod going_back;
mod host_reads;
#[path = "../../../on_python/mod.rs"]
mod on_python;
mod outputs;
#[cfg(any(feature = "image", feature = "speech"))]
mod pictures_and_sound;
mod rates;
mod resume;
mod seq2seq;
mod template_flags;
mod tokens;
#[cfg(feature = "image")]
mod vision;
mod whole_run;

/// The example `dpo`.
#[path = "../../dpo.rs"]
mod dpo_example;
/// The example `finetune`.
#[path = "../../finetune.rs"]
mod finetune_example;
/// The example `train`.
#[path = "../../train.rs"]
mod train_example;

/// The example `chat`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../chat.rs"]
mod chat_example;
/// The example `export_onnx`.
#[cfg(feature = "onnx")]
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../export_onnx.rs"]
mod export_onnx_example;
/// The example `merge`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../merge.rs"]
mod merge_example;

/// The example `classify`.
#[path = "../../classify.rs"]
mod classify_example;
/// The example `finetune_vision`.
#[cfg(feature = "image")]
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../finetune_vision.rs"]
mod finetune_vision_example;
/// The example `images`.
#[cfg(feature = "image")]
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../images.rs"]
mod images_example;
/// The example `speech`.
#[cfg(feature = "speech")]
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../speech.rs"]
mod speech_example;
/// The example `tokenize`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../tokenize.rs"]
mod tokenize_example;

/// The example `seq2seq`.
#[allow(dead_code, reason = "its `main` is another program's")]
#[path = "../../seq2seq.rs"]
mod seq2seq_example;

/// A lock: libtorch's generator, memory statistics and threads are global, so one test uses them at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
