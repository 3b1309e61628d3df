use overdrive_core::check_option;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::args::{ConfigGroup, QuantizationArgs, Strategy, scheme_of};
use crate::format::module_patterns::{any, names_module};
use crate::format::source::Module;
use crate::{Error, Result, Scheme};

/// The name of the option in error messages.
const CONFIG_GROUPS: &str = "quantization_config.config_groups";

/// The `quantization_config` of a model in the layouts of compressed-tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompressedTensorsConfig {
    /// The groups of modules with the same quantization; the first group that names a module applies.
    pub config_groups: Map<String, Value>,
    /// The layout: `int-quantized`, `pack-quantized`, `float-quantized`, `mxfp4-pack-quantized`,
    /// `nvfp4-pack-quantized`, `naive-quantized` or `mixed-precision`.
    #[serde(default)]
    pub format: Option<String>,
    /// The modules that are not quantized: names, and regular expressions after `re:`.
    #[serde(default)]
    pub ignore: Option<Vec<String>>,
    /// The state of the weights: `compressed` if they are quantized.
    #[serde(default)]
    pub quantization_status: Option<String>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl CompressedTensorsConfig {
    pub(in crate::format) const PARTS: &'static [&'static str] = &[
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ];

    /// The scales of activations and of a layer's outputs, of which a file has some if they are static.
    pub(in crate::format) const STATIC_ACTIVATIONS: &'static [&'static str] = &[
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "output_zero_point",
        "output_global_scale",
    ];

    /// The scales of the queries, keys and values of an attention layer, of which a file has some if they are
    /// quantized.
    pub(in crate::format) const STATIC_ATTENTION: &'static [&'static str] = &[
        "q_scale",
        "q_zero_point",
        "q_global_scale",
        "k_scale",
        "k_zero_point",
        "k_global_scale",
        "v_scale",
        "v_zero_point",
        "v_global_scale",
    ];

    /// Returns the configuration of files with weights of this scheme, if compressed-tensors has it.
    pub(in crate::format) fn of(scheme: Scheme, not_quantized: Vec<String>) -> Option<Self> {
        let format = format_of(scheme)?;
        let weights = match scheme {
            Scheme::Int8Dynamic | Scheme::Int8WeightOnly => {
                QuantizationArgs::of(8, "int", true, "channel", None)
            }
            Scheme::Grouped(options) => {
                let size = Some(options.group_size as i64);
                QuantizationArgs::of(options.bits, "int", options.symmetric, "group", size)
            }
            Scheme::Fp8 => QuantizationArgs::of(8, "float", true, "channel", None),
            Scheme::Mxfp4 => QuantizationArgs::of(4, "float", true, "group", Some(32))
                .with_scales_of("torch.uint8"),
            Scheme::Nvfp4 => QuantizationArgs::of(4, "float", true, "tensor_group", Some(16))
                .with_scales_of("torch.float8_e4m3fn"),
            _ => return None,
        };
        let input_activations = (scheme == Scheme::Int8Dynamic)
            .then(|| QuantizationArgs::of(8, "int", true, "token", None));
        Self::of_linear(weights, input_activations, format, not_quantized)
    }

    /// Returns the configuration of integers in groups of `group_size` inputs, or if it is -1 of one group in each row.
    pub(in crate::format) fn of_groups(
        bits: u8,
        group_size: i64,
        symmetric: bool,
        not_quantized: Vec<String>,
    ) -> Option<Self> {
        let weights = match group_size {
            1.. => QuantizationArgs::of(bits, "int", symmetric, "group", Some(group_size)),
            _ => QuantizationArgs::of(bits, "int", symmetric, "channel", None),
        };
        Self::of_linear(weights, None, "pack-quantized", not_quantized)
    }

    fn of_linear(
        weights: QuantizationArgs,
        input_activations: Option<QuantizationArgs>,
        format: &str,
        not_quantized: Vec<String>,
    ) -> Option<Self> {
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

    /// Returns the groups, in the order of the file.
    ///
    /// # Errors
    /// [`Error::Common`] for a group that does not parse.
    pub fn groups(&self) -> Result<Vec<ConfigGroup>> {
        let group = |(name, value): (&String, &Value)| {
            serde_json::from_value(value.clone()).map_err(|error| {
                let expected = "an object with targets and the quantization of their weights";
                Error::option(
                    CONFIG_GROUPS,
                    format!("invalid in {name} ({error})"),
                    expected,
                )
            })
        };
        self.config_groups.iter().map(group).collect()
    }

    pub(in crate::format) fn validate(&self) -> Result<()> {
        self.check_transforms()?;
        let groups = self.groups()?;
        let expected = "an object with at least one group";
        check_option(!groups.is_empty(), CONFIG_GROUPS, "empty", expected)?;
        for args in groups.iter().filter_map(|group| group.weights.as_ref()) {
            if scheme_of(args, false).is_none() {
                let strategy = args.strategy.as_deref().unwrap_or("tensor");
                let mut found = format!("{}-bit {} by {strategy}", args.num_bits, args.kind);
                if let Some([outputs, inputs]) = args.block_structure {
                    found += &format!(" of {outputs} by {inputs}");
                }
                let expected = "4-bit or 8-bit int by tensor, channel or group, 8-bit float by tensor, channel or block \
                                of 128 by 128, 4-bit float by groups of 32 (MXFP4) or by tensor_group of 16 (NVFP4); use a copy of \
                                the model in bf16";
                return Err(Error::option(CONFIG_GROUPS, found, expected));
            }
        }
        Ok(())
    }

    /// Refuses what changes the meaning of the tensors: sparse storage, and rotations that are multiplied while the model
    /// runs. Those of weights are already in the file.
    fn check_transforms(&self) -> Result<()> {
        let refused = |option: &'static str, found: &Value, expected: &str| {
            let expected = format!("{expected}; use a copy of the model in bf16");
            Err(Error::option(option, found, expected))
        };
        let format = self.other.get("sparsity_config");
        let format = format.and_then(|sparsity| sparsity.get("format"));
        if let Some(format) = format.filter(|format| !format.is_null() && *format != "dense") {
            return refused(
                "quantization_config.sparsity_config.format",
                format,
                "\"dense\"",
            );
        }
        let schemes = self.other.get("transform_config");
        let schemes = schemes.and_then(|transforms| transforms.get("config_groups")?.as_object());
        let applied = schemes.into_iter().flat_map(Map::values);
        let applied = applied.filter_map(|scheme| scheme.get("apply")?.as_array());
        for location in applied.flatten().filter_map(|apply| apply.get("location")) {
            if !["weight_input", "weight_output"]
                .iter()
                .any(|offline| location == offline)
            {
                let option = "quantization_config.transform_config.config_groups.*.apply.location";
                return refused(option, location, "weight_input or weight_output");
            }
        }
        Ok(())
    }

    /// Returns the configuration of the weights as they are written: activations are quantized by the token as they are
    /// computed, outputs and caches are not, a weight has a scale for each row where it had one for all of them, and the
    /// formats are those of [`write`](Self::write).
    pub(in crate::format) fn for_writing(mut self) -> Self {
        let mut formats: Vec<&'static str> = Vec::new();
        for group in self.config_groups.values_mut() {
            let Some(group) = group.as_object_mut() else {
                continue;
            };
            if let Some(Value::Object(input)) = group.get_mut("input_activations")
                && input.get("dynamic") != Some(&Value::Bool(true))
            {
                input.insert("dynamic".to_owned(), true.into());
                input.insert("strategy".to_owned(), "token".into());
                // Activations are symmetric here.
                input.insert("symmetric".to_owned(), true.into());
            }
            if group.contains_key("output_activations") {
                group.insert("output_activations".to_owned(), Value::Null);
            }
            let parsed = serde_json::from_value(Value::Object(group.clone()));
            let Ok(ConfigGroup {
                weights: Some(args),
                input_activations,
                ..
            }) = parsed
            else {
                continue;
            };
            if args.strategy() == Some(Strategy::Tensor)
                && let Some(Value::Object(weights)) = group.get_mut("weights")
            {
                weights.insert("strategy".to_owned(), "channel".into());
            }
            let scheme = scheme_of(&args, input_activations.is_some());
            if let Some(format) = scheme.and_then(format_of) {
                group.insert("format".to_owned(), format.into());
                formats.push(format);
            }
        }
        formats.dedup();
        match formats[..] {
            [] => {}
            [format] => self.format = Some(format.to_owned()),
            _ => self.format = Some("mixed-precision".to_owned()),
        }
        if self.other.contains_key("kv_cache_scheme") {
            self.other.insert("kv_cache_scheme".to_owned(), Value::Null);
        }
        self
    }

    /// Returns the group of a module: one that names it, otherwise one that takes any `Linear`, otherwise one of
    /// another class of modules.
    pub(super) fn group_of(&self, module: &str) -> Result<Option<ConfigGroup>> {
        let groups = self.groups()?;
        for group in &groups {
            if any(&group.targets, module, names_module)? {
                return Ok(Some(group.clone()));
            }
        }
        // Every module here is linear. The names of its other classes are not known, but classes of Python begin with a
        // capital, which `lm_head` and `re:…` do not.
        let linear = |target: &String| target == "Linear";
        let class = |target: &String| {
            target.starts_with(|first: char| first.is_ascii_uppercase()) && target != "Embedding"
        };
        let with = |of: &dyn Fn(&String) -> bool| {
            groups
                .iter()
                .find(|group| group.targets.iter().any(of))
                .cloned()
        };
        Ok(with(&linear).or_else(|| with(&class)))
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

/// Returns the format in which weights of this scheme are written, if compressed-tensors has it.
fn format_of(scheme: Scheme) -> Option<&'static str> {
    Some(match scheme {
        Scheme::Int8Dynamic => "int-quantized",
        Scheme::Int8WeightOnly | Scheme::Grouped(_) => "pack-quantized",
        Scheme::Fp8 | Scheme::Fp8Blocks => "float-quantized",
        Scheme::Mxfp4 => "mxfp4-pack-quantized",
        Scheme::Nvfp4 => "nvfp4-pack-quantized",
        _ => return None,
    })
}
