//! The program on a CPU: its sections, its report, and what it does with checks that fail in every way.

mod parity;
mod report;
mod runner;
mod sections;
