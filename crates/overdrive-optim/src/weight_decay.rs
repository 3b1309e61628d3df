//! The rule that excludes parameters from weight decay.

/// The patterns by which the name of an embedding's table is recognized: `model.embed_tokens.weight` of
/// Llama and Gemma, `transformer.wte.weight` and `transformer.wpe.weight` of GPT-2, `shared.weight` of T5 and
/// `model.shared.weight` of BART.
///
/// A pattern is a substring of a component of the dotted name; between two dots it is a whole component, so that
/// `.shared.` is not in `mlp.shared_expert.up_proj.weight`.
pub const EMBEDDING_NAMES: [&str; 4] = ["embed", "wte", "wpe", ".shared."];

/// Returns `true` if a component of a dotted parameter name contains one of `patterns`, in any case, or equals one that
/// is between two dots.
pub(crate) fn name_contains<S: AsRef<str>>(name: &str, patterns: &[S]) -> bool {
    // Checkpoints write `LayerNorm` as well as `layer_norm`.
    let name = name.to_lowercase();
    patterns.iter().any(|pattern| {
        let pattern = pattern.as_ref().to_lowercase();
        let whole = pattern
            .strip_prefix('.')
            .and_then(|rest| rest.strip_suffix('.'));
        name.split('.').any(|component| match whole {
            Some(whole) => component == whole,
            None => component.contains(&pattern),
        })
    })
}

/// The rule that excludes parameters from weight decay.
///
/// A parameter is excluded if it has fewer than `min_decay_dim` dimensions, or if a component of its dotted name
/// contains one of `no_decay_names` (case-insensitive; a name between two dots is a whole component):
/// `model.layers.0.input_layernorm.weight` contains `norm`. The default is the rule of transformers
/// (`get_decay_parameter_names`): biases and norms are excluded, and embeddings decay, including one that the head
/// shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecayRule {
    /// The minimum number of dimensions of a decayed parameter. Default: 2, which excludes biases and the
    /// weights of norms whatever their names.
    pub min_decay_dim: usize,
    /// The substrings of name components that exclude a parameter. Default: `bias`, `norm`, `ln_`.
    pub no_decay_names: Vec<String>,
}

impl Default for DecayRule {
    fn default() -> Self {
        let names = ["bias", "norm", "ln_"];
        Self {
            min_decay_dim: 2,
            no_decay_names: names.map(String::from).to_vec(),
        }
    }
}

impl DecayRule {
    /// Returns the default rule that excludes embeddings ([`EMBEDDING_NAMES`]) too, as in the code of GPT-2's
    /// reproductions (minGPT) and OLMo's `decay_embeddings: false`. A head that shares the table of the
    /// embedding is excluded with it; one with a weight of its own decays.
    #[must_use]
    pub fn without_embeddings() -> Self {
        let mut rule = Self::default();
        rule.no_decay_names
            .extend(EMBEDDING_NAMES.map(String::from));
        rule
    }

    /// Returns the rule of nanoGPT, which uses only the number of dimensions.
    #[must_use]
    pub fn by_dimension() -> Self {
        Self {
            min_decay_dim: 2,
            no_decay_names: Vec::new(),
        }
    }

    /// Returns `true` if a parameter of this name and number of dimensions is decayed.
    #[must_use]
    pub fn decays(&self, name: &str, dim: usize) -> bool {
        dim >= self.min_decay_dim && !name_contains(name, &self.no_decay_names)
    }
}
