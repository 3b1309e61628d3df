use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::fields::{Fields, bad, positive};
use super::sizes::check_size;
use crate::{Error, Result};

/// The largest number of experts in all layers, so that a hostile file cannot create a very long list of parameters.
/// The largest published model (Kimi K2) has 23,040.
const MAX_EXPERTS: i64 = 1 << 17;

/// The mixture of experts of a [`LlamaConfig`](crate::LlamaConfig), with the keys and defaults of transformers'
/// `MixtralConfig`, `Qwen2MoeConfig`, `Qwen3MoeConfig`, `Qwen3VLMoeTextConfig`, `GptOssConfig`, `DeepseekV2Config` and
/// `DeepseekV3Config`;
/// [`LlamaConfig::of`](crate::LlamaConfig::of) returns those of each. A Gemma 4 with experts has `num_experts`,
/// `num_experts_per_tok` (its key is `top_k_experts`) and `moe_intermediate_size`, which have no defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    /// The number of experts of a layer (`num_local_experts` of Mixtral and gpt-oss, `num_experts` of Qwen's mixtures,
    /// `n_routed_experts` of DeepSeek; each key is read); default 8 (Qwen2-MoE and Qwen3-VL: 60, Qwen3-MoE and gpt-oss:
    /// 128, DeepSeek-V2: 64, DeepSeek-V3: 256).
    pub num_experts: i64,
    /// The number of experts that compute a token; default 2 (Qwen2-MoE, Qwen3-VL and gpt-oss: 4, Qwen3-MoE and
    /// DeepSeek: 8).
    pub num_experts_per_tok: i64,
    /// The inner width of an expert of Qwen's mixtures and of DeepSeek; default 768 (Qwen2-MoE and Qwen3-VL: 1408,
    /// DeepSeek-V2: 1407, DeepSeek-V3: 2048). The experts of Mixtral and gpt-oss have `intermediate_size`.
    pub moe_intermediate_size: i64,
    /// The inner width of the expert that computes every token (Qwen2-MoE); default `None`, no such expert (Qwen2-MoE:
    /// 5632).
    pub shared_expert_intermediate_size: Option<i64>,
    /// If `true`, the weights of a token's experts are divided by their sum; default `false` for Qwen's mixtures, `true`
    /// for DeepSeek-V3. Mixtral, gpt-oss and Qwen3-VL always divide, DeepSeek-V2 never does.
    pub norm_topk_prob: bool,
    /// Layers whose number, counted from 1, is a multiple of this value have experts (Qwen's mixtures); default 1.
    pub decoder_sparse_step: i64,
    /// The layers without experts despite `decoder_sparse_step`, counted from 0 (Qwen's mixtures); default none.
    pub mlp_only_layers: Vec<i64>,
    /// If `true`, the loss includes the load-balancing term; default `false`.
    pub output_router_logits: bool,
    /// The factor of that term; default 0.001.
    pub router_aux_loss_coef: f64,
    /// The relative noise of the block's input in training, uniform in `1 ± noise` (Mixtral); default 0.
    pub router_jitter_noise: f64,
    /// The factor `α` in gpt-oss's gate, `(up + 1) · gate · sigmoid(α · gate)`; default 1.702.
    pub swiglu_alpha: f64,
    /// The bound of gate (from above) and up (on both sides) in gpt-oss's gate; default 7.
    pub swiglu_limit: f64,
    /// The number of experts that compute every token, together one block of this many times `moe_intermediate_size`
    /// (DeepSeek); default 0 (DeepSeek-V2: 2, DeepSeek-V3: 1).
    pub n_shared_experts: i64,
    /// The factor of the weights of a token's experts (DeepSeek); default 1 (DeepSeek-V3: 2.5).
    pub routed_scaling_factor: f64,
    /// The number of groups of experts (DeepSeek); default `None`, one (DeepSeek-V3: 8).
    pub n_group: Option<i64>,
    /// The number of groups from which the experts of a token are chosen (DeepSeek); default `None`, all (DeepSeek-V3:
    /// 4).
    pub topk_group: Option<i64>,
    /// If `true`, the groups are in effect (DeepSeek-V2: `topk_method` is `"group_limited_greedy"`, not `"greedy"`);
    /// default `false` (DeepSeek-V3: `true`).
    pub group_limited: bool,
    /// The number of layers without experts, the first ones (DeepSeek); default 0 (DeepSeek-V3: 3).
    pub first_k_dense_replace: i64,
}

impl ExpertsConfig {
    /// Returns the defaults of transformers, or `None` for a family without experts, or with experts in some models only
    /// (Gemma 4).
    pub(super) fn of(family: LlamaFamily) -> Option<ExpertsConfig> {
        let mixtral = ExpertsConfig::mixtral();
        match family {
            LlamaFamily::Mixtral => Some(mixtral),
            LlamaFamily::GptOss => Some(ExpertsConfig {
                num_experts: 128,
                num_experts_per_tok: 4,
                ..mixtral
            }),
            LlamaFamily::Qwen2Moe => Some(ExpertsConfig {
                num_experts: 60,
                num_experts_per_tok: 4,
                moe_intermediate_size: 1408,
                shared_expert_intermediate_size: Some(5632),
                norm_topk_prob: false,
                ..mixtral
            }),
            LlamaFamily::Qwen3Moe => Some(ExpertsConfig {
                num_experts: 128,
                num_experts_per_tok: 8,
                norm_topk_prob: false,
                ..mixtral
            }),
            LlamaFamily::Qwen3VlMoe => Some(ExpertsConfig {
                num_experts: 60,
                num_experts_per_tok: 4,
                moe_intermediate_size: 1408,
                ..mixtral
            }),
            LlamaFamily::Qwen3Next | LlamaFamily::Qwen35Moe => {
                let next = family == LlamaFamily::Qwen3Next;
                Some(ExpertsConfig {
                    num_experts: if next { 512 } else { 256 },
                    num_experts_per_tok: if next { 10 } else { 8 },
                    moe_intermediate_size: 512,
                    shared_expert_intermediate_size: Some(512),
                    ..mixtral
                })
            }
            LlamaFamily::DeepseekV2 => Some(ExpertsConfig {
                num_experts: 64,
                num_experts_per_tok: 8,
                moe_intermediate_size: 1407,
                norm_topk_prob: false,
                n_shared_experts: 2,
                ..mixtral
            }),
            LlamaFamily::DeepseekV3 => Some(ExpertsConfig {
                num_experts: 256,
                num_experts_per_tok: 8,
                moe_intermediate_size: 2048,
                n_shared_experts: 1,
                routed_scaling_factor: 2.5,
                n_group: Some(8),
                topk_group: Some(4),
                group_limited: true,
                first_k_dense_replace: 3,
                ..mixtral
            }),
            _ => None,
        }
    }

    fn mixtral() -> ExpertsConfig {
        ExpertsConfig {
            num_experts: 8,
            num_experts_per_tok: 2,
            moe_intermediate_size: 768,
            shared_expert_intermediate_size: None,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            output_router_logits: false,
            router_aux_loss_coef: 0.001,
            router_jitter_noise: 0.0,
            swiglu_alpha: 1.702,
            swiglu_limit: 7.0,
            n_shared_experts: 0,
            routed_scaling_factor: 1.0,
            n_group: None,
            topk_group: None,
            group_limited: false,
            first_k_dense_replace: 0,
        }
    }

    /// Returns those of Gemma 4 26B-A4B.
    pub(crate) fn gemma4() -> ExpertsConfig {
        ExpertsConfig {
            num_experts: 128,
            num_experts_per_tok: 8,
            moe_intermediate_size: 704,
            ..ExpertsConfig::mixtral()
        }
    }

    /// Returns the experts of a Gemma 4 with `enable_moe_block`. None of their sizes has a default.
    pub(super) fn read_gemma4(fields: &mut Fields) -> Result<Option<ExpertsConfig>> {
        let mut is_enabled = false;
        fields.boolean("enable_moe_block", &mut is_enabled)?;
        if !is_enabled {
            return Ok(None);
        }
        let mut experts = ExpertsConfig::gemma4();
        for (key, slot) in [
            ("num_experts", &mut experts.num_experts),
            ("top_k_experts", &mut experts.num_experts_per_tok),
            ("moe_intermediate_size", &mut experts.moe_intermediate_size),
        ] {
            let expected = "a positive integer for a model with `enable_moe_block`";
            let size = fields.optional_positive(key)?;
            *slot = size.ok_or_else(|| bad(key, &Value::Null, expected))?;
        }
        Ok(Some(experts))
    }

    pub(super) fn read(&mut self, family: LlamaFamily, fields: &mut Fields) -> Result<()> {
        // transformers 4 and 5 write the number under different keys.
        for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
            fields.positive(key, &mut self.num_experts)?;
        }
        fields.positive("num_experts_per_tok", &mut self.num_experts_per_tok)?;
        fields.boolean("output_router_logits", &mut self.output_router_logits)?;
        fields.number("router_aux_loss_coef", &mut self.router_aux_loss_coef)?;
        if family == LlamaFamily::Mixtral {
            return fields.number("router_jitter_noise", &mut self.router_jitter_noise);
        }
        if family == LlamaFamily::GptOss {
            fields.number("swiglu_alpha", &mut self.swiglu_alpha)?;
            return fields.number("swiglu_limit", &mut self.swiglu_limit);
        }
        fields.positive("moe_intermediate_size", &mut self.moe_intermediate_size)?;
        if family.is_deepseek() {
            return self.read_deepseek(family, fields);
        }
        if let Some(width) = &mut self.shared_expert_intermediate_size {
            fields.positive("shared_expert_intermediate_size", width)?;
        }
        if family == LlamaFamily::Qwen35Moe {
            return Ok(());
        }
        // Qwen3-VL always divides, whatever the file says.
        match family {
            LlamaFamily::Qwen3VlMoe => drop(fields.take("norm_topk_prob")),
            _ => fields.boolean("norm_topk_prob", &mut self.norm_topk_prob)?,
        }
        fields.positive("decoder_sparse_step", &mut self.decoder_sparse_step)?;
        if let Some(value) = fields.take("mlp_only_layers") {
            let expected = "a list of indices of layers";
            let listed = value.as_array().into_iter().flatten().map(Value::as_i64);
            let listed: Option<Vec<i64>> = listed.collect();
            self.mlp_only_layers = listed
                .filter(|_| value.is_array())
                .ok_or_else(|| bad("mlp_only_layers", &value, expected))?;
        }
        Ok(())
    }

    fn read_deepseek(&mut self, family: LlamaFamily, fields: &mut Fields) -> Result<()> {
        fields.boolean("norm_topk_prob", &mut self.norm_topk_prob)?;
        fields.positive("n_shared_experts", &mut self.n_shared_experts)?;
        fields.number("routed_scaling_factor", &mut self.routed_scaling_factor)?;
        // An absent key is the default, and null is one group.
        for (key, slot) in [
            ("n_group", &mut self.n_group),
            ("topk_group", &mut self.topk_group),
        ] {
            if let Some(value) = fields.take_nullable(key) {
                *slot = value.map(|value| positive(key, &value)).transpose()?;
            }
        }
        if let Some(value) = fields.take("first_k_dense_replace") {
            let layers = value.as_i64().filter(|&layers| layers >= 0);
            self.first_k_dense_replace = layers
                .ok_or_else(|| bad("first_k_dense_replace", &value, "an integer of at least 0"))?;
        }
        // transformers does not read it.
        let mut frequency = 1;
        fields.positive("moe_layer_freq", &mut frequency)?;
        if frequency != 1 {
            let supported = "1, experts in all layers after the first ones";
            return Err(Error::unsupported("moe_layer_freq", frequency, supported));
        }
        // transformers' models of both families have no balancing loss.
        if self.output_router_logits {
            let supported = "false, as these models have no balancing loss";
            return Err(Error::unsupported("output_router_logits", true, supported));
        }
        if family == LlamaFamily::DeepseekV3 {
            return Ok(());
        }
        self.group_limited = match fields.string("topk_method")?.as_deref() {
            None | Some("greedy") => false,
            Some("group_limited_greedy") => true,
            Some(other) => {
                let supported = "greedy, group_limited_greedy";
                let found = format!("{other:?}");
                return Err(Error::unsupported("topk_method", found, supported));
            }
        };
        match self.norm_topk_prob {
            true => Err(Error::unsupported(
                "norm_topk_prob",
                true,
                "false for deepseek_v2",
            )),
            false => Ok(()),
        }
    }

    /// Returns the inner width of the block that computes every token, if there is one.
    pub(crate) fn shared_width(&self) -> Option<i64> {
        let of_deepseek = self
            .n_shared_experts
            .saturating_mul(self.moe_intermediate_size);
        let of_deepseek = (of_deepseek > 0).then_some(of_deepseek);
        self.shared_expert_intermediate_size.or(of_deepseek)
    }

    /// Returns the number of groups of experts, and of those that a token's experts are chosen from, if that is not all.
    pub(crate) fn groups(&self) -> Option<[i64; 2]> {
        let groups = self.n_group.unwrap_or(1);
        let chosen = self.topk_group.unwrap_or(groups);
        (self.group_limited && chosen < groups).then_some([groups, chosen])
    }

    pub(super) fn write(&self, family: LlamaFamily, map: &mut Map<String, Value>) {
        if family == LlamaFamily::Gemma4 {
            map.insert("enable_moe_block".to_owned(), true.into());
            for (key, size) in [
                (Self::count_key(family), self.num_experts),
                (Self::per_token_key(family), self.num_experts_per_tok),
                ("moe_intermediate_size", self.moe_intermediate_size),
            ] {
                map.insert(key.to_owned(), size.into());
            }
            return;
        }
        let common = json!({
            Self::count_key(family): self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "output_router_logits": self.output_router_logits,
            "router_aux_loss_coef": self.router_aux_loss_coef,
        });
        let own = match family {
            LlamaFamily::Mixtral => json!({"router_jitter_noise": self.router_jitter_noise}),
            LlamaFamily::DeepseekV2 | LlamaFamily::DeepseekV3 => {
                if family == LlamaFamily::DeepseekV2 {
                    let method = match self.group_limited {
                        true => "group_limited_greedy",
                        false => "greedy",
                    };
                    map.insert("topk_method".to_owned(), method.into());
                }
                json!({
                    "moe_intermediate_size": self.moe_intermediate_size,
                    "norm_topk_prob": self.norm_topk_prob,
                    "n_shared_experts": self.n_shared_experts,
                    "routed_scaling_factor": self.routed_scaling_factor,
                    "n_group": self.n_group,
                    "topk_group": self.topk_group,
                    "first_k_dense_replace": self.first_k_dense_replace,
                })
            }
            LlamaFamily::GptOss => json!({
                "swiglu_alpha": self.swiglu_alpha,
                "swiglu_limit": self.swiglu_limit,
            }),
            LlamaFamily::Qwen35Moe => json!({"moe_intermediate_size": self.moe_intermediate_size}),
            _ => json!({
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": self.decoder_sparse_step,
                "mlp_only_layers": self.mlp_only_layers,
            }),
        };
        if let Some(width) = self.shared_expert_intermediate_size {
            map.insert("shared_expert_intermediate_size".to_owned(), width.into());
        }
        for object in [common, own] {
            if let Value::Object(entries) = object {
                map.extend(entries);
            }
        }
    }

    /// Returns the key of the number of experts in the files of the hub.
    pub(super) fn count_key(family: LlamaFamily) -> &'static str {
        match family {
            LlamaFamily::Mixtral | LlamaFamily::GptOss => "num_local_experts",
            LlamaFamily::DeepseekV2 | LlamaFamily::DeepseekV3 => "n_routed_experts",
            _ => "num_experts",
        }
    }

    /// Returns the key of the number of experts of a token.
    fn per_token_key(family: LlamaFamily) -> &'static str {
        match family {
            LlamaFamily::Gemma4 => "top_k_experts",
            _ => "num_experts_per_tok",
        }
    }

    /// Returns `true` if layer `layer` has experts.
    pub(crate) fn is_sparse(&self, layer: i64) -> bool {
        // `max(1)`: this runs before the configuration is known to be valid, too.
        layer >= self.first_k_dense_replace
            && !self.mlp_only_layers.contains(&layer)
            && (layer + 1) % self.decoder_sparse_step.max(1) == 0
    }

    fn check_groups(&self, family: LlamaFamily) -> Result<()> {
        if self.routed_scaling_factor <= 0.0 || !self.routed_scaling_factor.is_finite() {
            let found = self.routed_scaling_factor.into();
            return Err(bad("routed_scaling_factor", &found, "a positive number"));
        }
        if self.n_shared_experts == 0 && family.is_deepseek() {
            return Err(bad("n_shared_experts", &0.into(), "a positive integer"));
        }
        if !family.is_deepseek() {
            return self.check_no_groups(family);
        }
        let groups = self.n_group.unwrap_or(1);
        if self.num_experts % groups != 0 {
            let expected = format!(
                "a divisor of {} ({})",
                Self::count_key(family),
                self.num_experts
            );
            return Err(bad("n_group", &groups.into(), &expected));
        }
        let Some([groups, chosen]) = self.groups() else {
            return Ok(());
        };
        let size = self.num_experts / groups;
        // A group's score is the sum of its two best.
        if size < 2 && family == LlamaFamily::DeepseekV3 {
            let expected = format!(
                "at most {}, for two experts in a group",
                self.num_experts / 2
            );
            return Err(bad("n_group", &groups.into(), &expected));
        }
        if self.num_experts_per_tok > chosen * size {
            let expected = format!(
                "at most {}, the experts of topk_group groups",
                chosen * size
            );
            return Err(bad(
                "num_experts_per_tok",
                &self.num_experts_per_tok.into(),
                &expected,
            ));
        }
        Ok(())
    }

    /// Refuses what only the models of DeepSeek have.
    fn check_no_groups(&self, family: LlamaFamily) -> Result<()> {
        for (key, value, wanted) in [
            ("n_shared_experts", json!(self.n_shared_experts), json!(0)),
            (
                "first_k_dense_replace",
                json!(self.first_k_dense_replace),
                json!(0),
            ),
            ("n_group", json!(self.n_group.unwrap_or(1)), json!(1)),
            ("topk_group", json!(self.topk_group.unwrap_or(1)), json!(1)),
            ("group_limited", json!(self.group_limited), json!(false)),
            (
                "routed_scaling_factor",
                json!(self.routed_scaling_factor),
                json!(1.0),
            ),
        ] {
            if value != wanted {
                let expected = format!("{wanted} for the family {}", family.model_type());
                return Err(bad(key, &value, &expected));
            }
        }
        Ok(())
    }

    pub(super) fn validate(&self, family: LlamaFamily, layers: i64) -> Result<()> {
        let key = Self::count_key(family);
        for (key, value) in [
            (key, self.num_experts),
            (Self::per_token_key(family), self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("decoder_sparse_step", self.decoder_sparse_step),
            (
                "shared_expert_intermediate_size",
                self.shared_expert_intermediate_size.unwrap_or(1),
            ),
            ("n_shared_experts", self.n_shared_experts.max(1)),
            (
                "n_shared_experts · moe_intermediate_size",
                self.shared_width().unwrap_or(1),
            ),
            ("n_group", self.n_group.unwrap_or(1)),
            ("topk_group", self.topk_group.unwrap_or(1)),
        ] {
            check_size(key, value)?;
        }
        let defaults = ExpertsConfig::of(family);
        let needs_shared =
            defaults.is_some_and(|own| own.shared_expert_intermediate_size.is_some());
        if needs_shared != self.shared_expert_intermediate_size.is_some() {
            let (found, needed) = match needs_shared {
                true => ("missing", "set"),
                false => ("set", "`None`"),
            };
            let key = "shared_expert_intermediate_size";
            let expected = format!("{needed} for the family {}", family.model_type());
            return Err(bad(key, &found.into(), &expected));
        }
        // The sizes are below 2^31 and the layers below 2^17.
        if self.num_experts * layers > MAX_EXPERTS {
            let most = MAX_EXPERTS / layers;
            let expected = format!("at most {most} for {layers} layers");
            return Err(bad(key, &self.num_experts.into(), &expected));
        }
        self.check_groups(family)?;
        if self.num_experts_per_tok > self.num_experts {
            let expected = format!("at most {key} ({})", self.num_experts);
            let found = self.num_experts_per_tok.into();
            return Err(bad(Self::per_token_key(family), &found, &expected));
        }
        if let Some(layer) = self
            .mlp_only_layers
            .iter()
            .find(|layer| !(0..layers).contains(*layer))
        {
            let expected = format!("a list of indices in 0..{layers}, those of the layers");
            return Err(bad("mlp_only_layers", &(*layer).into(), &expected));
        }
        if !(self.router_aux_loss_coef >= 0.0 && self.router_aux_loss_coef.is_finite()) {
            let found = self.router_aux_loss_coef.into();
            return Err(bad("router_aux_loss_coef", &found, "0 or positive"));
        }
        if !(self.swiglu_limit > 0.0 && self.swiglu_limit.is_finite()) {
            return Err(bad("swiglu_limit", &self.swiglu_limit.into(), "positive"));
        }
        if !self.swiglu_alpha.is_finite() {
            return Err(bad("swiglu_alpha", &self.swiglu_alpha.into(), "finite"));
        }
        // Below 1, so that the factors of the noise are positive.
        if !(0.0..1.0).contains(&self.router_jitter_noise) {
            let found = self.router_jitter_noise.into();
            return Err(bad("router_jitter_noise", &found, "at least 0 and below 1"));
        }
        Ok(())
    }
}
