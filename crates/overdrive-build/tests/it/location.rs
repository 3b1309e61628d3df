//! The rules of the search, with made-up environments and folders.

// Helpers of tests are not "in tests" to clippy's allow-unwrap-in-tests.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::cache::{self, Variant};
use overdrive_build::{Environment, Error, Release, Source, locate};

/// A folder under the system's temporary one, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("overdrive-build-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn touch(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

/// The least that counts as a libtorch.
fn install(root: &Path) {
    for file in ["lib/libtorch.so", "lib/libtorch_cpu.so", "lib/libc10.so"] {
        touch(&root.join(file));
    }
    touch(&root.join("include/torch/csrc/autograd/engine.h"));
    touch(&root.join("include/torch/csrc/api/include/torch/torch.h"));
    let version = format!("{}+cpu\n", Release::DEFAULT.libtorch);
    fs::write(root.join("build-version"), version).unwrap();
}

fn environment(variables: &[(&str, &Path)]) -> Environment {
    Environment::made_up("linux", variables.iter().copied())
}

#[test]
fn the_cache_is_where_the_platform_keeps_caches() {
    let dir = |os: &str, variables: &[(&str, &str)]| {
        cache::dir(&Environment::made_up(os, variables.iter().copied()))
    };
    let home = ("HOME", "/home/a");
    assert_eq!(
        dir("linux", &[home]),
        Some("/home/a/.cache/overdrive".into())
    );
    assert_eq!(
        dir("macos", &[home]),
        Some("/home/a/Library/Caches/overdrive".into())
    );
    assert_eq!(
        dir("linux", &[home, ("XDG_CACHE_HOME", "/c")]),
        Some("/c/overdrive".into())
    );
    assert_eq!(
        dir("macos", &[home, ("XDG_CACHE_HOME", "/c")]),
        Some("/c/overdrive".into())
    );
    assert_eq!(
        dir("linux", &[home, ("XDG_CACHE_HOME", "c")]),
        Some("/home/a/.cache/overdrive".into())
    );
    assert_eq!(
        dir("linux", &[home, ("XDG_CACHE_HOME", "")]),
        Some("/home/a/.cache/overdrive".into())
    );
    assert_eq!(dir("linux", &[]), None);
}

#[test]
fn the_variable_wins_over_the_cache() {
    let folder = Folder::new("variable");
    let mine = folder.0.join("mine");
    install(&mine);
    let with_cache = environment(&[("XDG_CACHE_HOME", &folder.0)]);
    install(&cache::libtorch_dir(&with_cache, Release::DEFAULT, Variant::Cpu).unwrap());

    let both = environment(&[("XDG_CACHE_HOME", &folder.0), ("LIBTORCH", &mine)]);
    let torch = locate(&both).unwrap();
    assert_eq!(torch.source, Source::Variable);
    assert_eq!(torch.lib_dir, mine.join("lib"));
    assert_eq!(
        torch.include_dirs,
        [
            mine.join("include"),
            mine.join("include/torch/csrc/api/include")
        ]
    );
    assert_eq!(torch.version.as_deref(), Some(Release::DEFAULT.libtorch));
    assert!(!torch.cuda);

    let torch = locate(&both.without("LIBTORCH")).unwrap();
    assert_eq!(torch.source, Source::Cache);
}

#[test]
fn libraries_and_headers_may_lie_apart() {
    let folder = Folder::new("apart");
    let (libs, headers) = (folder.0.join("l"), folder.0.join("h"));
    install(&libs);
    install(&headers);
    let torch = locate(&environment(&[
        ("LIBTORCH", &folder.0),
        ("LIBTORCH_LIB", &libs),
        ("LIBTORCH_INCLUDE", &headers),
    ]))
    .unwrap();
    assert_eq!(torch.lib_dir, libs.join("lib"));
    assert_eq!(torch.include_dirs[0], headers.join("include"));
}

#[test]
fn a_variable_that_names_no_libtorch_is_an_error_and_not_skipped() {
    let folder = Folder::new("wrong");
    let with_cache = environment(&[("XDG_CACHE_HOME", &folder.0)]);
    install(&cache::libtorch_dir(&with_cache, Release::DEFAULT, Variant::Cpu).unwrap());
    let nowhere = folder.0.join("nowhere");
    let error = locate(&environment(&[
        ("XDG_CACHE_HOME", &folder.0),
        ("LIBTORCH", &nowhere),
    ]))
    .unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("LIBTORCH names") && text.contains("libtorch_cpu"),
        "{text}"
    );
    assert!(text.contains("cargo xtask setup"), "{text}");
}

#[test]
fn what_torch_sys_says_comes_first() {
    let folder = Folder::new("dep");
    let (theirs, mine) = (folder.0.join("theirs"), folder.0.join("mine"));
    install(&theirs);
    install(&mine);
    let torch = locate(&environment(&[
        ("LIBTORCH", &mine),
        ("DEP_TCH_LIBTORCH_LIB", &theirs.join("lib")),
    ]))
    .unwrap();
    assert_eq!(torch.source, Source::TorchSys);
    assert_eq!(torch.lib_dir, theirs.join("lib"));
    assert_eq!(torch.include_dirs[0], theirs.join("include"));
}

#[test]
fn the_download_of_torch_sys_is_found_beside_our_own_out_dir() {
    let folder = Folder::new("download");
    let root = folder
        .0
        .join("target/debug/build/torch-sys-0123/out/libtorch/libtorch");
    install(&root);
    let out_dir = folder.0.join("target/debug/build/mine-4567/out");
    let torch = locate(&environment(&[("OUT_DIR", &out_dir)])).unwrap();
    assert_eq!(torch.source, Source::TorchSysDownload);
    assert_eq!(torch.lib_dir, root.join("lib"));
}

#[test]
fn cuda_is_seen_by_its_library() {
    let folder = Folder::new("cuda");
    install(&folder.0);
    touch(&folder.0.join("lib/libtorch_cuda.so"));
    assert!(
        locate(&environment(&[("LIBTORCH", &folder.0)]))
            .unwrap()
            .cuda
    );
}

#[test]
fn the_version_is_read_from_the_header_where_no_file_says_it() {
    let folder = Folder::new("header");
    install(&folder.0);
    fs::remove_file(folder.0.join("build-version")).unwrap();
    let header = folder.0.join("include/torch/headeronly/version.h");
    touch(&header);
    fs::write(
        header,
        "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 1\n",
    )
    .unwrap();
    let torch = locate(&environment(&[("LIBTORCH", &folder.0)])).unwrap();
    assert_eq!(torch.version.as_deref(), Some("2.11.1"));
}

#[test]
fn the_old_abi_is_an_error_that_names_the_variable() {
    let folder = Folder::new("abi");
    install(&folder.0);
    let error = locate(&environment(&[
        ("LIBTORCH", &folder.0),
        ("LIBTORCH_CXX11_ABI", Path::new("0")),
    ]));
    let text = error.unwrap_err().to_string();
    assert!(text.contains("unset the variable"), "{text}");
}

#[test]
fn nothing_found_says_what_was_tried_and_the_way_out() {
    let folder = Folder::new("nothing");
    if Path::new("/usr/lib/libtorch.so").exists() {
        return; // A machine with a system-wide libtorch always finds one.
    }
    let text = locate(&environment(&[("XDG_CACHE_HOME", &folder.0)]))
        .unwrap_err()
        .to_string();
    for part in [
        "LIBTORCH: not set",
        "2.11.0-cpu",
        "2.13.0-cuda13",
        "tch 0.24.0",
        "cargo xtask setup",
        "LIBTORCH_USE_PYTORCH=1",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn another_release_in_the_cache_is_found_after_the_default_one() {
    let folder = Folder::new("releases");
    let with_cache = environment(&[("XDG_CACHE_HOME", &folder.0)]);
    let installed = |release: Release| {
        let root = cache::libtorch_dir(&with_cache, release, Variant::Cpu).unwrap();
        install(&root);
        fs::write(root.join("build-version"), release.libtorch).unwrap();
        locate(&with_cache).unwrap()
    };
    let others = Release::ALL.into_iter().rev();
    for release in others.filter(|release| *release != Release::DEFAULT) {
        let found = installed(release);
        assert_eq!(found.version.as_deref(), Some(release.libtorch));
    }
    let found = installed(Release::DEFAULT);
    assert_eq!(found.version.as_deref(), Some(Release::DEFAULT.libtorch));
}

#[test]
fn a_version_that_overdrive_does_not_know_is_refused_with_those_it_knows() {
    let folder = Folder::new("unknown");
    install(&folder.0);
    let variables = environment(&[("LIBTORCH", &folder.0)]);
    assert!(
        locate(&variables)
            .unwrap()
            .require_release(&variables)
            .is_ok()
    );

    fs::write(folder.0.join("build-version"), "2.12.1+cpu").unwrap();
    let torch = locate(&variables).unwrap();
    let text = torch.require_release(&variables).unwrap_err().to_string();
    for part in [
        "libtorch 2.12.1",
        "2.11.0 (with tch 0.24.0)",
        "2.13.0 (with tch 0.26.0)",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    let bypass = variables.clone().with("LIBTORCH_BYPASS_VERSION_CHECK", "1");
    assert!(torch.require_release(&bypass).is_ok());

    // A build from source may have no version file.
    fs::remove_file(folder.0.join("build-version")).unwrap();
    assert!(
        locate(&variables)
            .unwrap()
            .require_release(&variables)
            .is_ok()
    );
}
