//! The tokens that one layer keeps.

use tch::Tensor;

use super::turn::{Turn, turned};
use crate::KvView;
use crate::Result;
use crate::buffer::{Buffer, copied};
use crate::entries::{Entries, Spec};

/// How much a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// Tokens that a query sees besides the sinks; `None`: all.
    pub(super) window: Option<i64>,
    pub(super) sinks: i64,
    pub(super) slack: i64,
}

impl Limits {
    /// Tokens after the sinks that are kept.
    fn ring(&self) -> Option<i64> {
        self.window.map(|window| window + self.slack)
    }

    /// The first token after the sinks that a query at `position` sees.
    pub(super) fn first_seen(&self, position: i64) -> i64 {
        let first = self.window.map_or(0, |window| position + 1 - window);
        first.max(self.sinks)
    }
}

/// The sinks (tokens `0..sinks`) in the first slots, and behind them the last tokens: token `n` in slot
/// `sinks + (n - sinks) mod ring`. As long as nothing has been dropped, token `n` lies in slot `n`, and
/// the buffer grows.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) buffer: Buffer,
    pub(super) limits: Limits,
    /// Tokens so far.
    pub(super) total: i64,
    /// The first token after the sinks that is still there.
    pub(super) first: i64,
    /// By how many tokens the sink keys in the buffer are turned, and what they were.
    turn: i64,
    sinks_as_given: Option<Tensor>,
}

impl Ring {
    pub(super) fn new(spec: Spec, limits: Limits, capacity: i64) -> Result<Ring> {
        let most = limits.ring().map_or(i64::MAX, |ring| limits.sinks + ring);
        Ok(Ring {
            buffer: Buffer::new(spec, capacity.clamp(1, most))?,
            limits,
            total: 0,
            first: limits.sinks,
            turn: 0,
            sinks_as_given: None,
        })
    }

    /// Whether each token lies in the slot of its number.
    pub(super) fn is_linear(&self) -> bool {
        self.first == self.limits.sinks
    }

    /// Whether it still is with `new` more tokens.
    pub(super) fn stays_linear(&self, new: i64) -> bool {
        let ring = self.limits.ring();
        let fits = ring.is_none_or(|ring| self.total + new <= self.limits.sinks + ring);
        self.is_linear() && fits
    }

    /// The sinks there are.
    pub(super) fn sinks(&self) -> i64 {
        self.limits.sinks.min(self.total)
    }

    /// Slots in use.
    fn used(&self) -> i64 {
        if self.is_linear() {
            self.total
        } else {
            self.buffer.capacity
        }
    }

    /// Adds new tokens, over the oldest where there is no other room.
    pub(super) fn push(&mut self, new: &Entries<'_>) -> Result<()> {
        let (needed, capacity) = (self.total + new.tokens, self.buffer.capacity);
        let ring = self.limits.ring();
        let most = ring.map_or(i64::MAX, |ring| self.limits.sinks + ring);
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

    /// Writes `count` of the `new` tokens from number `from` on, which are the tokens `token..` of the
    /// text, into their slots; of more than the ring holds, the last.
    fn write(&mut self, token: i64, new: &Entries<'_>, from: i64, count: i64) -> Result<()> {
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
        let mut next = to_sinks.max(count - ring);
        while next < count {
            let slot = (token + next - sinks) % ring;
            let run = (count - next).min(ring - slot);
            self.buffer.write(sinks + slot, new, from + next, run)?;
            next += run;
        }
        Ok(())
    }

    /// Where the tokens `from..total` after the sinks lie: runs of slots, oldest first.
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

    /// The sinks, where `with_sinks`, the tokens from `from` on, and `new` ones, in order. Copied, unless
    /// they lie in one run.
    pub(super) fn ordered(
        &self,
        with_sinks: bool,
        from: i64,
        new: Option<&Entries<'_>>,
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

    /// All slots as they lie, in no order.
    pub(super) fn as_it_lies(&self) -> Result<KvView> {
        let (keys, values) = self.buffer.view(0, self.used())?;
        Ok(KvView::new(keys, values))
    }

    /// Which slots the last query sees through `window`, bool `(slots,)`; `None`: all of them. For a
    /// ring that has dropped tokens.
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

    /// The columns of `mask (…, S)` in the order of the slots; `None` where slots hold tokens that were
    /// taken back, for which there is no column.
    pub(super) fn by_slot(&self, mask: &Tensor) -> Result<Option<Tensor>> {
        let Some(ring) = self.limits.ring() else {
            return Ok(None);
        };
        let sinks = self.limits.sinks;
        if self.first != self.total - ring || mask.size().last() != Some(&self.total) {
            return Ok(None);
        }
        // The next token would lie in slot `next`, where the oldest is.
        let next = (self.total - sinks) % ring;
        let parts = [
            mask.f_narrow(-1, 0, sinks)?,
            mask.f_narrow(-1, self.total - next, next)?,
            mask.f_narrow(-1, self.first, ring - next)?,
        ];
        Ok(Some(Tensor::f_cat(&parts, -1)?))
    }

    /// The sink keys as they were given.
    pub(super) fn given_sinks(&self) -> Result<Tensor> {
        match &self.sinks_as_given {
            Some(given) => Ok(given.shallow_clone()),
            None => Ok(self.buffer.keys.f_narrow(2, 0, self.sinks())?),
        }
    }

    /// Turns the sink keys in the buffer on by `turn.tokens` tokens from where they were given.
    pub(super) fn turn_sinks(&mut self, turn: &Turn) -> Result<()> {
        if turn.tokens == self.turn {
            return Ok(());
        }
        let given = match self.sinks_as_given.take() {
            Some(given) => given,
            None => copied(&self.given_sinks()?)?,
        };
        let mut slots = self.buffer.keys.f_narrow(2, 0, self.sinks())?;
        slots.f_copy_(&turned(&given, turn)?)?;
        self.sinks_as_given = Some(given);
        self.turn = turn.tokens;
        Ok(())
    }

    /// Back to where they were given.
    pub(super) fn unturn_sinks(&mut self) -> Result<()> {
        if let Some(given) = self.sinks_as_given.take() {
            self.buffer
                .keys
                .f_narrow(2, 0, given.size()[2])?
                .f_copy_(&given)?;
            self.turn = 0;
        }
        Ok(())
    }

    /// Whether the next query would miss a token, were the text cut to `len` tokens.
    pub(super) fn lost_at(&self, len: i64) -> bool {
        len > self.limits.sinks && self.first > self.limits.first_seen(len)
    }

    /// Forgets all but the first `len` tokens; [`lost_at`](Ring::lost_at) must be false.
    pub(super) fn truncate(&mut self, len: i64) -> Result<()> {
        if len <= self.limits.sinks {
            self.unturn_sinks()?;
            self.first = self.limits.sinks;
        }
        self.total = len;
        Ok(())
    }

    /// With the memory that `buffer` makes of this one's and its used slots.
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
            turn: self.turn,
            sinks_as_given: self.sinks_as_given.as_ref().map(sinks).transpose()?,
        })
    }

    /// Everything that is kept, in order, with the sink keys as they were given.
    pub(super) fn kept(&self) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.ordered(true, self.first, None)?;
        let Some(given) = &self.sinks_as_given else {
            return Ok((keys, values));
        };
        let sinks = given.size()[2];
        let rest = keys.f_narrow(2, sinks, keys.size()[2] - sinks)?;
        Ok((Tensor::f_cat(&[given, &rest], 2)?, values))
    }

    /// A ring of `total` tokens that keeps `kept`, as [`kept`](Ring::kept) gives them: the sinks, and
    /// those from `first` on. `None` where the numbers do not fit.
    pub(super) fn restored(
        limits: Limits,
        kept: &Entries<'_>,
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
            // Slots that no token was written to are shown, hidden by a mask: they must be numbers.
            let held = ring.used() - kept.tokens;
            if held > 0 {
                ring.clear_free_slots()?;
            }
        }
        Ok(Some(ring))
    }

    fn clear_free_slots(&mut self) -> Result<()> {
        // From the next token's slot on to the first one's, around the end.
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
