use serde_json::{Map, Value, json};

use super::fields::{Fields, positive};
use crate::{Error, Result};

/// How rotary positions are stretched beyond the context they were trained on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    Default,
    /// All positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    Linear {
        /// How many times longer the context becomes.
        factor: f64,
    },
    /// Slow frequencies are divided by `factor`, fast ones kept, those between interpolated: Llama
    /// 3.1.
    Llama3 {
        /// How many times longer the context becomes.
        factor: f64,
        /// Wavelengths longer than the original context over this are divided.
        low_freq_factor: f64,
        /// Wavelengths shorter than the original context over this are kept.
        high_freq_factor: f64,
        /// The context before scaling, in tokens.
        original_max_position_embeddings: i64,
    },
}

impl RopeScaling {
    /// Reads `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5).
    pub(super) fn read(
        fields: &mut Fields,
        max_position_embeddings: i64,
        theta: &mut f64,
    ) -> Result<RopeScaling> {
        fields.number("rope_theta", theta)?;
        refuse_partial(fields)?;
        let scaling = fields.object("rope_scaling")?;
        let parameters = fields.object("rope_parameters")?;
        let (key, Some(mut fields)) = (match (parameters, scaling) {
            (Some(parameters), _) => ("rope_parameters", Some(parameters)),
            (None, scaling) => ("rope_scaling", scaling),
        }) else {
            return Ok(RopeScaling::Default);
        };
        fields.number("rope_theta", theta)?;
        refuse_partial(&mut fields)?;
        // Before it was called `rope_type` it was called `type`; a file may hold both.
        let old = fields.string("type")?;
        let kind = fields
            .string("rope_type")?
            .or(old)
            .unwrap_or_else(|| "default".to_owned());
        let number = |fields: &mut Fields, name: &str| {
            let mut value = f64::NAN;
            fields.number(name, &mut value)?;
            if value > 0.0 {
                Ok(value)
            } else {
                Err(missing(key, name, &kind))
            }
        };
        match kind.as_str() {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear {
                factor: number(&mut fields, "factor")?,
            }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: number(&mut fields, "factor")?,
                low_freq_factor: number(&mut fields, "low_freq_factor")?,
                high_freq_factor: number(&mut fields, "high_freq_factor")?,
                original_max_position_embeddings: fields
                    .take("original_max_position_embeddings")
                    .map(|value| positive("original_max_position_embeddings", &value))
                    .transpose()?
                    .unwrap_or(max_position_embeddings),
            }),
            other => Err(Error::Unsupported {
                key: format!("{key}.rope_type"),
                found: format!("{other:?}"),
                supported: "default, linear, llama3".to_owned(),
            }),
        }
    }

    /// The form that both transformers 4 and 5 read.
    pub(super) fn write(&self, theta: f64, map: &mut Map<String, Value>) {
        map.insert("rope_theta".to_owned(), theta.into());
        let scaling = match *self {
            RopeScaling::Default => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        map.insert("rope_scaling".to_owned(), scaling);
    }
}

fn refuse_partial(fields: &mut Fields) -> Result<()> {
    let mut part = 1.0;
    fields.number("partial_rotary_factor", &mut part)?;
    if part == 1.0 {
        return Ok(());
    }
    Err(Error::Unsupported {
        key: "partial_rotary_factor".to_owned(),
        found: part.to_string(),
        supported: "1.0, the rotation of whole heads".to_owned(),
    })
}

fn missing(key: &str, name: &str, kind: &str) -> Error {
    Error::BadConfig {
        key: format!("{key}.{name}"),
        found: "missing or not positive".to_owned(),
        expected: format!("a positive number, which rope_type {kind:?} needs"),
    }
}
