use overdrive_attention::PackedLengths;
use overdrive_core::Error as Common;
use overdrive_fused::Convention;
use tch::{Kind, Tensor};

use super::block::Block;
use super::features::ImageFeatures;
use super::grid;
use super::merger::Merger;
use super::parameters::TOWER;
use crate::config::VisionConfig;
use crate::mask::Mask;
use crate::parameters::ParameterMap;
use crate::rope::{Rotary, Rotation};
use crate::{Execution, Result, RopeScaling};

/// transformers has it as a constant.
pub(super) const EPS: f64 = 1e-6;

/// The part of a model that turns the patches of images into image tokens.
#[derive(Debug)]
pub(crate) struct VisionTower {
    /// The weight `(C, 3, frames, P, P)` of a patch and its bias. The windows of the convolution do not overlap, so it is one
    /// matmul.
    patch: [Tensor; 2],
    positions: Tensor,
    /// The frequencies of half a head: those of rows and of columns are the same.
    frequencies: Vec<f32>,
    blocks: Vec<Block>,
    merger: Merger,
    /// The mergers of the outputs of the layers with these numbers.
    deepstack: Vec<(usize, Merger)>,
    config: VisionConfig,
}

impl VisionTower {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        config: &VisionConfig,
    ) -> Result<VisionTower> {
        let name = |part: &str| format!("{TOWER}.{part}");
        let weight = parameters.take(&name("patch_embed.proj.weight"))?;
        let half = config.hidden_size / config.num_heads / 2;
        let rotary = Rotary::new(half, config.rope_theta, &RopeScaling::Default, 1)?;
        let merged = config.hidden_size * config.spatial_merge_size.pow(2);
        let positions = parameters.take(&name("pos_embed.weight"))?;
        let bias = parameters.take(&name("patch_embed.proj.bias"))?;
        let block = |layer| Block::take(parameters, &name(&format!("blocks.{layer}")), config);
        let blocks = (0..config.depth).map(block).collect::<Result<_>>()?;
        let deep = config.deepstack_visual_indexes.iter().enumerate();
        let deep = deep.map(|(index, layer)| {
            let name = name(&format!("deepstack_merger_list.{index}"));
            let merger = Merger::take(parameters, &name, merged, true)?;
            Ok((layer.unsigned_abs() as usize, merger))
        });
        let deepstack = deep.collect::<Result<_>>()?;
        Ok(VisionTower {
            patch: [weight, bias],
            positions,
            frequencies: rotary.inverse_frequencies().to_vec(),
            blocks,
            merger: Merger::take(parameters, &name("merger"), merged, false)?,
            deepstack,
            config: config.clone(),
        })
    }

    /// Computes the image tokens of patches `pixels (N, W)`, which are those of grids of `[height, width]` patches one after
    /// another.
    pub(crate) fn forward(
        &self,
        pixels: &Tensor,
        grids: &[[i64; 2]],
        execution: &Execution,
    ) -> Result<ImageFeatures> {
        self.check(pixels, grids)?;
        let [weight, bias] = &self.patch;
        let pixels = pixels
            .f_to_device(weight.device())?
            .f_to_kind(weight.kind())?;
        let embedded = pixels.f_linear(&weight.f_flatten(1, -1)?, Some(bias))?;
        let learned = grid::learned(&self.positions, grids, &self.config)?;
        let mut x = embedded.f_add(&learned)?.f_unsqueeze(0)?;
        let lengths: Vec<i64> = grids.iter().map(|[height, width]| height * width).collect();
        let images = PackedLengths::from_lengths(&lengths, x.device())?;
        let mask = Mask::bidirectional(Some(&images), x.size()[1], None);
        let rotation = self.rotation(grids, &x)?;
        let fused = execution.fused_kernels;
        let mut deepstack = Vec::with_capacity(self.deepstack.len());
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, &rotation, &mask, execution)?;
            if let Some((_, merger)) = self.deepstack.iter().find(|(own, _)| *own == layer) {
                deepstack.push(merger.forward(&x, fused)?);
            }
        }
        Ok(ImageFeatures {
            embeddings: self.merger.forward(&x, fused)?,
            deepstack,
        })
    }

    fn rotation(&self, grids: &[[i64; 2]], x: &Tensor) -> Result<Rotation> {
        let merge = self.config.spatial_merge_size;
        let [cos, sin] = grid::rotary(&self.frequencies, grids, merge, x.device())?;
        // As in the text model: fp32 also for 16 bits, and fp64 for a model in fp64.
        let kind = match x.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        Ok(Rotation {
            cos: cos.f_to_kind(kind)?,
            sin: sin.f_to_kind(kind)?,
            convention: Convention::HalfSplit,
            query_scale: None,
        })
    }

    fn check(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<()> {
        let merge = self.config.spatial_merge_size;
        for grid in grids {
            if grid.iter().any(|side| *side <= 0 || side % merge != 0) {
                let expected = format!("two positive multiples of spatial_merge_size ({merge})");
                return Err(
                    Common::option("the grid of an image", format!("{grid:?}"), expected).into(),
                );
            }
        }
        let patches: i64 = grids.iter().map(|[height, width]| height * width).sum();
        let width = self.config.patch_width();
        if patches == 0 || pixels.size() != [patches, width] {
            let expected = format!("({patches}, {width}), the patches of at least one grid");
            return Err(Common::shape("pixels", pixels.size(), expected).into());
        }
        Ok(())
    }
}
