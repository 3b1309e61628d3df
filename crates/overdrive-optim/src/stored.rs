//! What all stored optimizer states have in common: groups of named parameters, and complaints.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Names listed in an error before it says how many more there are.
const MAX_LISTED: usize = 8;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupMetadata {
    pub(crate) name: String,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    pub(crate) parameters: BTreeSet<String>,
}

/// The name of a tensor in a state.
pub(crate) fn key(parameter: &str, part: &str) -> String {
    format!("{parameter}.{part}")
}

pub(crate) fn mismatch(problem: String) -> Error {
    Error::StateMismatch { problem }
}

/// Whether every parameter lies in the same group here and there.
pub(crate) fn check_groups(own: &[GroupMetadata], stored: &[GroupMetadata]) -> Result<()> {
    let place = |groups: &[GroupMetadata]| -> BTreeMap<String, String> {
        let pairs = groups.iter().flat_map(|group| {
            group
                .parameters
                .iter()
                .map(|p| (p.clone(), group.name.clone()))
        });
        pairs.collect()
    };
    let (own, stored) = (place(own), place(stored));
    let missing = own.keys().filter(|name| !stored.contains_key(*name));
    let unexpected = stored.keys().filter(|name| !own.contains_key(*name));
    let moved = own.iter().filter(|(name, group)| {
        stored
            .get(*name)
            .is_some_and(|stored_group| stored_group != *group)
    });
    complain([
        ("parameters missing from it", missing.cloned().collect()),
        (
            "parameters that this optimizer does not have",
            unexpected.cloned().collect(),
        ),
        (
            "parameters in another group",
            moved
                .map(|(name, group)| format!("{name} (here `{group}`, there `{}`)", stored[name]))
                .collect(),
        ),
    ])
}

/// An error that lists what was found under each heading, or success if there is nothing.
pub(crate) fn complain<const N: usize>(findings: [(&str, Vec<String>); N]) -> Result<()> {
    let problems: Vec<String> = findings
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(heading, names)| {
            let mut listed = names[..names.len().min(MAX_LISTED)].join(", ");
            if names.len() > MAX_LISTED {
                listed += &format!(" and {} more", names.len() - MAX_LISTED);
            }
            format!("{heading}: {listed}")
        })
        .collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(mismatch(problems.join("; ")))
    }
}
