use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_sys::autocast;
use overdrive_sys::gemm::mm_into;
use tch::{Kind, Tensor};

use crate::{Adapter, Result};

/// Elements of a temporary where kinds differ: 4 MiB in fp32.
const BLOCK: i64 = 1 << 20;

/// One adapter's share of a product.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    /// The first output that it adds to.
    pub(crate) start: i64,
    pub(crate) adapter: &'a Adapter,
    /// The probability that an input is dropped for it.
    pub(crate) dropout: f64,
}

/// Adds `scale · dropout(x) · Aᵀ · Bᵀ + scale · bias` of each part to its columns of `base (…, ΣO)`, in
/// place, and returns it. `x (…, I)`.
///
/// What stays for backward is `x` itself, the projections of rank `r`, and a byte an input where
/// there is dropout; nothing of the size of `base`. Parts that add to the same columns stand together.
///
/// # Errors
/// An error of libtorch if the shapes do not fit.
pub(crate) fn add_low_rank(base: Tensor, x: &Tensor, parts: &[Part<'_>]) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        return Ok(base);
    };
    let state = autocast::state(x.device());
    let compute = match state {
        Ok(state) if state.enabled && first.adapter.a().kind() != Kind::Double => state.dtype,
        _ => first.adapter.a().kind(),
    };
    let mut inputs = vec![&base, x];
    for part in parts {
        inputs.extend([part.adapter.a(), part.adapter.b()]);
        inputs.extend(part.adapter.bias());
    }
    let function = LowRank {
        compute,
        parts: parts.iter().map(Share::of).collect(),
    };
    Ok(apply(function, &inputs)?.remove(0))
}

/// What a [`Part`] is without its tensors.
#[derive(Debug, Clone, Copy)]
struct Share {
    start: i64,
    width: i64,
    rank: i64,
    scale: f64,
    dropout: f64,
    biased: bool,
}

impl Share {
    fn of(part: &Part<'_>) -> Share {
        Share {
            start: part.start,
            width: part.adapter.b().size()[0],
            rank: part.adapter.rank(),
            scale: part.adapter.scale(),
            dropout: part.dropout,
            biased: part.adapter.bias().is_some(),
        }
    }
}

/// Inputs: the base's result, x, and of each part A, B and its bias. Saved: the scaled projections,
/// x where an A learns, each A and B, and the masks of dropout.
struct LowRank {
    compute: Kind,
    parts: Vec<Share>,
}

/// The tensors of one part.
struct Weights<'t> {
    a: &'t Tensor,
    b: &'t Tensor,
    bias: Option<&'t Tensor>,
}

impl LowRank {
    fn weights<'t>(&self, inputs: &[&'t Tensor]) -> Vec<Weights<'t>> {
        let mut index = 2;
        let mut weights = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let bias = part.biased.then(|| inputs[index + 2]);
            weights.push(Weights {
                a: inputs[index],
                b: inputs[index + 1],
                bias,
            });
            index += 2 + usize::from(part.biased);
        }
        weights
    }

    fn drops(&self) -> bool {
        self.parts.iter().any(|part| part.dropout > 0.0)
    }

    /// One matrix of all A's, in the kind of the products.
    fn joint_a(&self, a: &[&Tensor]) -> FunctionResult<Tensor> {
        let joint = match a {
            [only] => only.shallow_clone(),
            _ => Tensor::f_cat(a, 0)?,
        };
        Ok(joint.f_to_kind(self.compute)?)
    }

    /// The columns of the projections that belong to each part.
    fn offsets(&self) -> Vec<i64> {
        let mut next = 0;
        let place = |part: &Share| {
            let place = next;
            next += part.rank;
            place
        };
        self.parts.iter().map(place).collect()
    }

    /// `x` as a part sees it: with its mask, scaled so that the mean stays.
    fn dropped(&self, x: &Tensor, part: &Share, mask: &Tensor) -> FunctionResult<Tensor> {
        let x = x.f_to_kind(self.compute)?;
        // A dropout of 1 leaves nothing, as in PyTorch.
        let keep = (1.0 - part.dropout).max(f64::MIN_POSITIVE);
        let mut kept = x.f_mul(mask)?;
        if part.dropout < 1.0 {
            let _same = kept.f_div_scalar_(keep)?;
        }
        Ok(kept)
    }

    /// `h (N, Σr)`, scaled, and the masks.
    fn project(
        &self,
        x: &Tensor,
        weights: &[Weights<'_>],
    ) -> FunctionResult<(Tensor, Vec<Tensor>)> {
        let (rows, ranks) = (x.size()[0], self.parts.iter().map(|part| part.rank).sum());
        let h = Tensor::f_empty([rows, ranks], (self.compute, x.device()))?;
        let mut masks = Vec::new();
        if !self.drops() {
            let a: Vec<&Tensor> = weights.iter().map(|weights| weights.a).collect();
            let a = self.joint_a(&a)?.f_tr()?;
            for (start, len) in blocks(rows, x.size()[1], x.kind() == self.compute) {
                let x = x.f_narrow(0, start, len)?.f_to_kind(self.compute)?;
                mm_into(&h.f_narrow(0, start, len)?, &x, &a, false)?;
            }
        } else {
            for ((part, weights), offset) in self.parts.iter().zip(weights).zip(self.offsets()) {
                let mut mask = Tensor::f_empty(x.size(), (Kind::Bool, x.device()))?;
                let _same = mask.f_bernoulli_float_(1.0 - part.dropout)?;
                let a = weights.a.f_to_kind(self.compute)?;
                let projected = self.dropped(x, part, &mask)?.f_mm(&a.f_tr()?)?;
                h.f_narrow(1, offset, part.rank)?.f_copy_(&projected)?;
                masks.push(mask);
            }
        }
        let scale = self.parts[0].scale;
        if self.parts.iter().all(|part| part.scale == scale) {
            if scale != 1.0 {
                let _same = h.shallow_clone().f_mul_scalar_(scale)?;
            }
        } else {
            for (part, offset) in self.parts.iter().zip(self.offsets()) {
                let mut own = h.f_narrow(1, offset, part.rank)?;
                let _same = own.f_mul_scalar_(part.scale)?;
            }
        }
        Ok((h, masks))
    }

    /// `y += h · Bᵀ + bias` by columns.
    fn expand(&self, y: &Tensor, h: &Tensor, weights: &[Weights<'_>]) -> FunctionResult<()> {
        let mut offset = 0;
        // Parts of the same columns are one product.
        let groups = self.parts.chunk_by(|one, next| one.start == next.start);
        let mut first = 0;
        for group in groups {
            let own = &weights[first..first + group.len()];
            first += group.len();
            let rank = group.iter().map(|part| part.rank).sum();
            let h = h.f_narrow(1, offset, rank)?;
            offset += rank;
            let columns = y.f_narrow(1, group[0].start, group[0].width)?;
            let b: Vec<&Tensor> = own.iter().map(|weights| weights.b).collect();
            let b = match b[..] {
                [only] => only.shallow_clone(),
                _ => Tensor::f_cat(&b, 1)?,
            };
            self.accumulate(&columns, &h, &b.f_to_kind(self.compute)?.f_tr()?)?;
            for (part, weights) in group.iter().zip(own) {
                if let Some(bias) = weights.bias {
                    let _same = columns
                        .shallow_clone()
                        .f_add_(&bias.f_mul_scalar(part.scale)?)?;
                }
            }
        }
        Ok(())
    }

    /// `out += left · right`, where `out` may be columns of a wider matrix and of another kind.
    fn accumulate(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> FunctionResult<()> {
        if out.kind() == self.compute {
            if out.is_contiguous() {
                mm_into(out, left, right, true)?;
            } else {
                let _same = out.shallow_clone().f_addmm_(left, right)?;
            }
            return Ok(());
        }
        // Rounded once, after the addition, and never held as a whole.
        for (start, len) in blocks(out.size()[0], out.size()[1], false) {
            let product = left.f_narrow(0, start, len)?.f_mm(right)?;
            let _same = out.f_narrow(0, start, len)?.f_add_(&product)?;
        }
        Ok(())
    }
}

impl Function for LowRank {
    const NAME: &'static str = "low_rank";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (y, x) = (inputs[0], inputs[1]);
        let weights = self.weights(inputs);
        let rows = rows_of(x)?;
        let (h, masks) = self.project(&rows, &weights)?;
        self.expand(&y.f_view([-1, last(y)])?, &h, &weights)?;
        context.mark_dirty(0);
        if context.needs_any_grad() {
            let mut saved = vec![&h];
            // The shape of x is wanted in any case; its elements are x's own.
            saved.push(x);
            for weights in &weights {
                saved.extend([weights.a, weights.b]);
            }
            saved.extend(&masks);
            context.save_for_backward(&saved);
        }
        Ok(vec![y.shallow_clone()])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let count = self.parts.len();
        let extra = self.parts.iter().filter(|part| part.biased).count();
        let mut results: Vec<Option<Tensor>> = Vec::new();
        results.resize_with(2 + 2 * count + extra, || None);
        let (Some(dy), [h, x, rest @ ..]) = (&gradients[0], context.saved()) else {
            return Ok(results);
        };
        results[0] = Some(dy.shallow_clone());
        let (weights, masks) = rest.split_at(2 * count);
        let dy = dy.f_reshape([-1, last(dy)])?;
        let rows = rows_of(x)?;
        let learns = |index| context.needs_input_grad(index);
        let offsets = self.offsets();
        // Of the projections, by columns.
        let dh = Tensor::f_empty_like(h)?;
        let mut index = 2;
        for ((part, weights), offset) in self.parts.iter().zip(weights.chunks(2)).zip(&offsets) {
            let dy = dy
                .f_narrow(1, part.start, part.width)?
                .f_to_kind(self.compute)?;
            let b = weights[1].f_to_kind(self.compute)?;
            let mut own = dh.f_narrow(1, *offset, part.rank)?;
            own.f_copy_(&dy.f_mm(&b)?)?;
            let _same = own.f_mul_scalar_(part.scale)?;
            if learns(index + 1) {
                let h = h.f_narrow(1, *offset, part.rank)?;
                results[index + 1] = Some(dy.f_tr()?.f_mm(&h)?);
            }
            if part.biased && learns(index + 2) {
                let sum = dy.f_sum_dim_intlist([0i64].as_slice(), false, self.compute)?;
                results[index + 2] = Some(sum.f_mul_scalar(part.scale)?);
            }
            index += 2 + usize::from(part.biased);
        }
        let a: Vec<&Tensor> = weights.chunks(2).map(|pair| &pair[0]).collect();
        let places = self.places();
        if masks.is_empty() {
            if places.iter().any(|place| learns(*place)) {
                let da = self.product_over_rows(&dh, &rows)?;
                let ranks: Vec<i64> = self.parts.iter().map(|part| part.rank).collect();
                for (place, da) in places.iter().zip(da.f_split_with_sizes(&ranks, 0)?) {
                    results[*place] = Some(da);
                }
            }
            if learns(1) {
                let dx = Tensor::f_empty(rows.size(), (self.compute, x.device()))?;
                mm_into(&dx, &dh, &self.joint_a(&a)?, false)?;
                results[1] = Some(dx.f_view(x.size().as_slice())?);
            }
            return Ok(results);
        }
        let mut dx: Option<Tensor> = None;
        for (position, (part, mask)) in self.parts.iter().zip(masks).enumerate() {
            let dh = dh.f_narrow(1, offsets[position], part.rank)?;
            if learns(places[position]) {
                let dropped = self.dropped(&rows, part, mask)?;
                results[places[position]] = Some(dh.f_tr()?.f_mm(&dropped)?);
            }
            if learns(1) {
                let own = dh.f_mm(&a[position].f_to_kind(self.compute)?)?;
                let own = self.dropped(&own, part, mask)?;
                dx = Some(match dx {
                    None => own,
                    Some(mut sum) => sum.f_add_(&own)?,
                });
            }
        }
        results[1] = dx.map(|dx| dx.f_view(x.size().as_slice())).transpose()?;
        Ok(results)
    }
}

impl LowRank {
    /// The places of the A's among the inputs.
    fn places(&self) -> Vec<usize> {
        let mut index = 2;
        let place = |part: &Share| {
            let place = index;
            index += 2 + usize::from(part.biased);
            place
        };
        self.parts.iter().map(place).collect()
    }

    /// `dhᵀ · x`, `(Σr, I)`, with `x` cast a block at a time.
    fn product_over_rows(&self, dh: &Tensor, x: &Tensor) -> FunctionResult<Tensor> {
        let size = [dh.size()[1], x.size()[1]];
        if x.kind() == self.compute {
            let out = Tensor::f_empty(size, (self.compute, x.device()))?;
            mm_into(&out, &dh.f_tr()?, x, false)?;
            return Ok(out);
        }
        let out = Tensor::f_zeros(size, (self.compute, x.device()))?;
        for (start, len) in blocks(x.size()[0], x.size()[1], false) {
            let x = x.f_narrow(0, start, len)?.f_to_kind(self.compute)?;
            mm_into(&out, &dh.f_narrow(0, start, len)?.f_tr()?, &x, true)?;
        }
        Ok(out)
    }
}

/// Ranges of rows: one where nothing is converted, else such that a block of `width` columns stays small.
fn blocks(rows: i64, width: i64, whole: bool) -> Vec<(i64, i64)> {
    let step = if whole { rows } else { BLOCK / width.max(1) }.max(1);
    (0..rows)
        .step_by(usize::try_from(step).unwrap_or(usize::MAX))
        .map(|start| (start, step.min(rows - start)))
        .collect()
}

fn last(tensor: &Tensor) -> i64 {
    tensor.size().last().copied().unwrap_or(1)
}

/// `(…, I)` as a matrix.
fn rows_of(x: &Tensor) -> FunctionResult<Tensor> {
    Ok(x.f_reshape([-1, last(x)])?.f_contiguous()?)
}
