//! Makes the fuzzer find libtorch when it starts.

fn main() {
    overdrive_build::link();
}
