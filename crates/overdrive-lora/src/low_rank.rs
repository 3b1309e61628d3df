use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_nn::{RowChoice, RowUpdate};
use overdrive_sys::autocast;
use overdrive_sys::gemm::mm_into;
use tch::{Kind, Tensor};

use crate::{LoraAdapter, Result};

/// The size of a temporary in elements if dtypes differ: 4 MiB in fp32, which stays in a CPU's cache.
const BLOCK: i64 = 1 << 20;

/// One adapter and the columns that its output is added to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addend<'a> {
    /// The first output column that it adds to.
    pub(crate) start: i64,
    pub(crate) adapter: &'a LoraAdapter,
    /// The dropout probability of its inputs.
    pub(crate) dropout: f64,
}

/// Adds `scale · dropout(x) · Aᵀ · Bᵀ + scale · bias` of each addend to its columns of `base (…, ΣO)`, in
/// place, and returns it. `x (…, I)`.
///
/// For backward it saves `x` itself, the projections of rank `r`, and with dropout one byte for each input
/// element, but nothing of the size of `base`. Addends of the same columns must be adjacent.
///
/// # Errors
/// An error of libtorch if the shapes do not fit.
pub(crate) fn add_low_rank(base: Tensor, x: &Tensor, addends: &[Addend<'_>]) -> Result<Tensor> {
    let Some(function) = LowRank::new(x, addends) else {
        return Ok(base);
    };
    let mut inputs = vec![&base, x];
    for addend in addends {
        inputs.extend([addend.adapter.a(), addend.adapter.b()]);
        inputs.extend(addend.adapter.bias());
    }
    Ok(apply(function, &inputs)?.remove(0))
}

/// Adds the updates of the adapters that rows of `x (N, I)` choose to `y (N, ΣO)`, without recording gradients: all adapters
/// project every row, and the projections of others become 0. Each addend has the index of its adapter in `choice`, and the
/// order of [`add_low_rank`].
///
/// # Errors
/// An error of libtorch if the shapes do not fit.
pub(crate) fn add_chosen(
    y: &Tensor,
    x: &Tensor,
    chosen: &[(usize, Addend<'_>)],
    choice: &RowChoice,
) -> Result<()> {
    let addends: Vec<Addend<'_>> = chosen.iter().map(|(_, addend)| *addend).collect();
    let Some(function) = LowRank::new(x, &addends) else {
        return Ok(());
    };
    let updates = |rank: fn(&LoraAdapter) -> i64| -> Vec<RowUpdate> {
        let update = |(adapter, addend): &(usize, Addend<'_>)| RowUpdate {
            adapter: *adapter,
            rank: rank(addend.adapter),
            scale: addend.adapter.scale,
        };
        chosen.iter().map(update).collect()
    };
    let weights = addends.iter().map(|addend| Weights {
        a: addend.adapter.a(),
        b: addend.adapter.b(),
        bias: addend.adapter.bias(),
    });
    let weights: Vec<Weights<'_>> = weights.collect();
    let (mut h, _) = function.project(&x.f_contiguous()?, &weights)?;
    let h = h.f_mul_(&choice.factors(&updates(LoraAdapter::rank), function.compute)?)?;
    function.expand(y, &h, &weights)?;
    if weights.iter().any(|weights| weights.bias.is_some()) {
        let factors = choice.factors(&updates(|_| 1), function.compute)?;
        for (column, (shape, weights)) in (0..).zip(function.addends.iter().zip(&weights)) {
            if let Some(bias) = weights.bias {
                let own = factors.f_narrow(1, column, 1)?.f_mul(bias)?;
                let _same = shape.columns(y)?.f_add_(&own)?;
            }
        }
    }
    Ok(())
}

/// An [`Addend`] without its tensors.
#[derive(Debug, Clone, Copy)]
struct AddendShape {
    start: i64,
    width: i64,
    rank: i64,
    scale: f64,
    dropout: f64,
    /// The index of A among the inputs of the function; B and the bias follow.
    a: usize,
    biased: bool,
    /// The first column of its projections.
    offset: i64,
}

impl AddendShape {
    /// Returns the shapes of all addends.
    fn all(addends: &[Addend<'_>]) -> Vec<AddendShape> {
        // The base's output and x come first.
        let (mut input, mut offset) = (2, 0);
        let shape = |addend: &Addend<'_>| {
            let shape = AddendShape {
                start: addend.start,
                width: addend.adapter.b().size()[0],
                rank: addend.adapter.rank(),
                scale: addend.adapter.scale(),
                dropout: addend.dropout,
                a: input,
                biased: addend.adapter.bias().is_some(),
                offset,
            };
            input += 2 + usize::from(shape.biased);
            offset += shape.rank;
            shape
        };
        addends.iter().map(shape).collect()
    }

    fn b(&self) -> usize {
        self.a + 1
    }

    fn bias(&self) -> Option<usize> {
        self.biased.then_some(self.a + 2)
    }

    /// Returns its columns of the projections `h (N, Σr)`.
    fn projections(&self, h: &Tensor) -> Result<Tensor> {
        Ok(h.f_narrow(1, self.offset, self.rank)?)
    }

    /// Returns the columns of `y (N, ΣO)` that it adds to.
    fn columns(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.f_narrow(1, self.start, self.width)?)
    }
}

/// The autograd function. Its inputs are the base's output, x, and the A, B and bias of each addend; it saves
/// the scaled projections, x, each A and B, and the dropout masks.
struct LowRank {
    compute: Kind,
    addends: Vec<AddendShape>,
}

/// The tensors of one addend.
struct Weights<'t> {
    a: &'t Tensor,
    b: &'t Tensor,
    bias: Option<&'t Tensor>,
}

impl LowRank {
    /// Returns the function of these addends; `None` if there are none.
    fn new(x: &Tensor, addends: &[Addend<'_>]) -> Option<LowRank> {
        let own = addends.first()?.adapter.a().kind();
        // As in PEFT: the adapter's dtype, or autocast's if it is on; fp64 stays, for gradient checks.
        let compute = match autocast::state(x.device()) {
            Ok(state) if state.enabled && own != Kind::Double => state.dtype,
            _ => own,
        };
        Some(LowRank {
            compute,
            addends: AddendShape::all(addends),
        })
    }

    fn weights<'t>(&self, inputs: &[&'t Tensor]) -> Vec<Weights<'t>> {
        let weights = |addend: &AddendShape| Weights {
            a: inputs[addend.a],
            b: inputs[addend.b()],
            bias: addend.bias().map(|bias| inputs[bias]),
        };
        self.addends.iter().map(weights).collect()
    }

    fn drops(&self) -> bool {
        self.addends.iter().any(|addend| addend.dropout > 0.0)
    }

    /// Concatenates all A matrices, `(Σr, I)`, in the dtype of the matmuls.
    fn joint_a(&self, a: &[&Tensor]) -> Result<Tensor> {
        let joint = match a {
            [only] => only.shallow_clone(),
            _ => Tensor::f_cat(a, 0)?,
        };
        Ok(joint.f_to_kind(self.compute)?)
    }

    /// Applies the dropout of one addend to `x`: its mask, scaled to preserve the mean.
    fn dropped(&self, x: &Tensor, addend: &AddendShape, mask: &Tensor) -> Result<Tensor> {
        let x = x.f_to_kind(self.compute)?;
        // As in PyTorch, a dropout of 1 gives zeros instead of a division by zero.
        let keep = (1.0 - addend.dropout).max(f64::MIN_POSITIVE);
        let mut kept = x.f_mul(mask)?;
        if addend.dropout < 1.0 {
            let _same = kept.f_div_scalar_(keep)?;
        }
        Ok(kept)
    }

    /// Computes the projections `h (N, Σr)` and the dropout masks.
    fn project(&self, x: &Tensor, weights: &[Weights<'_>]) -> Result<(Tensor, Vec<Tensor>)> {
        let (rows, ranks) = (
            x.size()[0],
            self.addends.iter().map(|addend| addend.rank).sum(),
        );
        let h = Tensor::f_empty([rows, ranks], (self.compute, x.device()))?;
        let mut masks = Vec::new();
        // Without dropout all adapters share their input: one matmul with the concatenated A matrices.
        if !self.drops() {
            let a: Vec<&Tensor> = weights.iter().map(|weights| weights.a).collect();
            let a = self.joint_a(&a)?.f_tr()?;
            for (start, len) in blocks(rows, x.size()[1], x.kind() == self.compute) {
                let x = x.f_narrow(0, start, len)?.f_to_kind(self.compute)?;
                mm_into(&h.f_narrow(0, start, len)?, &x, &a, false)?;
            }
        } else {
            for (addend, weights) in self.addends.iter().zip(weights) {
                // The mask costs one byte for each element; the dropped input itself would cost two or four.
                let mut mask = Tensor::f_empty(x.size(), (Kind::Bool, x.device()))?;
                let _same = mask.f_bernoulli_float_(1.0 - addend.dropout)?;
                let a = weights.a.f_to_kind(self.compute)?;
                let projected = self.dropped(x, addend, &mask)?.f_mm(&a.f_tr()?)?;
                addend.projections(&h)?.f_copy_(&projected)?;
                masks.push(mask);
            }
        }
        Ok((h, masks))
    }

    /// Scales the projections, which are far smaller than the outputs.
    fn scale(&self, h: &Tensor) -> Result<()> {
        let scale = self.addends[0].scale;
        if self.addends.iter().all(|addend| addend.scale == scale) {
            if scale != 1.0 {
                let _same = h.shallow_clone().f_mul_scalar_(scale)?;
            }
        } else {
            for addend in &self.addends {
                let _same = addend.projections(h)?.f_mul_scalar_(addend.scale)?;
            }
        }
        Ok(())
    }

    /// Adds `h · Bᵀ` to the columns of each addend.
    fn expand(&self, y: &Tensor, h: &Tensor, weights: &[Weights<'_>]) -> Result<()> {
        // Addends of the same columns take one matmul: their ranks are concatenated.
        let groups = self.addends.chunk_by(|one, next| one.start == next.start);
        let mut first = 0;
        for group in groups {
            let own = &weights[first..first + group.len()];
            first += group.len();
            let rank = group.iter().map(|addend| addend.rank).sum();
            let h = h.f_narrow(1, group[0].offset, rank)?;
            let columns = group[0].columns(y)?;
            let b: Vec<&Tensor> = own.iter().map(|weights| weights.b).collect();
            let b = match b[..] {
                [only] => only.shallow_clone(),
                _ => Tensor::f_cat(&b, 1)?,
            };
            self.accumulate(&columns, &h, &b.f_to_kind(self.compute)?.f_tr()?)?;
        }
        Ok(())
    }

    /// Adds the scaled bias of each addend to its columns.
    fn add_biases(&self, y: &Tensor, weights: &[Weights<'_>]) -> Result<()> {
        for (addend, weights) in self.addends.iter().zip(weights) {
            if let Some(bias) = weights.bias {
                let bias = bias.f_mul_scalar(addend.scale)?;
                let _same = addend.columns(y)?.f_add_(&bias)?;
            }
        }
        Ok(())
    }

    /// Computes `out += left · right`, where `out` may be columns of a wider matrix and of another dtype.
    fn accumulate(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        if out.kind() == self.compute {
            // `mm_into` writes whole rows; columns of a joint output have gaps between them.
            if out.is_contiguous() {
                mm_into(out, left, right, true)?;
            } else {
                let _same = out.shallow_clone().f_addmm_(left, right)?;
            }
            return Ok(());
        }
        // Rounds each element once, after the addition, and never holds the whole product.
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
        self.scale(&h)?;
        let columns = y.f_view([-1, last(y)])?;
        self.expand(&columns, &h, &weights)?;
        self.add_biases(&columns, &weights)?;
        // Changes the base's output in place; a copy would have the size of the layer's output.
        context.mark_dirty(0);
        if context.needs_any_grad() {
            let mut saved = vec![&h];
            // Backward needs the shape of x in any case; saving x keeps a handle, not a copy.
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
        let mut results: Vec<Option<Tensor>> = Vec::new();
        let inputs = self
            .addends
            .last()
            .map_or(2, |last| last.b() + 1 + usize::from(last.biased));
        results.resize_with(inputs, || None);
        let (Some(dy), [h, x, rest @ ..]) = (&gradients[0], context.saved()) else {
            return Ok(results);
        };
        // The base's output is added unchanged, so its gradient is dy.
        results[0] = Some(dy.shallow_clone());
        let (weights, masks) = rest.split_at(2 * self.addends.len());
        let (a, b): (Vec<&Tensor>, Vec<&Tensor>) =
            weights.chunks(2).map(|pair| (&pair[0], &pair[1])).unzip();
        let dy = dy.f_reshape([-1, last(dy)])?;
        let dh = self.backward_of_b(context, &dy, h, &b, &mut results)?;
        let rows = rows_of(x)?;
        let dx = match masks {
            [] => self.backward_of_a(context, &dh, &rows, &a, &mut results)?,
            _ => self.backward_of_dropped(context, &dh, &rows, &a, masks, &mut results)?,
        };
        results[1] = dx.map(|dx| dx.f_view(x.size().as_slice())).transpose()?;
        Ok(results)
    }
}

impl LowRank {
    /// Computes the gradients of each B and bias, and returns that of the projections, `(N, Σr)`.
    fn backward_of_b(
        &self,
        context: &BackwardContext,
        dy: &Tensor,
        h: &Tensor,
        b: &[&Tensor],
        results: &mut [Option<Tensor>],
    ) -> FunctionResult<Tensor> {
        let dh = Tensor::f_empty_like(h)?;
        for (addend, b) in self.addends.iter().zip(b) {
            let dy = addend.columns(dy)?.f_to_kind(self.compute)?;
            let mut own = addend.projections(&dh)?;
            own.f_copy_(&dy.f_mm(&b.f_to_kind(self.compute)?)?)?;
            let _same = own.f_mul_scalar_(addend.scale)?;
            if context.needs_input_grad(addend.b()) {
                results[addend.b()] = Some(dy.f_tr()?.f_mm(&addend.projections(h)?)?);
            }
            if let Some(bias) = addend.bias().filter(|bias| context.needs_input_grad(*bias)) {
                let sum = dy.f_sum_dim_intlist([0i64].as_slice(), false, self.compute)?;
                results[bias] = Some(sum.f_mul_scalar(addend.scale)?);
            }
        }
        Ok(dh)
    }

    /// Computes the gradient of each A, and returns that of `x (N, I)`: without dropout all adapters share their input.
    fn backward_of_a(
        &self,
        context: &BackwardContext,
        dh: &Tensor,
        x: &Tensor,
        a: &[&Tensor],
        results: &mut [Option<Tensor>],
    ) -> FunctionResult<Option<Tensor>> {
        if self
            .addends
            .iter()
            .any(|addend| context.needs_input_grad(addend.a))
        {
            let da = self.gradient_of_a(dh, x)?;
            for addend in &self.addends {
                results[addend.a] = Some(da.f_narrow(0, addend.offset, addend.rank)?);
            }
        }
        if !context.needs_input_grad(1) {
            return Ok(None);
        }
        // Stays in the dtype of the matmul; autograd casts a gradient to the dtype of its input.
        let dx = Tensor::f_empty(x.size(), (self.compute, x.device()))?;
        mm_into(&dx, dh, &self.joint_a(a)?, false)?;
        Ok(Some(dx))
    }

    /// As [`LowRank::backward_of_a`] with dropout, which gives each adapter an input of its own.
    fn backward_of_dropped(
        &self,
        context: &BackwardContext,
        dh: &Tensor,
        x: &Tensor,
        a: &[&Tensor],
        masks: &[Tensor],
        results: &mut [Option<Tensor>],
    ) -> FunctionResult<Option<Tensor>> {
        let mut dx: Option<Tensor> = None;
        for ((addend, a), mask) in self.addends.iter().zip(a).zip(masks) {
            let dh = addend.projections(dh)?;
            if context.needs_input_grad(addend.a) {
                let dropped = self.dropped(x, addend, mask)?;
                results[addend.a] = Some(dh.f_tr()?.f_mm(&dropped)?);
            }
            if context.needs_input_grad(1) {
                let own = dh.f_mm(&a.f_to_kind(self.compute)?)?;
                let own = self.dropped(&own, addend, mask)?;
                dx = Some(match dx {
                    None => own,
                    Some(mut sum) => sum.f_add_(&own)?,
                });
            }
        }
        Ok(dx)
    }

    /// Computes `dhᵀ · x`, `(Σr, I)`, casting `x` block by block.
    fn gradient_of_a(&self, dh: &Tensor, x: &Tensor) -> FunctionResult<Tensor> {
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

/// Returns ranges of rows: one if `whole` (nothing is cast), else ranges in which blocks of `width` columns have
/// [`BLOCK`] elements.
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

/// Views `(…, I)` as a matrix.
fn rows_of(x: &Tensor) -> FunctionResult<Tensor> {
    Ok(x.f_reshape([-1, last(x)])?.f_contiguous()?)
}
