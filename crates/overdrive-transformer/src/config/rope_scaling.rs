use serde_json::{Map, Value, json};

use super::fields::{Fields, bad, number, positive};
use crate::{Error, Result};

/// The scaling of rotary positions beyond the context of training: the `rope_type` of transformers.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    Default,
    /// Linear scaling: all positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    Linear {
        /// The factor by which the context is extended.
        factor: f64,
    },
    /// Dynamic NTK scaling: the base of the frequencies grows with the largest position of a forward pass that
    /// is past the context. Keys in a cache keep the frequencies that they were written with, as in
    /// transformers. The sequences of a forward pass share the base;
    /// [`ModelConfig::ragged_context`](crate::ModelConfig::ragged_context) is the length up to which it is the
    /// same for all.
    Dynamic {
        /// The factor by which the base grows.
        factor: f64,
    },
    /// YaRN: slow frequencies are divided by `factor`, fast ones kept, those between interpolated, and queries
    /// and keys are scaled up (Peng et al. 2023, arXiv:2309.00071).
    Yarn(Yarn),
    /// LongRoPE: each frequency is divided by a number of its own, by another one for a forward pass beyond the
    /// original context, and queries and keys are scaled up (Ding et al. 2024, arXiv:2402.13753).
    LongRope(LongRope),
    /// Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between interpolated.
    Llama3 {
        /// The factor by which the context is extended.
        factor: f64,
        /// The lower bound of rotations within the original context: slower frequencies are divided.
        low_freq_factor: f64,
        /// The upper bound of rotations within the original context: faster frequencies are kept.
        high_freq_factor: f64,
        /// The context before scaling, in tokens.
        original_max_position_embeddings: i64,
    },
    /// Gemma 4: the frequencies of whole heads, of which the fastest are kept and the others are 0.
    Proportional {
        /// The share of the frequencies that are kept.
        partial_rotary_factor: f64,
        /// The divisor of the frequencies.
        factor: f64,
    },
}

/// The settings of [`RopeScaling::Yarn`].
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// The factor by which the context is extended.
    pub factor: f64,
    /// The context before scaling, in tokens.
    pub original_max_position_embeddings: i64,
    /// The factor of cosines and sines; default `None`: `0.1 · ln(factor) + 1`, or the quotient that the two
    /// `mscale` give.
    pub attention_factor: Option<f64>,
    /// The number of rotations within the original context above which a frequency is kept; default 32.
    pub beta_fast: f64,
    /// The number of rotations within the original context below which a frequency is divided; default 1.
    pub beta_slow: f64,
    /// The weight of the logarithm in the numerator of the attention factor, if both are given.
    pub mscale: Option<f64>,
    /// The weight of the logarithm in the denominator of the attention factor.
    pub mscale_all_dim: Option<f64>,
    /// If `true`, the bounds between kept and divided frequencies are rounded to whole channels; default
    /// `true`.
    pub truncate: bool,
}

impl Yarn {
    /// Returns the defaults for a context of `original_max_position_embeddings` extended by `factor`.
    pub fn new(factor: f64, original_max_position_embeddings: i64) -> Yarn {
        Yarn {
            factor,
            original_max_position_embeddings,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    /// Returns the factor of cosines and sines.
    pub fn attention_scale(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(over), Some(under)) if over != 0.0 && under != 0.0 => {
                self.scale(over) / self.scale(under)
            }
            _ => self.scale(1.0),
        }
    }

    /// Returns the factor of queries and of keys that `mscale_all_dim` stands for in DeepSeek.
    pub(crate) fn all_dim_scale(&self) -> f64 {
        let weight = self.mscale_all_dim.filter(|&weight| weight != 0.0);
        weight.map_or(1.0, |weight| self.scale(weight))
    }

    fn scale(&self, weight: f64) -> f64 {
        match self.factor {
            factor if factor <= 1.0 => 1.0,
            factor => 0.1 * weight * factor.ln() + 1.0,
        }
    }
}

/// The settings of [`RopeScaling::LongRope`].
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// The divisors of the `head_dim / 2` frequencies within the original context.
    pub short_factor: Vec<f64>,
    /// The divisors beyond the original context.
    pub long_factor: Vec<f64>,
    /// The context before scaling, in tokens.
    pub original_max_position_embeddings: i64,
    /// The factor by which the context is extended.
    pub factor: f64,
    /// The factor of cosines and sines; default `None`: `sqrt(1 + ln(factor) /
    /// ln(original_max_position_embeddings))`.
    pub attention_factor: Option<f64>,
}

impl LongRope {
    /// Returns the factor of cosines and sines.
    pub fn attention_scale(&self) -> f64 {
        let context = self.original_max_position_embeddings as f64;
        match self.attention_factor {
            Some(given) => given,
            None if self.factor <= 1.0 => 1.0,
            None => (1.0 + self.factor.ln() / context.ln()).sqrt(),
        }
    }
}

/// The values beside `rope_parameters` that all layers share.
#[derive(Debug, Clone, Copy)]
struct Given {
    max_position_embeddings: i64,
    /// The key beside the parameters; it is preferred to the one in them, as in transformers.
    original_max_position_embeddings: Option<i64>,
    of_phi3: bool,
}

impl Given {
    fn read(fields: &mut Fields, max_position_embeddings: i64, of_phi3: bool) -> Result<Given> {
        let original = fields
            .peek("original_max_position_embeddings")
            .map(|value| positive("original_max_position_embeddings", value))
            .transpose()?;
        Ok(Given {
            max_position_embeddings,
            // transformers' default of Phi-3, where the key is never read from the scaling.
            original_max_position_embeddings: original.or(of_phi3.then_some(4096)),
            of_phi3,
        })
    }
}

impl RopeScaling {
    /// Reads `rope_theta`, `partial_rotary_factor` (to `part`) and `rope_scaling` (transformers 4), or
    /// `rope_parameters` (5), which has all of them.
    pub(super) fn read(
        fields: &mut Fields,
        max_position_embeddings: i64,
        theta: &mut f64,
        part: &mut f64,
        of_phi3: bool,
    ) -> Result<RopeScaling> {
        fields.number("rope_theta", theta)?;
        fields.number("partial_rotary_factor", part)?;
        let given = Given::read(fields, max_position_embeddings, of_phi3)?;
        let scaling = fields.object("rope_scaling")?;
        let parameters = fields.object("rope_parameters")?;
        match (scaling, parameters) {
            (Some(scaling), _) => Self::parse("rope_scaling", scaling, given, theta, part),
            (None, Some(parameters)) => {
                Self::parse("rope_parameters", parameters, given, theta, part)
            }
            (None, None) => Ok(RopeScaling::Default),
        }
    }

    /// Reads the parameters of a model whose sliding layers have their own: `rope_theta` and `rope_scaling` of full
    /// layers alone (transformers 4), or an object of each type in `rope_parameters` (5). Returns those of full and
    /// of sliding layers.
    pub(super) fn read_by_layer(
        fields: &mut Fields,
        max_position_embeddings: i64,
        [theta, local_theta]: [&mut f64; 2],
        part: &mut f64,
    ) -> Result<[RopeScaling; 2]> {
        fields.number("rope_theta", theta)?;
        fields.number("partial_rotary_factor", part)?;
        let given = Given::read(fields, max_position_embeddings, false)?;
        let scaling = fields.object("rope_scaling")?;
        let mut scalings = [RopeScaling::Default, RopeScaling::Default];
        if let Some(mut parameters) = fields.object("rope_parameters")? {
            let layers = [
                ("full_attention", &mut *theta),
                ("sliding_attention", local_theta),
            ];
            for ((name, theta), slot) in layers.into_iter().zip(&mut scalings) {
                if let Some(object) = parameters.object(name)? {
                    let key = format!("rope_parameters.{name}");
                    *slot = Self::parse(&key, object, given, theta, part)?;
                }
            }
            if let Some(key) = parameters.into_rest().keys().next() {
                return Err(Error::unsupported(
                    "rope_parameters",
                    format!("{key:?}"),
                    "full_attention, sliding_attention",
                ));
            }
        }
        if let Some(scaling) = scaling {
            scalings[0] = Self::parse("rope_scaling", scaling, given, theta, part)?;
        }
        Ok(scalings)
    }

    fn parse(
        key: &str,
        mut fields: Fields,
        given: Given,
        theta: &mut f64,
        part: &mut f64,
    ) -> Result<RopeScaling> {
        fields.number("rope_theta", theta)?;
        fields.number("partial_rotary_factor", part)?;
        // `rope_type` was called `type` in older versions; a file may hold both.
        let old = fields.string("type")?;
        let kind = fields
            .string("rope_type")?
            .or(old)
            .unwrap_or_else(|| "default".to_owned());
        let mut reader = Reader {
            key,
            kind: &kind,
            fields,
            given,
        };
        match kind.as_str() {
            "default" => Ok(RopeScaling::Default),
            // Older files of Phi-3 call it `yarn`.
            "longrope" | "su" | "yarn" if given.of_phi3 => reader.long_rope(),
            other if given.of_phi3 => Err(Error::unsupported(
                format!("{key}.rope_type"),
                format!("{other:?}"),
                "default, longrope",
            )),
            "linear" => Ok(RopeScaling::Linear {
                factor: reader.required("factor")?,
            }),
            "dynamic" => Ok(RopeScaling::Dynamic {
                factor: reader.required("factor")?,
            }),
            "yarn" => reader.yarn(),
            // The first files of Phi-3 call it `su`.
            "longrope" | "su" => reader.long_rope(),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: reader.required("factor")?,
                low_freq_factor: reader.required("low_freq_factor")?,
                high_freq_factor: reader.required("high_freq_factor")?,
                original_max_position_embeddings: reader.original_context()?,
            }),
            "proportional" => Ok(RopeScaling::Proportional {
                // It is not the share of rotated channels, which are all.
                partial_rotary_factor: std::mem::replace(part, 1.0),
                factor: reader.optional("factor")?.unwrap_or(1.0),
            }),
            other => Err(Error::unsupported(
                format!("{key}.rope_type"),
                format!("{other:?}"),
                "default, linear, dynamic, yarn, longrope, llama3, proportional",
            )),
        }
    }

    /// Writes the form that transformers 4 and 5 read.
    pub(super) fn write(&self, theta: f64, map: &mut Map<String, Value>) {
        map.insert("rope_theta".to_owned(), theta.into());
        map.insert("rope_scaling".to_owned(), self.to_json());
    }

    /// Returns the object of this scaling, without the base, or null if there is no scaling.
    pub(super) fn to_json(&self) -> Value {
        let mut value = match self {
            RopeScaling::Default => return Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            RopeScaling::Yarn(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
                "attention_factor": yarn.attention_factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "mscale": yarn.mscale,
                "mscale_all_dim": yarn.mscale_all_dim,
                "truncate": yarn.truncate,
            }),
            RopeScaling::LongRope(long) => json!({
                "rope_type": "longrope",
                "short_factor": long.short_factor,
                "long_factor": long.long_factor,
                "original_max_position_embeddings": long.original_max_position_embeddings,
                "factor": long.factor,
                "attention_factor": long.attention_factor,
            }),
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
            RopeScaling::Proportional {
                partial_rotary_factor,
                factor,
            } => json!({
                "rope_type": "proportional",
                "partial_rotary_factor": partial_rotary_factor,
                "factor": (*factor != 1.0).then_some(factor),
            }),
        };
        if let Value::Object(map) = &mut value {
            // transformers reads null as a value, not as absence.
            map.retain(|_, entry| !entry.is_null());
        }
        value
    }

    /// Checks the numbers against the `rotated` channels of a head; `key` is their prefix in an error.
    pub(super) fn validate(&self, key: &str, rotated: i64) -> Result<()> {
        let wrong = |name: &str, found: Value, expected: &str| {
            Err(bad(&format!("{key}.{name}"), &found, expected))
        };
        let factor = match self {
            RopeScaling::Default => return Ok(()),
            // The exponent of the base is D / (D - 2).
            RopeScaling::Dynamic { .. } if rotated == 2 => {
                let expected =
                    "another type, because the base of a single pair of channels cannot grow";
                return wrong("rope_type", "dynamic".into(), expected);
            }
            RopeScaling::Proportional {
                partial_rotary_factor: share,
                ..
            } if !(0.0..=1.0).contains(share) => {
                return wrong("partial_rotary_factor", (*share).into(), "from 0 to 1");
            }
            RopeScaling::Proportional { factor, .. } => factor,
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => factor,
            RopeScaling::Llama3 { factor, .. } => factor,
            RopeScaling::Yarn(yarn) if yarn.beta_fast < yarn.beta_slow => {
                let expected = format!("at least beta_slow, {}", yarn.beta_slow);
                return wrong("beta_fast", yarn.beta_fast.into(), &expected);
            }
            RopeScaling::Yarn(yarn) => &yarn.factor,
            RopeScaling::LongRope(long) => {
                let lists = [
                    ("short_factor", &long.short_factor),
                    ("long_factor", &long.long_factor),
                ];
                for (name, list) in lists {
                    if list.len() as i64 != rotated / 2 {
                        let expected = format!(
                            "{} numbers, one for each pair of rotated channels",
                            rotated / 2
                        );
                        let found = format!("{} numbers", list.len());
                        return wrong(name, found.into(), &expected);
                    }
                    if list.iter().any(|&number| number <= 0.0) {
                        return wrong(name, list.clone().into(), "positive numbers");
                    }
                }
                &long.factor
            }
        };
        if *factor > 0.0 {
            return Ok(());
        }
        wrong("factor", (*factor).into(), "a positive number")
    }
}

/// A reader of the numbers of one rope type.
struct Reader<'a> {
    key: &'a str,
    kind: &'a str,
    fields: Fields,
    given: Given,
}

impl Reader<'_> {
    fn required(&mut self, name: &str) -> Result<f64> {
        match self.optional(name)? {
            Some(value) if value > 0.0 => Ok(value),
            _ => Err(self.missing(name, "a positive number")),
        }
    }

    fn optional(&mut self, name: &str) -> Result<Option<f64>> {
        let key = format!("{}.{name}", self.key);
        let value = self.fields.take(name);
        value.map(|value| number(&key, &value)).transpose()
    }

    fn numbers(&mut self, name: &str) -> Result<Vec<f64>> {
        let key = format!("{}.{name}", self.key);
        match self.fields.take(name) {
            Some(Value::Array(values)) => values.iter().map(|value| number(&key, value)).collect(),
            _ => Err(self.missing(name, "a list of numbers")),
        }
    }

    fn original_context(&mut self) -> Result<i64> {
        let name = "original_max_position_embeddings";
        let own = self.fields.take(name);
        let own = own.map(|value| positive(name, &value)).transpose()?;
        let given = self.given;
        Ok(given
            .original_max_position_embeddings
            .or(own)
            .unwrap_or(given.max_position_embeddings))
    }

    /// Reads the factor; default: the ratio of the two contexts.
    fn factor(&mut self, original: i64) -> Result<f64> {
        let ratio = self.given.max_position_embeddings as f64 / original as f64;
        Ok(self.optional("factor")?.unwrap_or(ratio))
    }

    fn yarn(&mut self) -> Result<RopeScaling> {
        let original = self.original_context()?;
        let mut yarn = Yarn::new(self.factor(original)?, original);
        yarn.attention_factor = self.optional("attention_factor")?;
        yarn.mscale = self.optional("mscale")?;
        yarn.mscale_all_dim = self.optional("mscale_all_dim")?;
        // transformers tests these with Python's `or`, for which 0 is no value either.
        let given = |value: Option<f64>| value.filter(|&value| value != 0.0);
        yarn.beta_fast = given(self.optional("beta_fast")?).unwrap_or(yarn.beta_fast);
        yarn.beta_slow = given(self.optional("beta_slow")?).unwrap_or(yarn.beta_slow);
        self.fields.boolean("truncate", &mut yarn.truncate)?;
        Ok(RopeScaling::Yarn(yarn))
    }

    fn long_rope(&mut self) -> Result<RopeScaling> {
        let original = self.original_context()?;
        Ok(RopeScaling::LongRope(LongRope {
            short_factor: self.numbers("short_factor")?,
            long_factor: self.numbers("long_factor")?,
            factor: self.factor(original)?,
            attention_factor: self.optional("attention_factor")?,
            original_max_position_embeddings: original,
        }))
    }

    fn missing(&self, name: &str, what: &str) -> Error {
        let key = format!("{}.{name}", self.key);
        let expected = format!("{what}, which rope_type {:?} needs", self.kind);
        overdrive_core::Error::option(key, "missing or not positive", expected).into()
    }
}
