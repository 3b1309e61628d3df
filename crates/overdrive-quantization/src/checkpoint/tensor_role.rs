//! The role of a tensor in the model, by its name and shape.

use overdrive_safetensors::StoredTensor;
use tch::Kind;

/// The role of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The weight of a linear layer, `(I, O)` if `transposed` (GPT-2's `Conv1D`).
    Linear { transposed: bool },
    /// The token embedding.
    Embedding,
    /// The weight of an untied output head.
    Head,
    /// Any other tensor.
    Other,
}

/// Returns the role of `stored` in a model of `model_type`.
pub(super) fn role(stored: &StoredTensor<'_>, model_type: &str) -> Role {
    let float = matches!(
        stored.kind(),
        Some(Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
    );
    let Some(module) = stored.name().strip_suffix(".weight") else {
        return Role::Other;
    };
    if !float || stored.shape().len() != 2 || stored.shape().contains(&0) {
        return Role::Other;
    }
    // As in other tools, the text model is quantized and the vision tower is not.
    let towers = ["vision_tower.", "multi_modal_projector.", "visual."];
    if towers.iter().any(|tower| module.contains(tower)) {
        return Role::Other;
    }
    match module.rsplit('.').next().unwrap_or(module) {
        // GPT-NeoX's head is called `embed_out`.
        "lm_head" | "embed_out" => Role::Head,
        "embed_tokens" | "wte" => Role::Embedding,
        // The rows of these tables are looked up, not multiplied: GPT-2's positions, T5's tokens and distances.
        "wpe" | "shared" | "relative_attention_bias" => Role::Other,
        // BERT's `word_embeddings`, CLIP's `position_embedding`, BART's `embed_positions`; ELECTRA's
        // `embeddings_project` is a linear layer.
        last if last.ends_with("embedding") || last.ends_with("embeddings") => Role::Other,
        last if last.starts_with("embed_") => Role::Other,
        // `Conv1D` has its weight transposed; other models with these names use `Linear`.
        "c_attn" | "c_proj" | "c_fc" if model_type == "gpt2" => Role::Linear { transposed: true },
        // The router of a mixture of experts: small, and an error of its scores changes the choice.
        "gate" => Role::Other,
        // A norm with a two-dimensional weight is not a linear layer.
        last if last.contains("norm") => Role::Other,
        _ => Role::Linear { transposed: false },
    }
}
