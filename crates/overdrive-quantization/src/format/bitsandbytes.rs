//! The layouts of bitsandbytes, as transformers writes and reads them.
//!
//! 4 bits: `weight` (u8, two weights a byte, `(n/2, 1)`), `weight.absmax`, `weight.quant_map`,
//! `weight.quant_state.bitsandbytes__nf4` (JSON in u8) and, with double quantization,
//! `weight.nested_absmax` and `weight.nested_quant_map`. 8 bits: `weight` (i8), `SCB` (the largest
//! magnitude of each row) and `weight_format`.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::source::{FLOATS, Module};
use crate::codec::code_book::Book;
use crate::codec::dynamic;
use crate::weight::{Magnitudes, Storage};
use crate::{BlockOptions, Error, QuantizedWeight, Result, Scheme};
use overdrive_kernels::tensors::elements;

/// The `quantization_config` of a model that bitsandbytes quantized, with the keys of transformers'
/// `BitsAndBytesConfig`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BitsAndBytesConfig {
    /// If `true`, weights have 4 bits.
    pub load_in_4bit: bool,
    /// If `true`, weights have 8 bits.
    pub load_in_8bit: bool,
    /// The code book of 4 bits: `nf4` or `fp4` (the default).
    pub bnb_4bit_quant_type: String,
    /// If `true`, the magnitudes of the blocks are quantized as well.
    pub bnb_4bit_use_double_quant: bool,
    /// The dtype of the matmul: `float32` (the default), `bfloat16` or `float16`.
    pub bnb_4bit_compute_dtype: Option<String>,
    /// The dtype of the tensor that holds the codes; default `uint8`.
    pub bnb_4bit_quant_storage: Option<String>,
    /// The magnitude beyond which activations are multiplied in full precision; default 6. 0 and infinity: none are;
    /// JSON has no infinity, so that 0 is written.
    #[serde(serialize_with = "finite_or_zero")]
    pub llm_int8_threshold: f64,
    /// The modules that are not quantized; `None`: the output head, and what is tied to the embedding.
    pub llm_int8_skip_modules: Option<Vec<String>>,
    /// A setting for models that are split between GPU and host; it has no effect here.
    pub llm_int8_enable_fp32_cpu_offload: bool,
    /// A setting to keep 16-bit weights as well; it has no effect here.
    pub llm_int8_has_fp16_weight: bool,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for BitsAndBytesConfig {
    fn default() -> Self {
        BitsAndBytesConfig {
            load_in_4bit: false,
            load_in_8bit: false,
            bnb_4bit_quant_type: "fp4".to_owned(),
            bnb_4bit_use_double_quant: false,
            bnb_4bit_compute_dtype: None,
            bnb_4bit_quant_storage: None,
            llm_int8_threshold: 6.0,
            llm_int8_skip_modules: None,
            llm_int8_enable_fp32_cpu_offload: false,
            llm_int8_has_fp16_weight: false,
            other: Map::new(),
        }
    }
}

fn finite_or_zero<S: Serializer>(
    threshold: &f64,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(if threshold.is_finite() {
        *threshold
    } else {
        0.0
    })
}

/// The JSON of bitsandbytes' `QuantState.as_dict(packed=True)`.
#[derive(Debug, Serialize, Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_blocksize: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_dtype: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_offset: Option<f64>,
}

/// The largest size of a state in bytes. A valid one has a few hundred.
const MAX_STATE_BYTES: usize = 1 << 16;

impl BitsAndBytesConfig {
    pub(super) const PARTS: &'static [&'static str] = &[
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4",
        "weight.quant_state.bitsandbytes__fp4",
        "SCB",
        "weight_format",
    ];

    /// Returns the configuration of files with weights of this scheme, if bitsandbytes has it.
    pub(super) fn of(scheme: Scheme, not_quantized: Vec<String>) -> Option<Self> {
        let mut config = BitsAndBytesConfig {
            llm_int8_skip_modules: Some(not_quantized),
            ..BitsAndBytesConfig::default()
        };
        match scheme {
            Scheme::LlmInt8 { threshold } => {
                config.load_in_8bit = true;
                config.llm_int8_threshold = threshold;
            }
            other => {
                let (book, options) = other.blocks().ok()?;
                config.load_in_4bit = true;
                config.bnb_4bit_quant_type = book.name().to_owned();
                config.bnb_4bit_use_double_quant = options.double_quant;
                // The exact choice; a program that loads the folder may choose another.
                config.bnb_4bit_compute_dtype = Some("float32".to_owned());
                config.bnb_4bit_quant_storage = Some("uint8".to_owned());
            }
        }
        Some(config)
    }

    pub(super) fn validate(&self) -> Result<()> {
        let (four, eight) = (self.load_in_4bit, self.load_in_8bit);
        let found = format!("{four} and load_in_8bit is {eight}");
        let expected = "true, or false with load_in_8bit true";
        check_option(four != eight, "load_in_4bit", found, expected)?;
        let book = self.bnb_4bit_quant_type.as_str();
        let valid = matches!(book, "nf4" | "fp4");
        check_option(valid, "bnb_4bit_quant_type", book, "nf4 or fp4")?;
        self.scheme().validate(0)
    }

    /// Returns the scheme of the weights; each weight in a file also has its own description.
    pub(super) fn scheme(&self) -> Scheme {
        let options = BlockOptions {
            double_quant: self.bnb_4bit_use_double_quant,
            ..BlockOptions::default()
        };
        match (self.load_in_4bit, self.bnb_4bit_quant_type.as_str()) {
            (true, "nf4") => Scheme::Nf4(options),
            (true, _) => Scheme::Fp4(options),
            (false, _) => Scheme::LlmInt8 {
                threshold: self.llm_int8_threshold,
            },
        }
    }

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        for book in [Book::Nf4, Book::Fp4] {
            if module.optional(&state_part(book))?.is_some() {
                return Ok(true);
            }
        }
        Ok(module.optional("SCB")?.is_some())
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        for book in [Book::Nf4, Book::Fp4] {
            if let Some(state) = module.optional(&state_part(book))? {
                return read_blocks(module, book, state.data());
            }
        }
        if module.optional("SCB")?.is_none() {
            return Err(module.bad(format!(
                "the file has neither `{0}.{1}` nor `{0}.SCB`: bitsandbytes did not quantize this \
                 weight",
                module.name,
                state_part(Book::Nf4)
            )));
        }
        // `SCB` has the largest magnitude of a row, 127 scales.
        let codes = module.tensor("weight", &[Kind::Int8], &[None, None])?;
        let largest = module.scales_f32("SCB", &[Some(codes.size()[0])])?;
        let scales = largest.f_div(&Tensor::from(127f32))?;
        let threshold = self.llm_int8_threshold;
        module.built(QuantizedWeight::from_int8(
            Scheme::LlmInt8 { threshold },
            codes,
            scales,
        ))
    }

    /// Returns the tensors that a file has for a weight; `kind` is the dtype it was quantized from.
    pub(super) fn write(
        &self,
        weight: &QuantizedWeight,
        module: &str,
        kind: Kind,
    ) -> Result<Vec<(String, Tensor)>> {
        let named = |part: &str, tensor: Tensor| (format!("{module}.{part}"), tensor);
        match &weight.storage {
            Storage::Int8 { codes, scales } => {
                let largest = scales.f_mul(&Tensor::from(127f32).f_to_device(scales.device())?)?;
                // 0 is the row-major layout.
                let format = Tensor::f_from_slice(&[0u8])?.f_view([] as [i64; 0])?;
                Ok(vec![
                    named("weight", codes.shallow_clone()),
                    named("SCB", largest),
                    named("weight_format", format),
                ])
            }
            Storage::Blocks { codes, magnitudes } => {
                let (book, options) = weight.scheme.blocks()?;
                let mut state = QuantState {
                    quant_type: book.name().to_owned(),
                    blocksize: options.block_size,
                    dtype: kind_name(kind).to_owned(),
                    shape: weight.size().to_vec(),
                    nested_blocksize: None,
                    nested_dtype: None,
                    nested_offset: None,
                };
                let map = Tensor::f_from_slice(book.numbers())?;
                let mut tensors = vec![
                    named("weight", codes.f_view([-1, 1])?),
                    named("weight.quant_map", map),
                ];
                match magnitudes {
                    Magnitudes::Full(full) => {
                        tensors.push(named("weight.absmax", full.shallow_clone()));
                    }
                    Magnitudes::Quantized {
                        codes,
                        code_book,
                        scales,
                        offset,
                    } => {
                        state.nested_blocksize = Some(dynamic::BLOCK);
                        state.nested_dtype = Some("float32".to_owned());
                        state.nested_offset = Some(f64::from(*offset));
                        tensors.push(named("weight.absmax", codes.shallow_clone()));
                        tensors.push(named("weight.nested_absmax", scales.shallow_clone()));
                        tensors.push(named("weight.nested_quant_map", code_book.shallow_clone()));
                    }
                }
                let state = serde_json::to_vec(&state).map_err(|error| Error::BadWeight {
                    name: format!("{module}.weight"),
                    reason: error.to_string(),
                })?;
                tensors.push(named(&state_part(book), Tensor::f_from_slice(&state)?));
                Ok(tensors)
            }
            _ => {
                let expected = "nf4, fp4 or llm-int8, the schemes of bitsandbytes";
                Err(Error::option("scheme", weight.scheme, expected))
            }
        }
    }
}

fn state_part(book: Book) -> String {
    format!("weight.quant_state.bitsandbytes__{}", book.name())
}

/// Returns torch's name of a dtype.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        _ => "float32",
    }
}

fn read_blocks(module: Module<'_>, book: Book, state: &[u8]) -> Result<QuantizedWeight> {
    if state.len() > MAX_STATE_BYTES {
        let found = state.len();
        return Err(module.bad(format!(
            "its state has {found} bytes; a valid one has a few hundred"
        )));
    }
    let state: QuantState = serde_json::from_slice(state)
        .map_err(|error| module.bad(format!("its state is not bitsandbytes' JSON: {error}")))?;
    if state.quant_type != book.name() {
        return Err(module.bad(format!(
            "its state is called {}, but describes {}",
            book.name(),
            state.quant_type
        )));
    }
    let [outputs, inputs] = state.shape[..] else {
        return Err(module.bad(format!("its shape is {:?}; it must be (O, I)", state.shape)));
    };
    let codes = module.required("weight")?;
    // A tensor of any dtype may hold the bytes (`bnb_4bit_quant_storage`); `from_blocks` compares their
    // number with the shape.
    let codes = Tensor::f_from_slice(codes.data())?;
    let map = module.scales_f32("weight.quant_map", &[Some(16)])?;
    let known = elements::<f32>(&map)?.iter().zip(book.numbers());
    // Written so that NaN differs from every number.
    let differs = |(a, b): &(&f32, &f32)| (*a - *b).is_nan() || (*a - *b).abs() >= 1e-6;
    if let Some((found, expected)) = known.into_iter().find(differs) {
        return Err(module.bad(format!(
            "its code book has {found} where the code book of {} has {expected}",
            book.name()
        )));
    }
    let nested = state.nested_offset.is_some() || state.nested_blocksize.is_some();
    let options = BlockOptions {
        block_size: state.blocksize,
        double_quant: nested,
    };
    let magnitudes = match (nested, state.nested_offset) {
        (false, _) => Magnitudes::Full(
            module
                .tensor("weight.absmax", FLOATS, &[None])?
                .f_to_kind(Kind::Float)?,
        ),
        (true, Some(offset)) if state.nested_blocksize == Some(dynamic::BLOCK) => {
            Magnitudes::Quantized {
                codes: module.tensor("weight.absmax", &[Kind::Uint8], &[None])?,
                code_book: module.scales_f32("weight.nested_quant_map", &[Some(256)])?,
                scales: module.scales_f32("weight.nested_absmax", &[None])?,
                offset: offset as f32,
            }
        }
        _ => {
            return Err(module.bad(format!(
                "its magnitudes are quantized in blocks of {:?} with the offset {:?}; they must be in blocks of \
                 256 with an offset",
                state.nested_blocksize, state.nested_offset
            )));
        }
    };
    let scheme = match book {
        Book::Nf4 => Scheme::Nf4(options),
        Book::Fp4 => Scheme::Fp4(options),
        Book::E2m1 => return Err(module.bad("bitsandbytes has no code book e2m1")),
    };
    module.built(QuantizedWeight::from_blocks(
        scheme,
        [outputs, inputs],
        codes,
        magnitudes,
    ))
}
