//! The tokens that the host is expected to choose, found on the device, so that the next step of the model begins with them.

use tch::{Kind, Tensor};

use super::{RowPlan, upload};
use crate::Result;

/// The way in which a device finds the token that the host will choose. It may differ where rounding or equal scores
/// decide.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Expected {
    /// The best one.
    Best,
    /// The one that it draws from the whole distribution.
    Drawn,
    /// The one that it draws from the candidates.
    Cut(DeviceCut),
    /// It does not find it.
    Unknown,
}

/// The cuts of the candidates, and the number in [0, 1) that selects one.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DeviceCut {
    /// 0 for all.
    pub(crate) top_k: usize,
    /// 1 for all.
    pub(crate) top_p: f64,
    /// 0 for all.
    pub(crate) min_p: f64,
    pub(crate) uniform: f64,
}

/// The function that a step calls with the expected tokens, i64 `(B, 1)` on the device.
pub(crate) type Ahead<'a> = &'a mut dyn FnMut(&Tensor) -> Result<()>;

/// Decides whether the next step begins with the expected tokens.
#[derive(Debug, Default)]
pub(crate) struct LookAhead {
    /// The number of steps that begin without.
    pause: u32,
}

impl LookAhead {
    /// The number of steps after an unexpected token: a flat distribution, whose tokens the device does not find, costs a
    /// discarded step in so many.
    const PAUSE: u32 = 32;

    /// Returns `true` if the next step may begin with the expected tokens. Called once a step.
    pub(crate) fn is_wanted(&mut self) -> bool {
        let is_wanted = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        is_wanted
    }

    /// Records a step that was discarded.
    pub(crate) fn missed(&mut self) {
        self.pause = Self::PAUSE;
    }
}

/// The results by which a device finds the expected tokens.
#[derive(Debug)]
pub(super) struct Found {
    /// The best token of each row, i64 `(B, 1)`.
    pub(super) best: Tensor,
    /// The token that was drawn from the whole distribution, or the size of the vocabulary.
    pub(super) drawn: Option<Tensor>,
    /// The best scores, best first, and their tokens.
    pub(super) top: Option<(Tensor, Tensor)>,
    /// The sum over all tokens.
    pub(super) total: Option<Tensor>,
}

impl Found {
    /// Returns the expected tokens, i64 `(B, 1)`.
    pub(super) fn expected(&self, plans: &[&RowPlan], vocabulary: usize) -> Result<Tensor> {
        let device = self.best.device();
        let is = |wanted: fn(&Expected) -> bool| -> Result<Tensor> {
            let rows: Vec<bool> = plans.iter().map(|plan| wanted(&plan.expected)).collect();
            Ok(upload(Tensor::f_from_slice(&rows)?, device)?.f_unsqueeze(1)?)
        };
        let mut tokens = self.best.shallow_clone();
        if let Some(drawn) = &self.drawn {
            let rows = is(|expected| *expected == Expected::Drawn)?;
            let rows = rows.f_logical_and(&drawn.f_lt(vocabulary as i64)?)?;
            tokens = drawn.f_to_kind(Kind::Int64)?.f_where_self(&rows, &tokens)?;
        }
        if let Some((scores, ids)) = &self.top {
            let rows = is(|expected| matches!(expected, Expected::Cut(_)))?;
            let cut = self.cut(scores, ids, plans)?;
            tokens = cut.f_where_self(&rows, &tokens)?;
        }
        Ok(tokens)
    }

    /// Draws from the candidates as [`Candidates`](crate::sampler::cuts::Candidates) does.
    fn cut(&self, scores: &Tensor, ids: &Tensor, plans: &[&RowPlan]) -> Result<Tensor> {
        let most = scores.size()[1];
        let given = plans.iter().map(|plan| {
            let cut = match plan.expected {
                Expected::Cut(cut) => cut,
                _ => DeviceCut::default(),
            };
            let last = match cut.top_k {
                0 => most - 1,
                k => most.min(k as i64) - 1,
            };
            let top_p = match cut.top_p {
                // Above 0, because one token always stays.
                p if p < 1.0 => p.max(f64::MIN_POSITIVE),
                _ => f64::INFINITY,
            };
            let with_total = f64::from(u8::from(plan.with_total));
            let temperature = f64::from(plan.temperature);
            [
                temperature,
                last as f64,
                top_p,
                cut.min_p,
                cut.uniform,
                with_total,
            ]
        });
        let given: Vec<f64> = given.flatten().collect();
        let given = upload(Tensor::f_from_slice(&given)?, scores.device())?.f_view([-1, 6])?;
        let column = |index: i64| given.f_narrow(1, index, 1);
        let temperature = column(0)?.f_to_kind(Kind::Float)?;
        let scaled = scores.f_div(&temperature)?;
        let weights = scaled.f_sub(&scaled.f_narrow(1, 0, 1)?)?.f_exp()?;
        let kth = scores.f_gather(1, &column(1)?.f_to_kind(Kind::Int64)?, false)?;
        let kept = scores.f_ge_tensor(&kth)?;
        // In f64, as on the host.
        let weights = weights.f_to_kind(Kind::Double)?.f_mul(&kept)?;
        let sums = weights.f_cumsum(1, Kind::Double)?;
        let own = sums.f_narrow(1, most - 1, 1)?;
        let total = match &self.total {
            Some(total) => total.f_where_self(&column(5)?.f_gt(0.0)?, &own)?,
            None => own,
        };
        let kept = sums
            .f_sub(&weights)?
            .f_lt_tensor(&column(2)?.f_mul(&total)?)?;
        let kept = kept.f_logical_and(&weights.f_ge_tensor(&column(3)?)?)?;
        let weights = weights.f_mul(&kept)?;
        let (ids, order) = ids.f_sort(1, false)?;
        let sums = weights
            .f_gather(1, &order, false)?
            .f_cumsum(1, Kind::Double)?;
        let target = sums.f_narrow(1, most - 1, 1)?.f_mul(&column(4)?)?;
        let at = target.f_searchsorted(&sums, false, true, "right", None::<&Tensor>)?;
        Ok(ids.f_gather(1, &at.f_clamp_max(most - 1)?, false)?)
    }
}

/// Returns the expected tokens, which tests change.
#[cfg(not(test))]
pub(super) const fn believed(tokens: Tensor) -> Tensor {
    tokens
}

#[cfg(test)]
pub(super) use super::tests::believed;
