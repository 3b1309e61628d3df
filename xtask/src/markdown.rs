//! The blocks, links and headings of a Markdown page, as far as the checks of the guide need them.

use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::failure::{Failure, Result};

/// A block of a page.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    /// The number of its first line, from 1.
    pub(crate) line: usize,
    pub(crate) kind: Kind,
    /// Its Markdown.
    pub(crate) source: String,
    /// Its text: that of code and comments as it is, of headings with inline code, of the others without; of a table only
    /// the cells outside of the first row and column.
    pub(crate) text: String,
    /// The targets of its links and images.
    pub(crate) links: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A heading of any level.
    Heading,
    /// A paragraph, a list or a quotation.
    Paragraph,
    Table,
    /// A block of code with the words after its fence.
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

/// Returns the blocks of a page; blocks of code also where they are within others.
pub(crate) fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut open, mut code): (Option<Block>, Option<Block>) = (None, None);
    // The number of open elements, and the place in a table.
    let (mut depth, mut is_body, mut column) = (0, false, 0);
    for (event, range) in Parser::new_ext(page, Options::ENABLE_TABLES).into_offset_iter() {
        let new = |kind| Block {
            line: 1 + page[..range.start].matches('\n').count(),
            kind,
            source: page[range.clone()].to_owned(),
            text: String::new(),
            links: Vec::new(),
        };
        if let Event::Start(tag) = &event {
            match tag {
                Tag::CodeBlock(kind) => {
                    let words = match kind {
                        CodeBlockKind::Fenced(words) => words.trim(),
                        CodeBlockKind::Indented => "",
                    };
                    code = Some(new(Kind::Code(words.to_owned())));
                }
                Tag::Heading { .. } if depth == 0 => open = Some(new(Kind::Heading)),
                Tag::Table(_) if depth == 0 => open = Some(new(Kind::Table)),
                Tag::HtmlBlock if depth == 0 => open = Some(new(Kind::Comment)),
                _ if depth == 0 => open = Some(new(Kind::Paragraph)),
                _ => {}
            }
            depth += 1;
        }
        if event == Event::End(TagEnd::CodeBlock) {
            blocks.extend(code.take());
        }
        if let Event::End(_) = event {
            depth -= 1;
            if depth == 0 {
                blocks.extend(open.take());
            }
        }
        if let (Some(code), Event::Text(text)) = (&mut code, &event) {
            code.text.push_str(text);
        }
        let Some(block) = open.as_mut().filter(|_| code.is_none()) else {
            continue;
        };
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                block.links.push(dest_url.into_string());
            }
            Event::Start(Tag::TableHead) => is_body = false,
            Event::Start(Tag::TableRow) => (is_body, column) = (true, 0),
            Event::Start(Tag::TableCell) => column += 1,
            Event::Start(Tag::Item | Tag::Paragraph) | Event::SoftBreak | Event::HardBreak => {
                block.text.push('\n');
            }
            Event::End(TagEnd::TableCell) => block.text.push(' '),
            Event::Text(text) if block.kind != Kind::Table || is_body && column > 1 => {
                block.text.push_str(&text);
            }
            Event::Code(text) if block.kind == Kind::Heading => block.text.push_str(&text),
            Event::Code(_) => block.text.push(' '),
            Event::Html(text) => block.text.push_str(&text),
            _ => {}
        }
    }
    blocks
}

impl Block {
    /// Returns the text of a comment.
    pub(crate) fn comment(&self) -> Option<&str> {
        let text = self.text.trim().strip_prefix("<!--")?.strip_suffix("-->")?;
        (self.kind == Kind::Comment).then(|| text.trim())
    }

    /// Returns the anchor of a heading, as GitHub and mdBook make it.
    pub(crate) fn anchor(&self) -> Option<String> {
        let letters = self.text.trim().to_lowercase();
        let letters = letters.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        });
        (self.kind == Kind::Heading).then(|| letters.collect())
    }
}
