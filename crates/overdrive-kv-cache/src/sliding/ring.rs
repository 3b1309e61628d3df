//! The tokens that one layer keeps.

use tch::Tensor;

use super::rotation::{Rotation, rotate};
use crate::KvView;
use crate::Result;
use crate::buffer::{Buffer, copied};
use crate::key_values::{KeyValues, Spec};

/// The number of tokens that a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// The number of tokens that a query sees besides the sinks; `None` means all.
    pub(super) window: Option<i64>,
    pub(super) sinks: i64,
    pub(super) slack: i64,
}

impl Limits {
    /// Returns the number of tokens that are kept after the sinks.
    fn ring(&self) -> Option<i64> {
        self.window.map(|window| window + self.slack)
    }

    /// Returns the position of the first token after the sinks that a query at `position` sees.
    pub(super) fn first_seen(&self, position: i64) -> i64 {
        let first = self.window.map_or(0, |window| position + 1 - window);
        first.max(self.sinks)
    }
}

/// The sinks (tokens `0..sinks`) in the first slots, followed by the last tokens: token `n` in slot
/// `sinks + (n - sinks) mod ring`. As long as nothing has been dropped, token `n` lies in slot `n`, and
/// the buffer grows.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) buffer: Buffer,
    pub(super) limits: Limits,
    /// The number of tokens so far.
    pub(super) total: i64,
    /// The position of the first token after the sinks that is still held.
    pub(super) first: i64,
    /// The number of tokens by which the sink keys in the buffer are rotated, and the keys before that.
    rotation: i64,
    unrotated_sinks: Option<Tensor>,
}

impl Ring {
    pub(super) fn new(spec: Spec, limits: Limits, capacity: i64) -> Result<Ring> {
        // At most what the ring needs, even if the caller expects a larger capacity.
        let most = limits.ring().map_or(i64::MAX, |ring| limits.sinks + ring);
        Ok(Ring {
            buffer: Buffer::new(spec, capacity.clamp(1, most))?,
            limits,
            total: 0,
            first: limits.sinks,
            rotation: 0,
            unrotated_sinks: None,
        })
    }

    /// Returns `true` if each token lies in the slot of its position.
    pub(super) fn is_linear(&self) -> bool {
        self.first == self.limits.sinks
    }

    /// Returns `true` if each token still lies in the slot of its position after `new` more tokens.
    pub(super) fn stays_linear(&self, new: i64) -> bool {
        let ring = self.limits.ring();
        let fits = ring.is_none_or(|ring| self.total + new <= self.limits.sinks + ring);
        self.is_linear() && fits
    }

    /// Returns the number of sinks that are held.
    pub(super) fn sinks(&self) -> i64 {
        self.limits.sinks.min(self.total)
    }

    /// Returns the number of slots in use.
    fn used(&self) -> i64 {
        if self.is_linear() {
            self.total
        } else {
            self.buffer.capacity
        }
    }

    /// Appends tokens, overwriting the oldest if there is no other room.
    pub(super) fn push(&mut self, new: &KeyValues<'_>) -> Result<()> {
        let (needed, capacity) = (self.total + new.tokens, self.buffer.capacity);
        let ring = self.limits.ring();
        let most = ring.map_or(i64::MAX, |ring| self.limits.sinks + ring);
        // Once tokens have been dropped, the buffer has its final size.
        if self.is_linear() && capacity < needed.min(most) {
            let larger = needed.max(2 * capacity).min(most);
            self.buffer = self.buffer.resized(larger, self.total)?;
        }
        self.write(self.total, new, 0, new.tokens)?;
        self.total = needed;
        if let Some(ring) = ring {
            self.first = self.first.max(needed - ring);
        }
        Ok(())
    }

    /// Writes `count` of the `new` tokens, beginning with the new token `from`, into the slots of the positions
    /// from `token` on. If the ring cannot hold all of them, writes only the last ones.
    fn write(&mut self, token: i64, new: &KeyValues<'_>, from: i64, count: i64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let sinks = self.limits.sinks;
        let Some(ring) = self.limits.ring() else {
            return self.buffer.write(token, new, from, count);
        };
        let to_sinks = (sinks - token).clamp(0, count);
        if to_sinks > 0 {
            self.buffer.write(token, new, from, to_sinks)?;
        }
        // Earlier tokens would be overwritten by later ones of the same call.
        let mut next = to_sinks.max(count - ring);
        while next < count {
            let slot = (token + next - sinks) % ring;
            let run = (count - next).min(ring - slot);
            self.buffer.write(sinks + slot, new, from + next, run)?;
            next += run;
        }
        Ok(())
    }

    /// Returns the slots of the tokens `from..total` after the sinks as runs, oldest first.
    fn runs(&self, from: i64) -> [(i64, i64); 2] {
        let (sinks, count) = (self.limits.sinks, (self.total - from).max(0));
        match self.limits.ring() {
            Some(ring) if !self.is_linear() => {
                let slot = (from - sinks) % ring;
                let run = count.min(ring - slot);
                [(sinks + slot, run), (sinks, count - run)]
            }
            _ => [(from, count), (0, 0)],
        }
    }

    /// Returns the sinks (if `with_sinks`), the tokens from `from` on, and the `new` tokens, in order; copied
    /// unless they are contiguous.
    pub(super) fn ordered(
        &self,
        with_sinks: bool,
        from: i64,
        new: Option<&KeyValues<'_>>,
    ) -> Result<(Tensor, Tensor)> {
        let sinks = if with_sinks { self.sinks() } else { 0 };
        let [first, second] = self.runs(from.max(self.sinks()));
        let runs: Vec<_> = match first {
            (slot, count) if slot == sinks => vec![(0, sinks + count), second],
            _ => vec![(0, sinks), first, second],
        };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (slot, count) in runs.into_iter().filter(|(_, count)| *count > 0) {
            let (k, v) = self.buffer.view(slot, count)?;
            keys.push(k);
            values.push(v);
        }
        if let Some(new) = new {
            keys.push(new.keys.shallow_clone());
            values.push(new.values.shallow_clone());
        }
        match keys.len() {
            0 => self.buffer.view(0, 0),
            1 => Ok((keys.swap_remove(0), values.swap_remove(0))),
            _ => Ok((Tensor::f_cat(&keys, 2)?, Tensor::f_cat(&values, 2)?)),
        }
    }

    /// Returns a view of all slots, in slot order.
    pub(super) fn unordered(&self) -> Result<KvView> {
        let (keys, values) = self.buffer.view(0, self.used())?;
        Ok(KvView::new(keys, values))
    }

    /// Returns the slots that the last query sees through `window`, bool `(slots,)`, for a ring
    /// that has dropped tokens; `None` means all slots.
    pub(super) fn seen_slots(&self, window: i64) -> Result<Option<Tensor>> {
        let from = self.first.max(self.total - window);
        let sinks = self.limits.sinks;
        if self.total - from == self.used() - sinks {
            return Ok(None);
        }
        let options = (tch::Kind::Bool, self.buffer.spec.device);
        let seen = Tensor::f_zeros([self.used()], options)?;
        for (slot, count) in [(0, sinks)].into_iter().chain(self.runs(from)) {
            let _same = seen.f_narrow(0, slot, count)?.f_fill_(1i64)?;
        }
        Ok(Some(seen))
    }

    /// Returns the columns of `mask (…, S)` in slot order. Returns `None` if slots hold tokens that a
    /// truncation removed, because the mask has no columns for them.
    pub(super) fn columns_by_slot(&self, mask: &Tensor) -> Result<Option<Tensor>> {
        let Some(ring) = self.limits.ring() else {
            return Ok(None);
        };
        let sinks = self.limits.sinks;
        if self.first != self.total - ring || mask.size().last() != Some(&self.total) {
            return Ok(None);
        }
        // The next token would go to slot `next`, which holds the oldest token.
        let next = (self.total - sinks) % ring;
        let columns = [
            mask.f_narrow(-1, 0, sinks)?,
            mask.f_narrow(-1, self.total - next, next)?,
            mask.f_narrow(-1, self.first, ring - next)?,
        ];
        Ok(Some(Tensor::f_cat(&columns, -1)?))
    }

    /// Returns the original sink keys.
    pub(super) fn original_sinks(&self) -> Result<Tensor> {
        match &self.unrotated_sinks {
            Some(given) => Ok(given.shallow_clone()),
            None => Ok(self.buffer.keys.f_narrow(2, 0, self.sinks())?),
        }
    }

    /// Rotates the sink keys in the buffer to `rotation.tokens` tokens after their original positions.
    pub(super) fn rotate_sinks(&mut self, rotation: &Rotation) -> Result<()> {
        if rotation.tokens == self.rotation {
            return Ok(());
        }
        // Always rotates the original keys: rotating rotated keys would accumulate rounding
        // errors.
        let given = match self.unrotated_sinks.take() {
            Some(given) => given,
            None => copied(&self.original_sinks()?)?,
        };
        let mut slots = self.buffer.keys.f_narrow(2, 0, self.sinks())?;
        slots.f_copy_(&rotate(&given, rotation)?)?;
        self.unrotated_sinks = Some(given);
        self.rotation = rotation.tokens;
        Ok(())
    }

    /// Restores the original sink keys in the buffer.
    pub(super) fn restore_sinks(&mut self) -> Result<()> {
        if let Some(given) = self.unrotated_sinks.take() {
            self.buffer
                .keys
                .f_narrow(2, 0, given.size()[2])?
                .f_copy_(&given)?;
            self.rotation = 0;
        }
        Ok(())
    }

    /// Returns `true` if the next query would miss a token after a truncation to `len` tokens.
    pub(super) fn misses_tokens_at(&self, len: i64) -> bool {
        len > self.limits.sinks && self.first > self.limits.first_seen(len)
    }

    /// Drops all but the first `len` tokens; [`misses_tokens_at`](Ring::misses_tokens_at) must be
    /// `false`.
    pub(super) fn truncate(&mut self, len: i64) -> Result<()> {
        if len <= self.limits.sinks {
            self.restore_sinks()?;
            self.first = self.limits.sinks;
        }
        self.total = len;
        Ok(())
    }

    /// Returns a copy of this ring whose buffer is the result of `buffer` for this ring's buffer and number of
    /// used slots.
    pub(super) fn with(
        &self,
        buffer: impl Fn(&Buffer, i64) -> Result<Buffer>,
        sinks: impl Fn(&Tensor) -> std::result::Result<Tensor, tch::TchError>,
    ) -> Result<Ring> {
        Ok(Ring {
            buffer: buffer(&self.buffer, self.used())?,
            limits: self.limits,
            total: self.total,
            first: self.first,
            rotation: self.rotation,
            unrotated_sinks: self.unrotated_sinks.as_ref().map(sinks).transpose()?,
        })
    }

    /// Returns all cached tokens in order, with the original sink keys.
    pub(super) fn kept(&self) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.ordered(true, self.first, None)?;
        let Some(given) = &self.unrotated_sinks else {
            return Ok((keys, values));
        };
        let sinks = given.size()[2];
        let rest = keys.f_narrow(2, sinks, keys.size()[2] - sinks)?;
        Ok((Tensor::f_cat(&[given, &rest], 2)?, values))
    }

    /// Returns a ring of `total` tokens that keeps `kept`, in the order of [`kept`](Ring::kept): the
    /// sinks, and the tokens from `first` on. `None` if the numbers do not fit.
    pub(super) fn restored(
        limits: Limits,
        kept: &KeyValues<'_>,
        total: i64,
        first: i64,
    ) -> Result<Option<Ring>> {
        let sinks = limits.sinks.min(total);
        let after = kept.tokens - sinks;
        let most = limits.ring().unwrap_or(i64::MAX);
        let dropped = first > limits.sinks;
        let fits = total >= 0
            && first >= limits.sinks
            && after == (total - first).max(0)
            && after <= most
            && !(dropped && limits.window.is_none());
        if !fits {
            return Ok(None);
        }
        let capacity = if dropped {
            limits.sinks + most
        } else {
            kept.tokens
        };
        let mut ring = Ring::new(kept.spec, limits, capacity)?;
        ring.write(0, kept, 0, sinks)?;
        ring.write(first.max(sinks), kept, sinks, after)?;
        (ring.total, ring.first) = (total, first);
        if dropped {
            // Attention reads and masks slots that were never written; they must hold finite values,
            // because 0 · NaN is NaN.
            let held = ring.used() - kept.tokens;
            if held > 0 {
                ring.clear_free_slots()?;
            }
        }
        Ok(Some(ring))
    }

    fn clear_free_slots(&mut self) -> Result<()> {
        // The free slots go from that of the next token to that of the first token, around the end.
        let Some(ring) = self.limits.ring() else {
            return Ok(());
        };
        let mut token = self.total;
        while token < self.first + ring {
            let slot = (token - self.limits.sinks) % ring;
            let run = (self.first + ring - token).min(ring - slot);
            let (mut keys, mut values) = self.buffer.view(self.limits.sinks + slot, run)?;
            let _same = (keys.f_zero_()?, values.f_zero_()?);
            token += run;
        }
        Ok(())
    }
}
