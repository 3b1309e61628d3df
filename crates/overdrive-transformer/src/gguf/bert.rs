//! BERT in GGUF files: llama.cpp's names of its metadata and tensors.

use std::collections::HashMap;

use overdrive_quantization::{GgufFile, GgufTensor, GgufValue};

use super::config::Keys;
use super::load::{Arrangement, Source, read};
use super::placement::Form;
use crate::checkpoint::{CheckpointProblems, Misshapen};
use crate::config::{check_layers, check_layers_of_files};
use crate::encoder::{EncoderModel, EncoderTensors, HeadKind};
use crate::{EncoderConfig, EncoderFamily, Error, LoadOptions, Pooling, PoolingMode, Result};

/// The value of `general.architecture`.
const ARCHITECTURE: &str = "bert";

/// The names of the modules of the backbone in transformers and in llama.cpp.
const MODULES: [(&str, &str); 4] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
];

/// The names of the modules of a block.
const BLOCK: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];

impl EncoderModel {
    /// Reads a GGUF file of the architecture `bert`, as llama.cpp's `convert_hf_to_gguf.py` writes it. Quantized matrices
    /// keep their quantization, as in [`CausalLm::from_gguf`](crate::CausalLm::from_gguf).
    ///
    /// Files have no pooler; its parameters are initialized, which [`load_report`](crate::Encoder::load_report) lists.
    ///
    /// # Errors
    /// As [`CausalLm::from_gguf`](crate::CausalLm::from_gguf).
    pub fn from_gguf(
        path: impl AsRef<std::path::Path>,
        options: &LoadOptions,
    ) -> Result<EncoderModel> {
        let file = GgufFile::open(path)?;
        let tensors = EncoderTensors::new(config(&file)?, HeadKind::Base);
        let sources = sources(&file, &tensors)?;
        let arrangement = Arrangement {
            tied: false,
            adjacent: tensors.adjacent(),
        };
        let parts = read(sources, &arrangement, options)?;
        let (parts, report) = tensors.completed(parts, options, 0)?;
        EncoderModel::from_tensors(&tensors.config, parts, report)
    }
}

/// Returns the pooling of a GGUF file of embeddings (`pooling_type`), or `None` if the file has none. llama.cpp's server
/// normalizes every embedding.
///
/// # Errors
/// [`Error::Unsupported`] for a type that is not implemented.
pub(crate) fn pooling_of_gguf(file: &GgufFile) -> Result<Option<Pooling>> {
    let architecture = file.value("general.architecture");
    let Some(architecture) = architecture.and_then(GgufValue::as_str) else {
        return Ok(None);
    };
    let keys = Keys { file, architecture };
    let mode = match keys.integer("pooling_type")? {
        None if architecture == ARCHITECTURE => PoolingMode::Mean,
        None | Some(0) => return Ok(None),
        Some(1) => PoolingMode::Mean,
        Some(2) => PoolingMode::Cls,
        Some(3) => PoolingMode::LastToken,
        Some(other) => {
            return Err(Error::Unsupported {
                key: keys.key("pooling_type"),
                found: other.to_string(),
                supported: "1 (mean), 2 (cls), 3 (last)".to_owned(),
            });
        }
    };
    Ok(Some(Pooling {
        mode,
        normalize: true,
    }))
}

/// Returns `true` for a file that [`EncoderModel::from_gguf`] reads.
pub(crate) fn is_bert(file: &GgufFile) -> bool {
    let architecture = file.value("general.architecture");
    architecture.and_then(GgufValue::as_str) == Some(ARCHITECTURE)
}

fn config(file: &GgufFile) -> Result<EncoderConfig> {
    if !is_bert(file) {
        let found = file.value("general.architecture");
        return Err(Error::Unsupported {
            key: "general.architecture".to_owned(),
            found: found.map_or("missing".to_owned(), |value| format!("{value:?}")),
            supported: "bert, for an encoder".to_owned(),
        });
    }
    let keys = Keys {
        file,
        architecture: ARCHITECTURE,
    };
    let layers = keys.required("block_count")?;
    check_layers(&keys.key("block_count"), layers)?;
    let types = file.tensor("token_types.weight");
    let types = types.and_then(|types| types.shape().first().copied());
    let mut config = EncoderConfig::new(EncoderFamily::Bert);
    config.vocab_size = keys.vocabulary()?;
    config.hidden_size = keys.required("embedding_length")?;
    config.num_hidden_layers = layers;
    config.num_attention_heads = keys.required("attention.head_count")?;
    config.intermediate_size = keys.required("feed_forward_length")?;
    config.max_position_embeddings = keys.required("context_length")?;
    config.layer_norm_eps = keys.required_number("attention.layer_norm_epsilon")?;
    config.type_vocab_size = types.unwrap_or(1);
    config.pad_token_id = keys.token("padding_token_id")?;
    config.validate()?;
    Ok(config)
}

/// Returns llama.cpp's name of the parameter that transformers calls `name`; `None` for the pooler, which files lack.
fn gguf_name(name: &str) -> Option<String> {
    let (module, end) = name.rsplit_once('.')?;
    let find = |names: &[(&str, &'static str)], module: &str| {
        let found = names.iter().find(|(own, _)| *own == module);
        found.map(|(_, name)| *name)
    };
    if let Some(own) = find(&MODULES, module) {
        return Some(format!("{own}.{end}"));
    }
    let (layer, part) = module.strip_prefix("encoder.layer.")?.split_once('.')?;
    Some(format!("blk.{layer}.{}.{end}", find(&BLOCK, part)?))
}

/// Finds the tensor of every parameter of the backbone, or returns an error with all that does not fit.
fn sources<'a>(file: &'a GgufFile, tensors: &EncoderTensors) -> Result<Vec<Source<'a>>> {
    let mut stored: HashMap<&str, GgufTensor<'a>> = file
        .tensors()
        .map(|tensor| (tensor.name(), tensor))
        .collect();
    let layers = ("bert.block_count", tensors.config.num_hidden_layers);
    check_layers_of_files(layers, stored.len())?;
    let mut problems = CheckpointProblems::default();
    let mut sources = Vec::new();
    for spec in &tensors.specs {
        let Some(name) = gguf_name(&spec.name) else {
            continue;
        };
        match stored.remove(name.as_str()) {
            None => problems.missing.push(name),
            Some(tensor) if tensor.shape() != spec.shape => problems.misshapen.push(Misshapen {
                name,
                found: tensor.shape().to_vec(),
                expected: spec.shape.clone(),
            }),
            Some(tensor) => sources.push(Source {
                spec: spec.clone(),
                tensors: vec![tensor],
                rows: None,
                columns: None,
                form: Form::Same,
            }),
        }
    }
    problems.unexpected = stored.into_keys().map(str::to_owned).collect();
    problems.unexpected.sort();
    if problems.is_empty() {
        return Ok(sources);
    }
    Err(Error::Checkpoint {
        path: file.path().to_path_buf(),
        problems: Box::new(problems),
    })
}
