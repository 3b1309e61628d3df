//! A mixture of experts on rows of f32 in slices, for decoding steps.

use overdrive_nn::{AdapterRows, joint_forward_into};

use super::MixtureOfExperts;
use crate::Result;

/// An expert of a row, and the factor of its output.
struct Choice {
    expert: usize,
    row: usize,
    weight: f32,
}

impl MixtureOfExperts {
    /// Computes the block for rows of f32 in slices; `joint` and `inner` are scratch buffers. Only the weights of the
    /// chosen experts are read, each once. Returns `false` if it needed operators on tensors.
    pub(crate) fn forward_rows(
        &self,
        x: &[f32],
        joint: &mut Vec<f32>,
        inner: &mut Vec<f32>,
        y: &mut [f32],
    ) -> Result<bool> {
        let [count, width] = self.router.layer().weight().size();
        let [count, width] = [count, width].map(|size| size.unsigned_abs() as usize);
        let mut scores = vec![0.0; x.len() / width.max(1) * count];
        let mut on_slices = joint_forward_into(x, &[self.router.layer()], &mut scores)?;
        let mut choices = Vec::new();
        self.router.choose(&scores, count, |row, expert, weight| {
            choices.push(Choice {
                expert,
                row,
                weight,
            });
        });
        choices.sort_unstable_by_key(|choice| (choice.expert, choice.row));
        y.fill(0.0);
        let (mut rows, mut outputs) = (Vec::new(), Vec::new());
        let adapters = AdapterRows::current();
        for choices in choices.chunk_by(|a, b| a.expert == b.expert) {
            rows.clear();
            for choice in choices {
                rows.extend_from_slice(&x[choice.row * width..][..width]);
            }
            outputs.resize(rows.len(), 0.0);
            let own = adapters.as_ref().map(|rows| {
                let tokens: Vec<i64> = choices.iter().map(|choice| choice.row as i64).collect();
                rows.select(&tokens)
            });
            let _scope = own.transpose()?.map(AdapterRows::scope);
            let expert = &self.experts[choices[0].expert];
            on_slices &= expert.forward_rows(&rows, joint, inner, &mut outputs)?;
            for (choice, output) in choices.iter().zip(outputs.chunks_exact(width)) {
                let y = &mut y[choice.row * width..][..width];
                for (y, output) in y.iter_mut().zip(output) {
                    *y += choice.weight * output;
                }
            }
        }
        if let Some(shared) = &self.shared {
            on_slices &= shared.add_rows(x, width, [joint, inner], y)?;
        }
        Ok(on_slices)
    }
}
