use std::path::{Path, PathBuf};

use anyhow::Result;
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::quantization::{InputCollector, Moments, observe_inputs};
use overdrive::trainer::{TextData, TrainingArguments, evaluate};
use overdrive::transformer::{CausalLm, ForwardInput};

use crate::print_line;

/// Text in windows of a model's context, split into training and measurement data.
#[derive(Debug)]
pub struct ModelText {
    arguments: TrainingArguments,
    data: TextData,
}

impl ModelText {
    /// Tokenizes the files `data`, or by default the Rust source code that Cargo keeps on this machine, with the
    /// tokenizer of the model in `folder`.
    pub fn prepare(folder: &Path, model: &CausalLm, data: &[PathBuf]) -> Result<ModelText> {
        let context = model.config().max_position_embeddings().clamp(2, 512);
        let arguments = TrainingArguments {
            data: data.to_vec(),
            tokenizer: Some(folder.join("tokenizer.json")),
            context_length: context.unsigned_abs(),
            max_eval_batches: Some(40),
            ..TrainingArguments::default()
        };
        let data = TextData::prepare(&arguments, |line| print_line(line))?;
        Ok(ModelText { arguments, data })
    }

    /// Returns the perplexity, the exponential of the mean loss, on windows of the measurement data.
    pub fn perplexity(&self, model: &CausalLm) -> Result<f64> {
        let batches = self
            .data
            .validation_loader(&self.arguments, model.device())?;
        let group = ProcessGroup::single();
        Ok(evaluate(model, batches, Precision::Fp32, &group)?.exp())
    }

    /// Records the inputs of the linear layers while the model processes `windows` of the training data.
    pub fn inputs_of(&self, model: &CausalLm, windows: usize) -> Result<InputCollector> {
        let _no_grad = tch::no_grad_guard();
        let batches = self.data.train_loader(&self.arguments, model.device())?;
        let size = usize::try_from(self.arguments.per_device_train_batch_size)?;
        let count = windows.div_ceil(size);
        let collector = InputCollector::new(Moments::Full);
        let (mut collector, read) = observe_inputs(collector, || -> Result<()> {
            for batch in batches.take(count) {
                let _logits = model.forward(ForwardInput::new(&batch?.input_ids))?;
            }
            Ok(())
        });
        read?;
        collector.finish();
        Ok(collector)
    }
}
