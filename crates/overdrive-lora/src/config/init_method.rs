use std::fmt;

use serde_json::Value;

use crate::{Error, Result};

/// How the matrices of an adapter start (`init_lora_weights`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InitLoraWeights {
    /// `true`: A uniform within `±1/√I` (`kaiming_uniform(a=√5)`), B zero. The adapter changes nothing at
    /// first.
    #[default]
    Default,
    /// `false`: A and B both as `nn.Linear` draws them. For tests.
    Random,
    /// `"gaussian"`: A normal with deviation `1/r`, B zero.
    Gaussian,
    /// `"orthogonal"`: A and B of orthogonal subspaces, the weight as it is. Even ranks only.
    Orthogonal,
    /// `"olora"`: from the QR decomposition of the weight, which keeps the rest (Büyükakyüz 2024,
    /// arXiv:2406.01775).
    Olora,
    /// `"pissa"`: the largest singular values of the weight, which keeps the rest (Meng et al. 2024,
    /// arXiv:2404.02948).
    Pissa,
    /// `"pissa_niter_N"`: the same by N rounds of subspace iteration.
    PissaFast(u32),
}

impl InitLoraWeights {
    /// Whether the weight under the adapter is changed.
    pub(crate) fn changes_base(self) -> bool {
        matches!(
            self,
            InitLoraWeights::Olora | InitLoraWeights::Pissa | InitLoraWeights::PissaFast(_)
        )
    }

    pub(super) fn to_json(self) -> Value {
        match self {
            InitLoraWeights::Default => Value::Bool(true),
            InitLoraWeights::Random => Value::Bool(false),
            other => Value::String(other.to_string()),
        }
    }

    pub(super) fn from_json(value: &Value) -> Result<InitLoraWeights> {
        let refused = || Error::BadConfig {
            key: "init_lora_weights".to_owned(),
            found: value.to_string(),
            expected: "true, false, \"gaussian\", \"orthogonal\", \"olora\", \"pissa\" or \
                       \"pissa_niter_N\""
                .to_owned(),
        };
        match value {
            Value::Bool(true) => Ok(InitLoraWeights::Default),
            Value::Bool(false) => Ok(InitLoraWeights::Random),
            Value::String(name) => match name.to_lowercase().as_str() {
                "gaussian" => Ok(InitLoraWeights::Gaussian),
                "orthogonal" => Ok(InitLoraWeights::Orthogonal),
                "olora" => Ok(InitLoraWeights::Olora),
                "pissa" => Ok(InitLoraWeights::Pissa),
                other => match other.strip_prefix("pissa_niter_") {
                    Some(rounds) => {
                        let rounds = rounds.parse().map_err(|_| refused())?;
                        Ok(InitLoraWeights::PissaFast(rounds))
                    }
                    None => Err(refused()),
                },
            },
            _ => Err(refused()),
        }
    }
}

impl fmt::Display for InitLoraWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InitLoraWeights::Default => f.write_str("true"),
            InitLoraWeights::Random => f.write_str("false"),
            InitLoraWeights::Gaussian => f.write_str("gaussian"),
            InitLoraWeights::Orthogonal => f.write_str("orthogonal"),
            InitLoraWeights::Olora => f.write_str("olora"),
            InitLoraWeights::Pissa => f.write_str("pissa"),
            InitLoraWeights::PissaFast(rounds) => write!(f, "pissa_niter_{rounds}"),
        }
    }
}
