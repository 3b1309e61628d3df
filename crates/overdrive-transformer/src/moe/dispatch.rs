//! The order of tokens by expert.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use tch::{Kind, Tensor};

use super::Routing;
use crate::Result;

/// The choices of a forward pass, sorted by expert. A choice is one expert of one token: token `n` has the choices
/// `K·n..K·(n + 1)`.
#[derive(Debug)]
pub(super) struct Dispatch {
    /// The choice at each place of the sorted order `(N·K,)`, i64.
    order: Tensor,
    /// The place of each choice `(N·K,)`, i64.
    places: Tensor,
    /// The number after the last place of each expert `(E,)`, i32.
    pub(super) ends: Tensor,
    per_token: i64,
}

impl Dispatch {
    /// Sorts the choices for `count` experts. Choices of one expert keep the order of their tokens. Nothing is read on
    /// the host.
    pub(super) fn new(routing: &Routing, count: i64) -> Result<Dispatch> {
        let chosen = routing.experts.f_reshape([-1])?;
        let (sorted, order) = chosen.f_sort_stable(true, 0, false)?;
        let integers = (Kind::Int64, chosen.device());
        let numbers = Tensor::f_arange(chosen.size()[0], integers)?;
        // The inverse permutation: no index comes twice, so the result is the same on every device.
        let places = numbers.f_zeros_like()?.f_scatter(0, &order, &numbers)?;
        let experts = Tensor::f_arange(count, integers)?;
        let ends = experts.f_searchsorted(&sorted, true, true, "right", None::<&Tensor>)?;
        Ok(Dispatch {
            order,
            places,
            ends,
            per_token: routing.experts.size()[1],
        })
    }

    /// Reads the number of choices of each expert: the one read of a layer on the host.
    pub(super) fn counts(&self) -> Result<Vec<i64>> {
        let ends = Vec::<i32>::try_from(&self.ends.f_to_device(tch::Device::Cpu)?)?;
        let starts = std::iter::once(&0).chain(&ends);
        Ok(ends
            .iter()
            .zip(starts)
            .map(|(end, start)| i64::from(end - start))
            .collect())
    }

    /// Reads the token of each choice in the sorted order.
    pub(super) fn tokens_on_host(&self) -> Result<Vec<i64>> {
        let tokens = self.order.f_floor_divide_scalar(self.per_token)?;
        Ok(Vec::try_from(&tokens.f_to_device(tch::Device::Cpu)?)?)
    }

    /// Returns the row of `x (N, C)` of each choice in the sorted order, `(N·K, C)`.
    pub(super) fn sort(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let tokens = self.order.f_floor_divide_scalar(self.per_token)?;
        select(x, &tokens, &self.places, self.per_token, fused)
    }

    /// Returns the sum of the outputs `y (N·K, C)` of each token's choices times `weights (N, K)`: `(N, C)`.
    pub(super) fn combine(&self, y: &Tensor, weights: &Tensor, fused: bool) -> Result<Tensor> {
        let [tokens, width] = [weights.size()[0], y.size()[1]];
        let each = select(y, &self.places, &self.order, 1, fused)?;
        let each = each.f_view([tokens, self.per_token, width])?;
        let weighted = each.f_mul(&weights.f_unsqueeze(-1)?)?;
        let kind = weighted.kind();
        Ok(weighted.f_sum_dim_intlist([1i64].as_slice(), false, kind)?)
    }
}

/// Returns the rows `rows` of `x`. `back` has the index in the result of each copy of each row, `copies` a row.
fn select(x: &Tensor, rows: &Tensor, back: &Tensor, copies: i64, fused: bool) -> Result<Tensor> {
    if !fused {
        return Ok(x.f_index_select(0, rows)?);
    }
    let function = SelectRows { copies };
    let mut outputs = apply(function, &[x, rows, back]).map_err(overdrive_fused::Error::from)?;
    Ok(outputs.remove(0))
}

/// `index_select` whose backward selects, too: that of libtorch adds row by row, and on a GPU in any order.
struct SelectRows {
    copies: i64,
}

impl Function for SelectRows {
    const NAME: &'static str = "SelectRows";
    // Of differentiable operators.
    const TWICE_DIFFERENTIABLE: bool = true;

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        context.save_for_backward(&[inputs[2]]);
        Ok(vec![inputs[0].f_index_select(0, inputs[1])?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let (Some(Some(gradient)), [back, ..]) = (gradients.first(), context.saved()) else {
            return Ok(vec![None, None, None]);
        };
        let each = gradient.f_index_select(0, back)?;
        if self.copies == 1 {
            return Ok(vec![Some(each), None, None]);
        }
        let kind = each.kind();
        let each = each.f_view([-1, self.copies, gradient.size()[1]])?;
        let sum = each.f_sum_dim_intlist([1i64].as_slice(), false, kind)?;
        Ok(vec![Some(sum), None, None])
    }
}
