use std::marker::PhantomData;
use std::path::Path;

use overdrive_nn::{AdapterHost, AdapterState, Embedding, Linear};
use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use super::backbone::Backbone;
use super::head::Head;
use super::input::Rows;
use super::layout::Layout;
use super::parameters::{head_names, own_prefix, parameters};
use super::{EncoderConfig, EncoderHead, EncoderInput, load};
use crate::checkpoint::{self, CheckpointConfig, Contents};
use crate::model_parts::ModelParts;
use crate::parameters::{
    ModelTensors, ParameterMap, handles, set_requires_grad, set_training_of_layers,
};
use crate::projections::visit_linear;
use crate::{
    Execution, InitOptions, LoadOptions, ParameterSpec, QuantizeOptions, Result, SaveOptions,
};

/// The differences between a checkpoint and the model that was read from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoadReport {
    /// The parameters of the head that are missing from the files; they were initialized and should be trained.
    pub initialized: Vec<String>,
    /// The tensors in the files that the model does not use, such as another head.
    pub unused: Vec<String>,
}

/// A bidirectional encoder with a head: [`MaskedLm`](crate::MaskedLm),
/// [`SequenceClassifier`](crate::SequenceClassifier) or [`EncoderModel`](crate::EncoderModel).
///
/// Parameters keep the names, shapes and order that they have in transformers. The three types share everything but
/// their outputs, and a checkpoint of one can be read as another: parameters that it lacks get initial values, which
/// [`Encoder::load_report`] lists.
#[derive(Debug)]
pub struct Encoder<H: EncoderHead> {
    config: EncoderConfig,
    /// The dense parameters.
    parameters: Vec<(String, Tensor)>,
    pub(super) backbone: Backbone,
    pub(super) head: Head,
    pub(super) execution: Execution,
    training: bool,
    adapter_state: AdapterState,
    report: LoadReport,
    kind: PhantomData<fn() -> H>,
}

impl<H: EncoderHead> Encoder<H> {
    /// Makes a model with random parameters, initialized as in transformers: normal with the configuration's
    /// `initializer_range` (ModernBERT: truncated, and scaled by depth where a layer writes to the residual stream),
    /// norms 1, biases and the vector of padding 0. No parameter requires a gradient yet.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) or [`Error::Unsupported`](crate::Error::Unsupported) for an
    /// inconsistent configuration; an error of libtorch when memory runs out.
    pub fn new(config: &EncoderConfig, options: &InitOptions) -> Result<Self> {
        config.validate()?;
        let parts = load::initial(config, H::KIND, options)?;
        Encoder::from_tensors(config, parts, LoadReport::default())
    }

    /// Reads a model from a Hugging Face folder: `config.json` and `model.safetensors` (or shards).
    ///
    /// Reads checkpoints of all of the family's classes in transformers, with and without the prefix of a model with a
    /// head, and with the names `gamma` and `beta` of old checkpoints. Missing parameters of the head are initialized
    /// (with seed 0) and logged; unused tensors are logged.
    ///
    /// # Errors
    /// As [`CausalLm::from_pretrained`](crate::CausalLm::from_pretrained).
    pub fn from_pretrained(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let config = EncoderConfig::from_dir(dir.as_ref())?;
        Encoder::from_pretrained_with(dir, &config, options, 0)
    }

    /// Reads a model with a configuration other than the folder's, for example with the classes of a task:
    ///
    /// ```no_run
    /// // A folder of the Hub is needed.
    /// use overdrive_transformer::{EncoderConfig, SequenceClassifier};
    /// # fn main() -> Result<(), overdrive_transformer::Error> {
    /// let config = EncoderConfig::from_dir("bert-base-uncased")?.with_labels(&["ham", "spam"]);
    /// let seed = 1; // of the parameters that the checkpoint lacks
    /// let model = SequenceClassifier::from_pretrained_with(
    ///     "bert-base-uncased", &config, &Default::default(), seed,
    /// )?;
    /// assert!(model.load_report().initialized.contains(&"classifier.weight".to_owned()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Encoder::from_pretrained`].
    pub fn from_pretrained_with(
        dir: impl AsRef<Path>,
        config: &EncoderConfig,
        options: &LoadOptions,
        seed: u64,
    ) -> Result<Self> {
        config.validate()?;
        let (config, parts, report) = load::read(dir.as_ref(), config, H::KIND, options, seed)?;
        Encoder::from_tensors(&config, parts, report)
    }

    /// Writes a folder that transformers' `from_pretrained` loads: `config.json` and `model.safetensors` (or
    /// shards). Copy the tokenizer's files beside them.
    ///
    /// # Errors
    /// As [`CausalLm::save_pretrained`](crate::CausalLm::save_pretrained).
    pub fn save_pretrained(&self, dir: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        let layout = Layout::new(&self.config, H::KIND);
        let contents = Contents {
            config: &layout,
            dense: self.named_parameters(),
            quantized: self.quantized_weights(),
            kind: self.kind(),
            generation: None,
        };
        checkpoint::write(dir.as_ref(), &contents, options)
    }

    pub(crate) fn from_tensors(
        config: &EncoderConfig,
        parts: ModelTensors,
        report: LoadReport,
    ) -> Result<Self> {
        let dense = handles(&parts.parameters);
        let mut map = ParameterMap::new(parts);
        let backbone = Backbone::take(&mut map, config, own_prefix(config, H::KIND))?;
        let head = Head::take(&mut map, config, H::KIND, &backbone.embedding)?;
        Ok(Encoder {
            config: config.clone(),
            parameters: dense,
            backbone,
            head,
            execution: Execution::default(),
            training: false,
            adapter_state: AdapterState::default(),
            report,
            kind: PhantomData,
        })
    }

    /// Computes the hidden states `(B, T, C)` of the last layer, in the dtype of the parameters (under autocast in
    /// its dtype). Those of padding are zeros.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for shapes that do not fit,
    /// [`Error::ContextExceeded`](crate::Error::ContextExceeded), and errors of libtorch.
    pub fn hidden_states(&self, input: EncoderInput<'_>) -> Result<Tensor> {
        let (rows, hidden) = self.computed(input)?;
        rows.padded(hidden)
    }

    /// Computes the hidden states of the tokens that are not padding, and returns them with their arrangement.
    pub(super) fn computed(&self, input: EncoderInput<'_>) -> Result<(Rows, Tensor)> {
        if self.config.is_modern() && input.token_type_ids.is_some() {
            let expected = "unset: ModernBERT has no token types";
            return Err(overdrive_core::Error::option("token_type_ids", "set", expected).into());
        }
        let rows = input.rows(&self.config)?;
        let hidden = self
            .backbone
            .forward(&rows, &self.execution, self.training)?;
        Ok((rows, hidden))
    }

    /// Returns the dropout before the classifier, 0 outside of training.
    pub(super) fn classifier_dropout(&self) -> f64 {
        match self.training {
            true => self.config.dropout_of_classifier(),
            false => 0.0,
        }
    }

    /// Returns all dense parameters with their Hugging Face names, in the order of transformers'
    /// `named_parameters`, without quantized weights and adapters. A tied output layer is not listed. The tensors
    /// share the model's storage, gradients and flags.
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        handles(&self.parameters)
    }

    /// Returns the number of elements of all parameters, quantized ones included and adapters not.
    pub fn num_parameters(&self) -> i64 {
        self.specs().iter().map(ParameterSpec::numel).sum()
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

    /// Returns `true` if any weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.any_quantized()
    }

    /// Quantizes the model in place, layer by layer: each dense weight is freed as soon as it is quantized. The
    /// classifier, or the output layer of a masked language model with the embedding that it shares, is quantized only
    /// with [`QuantizeOptions::head`]. To load a checkpoint without holding all dense weights in memory, see
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization).
    ///
    /// # Errors
    /// [`Error::Quantization`](crate::Error::Quantization) for a weight that does not fit the scheme or is not
    /// finite; [`overdrive_nn::Error::InUse`] while a graph needs the weights.
    pub fn quantize(&mut self, options: &QuantizeOptions) -> Result<()> {
        self.quantize_layers(options, &mut |_, weight, scheme| {
            QuantizedWeight::quantize(weight, scheme)
        })
    }

    /// Makes every quantized weight dense again, as [`CausalLm::dequantize`](crate::CausalLm::dequantize) does.
    ///
    /// # Errors
    /// As [`CausalLm::dequantize`](crate::CausalLm::dequantize).
    pub fn dequantize(&mut self) -> Result<()> {
        self.dequantize_layers()
    }

    /// Makes every dense parameter require a gradient, or not.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        set_requires_grad(&self.parameters, requires_grad)
    }

    /// Switches training mode, in which the dropouts of the configuration and of adapters apply, on or off. It is
    /// off at first. Dropout draws from libtorch's generator: [`tch::manual_seed`] repeats it.
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
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Returns the parameters that were missing from the checkpoint, and its unused tensors.
    pub fn load_report(&self) -> &LoadReport {
        &self.report
    }

    /// Returns the module of the output layer, such as `classifier`: with LoRA it is trained as a whole
    /// (`modules_to_save`). RoBERTa's is `classifier.out_proj`; the name `classifier` also selects the layer before it,
    /// which pretrained checkpoints lack as well. A model without a head has none.
    pub fn output_module(&self) -> Option<&'static str> {
        head_names(self.config.family, H::KIND).output
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> Device {
        self.backbone.embedding.device()
    }

    /// Returns the dtype of the dense parameters.
    pub fn kind(&self) -> Kind {
        self.backbone.embedding.kind()
    }
}

impl<H: EncoderHead> ModelParts for Encoder<H> {
    fn specs(&self) -> Vec<ParameterSpec> {
        parameters(&self.config, H::KIND)
    }

    fn dense(&self) -> &Vec<(String, Tensor)> {
        &self.parameters
    }

    fn dense_mut(&mut self) -> &mut Vec<(String, Tensor)> {
        &mut self.parameters
    }

    fn table(&self) -> &Embedding {
        &self.backbone.embedding
    }

    fn table_mut(&mut self) -> &mut Embedding {
        &mut self.backbone.embedding
    }

    fn tied_head(&self) -> Option<&'static str> {
        Layout::new(&self.config, H::KIND).tied_head()
    }

    fn untie(&mut self) {
        self.config.tie_word_embeddings = false;
        let names = head_names(self.config.family, H::KIND);
        // An output layer of its own has its bias, too.
        if let (Some(bias), Some(output)) = (names.output_bias, names.output)
            && let Some((name, _)) = self.parameters.iter_mut().find(|(name, _)| name == bias)
        {
            *name = format!("{output}.bias");
        }
    }

    fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        self.backbone.for_each_linear(see);
        self.head.linears().for_each(see);
    }
}

/// Visits every linear layer under its transformers module name, those of the head last.
impl<H: EncoderHead> AdapterHost for Encoder<H> {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Linear) -> overdrive_nn::Result<()>,
    ) -> overdrive_nn::Result<()> {
        self.backbone.visit(visit)?;
        self.head
            .linears_mut()
            .try_for_each(|linear| visit_linear(linear, visit))
    }

    fn visit_parameters(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Tensor) -> overdrive_nn::Result<()>,
    ) -> overdrive_nn::Result<()> {
        self.backbone.visit_parameters(visit)?;
        let names = head_names(self.config.family, H::KIND);
        match (self.head.norm_mut(), names.norm) {
            (Some(norm), Some(name)) => norm.visit_parameters(name, visit),
            _ => Ok(()),
        }
    }

    fn adapter_state(&mut self) -> Option<&mut AdapterState> {
        Some(&mut self.adapter_state)
    }

    fn head(&self) -> Option<&str> {
        self.output_module()
    }
}
