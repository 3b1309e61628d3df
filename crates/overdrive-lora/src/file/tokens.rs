//! Rows of embeddings and heads that PEFT has trained for some tokens (`trainable_token_indices`). As a whole embedding in a
//! file, they replace those of the model for all of its adapters.

use std::collections::HashMap;

use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_safetensors::StoredTensor;
use tch::Tensor;

use super::load::EMBEDDINGS;
use crate::config::TokenIndices;
use crate::host::{visit_linears, visit_parameters};
use crate::{AdapterProblems, LoraConfig, Result};

/// Calls `visit` with the weight of each module whose tokens `config` names: the key of its rows in the file, the name of
/// the weight, the weight, and the tokens.
pub(super) fn visit_tokens<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    mut visit: impl FnMut(String, &str, &Tensor, &[i64]) -> Result<()>,
) -> Result<()> {
    let Some(indices) = &config.trainable_token_indices else {
        return Ok(());
    };
    let mut see = |weight_name: &str, weight: &Tensor| {
        let Some(module) = weight_name.strip_suffix(".weight") else {
            return Ok(());
        };
        let tokens = match indices {
            TokenIndices::OfEmbedding(tokens) => {
                let is_embedding = EMBEDDINGS.iter().any(|end| weight_name.ends_with(end));
                is_embedding.then_some(tokens)
            }
            TokenIndices::OfModules(modules) => {
                let own = |name: &String| format!(".{module}").ends_with(&format!(".{name}"));
                modules
                    .iter()
                    .find(|(name, _)| own(name))
                    .map(|(_, tokens)| tokens)
            }
        };
        match tokens {
            None => Ok(()),
            Some(tokens) => {
                let key = format!("{module}.token_adapter.trainable_tokens_delta");
                visit(key, weight_name, weight, tokens)
            }
        }
    };
    visit_parameters(host, |name, weight| see(name, weight))?;
    visit_linears(host, |name, linear| match linear.weight() {
        LinearWeight::Dense {
            weight,
            transposed: false,
        } => see(&format!("{name}.weight"), weight),
        _ => Ok(()),
    })
}

/// The rows of a weight in a file, with their tokens.
pub(super) type Rows<'f> = (StoredTensor<'f>, Vec<i64>);

/// Takes the rows of tokens out of `stored`, by the names of the weights that they belong to.
pub(super) fn take_rows<'f, H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    stored: &mut HashMap<String, StoredTensor<'f>>,
    problems: &mut AdapterProblems,
) -> Result<HashMap<String, Rows<'f>>> {
    let mut rows = HashMap::new();
    visit_tokens(host, config, |key, name, weight, tokens| {
        let (vocabulary, features) = weight.size2()?;
        let Some(own) = stored.remove(&key) else {
            problems.missing.push(format!("`{key}`"));
            return Ok(());
        };
        let shape = [tokens.len() as i64, features];
        let in_vocabulary = |token: &i64| (0..vocabulary).contains(token);
        if own.shape() != shape || !tokens.iter().all(in_vocabulary) {
            problems.others.push(format!(
                "`{}` is {:?} for {} tokens where the model has {features} features and {vocabulary} tokens",
                own.name(),
                own.shape(),
                tokens.len()
            ));
            return Ok(());
        }
        rows.insert(name.to_owned(), (own, tokens.to_vec()));
        Ok(())
    })?;
    Ok(rows)
}
