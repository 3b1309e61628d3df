use crate::{Result, TokenMask};

mod choice;

pub use choice::ChoiceConstraint;

/// A constraint on the continuation of one sequence, token by token.
///
/// Each step calls [`allowed`](Constraint::allowed), chooses among those tokens, and calls
/// [`advance`](Constraint::advance) with the choice, until [`is_finished`](Constraint::is_finished).
pub trait Constraint: std::fmt::Debug + Send {
    /// Adds every token that may come next to `mask`, which is empty, including end-of-text tokens if
    /// the text may end here.
    ///
    /// # Errors
    /// When the constraint cannot be followed further.
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<()>;

    /// Advances by the chosen token, one of those allowed.
    ///
    /// # Errors
    /// When the token was not allowed.
    fn advance(&mut self, token: i64) -> Result<()>;

    /// Returns `true` if no token can follow, which ends the sequence.
    fn is_finished(&self) -> bool;

    /// Returns an independent copy, for another beam, another sample or a speculation.
    fn fork(&self) -> Box<dyn Constraint>;
}
