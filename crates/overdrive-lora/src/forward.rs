//! What a map computes: the base's product, and what its adapters add.

use overdrive_sys::autocast;
use tch::{Kind, Tensor};

use crate::low_rank::{Part, add_low_rank};
use crate::{AdaptedLinear, Adapter, BaseWeight, Result, dora};

impl AdaptedLinear {
    /// `x (…, I)` to `(…, O)`: the base and all active adapters. `fused`: whether products of dense
    /// weights are made by overdrive-fused, or by libtorch's operator.
    ///
    /// Adapters are computed in their own kind (under autocast in its kind), and the result has the
    /// base's.
    ///
    /// # Errors
    /// When shapes do not fit or libtorch fails.
    pub fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let (base, bias) = self.in_use();
        if self.working().is_empty() {
            return product(base, x, bias, fused);
        }
        let shared = shared_input(x)?;
        let x = shared.as_ref().unwrap_or(x);
        self.adapted(x, fused)
    }

    /// The base and the adapters one after another, as PEFT orders them: DoRA scales what is there when
    /// its turn comes.
    fn adapted(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let working = self.working();
        let first = &self.adapters[working[0]].1;
        // DoRA wants the product without the bias: where it is first, the bias waits.
        let mut owed = match (&self.bias, &first.magnitude) {
            (Some(bias), Some(_)) if self.dropout(first) == 0.0 => Some(bias),
            _ => None,
        };
        let bias = self.bias.as_ref().filter(|_| owed.is_none());
        let mut y = product(&self.base, x, bias, fused)?;
        let kind = y.kind();
        let mut pending = Vec::new();
        for index in working {
            let adapter = &self.adapters[*index].1;
            let part = Part {
                start: 0,
                adapter,
                dropout: self.dropout(adapter),
            };
            let Some(magnitude) = &adapter.magnitude else {
                pending.push(part);
                continue;
            };
            y = add_low_rank(y, x, &std::mem::take(&mut pending))?;
            let factor = dora::factor(&self.base, adapter, magnitude)?;
            if part.dropout > 0.0 {
                y = self.dora_with_dropout(y, x, adapter, &factor, fused)?;
                continue;
            }
            if let (Some(bias), None) = (&self.bias, owed) {
                y = y.f_sub(bias)?;
            }
            let mut scaled = add_low_rank(y, x, &[part])?.f_mul(&factor)?;
            y = match owed.take().or(self.bias.as_ref()) {
                Some(bias) => scaled.f_add_(bias)?,
                None => scaled,
            };
            y = y.f_to_kind(kind)?;
        }
        add_low_rank(y, x, &pending)
    }

    /// DoRA whose low-rank part, and only that, sees inputs through dropout.
    fn dora_with_dropout(
        &self,
        y: Tensor,
        x: &Tensor,
        adapter: &Adapter,
        factor: &Tensor,
        fused: bool,
    ) -> Result<Tensor> {
        let none = None::<&Tensor>;
        let dropped = x.f_dropout(self.dropout(adapter), true)?;
        let base = product(&self.base, &dropped, None, fused)?;
        let low = dropped
            .f_to_kind(adapter.a.kind())?
            .f_linear(&adapter.a, none)?
            .f_linear(&adapter.b, none)?
            .f_mul_scalar(adapter.scale)?;
        let change = base
            .f_mul(&factor.f_sub_scalar(1.0)?)?
            .f_add(&low.f_mul(factor)?)?;
        let kind = y.kind();
        Ok(y.f_add(&change)?.f_to_kind(kind)?)
    }

    /// The adapters that count now.
    pub(crate) fn working(&self) -> &[usize] {
        if self.enabled && self.merged.is_empty() && self.active_copy.is_none() {
            &self.active
        } else {
            &[]
        }
    }

    /// The adapters that count now, as parts of a product that begin at output `start`; `None` if they
    /// are more than a sum.
    pub(crate) fn parts(&self, start: i64) -> Option<Vec<Part<'_>>> {
        let part = |index: &usize| {
            let adapter = &self.adapters[*index].1;
            let part = Part {
                start,
                adapter,
                dropout: self.dropout(adapter),
            };
            adapter.magnitude.is_none().then_some(part)
        };
        self.working().iter().map(part).collect()
    }

    /// Weight and bias that count now.
    pub(crate) fn in_use(&self) -> (&BaseWeight, Option<&Tensor>) {
        match self.active_copy {
            Some(index) if self.enabled => {
                let (_, base, bias) = &self.copies[index];
                (base, bias.as_ref())
            }
            _ => (&self.base, self.bias.as_ref()),
        }
    }

    fn dropout(&self, adapter: &Adapter) -> f64 {
        if self.training {
            adapter.config.lora_dropout
        } else {
            0.0
        }
    }
}

/// `x` in autocast's kind, where it is on: cast once for the base and the adapters, which both keep
/// it for backward.
pub(crate) fn shared_input(x: &Tensor) -> Result<Option<Tensor>> {
    match autocast::state(x.device()) {
        Ok(state) if state.enabled && x.kind() == Kind::Float => {
            Ok(Some(x.f_to_kind(state.dtype)?))
        }
        _ => Ok(None),
    }
}

/// The base's product alone.
pub(crate) fn product(
    base: &BaseWeight,
    x: &Tensor,
    bias: Option<&Tensor>,
    fused: bool,
) -> Result<Tensor> {
    Ok(match base {
        BaseWeight::Dense {
            weight,
            transposed: true,
        } => x.f_linear(&weight.f_tr()?, bias)?,
        BaseWeight::Dense { weight, .. } if fused => overdrive_fused::linear(x, weight, bias)?,
        BaseWeight::Dense { weight, .. } => x.f_linear(weight, bias)?,
        BaseWeight::Quantized(weight) => overdrive_quantization::linear(x, weight, bias)?,
    })
}
