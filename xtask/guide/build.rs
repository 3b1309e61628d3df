//! Makes doctests of the guide's pages; `src/lib.rs` says how.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    overdrive_build::link();
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let guide = here.join("../../docs/src");
    let mut modules = String::new();
    // The image of a container is built without the guide.
    if guide.is_dir() {
        println!("cargo:rerun-if-changed={}", guide.display());
        let mut pages = Vec::new();
        pages_in(&guide, &mut pages)?;
        pages.sort();
        for page in pages {
            let text = fs::read_to_string(&page)?;
            let name = page
                .strip_prefix(&guide)
                .unwrap_or(&page)
                .with_extension("");
            let name = name.display().to_string().replace(['/', '\\', '-'], "_");
            let tests = tests(&text)
                .map_err(|what| io::Error::other(format!("{}: {what}", page.display())))?;
            let file = out.join(&name).with_extension("md");
            fs::write(&file, tests)?;
            // Writing to a string cannot fail.
            let _ = writeln!(modules, "#[doc = include_str!({file:?})]\nmod {name} {{}}");
        }
    }
    fs::write(out.join("pages.rs"), modules)
}

fn pages_in(folder: &Path, pages: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            pages_in(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns the page with the comments for tests inside of the blocks that they belong to.
fn tests(page: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut lines = page.lines().enumerate().peekable();
    // The lines of a comment that ended on the line before.
    let mut before = String::new();
    while let Some((number, line)) = lines.next() {
        if line == COMMENT {
            before = comment(&mut lines, number)?;
            continue;
        }
        let Some(kind) = line.strip_prefix("```") else {
            if !before.is_empty() {
                return Err(format!(
                    "line {}: a comment for tests stands before no block",
                    number + 1
                ));
            }
            out.push_str(line);
            out.push('\n');
            continue;
        };
        let mut block = String::new();
        for (_, line) in lines.by_ref().take_while(|(_, line)| *line != "```") {
            block.push_str(line);
            block.push('\n');
        }
        let after = match lines.next_if(|(_, line)| *line == COMMENT) {
            Some((number, _)) => comment(&mut lines, number)?,
            None => String::new(),
        };
        let _ = writeln!(out, "```{kind}");
        out.push_str(&match is_test(kind) {
            true => whole(&before, &block, &after),
            false => block,
        });
        out.push_str("```\n");
        before.clear();
    }
    Ok(out)
}

const COMMENT: &str = "<!-- test";

/// Returns the lines of the comment that begins in line `number`.
fn comment<'a>(
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
    number: usize,
) -> Result<String, String> {
    let mut text = String::new();
    for (_, line) in lines {
        if line == "-->" {
            return Ok(text);
        }
        text.push_str(line);
        text.push('\n');
    }
    Err(format!("line {}: the comment does not end", number + 1))
}

fn is_test(kind: &str) -> bool {
    kind.starts_with("rust") && !kind.contains("ignore")
}

/// Returns the block with its tests, in a `main` if it has none.
fn whole(before: &str, block: &str, after: &str) -> String {
    let code = format!("{before}{block}{after}");
    if code.contains("fn main()") {
        return code;
    }
    format!("fn main() -> Result<(), Box<dyn std::error::Error>> {{\n{code}Ok(())\n}}\n")
}
