//! The C++ shim of Overdrive: what libtorch has and tch does not bind.
