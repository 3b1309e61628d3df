use std::path::Path;

use overdrive_attention::PackedLengths;
use overdrive_autograd::is_grad_enabled;
use overdrive_kv_cache::{CacheShape, LayerHeads};
use overdrive_nn::{AdapterState, Embedding, Linear, LinearWeight};
use overdrive_quantization::{GgufFile, QuantizedWeight};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use crate::checkpoint::CheckpointConfig;
use crate::gpt2::Gpt2;
use crate::init::initialize;
use crate::input::Shape;
use crate::llama::Llama;
use crate::loss::{LabelShift, LossOutput, causal_lm_loss, fused_loss, shifted};
use crate::model_parts::ModelParts;
use crate::moe::{ExpertLoad, LoadBalance};
use crate::parameters::{
    ModelTensors, ParameterMap, allocate, handles, set_requires_grad, set_training_of_layers,
};
use crate::quantize::join_quantized;
use crate::vision::VisionTower;
use crate::{
    Error, Execution, ForwardInput, ImageFeatures, LoadOptions, ModelConfig, ParameterSpec, Result,
    SaveOptions, checkpoint,
};

/// The options of a new model.
#[derive(Debug, Clone, PartialEq)]
pub struct InitOptions {
    /// The device of the parameters; default: the CPU.
    pub device: Device,
    /// The dtype of the parameters; default: fp32.
    pub kind: Kind,
    /// The seed of all random parameters; default 0. The same seed gives the same model on every device,
    /// whatever the state of libtorch's global generator.
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
/// Parameters keep the names, shapes and order that they have in transformers.
/// [`named_parameters`](CausalLm::named_parameters) returns handles that share their storage: an optimizer
/// updates the model in place.
#[derive(Debug)]
pub struct CausalLm {
    config: ModelConfig,
    /// The dense parameters.
    parameters: Vec<(String, Tensor)>,
    pub(crate) backbone: Backbone,
    /// The head, to `(…, V)`; its weight is that of the embedding if the two are tied.
    pub(crate) head: Linear,
    /// The tower of a model that sees images.
    vision: Option<VisionTower>,
    /// The bound of the logits.
    softcap: Option<f64>,
    /// The divisor of the logits.
    divisor: Option<f64>,
    execution: Execution,
    training: bool,
    /// The state that adapters keep for the model as a whole.
    pub(crate) adapter_state: AdapterState,
    /// If `true`, transformers loads the folder of this model as a multimodal model with this one inside.
    pub(crate) is_text_of_multimodal: bool,
    generation_config: Option<Map<String, Value>>,
}

#[derive(Debug)]
pub(crate) enum Backbone {
    Llama(Box<Llama>),
    Gpt2(Box<Gpt2>),
}

impl CausalLm {
    /// Makes a model with random parameters, initialized as in transformers: normal with the configuration's
    /// `initializer_range` (GPT-2's residual projections scaled by depth), norms 1, biases 0. No parameter
    /// requires a gradient yet.
    ///
    /// # Errors
    /// [`Error::Common`] or [`Error::Unsupported`] for an inconsistent configuration; an error of libtorch when
    /// memory runs out.
    pub fn new(config: &ModelConfig, options: &InitOptions) -> Result<CausalLm> {
        let model = CausalLm::empty(config, options.device, options.kind)?;
        initialize(&model.parameters, &config.parameters(), options.seed)?;
        Ok(model)
    }

    /// Makes a model with uninitialized parameters, for a caller that sets all of them
    /// (`torch.nn.utils.skip_init`). [`CausalLm::new`] draws the values on the host, which dominates the time of making
    /// a model with billions of parameters on a GPU.
    ///
    /// # Errors
    /// As for [`CausalLm::new`].
    pub fn empty(config: &ModelConfig, device: Device, kind: Kind) -> Result<CausalLm> {
        config.validate()?;
        config.check_causal()?;
        let specs = config.parameters();
        let kinds = vec![kind; specs.len()];
        // Projections that one matmul computes share one block of memory.
        let groups = config.adjacent();
        let parameters = allocate(specs, &kinds, device, &groups)?;
        let parts = ModelTensors {
            parameters,
            ..ModelTensors::default()
        };
        CausalLm::from_tensors(config, parts)
    }

    /// Reads a model from a Hugging Face folder, or from a GGUF file as [`CausalLm::from_gguf`] does.
    ///
    /// From a folder, reads `config.json`, `model.safetensors` (or shards with
    /// `model.safetensors.index.json`) and, if it exists, `generation_config.json`.
    ///
    /// Files are memory-mapped, and each tensor is converted directly to its device and dtype: loading takes
    /// the memory of the model, plus a copy of one tensor if the device is not the CPU.
    ///
    /// If `tie_word_embeddings` is set but the stored head differs from the embedding, the head is untied, as in
    /// transformers 5, in [`CausalLm::config`] too, and a warning is logged. A warning names all other unused tensors,
    /// such as a second copy with different values, except buffers that older versions of transformers saved.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an architecture or option that this crate does not implement;
    /// [`Error::Checkpoint`] with every tensor that is missing, unexpected or of another shape;
    /// [`Error::BadWeightFile`] for a damaged file; [`Error::Common`] for a file that cannot be read.
    pub fn from_pretrained(path: impl AsRef<Path>, options: &LoadOptions) -> Result<CausalLm> {
        let dir = path.as_ref();
        if dir.is_file() {
            return CausalLm::from_gguf(dir, options);
        }
        let (mut config, is_text_of_multimodal) = ModelConfig::read(dir)?;
        config.check_causal()?;
        let parts = checkpoint::read(dir, &mut config, options)?;
        let mut model = CausalLm::from_tensors(&config, parts)?;
        model.generation_config = checkpoint::read_generation_config(dir)?;
        model.is_text_of_multimodal = is_text_of_multimodal;
        Ok(model)
    }

    /// Reads a model whose logits are not needed: a folder may lack the head even if it is not tied, as Qwen3-Embedding's
    /// do. The embedding is then in its place. Attention may be bidirectional (EmbeddingGemma).
    pub(crate) fn without_head(path: &Path, options: &LoadOptions) -> Result<CausalLm> {
        if path.is_file() {
            return CausalLm::of_gguf(&GgufFile::open(path)?, options);
        }
        let mut config = ModelConfig::from_dir(path)?;
        config.set_tied(true);
        let parts = checkpoint::read(path, &mut config, options)?;
        CausalLm::from_tensors(&config, parts)
    }

    /// Writes a folder that transformers' `from_pretrained` loads: `config.json`, `model.safetensors` (or
    /// shards) and `generation_config.json`. Copy the tokenizer's `tokenizer.json` beside them.
    ///
    /// Each file is written under a temporary name, synced and renamed, the weights before `config.json`: a
    /// reader never sees an incomplete file. The folder as a whole is not atomic: a crash between two renames over an
    /// older checkpoint may leave its configuration beside the new weights, or shards without an index, which cannot be
    /// loaded, but never a model with weights of both.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder cannot be written; an error of libtorch if memory for the copy of one
    /// tensor runs out.
    pub fn save_pretrained(&self, dir: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        checkpoint::write(dir.as_ref(), &checkpoint::Contents::of(self), options)
    }

    pub(crate) fn from_tensors(config: &ModelConfig, mut parts: ModelTensors) -> Result<CausalLm> {
        let is_on_gpu = |weight: &QuantizedWeight| weight.device().is_cuda();
        if parts.quantized.values().any(is_on_gpu) {
            join_quantized(&mut parts.quantized, &config.adjacent())?;
        }
        let parameters = handles(&parts.parameters);
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
        let bias = config
            .head_bias()
            .then(|| parameter_map.take("lm_head.bias"));
        let bias = bias.transpose()?;
        let head = match parameter_map.take_quantized("lm_head") {
            // A quantized head has its own weight even if the dense head is tied.
            Some(quantized) => Linear::quantized(quantized, bias)?,
            None if config.tie_word_embeddings() => Linear::new(tied, bias)?,
            None => Linear::dense(parameter_map.take("lm_head.weight")?, bias)?,
        };
        let head = head.with_name("lm_head").without_fp8();
        let vision = config.vision();
        let vision = vision.map(|vision| VisionTower::take(&mut parameter_map, vision));
        Ok(CausalLm {
            config: config.clone(),
            parameters,
            backbone,
            head,
            vision: vision.transpose()?,
            softcap: config.logit_softcap(),
            divisor: config.logit_divisor(),
            execution: Execution::default(),
            training: false,
            adapter_state: AdapterState::default(),
            is_text_of_multimodal: false,
            generation_config: None,
        })
    }

    /// Computes the logits, `(B, T, V)` or `(B, 1, V)` depending on [`ForwardInput::logits`], in the dtype of the
    /// parameters (under autocast, in its dtype).
    ///
    /// # Errors
    /// [`Error::Common`] for shapes that do not fit, [`Error::ContextExceeded`], and errors of libtorch. The
    /// new tokens of a failed step are removed from the cache.
    pub fn forward(&self, input: ForwardInput<'_>) -> Result<Tensor> {
        let hidden = self.hidden_states(input)?;
        self.logits(&hidden)
    }

    /// Computes the image tokens of patches `pixels (N, W)` of any device and dtype: those of one or more images, one after
    /// another, whose `grids` are `[height, width]` in patches. They are for [`ForwardInput::images`], and differentiable.
    /// A tower that is not trained should compute them without gradients.
    ///
    /// `W` is [`VisionConfig::patch_width`](crate::VisionConfig::patch_width). The patches of a token are adjacent, as
    /// transformers' processor of Qwen2-VL and later models makes them.
    ///
    /// # Errors
    /// [`Error::NoVision`] for a model that sees no images; [`Error::Common`] if `pixels` does not fit `grids`.
    pub fn encode_images(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<ImageFeatures> {
        let vision = self.vision.as_ref().ok_or(Error::NoVision)?;
        vision.forward(pixels, grids, &self.execution)
    }

    /// Computes the normalised hidden states `(B, T, C)` before the head, for text embeddings or a loss that
    /// does not need all logits at once.
    ///
    /// # Errors
    /// As [`CausalLm::forward`].
    pub fn hidden_states(&self, input: ForwardInput<'_>) -> Result<Tensor> {
        Ok(self.hidden_states_and_load(input, false)?.0)
    }

    /// Computes the hidden states, and the load of the experts if it `is_wanted`.
    fn hidden_states_and_load(
        &self,
        input: ForwardInput<'_>,
        is_wanted: bool,
    ) -> Result<(Tensor, Option<ExpertLoad>)> {
        let device = input.input_ids.device();
        let mask = input.attention_mask.map(|mask| mask.f_to_device(device));
        let mask = mask.transpose()?;
        let mut input = ForwardInput {
            attention_mask: mask.as_ref(),
            cache: input.cache.map(|cache| &mut *cache as _),
            ..input
        };
        let shape = input.shape()?;
        if let Some(positions) = input.restarting_positions()? {
            // `shape` has refused packed sequences with a cache.
            let input = ForwardInput {
                position_ids: Some(&positions),
                position_bound: input.sequences.map(PackedLengths::longest_queries),
                cache: None,
                ..input
            };
            return self.hidden_states_and_load(input, is_wanted);
        }
        if self.vision.is_none() && input.has_images() {
            return Err(Error::NoVision);
        }
        // Before any layer appends to the cache.
        self.check_context(&input, shape)?;
        let hidden = match &self.backbone {
            Backbone::Llama(model) => {
                let balance = self.balance(&input, shape, is_wanted)?;
                model.forward(&mut input, shape, &self.execution, self.training, balance)
            }
            Backbone::Gpt2(model) => {
                let hidden = model.forward(&mut input, shape, &self.execution, self.training);
                hidden.map(|hidden| (hidden, None))
            }
        };
        if hidden.is_err()
            && let Some(cache) = input.cache
        {
            // Layers before the failure have appended the new tokens. The first error is the one to report.
            let _ = cache.truncate(shape.past.min(cache.len()));
        }
        hidden
    }

    /// Returns the values that a forward pass requests from the routers of experts.
    fn balance(
        &self,
        input: &ForwardInput<'_>,
        shape: Shape,
        is_wanted: bool,
    ) -> Result<LoadBalance> {
        let new = |mask: &Tensor| {
            let mask = mask.f_narrow(1, shape.past, shape.tokens)?;
            mask.f_to_kind(Kind::Float)?.f_reshape([-1])
        };
        Ok(LoadBalance {
            is_wanted,
            mask: match input.attention_mask {
                Some(mask) if is_wanted => Some(new(mask)?),
                _ => None,
            },
            training: self.training,
        })
    }

    /// Applies the head: hidden states `(…, C)` to logits `(…, V)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let fused = self.execution.fused_kernels;
        let few = overdrive_fused::FEW_ROWS as i64;
        let logits = match hidden.size().as_slice() {
            // A dense head with more rows would give them other bits than fewer, unless the switch is on.
            &[.., channels]
                if hidden.numel() as i64 > few * channels
                    && matches!(self.head.weight(), LinearWeight::Dense { .. })
                    && !overdrive_kernels::is_batch_invariant()
                    && self.is_batch_invariant() =>
            {
                let mut size = hidden.size();
                let rows = hidden.f_reshape([-1, channels])?.f_split(few, 0)?;
                let parts = rows.iter().map(|rows| self.head.forward_with(rows, fused));
                let parts = parts.collect::<overdrive_nn::Result<Vec<_>>>()?;
                let logits = Tensor::f_cat(&parts, 0)?;
                size.pop();
                size.push(logits.size()[1]);
                logits.f_view(size.as_slice())?
            }
            _ => self.head.forward_with(hidden, fused)?,
        };
        let logits = match self.divisor {
            None => logits,
            Some(divisor) => divided(logits, divisor)?,
        };
        match self.softcap {
            None => Ok(logits),
            Some(cap) => bounded(logits, cap),
        }
    }

    /// Computes the summed cross-entropy of `input_ids (B, T)` against `labels (B, T)`, both i64, and the
    /// number of tokens in the sum; labels of [`IGNORE_INDEX`](crate::IGNORE_INDEX) are not counted.
    ///
    /// With [`Execution::fused_kernels`] the logits and their gradients are computed in chunks and never held in
    /// memory as a whole, except for a model that bounds them (Gemma 2).
    ///
    /// The result is a sum and a count, so that gradient accumulation can weight micro-batches by their tokens;
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

    /// Computes the loss of an input with positions, a mask or [sequences](ForwardInput::sequences). Under
    /// [`LabelShift::HuggingFace`] the first label of each packed sequence should be
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
        // Checked before the forward pass, so that a wrong label does not cost one.
        let targets = shifted(labels, &input.input_ids.size(), shift)?;
        let coefficient = self.config.aux_loss_coefficient();
        let label_count = input.label_count;
        let (hidden, load) = self.hidden_states_and_load(input, coefficient.is_some())?;
        let loss = self.token_loss(&hidden, &targets, label_count)?;
        match (load, coefficient) {
            (Some(load), Some(coefficient)) => loss.with_aux_loss(load.loss()?, coefficient),
            _ => Ok(loss),
        }
    }

    /// Computes the summed cross-entropy of hidden states against the target of each.
    fn token_loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        label_count: Option<i64>,
    ) -> Result<LossOutput> {
        // The fused loss computes the logits itself, from a dense head and without a bound.
        let head = match self.head.dense_weight() {
            Some(head) if self.execution.fused_kernels && self.softcap.is_none() => head,
            _ => return causal_lm_loss(&self.logits(hidden)?, targets, LabelShift::Shifted),
        };
        // The logits are linear in the hidden states, of which there are fewer elements.
        let divided = self.divisor.map(|divisor| hidden.f_div_scalar(divisor));
        let divided = divided.transpose()?;
        let hidden = divided.as_ref().unwrap_or(hidden);
        fused_loss(hidden, head, None, targets, label_count)
    }

    /// Returns all dense parameters with their Hugging Face names, in the order of transformers'
    /// `named_parameters`, without quantized weights and adapters. A tied head is not listed twice. The tensors
    /// share the model's storage, gradients and flags.
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        handles(&self.parameters)
    }

    /// Returns the number of elements of all parameters, quantized ones included and adapters not; a tied head
    /// counts once.
    pub fn num_parameters(&self) -> i64 {
        // From the configuration, as quantized weights do not show their number of elements.
        let specs = self.config.parameters();
        specs.iter().map(ParameterSpec::numel).sum()
    }

    /// Returns the number of bytes of all parameters, dense and quantized, without adapters (transformers'
    /// `get_memory_footprint`). Tied parameters count once.
    pub fn memory_footprint(&self) -> usize {
        ModelParts::bytes(self)
    }

    /// Returns `true` if any weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.any_quantized()
    }

    /// Returns `true` if a sequence has the same bits alone and beside others on a CPU, for any chunks of its prompt:
    /// always with [`set_batch_invariant`](overdrive_kernels::set_batch_invariant), else if the activations of all layers
    /// are rounded to integers ([`QuantizedWeight::is_batch_invariant`]) and the head is too, or has weights in f32.
    /// Gradients, experts and adapters are not covered.
    pub fn is_batch_invariant(&self) -> bool {
        if self.device() != Device::Cpu || overdrive_kernels::is_batch_invariant() {
            return self.device() == Device::Cpu;
        }
        let has_experts =
            matches!(&self.config, ModelConfig::Llama(config) if config.experts.is_some());
        let mut all = !has_experts && self.execution.fused_kernels;
        let mut see = |linear: &Linear| {
            all &= linear.adapter().is_none()
                && matches!(linear.weight(), LinearWeight::Quantized(weight) if weight.is_batch_invariant());
        };
        self.backbone.for_each_linear(&mut see);
        let head = match self.head.weight() {
            LinearWeight::Quantized(weight) => weight.is_batch_invariant(),
            LinearWeight::Dense { weight, .. } => weight.kind() == Kind::Float,
        };
        all && head && self.head.adapter().is_none() && !is_grad_enabled()
    }

    /// Returns the names of the adapters of all layers, active or not, in the order of their first layer.
    pub fn adapter_names(&self) -> Vec<String> {
        self.names_of_adapters()
    }

    /// Returns the table of token embeddings `(V, C)` if it is quantized; `AdapterHost::visit_parameters` lends
    /// a dense one.
    pub fn quantized_embedding(&self) -> Option<&QuantizedWeight> {
        self.embedding().quantized_table()
    }

    pub(crate) fn embedding(&self) -> &Embedding {
        match &self.backbone {
            Backbone::Llama(model) => &model.embedding,
            Backbone::Gpt2(model) => &model.embedding,
        }
    }

    /// Sets whether every dense parameter requires a gradient.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        set_requires_grad(&self.parameters, requires_grad)
    }

    /// Switches training mode, in which the dropouts of the configuration and of adapters apply, on or off. It
    /// is initially off.
    ///
    /// # Errors
    /// [`overdrive_nn::Error::InUse`] while a checkpointed graph holds the blocks.
    pub fn set_training(&mut self, training: bool) -> Result<()> {
        // The visit fails while a graph holds the blocks; a call that changes nothing must not.
        if training != self.training {
            set_training_of_layers(self, training)?;
            self.training = training;
        }
        Ok(())
    }

    /// Selects the implementations that compute the model.
    pub fn set_execution(&mut self, execution: Execution) {
        self.execution = execution;
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the number of layers.
    pub fn num_layers(&self) -> usize {
        match &self.backbone {
            Backbone::Llama(model) => model.num_layers(),
            Backbone::Gpt2(model) => model.num_layers(),
        }
    }

    /// Returns the number of layers that a cache for this model must have: the layers with keys and values of their own.
    /// In Gemma 3n and 4 the last layers may share those of earlier ones; in all other families it is the number of
    /// layers.
    pub fn cache_layers(&self) -> usize {
        match &self.config {
            ModelConfig::Llama(config) => config.cache_layers().unsigned_abs() as usize,
            ModelConfig::Gpt2(_) => self.num_layers(),
        }
    }

    /// Returns the key/value heads of each layer of a cache for this model, if they differ from layer to layer; else
    /// empty, and they are [`ModelConfig::num_key_value_heads`] heads of [`ModelConfig::head_dim`] channels.
    pub fn cache_layer_heads(&self) -> Vec<LayerHeads> {
        let ModelConfig::Llama(config) = &self.config else {
            return Vec::new();
        };
        let layers = (0..config.cache_layers()).map(|layer| LayerHeads {
            kv_heads: config.kv_heads_of(layer),
            head_dim: config.head_dim_of(layer),
        });
        let layers: Vec<LayerHeads> = layers.collect();
        let (kv_heads, head_dim) = (config.kv_heads(), config.head_dim());
        let same = layers
            .iter()
            .all(|own| *own == LayerHeads { kv_heads, head_dim });
        if same { Vec::new() } else { layers }
    }

    /// Returns the number of tokens that each layer of a cache attends to, including the current one: its sliding window,
    /// or `None` for all tokens. A cache need not keep more. Layers that share keys and values are not among them
    /// ([`cache_layers`](Self::cache_layers)).
    pub fn layer_windows(&self) -> Vec<Option<i64>> {
        let mut windows = match &self.backbone {
            Backbone::Llama(model) => model.windows(),
            Backbone::Gpt2(model) => vec![None; model.num_layers()],
        };
        windows.truncate(self.cache_layers());
        windows
    }

    /// Returns the shape of a cache for one row: the windows of the layers, which of them have states in place of keys and
    /// values (Qwen3-Next, Qwen3.5), the heads, the dtype and the device.
    ///
    /// ```no_run
    /// # // A model is large; the guide has an example that runs.
    /// use overdrive_kv_cache::{CacheImplementation, CacheShape};
    /// # fn cache(model: &overdrive_transformer::CausalLm) -> overdrive_kv_cache::Result<()> {
    /// let shape = CacheShape { batch: 8, ..model.cache_shape() };
    /// let cache = CacheImplementation::Dynamic.build(&shape)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn cache_shape(&self) -> CacheShape {
        CacheShape {
            windows: self.layer_windows(),
            recurrent: match &self.backbone {
                Backbone::Llama(model) => model.recurrent(),
                Backbone::Gpt2(_) => Vec::new(),
            },
            state_bytes: self.config.state_bytes(self.kind()),
            kv_heads: self.config.num_key_value_heads(),
            head_dim: self.config.head_dim(),
            layer_heads: self.cache_layer_heads(),
            kind: self.kind(),
            device: self.device(),
            ..CacheShape::default()
        }
    }

    /// Returns the inverse frequencies `(D/2,)` of the rotary positions of `layer`, or `None` if positions are
    /// learned (GPT-2) or the layer does not exist. A key at position `p` was rotated by the angles `p ·
    /// inv_freq`, channel `i` with channel `i + D/2`, so a cache can rotate it to another position.
    ///
    /// For a model with dynamic or LongRoPE scaling these are the frequencies within the original context.
    pub fn rotary_inverse_frequencies(&self, layer: usize) -> Option<&[f32]> {
        match &self.backbone {
            Backbone::Llama(model) => model.inverse_frequencies(layer),
            Backbone::Gpt2(_) => None,
        }
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> Device {
        self.embedding().device()
    }

    /// Returns the dtype of the dense parameters.
    pub fn kind(&self) -> Kind {
        self.embedding().kind()
    }

    pub(crate) fn set_generation_config(&mut self, map: Map<String, Value>) {
        self.generation_config = Some(map);
    }

    /// Returns the contents of `generation_config.json`, or `None` if the checkpoint had none.
    pub fn generation_config(&self) -> Option<&Map<String, Value>> {
        self.generation_config.as_ref()
    }

    fn check_context(&self, input: &ForwardInput<'_>, shape: Shape) -> Result<()> {
        let (limit, key) = self.config.context();
        if let Some(cache) = &input.cache
            && cache.layers() != self.cache_layers()
        {
            return Err(Error::CacheLayers {
                cache: cache.layers(),
                model: self.cache_layers(),
            });
        }
        let positions = shape.end;
        let rotary = matches!(self.backbone, Backbone::Llama(_));
        let span = input.cache.as_ref().and_then(|cache| cache.span());
        if rotary && span.is_some_and(|span| span <= limit) {
            // Rotary attention depends on distances, and the cache keeps none beyond the context.
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

impl Backbone {
    /// Lends each linear layer of the blocks.
    fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        match self {
            Backbone::Llama(model) => model.for_each_linear(see),
            Backbone::Gpt2(model) => model.for_each_linear(see),
        }
    }
}

impl ModelParts for CausalLm {
    fn specs(&self) -> Vec<ParameterSpec> {
        self.config.parameters()
    }

    fn dense(&self) -> &Vec<(String, Tensor)> {
        &self.parameters
    }

    fn dense_mut(&mut self) -> &mut Vec<(String, Tensor)> {
        &mut self.parameters
    }

    fn table(&self) -> &Embedding {
        self.embedding()
    }

    fn table_mut(&mut self) -> &mut Embedding {
        match &mut self.backbone {
            Backbone::Llama(model) => &mut model.embedding,
            Backbone::Gpt2(model) => &mut model.embedding,
        }
    }

    fn layer_inputs(&self) -> Option<(&'static str, &Embedding)> {
        match &self.backbone {
            Backbone::Llama(model) => model.per_layer.as_ref()?.table(),
            Backbone::Gpt2(_) => None,
        }
    }

    fn layer_inputs_mut(&mut self) -> Option<(&'static str, &mut Embedding)> {
        match &mut self.backbone {
            Backbone::Llama(model) => model.per_layer.as_mut()?.table_mut(),
            Backbone::Gpt2(_) => None,
        }
    }

    fn tied_head(&self) -> Option<&'static str> {
        self.config.tied_head()
    }

    fn untie(&mut self) {
        self.config.set_tied(false);
    }

    fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        self.backbone.for_each_linear(see);
        see(&self.head);
    }
}

/// Computes `logits / divisor`.
fn divided(mut logits: Tensor, divisor: f64) -> Result<Tensor> {
    if logits.requires_grad() {
        return Ok(logits.f_div_scalar(divisor)?);
    }
    // The logits were computed here and have no other handle, so they can be changed in place.
    let _same = logits.f_div_scalar_(divisor)?;
    Ok(logits)
}

/// Computes `cap · tanh(logits / cap)`.
fn bounded(mut logits: Tensor, cap: f64) -> Result<Tensor> {
    if logits.requires_grad() {
        return Ok(logits.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?);
    }
    // The logits were computed here and have no other handle, so they can be changed in place.
    let _same = logits.f_div_scalar_(cap)?;
    let _same = logits.f_tanh_()?;
    let _same = logits.f_mul_scalar_(cap)?;
    Ok(logits)
}
