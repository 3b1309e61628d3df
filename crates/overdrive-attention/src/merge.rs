use tch::Tensor;

use crate::{Error, Layout, Result};

/// Returns the attention over the union of disjoint sets of keys, from the results over each set.
///
/// `outputs` are (B, H, T, D) or (B, T, H, D), depending on `layout`; `lses` are the natural log-sum-exps
/// (B, H, T) that [`attention_with_lse`](crate::attention_with_lse) returns. Each key must be in only one
/// set. A result with a log-sum-exp of `-inf` (no key was seen) has no weight. At most one of the results
/// may include sink logits.
///
/// It consists of differentiable operators. Returns the output in the dtype of the first output, and the
/// log-sum-exp.
///
/// # Errors
/// [`Error::Merge`] if there are none or their numbers differ; [`Error::Tch`] if shapes differ.
///
/// ```
/// use overdrive_attention::{AttentionOptions, Layout, attention, attention_with_lse, merge};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let random = |n: i64| Tensor::randn([1, 2, n, 8], (Kind::Float, Device::Cpu));
/// let (query, key, value) = (random(3), random(10), random(10));
/// let options = AttentionOptions::default();
/// let part = |from, n| attention_with_lse(&query, &key.narrow(2, from, n), &value.narrow(2, from, n), &options);
/// let ((first, first_lse), (second, second_lse)) = (part(0, 4)?, part(4, 6)?);
/// let (merged, _) = merge(&[first, second], &[first_lse, second_lse], Layout::Bhtd)?;
/// assert!(merged.allclose(&attention(&query, &key, &value, &options)?, 1e-5, 1e-6, false));
/// # Ok(())
/// # }
/// ```
pub fn merge(outputs: &[Tensor], lses: &[Tensor], layout: Layout) -> Result<(Tensor, Tensor)> {
    let (Some(first), Some(first_lse)) = (outputs.first(), lses.first()) else {
        return Err(Error::Merge {
            outputs: outputs.len(),
            lses: lses.len(),
        });
    };
    if outputs.len() != lses.len() {
        return Err(Error::Merge {
            outputs: outputs.len(),
            lses: lses.len(),
        });
    }
    // f32 for half precisions, so that the sum of several outputs is rounded once.
    let kind = first_lse.kind();
    let lse = Tensor::f_stack(lses, 0)?.f_logsumexp([0_i64], false)?;
    // Where no part saw a key the difference would be NaN.
    let base = lse.f_nan_to_num(0.0, None, f64::from(f32::MIN))?;
    let mut sum: Option<Tensor> = None;
    for (output, part) in outputs.iter().zip(lses) {
        let weight = part.f_sub(&base)?.f_exp()?;
        let weight = match layout {
            Layout::Bhtd => weight.f_unsqueeze(-1)?,
            Layout::Bthd => weight.f_transpose(1, 2)?.f_unsqueeze(-1)?,
        };
        let term = output.f_to_kind(kind)?.f_mul(&weight)?;
        sum = Some(match sum {
            Some(sum) => sum.f_add(&term)?,
            None => term,
        });
    }
    let merged = sum.unwrap_or_else(|| first.shallow_clone());
    Ok((merged.f_to_kind(first.kind())?, lse))
}
