//! Makes the binary and the tests find libtorch when they start, and links CUDA if libtorch has it.

fn main() {
    overdrive_build::link();
}
