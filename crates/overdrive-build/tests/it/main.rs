//! The search for libtorch, and a project outside the workspace.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod location;
mod measured;
mod outside_project;
