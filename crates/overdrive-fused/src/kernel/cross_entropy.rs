//! The negative log-likelihood of a label under the softmax of a row of logits, and its gradient.

use overdrive_gpu::LossTerms;
use overdrive_kernels::math::{exp, tanh};
use overdrive_kernels::threads::{block_rows, run_jobs};
use overdrive_kernels::{Element, Kernel, Simd, dispatch, each_vector, load, store};

/// Computes the loss of each row of `logits (labels.len(), classes)`, and its `lse`; 0 for ignored rows.
///
/// The caller has checked that labels that are not ignored are in `0..classes`.
pub(crate) fn loss<T: Element>(
    terms: LossTerms,
    logits: &[T],
    labels: &[i64],
    losses: &mut [f32],
    lse: &mut [f32],
) {
    let classes = logits.len() / labels.len().max(1);
    let rows = block_rows(labels.len(), classes * size_of::<T>());
    let blocks = logits
        .chunks(rows * classes)
        .zip(labels.chunks(rows))
        .zip(losses.chunks_mut(rows).zip(lse.chunks_mut(rows)));
    run_jobs(blocks, |((logits, labels), (losses, lse))| {
        dispatch(Loss {
            terms,
            logits,
            labels,
            losses,
            lse,
        });
    });
}

/// Overwrites the logits with the gradient of `scale ·` the losses.
pub(crate) fn gradient<T: Element>(
    terms: LossTerms,
    logits: &mut [T],
    labels: &[i64],
    lse: &[f32],
    scale: f32,
) {
    let classes = logits.len() / labels.len().max(1);
    let rows = block_rows(labels.len(), classes * size_of::<T>() * 2);
    let blocks = logits
        .chunks_mut(rows * classes)
        .zip(labels.chunks(rows))
        .zip(lse.chunks(rows));
    run_jobs(blocks, |((logits, labels), lse)| {
        dispatch(Gradient {
            terms,
            logits,
            labels,
            lse,
            scale,
        });
    });
}

/// Computes [`loss`] and [`gradient`] in one pass.
pub(crate) fn loss_and_gradient<T: Element>(
    terms: LossTerms,
    logits: &mut [T],
    labels: &[i64],
    losses: &mut [f32],
    scale: f32,
) {
    let classes = logits.len() / labels.len().max(1);
    let rows = block_rows(labels.len(), classes * size_of::<T>() * 2);
    let blocks = logits
        .chunks_mut(rows * classes)
        .zip(labels.chunks(rows))
        .zip(losses.chunks_mut(rows));
    run_jobs(blocks, |((logits, labels), losses)| {
        dispatch(LossAndGradient {
            terms,
            logits,
            labels,
            losses,
            scale,
        });
    });
}

struct Loss<'a, T> {
    terms: LossTerms,
    logits: &'a [T],
    labels: &'a [i64],
    losses: &'a mut [f32],
    lse: &'a mut [f32],
}

impl<T: Element> Kernel for Loss<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = rows(self.logits, self.labels).zip(self.losses.iter_mut().zip(self.lse));
        for ((row, label), (loss, lse)) in rows {
            (*loss, *lse) = match class(self.terms, label) {
                Some(class) => row_loss(s, self.terms, row, class),
                // The row is not read, so a NaN in a padding position has no effect.
                None => (0.0, 0.0),
            };
        }
    }
}

struct Gradient<'a, T> {
    terms: LossTerms,
    logits: &'a mut [T],
    labels: &'a [i64],
    lse: &'a [f32],
    scale: f32,
}

impl<T: Element> Kernel for Gradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let classes = self.logits.len() / self.labels.len().max(1);
        let rows = self.logits.chunks_exact_mut(classes.max(1));
        for ((row, &label), &lse) in rows.zip(self.labels).zip(self.lse) {
            match class(self.terms, label) {
                Some(class) => row_gradient(s, self.terms, row, class, lse, self.scale),
                // Must be written, because this memory still holds logits.
                None => row.fill(T::ZERO),
            }
        }
    }
}

struct LossAndGradient<'a, T> {
    terms: LossTerms,
    logits: &'a mut [T],
    labels: &'a [i64],
    losses: &'a mut [f32],
    scale: f32,
}

impl<T: Element> Kernel for LossAndGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let classes = self.logits.len() / self.labels.len().max(1);
        let rows = self.logits.chunks_exact_mut(classes.max(1));
        for ((row, &label), loss) in rows.zip(self.labels).zip(self.losses) {
            match class(self.terms, label) {
                Some(class) => {
                    let lse;
                    (*loss, lse) = row_loss(s, self.terms, row, class);
                    // Directly after its loss, while the row is in the cache.
                    row_gradient(s, self.terms, row, class, lse, self.scale);
                }
                None => {
                    *loss = 0.0;
                    row.fill(T::ZERO);
                }
            }
        }
    }
}

fn class(terms: LossTerms, label: i64) -> Option<usize> {
    (label != terms.ignore_index).then_some(label as usize)
}

#[inline(always)]
fn rows<'a, T>(logits: &'a [T], labels: &'a [i64]) -> impl Iterator<Item = (&'a [T], i64)> {
    let classes = logits.len() / labels.len().max(1);
    logits
        // `chunks_exact` panics at 0.
        .chunks_exact(classes.max(1))
        .zip(labels.iter().copied())
}

/// Returns `c·tanh(x/c)`.
#[inline(always)]
fn capped<S: Simd>(s: S, x: S::F, softcap: Option<f32>) -> S::F {
    match softcap {
        None => x,
        Some(cap) => s.mul(s.splat(cap), tanh(s, s.mul(x, s.splat(1.0 / cap)))),
    }
}

/// Returns the loss and the `lse`.
#[inline(always)]
fn row_loss<S: Simd, T: Element>(s: S, terms: LossTerms, row: &[T], class: usize) -> (f32, f32) {
    let LossTerms {
        label_smoothing,
        z_loss,
        softcap,
        ..
    } = terms;
    let max = row_max(s, row);
    let max = match softcap {
        None => max,
        // The cap is monotonic.
        Some(cap) => cap * (max / cap).tanh(),
    };
    // Exponentials relative to the largest logit cannot overflow.
    let (shift, mut sum, mut total) = (s.splat(max), s.splat(0.0), s.splat(0.0));
    let (whole, tail) = row.split_at(row.len() - row.len() % overdrive_kernels::LANES);
    each_vector(
        whole.len(),
        #[inline(always)]
        |span| {
            let x = capped(s, load(s, whole, span), softcap);
            sum = s.add(sum, exp(s, s.sub(x, shift)));
            total = s.add(total, x);
        },
    );
    let (mut sum, mut total) = (s.reduce_add(sum), s.reduce_add(total));
    // Lanes past the end would add further exponentials.
    for &x in tail {
        let x = x.to_f32();
        let x = softcap.map_or(x, |cap| cap * (x / cap).tanh());
        sum += (x - max).exp();
        total += x;
    }
    let at_label = row[class].to_f32();
    let at_label = softcap.map_or(at_label, |cap| cap * (at_label / cap).tanh());
    let lse = max + sum.ln();
    let mut loss = lse - at_label;
    if label_smoothing > 0.0 {
        let mean = total / row.len() as f32;
        loss = lse - (1.0 - label_smoothing) * at_label - label_smoothing * mean;
    }
    if z_loss > 0.0 {
        loss += z_loss * lse * lse;
    }
    (loss, lse)
}

/// Returns the largest element, or any value if one is NaN (in which case the loss is NaN anyway).
#[inline(always)]
fn row_max<S: Simd, T: Element>(s: S, row: &[T]) -> f32 {
    // Four at a time, because each comparison depends on the previous one.
    let mut max = [s.splat(f32::NEG_INFINITY); 4];
    let mut vectors = row.chunks_exact(4 * overdrive_kernels::LANES);
    for four in &mut vectors {
        let mut slot = 0;
        each_vector(
            four.len(),
            #[inline(always)]
            |span| {
                max[slot] = s.max(load(s, four, span), max[slot]);
                slot += 1;
            },
        );
    }
    let max = s.max(s.max(max[0], max[1]), s.max(max[2], max[3]));
    let rest = vectors.remainder().iter().map(|x| x.to_f32());
    rest.fold(s.reduce_max(max), f32::max)
}

/// Overwrites the logits with `scale ·` the gradient:
/// `((1 + 2z·lse)·p - ε/V - (1-ε)·[label]) · (1 - (x/c)²)`.
#[inline(always)]
fn row_gradient<S: Simd, T: Element>(
    s: S,
    terms: LossTerms,
    row: &mut [T],
    class: usize,
    lse: f32,
    scale: f32,
) {
    let LossTerms {
        label_smoothing,
        z_loss,
        softcap,
        ..
    } = terms;
    // d(z·lse²)/dx = 2z·lse·p, which joins the gradient of the lse.
    let factor = scale * (1.0 + 2.0 * z_loss * lse);
    let uniform = scale * label_smoothing / row.len() as f32;
    let hit = scale * (1.0 - label_smoothing);
    let at_label = row[class].to_f32();
    let (shift, by, less) = (s.splat(lse), s.splat(factor), s.splat(-uniform));
    match softcap {
        None => each_vector(
            row.len(),
            #[inline(always)]
            |span| {
                let p = exp(s, s.sub(load(s, row, span), shift));
                store(s, s.mul_add(p, by, less), row, span);
            },
        ),
        Some(cap) => each_vector(
            row.len(),
            #[inline(always)]
            |span| {
                let ratio = tanh(s, s.mul(load(s, row, span), s.splat(1.0 / cap)));
                let p = exp(s, s.sub(s.mul(ratio, s.splat(cap)), shift));
                // 1 - tanh², the derivative of the cap.
                let slope = s.mul_add(ratio, s.sub(s.splat(0.0), ratio), s.splat(1.0));
                store(s, s.mul(s.mul_add(p, by, less), slope), row, span);
            },
        ),
    }
    // Computed again for the label, so that in bf16 it is rounded once.
    let ratio = softcap.map(|cap| (at_label / cap).tanh());
    let x = match (softcap, ratio) {
        (Some(cap), Some(ratio)) => cap * ratio,
        _ => at_label,
    };
    let slope = ratio.map_or(1.0, |ratio| 1.0 - ratio * ratio);
    row[class] = T::from_f32(((x - lse).exp() * factor - uniform - hit) * slope);
}
