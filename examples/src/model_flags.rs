//! The flags of the examples that load a model.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use clap::Args;
use overdrive::generation::Tokenizer;
use overdrive::lora::{LoadAdapterOptions, MergeOptions, load_adapter, merge_and_unload};
use overdrive::quantization::Scheme;
use overdrive::transformer::{CausalLm, LoadOptions, LoadProgress, QuantizeOptions};
use tch::{Device, Kind};

use crate::ByteProgress;

/// Which model, and in which form it is held.
#[derive(Debug, Clone, Args)]
pub struct ModelFlags {
    /// Folder with config.json, model.safetensors and tokenizer.json
    #[arg(long = "model", value_name = "DIR")]
    pub folder: PathBuf,
    /// A GGUF file of that model, which then needs no more than tokenizer.json in the folder
    #[arg(long, value_name = "FILE")]
    pub gguf: Option<PathBuf>,
    /// Folder with an adapter in PEFT's format; dense weights are merged with it
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Compute in bf16: half the memory
    #[arg(long)]
    pub bf16: bool,
    /// Quantize the weights while they are loaded: int8, int8-weight, llm-int8, int4, nf4, fp4, fp8
    #[arg(long, value_name = "SCHEME")]
    pub quantize: Option<Scheme>,
    /// Quantize the head too, and an embedding that is tied to it
    #[arg(long, value_name = "SCHEME", requires = "quantize")]
    pub quantize_head: Option<Scheme>,
}

impl ModelFlags {
    /// The model with its adapter, on a GPU where there is one.
    pub fn load(&self) -> Result<CausalLm> {
        let mut model = match &self.gguf {
            Some(file) => CausalLm::from_gguf(file, &self.options())?,
            None => self.load_from(&self.folder)?,
        };
        let Some(adapter) = &self.adapter else {
            return Ok(model);
        };
        load_adapter(
            &mut model,
            adapter,
            "default",
            &LoadAdapterOptions::default(),
        )?;
        // Beside packed weights it stays: merged, they would be rounded again.
        if model.is_quantized() {
            return Ok(model);
        }
        merge_and_unload(&mut model, &MergeOptions::default())?;
        Ok(model)
    }

    /// Another model in the same form.
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

    /// `tokenizer.json` of the model's folder.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.folder.join("tokenizer.json");
        Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))
    }
}

/// The model in `folder`, with a progress bar where somebody watches.
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
