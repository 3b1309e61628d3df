//! `cargo xtask new`: a project outside of this workspace that depends on single crates, and
//! `cargo xtask setup --project`: libtorch for a project that exists.
//!
//! The project is a copy of `xtask/templates/new`, a member of this workspace, which the checks therefore
//! compile, lint and test. Only `Cargo.toml` changes: what `workspace = true` stands for is written out.

use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use overdrive_core::print_line;

use crate::cargo::{self, Cargo};
use crate::dist::Made;
use crate::failure::{self, Failure, Result, read};
use crate::record::quoted;
use crate::setup::{self, Found, Request};
use crate::torch;

/// The name of the template's package, which is replaced in all its files.
const TEMPLATE: &str = "my-model";
/// The folder of the template.
const TEMPLATES: &str = "xtask/templates/new";
const CONFIG: &str = ".cargo/config.toml";
/// The profile of a project's development builds. Without it the CPU kernels would be compiled without optimization, and
/// the glue of torch-sys with more than a test needs.
const PROFILE: &str = r#"
# Kernels and codecs of the crates run in tests too; the glue of torch-sys need not be fast for that.
[profile.dev]
debug = "line-tables-only"
opt-level = 1
lto = "off"

[profile.dev.package."*"]
debug = false

[profile.dev.package.torch-sys]
opt-level = 0
"#;
/// Names that Cargo refuses for a package: folders and crates of its own, and Rust's keywords.
const RESERVED: &str = "\
    alloc build core deps examples incremental proc_macro proc-macro std test \
    abstract as async await become box break const continue crate do dyn else enum extern false final fn for gen if impl in \
    let loop macro match mod move mut override priv pub ref return self static struct super trait true try type typeof \
    unsafe unsized use virtual where while yield";

/// The place that the new project takes the crates of Overdrive from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// This checkout.
    Path,
    /// A repository, at a revision or at the head of its default branch.
    Git { url: String, rev: Option<String> },
    /// The registry, once the crates are published.
    Registry,
}

/// Makes the project `folder` and records libtorch in it. A folder that exists is left as it is.
pub(crate) fn new(folder: &Path, name: Option<&str>, source: &Source) -> Result<()> {
    let folder = target_of(folder)?;
    let name = name_of(&folder, name)?;
    let found = setup::setup(Request::Any, false)?;
    write(&folder, &name, source)?;
    // A project without libtorch is of no use, and a second attempt would be refused.
    if let Err(failure) = found.record_in(&folder) {
        let _ = fs::remove_dir_all(&folder);
        return Err(failure);
    }
    print_line(format_args!(
        "{} depends on crates of Overdrive ({})",
        folder.display(),
        described(source)
    ));
    print_line(format_args!(
        "libtorch is taken from {} ({CONFIG})",
        found.root.display()
    ));
    print_line(format_args!(
        "run it:   cd {} && cargo run && cargo test",
        folder.display()
    ));
    Ok(())
}

/// Makes a project in a temporary folder, and lets Cargo read its manifest and resolve its dependencies. Its code is a
/// member of this workspace, which compiles and tests it; [`check`] builds it outside.
pub(crate) fn resolve() -> Result<()> {
    let (_parent, folder) = temporary()?;
    Cargo::tree_of_project(&folder).run()
}

/// Makes a project in a temporary folder that lasts as long as the first value.
fn temporary() -> Result<(Made, PathBuf)> {
    let parent = Made(std::env::temp_dir().join(format!("overdrive-new-{}", std::process::id())));
    let folder = parent.0.join("new-project");
    new(&folder, None, &Source::Path)?;
    Ok((parent, folder))
}

/// Builds a project of three files, makes a project in a temporary folder, and runs its program and its tests there.
pub(crate) fn check() -> Result<()> {
    cargo::outside_project().run()?;
    let (_parent, folder) = temporary()?;
    // The target folder of this workspace holds torch-sys, which takes minutes to compile.
    let target = torch::target_folder();
    for command in ["run", "test"] {
        let cargo = Cargo::of_project(&folder, command, &target);
        cargo.run()?;
    }
    let checkpoint = folder.join("runs/spiral/checkpoint-200");
    if !checkpoint.is_dir() {
        return Err(Failure::new(format!(
            "the new project trained, but wrote no {}",
            checkpoint.display()
        )));
    }
    Ok(())
}

/// Copies the example `train` into a project of its own, and trains with it for two steps on the text of the guide.
pub(crate) fn check_example() -> Result<()> {
    let (_parent, folder) = temporary()?;
    let removed = fs::remove_file(folder.join("src/lib.rs"))
        .and_then(|()| fs::remove_dir_all(folder.join("tests")));
    removed.map_err(|error| Failure::io("could not remove files of", &folder, &error))?;
    failure::write(
        &folder.join("src/main.rs"),
        &workspace_file("examples/train.rs")?,
    )?;
    let manifest = folder.join("Cargo.toml");
    failure::write(
        &manifest,
        &with_facade(&read(&manifest)?, &workspace_file("Cargo.toml")?)?,
    )?;
    let run = folder.join("run");
    let cargo = Cargo::of_project(&folder, "run", &torch::target_folder())
        .and(&["--", "--steps", "2", "--samples", "0", "--data"].map(OsString::from))
        .and(&[
            cargo::workspace().join("docs/src").into(),
            "--out".into(),
            run.clone().into(),
        ]);
    cargo.run()?;
    match run.join("model/model.safetensors").is_file() {
        true => Ok(()),
        false => Err(Failure::new(
            "the copied example trained, but wrote no model",
        )),
    }
}

/// Returns the manifest of a project with the facade crate and the parser of flags.
fn with_facade(manifest: &str, root: &str) -> Result<String> {
    let crates = cargo::workspace().join("crates");
    let facade = requirement("overdrive", root, &Source::Path, &crates)?;
    let features = "default-features = false, features = [\"distributed\", \"hub\", \"precision\", \"trainer\", \"transformer\"] }";
    let facade = facade.replace(" }", &format!(", {features}"));
    let clap = requirement("clap", root, &Source::Path, &crates)?;
    let table = "[dependencies]\n";
    Ok(manifest.replace(table, &format!("{table}{clap}\n{facade}\n")))
}

/// Records libtorch in a project that exists.
pub(crate) fn connect(project: &Path, found: &Found) -> Result<()> {
    if !project.join("Cargo.toml").is_file() {
        return Err(Failure::new(format!(
            "`--project` is {}, which has no Cargo.toml",
            project.display()
        ))
        .remedy("Name the folder of a Cargo project; `cargo xtask new DIR` makes one."));
    }
    found.record_in(project)?;
    print_line(format_args!(
        "{} now records it",
        project.join(".cargo/libtorch.toml").display()
    ));
    let config = project.join(CONFIG);
    let included = template(CONFIG)?;
    match fs::read_to_string(&config) {
        Ok(text) if text.contains("libtorch.toml") => {}
        Ok(_) => print_line(format_args!(
            "add these lines to {}:\n\n{included}",
            config.display()
        )),
        Err(_) => failure::write(&config, &included)?,
    }
    let ignored = fs::read_to_string(project.join(".gitignore"));
    if !ignored.is_ok_and(|text| text.contains("libtorch.toml")) {
        print_line("add this line to .gitignore: /.cargo/libtorch.toml");
    }
    print_line(
        "its build.rs must call overdrive_build::link(), so that its programs find libtorch when they start",
    );
    Ok(())
}

fn described(source: &Source) -> String {
    match source {
        Source::Path => format!("paths to {}", cargo::workspace().display()),
        Source::Git {
            url,
            rev: Some(rev),
        } => format!("{url} at {rev}"),
        Source::Git { url, rev: None } => url.clone(),
        Source::Registry => format!("version {}", env!("CARGO_PKG_VERSION")),
    }
}

/// Returns the absolute path of the project; an error if it exists, or if Cargo would take it for a part of this
/// workspace.
fn target_of(folder: &Path) -> Result<PathBuf> {
    let folder = normal(
        &std::path::absolute(folder)
            .map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?,
    );
    // Not `exists`: a dangling link must not be overwritten either.
    if folder.symlink_metadata().is_ok() {
        return Err(
            Failure::new(format!("{} exists; it is left unchanged", folder.display()))
                .remedy("Name a folder that does not exist yet."),
        );
    }
    if folder.starts_with(cargo::workspace()) {
        return Err(Failure::new(format!(
            "{} is inside this workspace; Cargo would treat it as a member",
            folder.display()
        ))
        .remedy("Name a folder outside, such as ../my-model."));
    }
    Ok(folder)
}

/// Returns `path` without `.` and `..`.
pub(crate) fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// Returns the name of the package: the given one, or that of the folder.
fn name_of(folder: &Path, name: Option<&str>) -> Result<String> {
    let of_folder = folder.file_name().unwrap_or_default().to_string_lossy();
    let name = name.unwrap_or(&of_folder);
    let mut chars = name.chars();
    let is_word = chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if is_word && !RESERVED.split(' ').any(|word| word == name) {
        return Ok(name.to_owned());
    }
    Err(Failure::new(format!(
        "{name:?} is not a valid package name; it must begin with a letter, contain only letters, digits, `-` and \
         `_`, and not be a reserved word of Rust or Cargo"
    ))
    .remedy("Name it with `--name my-model`."))
}

/// Writes the files of the project.
fn write(folder: &Path, name: &str, source: &Source) -> Result<()> {
    let manifest = manifest(folder, name, source)?;
    let parent = folder.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(|error| Failure::io("could not create", parent, &error))?;
    // Not `create_dir_all`, which accepts a folder that another process has made meanwhile.
    fs::create_dir(folder).map_err(|error| Failure::io("could not create", folder, &error))?;
    let copied = copy(&cargo::workspace().join(TEMPLATES), folder, name);
    let written = copied
        .and_then(|()| failure::write(&folder.join("Cargo.toml"), &manifest))
        // The versions with which this checkout was tested; Cargo leaves out what the project does not use.
        .and_then(|()| failure::write(&folder.join("Cargo.lock"), &lock_file()?));
    if written.is_err() {
        let _ = fs::remove_dir_all(folder);
    }
    written
}

/// Copies a folder of the template.
fn copy(from: &Path, to: &Path, name: &str) -> Result<()> {
    let fail = |error: std::io::Error| Failure::io("could not read", from, &error);
    for entry in fs::read_dir(from).map_err(fail)? {
        let (path, file) = entry
            .map(|entry| (entry.path(), entry.file_name()))
            .map_err(fail)?;
        if ["libtorch.toml", "runs", "target"]
            .map(OsString::from)
            .contains(&file)
        {
            continue; // what is made here
        }
        if path.is_dir() {
            copy(&path, &to.join(file), name)?;
        } else {
            failure::write(&to.join(file), named(&read(&path)?, name))?;
        }
    }
    Ok(())
}

fn template(file: &str) -> Result<String> {
    workspace_file(&format!("{TEMPLATES}/{file}"))
}

fn workspace_file(file: &str) -> Result<String> {
    read(&cargo::workspace().join(file))
}

/// Returns the lock file of the builds, which has the tch of `--torch`.
fn lock_file() -> Result<String> {
    read(&torch::workspace().join("Cargo.lock"))
}

fn named(text: &str, name: &str) -> String {
    text.replace(TEMPLATE, name)
        .replace(&TEMPLATE.replace('-', "_"), &name.replace('-', "_"))
}

/// Returns the manifest of the project.
fn manifest(folder: &Path, name: &str, source: &Source) -> Result<String> {
    let root = workspace_file("Cargo.toml")?;
    let crates = cargo::workspace().join("crates");
    // Relative where both lie in one folder, so that they can be moved together.
    let crates = match folder.parent() {
        Some(parent) if cargo::workspace().parent() == Some(parent) => relative(folder, &crates),
        _ => crates,
    };
    let mut text = String::new();
    for line in named(&template("Cargo.toml")?, name).lines() {
        match line.strip_suffix(".workspace = true") {
            Some(dependency) => text.push_str(&requirement(dependency, &root, source, &crates)?),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    Ok(text + PROFILE)
}

/// Returns the line of one dependency.
fn requirement(dependency: &str, root: &str, source: &Source, crates: &Path) -> Result<String> {
    let start = format!("{dependency} = ");
    let line = root.lines().find(|line| line.starts_with(&start));
    let line = line.ok_or_else(|| {
        Failure::new(format!(
            "Cargo.toml of this workspace has no dependency {dependency}"
        ))
    })?;
    if !dependency.starts_with("overdrive") {
        return Ok(line.to_owned());
    }
    let value = match source {
        Source::Path => format!(
            "path = {}",
            quoted(&crates.join(dependency).display().to_string())
        ),
        Source::Git { url, rev: None } => format!("git = {}", quoted(url)),
        Source::Git {
            url,
            rev: Some(rev),
        } => format!("git = {}, rev = {}", quoted(url), quoted(rev)),
        Source::Registry => return Ok(format!("{dependency} = \"{}\"", env!("CARGO_PKG_VERSION"))),
    };
    Ok(format!("{dependency} = {{ {value} }}"))
}

/// Returns the path from the folder `from` to `to`, both absolute.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let (mut from, mut to) = (from.components().peekable(), to.components().peekable());
    while from.peek().is_some() && from.peek() == to.peek() {
        from.next();
        to.next();
    }
    from.map(|_| Component::ParentDir).chain(to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_has_the_template_under_its_own_name_and_no_word_of_the_workspace() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("spiral-2");
        write(&folder, "spiral-2", &Source::Path).unwrap();
        let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
        let manifest = read("Cargo.toml");
        assert!(
            manifest.starts_with("[package]\nname = \"spiral-2\"\n"),
            "{manifest}"
        );
        // The path of this one may have the word itself.
        let root = cargo::workspace().display().to_string();
        let words = manifest.replace(&root, "");
        assert!(!words.contains("workspace"), "{manifest}");
        let optim = cargo::workspace().join("crates/overdrive-optim");
        assert!(
            manifest.contains(&format!(
                "overdrive-optim = {{ path = \"{}\" }}",
                optim.display()
            )),
            "{manifest}"
        );
        for table in ["[profile.dev]", "[profile.dev.package.torch-sys]"] {
            assert!(manifest.contains(table), "{manifest}");
        }
        assert!(!manifest.contains("profile.release"), "{manifest}");
        let tch = manifest.lines().find(|line| line.starts_with("tch = "));
        assert!(
            tch.is_some_and(|line| line.contains("default-features = false")),
            "{manifest}"
        );
        assert!(read("src/main.rs").contains("use spiral_2::"));
        assert!(read(CONFIG).contains("libtorch.toml"));
        for file in ["README.md", "tests/training.rs", ".gitignore"] {
            let text = read(file);
            let is_named = text.contains("my-model") || text.contains("my_model");
            assert!(!is_named, "{file}: {text}");
        }
        assert!(folder.join("Cargo.lock").is_file());
    }

    #[test]
    fn dependencies_come_from_paths_a_repository_or_the_registry() {
        let root =
            "overdrive-optim = { version = \"0.1.0\", path = \"crates/x\" }\nanyhow = \"1\"\n";
        let of = |name: &str, source: &Source| {
            requirement(name, root, source, Path::new("../overdrive/crates"))
        };
        let git = |rev: Option<&str>| Source::Git {
            url: "https://example.com/overdrive".to_owned(),
            rev: rev.map(str::to_owned),
        };
        let line = |source: &Source| of("overdrive-optim", source).unwrap();
        assert_eq!(
            line(&Source::Path),
            "overdrive-optim = { path = \"../overdrive/crates/overdrive-optim\" }"
        );
        assert_eq!(
            line(&git(None)),
            "overdrive-optim = { git = \"https://example.com/overdrive\" }"
        );
        assert_eq!(
            line(&git(Some("abc"))),
            "overdrive-optim = { git = \"https://example.com/overdrive\", rev = \"abc\" }"
        );
        assert_eq!(
            line(&Source::Registry),
            format!("overdrive-optim = \"{}\"", env!("CARGO_PKG_VERSION"))
        );
        assert_eq!(of("anyhow", &Source::Path).unwrap(), "anyhow = \"1\"");
        assert!(of("nothing", &Source::Path).is_err());
    }

    #[test]
    fn what_exists_and_what_is_inside_of_the_workspace_is_refused_and_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("thesis");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("main.tex"), "years").unwrap();
        let text = new(&folder, None, &Source::Path).unwrap_err().to_string();
        assert!(text.contains("exists; it is left unchanged"), "{text}");
        assert!(write(&folder, "thesis", &Source::Path).is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(target_of(&folder.join("main.tex")).is_err(), "a file");

        let inside = cargo::workspace().join("my-model");
        let text = target_of(&inside).unwrap_err().to_string();
        assert!(text.contains("inside this workspace"), "{text}");
        let out_again = cargo::workspace().join("../not-there-yet");
        assert!(target_of(&out_again).is_ok(), "outside");
    }

    #[test]
    fn a_name_that_cargo_or_rust_would_refuse_is_refused_with_the_flag() {
        let of = |folder: &str, name| name_of(Path::new(folder), name);
        assert_eq!(of("/home/a/my-model_2", None).unwrap(), "my-model_2");
        assert_eq!(of("/home/a/1 model", Some("model")).unwrap(), "model");
        for folder in [
            "/home/a/1model",
            "/home/a/mein modell",
            "/home/a/modèle",
            "/a/test",
            "/a/yield",
            "/a/gen",
            "/",
        ] {
            let text = of(folder, None).unwrap_err().to_string();
            assert!(text.contains("--name"), "{text}");
        }
    }

    #[test]
    fn a_project_that_exists_gets_the_record_and_keeps_its_configuration() {
        let parent = tempfile::tempdir().unwrap();
        let project = parent.path();
        let found = Found::for_test(project);
        let text = connect(project, &found).unwrap_err().to_string();
        assert!(text.contains("Cargo.toml"), "{text}");

        fs::write(project.join("Cargo.toml"), "[package]\n").unwrap();
        connect(project, &found).unwrap();
        let record = fs::read_to_string(project.join(".cargo/libtorch.toml")).unwrap();
        assert!(record.contains("LIBTORCH = "), "{record}");
        let config = project.join(CONFIG);
        assert!(
            fs::read_to_string(&config)
                .unwrap()
                .contains("libtorch.toml")
        );

        fs::write(&config, "[build]\njobs = 1\n").unwrap();
        connect(project, &found).unwrap();
        assert_eq!(fs::read_to_string(&config).unwrap(), "[build]\njobs = 1\n");
    }
}
