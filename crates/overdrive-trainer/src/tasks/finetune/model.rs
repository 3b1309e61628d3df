use std::path::Path;

use overdrive_lora::{
    AddOptions, LoadAdapterOptions, MergeOptions, add_adapter, load_adapter, merge_and_unload,
    merge_obstacle, save_adapter, trainable_parameters,
};
use overdrive_optim::Ema;
use overdrive_precision::Precision;
use overdrive_profiling::ModelFlops;
use overdrive_quantization::Activations;
use overdrive_transformer::{CausalLm, LoadOptions, SaveOptions};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::arguments::FinetuneArguments;
use crate::run::{RunFolder, shared, tensor_bytes};
use crate::tasks::language_model::model_flops;

/// The name of the adapter, PEFT's own.
const ADAPTER: &str = "default";

/// A loaded model and its trainable parameters.
#[derive(Debug)]
pub struct FinetuneModel {
    /// The model.
    pub model: CausalLm,
    /// The trainable parameters, by name.
    pub trainable: Vec<(String, Tensor)>,
    has_adapter: bool,
}

impl FinetuneModel {
    /// Loads the model, quantized if the arguments say so, and adds an adapter or makes all weights trainable.
    /// Trainable weights are fp32; others keep their stored dtype.
    ///
    /// The adapter names its base model `base_model`, by which PEFT finds it on any machine; `None` stands for its path.
    ///
    /// # Errors
    /// An error if the model cannot be loaded or has none of the layers that the adapters are for.
    pub fn load(
        arguments: &FinetuneArguments,
        base_model: Option<String>,
        device: Device,
    ) -> Result<Self> {
        let mut model = Self::load_base(arguments, device)?;
        let trainable = if arguments.use_peft {
            model.set_requires_grad(false)?;
            let options = AddOptions {
                seed: arguments.training.seed,
                ..AddOptions::default()
            };
            let mut config = arguments.lora_config();
            if base_model.is_some() {
                config.base_model_name_or_path = base_model;
            }
            add_adapter(&mut model, ADAPTER, &config, &options)?;
            // Found before the training, not after it.
            if arguments.merge
                && let Some(obstacle) = merge_obstacle(&mut model)?
            {
                return Err(obstacle.into());
            }
            trainable_parameters(&mut model)?
        } else {
            model.set_requires_grad(true)?;
            model.named_parameters()
        };
        Ok(Self {
            model,
            trainable,
            has_adapter: arguments.use_peft,
        })
    }

    /// Loads the model without an adapter, as [`load`](Self::load) does.
    pub(crate) fn load_base(arguments: &FinetuneArguments, device: Device) -> Result<CausalLm> {
        let options = LoadOptions {
            device,
            // Updates of half-precision weights would be rounded away; frozen weights need no fp32.
            kind: (!arguments.use_peft).then_some(Kind::Float),
            quantization: arguments.quantization(),
            ..LoadOptions::default()
        };
        let mut model = CausalLm::from_pretrained(&arguments.model_name_or_path, &options)?;
        model.set_execution(arguments.training.execution());
        if !arguments.use_peft && model.is_quantized() {
            // Weights of a GGUF file are loaded in quantized form, and quantized weights cannot be trained.
            model.dequantize()?;
        }
        if model.is_quantized() {
            // Evaluations record no gradients, so without this setting they would round activations
            // that training does not round.
            model.set_activations(Activations::Float)?;
        }
        Ok(model)
    }

    /// Describes the model and its trainable parameters, one line each.
    pub fn describe(
        &self,
        arguments: &FinetuneArguments,
        precision: Precision,
        mut say: impl FnMut(&str),
    ) {
        let kept = match arguments.quantization() {
            Some(options) => format!(", kept in {}", options.scheme),
            None => String::new(),
        };
        let device = self.model.device();
        say(&format!(
            "model       {:.2}M parameters{kept} on {device:?}, {precision}",
            self.model.num_parameters() as f64 / 1e6
        ));
        let trainable = self.trainable_parameters() as f64;
        say(&format!(
            "trainable   {:.3}M, {:.2}%",
            trainable / 1e6,
            100.0 * trainable / self.all_parameters().max(1) as f64
        ));
    }

    /// Returns handles of the trainable parameters, which share storage with the model.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        shared(&self.trainable)
    }

    /// Returns the FLOPs of a token.
    pub fn flops(&self) -> ModelFlops {
        model_flops(&self.model, &self.trainable)
    }

    /// Returns the number of trainable parameters.
    pub fn trainable_parameters(&self) -> u64 {
        let numbers = self.trainable.iter();
        numbers.map(|(_, tensor)| tensor.numel() as u64).sum()
    }

    /// Returns the number of parameters, including adapters.
    pub fn all_parameters(&self) -> u64 {
        // Adapters are not parameters of the base model, so they are added.
        let own = u64::try_from(self.model.num_parameters()).unwrap_or(0);
        match self.has_adapter {
            true => own + self.trainable_parameters(),
            false => own,
        }
    }

    /// Returns the size of the weights, quantized or not, and of the adapters, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        let adapters: u64 = match self.has_adapter {
            true => self
                .trainable
                .iter()
                .map(|(_, weight)| tensor_bytes(weight))
                .sum(),
            false => 0,
        };
        self.model.memory_footprint() as u64 + adapters
    }

    /// Writes the adapter into the run's folder in PEFT's format, or without an adapter the model into
    /// `model/`; averaged weights are written to `model_ema/`.
    ///
    /// # Errors
    /// An error if a file cannot be written.
    pub fn save(&mut self, run: &RunFolder, ema: Option<&mut Ema>) -> Result<()> {
        self.save_weights(run.root(), &run.model())?;
        if let Some(ema) = ema {
            // The guard puts the trained weights back after saving.
            let _averaged = ema.apply()?;
            self.save_weights(&run.averaged_model(), &run.averaged_model())?;
        }
        Ok(())
    }

    fn save_weights(&mut self, adapter: &Path, model: &Path) -> Result<()> {
        match self.has_adapter {
            true => save_adapter(&mut self.model, adapter, ADAPTER)?,
            false => self.model.save_pretrained(model, &SaveOptions::default())?,
        }
        Ok(())
    }

    /// Merges the adapter of the folder `adapter` into a model and writes the result into `folder`. The weights of a
    /// quantized model are dequantized, so that the sum is not rounded.
    ///
    /// # Errors
    /// An error if the model or the adapter cannot be loaded, or the folder cannot be written.
    pub fn save_merged(model: &Path, adapter: &Path, folder: &Path) -> Result<()> {
        let mut model = CausalLm::from_pretrained(model, &LoadOptions::default())?;
        if model.is_quantized() {
            model.dequantize()?;
        }
        let options = LoadAdapterOptions::default();
        load_adapter(&mut model, adapter, ADAPTER, &options)?;
        merge_and_unload(&mut model, &MergeOptions::default())?;
        Ok(model.save_pretrained(folder, &SaveOptions::default())?)
    }
}
