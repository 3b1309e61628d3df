//! The metadata of Gemma 3n and Gemma 4, whose sizes differ from layer to layer.

use overdrive_quantization::{GgufArray, GgufValue};
use tch::{Kind, Tensor};

use super::config::Keys;
use super::metadata::Metadata;
use crate::config::{LlamaConfig, LlamaFamily, PerLayerConfig, RopeScaling};
use crate::{Error, Result};

/// The divisor of a frequency that rotates nothing.
const UNROTATED: f64 = 1e30;

/// Sets the sizes of a Gemma 4, which differ from layer to layer.
pub(super) fn metadata(
    own: &mut Metadata,
    config: &LlamaConfig,
    sizes: &PerLayerConfig,
) -> Result<()> {
    let local = config.head_dim();
    let global = sizes.global_head_dim.unwrap_or(local);
    own.sizes([
        ("attention.key_length", global),
        ("attention.value_length", global),
        ("attention.key_length_swa", local),
        ("attention.value_length_swa", local),
        ("rope.dimension_count", global),
        ("rope.dimension_count_swa", local),
        ("attention.shared_kv_layers", sizes.num_kv_shared_layers),
        (
            "embedding_length_per_layer_input",
            sizes.hidden_size_per_layer_input,
        ),
    ])?;
    own.only(
        config.sliding_window.is_some(),
        "sliding_window",
        "null",
        "a number of tokens",
    )?;
    own.sliding_layers(config);
    if config.logit_softcap().is_none() {
        // Without the key, llama.cpp bounds the logits by 30.
        own.number("final_logit_softcapping", 0.0);
    }
    // The table has a row for each token in llama.cpp.
    let (rows, tokens) = (sizes.vocab_size_per_layer_input, config.vocab_size);
    let has_table = sizes.hidden_size_per_layer_input > 0;
    own.only(
        !has_table || rows == tokens,
        "vocab_size_per_layer_input",
        rows,
        &format!("vocab_size ({tokens})"),
    )?;
    for (key, of) in [
        (
            "feed_forward_length",
            LlamaConfig::intermediate_size_of as fn(&LlamaConfig, i64) -> i64,
        ),
        ("attention.head_count_kv", LlamaConfig::kv_heads_of),
    ] {
        let all = (0..config.num_hidden_layers).map(|layer| of(config, layer) as i32);
        own.put(key, GgufValue::Array(GgufArray::I32(all.collect())));
    }
    own.only(
        config.rope_local_scaling == RopeScaling::Default,
        "rope_parameters.sliding_attention",
        "scaled",
        "not scaled",
    )?;
    let pairs = global / 2;
    let kept = match config.rope_scaling {
        RopeScaling::Default => pairs,
        RopeScaling::Proportional {
            partial_rotary_factor,
            factor: 1.0,
        } => (partial_rotary_factor * global as f64) as i64 / 2,
        _ => {
            let supported = "default, or proportional without a factor";
            return Err(own.without(
                "rope_parameters.full_attention",
                "another scaling",
                supported,
            ));
        }
    };
    let divisor = |pair| if pair < kept { 1.0 } else { UNROTATED };
    let divisors = (0..pairs).map(divisor).collect();
    own.rope.push(("rope_freqs.weight", divisors));
    Ok(())
}

/// The number of layers with keys and values of their own in Gemma 3n, which llama.cpp takes for granted.
const GEMMA3N_OWN_KEYS: i64 = 20;

impl Keys<'_> {
    /// Returns the largest number of a key that may have one for each layer.
    pub(super) fn largest(&self, name: &str) -> Result<i64> {
        let largest = self.of_layers(name)?.into_iter().max();
        let largest = largest.filter(|&size| size > 0);
        largest.ok_or_else(|| self.wrong(name, "a positive integer, or one for each layer"))
    }

    /// Returns the numbers of a key that may have one for each layer; one number stands for all layers.
    fn of_layers(&self, name: &str) -> Result<Vec<i64>> {
        let Some(value) = self.value(name) else {
            return Ok(Vec::new());
        };
        match (value.as_i64(), value.as_i64s()) {
            (Some(one), _) => Ok(vec![one]),
            (None, Some(all)) => Ok(all),
            (None, None) => Err(self.wrong(name, "an integer, or one for each layer")),
        }
    }

    /// Reads what differs from layer to layer.
    pub(super) fn newest_gemma(&self, config: &mut LlamaConfig) -> Result<()> {
        let Some(mut own) = config.per_layer.take() else {
            return Ok(());
        };
        self.sliding_layers(config)?;
        let key = "final_logit_softcapping";
        let bound = self.number(key)?.or(config.final_logit_softcapping);
        config.final_logit_softcapping = bound.filter(|&bound| bound != 0.0);
        let rows = |name: &str| {
            let tensor = self.file.tensor(name)?;
            tensor.shape().first().copied()
        };
        if let Some(rows) = rows("per_layer_token_embd.weight") {
            own.vocab_size_per_layer_input = rows;
        }
        let key = "embedding_length_per_layer_input";
        if let Some(width) = self.integer(key)? {
            own.hidden_size_per_layer_input = width;
        }
        let shared = self.integer("attention.shared_kv_layers")?;
        let layers = config.num_hidden_layers;
        match config.family {
            LlamaFamily::Gemma3n => {
                own.num_kv_shared_layers = shared.unwrap_or((layers - GEMMA3N_OWN_KEYS).max(0));
                self.gemma3n(&mut own, layers)?;
                if let (Some(altup), Some(rank)) = (&mut own.altup, rows("blk.0.laurel_l.weight")) {
                    altup.laurel_rank = rank;
                }
            }
            _ => {
                own.num_kv_shared_layers = shared.unwrap_or(0);
                self.gemma4(&mut own, config)?;
            }
        }
        config.per_layer = Some(own);
        Ok(())
    }

    fn gemma3n(&self, own: &mut PerLayerConfig, layers: i64) -> Result<()> {
        let widths = self.of_layers("feed_forward_length")?;
        own.intermediate_sizes = (widths.len() > 1).then_some(widths);
        if let Some(altup) = &mut own.altup {
            let active = self.integer("altup.active_idx")?;
            altup.altup_active_idx = active.unwrap_or(altup.altup_active_idx);
            let streams = self.integer("altup.num_inputs")?;
            altup.altup_num_inputs = streams.unwrap_or(altup.altup_num_inputs);
        }
        let key = "activation_sparsity_scale";
        if let Some(value) = self.value(key) {
            let multipliers = match value {
                GgufValue::Array(GgufArray::F32(all)) if all.len() as i64 == layers => all,
                _ => return Err(self.wrong(key, "a list with a number of 32 bits for each layer")),
            };
            // llama.cpp has the quantile of the normal distribution in place of the share below it.
            let shares = Tensor::f_from_slice(multipliers)?
                .f_to_kind(Kind::Double)?
                .f_special_ndtr()?;
            own.activation_sparsity_pattern = Some(Vec::try_from(&shares)?);
        }
        Ok(())
    }

    fn gemma4(&self, own: &mut PerLayerConfig, config: &mut LlamaConfig) -> Result<()> {
        let layers = 0..config.num_hidden_layers;
        let slides: Vec<bool> = layers
            .clone()
            .map(|layer| config.has_second_rotary(layer))
            .collect();
        // The size of heads in layers without a window; that of the others has its own key.
        let global = self.integer("attention.key_length")?;
        own.global_head_dim = global.or(Some(config.head_dim()));
        let local = config.head_dim();
        for (key, size) in [
            ("attention.value_length", own.global_head_dim),
            ("attention.value_length_swa", Some(local)),
            ("rope.dimension_count", own.global_head_dim),
            ("rope.dimension_count_swa", Some(local)),
        ] {
            if let (Some(found), Some(size)) = (self.integer(key)?, size)
                && found != size
            {
                return Err(Error::unsupported(
                    self.key(key),
                    found,
                    format!("{size}, the length of keys"),
                ));
            }
        }
        // Of layers with a window, and of those without.
        let of_both = |name: &str| -> Result<[Option<i64>; 2]> {
            let all = self.of_layers(name)?;
            let of = |slide: bool| {
                let mut own = all.iter().zip(&slides).filter(|(_, own)| **own == slide);
                own.next().map(|(size, _)| *size)
            };
            let [with, without] = [of(true), of(false)];
            let differ = all
                .iter()
                .zip(&slides)
                .any(|(size, slide)| Some(*size) != if *slide { with } else { without });
            match all.as_slice() {
                [one] => Ok([Some(*one), Some(*one)]),
                _ if differ || !all.is_empty() && all.len() != slides.len() => {
                    let expected =
                        "an integer, or one for each layer, the same for all layers of a type";
                    Err(self.wrong(name, expected))
                }
                _ => Ok([with, without]),
            }
        };
        let [local, global] = of_both("attention.head_count_kv")?;
        config.num_key_value_heads = local.or(global).or(config.num_key_value_heads);
        let has = |layer: i64, part: &str| {
            let name = format!("blk.{layer}.{part}.weight");
            self.file.tensor(&name).is_some()
        };
        let mut full = layers.clone().zip(&slides).filter(|(_, slides)| !**slides);
        let full = full.next().map(|(layer, _)| layer);
        own.attention_k_eq_v =
            full.is_some_and(|layer| has(layer, "attn_k") && !has(layer, "attn_v"));
        own.num_global_key_value_heads = global.filter(|_| own.attention_k_eq_v);
        if global != local && local.is_some() && !own.attention_k_eq_v {
            let expected = "the same for all layers, unless keys are values (no attn_v)";
            return Err(self.wrong("attention.head_count_kv", expected));
        }
        let key = "feed_forward_length";
        let widths = self.of_layers(key)?;
        let own_keys = (config.num_hidden_layers - own.num_kv_shared_layers).max(0) as usize;
        if let (Some(&first), Some(&last)) = (widths.first(), widths.last()) {
            own.use_double_wide_mlp = last == 2 * first;
            let expected = |layer: usize| match own.use_double_wide_mlp && layer >= own_keys {
                true => 2 * first,
                false => first,
            };
            let mut listed = widths.iter().enumerate();
            if widths.len() > 1 && !listed.all(|(layer, width)| *width == expected(layer)) {
                let expected = "the same for all layers, or twice as wide where keys are shared";
                return Err(self.wrong(key, expected));
            }
            config.intermediate_size = first;
        }
        config.rope_scaling = match self.factors("rope_freqs.weight")? {
            None => RopeScaling::Default,
            Some(divisors) => self.proportional(&divisors)?,
        };
        Ok(())
    }

    /// Returns the scaling whose first frequencies are kept, and whose others are divided by so much that nothing is
    /// rotated.
    fn proportional(&self, divisors: &[f64]) -> Result<RopeScaling> {
        let kept = divisors.iter().take_while(|divisor| **divisor == 1.0);
        let kept = kept.count();
        if divisors[kept..].iter().all(|divisor| *divisor >= 1e20) {
            return Ok(RopeScaling::Proportional {
                partial_rotary_factor: kept as f64 / divisors.len().max(1) as f64,
                factor: 1.0,
            });
        }
        Err(Error::unsupported(
            "rope_freqs.weight",
            "other divisors",
            "1 for the frequencies that are kept, followed by at least 1e20 for the others",
        ))
    }
}
