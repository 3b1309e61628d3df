//! Windows of a token store.

use crate::{Dataset, Error, Result, TokenView, TokenizedExample};
use overdrive_core::random::uniform_below;

/// The stream of random numbers that random windows use (see [`overdrive_core::random::random_u64`]).
const WINDOW_STREAM: u32 = 0x717D;

/// Windows that start anywhere, each start equally likely: nanoGPT's `get_batch`.
///
/// Window `n` is a pure function of the seed and `n`: the sequence is the same for any batch size,
/// number of workers and number of processes, and it is resumed by counting windows. It has no end
/// and no epochs (draws are independent: after as many windows as would cover the tokens once, about
/// 63% of them have been seen).
#[derive(Debug, Clone)]
pub struct RandomWindows {
    tokens: TokenView,
    context: usize,
    seed: u64,
}

impl RandomWindows {
    /// Windows of `context` tokens.
    ///
    /// # Errors
    /// When `context` is below 2, or there are not `context + 1` tokens.
    pub fn new(tokens: TokenView, context: usize, seed: u64) -> Result<Self> {
        check_context(context)?;
        // The windows of a run are numbered draws out of `len - context` starts. One start more would
        // fit, but every draw would be another one, and a resumed run would see other windows.
        if tokens.len() <= context {
            return Err(Error::TooFewTokens {
                tokens: tokens.len(),
                context,
            });
        }
        Ok(Self {
            tokens,
            context,
            seed,
        })
    }

    /// Where window `number` starts.
    pub fn start(&self, number: u64) -> usize {
        let starts = (self.tokens.len() - self.context) as u64;
        uniform_below(starts, self.seed, WINDOW_STREAM, number) as usize
    }

    /// What the windows are drawn from.
    pub fn tokens(&self) -> &TokenView {
        &self.tokens
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

impl Dataset for RandomWindows {
    /// `context` tokens, all of them labels.
    type Item = TokenizedExample;

    /// `usize::MAX`: windows never end.
    fn len(&self) -> usize {
        usize::MAX
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        let start = self.start(index as u64);
        Ok(self.tokens.tokens(start..start + self.context)?.into())
    }
}

/// What becomes of the tokens behind the last full window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastWindow {
    /// They are left out.
    #[default]
    Drop,
    /// They are a shorter window, unless it is one token alone, which has nothing to predict.
    Keep,
}

/// Windows one behind the other, without overlap: for evaluation. Each token but the first of every
/// window is predicted once, as in the blocks of transformers' `run_clm.py`.
#[derive(Debug, Clone)]
pub struct SequentialWindows {
    tokens: TokenView,
    context: usize,
    /// How many windows there are in the tokens.
    available: usize,
    /// How many of them are given.
    count: usize,
}

impl SequentialWindows {
    /// Windows of `context` tokens.
    ///
    /// # Errors
    /// When `context` is below 2, or the tokens make no window.
    pub fn new(tokens: TokenView, context: usize, last: LastWindow) -> Result<Self> {
        check_context(context)?;
        // Without the last token: where it would begin a window, it would have nothing to predict, and
        // where it would fill one, that window was none while labels were shifted: evaluations of the
        // same text stay comparable.
        let starts = tokens.len().saturating_sub(1);
        let available = match last {
            LastWindow::Drop => starts / context,
            LastWindow::Keep => starts.div_ceil(context),
        };
        if available == 0 {
            return Err(Error::TooFewTokens {
                tokens: tokens.len(),
                context,
            });
        }
        Ok(Self {
            tokens,
            context,
            available,
            count: available,
        })
    }

    /// At most this many windows, spread evenly over the tokens: a fair sample for a quick
    /// evaluation, which the first windows (the first documents) are not.
    ///
    /// # Errors
    /// When `windows` is 0.
    pub fn at_most(mut self, windows: usize) -> Result<Self> {
        if windows == 0 {
            return Err(Error::InvalidOption {
                option: "windows",
                value: "0".to_owned(),
                expected: "at least one window",
            });
        }
        self.count = self.available.min(windows);
        Ok(self)
    }

    /// What the windows are cut from.
    pub fn tokens(&self) -> &TokenView {
        &self.tokens
    }
}

impl Dataset for SequentialWindows {
    /// `context` tokens, or in the last window fewer, all of them labels.
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
        // In 128 bits the product cannot overflow; the result is below `available`.
        let spread = index as u128 * self.available as u128 / self.count as u128;
        let start = spread as usize * self.context;
        let end = self.tokens.len().min(start.saturating_add(self.context));
        Ok(self.tokens.tokens(start..end)?.into())
    }
}

fn check_context(context: usize) -> Result<()> {
    if context < 2 {
        return Err(Error::InvalidOption {
            option: "context",
            value: context.to_string(),
            expected: "a window has at least two tokens, since the first one only predicts",
        });
    }
    Ok(())
}
