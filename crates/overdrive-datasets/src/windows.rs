//! Datasets of windows of a token store.

use crate::{Dataset, Error, Result, TokenView, TokenizedExample};
use overdrive_core::random::uniform_below;
use overdrive_core::{check_at_least, check_positive};

/// The stream of random numbers that random windows use (see [`overdrive_core::random::random_u64`]).
const WINDOW_STREAM: u32 = 0x717D;

/// Windows with random starts, all equally likely: nanoGPT's `get_batch`.
///
/// Window `n` is a pure function of the seed and `n`: the sequence is the same for any batch size, number of
/// workers and number of processes, and is resumed by counting windows. It has no end and no epochs. Draws are
/// independent: after as many windows as would cover the tokens once, about 63% of them have been seen.
#[derive(Debug, Clone)]
pub struct RandomWindows {
    tokens: TokenView,
    context: usize,
    seed: u64,
}

impl RandomWindows {
    /// Returns random windows of `context` tokens.
    ///
    /// # Errors
    /// [`Error::Common`] if `context` is below 2; [`Error::TooFew`] for fewer than `context + 1` tokens.
    pub fn new(tokens: TokenView, context: usize, seed: u64) -> Result<Self> {
        check_context(context)?;
        // Windows are draws out of `len - context` starts. One more start would fit, but it would change every
        // draw, and a run that resumes would see other windows.
        if tokens.len() <= context {
            return Err(too_few_tokens(&tokens, context));
        }
        Ok(Self {
            tokens,
            context,
            seed,
        })
    }

    /// Returns the start of window `number`.
    pub fn start(&self, number: u64) -> usize {
        let starts = (self.tokens.len() - self.context) as u64;
        uniform_below(starts, self.seed, WINDOW_STREAM, number) as usize
    }

    /// Returns the tokens that the windows are drawn from.
    pub fn tokens(&self) -> &TokenView {
        &self.tokens
    }

    /// Returns the seed of the draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

impl Dataset for RandomWindows {
    /// A window of `context` tokens, all of them labels.
    type Item = TokenizedExample;

    /// Returns `usize::MAX`, since windows never end.
    fn len(&self) -> usize {
        usize::MAX
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        let start = self.start(index as u64);
        Ok(self.tokens.tokens(start..start + self.context)?.into())
    }
}

/// The handling of the tokens after the last full window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastWindow {
    /// They are dropped. The default.
    #[default]
    Drop,
    /// They are a shorter window, except for a single token, which has nothing to predict.
    Keep,
}

/// Consecutive windows without overlap, as the blocks of transformers' `run_clm.py`: each token except the first of
/// every window is predicted once. An evaluation reads them in order; for training, a [`crate::RandomSampler`] gives
/// each epoch a random order of them without keeping a list.
#[derive(Debug, Clone)]
pub struct SequentialWindows {
    tokens: TokenView,
    context: usize,
    /// The number of windows in the tokens.
    available: usize,
    /// The number of windows of the dataset.
    count: usize,
}

impl SequentialWindows {
    /// Returns consecutive windows of `context` tokens.
    ///
    /// # Errors
    /// [`Error::Common`] if `context` is below 2; [`Error::TooFew`] if there is no window.
    pub fn new(tokens: TokenView, context: usize, last: LastWindow) -> Result<Self> {
        check_context(context)?;
        // The last token does not count. At the beginning of a window it would have nothing to predict, and
        // earlier versions, which shifted labels, had no window that it completes; leaving it out keeps
        // evaluations comparable with theirs.
        let starts = tokens.len().saturating_sub(1);
        let available = match last {
            LastWindow::Drop => starts / context,
            LastWindow::Keep => starts.div_ceil(context),
        };
        if available == 0 {
            return Err(too_few_tokens(&tokens, context));
        }
        Ok(Self {
            tokens,
            context,
            available,
            count: available,
        })
    }

    /// Keeps at most this many windows, spread evenly over the tokens: a representative sample for a quick
    /// evaluation, which the first windows (those of the first documents) are not.
    ///
    /// # Errors
    /// Returns an error if `windows` is 0.
    pub fn at_most(mut self, windows: usize) -> Result<Self> {
        check_positive("windows", windows)?;
        self.count = self.available.min(windows);
        Ok(self)
    }

    /// Returns the tokens that the windows are cut from.
    pub fn tokens(&self) -> &TokenView {
        &self.tokens
    }
}

impl Dataset for SequentialWindows {
    /// A window of `context` tokens (the last may have fewer), all of them labels.
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.count
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        if index >= self.count {
            return Err(Error::NoSuchRecord {
                index,
                len: self.count,
            });
        }
        // The product cannot overflow in 128 bits; the result is below `available`.
        let spread = index as u128 * self.available as u128 / self.count as u128;
        // Spreading by integer arithmetic gives the same windows on every machine.
        let start = spread as usize * self.context;
        let end = self.tokens.len().min(start.saturating_add(self.context));
        Ok(self.tokens.tokens(start..end)?.into())
    }
}

fn check_context(context: usize) -> Result<()> {
    // The first token of a window is never predicted.
    Ok(check_at_least("context", context, 2)?)
}

fn too_few_tokens(tokens: &TokenView, context: usize) -> Error {
    Error::TooFew {
        unit: "tokens",
        count: tokens.len(),
        // A window and the label of its last token.
        needed: context.saturating_add(1),
        remedy: "give more text or a shorter context",
    }
}
