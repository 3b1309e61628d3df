//! Quantizes the linear maps of a folder with one safetensors file, once for each scheme, into folders that
//! transformers loads; beside them the numbers that it should find there.
//!
//! ```text
//! cargo run --release -p overdrive-quantization --example write_formats -- DENSE OUT
//! ```
//! `tests/fixtures/check_written.py` runs it and compares.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use overdrive_quantization::{QuantizationConfig, QuantizedWeight, Scheme};
use overdrive_safetensors::{MappedFile, write};
use serde_json::Value;
use tch::{Device, Kind};

const SCHEMES: [&str; 13] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4-g32",
    "int4-g64-asym",
    "int8-g32",
    "int8-g32-asym",
    "nf4",
    "nf4-single",
    "nf4-b128",
    "fp4",
    "fp4-b32-single",
    "fp8",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [dense, out] = &arguments[..] else {
        return Err("give the folder to read and the folder to write".into());
    };
    let file = MappedFile::open(dense.join("model.safetensors"))?;
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    for name in SCHEMES {
        let scheme: Scheme = name.parse()?;
        let config = QuantizationConfig::for_scheme(scheme, vec!["lm_head".to_owned()]);
        let (mut tensors, mut expected) = (Vec::new(), Vec::new());
        for stored in file.tensors() {
            let tensor = stored.copy_to_tensor(None, Device::Cpu)?;
            let module = stored.name().strip_suffix("_proj.weight");
            let Some(module) = module.map(|module| format!("{module}_proj")) else {
                tensors.push((stored.name().to_owned(), tensor));
                continue;
            };
            let weight = QuantizedWeight::quantize(&tensor, scheme)?;
            tensors.extend(config.write_weight(&weight, &module)?);
            expected.push((stored.name().to_owned(), weight.dequantize(Kind::Float)?));
        }
        let folder = out.join(name);
        fs::create_dir_all(&folder)?;
        write(folder.join("model.safetensors"), &tensors, &metadata)?;
        write(folder.join("expected.st"), &expected, &metadata)?;
        let text = fs::read_to_string(dense.join("config.json"))?;
        let mut model: Value = serde_json::from_str(&text)?;
        model["quantization_config"] = config.to_json()?;
        fs::write(
            folder.join("config.json"),
            serde_json::to_vec_pretty(&model)?,
        )?;
    }
    Ok(())
}
