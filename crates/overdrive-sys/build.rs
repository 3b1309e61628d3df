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
        .files(sources("shim"))
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
    if cfg!(feature = "c10d") {
        build
            .files(sources("shim/c10d"))
            .define("USE_C10D_GLOO", None);
        build.flag("-isystem").flag("shim/c10d/gloo");
    }
    if cfg!(feature = "nccl") {
        build
            .define("OVERDRIVE_NCCL", None)
            .define("USE_C10D_NCCL", None);
        for folder in nccl_folders() {
            build.flag("-isystem").flag(folder);
        }
    }
    // The whole archive: `startup` has no function that Rust must call, only one that runs by itself.
    build.cargo_metadata(false).compile("overdrive_shim");
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=overdrive_shim");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-lib=torch_cpu");
    if cfg!(feature = "nccl") {
        println!("cargo:rustc-link-lib=torch_cuda");
        println!("cargo:rustc-link-lib=c10_cuda");
    }
    if cfg!(target_os = "macos") {
        println!("cargo:rustc-link-lib=c++");
    } else {
        println!("cargo:rustc-link-lib=stdc++");
    }
}

/// Where `nccl.h` and the CUDA runtime's headers are: the folders of `OVERDRIVE_NCCL_INCLUDE` (separated
/// as in `PATH`), then those of an installed CUDA.
fn nccl_folders() -> Vec<PathBuf> {
    let variables = [
        "OVERDRIVE_NCCL_INCLUDE",
        "NCCL_HOME",
        "CUDA_HOME",
        "CUDA_PATH",
    ];
    let mut folders = Vec::new();
    for variable in variables {
        println!("cargo:rerun-if-env-changed={variable}");
        let value = std::env::var_os(variable).unwrap_or_default();
        for folder in std::env::split_paths(&value) {
            folders.push(if variable == "OVERDRIVE_NCCL_INCLUDE" {
                folder
            } else {
                folder.join("include")
            });
        }
    }
    folders.push(PathBuf::from("/usr/local/cuda/include"));
    folders.retain(|folder| folder.is_dir());
    if !folders.iter().any(|folder| folder.join("nccl.h").is_file())
        && !PathBuf::from("/usr/include/nccl.h").is_file()
    {
        panic!(
            "the feature `nccl` needs nccl.h and the CUDA runtime's headers: set \
             OVERDRIVE_NCCL_INCLUDE to the folders that hold them (in the wheels of PyTorch \
             nvidia/nccl/include and nvidia/cu13/include)"
        );
    }
    folders
}

/// Every C++ file of a folder, in a fixed order.
fn sources(folder: &str) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(folder).expect("the shim is part of this crate");
    let mut files: Vec<PathBuf> = folder
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    files.sort();
    files
}
