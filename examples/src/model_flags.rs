//! The flags for loading a model.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use overdrive::core::files::{self, UnfinishedFolder};
use overdrive::core::{Error, print_error_line};
use overdrive::datasets::{copy_tokenizer, load_tokenizer};
use overdrive::generation::{ModelFiles, Tokenizer, set_batch_invariant};
use overdrive::lora::{
    LoadAdapterOptions, MergeOptions, load_adapter, merge_and_unload, merge_obstacle,
};
use overdrive::nn::AdapterHost;
use overdrive::quantization::Scheme;
use overdrive::transformer::{
    CausalLm, LoadOptions, LoadProgress, QuantizeOptions, SaveOptions, Seq2SeqLm,
};
use tch::{Device, Kind};

use crate::{ByteProgress, local_adapter, local_model};

/// The model and the form in which it is loaded.
#[derive(Debug, Clone, Args)]
pub struct ModelFlags {
    /// GGUF file, folder with config.json, weights and tokenizer.json, or name on the Hugging Face hub, such as
    /// ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M
    #[arg(long = "model", value_name = "MODEL")]
    pub path: PathBuf,
    /// tokenizer.json, or a folder that contains it, to use instead of the model's tokenizer
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Folder with an adapter in PEFT's format, or its name on the hub; it is merged into dense weights if possible
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Option<PathBuf>,
    /// Keep the adapter separate instead of merging it into the weights
    #[arg(long, requires = "adapter")]
    pub keep_adapter: bool,
    /// Compute in bf16, with half the memory
    #[arg(long)]
    pub bf16: bool,
    /// The scheme of the linear layers; they are quantized while they are loaded.
    #[arg(long, value_name = "SCHEME", help = scheme_help("Quantize the weights while they are loaded"))]
    pub quantize: Option<Scheme>,
    /// Scheme for the head and an embedding tied to it
    #[arg(long, value_name = "SCHEME", requires = "quantize")]
    pub quantize_head: Option<Scheme>,
    /// Make the results of each sequence on CPUs bit-identical in every batch for dense weights too, as they are for most
    /// quantized ones; halves the speed of long prompts
    #[arg(long)]
    pub batch_invariant: bool,
}

/// Returns the help of a flag that takes a scheme.
pub fn scheme_help(what: &str) -> String {
    format!("{what}: {}", Scheme::NAMES.join(", "))
}

impl ModelFlags {
    /// Returns the flags with names on the hub replaced by local paths, and downloads their files.
    pub fn local(&self) -> Result<ModelFlags> {
        Ok(ModelFlags {
            path: local_model(&self.path)?,
            adapter: self.adapter.as_deref().map(local_adapter).transpose()?,
            ..self.clone()
        })
    }

    /// Returns the files and folders that the flags name, with the flags.
    pub fn inputs(&self) -> Vec<(&'static str, &Path)> {
        let others = [
            ("--tokenizer", &self.tokenizer),
            ("--adapter", &self.adapter),
        ];
        let others = others
            .into_iter()
            .filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        [("--model", self.path.as_path())]
            .into_iter()
            .chain(others)
            .collect()
    }

    /// Returns the model with its adapter, on a GPU if there is one.
    pub fn load(&self) -> Result<CausalLm> {
        let mut model = self.load_from(&self.path)?;
        let quantized = model.is_quantized();
        self.add_adapter(&mut model, quantized)?;
        Ok(model)
    }

    /// Returns the encoder-decoder model with its adapter, on a GPU if there is one.
    pub fn load_seq2seq(&self) -> Result<Seq2SeqLm> {
        let mut model = Seq2SeqLm::from_pretrained(&self.path, &self.options())?;
        let quantized = model.is_quantized();
        self.add_adapter(&mut model, quantized)?;
        Ok(model)
    }

    /// Adds the adapter of `--adapter`, if given, to a model with dense or quantized weights.
    fn add_adapter(&self, model: &mut dyn AdapterHost, quantized: bool) -> Result<()> {
        let Some(adapter) = &self.adapter else {
            return Ok(());
        };
        let options = LoadAdapterOptions::default();
        load_adapter(model, adapter, "default", &options)?;
        // Merged into quantized weights, the sum would be rounded again.
        let obstacle = if self.keep_adapter {
            Some("--keep-adapter".to_owned())
        } else if quantized {
            Some("the weights are quantized".to_owned())
        } else {
            merge_obstacle(model)?.map(|error| error.to_string())
        };
        match obstacle {
            Some(reason) => print_error_line(format_args!(
                "adapter: not merged into the weights ({reason})"
            )),
            None => {
                merge_and_unload(model, &MergeOptions::default())?;
                print_error_line(format_args!("adapter: merged into the weights"));
            }
        }
        Ok(())
    }

    /// Loads another model in the same form.
    pub fn load_from(&self, path: &Path) -> Result<CausalLm> {
        load_model(path, self.options())
    }

    /// Returns the device, the dtype and the quantization of the flags.
    pub fn options(&self) -> LoadOptions {
        if self.batch_invariant {
            set_batch_invariant(true);
        }
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

    /// Opens the files that come with the model besides its weights.
    pub fn files(&self) -> Result<ModelFiles> {
        Ok(ModelFiles::open(&self.path)?)
    }

    /// Returns the tokenizer of `--tokenizer`, else that of the model.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Ok(match &self.tokenizer {
            Some(path) => load_tokenizer(path)?,
            None => self.files()?.tokenizer()?,
        })
    }

    /// Copies the tokenizer of `--tokenizer`, else that of the model, into the folder `to`.
    pub fn copy_tokenizer(&self, to: &Path) -> Result<()> {
        match &self.tokenizer {
            Some(path) if path.is_dir() => {
                copy_tokenizer(path, to)?;
            }
            Some(path) => {
                let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
                files::write(to.join("tokenizer.json"), &bytes)?;
            }
            None => self.files()?.copy_tokenizer(to)?,
        }
        Ok(())
    }
}

/// Writes the model of the GGUF file or folder `path` as a folder with dense weights in safetensors, under `parent`,
/// which is deleted when the returned handle is dropped, when a signal ends the program, or else by the next one that
/// writes there.
pub fn unpack_model(path: &Path, parent: &Path) -> Result<UnfinishedFolder> {
    let folder = files::unfinished_folder(parent.join("unpacked"))?;
    let mut model = load_model(path, LoadOptions::default())?;
    model.dequantize()?;
    model.save_pretrained(folder.path(), &SaveOptions::default())?;
    ModelFiles::open(path)?.copy_tokenizer(folder.path())?;
    Ok(folder)
}

/// Loads the model of a folder or a GGUF file, with a progress bar if stderr is a terminal.
pub fn load_model(path: &Path, options: LoadOptions) -> Result<CausalLm> {
    let bar = ByteProgress::new("loading")?;
    let shown = bar.clone();
    let options = LoadOptions {
        progress: Some(LoadProgress::new(move |done, all| shown.set(done, all))),
        ..options
    };
    let model = CausalLm::from_pretrained(path, &options);
    bar.clear();
    Ok(model?)
}
