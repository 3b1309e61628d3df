//! The readers. Each takes any bytes and gives a value or an error: a panic, an invalid access, a large allocation
//! or an endless loop is a defect.

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    Dataset, IndexLocation, IndexOptions, TextLines, TextOptions, load_tokenizer,
};
use overdrive_generation::{ChatTemplate, GenerationConfig, Tokenizer, tokenizer_from_gguf};
use overdrive_jinja::Template;
use overdrive_lora::LoraConfig;
use overdrive_optim::StateDict;
use overdrive_packages::PackageInfo;
use overdrive_pickle::PickledFile;
use overdrive_quantization::{GgufFile, QuantizationConfig};
use overdrive_safetensors::MappedFile;
use overdrive_snapshot::{Scope, Snapshot};
use overdrive_transformer::ModelConfig;
use tch::{Device, Kind};

use crate::{datasets, seeds};

/// A reader of bytes from outside.
pub(crate) struct Reader {
    pub(crate) name: &'static str,
    /// Valid inputs.
    pub(crate) seeds: Vec<Vec<u8>>,
    pub(crate) read: Box<dyn Fn(&[u8]) + Send + Sync>,
}

fn reader(
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    read: impl Fn(&[u8]) + Send + Sync + 'static,
) -> Reader {
    Reader {
        name,
        seeds,
        read: Box::new(read),
    }
}

/// Returns a reader of files: the bytes are written to `path` first.
fn of_file(name: &'static str, path: PathBuf, seeds: Vec<Vec<u8>>, read: fn(&Path)) -> Reader {
    reader(name, seeds, move |bytes| {
        write(&path, bytes);
        read(&path);
    })
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("room in the folder for temporary files");
}

/// Returns all readers; `folder` is for their files.
pub(crate) fn readers(folder: &Path) -> Vec<Reader> {
    let file = |name: &str| folder.join(name);
    let mut all = vec![
        of_file(
            "safetensors",
            file("a.safetensors"),
            seeds::safetensors(folder),
            safetensors,
        ),
        of_file(
            "state_dict",
            file("state.safetensors"),
            seeds::state_dict(folder),
            state_dict,
        ),
        of_file("pickle", file("a.bin"), seeds::pickle(), pickle),
        of_file("gguf", file("a.gguf"), seeds::gguf(), gguf),
        of_file(
            "gguf_tokenizer",
            file("tokenizer.gguf"),
            seeds::gguf_tokenizer(),
            gguf_tokenizer,
        ),
        reader("config", seeds::config(), config),
        reader("adapter_config", seeds::adapter_config(), adapter_config),
        reader(
            "generation_config",
            seeds::generation_config(),
            generation_config,
        ),
        reader(
            "quantization_config",
            seeds::quantization_config(),
            quantization_config,
        ),
        of_file(
            "tokenizer",
            file("tokenizer.json"),
            seeds::tokenizer(),
            tokenizer,
        ),
        reader("chat_template", seeds::chat_template(), chat_template),
        of_file("package", file("a.pt2"), seeds::package(folder), package),
        snapshot(&folder.join("snapshot")),
        index_file(&folder.join("index")),
    ];
    for target in datasets::targets() {
        // The tests damage an index by numbers; here its bytes are the input.
        if target.name == "index_file" {
            continue;
        }
        let path = file(&format!("{}.{}", target.name, target.extension));
        let read = target.read;
        all.push(reader(target.name, target.seeds, move |bytes| {
            write(&path, bytes);
            // The number selects the options of the reader.
            let number = bytes.last().copied().unwrap_or(0);
            drop(read(&path, number.into()));
        }));
    }
    all
}

fn safetensors(path: &Path) {
    let Ok(file) = MappedFile::open(path) else {
        return;
    };
    for stored in file.tensors() {
        drop(stored.copy_to_tensor(None, Device::Cpu));
        drop(stored.copy_to_tensor(Some(Kind::Float), Device::Cpu));
    }
}

fn pickle(path: &Path) {
    let Ok(file) = PickledFile::open(path) else {
        return;
    };
    for stored in file.tensors() {
        drop(stored.copy_to_tensor(None, Device::Cpu));
    }
}

fn state_dict(path: &Path) {
    drop(StateDict::load(path));
}

fn gguf(path: &Path) {
    let Ok(file) = GgufFile::open(path) else {
        return;
    };
    drop(ModelConfig::from_gguf(&file));
    for tensor in file.tensors() {
        drop(tensor.dequantize(None, Kind::Float, Device::Cpu));
        drop(tensor.dequantize(Some(&[0, -1, i64::MAX]), Kind::Float, Device::Cpu));
    }
}

fn gguf_tokenizer(path: &Path) {
    if let Ok(file) = GgufFile::open(path) {
        drop(ChatTemplate::from_gguf(&file));
        encode(tokenizer_from_gguf(&file).ok());
    }
}

fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(config) = ModelConfig::from_json(text) {
        // What was read is written so that it is read again.
        let json = serde_json::Value::Object(config.to_json()).to_string();
        drop(ModelConfig::from_json(&json));
    }
}

fn adapter_config(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        drop(LoraConfig::from_json(text));
    }
}

fn generation_config(bytes: &[u8]) {
    if let Ok(map) = serde_json::from_slice(bytes) {
        drop(GenerationConfig::from_map(&map));
    }
}

fn quantization_config(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice(bytes) {
        drop(QuantizationConfig::from_json(&value));
    }
}

fn tokenizer(path: &Path) {
    encode(load_tokenizer(path).ok());
}

/// Encodes a text by a tokenizer that was read, and decodes the tokens.
fn encode(tokenizer: Option<Tokenizer>) {
    if let Some(tokenizer) = tokenizer
        && let Ok(encoding) = tokenizer.encode("fn main() { let x = \"\u{e4}\u{1f600}\"; }", true)
    {
        drop(tokenizer.decode(encoding.get_ids(), false));
    }
}

fn chat_template(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(template) = Template::parse(source) else {
        return;
    };
    let variables = serde_json::json!({
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "h\u{e9}llo\n"},
            {"role": "assistant", "content": null, "tool_calls": [{"name": "f", "arguments": {"x": 1.5, "y": [true]}}]},
            {"role": "user", "content": [{"type": "text", "text": "and <|im_end|>?"}]},
        ],
        "tools": null,
        "add_generation_prompt": true,
        "bos_token": "<s>",
    });
    let Some(variables) = variables.as_object() else {
        return;
    };
    for rendered in [
        template.render(variables),
        template.render_marked(variables, ('\u{fdd0}', '\u{fdd1}')),
    ] {
        if let Err(error) = rendered {
            assert!(!error.to_string().contains("panicked"), "{error}");
        }
    }
}

fn package(path: &Path) {
    drop(PackageInfo::read(path));
}

/// Reads a snapshot whose manifest is the input; its checksum is made right, so that the rest is looked at.
fn snapshot(folder: &Path) -> Reader {
    let (seeds, folder) = (seeds::snapshot(folder), folder.to_owned());
    reader("snapshot", seeds, move |bytes| {
        let manifest = seeds::with_checksum(bytes);
        write(
            &folder.join("manifest.json"),
            manifest.as_deref().unwrap_or(bytes),
        );
        let Ok(snapshot) = Snapshot::open(&folder) else {
            return;
        };
        for rank in 0..2 {
            drop(snapshot.tensors("model", Scope::Run, rank));
            drop(snapshot.state("optimizer", Scope::Run, rank));
            drop(snapshot.document::<serde_json::Value>("steps", Scope::Run, rank));
        }
    })
}

/// Opens lines of text whose index is the input; the checksum of its header is made right.
fn index_file(folder: &Path) -> Reader {
    let open = |folder: &Path| {
        let index = IndexOptions {
            location: IndexLocation::Folder(folder.join("indexes")),
            threads: Some(1),
            ..IndexOptions::default()
        };
        let options = TextOptions {
            index,
            ..TextOptions::default()
        };
        TextLines::open([folder.join("data.txt")], &options)
    };
    let (seeds, index) = seeds::index(folder, |folder| open(folder).map(drop));
    let folder = folder.to_owned();
    reader("index_file", seeds, move |bytes| {
        let mut bytes = bytes.to_vec();
        if let Some((checked, rest)) = bytes.split_at_mut_checked(124)
            && let Some(sum) = rest.get_mut(..4)
        {
            sum.copy_from_slice(&crc32c::crc32c(checked).to_le_bytes());
        }
        write(&index, &bytes);
        let Ok(lines) = open(&folder) else {
            return;
        };
        let last = lines.len().saturating_sub(1);
        for line in [0, last / 2, last, lines.len()] {
            drop(lines.get(line));
        }
    })
}
