//! Windows of tokens with their next-token labels.

use std::sync::Arc;

use crate::random::uniform_below;
use crate::{Dataset, Error, Result, TokenView};

/// The label that losses skip: PyTorch's default `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// The stream of random numbers that random windows use (see [`crate::random::random_u64`]).
const WINDOW_STREAM: u32 = 0x717D;

/// `context` tokens and, for each, the token that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// `tokens[i..i + context]`.
    pub input_ids: Vec<i64>,
    /// `tokens[i + 1..i + context + 1]`: already shifted, so a loss compares position by position.
    /// [`IGNORE_INDEX`] where there is nothing to predict.
    pub labels: Vec<i64>,
}

/// Numbered windows of one length. Window `n` is always the same.
pub trait Windows: Send + Sync {
    /// The length of a window in tokens.
    fn context(&self) -> usize;

    /// How many windows there are; `None` when they never end.
    fn count(&self) -> Option<u64>;

    /// Writes window `number` into two slices of length [`Windows::context`], and gives the number
    /// of positions that have a label. Allocates nothing.
    ///
    /// # Errors
    /// When there is no such window, and when its tokens cannot be read.
    fn copy_window(&self, number: u64, input_ids: &mut [i64], labels: &mut [i64]) -> Result<usize>;

    /// Window `number`.
    ///
    /// # Errors
    /// As [`Windows::copy_window`].
    fn window(&self, number: u64) -> Result<Window> {
        let mut input_ids = vec![0; self.context()];
        let mut labels = vec![0; self.context()];
        self.copy_window(number, &mut input_ids, &mut labels)?;
        Ok(Window { input_ids, labels })
    }
}

impl<W: Windows + ?Sized> Windows for Arc<W> {
    fn context(&self) -> usize {
        (**self).context()
    }

    fn count(&self) -> Option<u64> {
        (**self).count()
    }

    fn copy_window(&self, number: u64, input_ids: &mut [i64], labels: &mut [i64]) -> Result<usize> {
        (**self).copy_window(number, input_ids, labels)
    }
}

impl<W: Windows + ?Sized> Windows for Box<W> {
    fn context(&self) -> usize {
        (**self).context()
    }

    fn count(&self) -> Option<u64> {
        (**self).count()
    }

    fn copy_window(&self, number: u64, input_ids: &mut [i64], labels: &mut [i64]) -> Result<usize> {
        (**self).copy_window(number, input_ids, labels)
    }
}

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
    /// When `context` is 0, or there are not `context + 1` tokens.
    pub fn new(tokens: TokenView, context: usize, seed: u64) -> Result<Self> {
        check_context(context)?;
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
        // The last token can only be a label, so there are `len - context` starts.
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

impl Windows for RandomWindows {
    fn context(&self) -> usize {
        self.context
    }

    fn count(&self) -> Option<u64> {
        None
    }

    fn copy_window(&self, number: u64, input_ids: &mut [i64], labels: &mut [i64]) -> Result<usize> {
        copy_shifted(&self.tokens, self.start(number), input_ids, labels)?;
        Ok(input_ids.len())
    }
}

/// What becomes of the tokens behind the last full window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastWindow {
    /// They are left out.
    #[default]
    Drop,
    /// They are a window too: its inputs are filled up with `pad_token`, its labels with
    /// [`IGNORE_INDEX`]. Then each token but the first is predicted exactly once.
    Keep {
        /// Any token of the vocabulary; a causal model does not see it.
        pad_token: u32,
    },
}

/// Windows one behind the other, without overlap: for evaluation.
#[derive(Debug, Clone)]
pub struct SequentialWindows {
    tokens: TokenView,
    context: usize,
    last: LastWindow,
    /// How many windows there are in the tokens.
    available: usize,
    /// How many of them are given.
    count: usize,
}

impl SequentialWindows {
    /// Windows of `context` tokens.
    ///
    /// # Errors
    /// When `context` is 0, or the tokens make no window.
    pub fn new(tokens: TokenView, context: usize, last: LastWindow) -> Result<Self> {
        check_context(context)?;
        // The first token is no label.
        let labels = tokens.len().saturating_sub(1);
        let available = match last {
            LastWindow::Drop => labels / context,
            LastWindow::Keep { .. } => labels.div_ceil(context),
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
            last,
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

impl Windows for SequentialWindows {
    fn context(&self) -> usize {
        self.context
    }

    fn count(&self) -> Option<u64> {
        Some(self.count as u64)
    }

    fn copy_window(&self, number: u64, input_ids: &mut [i64], labels: &mut [i64]) -> Result<usize> {
        let Some(number) = usize::try_from(number)
            .ok()
            .filter(|&number| number < self.count)
        else {
            let number = usize::try_from(number).unwrap_or(usize::MAX);
            return Err(Error::OutOfRange {
                start: number.saturating_mul(self.context),
                end: number.saturating_add(1).saturating_mul(self.context),
                tokens: self.tokens.len(),
            });
        };
        // In 128 bits the product cannot overflow; the result is below `available`.
        let spread = number as u128 * self.available as u128 / self.count as u128;
        let start = spread as usize * self.context;
        let valid = self.context.min(self.tokens.len() - 1 - start);
        copy_shifted(
            &self.tokens,
            start,
            &mut input_ids[..valid],
            &mut labels[..valid],
        )?;
        if let LastWindow::Keep { pad_token } = self.last {
            input_ids[valid..].fill(i64::from(pad_token));
            labels[valid..].fill(IGNORE_INDEX);
        }
        Ok(valid)
    }
}

impl Dataset for SequentialWindows {
    type Item = Window;

    fn len(&self) -> usize {
        self.count
    }

    fn get(&self, index: usize) -> Result<Window> {
        self.window(index as u64)
    }
}

fn check_context(context: usize) -> Result<()> {
    if context == 0 {
        return Err(Error::InvalidOption {
            option: "context",
            value: "0".to_owned(),
            expected: "a window has at least one token",
        });
    }
    Ok(())
}

/// `tokens[start..start + n]` and `tokens[start + 1..start + n + 1]`; both slices have length n > 0.
fn copy_shifted(
    tokens: &TokenView,
    start: usize,
    input_ids: &mut [i64],
    labels: &mut [i64],
) -> Result<()> {
    tokens.copy_to(start, input_ids)?;
    let (last, shifted) = match labels.split_last_mut() {
        Some(parts) => parts,
        None => return Ok(()),
    };
    shifted.copy_from_slice(&input_ids[1..]);
    tokens.copy_to(start + input_ids.len(), std::slice::from_mut(last))
}
