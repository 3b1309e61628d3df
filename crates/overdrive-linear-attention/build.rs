//! Makes binaries, tests and examples of this crate find libtorch when they start.

fn main() {
    overdrive_build::link();
}
