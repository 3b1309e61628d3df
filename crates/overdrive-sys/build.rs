//! Compiles the C++ shim against the libtorch that torch-sys found.

use std::path::PathBuf;

fn main() {
    if cfg!(feature = "doc-only") {
        // The feature `compiled` embeds this file.
        let out = PathBuf::from(std::env::var("OUT_DIR").unwrap_or_default());
        std::fs::write(out.join("libtorch_name.so"), "").expect("OUT_DIR is Cargo's to write to");
        return;
    }
    overdrive_build::link();
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-env-changed=LIBTORCH_BYPASS_VERSION_CHECK");
    let libtorch = overdrive_build::libtorch().unwrap_or_else(|error| panic!("{error}"));
    libtorch
        .require_release(&overdrive_build::Environment::process())
        .unwrap_or_else(|error| panic!("{error}"));

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .file(unit("shim"))
        // Every operator calls the shim's allocator, so it is optimized in debug builds too.
        .opt_level(2)
        .debug(false)
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-fvisibility=hidden");
    // As system headers: libtorch's headers produce warnings, and the shim is compiled with all warnings on.
    for folder in &libtorch.include_dirs {
        build.flag("-isystem").flag(folder);
    }
    if cfg!(feature = "c10d") {
        build.file(unit("shim/c10d")).define("USE_C10D_GLOO", None);
        build.flag("-isystem").flag("shim/c10d/gloo");
    }
    if cfg!(feature = "nccl") {
        build
            .define("OVERDRIVE_NCCL", None)
            .define("USE_C10D_NCCL", None);
        for folder in header_folders("nccl", "nccl.h") {
            build.flag("-isystem").flag(folder);
        }
    }
    if cfg!(feature = "compiled") {
        build.file(unit("shim/compiled"));
        compile_libtorch_name();
    }
    if cfg!(feature = "cuda") {
        build.file(unit("shim/compiled/cuda"));
        for folder in header_folders("cuda", "cuda_runtime_api.h") {
            build.flag("-isystem").flag(folder);
        }
    }
    // The whole archive: Rust calls no function of `startup`, so the linker would drop it with its
    // constructor.
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

/// Compiles an empty library called `libtorch.so`. Compiled packages depend on a library of this name;
/// PyTorch's own is empty too, and a program that is linked against `libtorch_cpu` has not loaded it.
fn compile_libtorch_name() {
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let out = PathBuf::from(std::env::var("OUT_DIR").unwrap_or_default());
    let source = out.join("libtorch_name.c");
    std::fs::write(&source, "").expect("OUT_DIR is Cargo's to write to");
    let mut command = cc::Build::new().get_compiler().to_command();
    command.args(["-shared", "-nostdlib", "-Wl,-soname,libtorch.so", "-o"]);
    command.arg(out.join("libtorch_name.so")).arg(&source);
    let status = command.status();
    assert!(
        status.as_ref().is_ok_and(|status| status.success()),
        "the C compiler could not make an empty shared library ({command:?}: {status:?})"
    );
}

/// Returns the folders of `header` and of the CUDA runtime's headers: those of `OVERDRIVE_CUDA_INCLUDE` and
/// `OVERDRIVE_NCCL_INCLUDE` (separated as in `PATH`), then those of an installed CUDA.
fn header_folders(feature: &str, header: &str) -> Vec<PathBuf> {
    let variables = [
        ("OVERDRIVE_CUDA_INCLUDE", ""),
        ("OVERDRIVE_NCCL_INCLUDE", ""),
        ("NCCL_HOME", "include"),
        ("CUDA_HOME", "include"),
        ("CUDA_PATH", "include"),
    ];
    let mut folders = Vec::new();
    for (variable, below) in variables {
        println!("cargo:rerun-if-env-changed={variable}");
        let value = std::env::var_os(variable).unwrap_or_default();
        for folder in std::env::split_paths(&value) {
            folders.push(folder.join(below));
        }
    }
    folders.push(PathBuf::from("/usr/local/cuda/include"));
    folders.retain(|folder| folder.is_dir());
    if !folders.iter().any(|folder| folder.join(header).is_file())
        && !PathBuf::from("/usr/include").join(header).is_file()
    {
        let variable = match feature {
            "nccl" => "OVERDRIVE_NCCL_INCLUDE",
            _ => "OVERDRIVE_CUDA_INCLUDE",
        };
        panic!(
            "the feature `{feature}` needs {header} and the CUDA runtime's headers: set {variable} \
             to the folders that hold them (in the wheels of PyTorch nvidia/nccl/include and \
             nvidia/cu13/include)"
        );
    }
    folders
}

/// Writes a C++ file that includes every C++ file of `folder`, in a fixed order, and returns its path.
///
/// Most of the compile time goes into libtorch's headers: 14 MB after the preprocessor for the largest
/// file. One translation unit per folder reads them once; in return the files share the global namespace.
fn unit(folder: &str) -> PathBuf {
    let here = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let entries = std::fs::read_dir(here.join(folder)).expect("the shim is part of this crate");
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    files.sort();
    let lines = files.iter().map(|file| format!("#include {file:?}\n"));
    let out = PathBuf::from(std::env::var("OUT_DIR").unwrap_or_default());
    let unit = out.join(format!("{}.cpp", folder.replace('/', "_")));
    std::fs::write(&unit, lines.collect::<String>()).expect("OUT_DIR is Cargo's to write to");
    unit
}
