//! The tokens of one layer: quantized tokens, and the last tokens in full precision.

use tch::Tensor;

use super::store::Store;
use crate::Result;
use crate::buffer::{Buffer, copied};
use crate::key_values::{KeyValues, Spec};

/// The tokens `0..quantized` as codes, a whole number of blocks, followed by `tail_len` tokens in full
/// precision.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) spec: Spec,
    pub(super) keys: Store,
    pub(super) values: Store,
    pub(super) quantized: i64,
    pub(super) tail: Buffer,
    pub(super) tail_len: i64,
    /// The number of tokens that are quantized at once.
    pub(super) block: i64,
    /// The least number of tokens in the tail.
    pub(super) residual: i64,
}

/// The tokens `(B, H, len, D)` that a step reads in full precision.
#[derive(Debug)]
pub(super) struct Recent {
    /// The number of quantized tokens before them.
    pub(super) quantized: i64,
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
    /// The same tokens at the beginning of each head of contiguous tensors `(B, H, capacity, D)`.
    pub(super) whole: [Tensor; 2],
}

impl Layer {
    pub(super) fn len(&self) -> i64 {
        self.quantized + self.tail_len
    }

    /// Appends tokens and returns the tokens that they see in full precision. If the tail is full, its oldest
    /// tokens are quantized for later steps; this step still reads them in full precision.
    pub(super) fn push(&mut self, new: &KeyValues<'_>) -> Result<Recent> {
        if self.tail_len + new.tokens > self.tail.capacity {
            self.quantize_tail()?;
        }
        let quantized = self.quantized;
        if self.tail_len + new.tokens <= self.tail.capacity {
            self.tail.write(self.tail_len, new, 0, new.tokens)?;
            self.tail_len += new.tokens;
            let (keys, values) = self.tail.view(0, self.tail_len)?;
            let whole = [&self.tail.keys, &self.tail.values].map(|tensor| tensor.shallow_clone());
            return Ok(Recent {
                quantized,
                keys,
                values,
                whole,
            });
        }
        let (keys, values) = self.tail.view(0, self.tail_len)?;
        // More new tokens than the tail has room for, such as a prompt: quantizes tail and new tokens
        // together, directly from their tensors.
        let join = |held: &Tensor, new: &Tensor| match self.tail_len {
            0 => new.f_contiguous(),
            _ => Tensor::f_cat(&[held, new], 2),
        };
        let (keys, values) = (join(&keys, new.keys)?, join(&values, new.values)?);
        let count = self.tail_len + new.tokens;
        let coded = (count - self.residual) / self.block * self.block;
        self.encode(&keys.f_narrow(2, 0, coded)?, &values.f_narrow(2, 0, coded)?)?;
        let all = KeyValues {
            keys: &keys,
            values: &values,
            spec: self.spec,
            tokens: count,
        };
        self.tail.write(0, &all, coded, count - coded)?;
        self.tail_len = count - coded;
        Ok(Recent {
            quantized,
            whole: [keys.shallow_clone(), values.shallow_clone()],
            keys,
            values,
        })
    }

    /// Quantizes the oldest tokens of the tail, in whole blocks, except for the last `residual`.
    fn quantize_tail(&mut self) -> Result<()> {
        let coded = (self.tail_len - self.residual).max(0) / self.block * self.block;
        if coded == 0 {
            return Ok(());
        }
        let (keys, values) = self.tail.view(0, coded)?;
        self.encode(&keys, &values)?;
        let rest = self.tail_len - coded;
        let (keys, values) = self.tail.view(coded, rest)?;
        // The remaining tokens move to the beginning of the same buffer; source and target may overlap,
        // so the copy goes through other memory.
        let (keys, values) = (copied(&keys)?, copied(&values)?);
        let moved = KeyValues {
            keys: &keys,
            values: &values,
            spec: self.spec,
            tokens: rest,
        };
        self.tail.write(0, &moved, 0, rest)?;
        self.tail_len -= coded;
        Ok(())
    }

    fn encode(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let needed = self.quantized + keys.size()[2];
        if needed > self.keys.capacity {
            // Doubled, as in a `DynamicCache`, so that fewer than two tokens are copied for each appended token.
            let capacity = needed.max(2 * self.keys.capacity);
            self.keys = self.keys.resized(capacity, self.quantized)?;
            self.values = self.values.resized(capacity, self.quantized)?;
        }
        self.keys.quantize(self.quantized, keys)?;
        self.values.quantize(self.quantized, values)?;
        self.quantized = needed;
        Ok(())
    }

    /// Drops all but the first `len` tokens. If a block is cut, its remaining tokens are dequantized into the tail.
    pub(super) fn truncate(&mut self, len: i64) -> Result<()> {
        if len >= self.quantized {
            self.tail_len = len - self.quantized;
            return Ok(());
        }
        // Scales cover whole blocks, so a cut block cannot keep its codes.
        let whole = len / self.block * self.block;
        let rest = len - whole;
        if rest > 0 {
            let block = |store: &Store| -> Result<Tensor> {
                let rows = store.dequantize_by_operators(whole, self.block)?;
                Ok(rows.f_to_kind(self.spec.kind)?)
            };
            let (keys, values) = (block(&self.keys)?, block(&self.values)?);
            let kept = KeyValues {
                keys: &keys,
                values: &values,
                spec: self.spec,
                tokens: self.block,
            };
            self.tail.write(0, &kept, 0, rest)?;
        }
        (self.quantized, self.tail_len) = (whole, rest);
        Ok(())
    }

    /// Returns a layer whose row `i` is row `rows[i]` of this one.
    pub(super) fn selected(&self, rows: &Tensor) -> Result<Layer> {
        let tail = self.tail.selected(rows, self.tail_len)?;
        Ok(Layer {
            spec: tail.spec,
            keys: self.keys.selected(rows)?,
            values: self.values.selected(rows)?,
            tail,
            ..*self
        })
    }

    pub(super) fn copy(&self) -> Result<Layer> {
        Ok(Layer {
            keys: self.keys.copy()?,
            values: self.values.copy()?,
            tail: self.tail.resized(self.tail.capacity, self.tail_len)?,
            ..*self
        })
    }
}
