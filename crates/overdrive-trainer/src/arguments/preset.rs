//! Ready-made configurations.

use overdrive_optim::LrSchedulerType;

use super::choices::{IntervalStrategy, Preset, ReportTo};
use super::model::ModelArguments;
use super::training::TrainingArguments;

impl Preset {
    /// Returns the configuration.
    pub fn arguments(self) -> TrainingArguments {
        let tiny = TrainingArguments {
            preset: self,
            max_steps: 600,
            learning_rate: 4e-3,
            lr_scheduler_type: LrSchedulerType::Cosine,
            warmup_ratio: 0.05,
            weight_decay: 0.1,
            adam_beta2: 0.95,
            eval_strategy: IntervalStrategy::Steps,
            eval_steps: Some(100.0),
            max_eval_batches: Some(16),
            logging_steps: 10.0,
            report_to: vec![ReportTo::TensorBoard],
            // A thread costs almost nothing, unlike a worker process of PyTorch's loader.
            dataloader_num_workers: 1,
            ..TrainingArguments::default()
        };
        match self {
            Self::Tiny => tiny,
            Self::Small => TrainingArguments {
                vocab_size: 8192,
                model: ModelArguments {
                    hidden_size: 384,
                    intermediate_size: 1024,
                    num_attention_heads: 6,
                    ..ModelArguments::default()
                },
                max_steps: 1000,
                learning_rate: 1.5e-3,
                ..tiny
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_are_valid_and_have_the_documented_sizes() {
        let sizes = [(Preset::Tiny, 5_795_072), (Preset::Small, 13_767_552)];
        for (preset, parameters) in sizes {
            let arguments = preset.arguments();
            arguments.validate().expect("a preset is valid");
            assert_eq!(arguments.preset, preset);
            assert_eq!(arguments.model.parameters(arguments.vocab_size), parameters);
            assert_eq!(arguments.tokens_per_step(), 2048);
        }
    }
}
