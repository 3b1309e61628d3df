use std::path::Path;

use overdrive_core::Error as Common;
use overdrive_nn::{AdapterHost, AdapterState, Embedding, Linear};
use overdrive_quantization::QuantizedWeight;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::bart::{self, LOGITS_BIAS};
use super::cross_attention::CrossAttentionCache;
use super::input::{DecoderInput, Encoded, Source, check_ids};
use super::stack::{Stack, StackInput};
use super::t5::{self, Side};
use crate::checkpoint::{self, CheckpointConfig, Contents};
use crate::init::initialize;
use crate::loss::{LabelShift, LossOutput, causal_lm_loss, fused_loss, shifted};
use crate::model_parts::ModelParts;
use crate::parameters::{
    ModelTensors, ParameterMap, ParameterSpec, allocate, handles, set_requires_grad,
    set_training_of_layers,
};
use crate::projections::{ParameterVisitor, visit_linear};
use crate::{
    Error, Execution, IGNORE_INDEX, InitOptions, LoadOptions, QuantizeOptions, Result, SaveOptions,
    Seq2SeqConfig,
};

/// An encoder-decoder model with a language-model head: transformers' `T5ForConditionalGeneration` and
/// `BartForConditionalGeneration`.
///
/// Parameters keep the names, shapes and order that they have in transformers.
/// [`named_parameters`](Seq2SeqLm::named_parameters) returns handles that share their storage: an optimizer
/// updates the model in place.
///
/// ```
/// use overdrive_transformer::{InitOptions, Seq2SeqLm, T5Config};
/// use tch::Tensor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = T5Config {
///     vocab_size: 100,
///     d_model: 32,
///     d_kv: 8,
///     d_ff: 64,
///     num_layers: 2,
///     num_heads: 4,
///     decoder_start_token_id: Some(0),
///     ..T5Config::default()
/// };
/// let model = Seq2SeqLm::new(&config.into(), &InitOptions { seed: 1, ..Default::default() })?;
/// model.set_requires_grad(true)?;
/// let source = Tensor::from_slice2(&[[5i64, 9, 3, 1], [7, 1, 0, 0]]);
/// let mask = source.f_ne(0)?;
/// let labels = Tensor::from_slice2(&[[3i64, 9, 5, 1], [7, 1, -100, -100]]);
/// let loss = model.loss(&source, Some(&mask), &labels)?;
/// assert_eq!(loss.tokens()?, 6);
/// loss.mean()?.f_backward()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Seq2SeqLm {
    config: Seq2SeqConfig,
    /// The dense parameters, BART's bias of the logits included.
    parameters: Vec<(String, Tensor)>,
    embedding: Embedding,
    encoder: Stack,
    decoder: Stack,
    /// The head, to `(…, V)`; its weight is that of the embedding if the two are tied.
    head: Linear,
    /// BART's bias `(V,)`; `None` if it is zero.
    logits_bias: Option<Tensor>,
    /// The factor of hidden states before the head.
    head_scale: Option<f64>,
    execution: Execution,
    training: bool,
    /// The state that adapters keep for the model as a whole.
    adapter_state: AdapterState,
    generation_config: Option<Map<String, Value>>,
}

impl Seq2SeqLm {
    /// Makes a model with random parameters, initialized as in transformers. No parameter requires a gradient yet.
    ///
    /// # Errors
    /// [`Error::Common`] or [`Error::Unsupported`] for an inconsistent configuration; an error of libtorch when
    /// memory runs out.
    pub fn new(config: &Seq2SeqConfig, options: &InitOptions) -> Result<Seq2SeqLm> {
        config.validate()?;
        let specs = config.parameters();
        let kinds: Vec<Kind> = specs
            .iter()
            .map(|s| config.kind_of(s, options.kind))
            .collect();
        let groups = config.adjacent();
        let parameters = allocate(specs.clone(), &kinds, options.device, &groups)?;
        initialize(&parameters, &specs, options.seed)?;
        if let (Seq2SeqConfig::Bart(config), Some((_, table))) = (config, parameters.first())
            && let Some(pad) = config
                .pad_token_id
                .filter(|pad| (0..config.vocab_size).contains(pad))
        {
            // As `torch.nn.Embedding` with a `padding_idx` begins.
            let _row = table.f_narrow(0, pad, 1)?.f_zero_()?;
        }
        let parts = ModelTensors {
            parameters,
            ..ModelTensors::default()
        };
        Seq2SeqLm::from_tensors(config, parts)
    }

    /// Reads a model from a Hugging Face folder: `config.json`, `model.safetensors` (or shards with
    /// `model.safetensors.index.json`) and, if it exists, `generation_config.json`.
    ///
    /// The head of a T5 is the embedding if the files hold no `lm_head.weight`, whatever `tie_word_embeddings`
    /// says, as in transformers 5.
    ///
    /// # Errors
    /// As [`CausalLm::from_pretrained`](crate::CausalLm::from_pretrained).
    pub fn from_pretrained(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Seq2SeqLm> {
        let dir = path.as_ref();
        let mut config = Seq2SeqConfig::from_dir(dir)?;
        let parts = checkpoint::read(dir, &mut config, options)?;
        let mut model = Seq2SeqLm::from_tensors(&config, parts)?;
        model.generation_config = checkpoint::read_generation_config(dir)?;
        Ok(model)
    }

    /// Writes a folder that transformers' `from_pretrained` loads, as
    /// [`CausalLm::save_pretrained`](crate::CausalLm::save_pretrained) does. Copy the tokenizer's `tokenizer.json`
    /// beside the files.
    ///
    /// # Errors
    /// As [`CausalLm::save_pretrained`](crate::CausalLm::save_pretrained).
    pub fn save_pretrained(&self, dir: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        let generation = self.generation_config.clone();
        let contents = Contents {
            config: &self.config,
            dense: handles(&self.parameters),
            quantized: self.quantized_weights(),
            kind: self.kind(),
            generation: Some(generation.unwrap_or_else(|| self.config.generation_defaults())),
        };
        checkpoint::write(dir.as_ref(), &contents, options)
    }

    fn from_tensors(config: &Seq2SeqConfig, parts: ModelTensors) -> Result<Seq2SeqLm> {
        let mut config = config.clone();
        let parameters = handles(&parts.parameters);
        let bias = parameters.iter().find(|(name, _)| name == LOGITS_BIAS);
        let logits_bias = bias.map(|(_, bias)| nonzero(bias)).transpose()?.flatten();
        let own_head = parameters.iter().any(|(name, _)| name == "lm_head.weight");
        let mut map = ParameterMap::new(parts);
        let (embedding, encoder, decoder) = match &config {
            Seq2SeqConfig::T5(config) => (
                map.take_embedding("shared")?,
                t5::take(&mut map, config, Side::Encoder)?,
                t5::take(&mut map, config, Side::Decoder)?,
            ),
            Seq2SeqConfig::Bart(config) => (
                map.take_embedding("model.shared")?,
                bart::take(&mut map, config, Side::Encoder)?,
                bart::take(&mut map, config, Side::Decoder)?,
            ),
        };
        let head = match map.take_quantized("lm_head") {
            Some(quantized) => Linear::quantized(quantized, None)?,
            None if own_head => map.take_linear("lm_head", false)?,
            None => {
                config.set_tied(true);
                Linear::new(embedding.as_linear_weight(), None)?
            }
        };
        let head_scale = match &config {
            Seq2SeqConfig::T5(config) if config.scale_decoder_outputs => {
                Some((config.d_model as f64).powf(-0.5))
            }
            _ => None,
        };
        Ok(Seq2SeqLm {
            config,
            parameters,
            embedding,
            encoder,
            decoder,
            head: head.with_name("lm_head").without_fp8(),
            logits_bias,
            head_scale,
            execution: Execution::default(),
            training: false,
            adapter_state: AdapterState::default(),
            generation_config: None,
        })
    }

    /// Computes the encoder's states of `input_ids (B, S)`, i64, where `attention_mask (B, S)` of any dtype marks
    /// tokens by 1 and padding by 0; `None` is no padding.
    ///
    /// # Errors
    /// [`Error::Common`] for shapes that do not fit, [`Error::ContextExceeded`], and errors of libtorch.
    pub fn encode(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Encoded> {
        check_ids("input_ids", input_ids, attention_mask, 0)?;
        let mask = attention_mask.map(|mask| mask.f_to_device(input_ids.device()));
        let mask = mask.transpose()?;
        let states = self.encoder.forward(StackInput {
            embedding: &self.embedding,
            ids: input_ids,
            padding: mask.as_ref(),
            past: 0,
            source: None,
            cache: None,
            execution: &self.execution,
            training: self.training,
        })?;
        Ok(Encoded {
            states,
            attention_mask: mask,
        })
    }

    /// Computes the keys and values of the encoder's states in each layer of the decoder, once for all steps of a
    /// generation.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn cross_attention_cache(&self, encoded: &Encoded) -> Result<CrossAttentionCache> {
        let mask = encoded.attention_mask.as_ref();
        let fused = self.execution.fused_kernels;
        Ok(CrossAttentionCache {
            layers: self.decoder.cross_keys_values(&encoded.states, fused)?,
            attention_mask: mask.map(Tensor::shallow_clone),
        })
    }

    /// Computes the logits of a decoder's input, `(B, T, V)` or `(B, 1, V)` by [`DecoderInput::logits`].
    ///
    /// # Errors
    /// As [`Seq2SeqLm::encode`]; [`Error::CacheLayers`] for a cache of another number of layers. The new tokens of
    /// a failed step are removed from the cache.
    pub fn decode(&self, input: DecoderInput<'_>) -> Result<Tensor> {
        let hidden = self.decoder_states(input)?;
        self.logits(&hidden)
    }

    /// Computes the decoder's normalised hidden states `(B, T, C)`.
    ///
    /// # Errors
    /// As [`Seq2SeqLm::decode`].
    pub fn decoder_states(&self, mut input: DecoderInput<'_>) -> Result<Tensor> {
        let past = input.cache.as_ref().map_or(0, |cache| cache.len());
        let [batch, _] = check_ids(
            "decoder_input_ids",
            input.input_ids,
            input.attention_mask,
            past,
        )?;
        if input.source.batch() != batch {
            let expected = format!("({batch}, …), the rows of `decoder_input_ids`");
            let found = [input.source.batch()];
            return Err(Common::shape("the encoder's states", found, expected).into());
        }
        for layers in [
            input.cache.as_ref().map(|cache| cache.layers()),
            cross_layers(input.source),
        ] {
            if let Some(cache) = layers.filter(|&layers| layers != self.num_layers()) {
                let model = self.num_layers();
                return Err(Error::CacheLayers { cache, model });
            }
        }
        let device = input.input_ids.device();
        let mask = input.attention_mask.map(|mask| mask.f_to_device(device));
        let mask = mask.transpose()?;
        let states = self.decoder.forward(StackInput {
            embedding: &self.embedding,
            ids: input.input_ids,
            padding: mask.as_ref(),
            past,
            source: Some(input.source),
            cache: input.cache.as_deref_mut(),
            execution: &self.execution,
            training: self.training,
        });
        match states {
            Ok(states) => input.logits.select(&states),
            Err(error) => {
                if let Some(cache) = input.cache {
                    // Layers before the failure have appended the new tokens. The first error is reported.
                    let _ = cache.truncate(past.min(cache.len()));
                }
                Err(error)
            }
        }
    }

    /// Applies the head: a decoder's hidden states `(…, C)` to logits `(…, V)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let fused = self.execution.fused_kernels;
        let logits = self.head.forward_with(&self.scaled(hidden)?, fused)?;
        Ok(match &self.logits_bias {
            Some(bias) => logits.f_add(bias)?,
            None => logits,
        })
    }

    fn scaled(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(match self.head_scale {
            Some(scale) => hidden.f_mul_scalar(scale)?,
            None => hidden.shallow_clone(),
        })
    }

    /// Computes the logits `(B, T, V)` of `decoder_input_ids (B, T)` after `input_ids (B, S)`; `attention_mask (B,
    /// S)` marks the tokens of `input_ids`.
    ///
    /// # Errors
    /// As [`Seq2SeqLm::decode`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        decoder_input_ids: &Tensor,
    ) -> Result<Tensor> {
        let encoded = self.encode(input_ids, attention_mask)?;
        self.decode(DecoderInput::new(decoder_input_ids, &encoded))
    }

    /// Computes the summed cross-entropy of `labels (B, T)`, i64, after `input_ids (B, S)`, and the number of
    /// labels in the sum; labels of [`IGNORE_INDEX`] are not counted. The decoder reads the labels
    /// [shifted right](Seq2SeqLm::shift_right).
    ///
    /// With [`Execution::fused_kernels`] the logits are never in memory as a whole. [`LossOutput::mean`] is
    /// transformers' loss.
    ///
    /// # Errors
    /// As [`Seq2SeqLm::decode`] and [`Seq2SeqLm::shift_right`]; a label outside the vocabulary is an error of
    /// libtorch, on a GPU when the device reports it.
    pub fn loss(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        labels: &Tensor,
    ) -> Result<LossOutput> {
        let inputs = self.shift_right(labels)?;
        let encoded = self.encode(input_ids, attention_mask)?;
        let input = DecoderInput::new(&inputs, &encoded);
        // The fused loss computes the logits itself, from a dense head.
        let head = match self.head.dense_weight() {
            Some(head) if self.execution.fused_kernels => head,
            _ => return causal_lm_loss(&self.decode(input)?, labels, LabelShift::Shifted),
        };
        let targets = shifted(labels, &inputs.size(), LabelShift::Shifted)?;
        let hidden = self.scaled(&self.decoder_states(input)?)?;
        fused_loss(&hidden, head, self.logits_bias.as_ref(), &targets, None)
    }

    /// Returns the decoder's input of `labels (B, T)`: `decoder_start_token_id`, and the labels but for the last,
    /// with the padding token in place of [`IGNORE_INDEX`] (transformers' `shift_tokens_right`).
    ///
    /// # Errors
    /// [`Error::Common`] for labels of another shape or dtype, or if the configuration lacks one of the tokens.
    pub fn shift_right(&self, labels: &Tensor) -> Result<Tensor> {
        let [_, tokens] = check_ids("labels", labels, None, 0)?;
        let token = |key: &'static str, id: Option<i64>| {
            let expected = "a token id, for the decoder's input";
            id.ok_or_else(|| Common::option(key, "null", expected))
        };
        let start = self.config.decoder_start_token_id();
        let start = token("decoder_start_token_id", start)?;
        let pad = token("pad_token_id", self.config.pad_token_id())?;
        let first = labels.f_narrow(1, 0, 1)?.f_full_like(start)?;
        let rest = labels.f_narrow(1, 0, tokens - 1)?;
        let rest = rest.f_masked_fill(&rest.f_eq(IGNORE_INDEX)?, pad)?;
        Ok(Tensor::f_cat(&[first, rest], 1)?)
    }

    /// Returns all trainable dense parameters with their Hugging Face names, in the order of transformers'
    /// `named_parameters`, without quantized weights and adapters. A tied head is not listed twice. The tensors
    /// share the model's storage, gradients and flags.
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let mut trained = handles(&self.parameters);
        trained.retain(|(name, _)| name != LOGITS_BIAS);
        trained
    }

    /// Returns the number of elements of all parameters, quantized ones included and adapters not; a tied head
    /// counts once.
    pub fn num_parameters(&self) -> i64 {
        let specs = self.config.parameters();
        let trained = specs.iter().filter(|spec| spec.name != LOGITS_BIAS);
        trained.map(ParameterSpec::numel).sum()
    }

    /// Returns the number of bytes of all parameters, dense and quantized, without adapters. Tied parameters count
    /// once.
    pub fn memory_footprint(&self) -> usize {
        ModelParts::bytes(self)
    }

    /// Returns the names of the adapters of all layers, active or not, in the order of their first layer.
    pub fn adapter_names(&self) -> Vec<String> {
        self.names_of_adapters()
    }

    /// Quantizes the model in place, layer by layer: each dense weight is freed as soon as it is quantized. To load a
    /// checkpoint without holding all dense weights in memory, see
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization).
    ///
    /// # Errors
    /// [`Error::Quantization`] for a weight that does not fit the scheme or is not finite;
    /// [`overdrive_nn::Error::InUse`] while a graph needs the weights.
    pub fn quantize(&mut self, options: &QuantizeOptions) -> Result<()> {
        self.quantize_layers(options, &mut |_, weight, scheme| {
            QuantizedWeight::quantize(weight, scheme)
        })
    }

    /// Makes every quantized weight dense again, as
    /// [`CausalLm::dequantize`](crate::CausalLm::dequantize) does.
    ///
    /// # Errors
    /// As [`CausalLm::dequantize`](crate::CausalLm::dequantize).
    pub fn dequantize(&mut self) -> Result<()> {
        self.dequantize_layers()
    }

    /// Returns `true` if any weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.any_quantized()
    }

    /// Makes every dense trainable parameter require a gradient, or not.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        set_requires_grad(&self.named_parameters(), requires_grad)
    }

    /// Switches training mode, in which the dropouts of the configuration and of adapters apply, on or off. It is
    /// off at first.
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

    /// Selects the implementations that compute the model. `fused_decoding` has no effect.
    pub fn set_execution(&mut self, execution: Execution) {
        self.execution = execution;
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Seq2SeqConfig {
        &self.config
    }

    /// Returns the number of layers of the decoder, which a cache for its tokens must have.
    pub fn num_layers(&self) -> usize {
        self.decoder.blocks.len()
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// Returns the dtype of the dense parameters. The last projections of a T5 in fp16 are in fp32.
    pub fn kind(&self) -> Kind {
        self.embedding.kind()
    }

    /// Returns the contents of `generation_config.json`, or `None` if the checkpoint had none.
    pub fn generation_config(&self) -> Option<&Map<String, Value>> {
        self.generation_config.as_ref()
    }
}

impl ModelParts for Seq2SeqLm {
    fn specs(&self) -> Vec<ParameterSpec> {
        self.config.parameters()
    }

    fn kind_of(&self, spec: &ParameterSpec) -> Kind {
        self.config.kind_of(spec, self.kind())
    }

    fn dense(&self) -> &Vec<(String, Tensor)> {
        &self.parameters
    }

    fn dense_mut(&mut self) -> &mut Vec<(String, Tensor)> {
        &mut self.parameters
    }

    fn table(&self) -> &Embedding {
        &self.embedding
    }

    fn table_mut(&mut self) -> &mut Embedding {
        &mut self.embedding
    }

    fn tied_head(&self) -> Option<&'static str> {
        self.config.tied_head()
    }

    fn untie(&mut self) {
        self.config.set_tied(false);
    }

    fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        self.encoder.for_each_linear(see);
        self.decoder.for_each_linear(see);
        see(&self.head);
    }
}

/// Lends every linear layer of the blocks under the name of its module in transformers, and `lm_head` last.
impl AdapterHost for Seq2SeqLm {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Linear) -> overdrive_nn::Result<()>,
    ) -> overdrive_nn::Result<()> {
        self.encoder.visit(visit)?;
        self.decoder.visit(visit)?;
        visit_linear(&mut self.head, visit)
    }

    fn visit_parameters(&mut self, visit: ParameterVisitor<'_>) -> overdrive_nn::Result<()> {
        let name = match &self.config {
            Seq2SeqConfig::T5(_) => "shared.weight",
            Seq2SeqConfig::Bart(_) => "model.shared.weight",
        };
        if let Some(table) = self.embedding.dense_table_mut() {
            visit(name, table)?;
        }
        self.encoder.visit_parameters(visit)?;
        self.decoder.visit_parameters(visit)
    }

    fn adapter_state(&mut self) -> Option<&mut AdapterState> {
        Some(&mut self.adapter_state)
    }
}

fn cross_layers(source: Source<'_>) -> Option<usize> {
    match source {
        Source::Encoded(_) => None,
        Source::Cache(cache) => Some(cache.layers()),
    }
}

/// Returns the bias `(V,)` of a buffer `(1, V)`, or `None` if it is zero, as in every published BART.
fn nonzero(bias: &Tensor) -> Result<Option<Tensor>> {
    let any = bias.f_ne(0.0)?.f_any()?.f_int64_value(&[])? != 0;
    Ok(any.then(|| bias.f_squeeze_dim(0)).transpose()?)
}
