use std::path::Path;

use overdrive_quantization::GgufFile;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::dense::Dense;
use super::modules::{Modules, read_config, read_json};
use super::pool::{Pooling, PoolingMode, pooled};
use super::sequence::{Packed, TokenSequence};
use crate::gguf::{self, DENSE_OVER_EMBEDDINGS, pooling_of_gguf};
use crate::{
    CausalLm, EncoderFamily, EncoderInput, EncoderModel, Error, ForwardInput, LoadOptions, Result,
};

/// A model of text embeddings: a transformer, pooling, dense layers and normalization, as a folder of
/// sentence-transformers describes them.
///
/// The transformer is an encoder (BERT, RoBERTa, XLM-RoBERTa, ModernBERT), a causal model whose last token is pooled
/// (Qwen3-Embedding), or a Gemma 3 with bidirectional attention (EmbeddingGemma).
///
/// ```no_run
/// // A folder of the Hub is needed.
/// use overdrive_transformer::{EmbeddingModel, TokenSequence};
/// # fn main() -> Result<(), overdrive_transformer::Error> {
/// let model = EmbeddingModel::from_pretrained("all-MiniLM-L6-v2", &Default::default())?;
/// let sequences = [vec![101, 7592, 102], vec![101, 2088, 999, 102]].map(TokenSequence::new);
/// let embeddings = model.embed(&sequences)?;
/// assert_eq!(embeddings.size(), [2, model.dimension()]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EmbeddingModel {
    transformer: Transformer,
    pooling: Pooling,
    dense: Vec<Dense>,
    truncate_dim: Option<i64>,
    /// The largest number of tokens of a sequence and the setting that bounds it.
    limit: (i64, &'static str),
}

#[derive(Debug)]
enum Transformer {
    Encoder(Box<EncoderModel>),
    Decoder(Box<CausalLm>),
}

impl EmbeddingModel {
    /// Reads a folder of sentence-transformers: `modules.json`, the transformer, `1_Pooling/config.json`, and dense
    /// layers such as `2_Dense`. `max_seq_length` of `sentence_bert_config.json` bounds the length of a sequence.
    /// `truncate_dim` of `config_sentence_transformers.json` keeps the first elements of an embedding; default: all.
    ///
    /// A GGUF file is read, too: a BERT, or another architecture with a `pooling_type`; its embeddings are normalized, as
    /// those of llama.cpp's server.
    ///
    /// A folder without `modules.json` gets the mean over all tokens if it is an encoder, and the last token if it is a
    /// causal model; both are normalized.
    ///
    /// # Errors
    /// As [`EncoderModel::from_pretrained`](crate::Encoder::from_pretrained) and [`CausalLm::from_pretrained`];
    /// [`Error::Unsupported`] for other modules, another pooling mode or another activation.
    pub fn from_pretrained(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<EmbeddingModel> {
        let dir = dir.as_ref();
        if dir.is_file() {
            return EmbeddingModel::from_gguf(dir, options);
        }
        let modules = Modules::from_dir(dir)?;
        let folder = match &modules {
            Some(modules) => modules.transformer.clone(),
            None => dir.to_owned(),
        };
        let transformer = match is_encoder(&folder)? {
            true => {
                let model = EncoderModel::from_pretrained(&folder, options)?;
                Transformer::Encoder(Box::new(model))
            }
            false => {
                let model = CausalLm::without_head(&folder, options).map_err(with_encoders)?;
                Transformer::Decoder(Box::new(model))
            }
        };
        let modules = modules.unwrap_or_else(|| Modules {
            pooling: Pooling {
                mode: match &transformer {
                    Transformer::Encoder(_) => PoolingMode::Mean,
                    Transformer::Decoder(_) => PoolingMode::LastToken,
                },
                normalize: true,
            },
            ..Modules::default()
        });
        let settings = read_json(&folder.join("sentence_bert_config.json"))?;
        let bound = settings.and_then(|settings| settings.get("max_seq_length")?.as_i64());
        let context = transformer.context();
        let bound = bound.map(|bound| (bound.max(1), "max_seq_length"));
        let (device, kind) = (transformer.device(), transformer.kind());
        let dense = modules.dense.iter();
        let dense = dense.map(|folder| Dense::from_dir(folder, device, kind));
        let dense = dense.collect::<Result<Vec<_>>>()?;
        check_widths(&dense, transformer.width())?;
        Ok(EmbeddingModel {
            transformer,
            pooling: modules.pooling,
            dense,
            truncate_dim: modules.truncate_dim,
            limit: bound.map_or(context, |bound| bound.min(context)),
        })
    }

    fn from_gguf(path: &Path, options: &LoadOptions) -> Result<EmbeddingModel> {
        let file = GgufFile::open(path)?;
        let pooling = pooling_of_gguf(&file)?.unwrap_or(Pooling {
            mode: PoolingMode::LastToken,
            normalize: true,
        });
        let transformer = match gguf::is_encoder(&file) {
            true => Transformer::Encoder(Box::new(EncoderModel::from_gguf(path, options)?)),
            false => Transformer::Decoder(Box::new(CausalLm::of_gguf(&file, options)?)),
        };
        let (device, kind) = (transformer.device(), transformer.kind());
        let dense = DENSE_OVER_EMBEDDINGS.iter();
        let dense = dense.map(|name| Dense::from_gguf(&file, name, device, kind));
        let dense: Vec<Dense> = dense.filter_map(Result::transpose).collect::<Result<_>>()?;
        check_widths(&dense, transformer.width())?;
        Ok(EmbeddingModel {
            limit: transformer.context(),
            transformer,
            pooling,
            dense,
            truncate_dim: None,
        })
    }

    /// Computes the embedding of each sequence, `(N, D)`, in the dtype of the parameters. The sequences are computed
    /// as one row without padding.
    ///
    /// # Errors
    /// [`Error::ContextExceeded`] for a sequence longer than [`max_length`](EmbeddingModel::max_length),
    /// [`Error::Common`] for a sequence without tokens, and errors of libtorch.
    pub fn embed(&self, sequences: &[TokenSequence]) -> Result<Tensor> {
        let device = self.transformer.device();
        let packed = Packed::new(sequences, self.limit, device)?;
        let hidden = match &self.transformer {
            Transformer::Encoder(model) => model.hidden_states(packed.encoder_input(model))?,
            Transformer::Decoder(model) => {
                let input = ForwardInput::new(&packed.ids).with_sequences(&packed.lengths);
                model.hidden_states(input)?
            }
        };
        let mut vectors = pooled(&hidden, Some(&packed.lengths), self.pooling.mode)?;
        for layer in &self.dense {
            vectors = layer.forward(&vectors)?;
        }
        if self.pooling.normalize {
            vectors = self.pooling.normalized(&vectors)?;
        }
        // After the norm, as in sentence-transformers, whose truncated embeddings are shorter than 1.
        Ok(vectors.f_narrow(-1, 0, self.dimension())?)
    }

    /// Returns the number of elements of an embedding.
    pub fn dimension(&self) -> i64 {
        let last = self.dense.last().map(|layer| layer.size()[1]);
        let all = last.unwrap_or_else(|| self.transformer.width());
        self.truncate_dim.map_or(all, |kept| kept.min(all))
    }

    /// Returns the largest number of tokens of a sequence.
    pub fn max_length(&self) -> i64 {
        self.limit.0
    }

    /// Returns the number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> i64 {
        match &self.transformer {
            Transformer::Encoder(model) => model.config().vocab_size,
            Transformer::Decoder(model) => model.config().vocab_size(),
        }
    }

    /// Returns the steps from hidden states to vectors; dense layers come between the two.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }
}

/// Checks that each dense layer has the inputs that the module before it gives, `width` for the first.
fn check_widths(layers: &[Dense], mut width: i64) -> Result<()> {
    for layer in layers {
        let [inputs, outputs] = layer.size();
        if inputs != width {
            let weight = [outputs, inputs];
            let expected = format!("({outputs}, {width}), to fit the module before it");
            return Err(overdrive_core::Error::shape("linear.weight", weight, expected).into());
        }
        width = outputs;
    }
    Ok(())
}

impl Transformer {
    fn width(&self) -> i64 {
        match self {
            Transformer::Encoder(model) => model.config().hidden_size,
            Transformer::Decoder(model) => model.config().hidden_size(),
        }
    }

    /// Returns the largest number of tokens of a sequence and the key of the configuration that sets it.
    fn context(&self) -> (i64, &'static str) {
        match self {
            Transformer::Encoder(model) => (model.config().context(), "max_position_embeddings"),
            Transformer::Decoder(model) => model.config().ragged_limit(),
        }
    }

    fn device(&self) -> Device {
        match self {
            Transformer::Encoder(model) => model.device(),
            Transformer::Decoder(model) => model.device(),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Transformer::Encoder(model) => model.kind(),
            Transformer::Decoder(model) => model.kind(),
        }
    }
}

impl Packed {
    /// Returns the input of an encoder. Only BERT has token types: transformers gives RoBERTa zeros, and ModernBERT none.
    pub(super) fn encoder_input<H: crate::EncoderHead>(
        &self,
        model: &crate::Encoder<H>,
    ) -> EncoderInput<'_> {
        let input = EncoderInput::new(&self.ids).with_sequences(&self.lengths);
        match &self.types {
            Some(types) if model.config().family == EncoderFamily::Bert => {
                input.with_token_type_ids(types)
            }
            _ => input,
        }
    }
}

/// Adds the encoders to the supported types of an error about `model_type`.
fn with_encoders(error: Error) -> Error {
    match error {
        Error::Unsupported {
            key,
            found,
            supported,
        } if key == "model_type" => {
            let encoders = EncoderFamily::ALL.map(EncoderFamily::model_type).join(", ");
            Error::unsupported(key, found, format!("{encoders}, {supported}"))
        }
        other => other,
    }
}

/// Returns `true` if the folder contains a bidirectional encoder of [`EncoderFamily`].
pub(super) fn is_encoder(folder: &Path) -> Result<bool> {
    let config = read_config(folder)?;
    let model_type = config.get("model_type").and_then(Value::as_str);
    Ok(model_type
        .and_then(EncoderFamily::from_model_type)
        .is_some())
}
