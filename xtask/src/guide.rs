//! `cargo xtask book`: the guide as HTML, and the checks of its pages.
//!
//! The book is built of a copy of `docs/src` into which the reports of `docs/benchmarks` are put, because mdBook
//! takes no page from outside of its source folder, and the pages link to the reports where they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_core::print_line;

use crate::failure::{Failure, Result, read, write};
use crate::markdown::{self, Block, Kind};
use crate::{cargo, figures};

/// Checks the pages, then builds the book in `target/book`.
pub(crate) fn book(commands: &[String]) -> Result<()> {
    check(commands)?;
    let staged = cargo::target_folder().join("book-source");
    stage(&staged)?;
    links_of_book(&staged.join("src"))?;
    let out = cargo::target_folder().join("book");
    let mut mdbook = Command::new("mdbook");
    mdbook.arg("build").arg(&staged).arg("--dest-dir").arg(&out);
    eprintln!(
        "$ mdbook build {} --dest-dir {}",
        staged.display(),
        out.display()
    );
    let status = mdbook.status().map_err(|error| {
        Failure::new(format!("mdbook could not be started ({error})"))
            .remedy("cargo install --locked mdbook")
    })?;
    if !status.success() {
        return Err(Failure::new(format!("mdbook ended with {status}")));
    }
    print_line(format_args!(
        "the guide is in {}",
        out.join("index.html").display()
    ));
    Ok(())
}

/// Writes the source of the book: `docs/src` with the reports in its folder `benchmarks`.
fn stage(staged: &Path) -> Result<()> {
    let docs = cargo::workspace().join("docs");
    let _ = fs::remove_dir_all(staged);
    let mut reports = String::new();
    for path in markdown::files(&docs)? {
        let below = path.strip_prefix(&docs).unwrap_or(&path);
        let text = read(&path)?;
        let (to, text) = if let Ok(report) = below.strip_prefix("benchmarks") {
            let title = text
                .lines()
                .next()
                .unwrap_or_default()
                .trim_start_matches("# ");
            let file = report.display();
            reports.push_str(&format!("  - [{title}](benchmarks/{file})\n"));
            // Pages and pictures are beside the folder of the reports.
            (
                Path::new("src/benchmarks").join(report),
                text.replace("../src/", "../"),
            )
        } else if below.starts_with("src") {
            // The folder of the reports is one level nearer than in the repository.
            (
                below.to_owned(),
                text.replace("../benchmarks/", "benchmarks/"),
            )
        } else {
            continue;
        };
        write(&staged.join(to), text)?;
    }
    let summary = staged.join("src/SUMMARY.md");
    let entry = "(benchmarks.md)\n";
    write(
        &summary,
        read(&summary)?.replace(entry, &format!("{entry}{reports}")),
    )?;
    for picture in entries(&docs.join("images"))? {
        let name = picture.file_name().unwrap_or_default();
        let bytes =
            fs::read(&picture).map_err(|error| Failure::io("could not read", &picture, &error))?;
        write(&staged.join("src/images").join(name), &bytes)?;
    }
    for file in ["book.toml", "theme.css"] {
        write(&staged.join(file), read(&docs.join(file))?)?;
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = fs::read_dir(folder).and_then(|entries| {
        entries
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<_>>()
    });
    list.map_err(|error| Failure::io("could not read", folder, &error))
}

/// Checks that each link of the book leads to a file of the book: a link to another file of the repository works in
/// its viewer only.
fn links_of_book(source: &Path) -> Result<()> {
    let mut problems = Vec::new();
    let pages = pages(source)?;
    for (path, blocks) in &pages {
        let mut page = Page {
            path,
            problems: &mut problems,
        };
        page.links(blocks, &pages);
    }
    ended(&problems)
}

/// Returns the pages below `folder`.
fn pages(folder: &Path) -> Result<BTreeMap<PathBuf, Vec<Block>>> {
    let files = markdown::files(folder)?.into_iter();
    files
        .map(|path| read(&path).map(|text| (path, markdown::blocks(&text))))
        .collect()
}

/// Returns an error that lists `problems`, if there are any.
fn ended(problems: &[String]) -> Result<()> {
    match problems {
        [] => Ok(()),
        problems => Err(Failure::new(format!(
            "{} problems in the Markdown pages:\n  {}",
            problems.len(),
            problems.join("\n  ")
        ))),
    }
}

/// Checks every Markdown page of the repository: links, anchors, blocks of code, commands; and the figures of the
/// README and the guide. `commands` are the subcommands of `cargo xtask`.
pub(crate) fn check(commands: &[String]) -> Result<()> {
    let root = cargo::workspace();
    let mut problems = Vec::new();
    let pages = pages(&root)?;
    for (path, blocks) in &pages {
        let mut page = Page {
            path,
            problems: &mut problems,
        };
        page.links(blocks, &pages);
        page.commands(blocks, commands, &root);
        if is_of_guide(path, &root) {
            page.code(blocks, &root);
        }
    }
    summary(&root, &pages, &mut problems);
    problems.extend(figures::problems(&root, &pages));
    ended(&problems)
}

/// Returns `true` for the README and the pages of the guide.
pub(crate) fn is_of_guide(path: &Path, root: &Path) -> bool {
    path == root.join("README.md") || path.starts_with(root.join("docs/src"))
}

/// Returns the path below the workspace.
pub(crate) fn shown(path: &Path) -> String {
    let root = cargo::workspace();
    path.strip_prefix(&root)
        .unwrap_or(path)
        .display()
        .to_string()
}

struct Page<'a> {
    path: &'a Path,
    problems: &'a mut Vec<String>,
}

impl Page<'_> {
    fn problem(&mut self, line: usize, what: &str) {
        self.problems
            .push(format!("{}:{line}: {what}", shown(self.path)));
    }

    /// Checks that the files and the headings exist to which relative links lead.
    fn links(&mut self, blocks: &[Block], pages: &BTreeMap<PathBuf, Vec<Block>>) {
        let folder = self.path.parent().unwrap_or(self.path);
        for block in blocks {
            for link in &block.links {
                if link.is_empty() || link.contains("://") || link.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target = match file.is_empty() {
                    true => self.path.to_owned(),
                    false => crate::new::normal(&folder.join(file)),
                };
                if !target.exists() {
                    self.problem(block.line, &format!("the link to {link} leads nowhere"));
                } else if !anchor.is_empty()
                    && let Some(blocks) = pages.get(&target)
                    && !anchors(blocks).contains(anchor)
                {
                    self.problem(
                        block.line,
                        &format!("{} has no heading #{anchor}", shown(&target)),
                    );
                }
            }
        }
    }

    /// Checks that the subcommands and the examples exist that the page names.
    fn commands(&mut self, blocks: &[Block], commands: &[String], root: &Path) {
        for block in blocks {
            for (at, _) in block.source.match_indices("cargo xtask ") {
                let mut words = block.source[at..].split_whitespace().skip(2).map(|word| {
                    word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_')
                });
                let word = words.next().unwrap_or_default();
                let is_name = |word: &str| {
                    word.starts_with(|c: char| c.is_ascii_lowercase())
                        && word
                            .chars()
                            .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
                };
                if is_name(word) && !commands.iter().any(|known| known == word) {
                    self.problem(
                        block.line,
                        &format!("there is no command cargo xtask {word}"),
                    );
                }
                let example = words.next().unwrap_or_default();
                let is_example = word == "example" && is_name(example);
                if is_example
                    && !root
                        .join("examples")
                        .join(format!("{example}.rs"))
                        .is_file()
                {
                    self.problem(block.line, &format!("there is no example {example}"));
                }
            }
        }
    }

    /// Checks that blocks of code say what they are, show no line that is there for a test, hold JSON where they
    /// say so, and are a part of the file that a comment before them names.
    fn code(&mut self, blocks: &[Block], root: &Path) {
        let mut file = None;
        for block in blocks {
            match &block.kind {
                Kind::Comment => {
                    let name = block.comment().and_then(|text| text.strip_prefix("from "));
                    file = name.map(str::to_owned).or(file);
                    continue;
                }
                Kind::Code(kind) => {
                    if kind.is_empty() {
                        self.problem(
                            block.line,
                            "the block of code names no language, such as `text`",
                        );
                    }
                    let hidden = |line: &str| line == "#" || line.starts_with("# ");
                    if kind.starts_with("rust")
                        && block.text.lines().any(|l| hidden(l.trim_start()))
                    {
                        let what = "Markdown viewers show this hidden line: put it into a comment `<!-- test`";
                        self.problem(block.line, what);
                    }
                    if kind == "json"
                        && let Err(error) = serde_json::from_str::<serde_json::Value>(&block.text)
                    {
                        self.problem(block.line, &format!("no JSON: {error}"));
                    }
                    if let Some(file) = &file {
                        let there = fs::read_to_string(root.join(file)).unwrap_or_default();
                        if !there.contains(&block.text) {
                            self.problem(block.line, &format!("the block is not in {file}"));
                        }
                    }
                }
                _ => {}
            }
            file = None;
        }
    }
}

/// Returns the anchors of a page's headings; GitHub numbers those that repeat.
fn anchors(blocks: &[Block]) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let anchors = blocks.iter().filter_map(Block::anchor);
    anchors
        .map(|anchor| {
            let count = seen.entry(anchor.clone()).or_insert(0);
            *count += 1;
            match *count {
                1 => anchor,
                more => format!("{anchor}-{}", more - 1),
            }
        })
        .collect()
}

/// Checks that SUMMARY.md has each page of the guide.
fn summary(root: &Path, pages: &BTreeMap<PathBuf, Vec<Block>>, problems: &mut Vec<String>) {
    let guide = root.join("docs/src");
    let summary = guide.join("SUMMARY.md");
    let blocks = pages.get(&summary).into_iter().flatten();
    let listed: BTreeSet<PathBuf> = blocks
        .flat_map(|block| &block.links)
        .map(|link| guide.join(link))
        .collect();
    for page in pages.keys().filter(|page| page.starts_with(&guide)) {
        if *page != summary && !listed.contains(page) {
            problems.push(format!("docs/src/SUMMARY.md does not list {}", shown(page)));
        }
    }
}
