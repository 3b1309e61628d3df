//! Tests of templates: against jinja2 and Python, of limits, and of random sources.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod characters;
mod jinja2;
mod limits;
mod random_sources;
