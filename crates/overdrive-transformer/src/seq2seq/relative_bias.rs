use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;

/// T5's relative positions: a number for each head and bucket of distances that is added to the scores (Raffel et
/// al. 2020, arXiv:1910.10683). All blocks of a stack share it; the first one has the parameter.
#[derive(Debug)]
pub(super) struct RelativeBias {
    name: String,
    /// `(buckets, H)`.
    table: Tensor,
    /// `true` in an encoder, where keys after the query have buckets of their own.
    bidirectional: bool,
    max_distance: i64,
}

impl RelativeBias {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        bidirectional: bool,
        max_distance: i64,
    ) -> Result<RelativeBias> {
        let name = format!("{name}.weight");
        Ok(RelativeBias {
            table: parameters.take(&name)?,
            name,
            bidirectional,
            max_distance,
        })
    }

    /// Returns the numbers `(1, H, T, past + T)` of `tokens` queries after `past` other tokens.
    pub(super) fn forward(&self, past: i64, tokens: i64) -> Result<Tensor> {
        let options = (Kind::Int64, self.table.device());
        let queries = Tensor::f_arange_start(past, past + tokens, options)?.f_unsqueeze(1)?;
        let keys = Tensor::f_arange(past + tokens, options)?.f_unsqueeze(0)?;
        let buckets = self.buckets(&keys.f_sub(&queries)?)?;
        let values = Tensor::f_embedding(&self.table, &buckets, -1, false, false)?;
        Ok(values
            .f_permute([2, 0, 1])?
            .f_unsqueeze(0)?
            .f_contiguous()?)
    }

    /// Returns the bucket of each distance of a key from a query, positive for a key after it.
    ///
    /// Half of the buckets are exact distances; the others grow logarithmically up to the maximum distance. The
    /// operators and their order are those of transformers, because rounding decides the bucket of a distance on a
    /// boundary.
    fn buckets(&self, distance: &Tensor) -> Result<Tensor> {
        let mut count = self.table.size()[0];
        let (offset, distance) = if self.bidirectional {
            count /= 2;
            let after = distance.f_gt(0)?.f_to_kind(Kind::Int64)?;
            (after.f_mul_scalar(count)?, distance.f_abs()?)
        } else {
            let before = distance.f_clamp_max(0i64)?.f_neg()?;
            (
                Tensor::f_zeros([1], (Kind::Int64, Device::Cpu))?.f_to_device(before.device())?,
                before,
            )
        };
        let exact = count / 2;
        let decades = (self.max_distance as f64 / exact as f64).ln();
        let far = distance
            .f_to_kind(Kind::Float)?
            .f_div_scalar(exact)?
            .f_log()?
            .f_div_scalar(decades)?
            .f_mul_scalar(count - exact)?
            .f_to_kind(Kind::Int64)?
            .f_add_scalar(exact)?
            .f_clamp_max(count - 1)?;
        Ok(distance
            .f_where_self(&distance.f_lt(exact)?, &far)?
            .f_add(&offset)?)
    }

    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        visit(&self.name, &mut self.table)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    fn buckets(bidirectional: bool, distances: &[i64]) -> Vec<i64> {
        let bias = RelativeBias {
            name: String::new(),
            table: Tensor::zeros([32, 1], (Kind::Float, Device::Cpu)),
            bidirectional,
            max_distance: 128,
        };
        let buckets = bias.buckets(&Tensor::from_slice(distances)).unwrap();
        Vec::try_from(buckets).unwrap()
    }

    #[test]
    fn buckets_are_those_of_transformers() {
        // `T5Attention._relative_position_bucket` of transformers 5.23 on the same distances.
        let distances = [
            -1000, -128, -127, -64, -32, -17, -16, -15, -8, -7, -1, 0, 1, 7, 8, 9, 16, 32, 64, 127,
            1000,
        ];
        assert_eq!(
            buckets(true, &distances),
            [
                15, 15, 15, 14, 12, 10, 10, 9, 8, 7, 1, 0, 17, 23, 24, 24, 26, 28, 30, 31, 31
            ]
        );
        assert_eq!(
            buckets(false, &distances),
            [
                31, 31, 31, 26, 21, 16, 16, 15, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
            ]
        );
    }
}
