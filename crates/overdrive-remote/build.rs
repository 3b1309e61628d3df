//! With the feature `tch`, makes tests and examples of this crate find libtorch when they start.

fn main() {
    if std::env::var_os("CARGO_FEATURE_TCH").is_some() {
        overdrive_build::link();
    }
}
