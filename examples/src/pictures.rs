//! Images of four shapes, drawn at random positions, sizes and contrasts, with noise.

use overdrive::core::random::{random_u64, uniform_below};
use overdrive::datasets::{DataLoader, DataLoaderOptions, Dataset, DeviceLoader, OnDevice, Result};
use overdrive::trainer::{DataShard, MicroBatch, StaticInputs};
use tch::{Device, Tensor};

/// The number of shapes: disc, square, triangle, cross.
pub const SHAPES: i64 = 4;
/// The width and height of an image in pixels.
const SIDE: usize = 28;

/// Returns a loader of this process's share of `count` images drawn from `seed`, in a new order in each epoch.
///
/// # Errors
/// An error if the batch size is 0.
pub fn load_pictures(
    seed: u64,
    count: usize,
    batch_size: usize,
    shard: DataShard,
) -> Result<DeviceLoader<PictureBatch>> {
    let options = DataLoaderOptions {
        batch_size,
        shuffle: true,
        seed,
        num_workers: 1,
        rank: shard.rank(),
        world_size: shard.world_size(),
        ..DataLoaderOptions::default()
    };
    let loader = DataLoader::with_collate(Pictures { seed, count }, collate, options)?;
    Ok(DeviceLoader::new(loader, shard.device()))
}

/// Images that are drawn on request: the same seed and index give the same image.
struct Pictures {
    seed: u64,
    count: usize,
}

impl Dataset for Pictures {
    type Item = (Vec<f32>, i64);

    fn len(&self) -> usize {
        self.count
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        let draw = |stream: u32, below: u64| uniform_below(below, self.seed, stream, index as u64);
        let shape = draw(0, SHAPES.unsigned_abs());
        let (x, y) = (8 + draw(1, 12) as i64, 8 + draw(2, 12) as i64);
        let (radius, ink) = (4 + draw(3, 4) as i64, 0.5 + draw(4, 50) as f32 / 100.0);
        let noise = |pixel: usize| {
            let number = (index * SIDE * SIDE + pixel) as u64;
            0.4 * (random_u64(self.seed, 5, number) >> 40) as f32 / (1 << 24) as f32
        };
        let pixels = (0..SIDE * SIDE).map(|pixel| {
            let (dx, dy) = ((pixel % SIDE) as i64 - x, (pixel / SIDE) as i64 - y);
            let within = dx.abs() <= radius && dy.abs() <= radius;
            let inside = match shape {
                0 => dx * dx + dy * dy <= radius * radius,
                1 => within,
                2 => within && 2 * dx.abs() <= dy + radius,
                _ => within && (dx.abs() <= 1 || dy.abs() <= 1),
            };
            noise(pixel) + if inside { ink } else { 0.0 }
        });
        Ok((pixels.collect(), shape as i64))
    }
}

/// A batch of images with their labels.
#[derive(Debug)]
pub struct PictureBatch {
    /// (B, 1, 28, 28), Float: brightness, 0 to about 1.4.
    pub images: Tensor,
    /// (B), Int64: the index of the shape, below [`SHAPES`].
    pub shapes: Tensor,
}

fn collate(pictures: Vec<(Vec<f32>, i64)>) -> Result<PictureBatch> {
    let (pixels, shapes): (Vec<Vec<f32>>, Vec<i64>) = pictures.into_iter().unzip();
    let side = SIDE as i64;
    let images = Tensor::f_from_slice(&pixels.concat())?.f_view([-1, 1, side, side])?;
    let shapes = Tensor::f_from_slice(&shapes)?;
    Ok(PictureBatch { images, shapes })
}

impl OnDevice for PictureBatch {
    fn pinned(self) -> Result<Self> {
        let (images, shapes) = (self.images.pinned()?, self.shapes.pinned()?);
        Ok(Self { images, shapes })
    }

    fn on_device(self, device: Device, queued: bool) -> Result<Self> {
        let images = self.images.on_device(device, queued)?;
        let shapes = self.shapes.on_device(device, queued)?;
        Ok(Self { images, shapes })
    }
}

impl MicroBatch for PictureBatch {
    fn examples(&self) -> usize {
        self.shapes.numel()
    }

    // `--cuda-graphs auto` may capture the passes: all that the loss reads is in these tensors.
    fn static_inputs(&self) -> Option<StaticInputs> {
        Some(StaticInputs::of([&self.images, &self.shapes]))
    }
}
