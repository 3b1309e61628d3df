//! `cargo xtask doctor`.
use crate::failure::Result;
pub(crate) fn doctor() -> Result<()> {
    Ok(())
}
