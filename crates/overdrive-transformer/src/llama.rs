use tch::{Kind, Tensor};

use crate::attention::{AttentionStep, RotaryAttention};
use crate::input::{ForwardInput, Shape};
use crate::mask::Mask;
use crate::mlp::GatedMlp;
use crate::parameters::{ParameterMap, ParameterSpec};
use crate::rms_norm::RmsNorm;
use crate::rope::Rotary;
use crate::{Execution, Init, LlamaConfig, Result};

/// A decoder of the Llama family without its head.
#[derive(Debug)]
pub(crate) struct Llama {
    pub(crate) embedding: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rotary: Rotary,
    dropout: f64,
}

#[derive(Debug)]
struct Block {
    input_norm: RmsNorm,
    attention: RotaryAttention,
    post_attention_norm: RmsNorm,
    mlp: GatedMlp,
    window: Option<i64>,
}

/// The parameters of a Llama in the order of transformers' `named_parameters`.
pub(crate) fn parameters(config: &LlamaConfig) -> Vec<ParameterSpec> {
    let (hidden, inner, head) = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim(),
    );
    let (queries, keys) = (config.num_attention_heads * head, config.kv_heads() * head);
    let normal = Init::Normal {
        std: config.initializer_range,
    };
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[i64], init| {
        all.push(ParameterSpec::new(name, shape, init));
    };
    add(
        "model.embed_tokens.weight".to_owned(),
        &[config.vocab_size, hidden],
        normal,
    );
    for layer in 0..config.num_hidden_layers {
        let mut linear = |name: &str, output, input, bias| {
            let name = format!("model.layers.{layer}.{name}");
            add(format!("{name}.weight"), &[output, input], normal);
            if bias {
                add(format!("{name}.bias"), &[output], Init::Zeros);
            }
        };
        linear("self_attn.q_proj", queries, hidden, config.qkv_bias());
        linear("self_attn.k_proj", keys, hidden, config.qkv_bias());
        linear("self_attn.v_proj", keys, hidden, config.qkv_bias());
        linear("self_attn.o_proj", hidden, queries, config.output_bias());
        if config.qk_norm() {
            for name in ["q_norm", "k_norm"] {
                let name = format!("model.layers.{layer}.self_attn.{name}.weight");
                add(name, &[head], Init::Ones);
            }
        }
        let mut linear = |name: &str, output, input| {
            let name = format!("model.layers.{layer}.mlp.{name}");
            add(format!("{name}.weight"), &[output, input], normal);
            if config.mlp_bias {
                add(format!("{name}.bias"), &[output], Init::Zeros);
            }
        };
        linear("gate_proj", inner, hidden);
        linear("up_proj", inner, hidden);
        linear("down_proj", hidden, inner);
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(
                format!("model.layers.{layer}.{name}.weight"),
                &[hidden],
                Init::Ones,
            );
        }
    }
    add("model.norm.weight".to_owned(), &[hidden], Init::Ones);
    if !config.tie_word_embeddings {
        add(
            "lm_head.weight".to_owned(),
            &[config.vocab_size, hidden],
            normal,
        );
    }
    all
}

impl Llama {
    pub(crate) fn take(parameters: &mut ParameterMap, config: &LlamaConfig) -> Result<Llama> {
        let eps = config.rms_norm_eps;
        let embedding = parameters.take("model.embed_tokens.weight")?;
        let block = |layer| {
            let prefix = format!("model.layers.{layer}");
            let mut norm = |name: &str| RmsNorm::take(parameters, &format!("{prefix}.{name}"), eps);
            Ok(Block {
                input_norm: norm("input_layernorm")?,
                post_attention_norm: norm("post_attention_layernorm")?,
                attention: RotaryAttention::take(parameters, &prefix, config)?,
                mlp: GatedMlp::take(parameters, &prefix, config)?,
                window: config.window(layer),
            })
        };
        Ok(Llama {
            embedding,
            blocks: (0..config.num_hidden_layers)
                .map(block)
                .collect::<Result<_>>()?,
            norm: RmsNorm::take(parameters, "model.norm", eps)?,
            rotary: Rotary::new(config)?,
            dropout: config.attention_dropout,
        })
    }

    /// The normalised hidden states `(B, T, C)`.
    pub(crate) fn forward(
        &self,
        input: &mut ForwardInput<'_>,
        shape: Shape,
        execution: &Execution,
        training: bool,
    ) -> Result<Tensor> {
        let kind = self.embedding.kind();
        let complex = execution.complex_rotary
            && input.cache.is_none()
            && matches!(kind, Kind::Float | Kind::Double);
        let rotation = self.rotary.rotation(input, shape, kind, complex)?;
        let masks = self.masks(input, shape)?;
        let native = execution.native_rms_norm;

        let mut x = Tensor::f_embedding(&self.embedding, input.input_ids, -1, false, false)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let step = AttentionStep {
                layer,
                rotation: &rotation,
                mask: masks.of(block.window),
                cache: input.cache.as_deref_mut(),
                dropout: if training { self.dropout } else { 0.0 },
                execution,
            };
            let mixed = block
                .attention
                .forward(&block.input_norm.forward(&x, native)?, step)?;
            x = x.f_add(&mixed)?;
            let fed = block
                .mlp
                .forward(&block.post_attention_norm.forward(&x, native)?)?;
            x = x.f_add(&fed)?;
        }
        if input.logits == crate::Logits::Last {
            x = x.f_narrow(1, shape.tokens - 1, 1)?;
        }
        self.norm.forward(&x, native)
    }

    pub(crate) fn layers(&self) -> usize {
        self.blocks.len()
    }

    fn masks(&self, input: &ForwardInput<'_>, shape: Shape) -> Result<Masks> {
        let windows = self.blocks.iter().map(|block| block.window);
        let window = windows.clone().flatten().next();
        Ok(Masks {
            full: Mask::causal(input, shape, None)?,
            sliding: window
                .map(|w| Mask::causal(input, shape, Some(w)))
                .transpose()?,
        })
    }
}

/// The masks of a forward pass; all sliding layers of a model share one width.
struct Masks {
    full: Mask,
    sliding: Option<Mask>,
}

impl Masks {
    fn of(&self, window: Option<i64>) -> &Mask {
        match (&self.sliding, window) {
            (Some(sliding), Some(_)) => sliding,
            _ => &self.full,
        }
    }
}
