//! The scaling of rotary positions in GGUF files.

use overdrive_quantization::GgufValue;
use tch::{Device, Kind};

use super::config::Keys;
use super::metadata::Metadata;
use crate::Result;
use crate::config::{LlamaConfig, LlamaFamily, LongRope, RopeScaling, Yarn};

impl Keys<'_> {
    /// Reads the scaling of rotary positions.
    pub(super) fn rope_scaling(&self, config: &LlamaConfig) -> Result<RopeScaling> {
        let key = "rope.scaling.type";
        let factor = match self.number("rope.scaling.factor")? {
            // The key of files from before 2024.
            None => self.number("rope.scale_linear")?,
            given => given,
        };
        // As in llama.cpp, 0 stands for no scaling.
        let factor = factor.filter(|&factor| factor != 0.0);
        let original = || -> Result<i64> {
            let given = self.integer("rope.scaling.original_context_length")?;
            Ok(given.unwrap_or(config.max_position_embeddings))
        };
        let kind = match self.value(key) {
            // Files of Phi-3 have the divisors and no type.
            None if self.file.tensor("rope_factors_long.weight").is_some() => "longrope",
            // llama.cpp's default: a factor alone is one of linear scaling.
            None => "linear",
            Some(value) => value.as_str().ok_or_else(|| self.wrong(key, "a string"))?,
        };
        let attention = self.number("rope.scaling.attn_factor")?;
        if !matches!(kind, "yarn" | "longrope") {
            // llama.cpp multiplies cosines and sines by it in every type.
            self.only("rope.scaling.attn_factor", 1.0)?;
        }
        // llama.cpp stores Llama 3.1's scaling as a tensor of divisors, whatever the type in the metadata.
        if let Some(factors) = self.factors("rope_freqs.weight")? {
            return Ok(llama3(config, factors));
        }
        Ok(match (kind, factor) {
            ("linear", Some(factor)) => RopeScaling::Linear { factor },
            ("yarn", Some(factor)) => {
                RopeScaling::Yarn(self.yarn(config.family, Yarn::new(factor, original()?))?)
            }
            ("longrope", factor) => {
                let original = original()?;
                let ratio = config.max_position_embeddings as f64 / original as f64;
                let lists = ["rope_factors_short.weight", "rope_factors_long.weight"];
                let [short, long] = lists.map(|name| self.factors(name));
                let (Some(short_factor), Some(long_factor)) = (short?, long?) else {
                    return Err(self.wrong(
                        key,
                        "another type, unless the file has rope_factors_short and _long",
                    ));
                };
                RopeScaling::LongRope(LongRope {
                    short_factor,
                    long_factor,
                    original_max_position_embeddings: original,
                    factor: factor.unwrap_or(ratio),
                    attention_factor: attention,
                })
            }
            ("none", _) | ("linear" | "yarn", None) => RopeScaling::Default,
            _ => return Err(self.wrong(key, "none, linear, yarn or longrope")),
        })
    }

    /// Reads the options of YaRN besides its factor and its original context.
    fn yarn(&self, family: LlamaFamily, mut yarn: Yarn) -> Result<Yarn> {
        let attention = self.number("rope.scaling.attn_factor")?;
        // The weight of interpolated against extrapolated frequencies; negative stands for unset.
        if self.number("rope.scaling.yarn_ext_factor")? >= Some(0.0) {
            self.only("rope.scaling.yarn_ext_factor", 1.0)?;
        }
        let fast = self.number("rope.scaling.yarn_beta_fast")?;
        let slow = self.number("rope.scaling.yarn_beta_slow")?;
        // Files have no key for it.
        yarn.truncate = family != LlamaFamily::GptOss;
        // llama.cpp assumes 1 for the other `mscale`. Early files of Ministral 3, whose scales are 1, lack the key.
        let all_dim = self.number("rope.scaling.yarn_log_multiplier")?;
        // Files of DeepSeek have a tenth of it, for both.
        let is_deepseek = family.is_deepseek();
        let all_dim = all_dim.map(|tenth| if is_deepseek { tenth * 10.0 } else { tenth });
        let of_family = (family == LlamaFamily::Ministral3).then_some(1.0);
        yarn.mscale_all_dim = all_dim.or(of_family);
        yarn.mscale = yarn
            .mscale_all_dim
            .map(|all| if is_deepseek { all } else { 1.0 });
        yarn.beta_fast = fast.unwrap_or(yarn.beta_fast);
        yarn.beta_slow = slow.unwrap_or(yarn.beta_slow);
        // llama.cpp multiplies YaRN's own factor by it; transformers replaces that by another.
        yarn.attention_factor = attention
            .filter(|&attention| attention != 1.0)
            .map(|attention| attention * yarn.attention_scale());
        Ok(yarn)
    }

    /// Reads the elements of a small tensor.
    pub(super) fn factors(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(tensor) = self.file.tensor(name) else {
            return Ok(None);
        };
        let numbers = tensor
            .dequantize(None, Kind::Double, Device::Cpu)?
            .f_reshape([-1])?;
        Ok(Some(Vec::try_from(&numbers)?))
    }
}

/// Sets the scaling of rotary positions.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for a scaling that llama.cpp does not have in this architecture.
pub(super) fn metadata(own: &mut Metadata, config: &LlamaConfig) -> Result<()> {
    let kind = match &config.rope_scaling {
        RopeScaling::Default => return Ok(()),
        RopeScaling::Linear { factor } => {
            own.number("rope.scaling.factor", *factor);
            "linear"
        }
        RopeScaling::Yarn(yarn) => {
            let truncates = config.family != LlamaFamily::GptOss;
            let (key, found) = ("truncate", yarn.truncate);
            own.only(found == truncates, key, found, &truncates.to_string())?;
            own.number("rope.scaling.factor", yarn.factor);
            own.sizes([(
                "rope.scaling.original_context_length",
                yarn.original_max_position_embeddings,
            )])?;
            own.number("rope.scaling.yarn_beta_fast", yarn.beta_fast);
            own.number("rope.scaling.yarn_beta_slow", yarn.beta_slow);
            // llama.cpp multiplies YaRN's own factor by it; transformers replaces that by another.
            let mut usual = crate::Yarn::new(yarn.factor, yarn.original_max_position_embeddings);
            if let (Some(1.0), Some(all_dim)) = (yarn.mscale, yarn.mscale_all_dim) {
                own.number("rope.scaling.yarn_log_multiplier", all_dim);
                (usual.mscale, usual.mscale_all_dim) = (yarn.mscale, yarn.mscale_all_dim);
            }
            let attention = yarn.attention_scale() / usual.attention_scale();
            if attention != 1.0 {
                own.number("rope.scaling.attn_factor", attention);
            }
            "yarn"
        }
        RopeScaling::LongRope(long) => {
            let has_factors = ["llama", "phi3"].contains(&own.architecture);
            own.only(
                has_factors,
                "rope_type",
                "longrope",
                "default, linear, yarn",
            )?;
            own.sizes([(
                "rope.scaling.original_context_length",
                long.original_max_position_embeddings,
            )])?;
            own.number("rope.scaling.attn_factor", long.attention_scale());
            own.rope
                .push(("rope_factors_long.weight", long.long_factor.clone()));
            own.rope
                .push(("rope_factors_short.weight", long.short_factor.clone()));
            "longrope"
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            own.only(
                own.architecture == "llama",
                "rope_type",
                "llama3",
                "default, linear, yarn",
            )?;
            let bounds = (low_freq_factor, high_freq_factor);
            let original = original_max_position_embeddings as f64;
            let pairs = config.rotary_dim() / 2;
            let divisor = |pair: i64| {
                llama3_divisor(
                    config.rope_theta,
                    pair as f64 / pairs as f64,
                    original,
                    bounds,
                    factor,
                )
            };
            own.rope
                .push(("rope_freqs.weight", (0..pairs).map(divisor).collect()));
            return Ok(());
        }
        RopeScaling::Dynamic { .. } | RopeScaling::Proportional { .. } => {
            let found = match &config.rope_scaling {
                RopeScaling::Dynamic { .. } => "dynamic",
                _ => "proportional",
            };
            let supported = "default, linear, yarn, longrope, llama3";
            return Err(own.without("rope_type", found, supported));
        }
    };
    own.put("rope.scaling.type", GgufValue::String(kind.to_owned()));
    Ok(())
}

/// Returns the divisor of a frequency in Llama 3.1's scaling. `place` is the number of its pair of channels, divided by
/// that of all pairs.
fn llama3_divisor(
    theta: f64,
    place: f64,
    original: f64,
    (low, high): (f64, f64),
    factor: f64,
) -> f64 {
    let wavelength = std::f64::consts::TAU * theta.powf(place);
    let rotations = original / wavelength;
    if rotations > high {
        return 1.0;
    }
    if rotations < low {
        return factor;
    }
    let smooth = (rotations - low) / (high - low);
    1.0 / ((1.0 - smooth) / factor + smooth)
}

/// Returns the scaling by the divisors `factors`: Llama 3.1's if its formula gives them, else LongRoPE with the
/// same divisors at every length.
fn llama3(config: &LlamaConfig, factors: Vec<f64>) -> RopeScaling {
    // The slowest frequency is divided by the whole factor.
    let factor = factors.iter().copied().fold(1.0, f64::max);
    // The constants of Llama 3.1 to 3.3, which a GGUF file does not store.
    let original = 8192;
    let (low, high) = (1.0, 4.0);
    let pairs = factors.len() as f64;
    let standard = |index: usize| {
        let (theta, place) = (config.rope_theta, index as f64 / pairs);
        llama3_divisor(theta, place, original as f64, (low, high), factor)
    };
    // The file has fp32 divisors; another scaling differs by far more than their rounding.
    let is_standard = |(index, found): (usize, &f64)| (found / standard(index) - 1.0).abs() < 1e-4;
    if factors.iter().enumerate().all(is_standard) {
        return RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        };
    }
    // Divisors of another formula apply at every length, as llama.cpp applies them.
    RopeScaling::LongRope(LongRope {
        short_factor: factors.clone(),
        long_factor: factors,
        original_max_position_embeddings: config.max_position_embeddings,
        factor: 1.0,
        attention_factor: Some(1.0),
    })
}
