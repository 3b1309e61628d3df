use tch::{Kind, Tensor};

use super::Routing;
use crate::Result;

/// The load of the experts, summed over tokens and layers, from which the balancing loss is computed.
#[derive(Debug)]
pub(crate) struct ExpertLoad {
    /// The number of tokens of each expert `(E,)`, fp32.
    tokens: Tensor,
    /// The sum of the probabilities of each expert `(E,)`, fp32 or wider; its gradient trains the router.
    probabilities: Tensor,
    /// The number of tokens of all layers, a scalar.
    rows: Tensor,
}

impl ExpertLoad {
    /// Returns the load of one layer. Only the tokens with a 1 in `mask (N,)` count, fp32; default: all.
    pub(super) fn of(routing: &Routing, mask: Option<&Tensor>) -> Result<ExpertLoad> {
        let probabilities = &routing.probabilities;
        let (kind, device) = (probabilities.kind(), probabilities.device());
        let rows = probabilities.size()[0];
        let per_token = routing.experts.size()[1];
        // A sum of rows of ones and zeros: `scatter_add_` of a GPU is not deterministic, and `bincount` reads on the
        // host.
        let ones = Tensor::f_ones([rows, per_token], (kind, device))?;
        let chosen =
            probabilities
                .f_detach()?
                .f_zeros_like()?
                .f_scatter(1, &routing.experts, &ones)?;
        let (chosen, weighted, rows) = match mask {
            None => {
                let rows = Tensor::f_full([0i64; 0], rows as f64, (kind, device))?;
                (chosen, probabilities.shallow_clone(), rows)
            }
            Some(mask) => {
                let mask = mask.f_to_kind(kind)?;
                let column = mask.f_unsqueeze(-1)?;
                let chosen = chosen.f_mul(&column)?;
                (chosen, probabilities.f_mul(&column)?, mask.f_sum(kind)?)
            }
        };
        let sum = |x: &Tensor| x.f_sum_dim_intlist([0i64].as_slice(), false, kind);
        Ok(ExpertLoad {
            tokens: sum(&chosen)?,
            probabilities: sum(&weighted)?,
            rows,
        })
    }

    fn plus(&self, other: &ExpertLoad) -> Result<ExpertLoad> {
        Ok(ExpertLoad {
            tokens: self.tokens.f_add(&other.tokens)?,
            probabilities: self.probabilities.f_add(&other.probabilities)?,
            rows: self.rows.f_add(&other.rows)?,
        })
    }

    /// Returns the sum of two loads; either may be `None`.
    pub(crate) fn sum(a: Option<ExpertLoad>, b: Option<ExpertLoad>) -> Result<Option<ExpertLoad>> {
        match (a, b) {
            (Some(a), Some(b)) => Ok(Some(a.plus(&b)?)),
            (a, b) => Ok(a.or(b)),
        }
    }

    /// Returns the balancing loss of the Switch Transformer (equations 4 to 6) as transformers'
    /// `load_balancing_loss_func` computes it: the number of experts times the sum over experts of the mean number
    /// of tokens times the mean probability.
    pub(crate) fn loss(&self) -> Result<Tensor> {
        let experts = self.tokens.size()[0];
        let tokens = self.tokens.f_div(&self.rows)?;
        let probabilities = self.probabilities.f_div(&self.rows)?;
        let sum = tokens.f_mul(&probabilities)?.f_sum(Kind::Float)?;
        Ok(sum.f_mul_scalar(experts)?)
    }
}

/// The values that a forward pass requests from the routers.
#[derive(Debug, Default)]
pub(crate) struct LoadBalance {
    /// If `true`, each layer returns the load of its experts.
    pub(crate) is_wanted: bool,
    /// The tokens that count `(N,)`, fp32; default: all.
    pub(crate) mask: Option<Tensor>,
    /// If `true`, the noise of training applies.
    pub(crate) training: bool,
}
