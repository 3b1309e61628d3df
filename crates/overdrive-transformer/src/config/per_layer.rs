//! What differs from layer to layer in Gemma 3n and Gemma 4.

use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::fields::{self, Fields, bad, positive};
use super::llama::LlamaConfig;
use super::sizes::check_size;
use crate::{Error, Result};

/// The parts of Gemma 3n and Gemma 4 that differ from layer to layer, with the keys and defaults of transformers'
/// `Gemma3nTextConfig` and `Gemma4TextConfig`: an input of each layer beside the residual stream, layers that share the
/// keys and values of an earlier layer, and sizes of single layers.
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerConfig {
    /// The width of the input that each layer gets beside the residual stream; 0: none (Gemma 4). Default 256.
    pub hidden_size_per_layer_input: i64,
    /// The number of tokens in the table of those inputs; default 262144. Gemma 3n takes the first row for tokens beyond
    /// it.
    pub vocab_size_per_layer_input: i64,
    /// The number of last layers that attend to the keys and values of the last layer of their attention type before
    /// them; default 15 (Gemma 4: 0).
    pub num_kv_shared_layers: i64,
    /// The inner width of the feed-forward block of each layer (Gemma 3n, where `intermediate_size` is a list); default
    /// `None`: [`LlamaConfig::intermediate_size`] in all layers.
    pub intermediate_sizes: Option<Vec<i64>>,
    /// The share of each layer's gates that are zero (Gemma 3n), estimated from their mean and deviation; 0 is all
    /// gates. Default `None`: 0.95 in the first 10 layers of a model with more layers than that.
    pub activation_sparsity_pattern: Option<Vec<f64>>,
    /// The parallel residual streams: required for Gemma 3n, `None` for Gemma 4.
    pub altup: Option<AltUpConfig>,
    /// The number of channels of a head of layers without a window (Gemma 4); default `None`: as in the other layers
    /// (Gemma 4: 512).
    pub global_head_dim: Option<i64>,
    /// The number of key/value heads of layers without a window (Gemma 4 with `attention_k_eq_v`); default `None`: as in
    /// the other layers.
    pub num_global_key_value_heads: Option<i64>,
    /// If `true`, the keys of layers without a window are their values, too, before norms and rotation (Gemma 4);
    /// default `false`.
    pub attention_k_eq_v: bool,
    /// If `true`, the feed-forward blocks of the layers that share keys and values are twice as wide (Gemma 4); default
    /// `false`.
    pub use_double_wide_mlp: bool,
}

/// The parallel residual streams of Gemma 3n, AltUp (Baykal et al. 2023, arXiv:2301.13310), and its learned residual
/// connection, LAuReL (Menghani et al. 2024, arXiv:2411.07501).
#[derive(Debug, Clone, PartialEq)]
pub struct AltUpConfig {
    /// The stream that a layer computes; default 0.
    pub altup_active_idx: i64,
    /// The bound of the coefficients' weights in training; default 120.
    pub altup_coef_clip: Option<f64>,
    /// If `true`, the computed stream is scaled before it meets the input of the layer; default `true`.
    pub altup_correct_scale: bool,
    /// The number of streams; default 4.
    pub altup_num_inputs: i64,
    /// The rank of the learned residual connection; default 64.
    pub laurel_rank: i64,
}

impl PerLayerConfig {
    /// Returns the defaults of transformers, or `None` for a family without these parts.
    pub(super) fn of(family: LlamaFamily) -> Option<PerLayerConfig> {
        let third = PerLayerConfig {
            hidden_size_per_layer_input: 256,
            vocab_size_per_layer_input: 262_144,
            num_kv_shared_layers: 15,
            intermediate_sizes: None,
            activation_sparsity_pattern: None,
            altup: Some(AltUpConfig {
                altup_active_idx: 0,
                altup_coef_clip: Some(120.0),
                altup_correct_scale: true,
                altup_num_inputs: 4,
                laurel_rank: 64,
            }),
            global_head_dim: None,
            num_global_key_value_heads: None,
            attention_k_eq_v: false,
            use_double_wide_mlp: false,
        };
        match family {
            LlamaFamily::Gemma3n => Some(third),
            LlamaFamily::Gemma4 => Some(PerLayerConfig {
                num_kv_shared_layers: 0,
                altup: None,
                global_head_dim: Some(512),
                ..third
            }),
            _ => None,
        }
    }

    /// Reads `intermediate_size` if it is a list, and leaves its largest number in its place.
    pub(super) fn read_inner_widths(&mut self, fields: &mut Fields) -> Result<()> {
        let key = "intermediate_size";
        if self.altup.is_none() || !fields.peek(key).is_some_and(Value::is_array) {
            return Ok(());
        }
        let list = fields.take(key).unwrap_or_default();
        let widths = list.as_array().into_iter().flatten();
        let widths: Vec<i64> = widths
            .map(|width| positive(key, width))
            .collect::<Result<_>>()?;
        let Some(&widest) = widths.iter().max() else {
            return Err(bad(key, &list, "a positive integer, or one for each layer"));
        };
        fields.put(key, widest.into());
        self.intermediate_sizes = Some(widths);
        Ok(())
    }

    /// Reads the keys; `without_window` are the layers without a window.
    pub(super) fn read(&mut self, fields: &mut Fields, without_window: &[i64]) -> Result<()> {
        let count = |fields: &mut Fields, key: &str, slot: &mut i64| {
            if let Some(value) = fields.take(key) {
                let number = value.as_i64().filter(|&number| number >= 0);
                *slot = number.ok_or_else(|| bad(key, &value, "an integer of at least 0"))?;
            }
            Ok::<_, Error>(())
        };
        let key = "hidden_size_per_layer_input";
        count(fields, key, &mut self.hidden_size_per_layer_input)?;
        let key = "vocab_size_per_layer_input";
        fields.positive(key, &mut self.vocab_size_per_layer_input)?;
        let key = "num_kv_shared_layers";
        count(fields, key, &mut self.num_kv_shared_layers)?;
        let Some(altup) = &mut self.altup else {
            return self.read_gemma4(fields, without_window);
        };
        count(fields, "altup_active_idx", &mut altup.altup_active_idx)?;
        if let Some(value) = fields.take_nullable("altup_coef_clip") {
            let clip = value.map(|value| fields::number("altup_coef_clip", &value));
            altup.altup_coef_clip = clip.transpose()?;
        }
        let key = "altup_correct_scale";
        fields.boolean(key, &mut altup.altup_correct_scale)?;
        fields.positive("altup_num_inputs", &mut altup.altup_num_inputs)?;
        fields.positive("laurel_rank", &mut altup.laurel_rank)?;
        let key = "activation_sparsity_pattern";
        if let Some(value) = fields.take(key) {
            let shares = value.as_array().map(|list| list.iter().map(Value::as_f64));
            let shares = shares.and_then(Iterator::collect::<Option<Vec<f64>>>);
            let expected = || bad(key, &value, "a list with a number for each layer");
            self.activation_sparsity_pattern = Some(shares.ok_or_else(expected)?);
        }
        Ok(())
    }

    fn read_gemma4(&mut self, fields: &mut Fields, without_window: &[i64]) -> Result<()> {
        fields.boolean("attention_k_eq_v", &mut self.attention_k_eq_v)?;
        fields.boolean("use_double_wide_mlp", &mut self.use_double_wide_mlp)?;
        let key = "use_bidirectional_attention";
        if let Some(value) = fields.peek(key)
            && value != "vision"
        {
            // In a sequence of text alone, `vision` is causal.
            return Err(Error::unsupported(key, value, "null, \"vision\""));
        }
        // Older files have keys for the layers without a window, and newer ones an object for each layer.
        let global = fields.optional_positive("global_head_dim")?;
        let global_kv = fields.optional_positive("num_global_key_value_heads")?;
        let key = "per_layer_config";
        match fields.take_nullable(key) {
            None => {
                self.global_head_dim = global.or(self.global_head_dim);
                self.num_global_key_value_heads = global_kv.filter(|_| self.attention_k_eq_v);
            }
            Some(layers) => {
                let layers = layers.unwrap_or_else(|| json!({}));
                let Value::Object(layers) = layers else {
                    return Err(bad(key, &layers, "an object with an object for each layer"));
                };
                [self.global_head_dim, self.num_global_key_value_heads] =
                    own_sizes(&layers, without_window)?;
                if let Some(kv) = self.num_global_key_value_heads
                    && !self.attention_k_eq_v
                {
                    let found = format!("num_key_value_heads {kv}");
                    let supported = "head_dim alone, without attention_k_eq_v";
                    return Err(Error::unsupported(key, found, supported));
                }
            }
        }
        Ok(())
    }

    pub(super) fn write(&self, config: &LlamaConfig, map: &mut Map<String, Value>) {
        let mut own = json!({
            "attention_bias": config.attention_bias,
            "sliding_window": config.sliding_window,
            "final_logit_softcapping": config.final_logit_softcapping,
            "hidden_size_per_layer_input": self.hidden_size_per_layer_input,
            "vocab_size_per_layer_input": self.vocab_size_per_layer_input,
            "num_kv_shared_layers": self.num_kv_shared_layers,
        });
        let member = match &self.altup {
            Some(altup) => json!({
                "altup_active_idx": altup.altup_active_idx,
                "altup_coef_clip": altup.altup_coef_clip,
                "altup_correct_scale": altup.altup_correct_scale,
                "altup_num_inputs": altup.altup_num_inputs,
                "laurel_rank": altup.laurel_rank,
                "activation_sparsity_pattern": self.activation_sparsity_pattern,
            }),
            None => json!({
                "attention_k_eq_v": self.attention_k_eq_v,
                "use_double_wide_mlp": self.use_double_wide_mlp,
                // transformers has another default for an absent key.
                "global_head_dim": self.global_head_dim.unwrap_or(config.head_dim()),
                "num_global_key_value_heads": self.num_global_key_value_heads,
                "enable_moe_block": false,
            }),
        };
        if let Some(widths) = &self.intermediate_sizes {
            own["intermediate_size"] = widths.clone().into();
        }
        for object in [own, member] {
            if let Value::Object(object) = object {
                map.extend(object);
            }
        }
    }

    pub(super) fn validate(&self, config: &LlamaConfig) -> Result<()> {
        let layers = config.num_hidden_layers;
        if self.hidden_size_per_layer_input != 0 || self.altup.is_some() {
            let key = "hidden_size_per_layer_input";
            check_size(key, self.hidden_size_per_layer_input)?;
            let key = "vocab_size_per_layer_input";
            check_size(key, self.vocab_size_per_layer_input)?;
            let (own, all) = (self.vocab_size_per_layer_input, config.vocab_size);
            if self.altup.is_none() && own < all {
                let expected = format!("at least vocab_size ({all}), a row for each token");
                return Err(bad(key, &own.into(), &expected));
            }
        }
        for (key, size) in [
            ("global_head_dim", self.global_head_dim),
            (
                "num_global_key_value_heads",
                self.num_global_key_value_heads,
            ),
        ] {
            check_size(key, size.unwrap_or(1))?;
        }
        let global = self.global_head_dim.unwrap_or(2);
        if global % 2 != 0 {
            let expected = "even, as rotary positions rotate pairs of channels";
            return Err(bad("global_head_dim", &global.into(), expected));
        }
        let (heads, kv) = (config.num_attention_heads, self.num_global_key_value_heads);
        if let Some(kv) = kv
            && heads % kv != 0
        {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            let key = "num_global_key_value_heads";
            return Err(bad(key, &kv.into(), &expected));
        }
        self.check_sharing(config)?;
        for (key, length) in [
            (
                "intermediate_size",
                self.intermediate_sizes.as_ref().map(Vec::len),
            ),
            (
                "activation_sparsity_pattern",
                self.activation_sparsity_pattern.as_ref().map(Vec::len),
            ),
        ] {
            if let Some(length) = length
                && length as i64 != layers
            {
                let expected = format!("one for each of num_hidden_layers ({layers})");
                return Err(bad(key, &format!("{length} numbers").into(), &expected));
            }
        }
        for &width in self.intermediate_sizes.iter().flatten() {
            check_size("intermediate_size", width)?;
        }
        for &share in self.activation_sparsity_pattern.iter().flatten() {
            if !(0.0..1.0).contains(&share) {
                let key = "activation_sparsity_pattern";
                return Err(bad(key, &share.into(), "numbers of at least 0, below 1"));
            }
        }
        match &self.altup {
            Some(altup) => altup.validate(),
            None => Ok(()),
        }
    }

    /// Checks that a layer with keys and values of its own precedes the layers that share them, for each attention type.
    fn check_sharing(&self, config: &LlamaConfig) -> Result<()> {
        let (shared, layers) = (self.num_kv_shared_layers, config.num_hidden_layers);
        let first = layers - shared;
        let sources = (first.max(0)..layers).all(|layer| config.kv_source(layer).is_some());
        if (0..layers).contains(&shared) && sources {
            return Ok(());
        }
        let expected = format!(
            "at least 0 and below num_hidden_layers ({layers}), with a layer of each of their attention types before \
             the layers that share keys and values"
        );
        Err(bad("num_kv_shared_layers", &shared.into(), &expected))
    }
}

impl AltUpConfig {
    fn validate(&self) -> Result<()> {
        check_size("altup_num_inputs", self.altup_num_inputs)?;
        check_size("laurel_rank", self.laurel_rank)?;
        let (active, count) = (self.altup_active_idx, self.altup_num_inputs);
        if !(0..count).contains(&active) {
            let expected = format!("at least 0 and below altup_num_inputs ({count})");
            return Err(bad("altup_active_idx", &active.into(), &expected));
        }
        match self.altup_coef_clip {
            Some(clip) if clip <= 0.0 => Err(bad(
                "altup_coef_clip",
                &clip.into(),
                "null or a positive number",
            )),
            _ => Ok(()),
        }
    }
}

impl LlamaConfig {
    /// Returns the number of channels of a head in layer `layer`.
    pub fn head_dim_of(&self, layer: i64) -> i64 {
        let global = self.per_layer.as_ref().and_then(|own| own.global_head_dim);
        match global.filter(|_| !self.slides(layer)) {
            Some(global) => global,
            None => self.head_dim(),
        }
    }

    /// Returns the number of key/value heads of layer `layer`.
    pub fn kv_heads_of(&self, layer: i64) -> i64 {
        let own = self.per_layer.as_ref();
        let global = own.and_then(|own| own.num_global_key_value_heads);
        match global.filter(|_| !self.slides(layer)) {
            Some(global) => global,
            None => self.kv_heads(),
        }
    }

    /// Returns the inner width of the feed-forward block of layer `layer`.
    pub(crate) fn intermediate_size_of(&self, layer: i64) -> i64 {
        let Some(own) = &self.per_layer else {
            return self.intermediate_size;
        };
        let listed = own.intermediate_sizes.as_ref();
        let index = layer.unsigned_abs() as usize;
        let width = listed.and_then(|widths| widths.get(index).copied());
        let width = width.unwrap_or(self.intermediate_size);
        match own.use_double_wide_mlp && self.shares_kv(layer) {
            true => 2 * width,
            false => width,
        }
    }

    /// Returns the share of zero gates in layer `layer`.
    pub(crate) fn activation_sparsity(&self, layer: i64) -> f64 {
        let Some(own) = self.per_layer.as_ref().filter(|own| own.altup.is_some()) else {
            return 0.0;
        };
        match &own.activation_sparsity_pattern {
            Some(shares) => shares.get(layer.unsigned_abs() as usize).copied(),
            None => (self.num_hidden_layers > 10 && layer < 10).then_some(0.95),
        }
        .unwrap_or(0.0)
    }

    /// Returns the number of layers with keys and values of their own, which are the first ones: a cache has a layer for
    /// each of them.
    pub fn cache_layers(&self) -> i64 {
        let shared = self.per_layer.as_ref();
        self.num_hidden_layers - shared.map_or(0, |own| own.num_kv_shared_layers)
    }

    /// Returns `true` if layer `layer` attends to the keys and values of an earlier layer.
    pub(crate) fn shares_kv(&self, layer: i64) -> bool {
        layer >= self.cache_layers()
    }

    /// Returns the layer whose keys and values layer `layer` attends to in place of its own.
    pub(crate) fn kv_source(&self, layer: i64) -> Option<i64> {
        let slides = self.slides(layer);
        let mut own = (0..self.cache_layers()).rev();
        self.shares_kv(layer)
            .then(|| own.find(|&source| self.slides(source) == slides))?
    }

    /// Returns `true` if later layers attend to the keys and values of layer `layer`.
    pub(crate) fn keeps_kv(&self, layer: i64) -> bool {
        let mut shared = self.cache_layers()..self.num_hidden_layers;
        !self.shares_kv(layer) && shared.any(|other| self.kv_source(other) == Some(layer))
    }

    /// Returns `true` if the keys of layer `layer` are its values, too.
    pub(crate) fn keys_are_values(&self, layer: i64) -> bool {
        let own = self.per_layer.as_ref();
        own.is_some_and(|own| own.attention_k_eq_v) && !self.slides(layer)
    }
}

/// Returns the head size and the number of key/value heads of `per_layer_config`, which must be the same in all layers
/// without a window, and only there.
fn own_sizes(layers: &Map<String, Value>, without_window: &[i64]) -> Result<[Option<i64>; 2]> {
    let key = "per_layer_config";
    let mut all = layers.values();
    let Some(first) = all.next() else {
        return Ok([None, None]);
    };
    if let Some(other) = all.find(|sizes| *sizes != first) {
        let found = format!("{first} and {other}");
        return Err(Error::unsupported(
            key,
            found,
            "the same sizes for all of its layers",
        ));
    }
    let named = |layer: &i64| layers.contains_key(&layer.to_string());
    if layers.len() != without_window.len() || !without_window.iter().all(named) {
        let names: Vec<&str> = layers.keys().map(String::as_str).collect();
        let found = format!("sizes of the layers {}", names.join(", "));
        let supported = format!("sizes of the layers without a window, {without_window:?}");
        return Err(Error::unsupported(key, found, supported));
    }
    let Value::Object(sizes) = first else {
        return Err(bad(key, first, "an object for each layer"));
    };
    let mut sizes = Fields::new(sizes.clone());
    let found = [
        sizes.optional_positive("head_dim")?,
        sizes.optional_positive("num_key_value_heads")?,
    ];
    match sizes.into_rest().keys().next() {
        None => Ok(found),
        Some(other) => Err(Error::unsupported(
            key,
            format!("{other:?}"),
            "head_dim, num_key_value_heads",
        )),
    }
}
