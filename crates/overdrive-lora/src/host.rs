use crate::{AdaptedLinear, Result};

/// A model whose linear maps can take adapters.
pub trait AdapterHost {
    /// Calls `visit` with each linear map and its full name (as in the checkpoint, without `.weight`),
    /// in the order of the model, until it fails.
    ///
    /// # Errors
    /// The first error of `visit`, or why the maps cannot be changed now.
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut AdaptedLinear) -> Result<()>,
    ) -> Result<()>;
}
