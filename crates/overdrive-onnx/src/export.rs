use std::fs;
use std::path::Path;

use overdrive_transformer::{CausalLm, ModelConfig};
use serde_json::{Map, Value as Json};

use crate::attention::{Heads, past_name, present_name};
use crate::graph::{Graph, MICROSOFT};
use crate::initializer::Element;
use crate::layers::bounded;
use crate::linear::linear;
use crate::model_weights::Source;
use crate::proto::{
    DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto, data_type,
};
use crate::report::{ExportReport, ValueReport};
use crate::write::{Written, write};
use crate::{Error, ExportOptions, LogitsFor, Precision, Result, gpt2, llama};

/// The name of the graph's file in a folder.
const FILE: &str = "model.onnx";

/// Writes the model as the ONNX file `path`, and its weights into the file of the same name with the suffix
/// `_data` where [`ExportOptions::external_data`] or their size requires it.
///
/// The inputs are `input_ids`, `attention_mask` and `position_ids` (the running count of unmasked tokens
/// minus one), and `past_key_values.{layer}.key` and `.value` of shape `(batch_size, num_key_value_heads,
/// past_sequence_length, head_dim)`, empty at first. The outputs are `logits` and `present.{layer}.key` and
/// `.value`, which are the past of the next step. The names are those of Hugging Face's exporter, so
/// `ORTModelForCausalLM` of `optimum` runs the file.
///
/// Each file is written under a temporary name, synced and renamed; after an error, neither file exists.
/// Weights are converted one at a time while they are written.
///
/// The model is borrowed mutably because its layers are visited that way; it is not changed.
///
/// # Errors
/// [`Error::Common`] for invalid options and for files that cannot be written; [`Error::Unsupported`] for a feature
/// that ONNX has no operator for; [`Error::Adapters`] for a model with an unmerged adapter.
pub fn export(
    model: &mut CausalLm,
    path: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<ExportReport> {
    options.validate()?;
    let path = path.as_ref();
    let source = Source::of(model)?;
    let float = match options.precision {
        Precision::Float32 => Element::F32,
        Precision::Float16 => Element::F16,
    };
    let mut graph = Graph::new(options.opset, float);
    let (hidden, softcap) = match model.config() {
        ModelConfig::Llama(config) => (
            llama::hidden_states(&mut graph, &source, options, model, config)?,
            config.logit_softcap(),
        ),
        ModelConfig::Gpt2(config) => (
            gpt2::hidden_states(&mut graph, &source, options, model, config)?,
            None,
        ),
        other => {
            return Err(Error::unsupported(
                "config key `model_type`",
                other
                    .to_json()
                    .get("model_type")
                    .map_or("missing".to_owned(), Json::to_string),
                llama::EXPORTED,
            ));
        }
    };
    logits(
        &mut graph,
        &source,
        options,
        model.config(),
        &hidden,
        softcap,
    )?;

    let values = Values::of(options, model, Heads::of(model.config()), float);
    let proto = envelope(&graph, options, &values, &metadata(model, &source, options));
    // Counts the nodes before they move into the message.
    let nodes = graph.nodes.len();
    let domains = domains(&graph);
    let mut proto = proto;
    if let Some(own) = &mut proto.graph {
        own.node = std::mem::take(&mut graph.nodes);
    }
    let Written { bytes, data } = write(path, proto, &graph.initializers, options.external_data)?;
    let (data_path, data_bytes) = data.unzip();
    Ok(ExportReport {
        path: path.to_path_buf(),
        bytes,
        data_path,
        data_bytes: data_bytes.unwrap_or(0),
        nodes,
        initializers: graph.initializers.len(),
        opset: options.opset,
        ir_version: options.ir_version(),
        domains,
        inputs: values.inputs.into_iter().map(ValueReport::from).collect(),
        outputs: values.outputs.into_iter().map(ValueReport::from).collect(),
    })
}

/// Exports to a folder as `optimum` does: `model.onnx`, `config.json` and, if the model came with one,
/// `generation_config.json`. Copy the tokenizer's files into the folder.
///
/// # Errors
/// As [`export`].
pub fn export_pretrained(
    model: &mut CausalLm,
    dir: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<ExportReport> {
    let dir = dir.as_ref();
    // Also checked here, so that an invalid option leaves no empty folder.
    options.validate()?;
    fs::create_dir_all(dir).map_err(overdrive_core::Error::io("create", dir))?;
    let report = export(model, dir.join(FILE), options)?;
    // Written after the graph, so that a folder with a configuration is complete.
    let mut config = model.config().to_json();
    // This key describes the safetensors files that the configuration came with, not the graph.
    config.remove("quantization_config");
    write_json(dir, "config.json", config)?;
    if let Some(generation) = model.generation_config() {
        write_json(dir, "generation_config.json", generation.clone())?;
    }
    Ok(report)
}

fn write_json(dir: &Path, name: &str, object: Map<String, Json>) -> Result<()> {
    let text = format!("{:#}\n", Json::Object(object));
    Ok(overdrive_core::files::write(
        dir.join(name),
        text.as_bytes(),
    )?)
}

/// Writes the head over hidden states `(B, T, C)`.
fn logits(
    graph: &mut Graph,
    source: &Source,
    options: &ExportOptions,
    config: &ModelConfig,
    hidden: &str,
    softcap: Option<f64>,
) -> Result<()> {
    graph.enter("/lm_head");
    let mut hidden = hidden.to_owned();
    if options.logits == LogitsFor::Last {
        // `Slice` clamps an end beyond the dimension.
        let (start, end, axis) = (graph.ints(&[-1]), graph.ints(&[i64::MAX]), graph.ints(&[1]));
        hidden = graph.op("Slice", &[&hidden, &start, &end, &axis], &[]);
    }
    let table = match config {
        ModelConfig::Gpt2(_) => "transformer.wte",
        _ => "model.embed_tokens",
    };
    let mut logits = if source.ties_head(table) {
        // A node transposes the shared table, so that the file holds it once.
        let transposed = graph.transpose(&format!("{table}.weight"), &[1, 0]);
        graph.op("MatMul", &[&hidden, &transposed], &[])
    } else {
        linear(graph, source, options, "lm_head", &hidden)?
    };
    if let Some(cap) = softcap {
        logits = bounded(graph, &logits, cap)?;
    }
    // Logits are fp32 in every precision. `widened` adds no node for fp32, so the last node gets the name.
    graph.widened(&logits);
    graph.name_last("logits");
    Ok(())
}

/// The inputs and outputs of the graph.
struct Values {
    inputs: Vec<Declared>,
    outputs: Vec<Declared>,
}

struct Declared {
    name: String,
    data_type: i32,
    shape: Vec<Dimension>,
}

#[derive(Clone)]
enum Dimension {
    Number(i64),
    Name(&'static str),
}

impl Values {
    fn of(options: &ExportOptions, model: &CausalLm, heads: Heads, float: Element) -> Values {
        use Dimension::{Name, Number};
        let (batch, tokens) = (Name("batch_size"), Name("sequence_length"));
        let past = Name("past_sequence_length");
        let total = match options.use_cache {
            // The name of this dimension in Hugging Face's exports.
            true => Name("past_sequence_length + sequence_length"),
            false => tokens.clone(),
        };
        let declared = |name: &str, data_type, shape: &[Dimension]| Declared {
            name: name.to_owned(),
            data_type,
            shape: shape.to_vec(),
        };
        let integers = |name: &str, len: &Dimension| {
            declared(name, data_type::INT64, &[batch.clone(), len.clone()])
        };
        let mut inputs = vec![
            integers("input_ids", &tokens),
            integers("attention_mask", &total),
            integers("position_ids", &tokens),
        ];
        let rows = match options.logits {
            LogitsFor::All => tokens.clone(),
            LogitsFor::Last => Number(1),
        };
        let vocabulary = Number(model.config().vocab_size());
        let logits = [batch.clone(), rows, vocabulary];
        let mut outputs = vec![declared("logits", data_type::FLOAT, &logits)];
        let layers = if options.use_cache {
            model.num_layers()
        } else {
            0
        };
        for layer in 0..layers {
            for name in ["key", "value"] {
                let cached = |name: String, len: &Dimension| {
                    let (heads, dim) = (Number(heads.keys), Number(heads.dim));
                    let shape = [batch.clone(), heads, len.clone(), dim];
                    declared(&name, float.data_type(), &shape)
                };
                inputs.push(cached(past_name(layer, name), &past));
                outputs.push(cached(present_name(layer, name), &total));
            }
        }
        Values { inputs, outputs }
    }
}

impl Declared {
    fn proto(&self) -> ValueInfoProto {
        let dim = |dimension: &Dimension| match dimension {
            Dimension::Number(number) => DimensionProto {
                dim_value: Some(*number),
                dim_param: None,
            },
            Dimension::Name(name) => DimensionProto {
                dim_value: None,
                dim_param: Some((*name).to_owned()),
            },
        };
        let shape = TensorShapeProto {
            dim: self.shape.iter().map(dim).collect(),
        };
        ValueInfoProto {
            name: Some(self.name.clone()),
            r#type: Some(TypeProto {
                tensor_type: Some(TensorTypeProto {
                    elem_type: Some(self.data_type),
                    shape: Some(shape),
                }),
            }),
        }
    }
}

impl From<Declared> for ValueReport {
    fn from(value: Declared) -> ValueReport {
        let shape = value.shape.iter().map(|dimension| match dimension {
            Dimension::Number(number) => number.to_string(),
            Dimension::Name(name) => (*name).to_owned(),
        });
        ValueReport {
            shape: shape.collect(),
            name: value.name,
            element: match value.data_type {
                data_type::INT64 => "int64",
                data_type::FLOAT16 => "float16",
                _ => "float32",
            },
        }
    }
}

fn domains(graph: &Graph) -> Vec<String> {
    let microsoft = |node: &crate::proto::NodeProto| node.domain.as_deref() == Some(MICROSOFT);
    match graph.nodes.iter().any(microsoft) {
        true => vec![MICROSOFT.to_owned()],
        false => Vec::new(),
    }
}

/// Returns the model without nodes and constants.
fn envelope(
    graph: &Graph,
    options: &ExportOptions,
    values: &Values,
    metadata: &[(String, String)],
) -> ModelProto {
    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: Some(domain.to_owned()),
        version: Some(version),
    };
    let mut opset_import = vec![opset("", options.opset)];
    // ONNX Runtime's domain has had one version only.
    opset_import.extend(domains(graph).iter().map(|domain| opset(domain, 1)));
    let entry = |(key, value): &(String, String)| StringStringEntryProto {
        key: Some(key.clone()),
        value: Some(value.clone()),
    };
    ModelProto {
        ir_version: Some(options.ir_version()),
        producer_name: Some("overdrive".to_owned()),
        producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        domain: None,
        model_version: Some(1),
        doc_string: None,
        graph: Some(GraphProto {
            name: Some("main_graph".to_owned()),
            input: values.inputs.iter().map(Declared::proto).collect(),
            output: values.outputs.iter().map(Declared::proto).collect(),
            ..GraphProto::default()
        }),
        opset_import,
        metadata_props: metadata.iter().map(entry).collect(),
    }
}

fn metadata(model: &CausalLm, source: &Source, options: &ExportOptions) -> Vec<(String, String)> {
    let config = model.config();
    let model_type = config.to_json().get("model_type").cloned();
    let model_type = model_type
        .as_ref()
        .and_then(Json::as_str)
        .map(str::to_owned);
    let mut entries = vec![
        ("overdrive.model_type", model_type.unwrap_or_default()),
        (
            "overdrive.max_position_embeddings",
            config.max_position_embeddings().to_string(),
        ),
    ];
    let schemes = source.schemes();
    if !schemes.is_empty() {
        entries.push(("overdrive.quantization", schemes.join(", ")));
    }
    let own = entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value));
    own.chain(options.metadata.iter().cloned()).collect()
}
