mod file;
mod init_method;
mod matching;
mod targets;

pub use init_method::{InitLoraWeights, LoftqConfig};
pub(crate) use matching::{LayerParameter, Matcher};
pub use targets::{LayerIndices, Names, TargetModules, TokenIndices};

use serde::{Deserialize, Serialize};

use overdrive_core::{Error, check_option};

use crate::Result;

/// The biases that are trained beside the adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasMode {
    /// None of them.
    #[default]
    None,
    /// Every bias of the model: as in PEFT, also parameters such as T5's `relative_attention_bias.weight`.
    All,
    /// The biases of the layers that have adapters.
    LoraOnly,
}

/// The configuration of an adapter, read from and written to `adapter_config.json`. Its keys, defaults and semantics
/// are those of PEFT 0.21's `LoraConfig`.
///
/// PEFT's keys for other methods (`megatron_config`, `layer_replication`, `corda_config`, …) are
/// accepted at their defaults; if one is set, an error names it.
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
    /// The numerator of the scale `lora_alpha / r` of `B · A`; default 8.
    pub lora_alpha: f64,
    /// The dropout probability of A's inputs in training; default 0.
    pub lora_dropout: f64,
    /// The linear layers that get an adapter. Default `None`: PEFT's default for the architecture (`q_proj`
    /// and `v_proj`, or GPT-2's `c_attn`).
    pub target_modules: Option<TargetModules>,
    /// The parameters that get adapters, in the names of transformers 5, complete or only their last components: those of
    /// all experts of a layer (`mlp.experts.gate_up_proj`, `7.mlp.experts.down_proj`), or the weight of a router
    /// (`gate.weight`). `target_modules` then selects none of them. Without dropout, DoRA and `lora_bias`, as in PEFT;
    /// default none.
    pub target_parameters: Option<Vec<String>>,
    /// The layers to exclude from the targets, as names or a pattern; default none.
    pub exclude_modules: Option<Names>,
    /// The biases that are trained; default none.
    pub bias: BiasMode,
    /// If `true`, the scale is `lora_alpha / √r` (Kalajdzievski 2023, arXiv:2312.03732); default `false`.
    pub use_rslora: bool,
    /// If `true`, the norms of the weight's rows are learned beside their directions (Liu et al. 2024,
    /// arXiv:2402.09353); default `false`.
    pub use_dora: bool,
    /// The modules that are trained as full copies and saved with the adapter (an embedding, the head).
    pub modules_to_save: Option<Vec<String>>,
    /// The tokens whose rows of the embedding, or of other modules, an adapter of PEFT has trained. They are loaded and saved,
    /// and not trained here, where `modules_to_save` trains the whole embedding. Default none.
    pub trainable_token_indices: Option<TokenIndices>,
    /// The initial values of A and B; default [`InitLoraWeights::Default`].
    pub init_lora_weights: InitLoraWeights,
    /// The indices of the layers that get adapters; default all. Not with a pattern as `target_modules`.
    pub layers_to_transform: Option<LayerIndices>,
    /// The name of the model's list of layers, such as `layers` or `h`; default: the component before the
    /// first number. Only with `layers_to_transform`.
    pub layers_pattern: Option<Names>,
    /// Ranks that differ from `r`, by name or regular expression; the first match in the order of the file applies.
    pub rank_pattern: Vec<(String, i64)>,
    /// Alphas that differ from `lora_alpha`, by name or regular expression; likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// If `true`, B has a bias; default `false`.
    pub lora_bias: bool,
    /// PEFT's flag for weights that are stored as `(I, O)`, as GPT-2's are. It is only kept for the file, since
    /// layers know their layout.
    pub fan_in_fan_out: bool,
    /// The path or Hub name of the base model; only kept for the file.
    pub base_model_name_or_path: Option<String>,
    /// The revision of the base model; only kept for the file.
    pub revision: Option<String>,
    /// The task of the model (`CAUSAL_LM`); only kept for the file.
    pub task_type: Option<String>,
    /// PEFT's flag for an adapter that is loaded frozen. It is `true` in files;
    /// [`load_adapter`](crate::load_adapter) uses its own options instead.
    pub inference_mode: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: None,
            target_parameters: None,
            exclude_modules: None,
            bias: BiasMode::None,
            use_rslora: false,
            use_dora: false,
            modules_to_save: None,
            trainable_token_indices: None,
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

/// The options of one layer's adapter, which depend on its name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayerOptions {
    pub(crate) rank: i64,
    pub(crate) alpha: f64,
    pub(crate) scale: f64,
}

impl LoraConfig {
    /// Returns the rank, alpha and scale of the layer `name`.
    pub(crate) fn layer_options(&self, name: &str) -> Result<LayerOptions> {
        let parameter = self.target_parameter(name).map(|own| own.name());
        let name = parameter.as_deref().unwrap_or(name);
        let rank = matching::pattern_value("rank_pattern", &self.rank_pattern, name)?;
        let alpha = matching::pattern_value("alpha_pattern", &self.alpha_pattern, name)?;
        let rank = rank.unwrap_or(self.r);
        let alpha = alpha.unwrap_or(self.lora_alpha);
        Ok(LayerOptions {
            rank,
            alpha,
            scale: self.scale_of(rank, alpha),
        })
    }

    /// Returns `alpha / r`, or `alpha / √r` with `use_rslora`.
    pub(crate) fn scale_of(&self, rank: i64, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Checks the values as PEFT does when it creates a configuration.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the key.
    pub fn validate(&self) -> Result<()> {
        check_option(self.r >= 1, "r", self.r, "positive")?;
        if let Some((pattern, rank)) = self.rank_pattern.iter().find(|(_, rank)| *rank < 1) {
            let value = format!("{rank} for `{pattern}`");
            return Err(Error::option("rank_pattern", value, "positive").into());
        }
        let alphas = self.alpha_pattern.iter().map(|(_, alpha)| *alpha);
        for alpha in alphas.chain([self.lora_alpha]) {
            check_option(alpha.is_finite(), "lora_alpha", alpha, "finite")?;
        }
        let dropout = self.lora_dropout;
        let probability = (0.0..=1.0).contains(&dropout);
        check_option(probability, "lora_dropout", dropout, "from 0 to 1")?;
        // PEFT applies layer indices only to listed names, and refuses the two together.
        let by_pattern = matches!(
            self.target_modules,
            Some(TargetModules::Pattern(_) | TargetModules::AllLinear)
        );
        check_option(
            !by_pattern || self.layers_to_transform.is_none(),
            "layers_to_transform",
            "set",
            "unset if `target_modules` is a pattern or \"all-linear\"; list names instead",
        )?;
        let has_pattern = self.layers_pattern.as_ref().is_some_and(|p| !p.is_empty());
        check_option(
            !has_pattern || self.layers_to_transform.is_some(),
            "layers_pattern",
            "set",
            "unset without `layers_to_transform`",
        )?;
        check_option(
            !(self.lora_bias && self.use_dora),
            "lora_bias",
            "true",
            "false with `use_dora`",
        )?;
        // As in PEFT: the other initialization methods have no values for the bias of B.
        let plain = matches!(
            self.init_lora_weights,
            InitLoraWeights::Default | InitLoraWeights::Random
        );
        check_option(
            !self.lora_bias || plain,
            "lora_bias",
            "true",
            format!("false with `init_lora_weights` {}", self.init_lora_weights),
        )?;
        if self.has_target_parameters() {
            let with = "with `target_parameters`, as in PEFT";
            check_option(dropout == 0.0, "lora_dropout", dropout, format!("0 {with}"))?;
            check_option(!self.use_dora, "use_dora", true, format!("false {with}"))?;
            check_option(!self.lora_bias, "lora_bias", true, format!("false {with}"))?;
            let bias = format!("{:?}", self.bias).to_lowercase();
            let expected = "none with `target_parameters`";
            check_option(self.bias == BiasMode::None, "bias", bias, expected)?;
            let plain = plain || self.init_lora_weights == InitLoraWeights::Gaussian;
            let expected = format!("true, false or gaussian {with}");
            check_option(plain, "init_lora_weights", self.init_lora_weights, expected)?;
        }
        self.init_lora_weights.validate()?;
        if self.init_lora_weights == InitLoraWeights::Orthogonal {
            // A and B each get half of the rows of one orthogonal r × r matrix.
            let ranks = self.rank_pattern.iter().map(|(_, rank)| *rank);
            for rank in ranks.chain([self.r]) {
                let expected = "even if `init_lora_weights` is \"orthogonal\"";
                check_option(rank % 2 == 0, "r", rank, expected)?;
            }
        }
        matching::check(self)
    }
}
