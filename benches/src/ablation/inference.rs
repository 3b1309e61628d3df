use std::path::Path;
use std::time::Instant;

use overdrive::generation::{GenerationConfig, generate};
use overdrive::profiling::MemoryUsage;
use overdrive::quantization::Scheme;
use overdrive::sys::memory;
use overdrive::transformer::{CausalLm, LoadOptions, QuantizeOptions};
use tch::{Device, Kind};

use super::StageRuns;
use super::stages::{Stage, StageCost, Stages, median_cost};
use crate::{StepResult, generation};

/// The number of prompts, the tokens of a prompt, and the tokens of an answer.
const PROMPTS: usize = 8;
const PROMPT: usize = 32;
const ANSWER: usize = 16;

/// The settings of a stage.
#[derive(Debug, Clone, Copy)]
struct Settings {
    name: &'static str,
    beams: usize,
    cache: bool,
    batch: bool,
    int8: bool,
}

/// The stages: each is a change of the one before it. The quantized model comes last, because it stays quantized.
const STAGES: [Settings; 5] = [
    stage("4 beams, no cache", 4, [false, false, false]),
    stage("greedy", 1, [false, false, false]),
    stage("+ a key/value cache", 1, [true, false, false]),
    stage("+ all prompts in a batch", 1, [true, true, false]),
    stage("+ INT8 weights", 1, [true, true, true]),
];

const fn stage(name: &'static str, beams: usize, [cache, batch, int8]: [bool; 3]) -> Settings {
    Settings {
        name,
        beams,
        cache,
        batch,
        int8,
    }
}

impl Settings {
    fn run(&self, model: &CausalLm, prompts: &[Vec<i64>]) -> StepResult<StageCost> {
        let config = GenerationConfig {
            max_new_tokens: Some(ANSWER),
            min_new_tokens: ANSWER,
            num_beams: self.beams,
            use_cache: self.cache,
            ..GenerationConfig::default()
        };
        memory::reset_peak(Device::Cpu)?;
        let began = Instant::now();
        if self.batch {
            generate(model, prompts, &config)?;
        } else {
            for prompt in prompts {
                generate(model, std::slice::from_ref(prompt), &config)?;
            }
        }
        let peak = MemoryUsage::of(Device::Cpu).peak_allocated_bytes;
        Ok(StageCost {
            seconds: began.elapsed().as_secs_f64(),
            peak_memory_bytes: peak.unwrap_or(0),
        })
    }
}

/// Measures generation on the CPU from beams without a cache on, one change after the other, with the model in the folder
/// `model`, or random weights of the shape of the generation benchmarks.
///
/// # Errors
/// An error of loading or generating.
pub fn inference_stages(
    runs: &StageRuns,
    machine: String,
    model: Option<&Path>,
) -> StepResult<Stages> {
    let load = || -> StepResult<CausalLm> {
        Ok(match model {
            Some(folder) => CausalLm::from_pretrained(folder, &LoadOptions::default())?,
            None => generation::model(Kind::Float)?,
        })
    };
    let mut model_now = load()?;
    let prompts = generation::prompts(PROMPTS, PROMPT, model_now.config().vocab_size());
    let mut stages = Vec::new();
    for settings in STAGES {
        if settings.int8 {
            let scheme = Scheme::Int8Dynamic;
            model_now.quantize(&QuantizeOptions::new(scheme).with_head(scheme))?;
        }
        // The first generation of a kind fills caches; one answer is enough for it.
        settings.run(&model_now, &prompts[..1])?;
        let mut rounds = Vec::new();
        for round in 1..=runs.rounds {
            let cost = settings.run(&model_now, &prompts)?;
            println!("round {round}  {:28} {:.2} s", settings.name, cost.seconds);
            rounds.push(cost);
        }
        stages.push(Stage {
            name: settings.name.to_owned(),
            flags: Vec::new(),
            cost: median_cost(&rounds),
        });
    }
    let described = model.map_or_else(
        || "random weights of a Llama with 100M parameters".to_owned(),
        |folder| folder.display().to_string(),
    );
    Ok(Stages {
        machine,
        work: format!(
            "The time of answers of {ANSWER} tokens to {PROMPTS} prompts of {PROMPT}, {described}, medians of {} runs",
            runs.rounds
        ),
        stages,
        notes: vec![
            "Each stage has the changes of those before it. Beams and greedy search give other texts; a cache and a batch \
             give the same. ONNX Runtime needs Python: `export_onnx --compare` measures it."
                .to_owned(),
        ],
    })
}
