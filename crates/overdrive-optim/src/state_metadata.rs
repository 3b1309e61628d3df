//! The metadata of stored optimizer states: groups of named parameters, and the errors of mismatches.

use std::collections::{BTreeMap, BTreeSet};

use overdrive_core::units::first_few;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use crate::{Error, Result};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupMetadata {
    pub(crate) name: String,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    pub(crate) parameters: BTreeSet<String>,
}

/// Returns the name of a tensor in a state.
pub(crate) fn key(parameter: &str, tensor: &str) -> String {
    format!("{parameter}.{tensor}")
}

pub(crate) fn mismatch(problem: String) -> Error {
    Error::StateMismatch { problem }
}

/// Checks that a stored state is that of the optimizer `own`, in this version of its format. It comes before the rest is
/// read: the options of another optimizer are unknown fields, whose error would not tell the mistake.
pub(crate) fn check_optimizer(metadata: &Value, own: &str, version: u32) -> Result<()> {
    if let Some(stored) = metadata["optimizer"].as_str()
        && stored != own
    {
        return Err(mismatch(format!(
            "it is the state of `{stored}`, and this optimizer is `{own}`; load it into `{stored}`, or train on \
             without it"
        )));
    }
    if let Some(stored) = metadata["format_version"].as_u64()
        && stored != u64::from(version)
    {
        return Err(mismatch(format!(
            "it has format {stored} of `{own}`; it must have format {version}"
        )));
    }
    Ok(())
}

/// Checks that every parameter is in the same group in the optimizer and in the stored state.
pub(crate) fn check_groups(own: &[GroupMetadata], stored: &[GroupMetadata]) -> Result<()> {
    let group_of = |groups: &[GroupMetadata]| -> BTreeMap<String, String> {
        let pairs = groups.iter().flat_map(|group| {
            group
                .parameters
                .iter()
                .map(|p| (p.clone(), group.name.clone()))
        });
        pairs.collect()
    };
    // By parameter, so that neither the order of groups nor that of parameters matters.
    let (own, stored) = (group_of(own), group_of(stored));
    let missing = own.keys().filter(|name| !stored.contains_key(*name));
    let unexpected = stored.keys().filter(|name| !own.contains_key(*name));
    let moved = own.iter().filter(|(name, group)| {
        stored
            .get(*name)
            .is_some_and(|stored_group| stored_group != *group)
    });
    check_empty([
        ("parameters missing from it", missing.cloned().collect()),
        (
            "parameters that this optimizer does not have",
            unexpected.cloned().collect(),
        ),
        (
            "parameters in another group",
            moved
                .map(|(name, group)| format!("{name} (in `{group}`, stored in `{}`)", stored[name]))
                .collect(),
        ),
    ])
}

/// Returns an error that lists the names under each heading, or success if there are none.
fn check_empty<const N: usize>(findings: [(&str, Vec<String>); N]) -> Result<()> {
    let problems: Vec<String> = findings
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(heading, names)| format!("{heading}: {}", first_few(&names)))
        .collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(mismatch(problems.join("; ")))
    }
}

/// Returns each stored tensor with the one of `own` of the same name that it is copied into, after checking that all of
/// them fit.
///
/// # Errors
/// [`Error::StateMismatch`] with the missing, unexpected or misshapen tensors.
pub(crate) fn paired<'t>(
    own: impl IntoIterator<Item = (String, &'t Tensor)>,
    stored: &'t BTreeMap<String, Tensor>,
) -> Result<Vec<(&'t Tensor, &'t Tensor)>> {
    let mut unexpected: BTreeSet<&String> = stored.keys().collect();
    let (mut missing, mut misshapen) = (Vec::new(), Vec::new());
    let mut pairs = Vec::new();
    for (name, to) in own {
        let Some(from) = stored.get(&name) else {
            missing.push(name);
            continue;
        };
        unexpected.remove(&name);
        // Floating-point dtypes convert to one another; codes (Uint8) do not.
        let floats = from.is_floating_point() && to.is_floating_point();
        if from.size() == to.size() && (from.kind() == to.kind() || floats) {
            pairs.push((from, to));
        } else {
            misshapen.push(format!(
                "{name} is {:?} {:?} and must be {:?} {:?}",
                from.kind(),
                from.size(),
                to.kind(),
                to.size()
            ));
        }
    }
    let unexpected = unexpected.into_iter().cloned().collect();
    check_empty([
        ("missing tensors", missing),
        ("unexpected tensors", unexpected),
        ("misshapen tensors", misshapen),
    ])?;
    Ok(pairs)
}

/// Copies stored tensors, which [`paired`] returns.
pub(crate) fn copy(pairs: Vec<(&Tensor, &Tensor)>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (from, to) in pairs {
        to.shallow_clone().f_copy_(from)?;
    }
    Ok(())
}
