use tch::Tensor;

use crate::Result;
use crate::kernels::Argument::{I32, I64, Tensor as Elements};
use crate::kernels::{Kernels, Request, dtype, is_aligned, multiples_of_16};

/// The keys and values of new tokens, and where they go.
#[derive(Debug, Clone, Copy)]
pub struct PagedWrite<'a> {
    /// The keys `(T, H, D)`, in f32, f16 or bf16, with their channels side by side.
    pub keys: &'a Tensor,
    /// The values, of the shape and dtype of the keys.
    pub values: &'a Tensor,
    /// The pool of keys `(blocks, H, block, D)`, which is written.
    pub key_pool: &'a Tensor,
    /// The pool of values, which is written.
    pub value_pool: &'a Tensor,
    /// The block of each token, i64 `(T,)`.
    pub blocks: &'a Tensor,
    /// The row of each token in its block, i64 `(T,)`.
    pub places: &'a Tensor,
}

impl Kernels {
    /// Writes keys and values to their rows in one launch. Returns `false`, with nothing done, if there is no kernel for
    /// this call. The host reads neither blocks nor places, which must be inside the pools.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if the kernel cannot be loaded or launched.
    pub fn paged_write(&self, call: &PagedWrite<'_>) -> Result<bool> {
        let new = [call.keys, call.values];
        let pools = [call.key_pool, call.value_pool];
        let &[tokens, heads, dim] = call.keys.size().as_slice() else {
            return Ok(false);
        };
        let steps = |tensor: &Tensor, axes: usize| tensor.stride()[..axes].to_vec();
        let tensors = new.iter().map(|tensor| (*tensor, 2));
        let tensors: Vec<(&Tensor, usize)> =
            tensors.chain(pools.iter().map(|pool| (*pool, 3))).collect();
        let is_wide = |(tensor, axes): &(&Tensor, usize)| {
            tensor.dim() == axes + 1
                && tensor.kind() == call.keys.kind()
                && tensor.stride()[*axes] == 1
                && multiples_of_16(&steps(tensor, *axes))
                && is_aligned(tensor)
        };
        let indices = [call.blocks, call.places];
        let fits = tokens > 0
            && call.values.size() == call.keys.size()
            && call.value_pool.size() == call.key_pool.size()
            && indices.iter().all(|tensor| tensor.size() == [tokens])
            && multiples_of_16(&[dim])
            && tensors.iter().all(is_wide)
            && (pools.iter()).all(|pool| pool.size()[1] == heads && pool.size()[3] == dim)
            && indices
                .iter()
                .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
        let (true, Some(dtype)) = (fits, dtype(call.keys.kind())) else {
            return Ok(false);
        };
        let found = self.find(&Request {
            kernel: "paged_write",
            dtype,
            constants: Vec::new(),
            least: ("DIM", dim),
            aligned: true,
        })?;
        let Some(kernel) = found else {
            return Ok(false);
        };
        let mut arguments = vec![
            ("keys", Elements(call.keys)),
            ("values", Elements(call.values)),
            ("key_pool", Elements(call.key_pool)),
            ("value_pool", Elements(call.value_pool)),
            ("blocks", Elements(call.blocks)),
            ("places", Elements(call.places)),
            ("dim", I32(dim)),
        ];
        let names = [
            "k_token", "k_head", "v_token", "v_head", "kp_block", "kp_head", "kp_row", "vp_block",
            "vp_head", "vp_row",
        ];
        let steps = tensors
            .iter()
            .flat_map(|(tensor, axes)| steps(tensor, *axes));
        arguments.extend(names.into_iter().zip(steps.map(I64)));
        self.launch(&kernel, [tokens as usize, heads as usize], &arguments)?;
        Ok(true)
    }
}
