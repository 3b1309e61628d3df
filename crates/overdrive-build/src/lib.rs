//! For build scripts: finds libtorch, sets the run path, links CUDA where it is.

/// Sets the run path.
pub fn link() {
    if let Ok(dir) = std::env::var("LIBTORCH") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}/lib");
    }
}
