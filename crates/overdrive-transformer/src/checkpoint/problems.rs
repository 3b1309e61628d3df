use std::fmt;

use overdrive_core::units::first_few;

/// The tensors of a checkpoint that do not fit its configuration. Printed, it names three of each kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckpointProblems {
    /// The parameters that no file holds.
    pub missing: Vec<String>,
    /// The tensors that are not parameters.
    pub unexpected: Vec<String>,
    /// The parameters with the wrong shape.
    pub misshapen: Vec<Misshapen>,
    /// The parameters whose format is not a floating-point dtype: name and format.
    pub unreadable: Vec<(String, String)>,
    /// The nonzero biases of quantized layers that the configuration does not have.
    pub nonzero_biases: Vec<String>,
}

/// A parameter whose shape differs from the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misshapen {
    /// The name.
    pub name: String,
    /// The shape in the file.
    pub found: Vec<i64>,
    /// The shape in the configuration.
    pub expected: Vec<i64>,
}

impl CheckpointProblems {
    pub(crate) fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.misshapen.is_empty()
            && self.unreadable.is_empty()
            && self.nonzero_biases.is_empty()
    }
}

impl fmt::Display for CheckpointProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let misshapen = self.misshapen.iter().map(|m| {
            format!(
                "{} (found {:?}, expected {:?})",
                m.name, m.found, m.expected
            )
        });
        let unreadable = self
            .unreadable
            .iter()
            .map(|(name, format)| format!("{name} ({format}; readable: F64, F32, F16, BF16)"));
        let groups = [
            ("missing", self.missing.clone()),
            ("unexpected", self.unexpected.clone()),
            ("of another shape", misshapen.collect()),
            ("of an unreadable format", unreadable.collect()),
            (
                "not zero, but the configuration has no such bias (its keys are `attention_bias` and `mlp_bias`)",
                self.nonzero_biases.clone(),
            ),
        ];
        let texts = groups
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{} {what}: {}", names.len(), first_few(names)));
        f.write_str(&texts.collect::<Vec<_>>().join("; "))
    }
}
