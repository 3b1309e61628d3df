use overdrive_nn::{AdapterHost, Embedding, LinearWeight};
use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::{Kind, Tensor};

use crate::causal_lm::CausalLm;
use crate::parameters::ParameterRole;
use crate::{ParameterSpec, Result};

/// Which weights of a model are quantized, and how.
///
/// Norms, biases and tables of positions are always kept.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// Of the linear maps in the blocks.
    pub scheme: Scheme,
    /// Of the head; default `None`: it is kept as it is. A tied head takes the embedding with it: one
    /// quantized table, of which rows are dequantized when they are looked up.
    pub head: Option<Scheme>,
    /// Maps that are kept as they are: those whose name is one of these or ends with `.` and one of
    /// these. What transformers calls `llm_int8_skip_modules`.
    pub skip_modules: Vec<String>,
}

impl QuantizeOptions {
    /// All linear maps of the blocks by `scheme`, the head kept.
    pub fn new(scheme: Scheme) -> Self {
        QuantizeOptions {
            scheme,
            head: None,
            skip_modules: Vec::new(),
        }
    }

    /// The head by `scheme` as well, and the embedding where it is tied to it.
    pub fn with_head(mut self, scheme: Scheme) -> Self {
        self.head = Some(scheme);
        self
    }

    /// Keeps the maps `names`.
    pub fn with_skip_modules(mut self, names: &[&str]) -> Self {
        self.skip_modules = names.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// The scheme of a parameter, `None` where it is kept; `tied`: whether the model's head is its
    /// embedding.
    pub(crate) fn scheme_of(&self, spec: &ParameterSpec, tied: bool) -> Option<Scheme> {
        let module = spec.module();
        let skipped = |name: &String| {
            let rest = module.strip_suffix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        if self.skip_modules.iter().any(skipped) {
            return None;
        }
        match spec.role {
            ParameterRole::Linear | ParameterRole::Conv1d => Some(self.scheme),
            ParameterRole::Head => self.head,
            ParameterRole::Embedding if tied => self.head,
            ParameterRole::Embedding | ParameterRole::Other => None,
        }
    }
}

impl CausalLm {
    /// Quantizes the model in place, map by map: each dense weight is freed when its packed form is
    /// there. To load a checkpoint without ever holding it whole, see
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization).
    ///
    /// # Errors
    /// When a weight does not fit the scheme, is not finite or has a graph that needs it.
    pub fn quantize(&mut self, options: &QuantizeOptions) -> Result<()> {
        self.quantize_with(options, &mut |_, weight, scheme| {
            QuantizedWeight::quantize(weight, scheme)
        })
    }

    /// As [`CausalLm::quantize`], with weights that `pack` makes: of the map's name (a tied head's is
    /// `lm_head`), its weight `(O, I)` in fp32 and its scheme. What calibration needs, see
    /// [`quantize_calibrated`](overdrive_quantization::quantize_calibrated).
    ///
    /// # Errors
    /// As [`CausalLm::quantize`], and those of `pack`.
    pub fn quantize_with(
        &mut self,
        options: &QuantizeOptions,
        pack: &mut dyn FnMut(
            &str,
            &Tensor,
            Scheme,
        ) -> overdrive_quantization::Result<QuantizedWeight>,
    ) -> Result<()> {
        let tied = self.config().tie_word_embeddings();
        for spec in self.config().parameters() {
            let Some(scheme) = options.scheme_of(&spec, tied) else {
                continue;
            };
            let Some(dense) = self.take_dense(&spec.name) else {
                continue; // Quantized already.
            };
            let name = match spec.role {
                ParameterRole::Embedding => "lm_head",
                _ => spec.module(),
            };
            let weight = pack(name, &as_rows(&dense, &spec)?, scheme)?;
            drop(dense);
            self.set_quantized(&spec, weight)?;
        }
        Ok(())
    }

    /// Makes every quantized weight dense again, in the kind of the other parameters. Maps keep their
    /// adapters. A head that is tied by the configuration but was quantized apart from the embedding, or
    /// had an adapter merged into it, is a parameter `lm_head.weight` afterwards, and
    /// `tie_word_embeddings` is false.
    ///
    /// # Errors
    /// When memory runs out or a graph needs the weights.
    pub fn dequantize(&mut self) -> Result<()> {
        let kind = self.kind();
        let specs = self.config().parameters();
        let table = specs.iter().find(|spec| self.packs_embedding(spec));
        let packed = self
            .quantized_embedding()
            .map(QuantizedWeight::shallow_clone);
        let (mut dense, mut shared) = (Vec::new(), None);
        self.visit_linears(&mut |name, linear| {
            let LinearWeight::Quantized(weight) = linear.weight() else {
                return Ok(());
            };
            let is_table = packed
                .as_ref()
                .is_some_and(|table| table.shares_storage_with(weight));
            let (weight, transposed) = (weight.dequantize(kind)?, is_conv1d(&specs, name));
            let weight = match transposed {
                true => weight.f_tr()?.f_contiguous()?,
                false => weight,
            };
            match is_table {
                true => shared = Some(weight.shallow_clone()),
                false => dense.push((name.to_owned(), weight.shallow_clone())),
            }
            let _quantized = linear.replace_weight(LinearWeight::Dense { weight, transposed });
            Ok(())
        })?;
        if let (Some(spec), Some(packed)) = (table, packed) {
            let weight = match shared {
                Some(weight) => weight,
                None => packed.dequantize(kind)?,
            };
            *self.embedding_mut() = Embedding::dense(weight.shallow_clone());
            self.put_dense(&spec.name, weight);
        }
        for (name, weight) in dense {
            if name == "lm_head" {
                // Of its own: one with the embedding no more, if it ever was.
                self.untie();
            }
            self.put_dense(&format!("{name}.weight"), weight);
        }
        Ok(())
    }

    fn set_quantized(&mut self, spec: &ParameterSpec, weight: QuantizedWeight) -> Result<()> {
        let wanted = match spec.role {
            ParameterRole::Embedding => {
                let kind = self.kind();
                *self.embedding_mut() = Embedding::quantized(weight.shallow_clone(), kind)?;
                "lm_head"
            }
            _ => spec.module(),
        };
        let mut weight = Some(weight);
        self.visit_linears(&mut |name, linear| {
            if name == wanted
                && let Some(weight) = weight.take()
            {
                let _dense = linear.replace_weight(LinearWeight::Quantized(weight));
            }
            Ok(())
        })?;
        Ok(())
    }
}

fn is_conv1d(specs: &[ParameterSpec], module: &str) -> bool {
    let own = specs.iter().find(|spec| spec.module() == module);
    own.is_some_and(|spec| spec.role == ParameterRole::Conv1d)
}

/// The packed form of the dense weight of `spec`, as rows of outputs whatever its own layout.
pub(crate) fn quantized(
    dense: &Tensor,
    spec: &ParameterSpec,
    scheme: Scheme,
) -> Result<QuantizedWeight> {
    Ok(QuantizedWeight::quantize(&as_rows(dense, spec)?, scheme)?)
}

/// The weight of `spec` in fp32 with a row for each output, whatever its own layout.
fn as_rows(dense: &Tensor, spec: &ParameterSpec) -> Result<Tensor> {
    let dense = match spec.role {
        ParameterRole::Conv1d => dense.f_tr()?.f_contiguous()?,
        _ => dense.shallow_clone(),
    };
    Ok(dense.f_to_kind(Kind::Float)?)
}
