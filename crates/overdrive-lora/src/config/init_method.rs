use std::fmt;

use overdrive_core::{Error, check_option};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Value, json};

use crate::Result;

/// The values of `init_lora_weights`.
const ALLOWED: &str = "true, false, \"gaussian\", \"orthogonal\", \"olora\", \"pissa\", \"pissa_niter_N\", \"loftq\", \"eva\", \"corda\", \"mica\" or \"lora_ga\"";

/// The initial values of A and B (`init_lora_weights`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InitLoraWeights {
    /// `true`: A is uniform in `±1/√I` (`kaiming_uniform(a=√5)`), B is zero. The adapter changes nothing at first.
    #[default]
    Default,
    /// `false`: A and B are both initialized as `nn.Linear` does; for tests.
    Random,
    /// `"gaussian"`: A is normal with standard deviation `1/r`, B is zero.
    Gaussian,
    /// `"orthogonal"`: A and B span orthogonal subspaces; the weight is unchanged. Even ranks only.
    Orthogonal,
    /// `"olora"`: the QR decomposition of the weight; the adapter is subtracted from the weight (Büyükakyüz 2024,
    /// arXiv:2406.01775).
    Olora,
    /// `"pissa"`: the largest singular values of the weight; the adapter is subtracted from the weight (Meng et
    /// al. 2024, arXiv:2404.02948).
    Pissa,
    /// `"pissa_niter_N"`: PiSSA with N rounds of subspace iteration.
    PissaFast(u32),
    /// `"loftq"`: the weight is replaced by its quantized values, and A and B are the largest singular values of
    /// the rounding error (Li et al. 2023, arXiv:2310.08659).
    Loftq(LoftqConfig),
    /// `"eva"`: A from the singular vectors of the layer's inputs, B zero (Paischer et al. 2024,
    /// arXiv:2410.07170). Only for loading adapters: this crate does not initialize from inputs.
    Eva,
    /// `"corda"`: the part of the weight that the covariance of its inputs selects; it is subtracted from the weight
    /// (Yang et al. 2024, arXiv:2406.05223). Only for loading adapters over the residual weights: see
    /// [`LoadAdapterOptions::residual_base`](crate::LoadAdapterOptions::residual_base).
    Corda,
    /// `"mica"`: B from the singular vectors of the weight's smallest singular values, A zero. Only for loading frozen
    /// adapters: PEFT trains A alone, and this crate both.
    Mica,
    /// `"lora_ga"`: A and B from the singular vectors of the weight's gradient; the adapter is subtracted from the
    /// weight (Wang et al. 2024, arXiv:2407.05000). Only for loading adapters over the residual weights: see
    /// [`LoadAdapterOptions::residual_base`](crate::LoadAdapterOptions::residual_base).
    LoraGa,
}

/// The options of [`InitLoraWeights::Loftq`]: PEFT's `loftq_config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoftqConfig {
    /// The number of bits: 4 (NF4 in blocks of 64, the default) or 8 (integers by row).
    pub loftq_bits: u8,
    /// The number of rounds of quantization and decomposition; default 1.
    pub loftq_iter: u32,
}

impl Default for LoftqConfig {
    fn default() -> Self {
        LoftqConfig {
            loftq_bits: 4,
            loftq_iter: 1,
        }
    }
}

impl LoftqConfig {
    fn validate(self) -> Result<()> {
        let (bits, rounds) = (self.loftq_bits, self.loftq_iter);
        check_option(matches!(bits, 4 | 8), "loftq_bits", bits, "4 or 8")?;
        Ok(check_option(rounds > 0, "loftq_iter", rounds, "positive")?)
    }
}

impl InitLoraWeights {
    /// Returns `true` if the initialization changes the layer's weight: the model without its adapter is then another one.
    pub fn changes_base(self) -> bool {
        matches!(
            self,
            InitLoraWeights::Olora
                | InitLoraWeights::Pissa
                | InitLoraWeights::PissaFast(_)
                | InitLoraWeights::Loftq(_)
                | InitLoraWeights::Corda
                | InitLoraWeights::LoraGa
        )
    }

    /// Checks the options of the method.
    pub(super) fn validate(self) -> Result<()> {
        match self {
            InitLoraWeights::Loftq(config) => config.validate(),
            _ => Ok(()),
        }
    }

    /// Returns the object `loftq_config`, which is empty for the other methods.
    pub(super) fn loftq_json(self) -> Value {
        match self {
            InitLoraWeights::Loftq(config) => json!(config),
            _ => json!({}),
        }
    }

    pub(super) fn to_json(self) -> Value {
        match self {
            InitLoraWeights::Default => Value::Bool(true),
            InitLoraWeights::Random => Value::Bool(false),
            other => Value::String(other.to_string()),
        }
    }

    /// Reads the value of `init_lora_weights` and, for `"loftq"`, the object `loftq_config` beside it.
    pub(super) fn from_json(value: &Value, loftq: Option<&Value>) -> Result<InitLoraWeights> {
        let refused = || Error::option("init_lora_weights", value, ALLOWED);
        match value {
            Value::Bool(true) => Ok(InitLoraWeights::Default),
            Value::Bool(false) => Ok(InitLoraWeights::Random),
            Value::String(name) => match name.to_lowercase().as_str() {
                "gaussian" => Ok(InitLoraWeights::Gaussian),
                "orthogonal" => Ok(InitLoraWeights::Orthogonal),
                "olora" => Ok(InitLoraWeights::Olora),
                "pissa" => Ok(InitLoraWeights::Pissa),
                "loftq" => loftq_config(loftq).map(InitLoraWeights::Loftq),
                "eva" => Ok(InitLoraWeights::Eva),
                "corda" => Ok(InitLoraWeights::Corda),
                "mica" => Ok(InitLoraWeights::Mica),
                "lora_ga" => Ok(InitLoraWeights::LoraGa),
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

/// The value in `adapter_config.json`.
impl Serialize for InitLoraWeights {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// Reads the value in `adapter_config.json`; `"loftq"` has its default options.
impl<'de> Deserialize<'de> for InitLoraWeights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let loftq = json!(LoftqConfig::default());
        Self::from_json(&value, Some(&loftq)).map_err(|_| de::Error::custom(ALLOWED))
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
            InitLoraWeights::Loftq(_) => f.write_str("loftq"),
            InitLoraWeights::Eva => f.write_str("eva"),
            InitLoraWeights::Corda => f.write_str("corda"),
            InitLoraWeights::Mica => f.write_str("mica"),
            InitLoraWeights::LoraGa => f.write_str("lora_ga"),
        }
    }
}

/// Reads the object `loftq_config`, which PEFT requires for `"loftq"`.
fn loftq_config(object: Option<&Value>) -> Result<LoftqConfig> {
    let given = object.filter(|object| object.as_object().is_some_and(|keys| !keys.is_empty()));
    let expected =
        "an object with `loftq_bits` and `loftq_iter` beside `init_lora_weights` \"loftq\"";
    let Some(object) = given else {
        let found = object.map_or("missing".to_owned(), Value::to_string);
        return Err(Error::option("loftq_config", found, expected).into());
    };
    LoftqConfig::deserialize(object)
        .map_err(|_| Error::option("loftq_config", object, expected).into())
}
