use std::fmt;

use super::Finetuned;
use super::memory::{TrainingMemory, mebibytes};
use crate::arguments::{FinetuneArguments, Quant4Type};
use crate::run::RunSummary;

/// A method of fine-tuning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinetuneMethod {
    /// All weights are trained.
    Full,
    /// Adapters are trained beside the original weights.
    Lora,
    /// Adapters are trained beside weights in NF4 with double quantization.
    Qlora,
}

impl FinetuneMethod {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::Full, Self::Lora, Self::Qlora];

    /// Returns the configuration with this method and otherwise unchanged options.
    pub fn of(self, arguments: &FinetuneArguments) -> FinetuneArguments {
        let is_qlora = self == Self::Qlora;
        FinetuneArguments {
            use_peft: self != Self::Full,
            load_in_4bit: is_qlora,
            load_in_8bit: false,
            bnb_4bit_quant_type: if is_qlora {
                Quant4Type::Nf4
            } else {
                arguments.bnb_4bit_quant_type
            },
            bnb_4bit_use_double_quant: is_qlora,
            merge: false,
            ..arguments.clone()
        }
    }
}

impl fmt::Display for FinetuneMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full fine-tuning",
            Self::Lora => "LoRA",
            Self::Qlora => "QLoRA (NF4, double quantization)",
        })
    }
}

/// The results of the methods on the same data, order and seed. Displayed as a table.
#[derive(Debug)]
pub struct MethodComparison {
    /// The results of each method.
    pub rows: Vec<(FinetuneMethod, TrainingMemory, RunSummary)>,
}

impl MethodComparison {
    /// Calls `finetune` with each method in turn, after a line about it.
    ///
    /// # Errors
    /// The error of `finetune`, such as [`Error::Interrupted`](crate::Error::Interrupted) after a signal.
    pub fn run<E>(
        arguments: &FinetuneArguments,
        mut say: impl FnMut(&str),
        mut finetune: impl FnMut(&FinetuneArguments) -> Result<Finetuned, E>,
    ) -> Result<Self, E> {
        let mut rows = Vec::new();
        for method in FinetuneMethod::ALL {
            say(&method.to_string());
            let tuned = finetune(&method.of(arguments))?;
            rows.push((method, tuned.memory, tuned.summary));
        }
        Ok(Self { rows })
    }

    /// Returns the difference between the loss curves of QLoRA and LoRA: the mean difference of the steps, as a
    /// fraction of LoRA's mean loss. `None` without both.
    pub fn curve_difference(&self) -> Option<f64> {
        let losses = |wanted: FinetuneMethod| {
            let row = self.rows.iter().find(|(method, ..)| *method == wanted)?;
            Some(&row.2.losses)
        };
        let (lora, qlora) = (
            losses(FinetuneMethod::Lora)?,
            losses(FinetuneMethod::Qlora)?,
        );
        let sum: f64 = lora.iter().sum();
        let difference: f64 = lora.iter().zip(qlora).map(|(a, b)| (a - b).abs()).sum();
        (sum > 0.0).then(|| difference / sum)
    }
}

impl fmt::Display for MethodComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<34} {:>12} {:>12} {:>12} {:>12} {:>9} {:>10}",
            "", "trainable", "weights", "optimizer", "peak", "loss", "tokens/s"
        )?;
        for (method, memory, summary) in &self.rows {
            // The mean of the last quarter: the loss of a single step is mostly noise.
            let last = &summary.losses[summary.losses.len() - summary.losses.len().div_ceil(4)..];
            let loss = last.iter().sum::<f64>() / last.len().max(1) as f64;
            writeln!(
                f,
                "{:<34} {:>12} {:>12} {:>12} {:>12} {loss:>9.3} {:>10.0}",
                method.to_string(),
                memory.trainable_parameters,
                mebibytes(memory.weight_bytes),
                mebibytes(memory.optimizer_bytes),
                memory
                    .peak_bytes
                    .map_or_else(|| "unknown".to_owned(), mebibytes),
                summary.tokens_per_second()
            )?;
        }
        match self.curve_difference() {
            Some(part) => write!(
                f,
                "QLoRA's loss curve differs from LoRA's by {:.2}%",
                100.0 * part
            ),
            None => Ok(()),
        }
    }
}
