//! Sets the run path of libtorch for the binaries, tests and examples of this crate.

fn main() {
    overdrive_build::link();
}
