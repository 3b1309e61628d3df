//! BERT and ModernBERT in GGUF files: llama.cpp's names of their metadata and tensors.

use std::collections::HashMap;

use overdrive_quantization::{GgufFile, GgufTensor, GgufValue};

use super::config::Keys;
use super::load::{Arrangement, Source, read};
use super::placement::Form;
use crate::checkpoint::{CheckpointProblems, Misshapen};
use crate::config::{LayerType, check_layers, check_layers_of_files};
use crate::encoder::{EncoderModel, EncoderTensors, HeadKind};
use crate::{EncoderConfig, EncoderFamily, Error, LoadOptions, Pooling, PoolingMode, Result};

/// The values of `general.architecture`.
const ARCHITECTURES: [(&str, EncoderFamily); 2] = [
    ("bert", EncoderFamily::Bert),
    ("modern-bert", EncoderFamily::ModernBert),
];

/// The names of the modules of the backbones in transformers and in llama.cpp.
const MODULES: [(&str, &str); 7] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("embeddings.tok_embeddings", "token_embd"),
    ("embeddings.norm", "token_embd_norm"),
    ("final_norm", "output_norm"),
];

/// The beginnings of the names of blocks.
const BLOCKS: [&str; 2] = ["encoder.layer.", "layers."];

/// The names of the modules of a block.
const BLOCK: [(&str, &str); 14] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
    ("attn_norm", "attn_norm"),
    ("attn.Wqkv", "attn_qkv"),
    ("attn.Wo", "attn_output"),
    ("mlp_norm", "ffn_norm"),
    ("mlp.Wi", "ffn_up"),
    ("mlp.Wo", "ffn_down"),
];

impl EncoderModel {
    /// Reads a GGUF file of the architecture `bert` or `modern-bert`, as llama.cpp's `convert_hf_to_gguf.py` writes it.
    /// Quantized matrices keep their quantization, as in [`CausalLm::from_gguf`](crate::CausalLm::from_gguf).
    ///
    /// Files have no pooler; its parameters are initialized, which [`load_report`](crate::Encoder::load_report) lists, as
    /// it does the tensors of a head (`cls`), which are not read.
    ///
    /// # Errors
    /// As [`CausalLm::from_gguf`](crate::CausalLm::from_gguf).
    pub fn from_gguf(
        path: impl AsRef<std::path::Path>,
        options: &LoadOptions,
    ) -> Result<EncoderModel> {
        let file = GgufFile::open(path)?;
        let tensors = EncoderTensors::new(config(&file)?, HeadKind::Base);
        let (sources, heads) = sources(&file, &tensors)?;
        let arrangement = Arrangement {
            tied: false,
            adjacent: tensors.adjacent(),
        };
        let parts = read(sources, &arrangement, options)?;
        let (parts, mut report) = tensors.completed(parts, options, 0)?;
        report.unused = heads;
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
        None if family_of(architecture).is_some() => PoolingMode::Mean,
        None | Some(0) => return Ok(None),
        Some(1) => PoolingMode::Mean,
        Some(2) => PoolingMode::Cls,
        Some(3) => PoolingMode::LastToken,
        Some(other) => {
            return Err(Error::unsupported(
                keys.key("pooling_type"),
                other,
                "1 (mean), 2 (cls), 3 (last)",
            ));
        }
    };
    Ok(Some(Pooling {
        mode,
        normalize: true,
    }))
}

/// Returns the family of an architecture, if it is one of encoders.
fn family_of(architecture: &str) -> Option<EncoderFamily> {
    let mut all = ARCHITECTURES.into_iter();
    let found = all.find(|(own, _)| *own == architecture);
    found.map(|(_, family)| family)
}

/// Returns `true` for a file that [`EncoderModel::from_gguf`] reads.
pub(crate) fn is_encoder(file: &GgufFile) -> bool {
    let architecture = file.value("general.architecture");
    let architecture = architecture.and_then(GgufValue::as_str);
    architecture.and_then(family_of).is_some()
}

fn config(file: &GgufFile) -> Result<EncoderConfig> {
    let value = file.value("general.architecture");
    let architecture = value.and_then(GgufValue::as_str).unwrap_or_default();
    let Some(family) = family_of(architecture) else {
        return Err(Error::unsupported(
            "general.architecture",
            value.map_or("missing".to_owned(), |value| format!("{value:?}")),
            format!(
                "{}, for an encoder",
                ARCHITECTURES.map(|(name, _)| name).join(", ")
            ),
        ));
    };
    let keys = Keys { file, architecture };
    let layers = keys.required("block_count")?;
    check_layers(&keys.key("block_count"), layers)?;
    let mut config = EncoderConfig::new(family);
    config.vocab_size = keys.vocabulary()?;
    config.hidden_size = keys.required("embedding_length")?;
    config.num_hidden_layers = layers;
    config.num_attention_heads = keys.required("attention.head_count")?;
    config.intermediate_size = keys.required("feed_forward_length")?;
    config.max_position_embeddings = keys.required("context_length")?;
    config.layer_norm_eps = keys.required_number("attention.layer_norm_epsilon")?;
    config.pad_token_id = keys.token("padding_token_id")?;
    match family {
        EncoderFamily::ModernBert => keys.read_modern(&mut config)?,
        _ => {
            let types = file.tensor("token_types.weight");
            let types = types.and_then(|types| types.shape().first().copied());
            config.type_vocab_size = types.unwrap_or(1);
        }
    }
    config.validate()?;
    Ok(config)
}

impl Keys<'_> {
    /// Reads what BERT does not have: windows, rotary positions and the activation.
    fn read_modern(&self, config: &mut EncoderConfig) -> Result<()> {
        let window = self.integer("attention.sliding_window")?;
        let layers = config.num_hidden_layers;
        config.layer_types = match window.filter(|&window| window > 0) {
            None => (0..layers).map(|_| LayerType::Full).collect(),
            Some(window) => {
                config.local_attention = window;
                // The first layer of a period has no window. Without the key, the period is 3.
                let types = self.layer_types(layers, |layer, every| layer % every == 0)?;
                types.unwrap_or_default()
            }
        };
        config.global_rope_theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let local = self.number("rope.freq_base_swa")?;
        config.local_rope_theta = local.unwrap_or(config.global_rope_theta);
        let unsupported = |name: &str, supported: &str| {
            Error::unsupported(self.key(name), format!("{:?}", self.value(name)), supported)
        };
        let scaling = "rope.scaling.type";
        if !matches!(self.text(scaling), None | Some("none")) {
            return Err(unsupported(scaling, "none"));
        }
        let activation = "hidden_activation";
        config.hidden_act = match self.text(activation) {
            None | Some("gelu" | "geglu") => "gelu".to_owned(),
            Some("silu" | "swish" | "swiglu") => "silu".to_owned(),
            Some(_) => return Err(unsupported(activation, "gelu, geglu, silu, swish, swiglu")),
        };
        Ok(())
    }

    /// Returns a text of the metadata.
    fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_str()
    }
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
    let block = BLOCKS.iter().find_map(|block| module.strip_prefix(block));
    let (layer, part) = block?.split_once('.')?;
    Some(format!("blk.{layer}.{}.{end}", find(&BLOCK, part)?))
}

/// Finds the tensor of every parameter of the backbone, or returns an error with all that does not fit. Also returns the
/// names of the tensors of a head.
fn sources<'a>(
    file: &'a GgufFile,
    tensors: &EncoderTensors,
) -> Result<(Vec<Source<'a>>, Vec<String>)> {
    let mut stored: HashMap<&str, GgufTensor<'a>> = file
        .tensors()
        .map(|tensor| (tensor.name(), tensor))
        .collect();
    let layers = ("block_count", tensors.config.num_hidden_layers);
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
    let mut others: Vec<String> = stored.into_keys().map(str::to_owned).collect();
    others.sort();
    let is_head = |name: &String| name.starts_with("cls.");
    let (heads, unexpected) = others.into_iter().partition(is_head);
    problems.unexpected = unexpected;
    if problems.is_empty() {
        return Ok((sources, heads));
    }
    Err(Error::Checkpoint {
        path: file.path().to_path_buf(),
        problems: Box::new(problems),
    })
}
