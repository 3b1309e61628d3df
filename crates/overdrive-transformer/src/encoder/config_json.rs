//! The keys of `config.json`.

use serde_json::{Map, Value, json};

use super::config::{EncoderConfig, EncoderFamily, ProblemType, default_labels};
use crate::config::{Fields, LayerType, bad, layer_types, without_written_keys};
use crate::{Error, PoolingMode, Result};

/// The largest number of classes: each has a name.
const MAX_LABELS: i64 = 1 << 20;

/// Reads the keys of a family.
pub(super) fn read(family: EncoderFamily, mut fields: Fields) -> Result<EncoderConfig> {
    let mut config = EncoderConfig::new(family);
    fields.positive("vocab_size", &mut config.vocab_size)?;
    fields.positive("hidden_size", &mut config.hidden_size)?;
    fields.layers("num_hidden_layers", &mut config.num_hidden_layers)?;
    fields.positive("num_attention_heads", &mut config.num_attention_heads)?;
    fields.positive("intermediate_size", &mut config.intermediate_size)?;
    fields.positive(
        "max_position_embeddings",
        &mut config.max_position_embeddings,
    )?;
    fields.number("initializer_range", &mut config.initializer_range)?;
    if let Some(value) = fields.take("classifier_dropout") {
        let expected = || bad("classifier_dropout", &value, "a number");
        config.classifier_dropout = Some(value.as_f64().ok_or_else(expected)?);
    }
    fields.token_id("pad_token_id", &mut config.pad_token_id)?;
    fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
    match family {
        EncoderFamily::ModernBert => read_modern(&mut config, &mut fields)?,
        _ => read_bert(&mut config, &mut fields)?,
    }
    read_labels(&mut config, &mut fields)?;
    config.extra = without_written_keys(fields.into_rest());
    Ok(config)
}

fn read_bert(config: &mut EncoderConfig, fields: &mut Fields) -> Result<()> {
    fields.positive("type_vocab_size", &mut config.type_vocab_size)?;
    if let Some(name) = fields.string("hidden_act")? {
        config.hidden_act = name;
    }
    fields.number("layer_norm_eps", &mut config.layer_norm_eps)?;
    fields.number("hidden_dropout_prob", &mut config.hidden_dropout)?;
    fields.number(
        "attention_probs_dropout_prob",
        &mut config.attention_dropout,
    )?;
    for (key, supported) in [
        ("is_decoder", "false, an encoder"),
        ("add_cross_attention", "false, an encoder"),
    ] {
        let mut on = false;
        fields.boolean(key, &mut on)?;
        if on {
            return Err(Error::unsupported(key, "true", supported));
        }
    }
    match fields.string("position_embedding_type")?.as_deref() {
        None | Some("absolute") => Ok(()),
        Some(other) => Err(Error::unsupported(
            "position_embedding_type",
            format!("{other:?}"),
            "absolute",
        )),
    }
}

fn read_modern(config: &mut EncoderConfig, fields: &mut Fields) -> Result<()> {
    if let Some(name) = fields.string("hidden_activation")? {
        config.hidden_act = name;
    }
    if let Some(name) = fields.string("classifier_activation")? {
        config.classifier_activation = name;
    }
    fields.number("norm_eps", &mut config.layer_norm_eps)?;
    // transformers takes 3 for null.
    if let Some(value) = fields.take_nullable("initializer_cutoff_factor") {
        let cutoff = value.as_ref().map_or(Some(3.0), Value::as_f64);
        let found = value.unwrap_or_default();
        let expected = || bad("initializer_cutoff_factor", &found, "a number");
        config.initializer_cutoff_factor = cutoff.ok_or_else(expected)?;
    }
    fields.number("attention_dropout", &mut config.attention_dropout)?;
    fields.number("embedding_dropout", &mut config.embedding_dropout)?;
    fields.number("mlp_dropout", &mut config.mlp_dropout)?;
    fields.boolean("norm_bias", &mut config.norm_bias)?;
    fields.boolean("attention_bias", &mut config.attention_bias)?;
    fields.boolean("mlp_bias", &mut config.mlp_bias)?;
    fields.boolean("decoder_bias", &mut config.decoder_bias)?;
    fields.boolean("classifier_bias", &mut config.classifier_bias)?;
    config.classifier_pooling = match fields.string("classifier_pooling")?.as_deref() {
        None | Some("cls") => PoolingMode::Cls,
        Some("mean") => PoolingMode::Mean,
        Some(other) => {
            let found = format!("{other:?}");
            return Err(Error::unsupported("classifier_pooling", found, "cls, mean"));
        }
    };
    fields.positive("local_attention", &mut config.local_attention)?;
    read_layer_types(config, fields)?;
    read_rope(config, fields)
}

fn read_layer_types(config: &mut EncoderConfig, fields: &mut Fields) -> Result<()> {
    let every = fields
        .optional_positive("global_attn_every_n_layers")?
        .unwrap_or(3);
    config.layer_types = match fields.take("layer_types") {
        Some(value) => layer_types(&value, &[LayerType::Full, LayerType::Sliding])?,
        // `layers` has bounded their number.
        None => (0..config.num_hidden_layers)
            .map(|layer| match layer % every {
                0 => LayerType::Full,
                _ => LayerType::Sliding,
            })
            .collect(),
    };
    Ok(())
}

/// Reads `rope_parameters` of transformers 5, or the two bases of transformers 4.
fn read_rope(config: &mut EncoderConfig, fields: &mut Fields) -> Result<()> {
    fields.number("global_rope_theta", &mut config.global_rope_theta)?;
    fields.number("local_rope_theta", &mut config.local_rope_theta)?;
    if let Some(value) = fields.take("rope_scaling") {
        return Err(Error::unsupported("rope_scaling", value, "null"));
    }
    let Some(mut both) = fields.object("rope_parameters")? else {
        return Ok(());
    };
    for (key, theta) in [
        ("full_attention", &mut config.global_rope_theta),
        ("sliding_attention", &mut config.local_rope_theta),
    ] {
        let Some(mut rope) = both.object(key)? else {
            continue;
        };
        rope.number("rope_theta", theta)?;
        match rope.string("rope_type")?.as_deref() {
            None | Some("default") => {}
            Some(other) => {
                let key = format!("rope_parameters.{key}.rope_type");
                return Err(Error::unsupported(key, format!("{other:?}"), "default"));
            }
        }
    }
    Ok(())
}

fn read_labels(config: &mut EncoderConfig, fields: &mut Fields) -> Result<()> {
    let _inverse = fields.take("label2id");
    let count = fields.optional_positive("num_labels")?;
    if let Some(value) = fields.take("id2label") {
        config.id2label = labels(&value)?;
    } else if let Some(count) = count {
        if count > MAX_LABELS {
            return Err(bad(
                "num_labels",
                &count.into(),
                &format!("at most {MAX_LABELS}"),
            ));
        }
        config.id2label = default_labels(count);
    }
    config.problem_type = match fields.string("problem_type")? {
        None => None,
        Some(name) => {
            let found = ProblemType::ALL
                .into_iter()
                .find(|kind| kind.name() == name);
            let supported = ProblemType::ALL.map(ProblemType::name).join(", ");
            let error = || Error::unsupported("problem_type", format!("{name:?}"), supported);
            Some(found.ok_or_else(error)?)
        }
    };
    Ok(())
}

/// Reads `id2label`, an object of the indices from 0 on.
fn labels(value: &Value) -> Result<Vec<String>> {
    let expected = "an object that names each class by its index, from \"0\" on without gaps";
    let error = || bad("id2label", value, expected);
    let names = value.as_object().ok_or_else(error)?;
    (0..names.len())
        .map(|index| {
            let name = names.get(&index.to_string()).ok_or_else(error)?;
            Ok(match name {
                Value::String(name) => name.clone(),
                other => other.to_string(),
            })
        })
        .collect()
}

/// Writes the object of `config.json` with transformers' class `architecture`.
pub(super) fn write(config: &EncoderConfig, architecture: &str) -> Map<String, Value> {
    let mut map = config.extra.clone();
    let mut add = |entries: Value| {
        if let Value::Object(entries) = entries {
            map.extend(entries);
        }
    };
    add(json!({
        "architectures": [architecture],
        "model_type": config.family.model_type(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "classifier_dropout": config.classifier_dropout,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
    }));
    match config.is_modern() {
        true => add(modern(config)),
        false => add(json!({
            "type_vocab_size": config.type_vocab_size,
            "hidden_act": config.hidden_act,
            "layer_norm_eps": config.layer_norm_eps,
            "hidden_dropout_prob": config.hidden_dropout,
            "attention_probs_dropout_prob": config.attention_dropout,
        })),
    }
    if config.id2label != default_labels(2) {
        let names = config.id2label.iter().enumerate();
        let id2label: Map<String, Value> = names
            .clone()
            .map(|(index, name)| (index.to_string(), name.as_str().into()))
            .collect();
        let label2id: Map<String, Value> = names
            .map(|(index, name)| (name.clone(), index.into()))
            .collect();
        add(json!({"id2label": id2label, "label2id": label2id}));
    }
    if let Some(problem) = config.problem_type {
        add(json!({"problem_type": problem.name()}));
    }
    map
}

fn modern(config: &EncoderConfig) -> Value {
    let layers: Vec<LayerType> = (0..config.num_hidden_layers)
        .map(|layer| config.layer_type(layer))
        .collect();
    let names: Vec<&str> = layers.iter().map(|kind| kind.name()).collect();
    // transformers 4 reads the distance of the full layers and the bases of rotation under their own keys.
    let second = layers
        .iter()
        .skip(1)
        .position(|&kind| kind == LayerType::Full);
    let every = second.map_or(config.num_hidden_layers, |index| index as i64 + 1);
    let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    json!({
        "hidden_activation": config.hidden_act,
        "classifier_activation": config.classifier_activation,
        "classifier_pooling": match config.classifier_pooling {
            PoolingMode::Mean => "mean",
            _ => "cls",
        },
        "norm_eps": config.layer_norm_eps,
        "initializer_cutoff_factor": config.initializer_cutoff_factor,
        "attention_dropout": config.attention_dropout,
        "embedding_dropout": config.embedding_dropout,
        "mlp_dropout": config.mlp_dropout,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "decoder_bias": config.decoder_bias,
        "classifier_bias": config.classifier_bias,
        "local_attention": config.local_attention,
        "layer_types": names,
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.global_rope_theta,
        "local_rope_theta": config.local_rope_theta,
        "rope_parameters": {
            "full_attention": rope(config.global_rope_theta),
            "sliding_attention": rope(config.local_rope_theta),
        },
    })
}
