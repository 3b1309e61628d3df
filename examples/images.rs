//! Reads images with captions in batches: images are decoded, resized and normalised on demand, with seeded random
//! crops and flips, together with the tokens of the captions.
//!
//! ```text
//! cargo xtask example images --generate shapes            # makes 24 images, and reads them
//! cargo xtask example images captions.jsonl --size 224 --batch-size 32 --augment --epochs 3 \
//!     --tokenizer openai/clip-vit-base-patch32
//! ```
//!
//! A record is `{"image": "images/0001.jpg", "text": "A dog on a beach."}`; images are PNG, JPEG and WebP.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{ArgGroup, Parser};
use image::{Rgb, RgbImage};
use overdrive::core::OutputFolder;
use overdrive::datasets::prelude::*;
use overdrive::datasets::{
    ImageAugmentation, ImageBatch, ImageCaption, ImageCaptionDataset, ImageOptions,
    collate_captions,
};
use overdrive_examples::{TextTokens, print_line};
use tch::Kind;

/// Reads images with captions in batches of tensors
#[derive(Parser)]
#[command(group = ArgGroup::new("source").args(["data", "generate"]).required(true))]
pub(crate) struct Flags {
    /// JSON or JSON Lines files with the paths and captions of images
    pub(crate) data: Vec<PathBuf>,
    /// Write 24 images of shapes with captions to this folder, and read them
    #[arg(long, value_name = "DIR")]
    pub(crate) generate: Option<PathBuf>,
    /// Field with the path of an image
    #[arg(long, default_value = "image")]
    pub(crate) image_field: String,
    /// Field with the caption of an image
    #[arg(long, default_value = "text")]
    pub(crate) text_field: String,
    /// Height and width of the images in pixels
    #[arg(long, default_value_t = 64)]
    pub(crate) size: u32,
    /// Apply random crops and flips, different in each epoch
    #[arg(long)]
    pub(crate) augment: bool,
    /// Seed of the order and of the augmentation
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of epochs
    #[arg(long, default_value_t = 1)]
    pub(crate) epochs: u64,
    /// Tokenizer of the captions: file, folder, GGUF file or name on the hub [default: the bytes of the text]
    #[arg(long, value_name = "MODEL")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Token that pads captions
    #[arg(long, default_value_t = 0)]
    pub(crate) pad_token: i64,
    /// Number of images in a batch
    #[arg(long, default_value_t = 8)]
    pub(crate) batch_size: usize,
    /// Number of decoding threads
    #[arg(long, default_value_t = 2)]
    pub(crate) workers: usize,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse(), |line| print_line(line)).map(|_| ()))
}

/// Reads all epochs, passes a line per batch to `say`, and returns the batches.
pub(crate) fn run(flags: &Flags, mut say: impl FnMut(&str)) -> Result<Vec<ImageBatch>> {
    let data = match &flags.generate {
        Some(folder) => vec![generate(folder)?],
        None => flags.data.clone(),
    };
    let options = ImageOptions {
        image_field: flags.image_field.clone(),
        text_field: flags.text_field.clone(),
        height: flags.size,
        width: flags.size,
        augmentation: flags.augment.then(ImageAugmentation::default),
        ..ImageOptions::default()
    };
    let images = ImageCaptionDataset::open(&data, options)?;
    say(&format!("images      {}", images.len()));
    let image = images.get(0).context("the first image")?;
    say(&format!(
        "image 0     {}, {:?}",
        image.path.display(),
        image.caption
    ));

    let tokens = TextTokens::open(flags.tokenizer.as_deref())?;
    let pad_token = flags.pad_token;
    let (started, mut count, mut read) = (Instant::now(), 0, Vec::new());
    for epoch in 0..flags.epochs {
        let tokens = tokens.clone();
        // Another seed in each epoch gives other crops; the same run gives the same.
        let pairs = images
            .with_seed(flags.seed + epoch)
            .map(move |image: ImageCaption| {
                let input_ids = tokens.encode(&image.caption)?;
                Ok((image, input_ids))
            });
        let options = DataLoaderOptions {
            batch_size: flags.batch_size,
            num_workers: flags.workers,
            shuffle: true,
            seed: flags.seed + epoch,
            ..DataLoaderOptions::default()
        };
        let collate = move |rows: Vec<_>| collate_captions(&rows, pad_token);
        let mut loader = DataLoader::with_collate(pairs, collate, options)?;
        for batch in loader.epoch() {
            let batch = batch?;
            let pixels = &batch.pixel_values;
            say(&format!(
                "epoch {epoch}     pixels {:?}, mean {:+.3}, deviation {:.3}, captions {:?}",
                pixels.size(),
                pixels.mean(Kind::Float).double_value(&[]),
                pixels.std(true).double_value(&[]),
                batch.input_ids.size(),
            ));
            count += pixels.size()[0];
            read.push(batch);
        }
    }
    let speed = count as f64 / started.elapsed().as_secs_f64();
    say(&format!("speed       {speed:.0} images/s"));
    Ok(read)
}

const COLORS: [(&str, [u8; 3]); 4] = [
    ("red", [220, 40, 40]),
    ("green", [40, 180, 60]),
    ("blue", [50, 80, 220]),
    ("white", [240, 240, 240]),
];
const SHAPES: [&str; 3] = ["square", "circle", "bar"];

/// Writes images of different sizes with one shape each, and returns the file of captions.
fn generate(folder: &Path) -> Result<PathBuf> {
    let output = OutputFolder::check("images", "--generate", folder, &[])?;
    output.also_writes(&["captions.jsonl"])?.create()?;
    let mut captions = String::new();
    for number in 0..24_usize {
        let (shape, color) = (SHAPES[number % 3], COLORS[number % 4]);
        let ground = COLORS[(number + 1 + number / 12) % 4];
        let (width, height) = (80 + 8 * (number as u32 % 5), 96);
        let image = RgbImage::from_fn(width, height, |x, y| {
            let (x, y) = (
                x as f32 / width as f32 - 0.5,
                y as f32 / height as f32 - 0.5,
            );
            let inside = match shape {
                "square" => x.abs() < 0.3 && y.abs() < 0.3,
                "circle" => x.hypot(y) < 0.35,
                _ => x.abs() < 0.1,
            };
            Rgb(if inside { color.1 } else { ground.1 })
        });
        let name = format!("{number:02}.png");
        image
            .save(folder.join(&name))
            .with_context(|| folder.join(&name).display().to_string())?;
        let text = format!("a {} {shape} on {}", color.0, ground.0);
        captions += &format!("{}\n", serde_json::json!({ "image": name, "text": text }));
    }
    let path = folder.join("captions.jsonl");
    std::fs::write(&path, captions).with_context(|| path.display().to_string())?;
    Ok(path)
}
