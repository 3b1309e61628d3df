mod file;
mod init_method;
mod matching;
mod targets;

pub use init_method::InitLoraWeights;
pub(crate) use matching::Matcher;
pub use targets::{LayerIndices, Names, TargetModules};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Which biases are trained beside the adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasMode {
    /// None of them.
    #[default]
    None,
    /// Every bias of the model.
    All,
    /// Those of the maps that have adapters.
    LoraOnly,
}

/// PEFT 0.21's `LoraConfig`: its keys, defaults and meaning, read from and written to
/// `adapter_config.json`.
///
/// Keys of PEFT for other methods (`megatron_config`, `layer_replication`, `trainable_token_indices`, …)
/// are accepted at their defaults and refused by name where they are set.
///
/// ```
/// use overdrive_lora::LoraConfig;
/// let config = LoraConfig::from_json(r#"{"r": 16, "target_modules": ["q_proj", "v_proj"]}"#)?;
/// assert_eq!((config.r, config.lora_alpha), (16, 8.0));
/// # Ok::<(), overdrive_lora::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// The rank; default 8.
    pub r: i64,
    /// The product is scaled by `lora_alpha / r`; default 8.
    pub lora_alpha: f64,
    /// The probability that an input of A is dropped in training; default 0.
    pub lora_dropout: f64,
    /// Which linear maps get an adapter. Default `None`: PEFT's choice for the architecture (`q_proj` and
    /// `v_proj`, or GPT-2's `c_attn`).
    pub target_modules: Option<TargetModules>,
    /// Which of them do not, as names or a pattern; default none.
    pub exclude_modules: Option<Names>,
    /// Which biases are trained; default none.
    pub bias: BiasMode,
    /// Scale by `lora_alpha / √r` (Kalajdzievski 2023, arXiv:2312.03732); default false.
    pub use_rslora: bool,
    /// Learn the lengths of the weight's rows beside their direction (Liu et al. 2024,
    /// arXiv:2402.09353); default false.
    pub use_dora: bool,
    /// Modules that are trained as full copies and saved with the adapter (an embedding, the head).
    pub modules_to_save: Option<Vec<String>>,
    /// How A and B start; default [`InitLoraWeights::Default`].
    pub init_lora_weights: InitLoraWeights,
    /// The layers whose maps get an adapter; default all. Not with a pattern as `target_modules`.
    pub layers_to_transform: Option<LayerIndices>,
    /// What the list of layers is called, such as `layers` or `h`; default: whatever stands before the
    /// first number. Only with `layers_to_transform`.
    pub layers_pattern: Option<Names>,
    /// Other ranks, by name or regular expression; the first that matches in the order of the file.
    pub rank_pattern: Vec<(String, i64)>,
    /// Other alphas, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Whether B has a bias; default false.
    pub lora_bias: bool,
    /// Whether weights are stored `(I, O)`, as GPT-2's are. A map knows its layout itself: this is only
    /// kept for the file.
    pub fan_in_fan_out: bool,
    /// Where the model under the adapter is; only kept for the file.
    pub base_model_name_or_path: Option<String>,
    /// Its revision; only kept for the file.
    pub revision: Option<String>,
    /// What the model is for (`CAUSAL_LM`); only kept for the file.
    pub task_type: Option<String>,
    /// Whether the adapter is loaded frozen. Files say true, and [`load_adapter`](crate::load_adapter)
    /// goes by its options.
    pub inference_mode: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: None,
            exclude_modules: None,
            bias: BiasMode::None,
            use_rslora: false,
            use_dora: false,
            modules_to_save: None,
            init_lora_weights: InitLoraWeights::Default,
            layers_to_transform: None,
            layers_pattern: None,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            lora_bias: false,
            fan_in_fan_out: false,
            base_model_name_or_path: None,
            revision: None,
            task_type: None,
            inference_mode: false,
        }
    }
}

/// What a map's name says about its adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MapOptions {
    pub(crate) rank: i64,
    pub(crate) alpha: f64,
    pub(crate) scale: f64,
}

impl LoraConfig {
    /// Rank, alpha and scale for the map `name`.
    pub(crate) fn map_options(&self, name: &str) -> Result<MapOptions> {
        let rank = matching::pattern_value("rank_pattern", &self.rank_pattern, name)?;
        let alpha = matching::pattern_value("alpha_pattern", &self.alpha_pattern, name)?;
        let rank = rank.unwrap_or(self.r);
        let alpha = alpha.unwrap_or(self.lora_alpha);
        Ok(MapOptions {
            rank,
            alpha,
            scale: self.scale_of(rank, alpha),
        })
    }

    /// `alpha / r`, or `alpha / √r`.
    pub(crate) fn scale_of(&self, rank: i64, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Checks what PEFT checks when it makes one.
    ///
    /// # Errors
    /// [`Error::BadConfig`] naming the key.
    pub fn validate(&self) -> Result<()> {
        let bad = |key: &str, found: String, expected: &str| {
            Err(Error::BadConfig {
                key: key.to_owned(),
                found,
                expected: expected.to_owned(),
            })
        };
        if self.r < 1 {
            return bad("r", self.r.to_string(), "a positive rank");
        }
        if let Some((pattern, rank)) = self.rank_pattern.iter().find(|(_, rank)| *rank < 1) {
            return bad(
                "rank_pattern",
                format!("{rank} for `{pattern}`"),
                "positive ranks",
            );
        }
        let alphas = self.alpha_pattern.iter().map(|(_, alpha)| *alpha);
        if let Some(alpha) = alphas
            .chain([self.lora_alpha])
            .find(|alpha| !alpha.is_finite())
        {
            return bad("lora_alpha", alpha.to_string(), "a finite number");
        }
        if !(0.0..=1.0).contains(&self.lora_dropout) {
            return bad(
                "lora_dropout",
                self.lora_dropout.to_string(),
                "a probability",
            );
        }
        let by_pattern = matches!(
            self.target_modules,
            Some(TargetModules::Pattern(_) | TargetModules::AllLinear)
        );
        if by_pattern && self.layers_to_transform.is_some() {
            let expected =
                "nothing where `target_modules` is a pattern or \"all-linear\": list names instead";
            return bad("layers_to_transform", "set".to_owned(), expected);
        }
        let has_pattern = self
            .layers_pattern
            .as_ref()
            .is_some_and(|names| !names.is_empty());
        if has_pattern && self.layers_to_transform.is_none() {
            let expected = "nothing without `layers_to_transform`";
            return bad("layers_pattern", "set".to_owned(), expected);
        }
        if self.lora_bias && self.use_dora {
            return bad(
                "lora_bias",
                "true with `use_dora`".to_owned(),
                "one of the two",
            );
        }
        let plain = matches!(
            self.init_lora_weights,
            InitLoraWeights::Default | InitLoraWeights::Random
        );
        if self.lora_bias && !plain {
            let found = format!("true with `init_lora_weights` {}", self.init_lora_weights);
            return bad("lora_bias", found, "`init_lora_weights` true or false");
        }
        if self.init_lora_weights == InitLoraWeights::Orthogonal {
            let ranks = self.rank_pattern.iter().map(|(_, rank)| *rank);
            if let Some(odd) = ranks.chain([self.r]).find(|rank| rank % 2 != 0) {
                let expected = "an even rank: `init_lora_weights` is \"orthogonal\"";
                return bad("r", odd.to_string(), expected);
            }
        }
        matching::check(self)
    }
}
