//! The cost of each quantization scheme, with and without calibration: perplexity on the validation split of the
//! text that the model was trained on, and the bytes of its weights. All linear layers of the blocks are
//! quantized, and the head with the embedding if they are tied.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin quantized_perplexity -- runs/tiny-001 [BATCHES]
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::quantization::{
    CalibrationOptions, ClipOptions, GptqOptions, InputCollector, Moments, Scheme, observe_inputs,
    quantize_calibrated,
};
use overdrive::trainer::evaluate;
use overdrive::trainer::{TextData, TrainingArguments};
use overdrive::transformer::{CausalLm, ForwardInput, LoadOptions, QuantizeOptions};
use tch::Device;

/// The number of training windows that calibration reads.
const CALIBRATION_BATCHES: usize = 16;
/// The default number of validation batches.
const EVALUATION_BATCHES: u64 = 40;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let run = std::env::args().nth(1).ok_or("give the folder of a run")?;
    let folder = Path::new(&run).join("model");
    let text = std::fs::read_to_string(Path::new(&run).join("training_args.json"))?;
    let mut arguments: TrainingArguments = serde_json::from_str(&text)?;
    arguments.tokenizer = Some(folder.join("tokenizer.json"));
    let batches = std::env::args().nth(2).map(|count| count.parse());
    arguments.max_eval_batches = Some(batches.transpose()?.unwrap_or(EVALUATION_BATCHES));
    let data = TextData::prepare(&arguments, |line| println!("{line}"))?;
    let perplexity = |model: &CausalLm| -> Outcome<f64> {
        let batches = data.validation_loader(&arguments, Device::Cpu)?;
        let group = ProcessGroup::single();
        Ok(evaluate(model, batches, Precision::Fp32, &group)?.exp())
    };

    let model = load(&folder)?;
    let exact = perplexity(&model)?;
    println!(
        "\n{:<13}{:<13}{:>11}{:>10}{:>9}{:>9}",
        "scheme", "calibration", "perplexity", "change", "MiB", "seconds"
    );
    let bytes = 4 * model.num_parameters();
    line("fp32", "", exact, 0.0, bytes as f64, 0.0);
    let collector = collect(&model, &data, &arguments)?;
    drop(model);

    let clip = Some(ClipOptions::default());
    let gptq = Some(GptqOptions::default());
    let plain = CalibrationOptions::default();
    let calibrations = [
        ("", plain),
        ("clip", CalibrationOptions { clip, ..plain }),
        ("gptq", CalibrationOptions { gptq, ..plain }),
        (
            "clip, gptq",
            CalibrationOptions {
                clip,
                gptq,
                ..plain
            },
        ),
    ];
    let names = [
        "int8",
        "int8-weight",
        "llm-int8",
        "fp8",
        "nf4",
        "fp4",
        "mxfp4",
        "nvfp4",
    ];
    let plain = names.map(|name| name.parse::<Scheme>());
    let schemes = plain.into_iter().chain(grouped());
    for scheme in schemes {
        let scheme = scheme?;
        for (name, calibration) in &calibrations {
            let start = Instant::now();
            let mut model = load(&folder)?;
            let mut bytes = match quantize(&mut model, scheme, &collector, calibration) {
                Ok(bytes) => bytes,
                // Its groups do not divide the widths of this model, for example.
                Err(error) => {
                    println!("{scheme:<13}left out: {error}");
                    break;
                }
            };
            let seconds = start.elapsed().as_secs_f64();
            for (_, tensor) in model.named_parameters() {
                bytes += tensor.numel() * tensor.kind().elt_size_in_bytes();
            }
            let change = 100.0 * (perplexity(&model)? / exact - 1.0);
            line(
                &scheme.to_string(),
                name,
                exact * (1.0 + change / 100.0),
                change,
                bytes as f64,
                seconds,
            );
        }
    }
    Ok(())
}

fn line(scheme: &str, calibration: &str, perplexity: f64, change: f64, bytes: f64, seconds: f64) {
    let mebibytes = bytes / f64::from(1 << 20);
    println!(
        "{scheme:<13}{calibration:<13}{perplexity:>11.3}{change:>+8.2} %{mebibytes:>9.2}{seconds:>9.1}"
    );
}

/// Returns group sizes that divide the widths of the small presets.
fn grouped() -> impl Iterator<Item = overdrive::quantization::Result<Scheme>> {
    [true, false].into_iter().map(|symmetric| {
        Ok(Scheme::Grouped(overdrive::quantization::GroupOptions {
            bits: 4,
            group_size: 16,
            symmetric,
        }))
    })
}

fn load(folder: &Path) -> Outcome<CausalLm> {
    Ok(CausalLm::from_pretrained(folder, &LoadOptions::default())?)
}

/// Returns the second moments of the inputs of all linear layers.
fn collect(
    model: &CausalLm,
    data: &TextData,
    arguments: &TrainingArguments,
) -> Outcome<InputCollector> {
    let _no_grad = tch::no_grad_guard();
    let batches = data.train_loader(arguments, Device::Cpu)?;
    let collector = InputCollector::new(Moments::Full);
    let (mut collector, seen) = observe_inputs(collector, || -> Outcome<()> {
        for batch in batches.take(CALIBRATION_BATCHES) {
            let _logits = model.forward(ForwardInput::new(&batch?.input_ids))?;
        }
        Ok(())
    });
    seen?;
    collector.finish();
    Ok(collector)
}

/// Quantizes all linear layers; returns the bytes of their weights.
fn quantize(
    model: &mut CausalLm,
    scheme: Scheme,
    collector: &InputCollector,
    calibration: &CalibrationOptions,
) -> Outcome<usize> {
    let mut bytes = 0;
    let options = QuantizeOptions::new(scheme).with_head(scheme);
    model.quantize_with(&options, &mut |name, weight, scheme| {
        let packed = quantize_calibrated(weight, scheme, collector.get(name), calibration)?;
        bytes += packed.bytes();
        Ok(packed)
    })?;
    Ok(bytes)
}
