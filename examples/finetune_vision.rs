//! Trains an adapter of a model that sees images on images with captions, which are decoded and cut into patches on demand.
//!
//! ```text
//! cargo run --release -p overdrive-examples --features image --example finetune_vision -- \
//!     --model QWEN3-VL --data captions.jsonl --prompt "Describe the image." --steps 200 --out runs/captions
//! cargo run --release -p overdrive-examples --features image --example chat -- \
//!     --model QWEN3-VL --adapter runs/captions --image photo.png
//! ```
//!
//! A record is `{"image": "images/0001.jpg", "text": "A dog on a beach."}`, as in the example `images`. The adapter has the
//! linear layers of the text model; the vision tower stays as it is.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::{DataLoaderOptions, ImageCaptionDataset, ImageOptions};
use overdrive::distributed::ProcessGroup;
use overdrive::generation::{ModelFiles, copy_chat_template};
use overdrive::lora::{DEFAULT_ADAPTER, LoraConfig, TargetModules, add_lora, save_adapter};
use overdrive::optim::LrSchedulerType;
use overdrive::quantization::Scheme;
use overdrive::trainer::{
    ImageTextFormat, RunOptions, TrainingArguments, TrainingRun, load_image_texts, run_main,
};
use overdrive::transformer::{CausalLm, LoadOptions, QuantizeOptions};
use overdrive_examples::{local_model, print_line};
use tch::Device;

/// Trains an adapter of a model that sees images on images with captions
#[derive(Parser)]
pub(crate) struct Flags {
    /// Folder of a model that sees images (Qwen3-VL), or its name on the Hugging Face hub
    #[arg(long)]
    pub(crate) model: PathBuf,
    /// JSON or JSON Lines files with the paths and captions of images
    #[arg(long, required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// Output folder for the adapter
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Question that the caption answers
    #[arg(long, default_value = "Describe the image.")]
    pub(crate) prompt: String,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 100)]
    pub(crate) steps: usize,
    /// Number of images in a batch
    #[arg(long, default_value_t = 4)]
    pub(crate) batch_size: usize,
    /// Initial learning rate, which decays linearly to 0
    #[arg(long, allow_negative_numbers = true, default_value_t = 2e-4)]
    pub(crate) learning_rate: f64,
    /// Rank of the adapter
    #[arg(long, default_value_t = 16)]
    pub(crate) rank: i64,
    /// Quantize the weights of the text model while they are loaded, such as nf4
    #[arg(long, value_name = "SCHEME")]
    pub(crate) quantize: Option<Scheme>,
    /// Number of decoding threads
    #[arg(long, default_value_t = 2)]
    pub(crate) workers: usize,
    /// Seed of the order
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()).map(drop))
}

/// Trains, saves the adapter, and returns the loss of the last batch.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    let output = OutputFolder::check(
        "finetune_vision",
        "--out",
        &flags.out,
        &[("--model", &flags.model)],
    )?;
    let folder = local_model(&flags.model)?;
    let device = Device::cuda_if_available();
    let options = LoadOptions {
        device,
        quantization: flags.quantize.map(QuantizeOptions::new),
        ..LoadOptions::default()
    };
    let mut model = CausalLm::from_pretrained(&folder, &options)?;
    let files = ModelFiles::open(&folder)?;
    let processor = files
        .image_processor()?
        .context("the folder has no preprocessor_config.json")?;
    let images = ImageCaptionDataset::open(&flags.data, ImageOptions::default())?;
    let options = DataLoaderOptions {
        batch_size: flags.batch_size,
        shuffle: true,
        seed: flags.seed,
        num_workers: flags.workers,
        ..DataLoaderOptions::default()
    };
    let format = ImageTextFormat::new(&model, &files, &flags.prompt)?;
    let mut loader = load_image_texts(images.with_processor(processor), format, options, device)?;

    let config = LoraConfig {
        r: flags.rank,
        lora_alpha: 2.0 * flags.rank as f64,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    let parameters = add_lora(&mut model, &config)?;
    let arguments = TrainingArguments {
        max_steps: i64::try_from(flags.steps)?,
        logging_steps: 10.0,
        learning_rate: flags.learning_rate,
        lr_scheduler_type: LrSchedulerType::Linear,
        seed: flags.seed,
        ..TrainingArguments::default()
    };
    arguments.apply()?; // the seed, the threads, the treatment of subnormal numbers
    model.set_training(true)?;
    let mut run = TrainingRun::start(
        &arguments,
        &ProcessGroup::single(),
        parameters,
        &mut loader,
        RunOptions::default(),
    )?;
    let mut last = f64::NAN;
    while let Some(batches) = run.next_batches(&mut loader)? {
        for batch in &batches {
            let loss = run.forward(|| batch.loss(&model))?;
            run.backward(&loss.sum)?;
            last = loss.mean()?.double_value(&[]);
        }
        run.step()?;
    }
    run.finish()?;
    let output = output.begin()?;
    save_adapter(&mut model, output.path(), DEFAULT_ADAPTER)?;
    copy_chat_template(&folder, output.path())?;
    output.finish()?;
    print_line(format!("adapter  {}", flags.out.display()));
    Ok(last)
}
