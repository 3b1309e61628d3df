//! The arguments for the linker.

use std::path::Path;

use crate::{Environment, Libtorch, Result};

/// Makes the binaries, tests, examples and benchmarks of the calling package start without `LD_LIBRARY_PATH`, and
/// links CUDA if libtorch has it. Call it from a build script.
///
/// The loader first searches the folder `lib` beside the binary, then the folder of libtorch at link time. A binary
/// that is copied to another machine together with such a folder, as `cargo xtask dist` makes it, therefore starts
/// there. `LD_LIBRARY_PATH` takes precedence over both, so the same binary can run on the libraries of a PyTorch with
/// CUDA.
///
/// If no libtorch is found, it prints a warning with the remedy and continues: the build then stops in
/// `torch-sys`, or succeeds because the user passes other linker flags.
///
/// A build script's linker arguments do not apply to doctests. They need
/// `rustdocflags = ["-Clink-arg=-Wl,-rpath,…"]` under `[build]` in Cargo's configuration, which
/// `cargo xtask setup` writes for this workspace.
pub fn link() {
    let environment = Environment::process();
    for line in link_directives(&environment, crate::libtorch()) {
        println!("{line}");
    }
}

/// Returns the lines that [`link`] prints after those of [`libtorch`](crate::libtorch).
fn link_directives(environment: &Environment, torch: Result<Libtorch>) -> Vec<String> {
    match torch {
        Ok(torch) => directives(environment.os(), &torch),
        // One directive per line: Cargo cuts a directive at a line break.
        Err(error) => error
            .to_string()
            .lines()
            .map(|line| format!("cargo:warning=overdrive-build: {line}"))
            .collect(),
    }
}

fn directives(os: &str, torch: &Libtorch) -> Vec<String> {
    let dir = &torch.lib_dir;
    let mut lines = vec![format!("cargo:rustc-link-search=native={}", dir.display())];
    // Runs the build script again if libtorch is removed or replaced.
    if let Some(library) = crate::libtorch::library(dir, "torch_cpu") {
        lines.push(format!("cargo:rerun-if-changed={}", library.display()));
    }
    let args = beside_the_binary(os).into_iter().chain(run_path(dir));
    lines.extend(args.map(|arg| format!("cargo:rustc-link-arg={arg}")));
    if os == "linux" && torch.cuda {
        // libtorch_cuda registers itself when it is loaded; no symbol of it is referenced. With
        // `--as-needed`, which rustc sets, the linker would drop it and the program would have no CUDA.
        lines.extend(
            [
                "-Wl,--push-state,--no-as-needed",
                "-ltorch_cuda",
                "-Wl,--pop-state",
            ]
            .map(|arg| format!("cargo:rustc-link-arg={arg}")),
        );
    }
    lines
}

/// Returns the arguments that add the folder `lib` beside the binary to the run path, in the syntax of the
/// system's loader.
fn beside_the_binary(os: &str) -> Vec<String> {
    if os == "macos" {
        return vec!["-Wl,-rpath,@executable_path/lib".to_owned()];
    }
    // DT_RUNPATH has a lower precedence than LD_LIBRARY_PATH, DT_RPATH a higher one. The default differs
    // between linkers.
    ["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN/lib"]
        .map(str::to_owned)
        .to_vec()
}

/// Returns the arguments for the compiler driver that add `dir` to the run path.
#[must_use]
pub fn run_path(dir: &Path) -> Vec<String> {
    let dir = dir.display().to_string();
    if dir.contains(',') {
        // `-Wl` splits at commas; `-Xlinker` passes its argument unchanged.
        return ["-Xlinker", "-rpath", "-Xlinker", &dir]
            .map(str::to_owned)
            .to_vec();
    }
    vec![format!("-Wl,-rpath,{dir}")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;

    fn torch(cuda: bool) -> Libtorch {
        let mut torch = Libtorch::at(Path::new("/opt/libtorch"), Source::Variable);
        torch.cuda = cuda;
        torch
    }

    #[test]
    fn the_run_path_is_set_on_linux_and_macos() {
        let rpath = "cargo:rustc-link-arg=-Wl,-rpath,/opt/libtorch/lib".to_owned();
        assert!(directives("linux", &torch(false)).contains(&rpath));
        assert!(directives("macos", &torch(false)).contains(&rpath));
    }

    #[test]
    fn the_folder_beside_the_binary_comes_before_the_one_of_the_build() {
        for (os, beside) in [("linux", "$ORIGIN/lib"), ("macos", "@executable_path/lib")] {
            let lines = directives(os, &torch(false));
            let run_paths: Vec<&str> = lines
                .iter()
                .filter_map(|line| line.split_once("-rpath,").map(|(_, path)| path))
                .collect();
            assert_eq!(run_paths, [beside, "/opt/libtorch/lib"], "{os}");
        }
        let runpath = "cargo:rustc-link-arg=-Wl,--enable-new-dtags".to_owned();
        assert!(directives("linux", &torch(false)).contains(&runpath));
        // Apple's linker does not support it.
        assert!(!directives("macos", &torch(false)).contains(&runpath));
    }

    #[test]
    fn cuda_is_linked_although_no_symbol_of_it_is_referenced() {
        let lines = directives("linux", &torch(true));
        let position = |text: &str| lines.iter().position(|line| line.ends_with(text)).unwrap();
        assert!(position("--no-as-needed") < position("-ltorch_cuda"));
        assert!(position("-ltorch_cuda") < position("--pop-state"));
        assert!(
            !directives("linux", &torch(false))
                .iter()
                .any(|line| line.contains("cuda"))
        );
    }

    #[test]
    fn a_comma_in_the_path_survives_the_compiler_driver() {
        assert_eq!(
            run_path(Path::new("/a,b/lib")),
            ["-Xlinker", "-rpath", "-Xlinker", "/a,b/lib"]
        );
    }

    #[test]
    fn nothing_found_is_a_warning_with_the_remedy_on_lines_of_its_own() {
        let environment = Environment::made_up("linux", [("A", "b")]);
        let error = crate::Error::NotFound {
            tried: vec!["LIBTORCH: not set".into()],
        };
        let lines = link_directives(&environment, Err(error));
        assert!(
            lines
                .iter()
                .all(|line| line.starts_with("cargo:warning=overdrive-build: "))
        );
        assert!(
            lines.iter().any(|line| line.contains("cargo xtask setup")),
            "{lines:?}"
        );
    }
}
