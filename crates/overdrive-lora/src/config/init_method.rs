use std::fmt;

use serde_json::Value;

use crate::Result;

/// The initial values of A and B (`init_lora_weights`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InitLoraWeights {
    /// `true`: A uniform in `±1/√I` (`kaiming_uniform(a=√5)`), B zero. The adapter changes nothing at first.
    #[default]
    Default,
    /// `false`: A and B both as `nn.Linear` initialises them; for tests.
    Random,
    /// `"gaussian"`: A normal with deviation `1/r`, B zero.
    Gaussian,
    /// `"orthogonal"`: A and B of orthogonal subspaces; the weight is unchanged. Even ranks only.
    Orthogonal,
    /// `"olora"`: the QR decomposition of the weight, from which the adapter is subtracted (Büyükakyüz 2024,
    /// arXiv:2406.01775).
    Olora,
    /// `"pissa"`: the largest singular values of the weight, from which the adapter is subtracted (Meng et
    /// al. 2024, arXiv:2404.02948).
    Pissa,
    /// `"pissa_niter_N"`: PiSSA by N rounds of subspace iteration.
    PissaFast(u32),
}

impl InitLoraWeights {
    /// Returns `true` if the initialisation changes the layer's weight.
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
        let refused = || {
            let expected = "true, false, \"gaussian\", \"orthogonal\", \"olora\", \"pissa\" or \
                            \"pissa_niter_N\"";
            overdrive_core::Error::option("init_lora_weights", value, expected)
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
                    None => Err(refused().into()),
                },
            },
            _ => Err(refused().into()),
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
