//! Compiles the C++ shim against the libtorch that torch-sys found.

use std::path::PathBuf;

fn main() {
    overdrive_build::link();
    println!("cargo:rerun-if-changed=shim");
    let libtorch = overdrive_build::libtorch().unwrap_or_else(|error| panic!("{error}"));

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .files(sources())
        // Its allocator is in every operator's path, also in a debug build.
        .opt_level(2)
        .debug(false)
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-fvisibility=hidden");
    // System headers: libtorch's are not free of warnings, ours are compiled with all of them on.
    for folder in &libtorch.include_dirs {
        build.flag("-isystem").flag(folder);
    }
    build.define(
        "_GLIBCXX_USE_CXX11_ABI",
        if libtorch.cxx11_abi { "1" } else { "0" },
    );
    // The whole archive: `startup` has no function that Rust must call, only one that runs by itself.
    build.cargo_metadata(false).compile("overdrive_shim");
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=overdrive_shim");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-lib=torch_cpu");
    if cfg!(target_os = "macos") {
        println!("cargo:rustc-link-lib=c++");
    } else {
        println!("cargo:rustc-link-lib=stdc++");
    }
}

/// Every C++ file of `shim/`, in a fixed order.
fn sources() -> Vec<PathBuf> {
    let folder = std::fs::read_dir("shim").expect("the shim is part of this crate");
    let mut files: Vec<PathBuf> = folder
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    files.sort();
    files
}
