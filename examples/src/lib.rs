//! The examples of Overdrive.
