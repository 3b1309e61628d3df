//! The benches of Overdrive.
