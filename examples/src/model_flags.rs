//! The flags for loading a model.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use overdrive::datasets::load_tokenizer;
use overdrive::generation::{GenerationConfig, Tokenizer};
use overdrive::lora::{
    LoadAdapterOptions, MergeOptions, load_adapter, merge_and_unload, merge_obstacle,
};
use overdrive::quantization::Scheme;
use overdrive::transformer::{CausalLm, LoadOptions, LoadProgress, QuantizeOptions};
use tch::{Device, Kind};

use crate::ByteProgress;

/// The model and the form in which it is loaded.
#[derive(Debug, Clone, Args)]
pub struct ModelFlags {
    /// Folder with config.json, model.safetensors and tokenizer.json
    #[arg(long = "model", value_name = "DIR")]
    pub folder: PathBuf,
    /// GGUF file of the model; the folder then only needs tokenizer.json
    #[arg(long, value_name = "FILE")]
    pub gguf: Option<PathBuf>,
    /// Folder with an adapter in PEFT's format; it is merged into dense weights where it can be
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Keep the adapter beside the weights instead of merging it
    #[arg(long, requires = "adapter")]
    pub keep_adapter: bool,
    /// Compute in bf16: half the memory
    #[arg(long)]
    pub bf16: bool,
    /// Quantize the weights while they are loaded: int8, int8-weight, llm-int8, int4, nf4, fp4, fp8
    #[arg(long, value_name = "SCHEME")]
    pub quantize: Option<Scheme>,
    /// Also quantize the head, and an embedding that is tied to it
    #[arg(long, value_name = "SCHEME", requires = "quantize")]
    pub quantize_head: Option<Scheme>,
}

impl ModelFlags {
    /// Returns the model with its adapter, on a GPU if there is one.
    pub fn load(&self) -> Result<CausalLm> {
        let mut model = match &self.gguf {
            Some(file) => CausalLm::from_gguf(file, &self.options())?,
            None => self.load_from(&self.folder)?,
        };
        let Some(adapter) = &self.adapter else {
            return Ok(model);
        };
        let options = LoadAdapterOptions::default();
        load_adapter(&mut model, adapter, "default", &options)?;
        // Merged into quantized weights, the sum would be rounded again.
        let obstacle = if self.keep_adapter {
            Some("--keep-adapter".to_owned())
        } else if model.is_quantized() {
            Some("the weights are quantized".to_owned())
        } else {
            merge_obstacle(&mut model)?.map(|error| error.to_string())
        };
        match obstacle {
            Some(reason) => eprintln!("adapter: kept beside the weights ({reason})"),
            None => {
                merge_and_unload(&mut model, &MergeOptions::default())?;
                eprintln!("adapter: merged into the weights");
            }
        }
        Ok(model)
    }

    /// Loads another model in the same form.
    pub fn load_from(&self, folder: &Path) -> Result<CausalLm> {
        load_model(folder, self.options())
    }

    fn options(&self) -> LoadOptions {
        let quantization = self.quantize.map(|scheme| {
            let options = QuantizeOptions::new(scheme);
            match self.quantize_head {
                Some(head) => options.with_head(head),
                None => options,
            }
        });
        LoadOptions {
            device: Device::cuda_if_available(),
            kind: self.bf16.then_some(Kind::BFloat16),
            quantization,
            ..LoadOptions::default()
        }
    }

    /// Loads `tokenizer.json` of the model's folder.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Ok(load_tokenizer(&self.folder)?)
    }

    /// Adds the tokens with which the model of a GGUF file ends a text or a turn to those that the folder names.
    pub fn add_end_of_text(&self, model: &CausalLm, config: &mut GenerationConfig) {
        if self.gguf.is_some() {
            let ids = model.config().eos_token_ids().iter();
            let new = ids.filter(|id| !config.eos_token_id.contains(id));
            let new: Vec<i64> = new.copied().collect();
            config.eos_token_id.extend(new);
        }
    }
}

/// Loads the model in `folder`, with a progress bar if stderr is a terminal.
pub fn load_model(folder: &Path, options: LoadOptions) -> Result<CausalLm> {
    let bar = ByteProgress::new("loading")?;
    let shown = bar.clone();
    let options = LoadOptions {
        progress: Some(LoadProgress::new(move |done, all| shown.set(done, all))),
        ..options
    };
    let model = CausalLm::from_pretrained(folder, &options);
    bar.clear();
    Ok(model?)
}
