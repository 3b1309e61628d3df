//! The licence texts of the files in the folder, which the licences require to be included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::Release;
use serde_json::Value;

use super::{copy, create, write};
use crate::cargo;
use crate::failure::{Failure, Result};
use crate::torch;

/// The libraries beside the programs, for a libtorch that was installed without licence texts.
fn libraries(torch: Release) -> String {
    let version = torch.libtorch;
    format!(
        "\
libtorch, libc10 (and libtorch_cuda, libc10_cuda): PyTorch, BSD-3-Clause, and what it contains
    https://github.com/pytorch/pytorch/blob/v{version}/LICENSE
    https://github.com/pytorch/pytorch/blob/v{version}/NOTICE
libcudart, libcupti (and further libraries of CUDA): NVIDIA, CUDA Toolkit End User License Agreement
    https://docs.nvidia.com/cuda/eula/
libgomp: GCC, GPL-3.0-or-later with the GCC Runtime Library Exception
    https://www.gnu.org/licenses/gcc-exception-3.1.html
"
    )
}

/// A crate that is linked in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    licence: String,
    repository: String,
    folder: PathBuf,
}

/// Writes `crates.txt` and `libraries.txt` into `folder`, and the licence texts that setup has kept.
pub(crate) fn gather(folder: &Path, libtorch: &Path, features: Option<&str>) -> Result<()> {
    create(folder)?;
    let host = cargo::host()?;
    let tree = cargo::tree(&host, features).output()?;
    let crates = linked(&metadata(&host, features)?, &tree)?;
    every_one_has_a_licence(&crates)?;
    let mut texts = Vec::new();
    for one in &crates {
        texts.push(texts_in(&one.folder)?);
    }
    let put = |name: &str, text: &str| write(&folder.join(name), text);
    put("crates.txt", &written(&crates, &texts))?;
    put("libraries.txt", &libraries(torch::release()?))?;
    let kept = libtorch.join("licences");
    if kept.is_dir() {
        copy_tree(&kept, folder)?;
    }
    Ok(())
}

/// Returns an error with the names of the crates that state no licence: they must not be passed on.
fn every_one_has_a_licence(crates: &BTreeSet<Crate>) -> Result<()> {
    let without = crates.iter().filter(|one| one.licence.is_empty());
    let names: Vec<&str> = without.map(|one| &*one.name).collect();
    match names.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "these crates state no licence: {}",
            names.join(", ")
        ))
        .remedy("Leave out the feature that needs them, or ask their authors.")),
    }
}

fn metadata(host: &str, features: Option<&str>) -> Result<Value> {
    let text = cargo::metadata(host, features).output()?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("cargo metadata printed no JSON: {error}")))
}

/// Returns the external crates that the examples are linked with, by name: those of `tree`, the output of
/// [`cargo::tree`], with what `metadata` says about them. Metadata alone lists more, because other members of the
/// workspace turn further features on.
fn linked(metadata: &Value, tree: &str) -> Result<BTreeSet<Crate>> {
    let missing = |line: &str| {
        Failure::new(format!(
            "the output of cargo tree and cargo metadata has an unknown format: {line:?}"
        ))
    };
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let packages: BTreeMap<_, _> = packages
        .map(|package| {
            (
                (package["name"].as_str(), package["version"].as_str()),
                package,
            )
        })
        .collect();
    let mut crates = BTreeSet::new();
    // `NAME vVERSION`, with the folder of a crate of this workspace, and with `(*)` where it was listed before.
    for line in tree.lines() {
        let mut words = line.split_whitespace();
        let name = words.next();
        let version = words.next().and_then(|word| word.strip_prefix('v'));
        let package = packages.get(&(name, version));
        let package = package.ok_or_else(|| missing(line))?;
        // Crates of this workspace have no source; their licence is beside the programs.
        if !package["source"].is_null() {
            crates.insert(Crate::of(package));
        }
    }
    match crates.is_empty() {
        true => Err(missing(tree)),
        false => Ok(crates),
    }
}

impl Crate {
    fn of(package: &Value) -> Self {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let manifest = PathBuf::from(text("manifest_path"));
        Self {
            name: text("name"),
            version: text("version"),
            licence: match (text("license"), text("license_file")) {
                (licence, file) if licence.is_empty() && !file.is_empty() => {
                    format!("see its file {file}")
                }
                (licence, _) => licence,
            },
            repository: text("repository"),
            folder: manifest.parent().map(Path::to_path_buf).unwrap_or_default(),
        }
    }
}

/// Returns the texts of a crate's licence files, in the order of their names.
fn texts_in(folder: &Path) -> Result<Vec<String>> {
    let fail = |error: std::io::Error| Failure::io("could not read", folder, &error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_uppercase();
        let starts = [
            "LICENSE",
            "LICENCE",
            "COPYING",
            "NOTICE",
            "UNLICENSE",
            "COPYRIGHT",
        ];
        if path.is_file() && starts.iter().any(|start| name.starts_with(start)) {
            paths.push(path);
        }
    }
    paths.sort();
    let read = |path: &PathBuf| {
        let bytes = fs::read(path).map_err(|error| Failure::io("could not read", path, &error))?;
        Ok(String::from_utf8_lossy(&bytes)
            .replace("\r\n", "\n")
            .trim()
            .to_owned())
    };
    paths.iter().map(read).collect()
}

/// Returns the number of crates by licence, a list of the crates, then each licence text once, with its crates.
fn written(crates: &BTreeSet<Crate>, texts: &[Vec<String>]) -> String {
    let mut out = format!("The programs are linked with {} crates.\n\n", crates.len());
    let mut by_licence: BTreeMap<&str, usize> = BTreeMap::new();
    for one in crates {
        *by_licence.entry(&one.licence).or_default() += 1;
    }
    for (licence, count) in by_licence {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{count:5}  {licence}");
    }
    out.push('\n');
    // In the order of the first crate with the text.
    let mut order: Vec<&String> = Vec::new();
    let mut of: BTreeMap<&String, Vec<String>> = BTreeMap::new();
    for (one, texts) in crates.iter().zip(texts) {
        let _ = writeln!(
            out,
            "{} {}: {}{}",
            one.name,
            one.version,
            one.licence,
            if texts.is_empty() {
                let ours = ["MIT", "Apache-2.0"].into_iter();
                let ours = ours.filter(|name| one.licence.contains(name));
                let ours = ours.map(|name| match name {
                    "MIT" => "LICENSE-MIT",
                    _ => "LICENSE-APACHE",
                });
                let text = ours.collect::<Vec<_>>().join(" or ");
                let text = if text.is_empty() {
                    "ask its authors".to_owned()
                } else {
                    format!("the licence is in {text}")
                };
                format!(
                    " (the crate contains no licence text; {text}; {})",
                    one.repository
                )
            } else {
                String::new()
            }
        );
        for text in texts {
            let names = of.entry(text).or_insert_with(|| {
                order.push(text);
                Vec::new()
            });
            names.push(format!("{} {}", one.name, one.version));
        }
    }
    for text in order {
        let line = "=".repeat(100);
        let _ = write!(out, "\n{line}\n{}\n{line}\n\n{text}\n", of[text].join(", "));
    }
    out
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let fail = |error: std::io::Error| Failure::io("could not read", from, &error);
    create(to)?;
    for entry in fs::read_dir(from).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let to = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_tree(&path, &to)?;
        } else {
            copy(&path, &to)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_linked_is_listed_and_what_other_members_need_is_not() {
        let package = |name: &str, source: Value| {
            json!({"name": name, "version": "1.0.0", "license": "MIT", "source": source,
                   "manifest_path": format!("/registry/{name}/Cargo.toml")})
        };
        let registry = json!("registry+https://example.org");
        let metadata = json!({"packages": [
            package("overdrive-examples", Value::Null),
            package("overdrive", Value::Null),
            package("tch", registry.clone()),
            package("half", registry.clone()),
            package("symphonia", registry),
        ]});
        let tree = "overdrive-examples v1.0.0 (/w/examples)\noverdrive v1.0.0 (/w/crates/overdrive)\n\
                    tch v1.0.0\nhalf v1.0.0\nhalf v1.0.0 (*)\n";
        let crates = linked(&metadata, tree).unwrap();
        let names: Vec<&str> = crates.iter().map(|one| &*one.name).collect();
        assert_eq!(names, ["half", "tch"]);
        assert!(linked(&metadata, "half v2.0.0\n").is_err());
        assert!(linked(&json!({}), "").is_err());
    }

    fn one(name: &str, licence: &str) -> Crate {
        Crate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: licence.to_owned(),
            repository: "https://example.org".to_owned(),
            folder: PathBuf::new(),
        }
    }

    #[test]
    fn licences_are_counted_and_a_text_of_several_crates_is_written_once_with_their_names() {
        let crates = BTreeSet::from([one("a", "MIT"), one("b", "ISC"), one("c", "MIT")]);
        let text = |text: &str| vec![text.to_owned()];
        let out = written(&crates, &[text("SAME"), text("SAME"), vec![]]);
        let head =
            "The programs are linked with 3 crates.\n\n    1  ISC\n    2  MIT\n\na 1.0.0: MIT";
        assert!(out.starts_with(head), "{out}");
        assert_eq!(out.matches("SAME").count(), 1);
        let without = "c 1.0.0: MIT (the crate contains no licence text; the licence is in LICENSE-MIT; https://example.org)";
        assert!(
            out.contains("\na 1.0.0, b 1.0.0\n") && out.contains(without),
            "{out}"
        );
        assert!(every_one_has_a_licence(&crates).is_ok());
        let text = every_one_has_a_licence(&BTreeSet::from([one("d", "")])).unwrap_err();
        assert!(text.to_string().contains("no licence: d"), "{text}");
    }
}
