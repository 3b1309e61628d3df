use std::path::Path;

use overdrive_fused::{
    CrossEntropyOptions, LinearCrossEntropyOptions, Reduction, linear_cross_entropy,
};
use overdrive_nn::{AdapterHost, AdapterState, Embedding, Linear, LinearWeight};
use overdrive_quantization::QuantizedWeight;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::gpt2::Gpt2;
use crate::init::initialise;
use crate::input::Shape;
use crate::llama::Llama;
use crate::loss::{IGNORE_INDEX, LabelShift, LossOutput, causal_lm_loss, shifted};
use crate::parameters::{ParameterMap, ParameterRole, Parts, allocate};
use crate::{
    Error, Execution, ForwardInput, LoadOptions, ModelConfig, ParameterSpec, Result, SaveOptions,
    checkpoint,
};

/// How a model is made from scratch.
#[derive(Debug, Clone, PartialEq)]
pub struct InitOptions {
    /// Where the parameters are; default: the CPU.
    pub device: Device,
    /// Their kind; default: fp32.
    pub kind: Kind,
    /// The seed of all random parameters; default 0. The same seed gives the same model on every
    /// device, whatever libtorch's global generator has done.
    pub seed: u64,
}

impl Default for InitOptions {
    fn default() -> Self {
        InitOptions {
            device: Device::Cpu,
            kind: Kind::Float,
            seed: 0,
        }
    }
}

/// A decoder with a language-model head.
///
/// Parameters keep the names, shapes and order that they have in transformers. They are shared, not
/// copied, by [`named_parameters`](CausalLm::named_parameters): what an optimizer updates in place is
/// what the model computes with.
#[derive(Debug)]
pub struct CausalLm {
    config: ModelConfig,
    /// The dense ones.
    parameters: Vec<(String, Tensor)>,
    pub(crate) backbone: Backbone,
    /// To `(…, V)`; the embedding itself where the two are tied.
    pub(crate) head: Linear,
    /// Bound of the logits.
    softcap: Option<f64>,
    execution: Execution,
    training: bool,
    /// What adapters keep for the model as a whole.
    pub(crate) adapter_state: AdapterState,
    generation_config: Option<Map<String, Value>>,
}

#[derive(Debug)]
pub(crate) enum Backbone {
    Llama(Box<Llama>),
    Gpt2(Box<Gpt2>),
}

impl CausalLm {
    /// A model with random parameters, drawn as transformers draws them: normal with the
    /// configuration's `initializer_range` (GPT-2's residual projections scaled by depth), norms 1,
    /// biases 0. No parameter requires a gradient yet.
    ///
    /// # Errors
    /// When the configuration is inconsistent, or memory runs out.
    pub fn new(config: &ModelConfig, options: &InitOptions) -> Result<CausalLm> {
        config.validate()?;
        let specs = config.parameters();
        let kinds = vec![options.kind; specs.len()];
        let groups = config.adjacent();
        let parameters = allocate(specs.clone(), &kinds, options.device, &groups)?;
        for ((_, parameter), spec) in parameters.iter().zip(&specs) {
            initialise(parameter, spec, options.seed)?;
        }
        let parts = Parts {
            parameters,
            ..Parts::default()
        };
        CausalLm::from_parts(config, parts)
    }

    /// Reads a Hugging Face folder: `config.json`, `model.safetensors` (or shards with
    /// `model.safetensors.index.json`) and, where there is one, `generation_config.json`.
    ///
    /// Files are memory-mapped, and each tensor goes straight to its place, device and kind: loading
    /// takes the memory of the model, and that of one tensor's copy where the device is not the CPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an architecture or option that this crate does not compute;
    /// [`Error::Checkpoint`] naming every tensor that is missing, unexpected or misshapen;
    /// [`Error::BadWeightFile`] for a damaged file; [`Error::Common`] for a file that cannot be read.
    pub fn from_pretrained(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<CausalLm> {
        let dir = dir.as_ref();
        let config = ModelConfig::from_dir(dir)?;
        let parts = checkpoint::read(dir, &config, options)?;
        let mut model = CausalLm::from_parts(&config, parts)?;
        model.generation_config = checkpoint::read_generation_config(dir)?;
        Ok(model)
    }

    /// Writes a folder that transformers' `from_pretrained` loads: `config.json`,
    /// `model.safetensors` (or shards) and `generation_config.json`. The tokenizer is not known
    /// here; put its `tokenizer.json` beside them.
    ///
    /// Each file is written under a temporary name, flushed to the disk and renamed, the weights
    /// before `config.json`: a reader never sees half a file. The folder as a whole is not atomic:
    /// a crash between two renames over an older checkpoint leaves files of both.
    ///
    /// # Errors
    /// When the folder cannot be written or memory for one tensor's copy runs out.
    pub fn save_pretrained(&self, dir: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        checkpoint::write(dir.as_ref(), self, options)
    }

    pub(crate) fn from_parts(config: &ModelConfig, parts: Parts) -> Result<CausalLm> {
        // A shallow clone is the same tensor: its gradient and its flags are shared.
        let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        let parameters = parts.parameters.iter().map(share).collect();
        let mut parameter_map = ParameterMap::new(parts);
        let (backbone, tied) = match config {
            ModelConfig::Llama(config) => {
                let model = Llama::take(&mut parameter_map, config)?;
                let tied = model.embedding.as_linear_weight();
                (Backbone::Llama(Box::new(model)), tied)
            }
            ModelConfig::Gpt2(config) => {
                let model = Gpt2::take(&mut parameter_map, config)?;
                let tied = model.embedding.as_linear_weight();
                (Backbone::Gpt2(Box::new(model)), tied)
            }
        };
        let head = match parameter_map.take_quantized("lm_head") {
            // A quantized head has a weight of its own even where the dense one is tied.
            Some(quantized) => Linear::quantized(quantized, None)?.with_name("lm_head"),
            None if config.tie_word_embeddings() => Linear::new(tied, None)?.with_name("lm_head"),
            None => parameter_map.take_linear("lm_head", false)?,
        };
        Ok(CausalLm {
            config: config.clone(),
            parameters,
            backbone,
            head,
            softcap: config.logit_softcap(),
            execution: Execution::default(),
            training: false,
            adapter_state: AdapterState::default(),
            generation_config: None,
        })
    }

    /// The logits, `(B, T, V)` or `(B, 1, V)` as [`ForwardInput::logits`] says, in the kind of the
    /// parameters (under autocast in its kind).
    ///
    /// # Errors
    /// When shapes do not fit, the tokens exceed the context, or libtorch fails. Where a cache was
    /// given, the failed step is undone.
    pub fn forward(&self, input: ForwardInput<'_>) -> Result<Tensor> {
        let hidden = self.hidden_states(input)?;
        self.logits(&hidden)
    }

    /// The normalised hidden states `(B, T, C)` before the head: embeddings of text, or the input of
    /// a loss that does not want all logits at once.
    ///
    /// # Errors
    /// As [`CausalLm::forward`].
    pub fn hidden_states(&self, mut input: ForwardInput<'_>) -> Result<Tensor> {
        let shape = input.shape()?;
        if let Some(positions) = input.restarting_positions()? {
            // Sequences and a cache are never there at once.
            return self.hidden_states(ForwardInput {
                position_ids: Some(&positions),
                cache: None,
                ..input
            });
        }
        self.check_context(&input, shape)?;
        let hidden = match &self.backbone {
            Backbone::Llama(model) => {
                model.forward(&mut input, shape, &self.execution, self.training)
            }
            Backbone::Gpt2(model) => {
                model.forward(&mut input, shape, &self.execution, self.training)
            }
        };
        if hidden.is_err()
            && let Some(cache) = input.cache
        {
            // Layers before the failure have taken the new tokens; the first error is the one to tell.
            let _ = cache.truncate(shape.past.min(cache.len()));
        }
        hidden
    }

    /// The head: hidden states `(…, C)` to logits `(…, V)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self
            .head
            .forward_with(hidden, self.execution.fused_kernels)?;
        match self.softcap {
            None => Ok(logits),
            Some(cap) => bounded(logits, cap),
        }
    }

    /// The summed cross-entropy of `input_ids (B, T)` against `labels (B, T)`, both i64, and the
    /// number of tokens it counts; labels of [`IGNORE_INDEX`](crate::IGNORE_INDEX) do not count.
    ///
    /// With [`Execution::fused_kernels`] the logits are made, and turned into gradients, a part at a
    /// time, and never held as a whole, except those of a model that bounds them (Gemma 2).
    ///
    /// A sum and a count, so that gradient accumulation can weight micro-batches by their tokens;
    /// [`LossOutput::mean`] is transformers' loss.
    ///
    /// # Errors
    /// As [`CausalLm::forward`] and [`causal_lm_loss`].
    pub fn loss(
        &self,
        input_ids: &Tensor,
        labels: &Tensor,
        shift: LabelShift,
    ) -> Result<LossOutput> {
        self.loss_of(ForwardInput::new(input_ids), labels, shift)
    }

    /// The same for tokens with positions, a mask or [sequences](ForwardInput::sequences) of their own.
    /// Under [`LabelShift::HuggingFace`] the first label of each sequence should be
    /// [`IGNORE_INDEX`](crate::IGNORE_INDEX): it would be predicted from the sequence before.
    ///
    /// # Errors
    /// As [`CausalLm::loss`].
    pub fn loss_of(
        &self,
        input: ForwardInput<'_>,
        labels: &Tensor,
        shift: LabelShift,
    ) -> Result<LossOutput> {
        // The fused loss makes logits of its own: of a dense head and without a bound.
        let head = match self.head.dense_weight() {
            Some(head) if self.execution.fused_kernels && self.softcap.is_none() => head,
            _ => return causal_lm_loss(&self.forward(input)?, labels, shift),
        };
        // Checked here: a wrong label should not cost a forward pass.
        let targets = shifted(labels, &input.input_ids.size(), shift)?;
        let options = LinearCrossEntropyOptions {
            loss: CrossEntropyOptions {
                ignore_index: IGNORE_INDEX,
                reduction: Reduction::Sum,
                ..CrossEntropyOptions::default()
            },
            ..LinearCrossEntropyOptions::default()
        };
        let hidden = self.hidden_states(input)?;
        let output = linear_cross_entropy(&hidden, head, &targets, &options)?;
        Ok(LossOutput {
            sum: output.loss,
            tokens: output.tokens,
        })
    }

    /// All dense parameters with their Hugging Face names, in the order of transformers'
    /// `named_parameters`: not quantized weights, and not adapters. A tied head is not listed twice. The
    /// tensors share the model's storage, gradient and flags.
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        self.parameters
            .iter()
            .map(|(name, t)| (name.clone(), t.shallow_clone()))
            .collect()
    }

    /// Takes a dense parameter out of the list.
    pub(crate) fn take_dense(&mut self, name: &str) -> Option<Tensor> {
        let place = self.parameters.iter().position(|(own, _)| own == name)?;
        Some(self.parameters.remove(place).1)
    }

    /// How many numbers the parameters are, quantized ones too and adapters not; a tied head counts
    /// once.
    pub fn num_parameters(&self) -> i64 {
        let specs = self.config.parameters();
        specs.iter().map(ParameterSpec::numel).sum()
    }

    /// Bytes of all parameters, dense and quantized, without adapters; what transformers calls
    /// `get_memory_footprint`. What is tied counts once.
    pub fn memory_footprint(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let mut all: usize = self
            .parameters
            .iter()
            .map(|(_, tensor)| bytes(tensor))
            .sum();
        self.for_each_packed(&mut |_, weight| all += weight.bytes());
        all
    }

    /// Whether any weight is quantized.
    pub fn is_quantized(&self) -> bool {
        let mut any = false;
        self.for_each_packed(&mut |_, _| any = true);
        any
    }

    /// Lends each quantized weight with the name of its module; a table that the head shares once, as the
    /// embedding's.
    pub(crate) fn for_each_packed(&self, see: &mut dyn FnMut(&str, &QuantizedWeight)) {
        let table = self.quantized_embedding();
        if let Some(table) = table {
            let specs = self.config.parameters();
            let embedding = specs.iter().find(|spec| self.packs_embedding(spec));
            see(embedding.map_or("", ParameterSpec::module), table);
        }
        let mut see = |linear: &Linear| {
            if let LinearWeight::Quantized(weight) = linear.weight()
                && !table.is_some_and(|table| table.shares_storage_with(weight))
            {
                see(linear.name(), weight);
            }
        };
        match &self.backbone {
            Backbone::Llama(model) => model.for_each_linear(&mut see),
            Backbone::Gpt2(model) => model.for_each_linear(&mut see),
        }
        see(&self.head);
    }

    /// The table of token embeddings `(V, C)` where it is quantized; `AdapterHost::visit_parameters` shows
    /// a dense one.
    pub fn quantized_embedding(&self) -> Option<&QuantizedWeight> {
        self.embedding().quantized_table()
    }

    /// Whether `spec` is the embedding, and the embedding is quantized.
    pub(crate) fn packs_embedding(&self, spec: &ParameterSpec) -> bool {
        spec.role == ParameterRole::Embedding && self.quantized_embedding().is_some()
    }

    pub(crate) fn embedding(&self) -> &Embedding {
        match &self.backbone {
            Backbone::Llama(model) => &model.embedding,
            Backbone::Gpt2(model) => &model.embedding,
        }
    }

    pub(crate) fn embedding_mut(&mut self) -> &mut Embedding {
        match &mut self.backbone {
            Backbone::Llama(model) => &mut model.embedding,
            Backbone::Gpt2(model) => &mut model.embedding,
        }
    }

    /// Makes the head a parameter of its own to the configuration.
    pub(crate) fn untie(&mut self) {
        match &mut self.config {
            ModelConfig::Llama(config) => config.tie_word_embeddings = false,
            ModelConfig::Gpt2(config) => config.tie_word_embeddings = false,
        }
    }

    /// Puts a dense parameter into the list, at its place.
    pub(crate) fn put_dense(&mut self, name: &str, tensor: Tensor) {
        let specs = self.config.parameters();
        let order = |name: &str| specs.iter().position(|spec| spec.name == name);
        let place = order(name);
        let at = self
            .parameters
            .iter()
            .position(|(other, _)| order(other) > place);
        let at = at.unwrap_or(self.parameters.len());
        self.parameters.insert(at, (name.to_owned(), tensor));
    }

    /// Makes every dense parameter require a gradient, or none.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        for (_, tensor) in &self.parameters {
            // The flag belongs to the tensor that all shallow clones share.
            let _same = tensor.f_set_requires_grad(requires_grad)?;
        }
        Ok(())
    }

    /// Switches training mode, in which the dropouts of the configuration and of adapters apply, on or off. It
    /// is off at first.
    ///
    /// # Errors
    /// [`overdrive_nn::Error::InUse`] while a checkpointed graph holds the blocks.
    pub fn set_training(&mut self, training: bool) -> Result<()> {
        if training != self.training {
            self.visit_linears(&mut |_, linear| {
                linear.set_training(training);
                Ok(())
            })?;
            self.training = training;
        }
        Ok(())
    }

    /// Chooses among equal ways of computing.
    pub fn set_execution(&mut self, execution: Execution) {
        self.execution = execution;
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How many layers a cache for this model has.
    pub fn num_layers(&self) -> usize {
        match &self.backbone {
            Backbone::Llama(model) => model.num_layers(),
            Backbone::Gpt2(model) => model.num_layers(),
        }
    }

    /// How many tokens each layer sees, its own included: its sliding window, or `None` where it sees
    /// all. What a cache need keep.
    pub fn layer_windows(&self) -> Vec<Option<i64>> {
        match &self.backbone {
            Backbone::Llama(model) => model.windows(),
            Backbone::Gpt2(model) => vec![None; model.num_layers()],
        }
    }

    /// The inverse frequencies `(D/2,)` of the rotary positions of `layer`: a key at position `p` was
    /// turned by the angles `p · inv_freq`, channel `i` with channel `i + D/2`, so a cache can turn it
    /// on to another position. `None` where positions are learned (GPT-2) or there is no such layer.
    ///
    /// Of a model with dynamic or LongRoPE scaling these are the frequencies within the original
    /// context.
    pub fn rotary_inverse_frequencies(&self, layer: usize) -> Option<&[f32]> {
        match &self.backbone {
            Backbone::Llama(model) => model.inverse_frequencies(layer),
            Backbone::Gpt2(_) => None,
        }
    }

    /// Where the parameters are.
    pub fn device(&self) -> Device {
        self.embedding().device()
    }

    /// The kind of the dense parameters.
    pub fn kind(&self) -> Kind {
        self.embedding().kind()
    }

    /// What `generation_config.json` held, or `None` where there was none.
    pub fn generation_config(&self) -> Option<&Map<String, Value>> {
        self.generation_config.as_ref()
    }

    fn check_context(&self, input: &ForwardInput<'_>, shape: Shape) -> Result<()> {
        let (limit, key) = self.config.context();
        if let Some(cache) = &input.cache
            && cache.layers() != self.num_layers()
        {
            return Err(Error::CacheLayers {
                cache: cache.layers(),
                model: self.num_layers(),
            });
        }
        let positions = match input.position_ids {
            None => shape.past + shape.tokens,
            Some(ids) if i64::try_from(ids.f_min()?)? < 0 => {
                let expected = format!("in 0..{limit}");
                return Err(
                    overdrive_core::Error::option("position_ids", "negative", expected).into(),
                );
            }
            // Padding takes places and no positions.
            Some(ids) => i64::try_from(ids.f_max()?)? + 1,
        };
        let rotary = matches!(self.backbone, Backbone::Llama(_));
        let span = input.cache.as_ref().and_then(|cache| cache.span());
        if rotary && span.is_some_and(|span| span <= limit) {
            // No two tokens that see each other are further apart than the model knows.
            return Ok(());
        }
        if positions > limit {
            return Err(Error::ContextExceeded {
                positions,
                limit,
                key,
            });
        }
        Ok(())
    }
}

/// `cap · tanh(logits / cap)`.
fn bounded(mut logits: Tensor, cap: f64) -> Result<Tensor> {
    if logits.requires_grad() {
        return Ok(logits.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?);
    }
    // A product of ours that nobody else holds.
    let _same = logits.f_div_scalar_(cap)?;
    let _same = logits.f_tanh_()?;
    let _same = logits.f_mul_scalar_(cap)?;
    Ok(logits)
}
