//! Which tokens the next step computes. Plain Rust: no tensor, no model.
//!
//! The rules, in this order:
//!
//! 1. Every running text that wants one token gets it. Where blocks are short, the latest running text
//!    is preempted: its blocks go back, it returns to its place among the waiting, and what it had is
//!    computed again later.
//! 2. Running texts that are still being read get what is left of the token budget, earliest first.
//! 3. Waiting texts are admitted, earliest first and none before its turn, while there are seats,
//!    tokens and blocks for the whole of the text, and none was preempted in this step.
//!
//! The earliest text always goes on: whatever it needs can be taken from the later ones, and a text that
//! does not fit an empty pool is never submitted. So every text ends.

use std::collections::VecDeque;

use super::blocks::Blocks;
use crate::{Error, Result};

/// The order of arrival; of samples of one prompt, the order of their numbers.
pub(super) type Arrival = (u64, usize);

/// A text, and what has been computed of it.
#[derive(Debug)]
pub(super) struct Job<I, T> {
    pub(super) arrival: Arrival,
    /// Prompt and continuation so far.
    pub(super) tokens: Vec<i64>,
    /// How many of them are in the cache.
    pub(super) computed: usize,
    /// Its name in the cache, while it runs.
    place: Option<I>,
    /// How far it had been computed before it was preempted.
    lost: usize,
    /// What goes with it.
    pub(super) data: T,
}

impl<I, T> Job<I, T> {
    fn new(arrival: Arrival, tokens: Vec<i64>, data: T) -> Self {
        Job {
            arrival,
            tokens,
            computed: 0,
            place: None,
            lost: 0,
            data,
        }
    }

    fn rest(&self) -> usize {
        self.tokens.len() - self.computed
    }

    fn is_decoding(&self) -> bool {
        self.rest() == 1
    }
}

/// Tokens of one running text that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Which of the running.
    pub(super) job: usize,
    /// From which token.
    pub(super) start: usize,
    /// Up to, and without, which.
    pub(super) end: usize,
}

/// The bounds of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Texts that run at once.
    pub(super) seats: usize,
    /// Tokens of a step; at least as many as seats.
    pub(super) tokens: usize,
    /// Blocks left free when a text is admitted beside others, for those to grow.
    pub(super) reserve: usize,
}

/// What has happened since the scheduler was made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) preemptions: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) reused_tokens: u64,
}

/// The texts that run and those that wait, both in order of arrival.
#[derive(Debug)]
pub(super) struct Scheduler<I, T> {
    limits: Limits,
    running: Vec<Job<I, T>>,
    waiting: VecDeque<Job<I, T>>,
    pub(super) counts: Counts,
}

impl<I: Copy + std::fmt::Debug, T> Scheduler<I, T> {
    pub(super) fn new(limits: Limits) -> Self {
        Scheduler {
            limits,
            running: Vec::new(),
            waiting: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    pub(super) fn submit(&mut self, arrival: Arrival, tokens: Vec<i64>, data: T) {
        self.wait(Job::new(arrival, tokens, data));
    }

    pub(super) fn running(&self) -> &[Job<I, T>] {
        &self.running
    }

    pub(super) fn job(&mut self, index: usize) -> Option<&mut Job<I, T>> {
        self.running.get_mut(index)
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// The running text `index` in the cache.
    pub(super) fn place(&self, index: usize) -> Result<I> {
        self.running
            .get(index)
            .and_then(|job| job.place)
            .ok_or(Error::Scheduler("a running text has no place in the cache"))
    }

    /// Chooses what the next step computes, in the order of the running texts. Takes no blocks: those
    /// of all parts together are free.
    pub(super) fn schedule(&mut self, blocks: &mut impl Blocks<Id = I>) -> Result<Vec<Part>> {
        let mut step = Step::new(self.limits.tokens, self.running.len());
        let preemptions = self.counts.preemptions;
        self.decode(&mut step, blocks)?;
        self.read_on(&mut step, blocks)?;
        if self.counts.preemptions == preemptions {
            self.admit(&mut step, blocks)?;
        }
        let mut parts = Vec::with_capacity(self.running.len());
        for (job, (running, planned)) in self.running.iter().zip(&step.planned).enumerate() {
            if planned.tokens > 0 {
                let (start, end) = (running.computed, running.computed + planned.tokens);
                parts.push(Part { job, start, end });
            }
        }
        if parts.is_empty() && !self.is_empty() {
            // Nothing runs that would free blocks later, and the first of all texts finds no room.
            return Err(Error::Scheduler(
                "no text can go on although none holds the cache: blocks have been lost",
            ));
        }
        Ok(parts)
    }

    /// What `schedule` gave has been computed.
    pub(super) fn computed(&mut self, parts: &[Part]) {
        for part in parts {
            if let Some(job) = self.running.get_mut(part.job) {
                let again = part.end.min(job.lost).saturating_sub(part.start);
                self.counts.recomputed_tokens += again as u64;
                job.computed = part.end;
            }
        }
    }

    /// A copy of the running text `index`, with which it shares its blocks; it waits where there is no
    /// seat.
    pub(super) fn fork(
        &mut self,
        index: usize,
        sample: usize,
        next: i64,
        data: T,
        blocks: &mut impl Blocks<Id = I>,
    ) -> Result<()> {
        let place = self.place(index)?;
        let source = &self.running[index];
        let mut tokens = source.tokens.clone();
        tokens.push(next);
        let mut copy = Job::new((source.arrival.0, sample), tokens, data);
        if self.running.len() < self.limits.seats {
            copy.computed = source.computed;
            copy.place = Some(blocks.fork(place)?);
            // At the end, so that the numbers of a step's other parts stay; `settle` sorts.
            self.running.push(copy);
        } else {
            self.wait(copy);
        }
        Ok(())
    }

    /// Takes out every text of which `gone` is true, gives its blocks back and returns it. The running
    /// are in order of arrival afterwards.
    pub(super) fn settle(
        &mut self,
        blocks: &mut impl Blocks<Id = I>,
        mut gone: impl FnMut(&Job<I, T>) -> bool,
    ) -> Result<Vec<Job<I, T>>> {
        let mut out: Vec<_> = self.running.extract_if(.., |job| gone(job)).collect();
        for job in &mut out {
            if let Some(place) = job.place.take() {
                blocks.release(place)?;
            }
        }
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = self.waiting.drain(..).partition(gone);
        self.waiting = kept;
        out.extend(gone);
        self.running.sort_by_key(|job| job.arrival);
        Ok(out)
    }

    /// Rule 1.
    fn decode(&mut self, step: &mut Step, blocks: &mut impl Blocks<Id = I>) -> Result<()> {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_decoding() {
                let place = self.place(index)?;
                // The index may itself become the latest: then it is gone and so is the loop.
                while index < self.running.len() && !step.plan(index, place, 1, blocks) {
                    if self.running.len() == 1 {
                        return Err(Error::Scheduler(
                            "a text that runs alone has no block left: blocks have been lost",
                        ));
                    }
                    self.preempt_latest(step, blocks)?;
                }
            }
            index += 1;
        }
        Ok(())
    }

    /// Rule 2.
    fn read_on(&mut self, step: &mut Step, blocks: &mut impl Blocks<Id = I>) -> Result<()> {
        for index in 0..self.running.len() {
            if !self.running[index].is_decoding() && step.budget > 0 {
                let (place, rest) = (self.place(index)?, self.running[index].rest());
                step.plan_up_to(index, place, rest, blocks);
            }
        }
        // Nothing moves, so nothing will free blocks by ending: the later ones make room for the first.
        while step.is_empty() && !self.running.is_empty() {
            let (place, rest) = (self.place(0)?, self.running[0].rest());
            step.plan_up_to(0, place, rest, blocks);
            if step.is_empty() {
                if self.running.len() == 1 {
                    return Err(Error::Scheduler(
                        "a text that runs alone has no block left: blocks have been lost",
                    ));
                }
                self.preempt_latest(step, blocks)?;
            }
        }
        Ok(())
    }

    /// Rule 3.
    fn admit(&mut self, step: &mut Step, blocks: &mut impl Blocks<Id = I>) -> Result<()> {
        while step.budget > 0 && self.running.len() < self.limits.seats {
            let Some(mut job) = self.waiting.pop_front() else {
                break;
            };
            let (place, cached) = match blocks.add(&job.tokens) {
                Ok(added) => added,
                Err(error) => {
                    self.waiting.push_front(job);
                    return Err(error);
                }
            };
            let rest = job.tokens.len() - cached;
            let reserve = match self.running.is_empty() {
                true => 0,
                false => self.limits.reserve,
            };
            if blocks.needed(place, rest) + reserve > step.free(blocks) {
                self.waiting.push_front(job);
                blocks.release(place)?;
                break;
            }
            // What a preempted text finds again was its own and is no gain.
            self.counts.reused_tokens += cached.saturating_sub(job.lost) as u64;
            job.place = Some(place);
            job.computed = cached;
            self.running.push(job);
            step.planned.push(Planned::default());
            step.plan_up_to(self.running.len() - 1, place, rest, blocks);
        }
        Ok(())
    }

    fn preempt_latest(&mut self, step: &mut Step, blocks: &mut impl Blocks<Id = I>) -> Result<()> {
        let Some(mut job) = self.running.pop() else {
            return Ok(());
        };
        step.drop_latest(self.running.len());
        self.counts.preemptions += 1;
        job.lost = job.lost.max(job.computed);
        job.computed = 0;
        let place = job.place.take();
        self.wait(job);
        place.map_or(Ok(()), |place| blocks.release(place))
    }

    /// Puts a text among the waiting, by its arrival.
    fn wait(&mut self, job: Job<I, T>) {
        let place = self
            .waiting
            .partition_point(|other| other.arrival < job.arrival);
        self.waiting.insert(place, job);
    }
}

/// A step in the making.
#[derive(Debug)]
struct Step {
    /// Tokens that may still be planned.
    budget: usize,
    /// Of each running text.
    planned: Vec<Planned>,
    /// Blocks of all that is planned.
    blocks: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Planned {
    tokens: usize,
    blocks: usize,
}

impl Step {
    fn new(budget: usize, running: usize) -> Step {
        Step {
            budget,
            planned: vec![Planned::default(); running],
            blocks: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.planned.iter().all(|planned| planned.tokens == 0)
    }

    fn free(&self, blocks: &impl Blocks) -> usize {
        blocks.free().saturating_sub(self.blocks)
    }

    /// Plans `tokens` of text `index`, if there are blocks.
    fn plan<B: Blocks>(&mut self, index: usize, place: B::Id, tokens: usize, blocks: &B) -> bool {
        let needed = blocks.needed(place, tokens);
        if needed > self.free(blocks) || tokens > self.budget {
            return false;
        }
        self.budget -= tokens;
        self.blocks += needed;
        self.planned[index] = Planned {
            tokens,
            blocks: needed,
        };
        true
    }

    /// Plans as many of the `rest` tokens as budget and blocks allow; maybe none.
    fn plan_up_to<B: Blocks>(&mut self, index: usize, place: B::Id, rest: usize, blocks: &B) {
        let free = self.free(blocks);
        let fits = |tokens| blocks.needed(place, tokens) <= free;
        let mut most = rest.min(self.budget);
        if !fits(most) {
            // The last number that fits, by halving.
            let (mut low, mut high) = (0, most);
            while high - low > 1 {
                let middle = low.midpoint(high);
                match fits(middle) {
                    true => low = middle,
                    false => high = middle,
                }
            }
            most = low;
        }
        if most > 0 {
            self.plan(index, place, most, blocks);
        }
    }

    /// Forgets what is planned for the texts from `running` on.
    fn drop_latest(&mut self, running: usize) {
        for planned in self.planned.drain(running..) {
            self.budget += planned.tokens;
            self.blocks -= planned.blocks;
        }
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
