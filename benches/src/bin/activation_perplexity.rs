//! Measures what rounding activations to bytes costs beside rounding the weights: the perplexity of a text by a model
//! with quantized weights, with floating-point activations and with those that each scheme takes by itself
//! ([`Activations::Auto`]). Schemes that are named are applied to the dequantized weights, the head among them.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin activation_perplexity -- MODEL FILE [SCHEME…]
//! ```

use overdrive::kv_cache::{CacheImplementation, CacheShape};
use overdrive::quantization::{Activations, Scheme};
use overdrive::transformer::{CausalLm, LoadOptions, QuantizeOptions};
use overdrive_benches::Windows;

/// The number of tokens in a window of text.
const LENGTH: usize = 512;
/// The maximum number of windows.
const WINDOWS: usize = 8;
/// The numbers of tokens that the model reads at a time: few rows and many rows have different kernels.
const CHUNKS: [i64; 2] = [16, LENGTH as i64];

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, file, schemes @ ..] = arguments.as_slice() else {
        return Err("give a model's folder or GGUF file, and a text file".into());
    };
    let windows = Windows::of_text(path, file.as_ref(), LENGTH, WINDOWS)?;
    let mut model = CausalLm::from_pretrained(path, &LoadOptions::default())?;
    compare(&mut model, "as it is", &windows)?;
    for scheme in schemes {
        let parsed: Scheme = scheme.parse()?;
        let mut model = CausalLm::from_pretrained(path, &LoadOptions::default())?;
        model.dequantize()?;
        if let Err(error) = model.quantize(&QuantizeOptions::new(parsed).with_head(parsed)) {
            // Its groups do not divide the widths of this model, for example.
            println!("{scheme:<16}left out: {error}");
            continue;
        }
        compare(&mut model, scheme, &windows)?;
    }
    Ok(())
}

/// Prints the perplexities of one model.
fn compare(model: &mut CausalLm, name: &str, windows: &Windows) -> Result<(), Failure> {
    let shape = CacheShape {
        windows: model.layer_windows(),
        ..CacheShape::default()
    };
    let cache = (&CacheImplementation::Dynamic, &shape);
    model.set_activations(Activations::Float)?;
    let float = windows.perplexity(model, LENGTH as i64, cache)?.value;
    print!("{name:<16}float {float:9.4}");
    model.set_activations(Activations::Auto)?;
    for chunk in CHUNKS {
        let auto = windows.perplexity(model, chunk, cache)?.value;
        let change = (auto / float - 1.0) * 100.0;
        print!("  auto, {chunk} rows {auto:9.4} {change:+.3} %");
    }
    println!();
    Ok(())
}
