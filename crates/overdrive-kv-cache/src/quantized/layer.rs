//! What one layer holds: codes, and the last tokens as they were given.

use tch::Tensor;

use super::store::Store;
use crate::Result;
use crate::buffer::Buffer;
use crate::entries::{Entries, Spec};

/// Tokens `0..quantized` as codes, a whole number of blocks, and behind them `tail_len` in full
/// precision.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) spec: Spec,
    pub(super) keys: Store,
    pub(super) values: Store,
    pub(super) quantized: i64,
    pub(super) tail: Buffer,
    pub(super) tail_len: i64,
    /// Tokens that are coded at once.
    pub(super) block: i64,
    /// Tokens that the tail has at least.
    pub(super) residual: i64,
}

/// The tokens in full precision that a step sees: `(B, H, len, D)`.
#[derive(Debug)]
pub(super) struct Recent {
    /// Codes before them.
    pub(super) quantized: i64,
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
    /// The same at the beginning of each head of contiguous tensors `(B, H, room, D)`.
    pub(super) whole: [Tensor; 2],
}

impl Layer {
    pub(super) fn len(&self) -> i64 {
        self.quantized + self.tail_len
    }

    /// Adds tokens; what they see. Codes are made of the oldest tokens of the tail when there is no more
    /// room in it, after this step has seen them as they were.
    pub(super) fn push(&mut self, new: &Entries<'_>) -> Result<Recent> {
        if self.tail_len + new.tokens > self.tail.capacity {
            self.settle()?;
        }
        let quantized = self.quantized;
        if self.tail_len + new.tokens <= self.tail.capacity {
            self.tail.write(self.tail_len, new, 0, new.tokens)?;
            self.tail_len += new.tokens;
            let (keys, values) = self.tail.view(0, self.tail_len)?;
            let whole = [&self.tail.keys, &self.tail.values].map(Tensor::shallow_clone);
            return Ok(Recent {
                quantized,
                keys,
                values,
                whole,
            });
        }
        let (keys, values) = self.tail.view(0, self.tail_len)?;
        let join = |held: &Tensor, new: &Tensor| match self.tail_len {
            0 => new.f_contiguous(),
            _ => Tensor::f_cat(&[held, new], 2),
        };
        let (keys, values) = (join(&keys, new.keys)?, join(&values, new.values)?);
        let count = self.tail_len + new.tokens;
        let coded = (count - self.residual) / self.block * self.block;
        self.encode(&keys.f_narrow(2, 0, coded)?, &values.f_narrow(2, 0, coded)?)?;
        let all = Entries {
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

    /// Codes the oldest tokens of the tail, in whole blocks, but for the last `residual`.
    fn settle(&mut self) -> Result<()> {
        let coded = (self.tail_len - self.residual).max(0) / self.block * self.block;
        if coded == 0 {
            return Ok(());
        }
        let (keys, values) = self.tail.view(0, coded)?;
        self.encode(&keys, &values)?;
        let (keys, values) = self.tail.view(coded, self.tail_len - coded)?;
        let rest = Entries {
            keys: &keys,
            values: &values,
            spec: self.spec,
            tokens: self.tail_len - coded,
        };
        // Over its own beginning: the copy may overlap, so it goes through memory of its own.
        let (keys, values) = (
            crate::buffer::copied(rest.keys)?,
            crate::buffer::copied(rest.values)?,
        );
        let rest = Entries {
            keys: &keys,
            values: &values,
            ..rest
        };
        self.tail.write(0, &rest, 0, rest.tokens)?;
        self.tail_len -= coded;
        Ok(())
    }

    fn encode(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let needed = self.quantized + keys.size()[2];
        if needed > self.keys.capacity {
            let capacity = needed.max(2 * self.keys.capacity);
            self.keys = self.keys.resized(capacity, self.quantized)?;
            self.values = self.values.resized(capacity, self.quantized)?;
        }
        self.keys.quantize(self.quantized, keys)?;
        self.values.quantize(self.quantized, values)?;
        self.quantized = needed;
        Ok(())
    }

    /// Forgets all but the first `len` tokens. Of a block that is cut, the tokens that stay become full
    /// numbers again (those that their codes stand for).
    pub(super) fn truncate(&mut self, len: i64) -> Result<()> {
        if len >= self.quantized {
            self.tail_len = len - self.quantized;
            return Ok(());
        }
        let whole = len / self.block * self.block;
        let rest = len - whole;
        if rest > 0 {
            let block = |store: &Store| -> Result<Tensor> {
                let rows = store.by_operators(whole, self.block)?;
                Ok(rows.f_to_kind(self.spec.kind)?)
            };
            let (keys, values) = (block(&self.keys)?, block(&self.values)?);
            let kept = Entries {
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

    /// With row `i` from row `rows[i]`.
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
