//! `cargo xtask readmes`: the README of each crate, made of the documentation of its `lib.rs`.
//!
//! crates.io shows a README and no documentation. Two texts would differ after a while, so one is made of the other.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::print_line;

use crate::cargo;
use crate::failure::{Failure, Result};

/// Writes the README of every crate. With `check`, compares them and names those that differ.
pub(crate) fn readmes(check: bool) -> Result<()> {
    let mut differ = Vec::new();
    for folder in crates()? {
        let source = folder.join("src/lib.rs");
        let text = fs::read_to_string(&source)
            .map_err(|error| Failure::io("could not read", &source, &error))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let wanted = readme(&name, &text);
        let path = folder.join("README.md");
        if fs::read_to_string(&path).is_ok_and(|there| there == wanted) {
            continue;
        }
        if check {
            differ.push(name.into_owned());
        } else {
            fs::write(&path, wanted)
                .map_err(|error| Failure::io("could not write", &path, &error))?;
            print_line(format_args!("{}", path.display()));
        }
    }
    match differ.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "the README of {} differs from the documentation of its lib.rs",
            differ.join(", ")
        ))
        .remedy("cargo xtask readmes")),
    }
}

fn crates() -> Result<Vec<PathBuf>> {
    let folder = cargo::workspace().join("crates");
    let entries =
        fs::read_dir(&folder).map_err(|error| Failure::io("could not read", &folder, &error))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path: &PathBuf| Path::is_dir(path));
    found.sort();
    Ok(found)
}

/// Returns the README of the crate `name`: the documentation in `source` as GitHub and crates.io show it. Headings
/// go down by one level, code blocks lose their hidden lines and rustdoc's attributes, and links to items become
/// their text.
fn readme(name: &str, source: &str) -> String {
    let mut text = format!("# {name}\n\n");
    // The kind of the code block that the line is in.
    let mut block: Option<bool> = None;
    // The paragraph that is being read: a link may begin on one line and end on the next.
    let mut paragraph = String::new();
    let documentation = source.lines().map_while(|line| line.strip_prefix("//!"));
    for line in documentation {
        let line = line.strip_prefix(' ').unwrap_or(line);
        if line.is_empty() || line.starts_with("```") {
            text.push_str(&without_item_links(&std::mem::take(&mut paragraph)));
        }
        if let Some(kind) = line.strip_prefix("```") {
            let is_rust = block.is_none() && is_rust(kind);
            text.push_str(if is_rust { "```rust" } else { line });
            block = match block {
                None => Some(is_rust),
                Some(_) => None,
            };
        } else if let Some(is_rust) = block {
            if is_rust && (line == "#" || line.starts_with("# ")) {
                continue;
            }
            text.push_str(line);
        } else if is_link_definition(line) {
            continue;
        } else if !line.is_empty() {
            let heading = if line.starts_with('#') { "#" } else { "" };
            paragraph.push_str(&format!("{heading}{line}\n"));
            continue;
        }
        text.push('\n');
    }
    text.push_str(&without_item_links(&paragraph));
    let text = text.trim_end();
    format!(
        "{text}\n\n---\n\nThis crate is a part of Overdrive, which makes libtorch train and serve faster from Rust. \
         Its documentation says more.\nLicensed under MIT or Apache-2.0, at your option.\n"
    )
}

/// Returns `true` for the attributes of a code block that rustdoc takes as Rust.
fn is_rust(kind: &str) -> bool {
    let mut words = kind.split(',').map(str::trim);
    words.all(|word| {
        [
            "",
            "rust",
            "no_run",
            "ignore",
            "should_panic",
            "compile_fail",
        ]
        .contains(&word)
            || word.starts_with("edition")
    })
}

/// Returns `true` for `[name]: target` of an item or a page of rustdoc.
fn is_link_definition(line: &str) -> bool {
    line.starts_with('[') && line.contains("]: ") && !line.contains("]: http")
}

/// Replaces links whose target is no address, as `` [`Server`](crate::Server) ``, by their text.
fn without_item_links(paragraph: &str) -> String {
    let mut out = String::new();
    let mut rest = paragraph;
    while let Some(start) = rest.find('[') {
        let (before, from) = rest.split_at(start);
        let Some(end) = from.find(']') else {
            break;
        };
        let label = &from[1..end];
        let mut after = &from[end + 1..];
        out.push_str(before);
        let target = after
            .strip_prefix('(')
            .and_then(|target| target.split_once(')'));
        let kept = match target {
            Some((target, _)) => target.starts_with("http"),
            None => !label.starts_with('`'),
        };
        if kept {
            out.push_str(&from[..=end]);
        } else {
            out.push_str(label);
            if let Some((_, remainder)) = target {
                after = remainder;
            } else if let Some(reference) = after.strip_prefix('[') {
                after = reference.split_once(']').map_or(after, |(_, rest)| rest);
            }
        }
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_of_a_crate_becomes_its_readme() {
        let source = "//! Reads [`File`](crate::File)s and [a page](https://example.com) by [`open`], [`x`][y],\n//! [two\n//! lines](crate::z).\n//!\n\
            //! ```no_run\n//! # fn main() {\n//! let a = [1];\n//! #[derive(Debug)]\n//! # }\n//! ```\n//!\n\
            //! # Limits\n//!\n//! | a[0] |\n//!\n//! ```toml\n//! # a comment\n//! ```\n//!\n//! [y]: crate::y\nmod x;\n";
        let wanted = "# a-crate\n\nReads `File`s and [a page](https://example.com) by `open`, `x`,\ntwo\nlines.\n\n\
            ```rust\nlet a = [1];\n#[derive(Debug)]\n```\n\n## Limits\n\n| a[0] |\n\n```toml\n# a comment\n```\n\n---";
        let readme = readme("a-crate", source);
        assert!(readme.starts_with(wanted), "{readme}");
    }
}
