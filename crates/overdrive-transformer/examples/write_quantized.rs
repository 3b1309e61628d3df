//! Writes a model's folder quantized in every scheme that files have, once by `quantize_checkpoint` and once
//! by `CausalLm::quantize` and `save_pretrained`, and beside each the logits that it gives here.
//!
//! ```text
//! cargo run --release -p overdrive-transformer --example write_quantized -- MODEL OUT [SCHEME…]
//! ```
//! `tests/fixtures/check_quantized.py` runs it, loads the folders in transformers and compares.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_quantization::{CheckpointOptions, Error, Scheme, quantize_checkpoint};
use overdrive_transformer::{CausalLm, ForwardInput, LoadOptions, QuantizeOptions};
use tch::{Device, Kind, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SCHEMES: [&str; 12] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4",
    "int4-g32",
    "int4-g16",
    "int8-g32",
    "int8-g16",
    "nf4",
    "nf4-single",
    "fp4",
    "fp8",
];

fn main() -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(out)) = (arguments.next(), arguments.next()) else {
        return Err("give the model's folder, the folder to write to, and schemes".into());
    };
    let (model, out) = (PathBuf::from(model), PathBuf::from(out));
    let mut schemes: Vec<String> = arguments.collect();
    if schemes.is_empty() {
        schemes = SCHEMES.map(str::to_owned).to_vec();
    }
    std::fs::create_dir_all(&out)?;
    for name in schemes {
        let scheme: Scheme = name.parse()?;
        let folder = out.join(format!("{name}.checkpoint"));
        match quantize_checkpoint(&model, &folder, scheme, &CheckpointOptions::default()) {
            Ok(_) => {}
            // Groups that do not divide its widths.
            Err(Error::Tensor { name: map, source }) => {
                println!("{name} does not fit `{map}`: {source}");
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        write_logits(&folder)?;

        let folder = out.join(format!("{name}.model"));
        let mut model = CausalLm::from_pretrained(&model, &LoadOptions::default())?;
        model.quantize(&QuantizeOptions::new(scheme))?;
        model.save_pretrained(&folder, &Default::default())?;
        write_logits(&folder)?;
    }
    Ok(())
}

/// Two rows of 33 tokens, and the logits of each.
fn write_logits(folder: &Path) -> Result<()> {
    let model = CausalLm::from_pretrained(folder, &LoadOptions::default())?;
    let ids = Tensor::f_arange(66, (Kind::Int64, Device::Cpu))?;
    // Scattered over any vocabulary of a few hundred words and more.
    let ids = ids.f_mul_scalar(7919)?.f_remainder(251)?.f_view([2, 33])?;
    let logits = model.forward(ForwardInput::new(&ids))?;
    let tensors = [("ids".to_owned(), ids), ("logits".to_owned(), logits)];
    // Not a name that loaders take for weights.
    let path = folder.join("logits.st");
    overdrive_safetensors::write(&path, &tensors, &BTreeMap::new())?;
    Ok(())
}
