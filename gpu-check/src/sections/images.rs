//! A small model that sees images; part of the section `tiny`.

use std::ops::ControlFlow;

use anyhow::{Context as _, Result};
use overdrive::generation::{
    Engine, EngineConfig, GenerateOptions, GenerationConfig, ImagePatches, Request,
    generate_with_options,
};
use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig, LlamaFamily};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{distance, name_of, tolerance};

/// The patches of an image.
const GRID: [usize; 2] = [8, 12];

pub(super) fn run(context: &mut Context) -> Result<()> {
    let (device, heads) = (context.device(), context.sized(4, 2));
    for kind in [Kind::Float, Kind::BFloat16] {
        context.check(format!("image tokens in {}", name_of(kind)), || {
            let here = encoded(&model(heads, Device::Cpu, Kind::Double)?)?;
            let there = encoded(&model(heads, device, kind)?)?;
            let (error, allowed) = (distance(&there, &here)?, 4.0 * tolerance(kind));
            Ok(Finding::judged(error <= allowed, "the image tokens differ")
                .with("error", error)
                .with("tolerance", allowed))
        })?;
    }
    context.check("an engine with images gives the tokens of the CPU", || {
        let alone = generated(&model(heads, Device::Cpu, Kind::Float)?)?;
        let own = model(heads, device, Kind::Float)?;
        let (there, served) = (generated(&own)?, served(&own)?);
        let right = there == alone && served.iter().all(|tokens| *tokens == alone);
        Ok(Finding::judged(right, "the tokens differ"))
    })
}

/// Returns a model whose tower has heads of 72 channels, as Qwen3-VL's has.
fn model(heads: i64, device: Device, kind: Kind) -> Result<CausalLm> {
    let mut config = LlamaConfig {
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 256,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(64),
        max_position_embeddings: 512,
        ..LlamaConfig::of(LlamaFamily::Qwen3Vl)
    };
    let vision = config.vision.as_mut().context("the family sees images")?;
    (vision.hidden_size, vision.num_heads) = (72 * heads, heads);
    (vision.intermediate_size, vision.out_hidden_size) = (256, 128);
    (vision.depth, vision.patch_size) = (2, 8);
    vision.num_position_embeddings = 16;
    vision.deepstack_visual_indexes = vec![0];
    vision.mrope_section = [12, 10, 10];
    vision.image_token_id = 511;
    let options = InitOptions {
        device,
        kind,
        ..InitOptions::default()
    };
    Ok(CausalLm::new(&config.into(), &options)?)
}

fn image() -> Result<ImagePatches> {
    let width = 3 * 2 * 8 * 8;
    let values = (0..GRID[0] * GRID[1] * width).map(|at| (at as f32 * 0.37).sin());
    Ok(ImagePatches::new(values.collect(), width, GRID, 2)?)
}

fn encoded(model: &CausalLm) -> Result<Tensor> {
    let image = image()?;
    let pixels = Tensor::f_from_slice(&image.values())?.f_view([-1, image.patch_width as i64])?;
    let grids = [GRID.map(|side| side as i64)];
    Ok(tch::no_grad(|| model.encode_images(&pixels, &grids))?.embeddings)
}

fn prompt() -> Vec<i64> {
    let tokens = GRID[0] * GRID[1] / 4;
    [vec![5, 9], vec![511; tokens], vec![7, 3]].concat()
}

fn greedy() -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(16),
        ..GenerationConfig::default()
    }
}

fn generated(model: &CausalLm) -> Result<Vec<i64>> {
    let images = [vec![image()?]];
    let options = GenerateOptions {
        images: &images,
        ..GenerateOptions::default()
    };
    let go = |_: overdrive::generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(model, &[prompt()], &greedy(), &options, go)?;
    Ok(output.new_tokens(0).to_vec())
}

/// Returns the tokens of two requests that share their steps with one without images.
fn served(model: &CausalLm) -> Result<Vec<Vec<i64>>> {
    let settings = EngineConfig {
        num_blocks: Some(64),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, settings)?;
    for _ in 0..2 {
        engine.submit(Request::new(prompt(), greedy()).with_images(vec![image()?]))?;
    }
    engine.submit(Request::new(vec![5, 9, 7], greedy()))?;
    let mut all = Vec::new();
    for (_, result) in engine.run_to_end()?.into_iter().take(2) {
        all.extend(result?.into_iter().map(|done| done.tokens));
    }
    Ok(all)
}
