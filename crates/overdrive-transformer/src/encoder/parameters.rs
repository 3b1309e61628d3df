//! The names, shapes and initial values of an encoder's parameters, as in transformers.

use super::HeadKind;
use super::config::{EncoderConfig, EncoderFamily};
use crate::parameters::ParameterRole::{self, Embedding, Head, Linear, Other};
use crate::{Init, ParameterSpec};

/// The modules of a head: a dense layer with an activation, a norm, and an output layer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct HeadNames {
    pub(super) dense: Option<&'static str>,
    pub(super) norm: Option<&'static str>,
    pub(super) output: Option<&'static str>,
    /// The bias of the output layer, if it is a parameter beside the layer.
    pub(super) output_bias: Option<&'static str>,
}

/// Returns the prefix of the backbone in a model with a head.
pub(super) fn prefix(family: EncoderFamily) -> &'static str {
    match family {
        EncoderFamily::Bert => "bert.",
        EncoderFamily::Roberta | EncoderFamily::XlmRoberta => "roberta.",
        EncoderFamily::ModernBert => "model.",
    }
}

/// Returns the prefix of the backbone in a model with the head `kind`: bare models have none.
pub(super) fn own_prefix(config: &EncoderConfig, kind: HeadKind) -> &'static str {
    match kind {
        HeadKind::Base => "",
        _ => prefix(config.family),
    }
}

/// Returns transformers' class.
pub(super) fn architecture(family: EncoderFamily, kind: HeadKind) -> &'static str {
    use EncoderFamily::{Bert, ModernBert, Roberta, XlmRoberta};
    use HeadKind::{Base, Classifier, MaskedLm};
    match (family, kind) {
        (Bert, Base) => "BertModel",
        (Bert, MaskedLm) => "BertForMaskedLM",
        (Bert, Classifier) => "BertForSequenceClassification",
        (Roberta, Base) => "RobertaModel",
        (Roberta, MaskedLm) => "RobertaForMaskedLM",
        (Roberta, Classifier) => "RobertaForSequenceClassification",
        (XlmRoberta, Base) => "XLMRobertaModel",
        (XlmRoberta, MaskedLm) => "XLMRobertaForMaskedLM",
        (XlmRoberta, Classifier) => "XLMRobertaForSequenceClassification",
        (ModernBert, Base) => "ModernBertModel",
        (ModernBert, MaskedLm) => "ModernBertForMaskedLM",
        (ModernBert, Classifier) => "ModernBertForSequenceClassification",
    }
}

/// Returns the modules of the head.
pub(super) fn head_names(family: EncoderFamily, kind: HeadKind) -> HeadNames {
    use EncoderFamily::{Bert, ModernBert, Roberta, XlmRoberta};
    use HeadKind::{Base, Classifier, MaskedLm};
    let names = |dense, norm, output, output_bias| HeadNames {
        dense: Some(dense),
        norm,
        output,
        output_bias,
    };
    match (family, kind) {
        (Bert | Roberta | XlmRoberta, Base) => names("pooler.dense", None, None, None),
        (ModernBert, Base) => HeadNames::default(),
        (Bert, MaskedLm) => names(
            "cls.predictions.transform.dense",
            Some("cls.predictions.transform.LayerNorm"),
            Some("cls.predictions.decoder"),
            Some("cls.predictions.bias"),
        ),
        (Roberta | XlmRoberta, MaskedLm) => names(
            "lm_head.dense",
            Some("lm_head.layer_norm"),
            Some("lm_head.decoder"),
            Some("lm_head.bias"),
        ),
        (ModernBert, MaskedLm) => names("head.dense", Some("head.norm"), Some("decoder"), None),
        (Bert, Classifier) => names("bert.pooler.dense", None, Some("classifier"), None),
        (Roberta | XlmRoberta, Classifier) => {
            names("classifier.dense", None, Some("classifier.out_proj"), None)
        }
        (ModernBert, Classifier) => {
            names("head.dense", Some("head.norm"), Some("classifier"), None)
        }
    }
}

/// Returns the joint projections of query, key and value: one for BERT's three, or ModernBERT's own.
pub(super) fn qkv_names(config: &EncoderConfig, prefix: &str, layer: i64) -> Vec<String> {
    match config.is_modern() {
        true => vec![format!("{prefix}layers.{layer}.attn.Wqkv")],
        false => ["query", "key", "value"]
            .map(|part| format!("{prefix}encoder.layer.{layer}.attention.self.{part}"))
            .to_vec(),
    }
}

/// The list of parameters as it grows.
struct List {
    all: Vec<ParameterSpec>,
    config: EncoderConfig,
}

/// Returns the parameters of an encoder with the head `kind` in the order of transformers' `named_parameters`.
pub(super) fn parameters(config: &EncoderConfig, kind: HeadKind) -> Vec<ParameterSpec> {
    let mut list = List {
        all: Vec::new(),
        // The labels and unknown keys are not needed for each layer.
        config: EncoderConfig {
            extra: Default::default(),
            ..config.clone()
        },
    };
    let prefix = own_prefix(config, kind);
    match config.is_modern() {
        true => list.modern_backbone(prefix),
        false => list.bert_backbone(prefix),
    }
    list.head(kind);
    list.all
}

impl List {
    /// Returns the distribution of a weight: ModernBERT divides those that write to the residual stream by the
    /// root of twice the depth.
    fn random(&self, residual: bool) -> Init {
        let std = self.config.initializer_range;
        match self.config.is_modern() {
            false => Init::Normal { std },
            true => {
                let depth = (2.0 * self.config.num_hidden_layers as f64).sqrt();
                self.cut(if residual { std / depth } else { std })
            }
        }
    }

    fn cut(&self, std: f64) -> Init {
        let cutoff = self.config.initializer_cutoff_factor;
        Init::TruncatedNormal { std, cutoff }
    }

    fn add(&mut self, name: String, shape: &[i64], init: Init, role: ParameterRole) {
        self.all.push(ParameterSpec::new(name, shape, init, role));
    }

    fn norm(&mut self, name: &str) {
        let hidden = self.config.hidden_size;
        self.add(format!("{name}.weight"), &[hidden], Init::Ones, Other);
        if self.config.norm_bias {
            self.add(format!("{name}.bias"), &[hidden], Init::Zeros, Other);
        }
    }

    fn linear(&mut self, name: &str, shape: [i64; 2], init: Init, bias: bool, role: ParameterRole) {
        self.add(format!("{name}.weight"), &shape, init, role);
        if bias {
            self.add(format!("{name}.bias"), &shape[..1], Init::Zeros, Other);
        }
    }

    fn bert_backbone(&mut self, prefix: &str) {
        let config = self.config.clone();
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let init = self.random(false);
        let at = |name: &str| format!("{prefix}embeddings.{name}");
        let words = [config.vocab_size, hidden];
        self.add(at("word_embeddings.weight"), &words, init, Embedding);
        let positions = [config.max_position_embeddings, hidden];
        let types = [config.type_vocab_size, hidden];
        // RoBERTa's class makes its positions last.
        let last = config.family.is_roberta();
        if !last {
            self.add(at("position_embeddings.weight"), &positions, init, Other);
        }
        self.add(at("token_type_embeddings.weight"), &types, init, Other);
        self.norm(&at("LayerNorm"));
        if last {
            self.add(at("position_embeddings.weight"), &positions, init, Other);
        }
        for layer in 0..config.num_hidden_layers {
            for name in qkv_names(&config, prefix, layer) {
                self.linear(&name, [hidden, hidden], init, true, Linear);
            }
            let at = |name: &str| format!("{prefix}encoder.layer.{layer}.{name}");
            self.linear(
                &at("attention.output.dense"),
                [hidden, hidden],
                init,
                true,
                Linear,
            );
            self.norm(&at("attention.output.LayerNorm"));
            self.linear(
                &at("intermediate.dense"),
                [inner, hidden],
                init,
                true,
                Linear,
            );
            self.linear(&at("output.dense"), [hidden, inner], init, true, Linear);
            self.norm(&at("output.LayerNorm"));
        }
    }

    fn modern_backbone(&mut self, prefix: &str) {
        let config = self.config.clone();
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (input, output) = (self.random(false), self.random(true));
        let words = [config.vocab_size, hidden];
        let name = format!("{prefix}embeddings.tok_embeddings.weight");
        self.add(name, &words, input, Embedding);
        self.norm(&format!("{prefix}embeddings.norm"));
        for layer in 0..config.num_hidden_layers {
            let at = |name: &str| format!("{prefix}layers.{layer}.{name}");
            if layer > 0 {
                self.norm(&at("attn_norm"));
            }
            let bias = config.attention_bias;
            self.linear(&at("attn.Wqkv"), [3 * hidden, hidden], input, bias, Linear);
            self.linear(&at("attn.Wo"), [hidden, hidden], output, bias, Linear);
            self.norm(&at("mlp_norm"));
            let bias = config.mlp_bias;
            self.linear(&at("mlp.Wi"), [2 * inner, hidden], input, bias, Linear);
            self.linear(&at("mlp.Wo"), [hidden, inner], output, bias, Linear);
        }
        self.norm(&format!("{prefix}final_norm"));
    }

    fn head(&mut self, kind: HeadKind) {
        let config = self.config.clone();
        let (hidden, names) = (config.hidden_size, head_names(config.family, kind));
        let tied = config.tie_word_embeddings;
        let vocabulary = config.vocab_size;
        if let (Some(bias), true) = (names.output_bias, tied) {
            self.add(bias.to_owned(), &[vocabulary], Init::Zeros, Other);
        }
        if let Some(dense) = names.dense {
            let (init, bias) = (self.random(true), config.classifier_bias);
            self.linear(dense, [hidden, hidden], init, bias, Linear);
        }
        if let Some(norm) = names.norm {
            self.norm(norm);
        }
        let Some(output) = names.output else {
            return;
        };
        match kind {
            HeadKind::Classifier => {
                let init = match config.is_modern() {
                    true => self.cut((hidden as f64).powf(-0.5)),
                    false => self.random(false),
                };
                self.linear(output, [config.num_labels(), hidden], init, true, Head);
            }
            _ => {
                let (init, bias) = (self.random(true), config.decoder_bias);
                if !tied {
                    self.linear(output, [vocabulary, hidden], init, bias, Head);
                } else if names.output_bias.is_none() && bias {
                    self.add(format!("{output}.bias"), &[vocabulary], Init::Zeros, Other);
                }
            }
        }
    }
}
