//! Overdrive.
