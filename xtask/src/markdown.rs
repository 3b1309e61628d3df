//! The blocks, links and headings of a Markdown page, as far as the checks of the guide need them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};

/// A block of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// The number of its first line, from 1.
    pub(crate) line: usize,
    pub(crate) kind: Kind,
    /// Its lines; of code without the fences, of a heading without the `#`.
    pub(crate) text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A heading of this level.
    Heading(usize),
    /// A paragraph or a list.
    Paragraph,
    Table,
    /// A fenced block with the words after its fence.
    Code(String),
    /// An HTML comment.
    Comment,
}

/// Returns the Markdown files below `folder`, sorted; build outputs and hidden folders are left out.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = |error: std::io::Error| Failure::io("could not read", folder, &error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && !name.starts_with('.') && !["target", "runs"].contains(&&*name) {
            found.extend(files(&path)?);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the blocks of a page; an error with the line if a block of code or a comment does not end.
pub(crate) fn blocks(page: &str) -> std::result::Result<Vec<Block>, String> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut lines = page.lines().enumerate();
    let mut continues = false;
    while let Some((number, line)) = lines.next() {
        let line_number = number + 1;
        let trimmed = line.trim_start();
        let ticks = trimmed.chars().take_while(|c| *c == '`').count();
        let block = |kind, text: String| Block {
            line: line_number,
            kind,
            text,
        };
        if ticks >= 3 {
            let (fence, kind) = trimmed.split_at(ticks);
            let text = until(&mut lines, |line| line.trim() == fence)
                .ok_or_else(|| format!("line {line_number}: the code block is not closed"))?;
            blocks.push(block(Kind::Code(kind.trim().to_owned()), text));
        } else if let Some(comment) = trimmed.strip_prefix("<!--") {
            let text = match comment.split_once("-->") {
                Some((comment, _)) => comment.to_owned(),
                None => {
                    let rest = until(&mut lines, |line| line.trim_end().ends_with("-->"));
                    let rest = rest
                        .ok_or_else(|| format!("line {line_number}: the comment is not closed"))?;
                    format!("{comment}\n{rest}")
                }
            };
            blocks.push(block(Kind::Comment, text));
        } else if let Some((level, text)) = heading(line) {
            blocks.push(block(Kind::Heading(level), text.to_owned()));
        } else if !trimmed.is_empty() {
            let kind = match trimmed.starts_with('|') {
                true => Kind::Table,
                false => Kind::Paragraph,
            };
            match blocks
                .last_mut()
                .filter(|last| continues && last.kind == kind)
            {
                Some(last) => last.text.push_str(&format!("\n{line}")),
                None => blocks.push(block(kind, line.to_owned())),
            }
            continues = true;
            continue;
        }
        continues = false;
    }
    Ok(blocks)
}

/// Takes the lines before the one that `ends`; `None` if there is none such.
fn until<'a>(
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
    ends: impl Fn(&str) -> bool,
) -> Option<String> {
    let mut text = String::new();
    for (_, line) in lines {
        if ends(line) {
            return Some(text);
        }
        text.push_str(line);
        text.push('\n');
    }
    None
}

fn heading(line: &str) -> Option<(usize, &str)> {
    let level = line.chars().take_while(|c| *c == '#').count();
    let text = line[level..].strip_prefix(' ')?;
    (1..=6).contains(&level).then(|| (level, text.trim()))
}

/// Returns `text` with spaces in the place of inline code.
pub(crate) fn without_code(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('`') {
        out.push_str(&rest[..start]);
        let ticks = rest[start..].chars().take_while(|c| *c == '`').count();
        let (fence, after) = rest[start..].split_at(ticks);
        let Some(end) = after.find(fence) else {
            rest = after;
            continue;
        };
        out.push(' ');
        rest = &after[end + ticks..];
    }
    out + rest
}

/// Returns the targets of the links and images in `text`.
pub(crate) fn links(text: &str) -> Vec<String> {
    let text = without_code(text);
    let inline = text.match_indices("](").filter_map(|(at, _)| {
        let target = &text[at + 2..];
        target.split_once(')').map(|(target, _)| target.to_owned())
    });
    let references = text.lines().filter_map(|line| {
        let (_, target) = line.strip_prefix('[')?.split_once("]: ")?;
        Some(target.trim().to_owned())
    });
    inline.chain(references).collect()
}

/// Returns `text` with the words of links and without their targets.
pub(crate) fn without_targets(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("](") {
        out.push_str(&rest[..=start]);
        rest = rest[start + 2..]
            .split_once(')')
            .map_or("", |(_, rest)| rest);
    }
    out + rest
}

/// Returns the anchor of a heading, as GitHub and mdBook make it.
pub(crate) fn anchor(heading: &str) -> String {
    without_targets(heading)
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}
