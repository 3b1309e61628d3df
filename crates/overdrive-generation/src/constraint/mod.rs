use crate::{Result, TokenMask};

mod choice;

pub use choice::ChoiceConstraint;

/// What the continuation of one row may be, token by token.
///
/// The life of one: [`allowed`](Constraint::allowed), a choice among those tokens,
/// [`advance`](Constraint::advance) by it, and so on until [`is_finished`](Constraint::is_finished).
pub trait Constraint: std::fmt::Debug + Send {
    /// Adds to `mask`, which is empty, every token that may come next; the end-of-text tokens among
    /// them where the text may end here.
    ///
    /// # Errors
    /// When the constraint cannot be followed further.
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<()>;

    /// Takes the token that came next, one of those allowed.
    ///
    /// # Errors
    /// When it was not allowed.
    fn advance(&mut self, token: i64) -> Result<()>;

    /// Whether nothing can follow: the row ends.
    fn is_finished(&self) -> bool;

    /// A copy that goes its own way, for another beam, another sample or a speculation.
    fn fork(&self) -> Box<dyn Constraint>;
}
