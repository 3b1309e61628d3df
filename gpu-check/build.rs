//! Sets the run path of libtorch for the program and the tests.

fn main() {
    overdrive_build::link();
}
