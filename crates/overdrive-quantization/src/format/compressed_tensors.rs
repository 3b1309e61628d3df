//! The layouts of compressed-tensors (vLLM, LLM Compressor): `int-quantized`, `pack-quantized`,
//! `float-quantized`.
//!
//! `int-quantized`: `weight` (i8), `weight_scale` `(O, 1)`. `pack-quantized`: `weight_packed` (codes
//! counted from 0, the first in the low bits of an i32), `weight_scale` `(O, G)`, `weight_zero_point`
//! (packed along the outputs), `weight_shape`. `float-quantized`: `weight` (e4m3), `weight_scale`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::module::{FLOATS, Module};
use super::patterns::{any, names_module};
use super::words::{Groups, code, order_of, words};
use crate::parts::code_bytes;
use crate::tensors::{bytes, elements};
use crate::weight::Storage;
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

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

/// Modules that are quantized alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigGroup {
    /// Names, regular expressions after `re:`, and classes: `Linear` is any.
    pub targets: Vec<String>,
    /// How weights are quantized.
    #[serde(default)]
    pub weights: Option<QuantizationArgs>,
    /// How activations are.
    #[serde(default)]
    pub input_activations: Option<QuantizationArgs>,
    /// How results are.
    #[serde(default)]
    pub output_activations: Option<QuantizationArgs>,
    /// The layout of this group.
    #[serde(default)]
    pub format: Option<String>,
    /// What else is in the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// How numbers are quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizationArgs {
    /// Bits of a code; default 8.
    #[serde(default = "eight")]
    pub num_bits: u8,
    /// `int` (the default) or `float`.
    #[serde(default = "int", rename = "type")]
    pub kind: String,
    /// Whether codes are about zero; default true.
    #[serde(default = "yes")]
    pub symmetric: bool,
    /// Inputs of a group; -1 for one group a row.
    #[serde(default)]
    pub group_size: Option<i64>,
    /// What shares a scale: `tensor`, `channel`, `group`, `block` or `token`.
    #[serde(default)]
    pub strategy: Option<String>,
    /// `true` where scales are found as numbers come.
    #[serde(default)]
    pub dynamic: Value,
    /// What else is in the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn eight() -> u8 {
    8
}

fn int() -> String {
    "int".to_owned()
}

fn yes() -> bool {
    true
}

/// What shares a scale, of those that are read.
#[derive(Clone, Copy, PartialEq)]
enum Strategy {
    Tensor,
    Channel,
    Group(i64),
}

impl QuantizationArgs {
    fn of(num_bits: u8, kind: &str, symmetric: bool, strategy: &str, group: Option<i64>) -> Self {
        let dynamic = strategy == "token";
        QuantizationArgs {
            num_bits,
            kind: kind.to_owned(),
            symmetric,
            group_size: group,
            strategy: Some(strategy.to_owned()),
            dynamic: Value::Bool(dynamic),
            other: Map::new(),
        }
    }

    fn strategy(&self) -> Option<Strategy> {
        match (self.strategy.as_deref(), self.group_size) {
            (Some("tensor") | None, None) => Some(Strategy::Tensor),
            (Some("channel"), _) | (None, Some(-1)) => Some(Strategy::Channel),
            (Some("group") | None, Some(size)) if size > 0 => Some(Strategy::Group(size)),
            _ => None,
        }
    }
}

impl CompressedTensorsConfig {
    pub(super) const PARTS: &'static [&'static str] = &[
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ];

    /// For files with weights of this scheme.
    pub(super) fn of(scheme: Scheme, not_quantized: Vec<String>) -> Option<Self> {
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

    pub(super) fn validate(&self) -> Result<()> {
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
    fn group_of(&self, module: &str) -> Result<Option<ConfigGroup>> {
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

    pub(super) fn scheme(&self, module: Option<&str>) -> Result<Option<Scheme>> {
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

    pub(super) fn is_ignored(&self, module: &str) -> Result<bool> {
        any(
            self.ignore.as_deref().unwrap_or_default(),
            module,
            names_module,
        )
    }

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        if module.optional("weight_packed")?.is_some() {
            return Ok(true);
        }
        let weight = module.optional("weight")?;
        let codes = |kind| matches!(kind, Kind::Int8 | Kind::Float8e4m3fn);
        Ok(weight.and_then(|weight| weight.kind()).is_some_and(codes))
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let group = self.group_of(module.name)?;
        let dynamic = group
            .as_ref()
            .is_some_and(|group| group.input_activations.is_some());
        let Some(args) = group.and_then(|group| group.weights) else {
            return Err(module.bad("no group of `config_groups` says how it is quantized"));
        };
        let Some(strategy) = args.strategy() else {
            return Err(module.bad(format!(
                "scales by {} cannot be read; by tensor, channel or group they can",
                args.strategy.as_deref().unwrap_or("nothing")
            )));
        };
        if module.optional("weight_packed")?.is_some() {
            return self.read_packed(module, &args, strategy, dynamic);
        }
        let stored = module.required("weight")?;
        match stored.kind() {
            Some(Kind::Int8) => self.read_ints(module, &args, strategy, dynamic),
            Some(Kind::Float8e4m3fn) => {
                let codes = module.tensor("weight", &[Kind::Float8e4m3fn], &[None, None])?;
                let scales = row_scales(module, strategy, codes.size()[0])?;
                module.built(QuantizedWeight::from_fp8(codes, scales))
            }
            _ => Err(module.bad(format!(
                "its elements are {}: the weight is not quantized",
                stored.format()
            ))),
        }
    }

    fn read_packed(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let per_word = 32 / usize::from(bits);
        let shape = module.tensor("weight_shape", &[Kind::Int64, Kind::Int], &[Some(2)])?;
        let shape: Vec<i64> = Vec::try_from(shape.f_to_kind(Kind::Int64)?)?;
        let [rows, columns] = [shape[0], shape[1]];
        let stored = module.required("weight_packed")?;
        module.check(&stored, "weight_packed", &[Kind::Int], &[None, None])?;
        // Positive, and a mapped file has as many bytes.
        let [outputs, width] = [0, 1].map(|axis| stored.shape()[axis].unsigned_abs() as usize);
        let inputs = usize::try_from(columns).unwrap_or_default();
        if rows != outputs as i64 || inputs == 0 || inputs.div_ceil(per_word) != width {
            return Err(module.bad(format!(
                "`weight_shape` is [{rows}, {columns}], which {outputs} rows of {width} words do not hold"
            )));
        }
        let mut codes = Vec::with_capacity(outputs * inputs);
        for (at, word) in words(&stored).enumerate() {
            let first = at % width * per_word;
            let count = per_word.min(inputs - first);
            codes.extend((0..count).map(|place| code(word, bits, place)));
        }
        self.build(module, args, strategy, dynamic, [outputs, inputs], codes)
    }

    fn read_ints(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let codes = module.tensor("weight", &[Kind::Int8], &[None, None])?;
        let [outputs, inputs] = [0, 1].map(|axis| codes.size()[axis].unsigned_abs() as usize);
        let middle = 1u8 << (bits - 1);
        let codes: Vec<u8> = bytes(&codes)?
            .iter()
            .map(|c| c.wrapping_add(middle))
            .collect();
        if let Some(code) = codes.iter().find(|&&code| bits == 4 && code > 15) {
            let code = i16::from(*code) - 8;
            return Err(module.bad(format!("it has the code {code}, which 4 bits do not hold")));
        }
        self.build(module, args, strategy, dynamic, [outputs, inputs], codes)
    }

    /// `codes` are counted from 0, one a byte.
    fn build(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
        [outputs, inputs]: [usize; 2],
        codes: Vec<u8>,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let by_row = !matches!(strategy, Strategy::Group(_));
        if bits == 8 && args.symmetric && by_row {
            let scales = row_scales(module, strategy, outputs as i64)?;
            let signed: Vec<u8> = codes.iter().map(|code| code ^ 0x80).collect();
            let shape = [outputs, inputs].map(|n| n as i64);
            let codes = Tensor::f_from_data_size(&signed, &shape, Kind::Int8)?;
            let scheme = if dynamic {
                Scheme::Int8Dynamic
            } else {
                Scheme::Int8WeightOnly
            };
            return module.built(QuantizedWeight::from_int8(scheme, codes, scales));
        }
        let (groups, scales) = match strategy {
            Strategy::Group(size) => {
                let size = usize::try_from(size).unwrap_or(1);
                let groups = inputs.div_ceil(size);
                let shape = [Some(outputs as i64), Some(groups as i64)];
                (groups, module.scales("weight_scale", &shape)?)
            }
            _ => {
                let scales = row_scales(module, strategy, outputs as i64)?;
                (1, scales.f_unsqueeze(1)?)
            }
        };
        let order = match module.optional("weight_g_idx")? {
            Some(_) => order_of(module, "weight_g_idx", inputs, groups)?,
            None => None,
        };
        let zeros = match args.symmetric {
            true => None,
            false => Some(zeros(module, bits, strategy, [outputs, groups])?),
        };
        let codes = match &order {
            None => codes,
            Some(order) => {
                let rows = codes.chunks_exact(inputs);
                let of_row = |row| {
                    order.iter().map(move |&input: &i32| {
                        let row: &[u8] = row;
                        row[input.unsigned_abs() as usize]
                    })
                };
                rows.flat_map(of_row).collect()
            }
        };
        Groups {
            bits,
            outputs,
            inputs,
            codes,
            scales,
            zeros,
            order,
        }
        .build(module)
    }

    /// The file's tensors of a weight.
    pub(super) fn write(
        &self,
        weight: &QuantizedWeight,
        module: &str,
    ) -> Result<Vec<(String, Tensor)>> {
        let named = |part: &str, tensor: Tensor| (format!("{module}.{part}"), tensor);
        let shape = || Tensor::f_from_slice(&weight.size());
        match &weight.storage {
            Storage::Int8 { codes, scales } => {
                let scale = named("weight_scale", scales.f_unsqueeze(1)?);
                if weight.scheme != Scheme::Int8WeightOnly {
                    return Ok(vec![named("weight", codes.shallow_clone()), scale]);
                }
                let packed = packed(&code_bytes(codes)?, weight.inputs, 8, 0x80)?;
                Ok(vec![
                    named("weight_packed", packed),
                    scale,
                    named("weight_shape", shape()?),
                ])
            }
            Storage::Fp8 { codes, scales } => Ok(vec![
                named("weight", codes.f_view_dtype(Kind::Float8e4m3fn)?),
                named("weight_scale", scales.f_unsqueeze(1)?),
            ]),
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order: None,
            } => {
                let Scheme::Grouped(options) = weight.scheme else {
                    return Err(cannot(weight));
                };
                let flip = match (options.bits, codes.kind()) {
                    (8, Kind::Int8) => 0x80,
                    _ => 0,
                };
                let width = codes.size()[1];
                let mut tensors = vec![
                    named(
                        "weight_packed",
                        packed(&code_bytes(codes)?, width, options.bits, flip)?,
                    ),
                    named("weight_scale", scales.shallow_clone()),
                    named("weight_shape", shape()?),
                ];
                if let Some(offsets) = offsets {
                    // Signed codes count from -128.
                    let first = if flip == 0 { 0.0 } else { 128.0 };
                    let zeros = packed_zeros(weight, module, options, scales, offsets, first)?;
                    tensors.push(named("weight_zero_point", zeros));
                }
                Ok(tensors)
            }
            _ => Err(cannot(weight)),
        }
    }
}

/// The scheme of weights; `dynamic`: activations are quantized too.
fn scheme_of(args: &QuantizationArgs, dynamic: bool) -> Option<Scheme> {
    let strategy = args.strategy()?;
    match (args.kind.as_str(), args.num_bits, strategy) {
        ("float", 8, Strategy::Tensor | Strategy::Channel) => Some(Scheme::Fp8),
        ("int", 8, Strategy::Tensor | Strategy::Channel) if args.symmetric => Some(match dynamic {
            true => Scheme::Int8Dynamic,
            false => Scheme::Int8WeightOnly,
        }),
        ("int", 4 | 8, _) => Some(Scheme::Grouped(GroupOptions {
            bits: args.num_bits,
            group_size: match strategy {
                Strategy::Group(size) => usize::try_from(size).ok()?,
                _ => GroupOptions::default().group_size,
            },
            symmetric: args.symmetric,
        })),
        _ => None,
    }
}

fn bits_of(module: Module<'_>, args: &QuantizationArgs) -> Result<u8> {
    match (args.kind.as_str(), args.num_bits) {
        ("int", bits @ (4 | 8)) => Ok(bits),
        (kind, bits) => Err(module.bad(format!(
            "{bits} bits of {kind} cannot be read; 4 and 8 of int can"
        ))),
    }
}

/// f32 `(outputs,)`, from one a row or one in all.
fn row_scales(module: Module<'_>, strategy: Strategy, outputs: i64) -> Result<Tensor> {
    let stored = module.required("weight_scale")?;
    let count = if strategy == Strategy::Tensor {
        1
    } else {
        outputs
    };
    let fits = match *stored.shape() {
        [] => count == 1,
        [n] => n == count,
        [n, 1] => n == count,
        _ => false,
    };
    if !fits {
        return Err(module.bad(format!(
            "`weight_scale` is {:?}, where [{count}, 1] was expected",
            stored.shape()
        )));
    }
    let shape: Vec<Option<i64>> = stored.shape().iter().map(|&n| Some(n)).collect();
    module.check(&stored, "weight_scale", FLOATS, &shape)?;
    let scales = module.scales_f32("weight_scale", &shape)?.f_reshape([-1])?;
    Ok(scales.f_expand([outputs], false)?.f_contiguous()?)
}

/// Counted from 0, `(outputs, groups)`.
fn zeros(
    module: Module<'_>,
    bits: u8,
    strategy: Strategy,
    [outputs, groups]: [usize; 2],
) -> Result<Vec<u8>> {
    let part = "weight_zero_point";
    let stored = module.required(part)?;
    let middle = 1u8 << (bits - 1);
    if stored.kind() == Some(Kind::Int) {
        let per_word = 32 / usize::from(bits);
        let rows = outputs.div_ceil(per_word);
        let shape = [Some(rows as i64), Some(groups as i64)];
        module.check(&stored, part, &[Kind::Int], &shape)?;
        let mut zeros = vec![0; outputs * groups];
        for (at, word) in words(&stored).enumerate() {
            let (row, group) = (at / groups, at % groups);
            for place in 0..per_word.min(outputs - row * per_word) {
                zeros[(row * per_word + place) * groups + group] = code(word, bits, place);
            }
        }
        return Ok(zeros);
    }
    // Not packed, and signed.
    let shape: Vec<Option<i64>> = match (strategy, stored.shape().len()) {
        (Strategy::Tensor, n) => vec![Some(1); n],
        _ => vec![Some(outputs as i64), Some(groups as i64)],
    };
    let tensor = module.tensor(part, &[Kind::Int8], &shape)?;
    let tensor = tensor
        .f_reshape([-1, groups as i64])?
        .f_expand([outputs as i64, -1], false)?;
    let tensor = tensor.f_contiguous()?;
    let zeros: Vec<u8> = bytes(&tensor)?
        .iter()
        .map(|zero| zero.wrapping_add(middle))
        .collect();
    match zeros.iter().find(|&&zero| bits == 4 && zero > 15) {
        Some(zero) => Err(module.bad(format!("its zero point {zero} is none of 4 bits"))),
        None => Ok(zeros),
    }
}

/// Rows of `width` bytes, each xor `flip`, as words; a row's last word is filled up with 0.
fn packed(codes: &[u8], width: i64, bits: u8, flip: u8) -> Result<Tensor> {
    // `width` is a dimension of the codes.
    let width = match bits {
        _ if width > 0 => width.unsigned_abs() as usize,
        _ => 1,
    };
    let words = width.div_ceil(4);
    let mut rows = vec![0u8; codes.len() / width * words * 4];
    for (row, codes) in rows
        .chunks_exact_mut(words * 4)
        .zip(codes.chunks_exact(width))
    {
        for (to, code) in row.iter_mut().zip(codes) {
            *to = code ^ flip;
        }
    }
    words_tensor(&rows, &[(codes.len() / width) as i64, words as i64])
}

fn words_tensor(bytes: &[u8], shape: &[i64]) -> Result<Tensor> {
    let (chunks, _) = bytes.as_chunks::<4>();
    let words: Vec<i32> = chunks
        .iter()
        .map(|bytes| i32::from_le_bytes(*bytes))
        .collect();
    Ok(Tensor::f_from_slice(&words)?.f_view(shape)?)
}

/// Zero points packed along the outputs, `(⌈O·bits/32⌉, G)`.
fn packed_zeros(
    weight: &QuantizedWeight,
    module: &str,
    options: GroupOptions,
    scales: &Tensor,
    offsets: &Tensor,
    first: f32,
) -> Result<Tensor> {
    let [scales, offsets] = [scales, offsets].map(|tensor| {
        let tensor = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        tensor.f_contiguous()
    });
    let (scales, offsets) = (scales?, offsets?);
    let groups = scales.size()[1].unsigned_abs() as usize;
    let outputs = weight.outputs.unsigned_abs() as usize;
    let per_word = 32 / usize::from(options.bits);
    let rows = outputs.div_ceil(per_word);
    let mut words = vec![0u32; rows * groups];
    let most = if options.bits == 4 { 15.0 } else { 255.0 };
    let pairs = elements::<f32>(&scales)?
        .iter()
        .zip(elements::<f32>(&offsets)?);
    for (at, (scale, offset)) in pairs.enumerate() {
        let exact = if *scale == 0.0 { 0.0 } else { -offset / scale } + first;
        let zero = exact.round_ties_even();
        // Scale and product are rounded: a zero point comes back within 2⁻²² of itself.
        if !(0.0..=most).contains(&zero) || (exact - zero).abs() > 1e-3 {
            return Err(Error::BadWeight {
                name: format!("{module}.weight"),
                reason: format!(
                    "its group {} has the zero point {exact}, where compressed-tensors has integers \
                     from 0 to {most}; dequantize it and quantize it again",
                    at % groups
                ),
            });
        }
        let (row, group) = (at / groups, at % groups);
        let shift = row % per_word * usize::from(options.bits);
        words[row / per_word * groups + group] |= (zero as u32) << shift;
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    words_tensor(&bytes, &[rows as i64, groups as i64])
}

fn cannot(weight: &QuantizedWeight) -> Error {
    let found = match &weight.storage {
        Storage::Grouped { order: Some(_), .. } => "groups of reordered inputs".to_owned(),
        _ => weight.scheme.to_string(),
    };
    Error::BadOption {
        option: "scheme",
        found,
        expected:
            "8 bits by row, groups in order or fp8, which compressed-tensors has; dequantize the \
                   weight and quantize it again"
                .to_owned(),
    }
}
