//! The gated delta rule in libtorch's operators.
//!
//! The chunked form of Yang et al. 2024, in the order of transformers' `torch_chunk_gated_delta_rule`: the updates of a
//! chunk of C tokens are condensed into a few matrix products by solving one triangular system of size C (the UT
//! transform), so only one step for each chunk depends on the one before it.

use tch::{Kind, Tensor};

use crate::Result;

/// The terms of the rule in the dtype of the arithmetic, f32 or f64.
pub(crate) struct Terms {
    /// (B, H, T, D_k), normalized and scaled.
    query: Tensor,
    /// (B, H, T, D_k), normalized.
    key: Tensor,
    /// (B, H, T, D_v)
    value: Tensor,
    /// (B, H, T)
    decay: Tensor,
    /// (B, H, T)
    beta: Tensor,
}

/// Divides the rows by `sqrt(Σ x² + 1e-6)`.
fn l2norm(x: &Tensor) -> Result<Tensor> {
    let squares = x.f_square()?;
    let sum = squares.f_sum_dim_intlist([-1i64].as_slice(), true, None::<Kind>)?;
    Ok(x.f_mul(&sum.f_add_scalar(1e-6)?.f_rsqrt()?)?)
}

impl Terms {
    /// Takes the tensors in the layout of the public functions, (B, T, heads, …).
    pub(crate) fn new(
        inputs: &crate::DeltaRuleInputs<'_>,
        kind: Kind,
        scale: f64,
        qk_l2norm: bool,
    ) -> Result<Terms> {
        let heads = inputs.value.size()[2];
        let groups = heads / inputs.key.size()[2];
        let by_head = |x: &Tensor| -> Result<Tensor> { Ok(x.f_transpose(1, 2)?.f_to_kind(kind)?) };
        let shared = |x: &Tensor| -> Result<Tensor> {
            let x = by_head(x)?;
            let x = if qk_l2norm { l2norm(&x)? } else { x };
            match groups {
                1 => Ok(x),
                _ => Ok(x.f_repeat_interleave_self_int(groups, 1, None)?),
            }
        };
        Ok(Terms {
            query: shared(inputs.query)?.f_mul_scalar(scale)?,
            key: shared(inputs.key)?,
            value: by_head(inputs.value)?,
            decay: by_head(inputs.decay)?,
            beta: by_head(inputs.beta)?,
        })
    }

    /// Returns the output (B, T, H, D_v) and the state (B, H, D_k, D_v) after the last token.
    pub(crate) fn run(&self, state: &Tensor, chunk_size: i64) -> Result<(Tensor, Tensor)> {
        let tokens = self.value.size()[2];
        let (output, state) = match tokens {
            1 => self.one_token(state)?,
            _ => self.chunks(state, chunk_size.min(tokens))?,
        };
        Ok((output.f_transpose(1, 2)?, state))
    }

    /// The rule itself.
    fn one_token(&self, state: &Tensor) -> Result<(Tensor, Tensor)> {
        let state = state.f_mul(&self.decay.f_exp()?.f_unsqueeze(-1)?)?;
        let delta = self.value.f_sub(&self.key.f_matmul(&state)?)?;
        let delta = delta.f_mul(&self.beta.f_unsqueeze(-1)?)?;
        let state = state.f_add(&self.key.f_transpose(-1, -2)?.f_matmul(&delta)?)?;
        Ok((self.query.f_matmul(&state)?, state))
    }

    fn chunks(&self, state: &Tensor, size: i64) -> Result<(Tensor, Tensor)> {
        let tokens = self.value.size()[2];
        let padding = (size - tokens % size) % size;
        let chunks = (tokens + padding) / size;
        // A padded token has beta 0 and decay 0: it leaves the state as it is.
        let rows = |x: &Tensor| -> Result<Tensor> {
            let [b, h, _, d] = x.size4()?.into();
            let x = x.f_constant_pad_nd([0, 0, 0, padding])?;
            Ok(x.f_reshape([b, h, chunks, size, d])?)
        };
        let numbers = |x: &Tensor| -> Result<Tensor> {
            let (b, h, _) = x.size3()?;
            let x = x.f_constant_pad_nd([0, padding])?;
            Ok(x.f_reshape([b, h, chunks, size])?)
        };
        let (query, key, value) = (rows(&self.query)?, rows(&self.key)?, rows(&self.value)?);
        let beta = numbers(&self.beta)?.f_unsqueeze(-1)?;
        let decay = numbers(&self.decay)?.f_cumsum(-1, None::<Kind>)?;

        // The decay from token j to token i of a chunk; -inf before the exponential where i is before j, since the
        // differences are positive there and may overflow.
        let later = Tensor::f_ones([size, size], (Kind::Bool, decay.device()))?.f_triu(1)?;
        let between = decay.f_unsqueeze(-1)?.f_sub(&decay.f_unsqueeze(-2)?)?;
        let between = between.f_masked_fill(&later, f64::NEG_INFINITY)?.f_exp()?;
        let since_start = decay.f_exp()?.f_unsqueeze(-1)?;
        let last = decay.f_narrow(-1, size - 1, 1)?;
        let to_end = last.f_sub(&decay)?.f_exp()?.f_unsqueeze(-1)?;
        let whole = last.f_exp()?.f_unsqueeze(-1)?;

        let key_columns = key.f_transpose(-1, -2)?;
        let key_beta = key.f_mul(&beta)?;
        let system = key_beta.f_matmul(&key_columns)?.f_mul(&between)?;
        let solve = |right: &Tensor| system.f_linalg_solve_triangular(right, false, true, true);
        let values = solve(&value.f_mul(&beta)?)?;
        let keys = solve(&key_beta.f_mul(&since_start)?)?;
        let within = query.f_matmul(&key_columns)?.f_mul(&between)?;
        let query = query.f_mul(&since_start)?;
        let to_state = key.f_mul(&to_end)?.f_transpose(-1, -2)?;

        let mut state = state.shallow_clone();
        let mut outputs = Vec::new();
        for chunk in 0..chunks {
            let of = |x: &Tensor| x.f_select(2, chunk);
            let delta = of(&values)?.f_sub(&of(&keys)?.f_matmul(&state)?)?;
            let from_state = of(&query)?.f_matmul(&state)?;
            outputs.push(from_state.f_add(&of(&within)?.f_matmul(&delta)?)?);
            let update = of(&to_state)?.f_matmul(&delta)?;
            state = state.f_mul(&of(&whole)?)?.f_add(&update)?;
        }
        let output = Tensor::f_cat(&outputs, 2)?.f_narrow(2, 0, tokens)?;
        Ok((output, state))
    }
}
