use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::args::{ConfigGroup, QuantizationArgs, scheme_of};
use crate::format::module::Module;
use crate::format::patterns::{any, names_module};
use crate::{Error, Result, Scheme};

/// The `quantization_config` of a model in the layouts of compressed-tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompressedTensorsConfig {
    /// Which modules are quantized how; the first that names a module counts.
    pub config_groups: Map<String, Value>,
    /// `int-quantized`, `pack-quantized`, `float-quantized`, `naive-quantized` or `mixed-precision`.
    #[serde(default)]
    pub format: Option<String>,
    /// Modules that are not quantized: names, and after `re:` regular expressions.
    #[serde(default)]
    pub ignore: Option<Vec<String>>,
    /// `compressed` where the weights are.
    #[serde(default)]
    pub quantization_status: Option<String>,
    /// What else is in the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl CompressedTensorsConfig {
    pub(in crate::format) const PARTS: &'static [&'static str] = &[
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ];

    /// For files with weights of this scheme.
    pub(in crate::format) fn of(scheme: Scheme, not_quantized: Vec<String>) -> Option<Self> {
        let dynamic = Some(QuantizationArgs::of(8, "int", true, "token", None));
        let (format, weights, input_activations) = match scheme {
            Scheme::Int8Dynamic => {
                let weights = QuantizationArgs::of(8, "int", true, "channel", None);
                ("int-quantized", weights, dynamic)
            }
            Scheme::Int8WeightOnly => {
                let weights = QuantizationArgs::of(8, "int", true, "channel", None);
                ("pack-quantized", weights, None)
            }
            Scheme::Grouped(options) => {
                let size = Some(options.group_size as i64);
                let (bits, symmetric) = (options.bits, options.symmetric);
                let weights = QuantizationArgs::of(bits, "int", symmetric, "group", size);
                ("pack-quantized", weights, None)
            }
            Scheme::Fp8 => {
                let weights = QuantizationArgs::of(8, "float", true, "channel", None);
                ("float-quantized", weights, None)
            }
            _ => return None,
        };
        let group = ConfigGroup {
            targets: vec!["Linear".to_owned()],
            weights: Some(weights),
            input_activations,
            output_activations: None,
            format: Some(format.to_owned()),
            other: Map::new(),
        };
        let group = serde_json::to_value(group).ok()?;
        Some(CompressedTensorsConfig {
            config_groups: [("group_0".to_owned(), group)].into_iter().collect(),
            format: Some(format.to_owned()),
            ignore: Some(not_quantized),
            quantization_status: Some("compressed".to_owned()),
            other: [
                ("kv_cache_scheme".to_owned(), Value::Null),
                ("global_compression_ratio".to_owned(), Value::Null),
            ]
            .into_iter()
            .collect(),
        })
    }

    /// The groups, in the order of the file.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a group that is not one.
    pub fn groups(&self) -> Result<Vec<ConfigGroup>> {
        let group = |(name, value): (&String, &Value)| {
            serde_json::from_value(value.clone()).map_err(|error| Error::BadOption {
                option: "quantization_config.config_groups",
                found: format!("{name}: {error}"),
                expected: "targets and how their weights are quantized".to_owned(),
            })
        };
        self.config_groups.iter().map(group).collect()
    }

    pub(in crate::format) fn validate(&self) -> Result<()> {
        let groups = self.groups()?;
        if groups.is_empty() {
            return Err(Error::BadOption {
                option: "quantization_config.config_groups",
                found: "none".to_owned(),
                expected: "at least one".to_owned(),
            });
        }
        for args in groups.iter().filter_map(|group| group.weights.as_ref()) {
            if scheme_of(args, false).is_none() {
                return Err(Error::BadOption {
                    option: "quantization_config.config_groups",
                    found: format!(
                        "{} bits of {} by {}",
                        args.num_bits,
                        args.kind,
                        args.strategy.as_deref().unwrap_or("tensor")
                    ),
                    expected:
                        "4 or 8 bits of int by tensor, channel or group, or 8 of float by tensor \
                               or channel, which can be read"
                            .to_owned(),
                });
            }
        }
        Ok(())
    }

    /// The group of a module, that names it before one that takes any `Linear`.
    pub(super) fn group_of(&self, module: &str) -> Result<Option<ConfigGroup>> {
        let groups = self.groups()?;
        for group in &groups {
            if any(&group.targets, module, names_module)? {
                return Ok(Some(group.clone()));
            }
        }
        let class = |target: &String| !target.starts_with("re:") && !target.contains('.');
        Ok(groups
            .into_iter()
            .find(|group| group.targets.iter().any(class)))
    }

    pub(in crate::format) fn scheme(&self, module: Option<&str>) -> Result<Option<Scheme>> {
        let group = match module {
            Some(module) if self.is_ignored(module)? => return Ok(None),
            Some(module) => self.group_of(module)?,
            None => self.groups()?.into_iter().next(),
        };
        Ok(group.and_then(|group| {
            let dynamic = group.input_activations.is_some();
            group.weights.and_then(|args| scheme_of(&args, dynamic))
        }))
    }

    pub(in crate::format) fn is_ignored(&self, module: &str) -> Result<bool> {
        any(
            self.ignore.as_deref().unwrap_or_default(),
            module,
            names_module,
        )
    }

    pub(in crate::format) fn is_stored(module: Module<'_>) -> Result<bool> {
        if module.optional("weight_packed")?.is_some() {
            return Ok(true);
        }
        let weight = module.optional("weight")?;
        let codes = |kind| matches!(kind, Kind::Int8 | Kind::Float8e4m3fn);
        Ok(weight.and_then(|weight| weight.kind()).is_some_and(codes))
    }
}
