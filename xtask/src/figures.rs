//! The check that the figures of the README and the guide stand in the reports of `docs/benchmarks`.
//!
//! A paragraph or a table names its report by a link (`docs/benchmarks/training_….md#the-table`); a table without a
//! link takes those of the paragraph before it. Then each figure in it must be a number of the report. Figures are, in a table, the numbers outside of the first row and column; in a
//! paragraph, those with a decimal point, a separator of thousands, or a unit. Inline code holds none.
//!
//! A speed or a ratio without a link is a problem. A comment `<!-- figures: REASON -->` exempts what follows up to
//! the next heading, such as arithmetic with assumptions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::guide::{is_of_guide, shown};
use crate::markdown::{Block, Kind};
use crate::new::normal;

/// Units that make an integer of a paragraph a figure.
const UNITS: [&str; 13] = [
    "x", "%", "times", "ms", "µs", "us", "MB", "MiB", "GiB", "GB/s", "MB/s", "GFLOP/s", "tokens/s",
];
/// The units and words that only measurements have. A block with one of them needs a report.
const MEASURED: [&str; 10] = [
    "x",
    "times as fast",
    "times the speed",
    "times the rate",
    "ms",
    "µs",
    "GB/s",
    "MB/s",
    "GFLOP/s",
    "tokens/s",
];
const REPORTS: &str = "docs/benchmarks";

/// Returns what is wrong with the figures and the reports.
pub(crate) fn problems(root: &Path, pages: &BTreeMap<PathBuf, Vec<Block>>) -> Vec<String> {
    let mut problems = reports(root, pages);
    for (path, blocks) in pages.iter().filter(|(path, _)| is_of_guide(path, root)) {
        let mut exempt = false;
        let mut before: &[Block] = &[];
        for (index, block) in blocks.iter().enumerate() {
            match &block.kind {
                Kind::Heading => exempt = false,
                Kind::Comment if block.comment().is_some_and(|c| c.starts_with("figures:")) => {
                    exempt = true;
                }
                Kind::Paragraph | Kind::Table if !exempt => {
                    let is_table = block.kind == Kind::Table;
                    let mut linked = links(path, block);
                    if linked.is_empty() && is_table {
                        linked = before.iter().flat_map(|block| links(path, block)).collect();
                    }
                    let found = judge(block, &linked, pages);
                    let place = format!("{}:{}", shown(path), block.line);
                    problems.extend(found.into_iter().map(|what| format!("{place}: {what}")));
                }
                _ => {}
            }
            before = match block.kind {
                Kind::Paragraph => &blocks[index..=index],
                _ => &[],
            };
        }
    }
    problems
}

/// Checks that each report is named after its claim, machine and date, names a command, and is listed in the guide.
fn reports(root: &Path, pages: &BTreeMap<PathBuf, Vec<Block>>) -> Vec<String> {
    let list = fs::read_to_string(root.join("docs/src/benchmarks.md")).unwrap_or_default();
    let reports = pages
        .keys()
        .filter(|path| path.starts_with(root.join(REPORTS)));
    let wrong = reports.flat_map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(path).unwrap_or_default();
        let parts: Vec<&str> = name.trim_end_matches(".md").split('_').collect();
        let date = parts.last().unwrap_or(&"").split('-');
        let is_date = date.map(str::len).eq([4, 2, 2]);
        let checks = [
            (
                parts.len() == 3 && is_date,
                "is not named <claim>_<machine>_<YYYY-MM-DD>.md",
            ),
            (
                ["cargo ", "python3 ", "target/release/"]
                    .iter()
                    .any(|command| text.contains(command)),
                "names no command",
            ),
            (text.contains("cores"), "names no machine"),
            (
                list.contains(&*name),
                "is not listed in docs/src/benchmarks.md",
            ),
        ];
        let wrong = checks.into_iter().filter(|(holds, _)| !holds);
        wrong
            .map(|(_, what)| format!("{}: {what}", shown(path)))
            .collect::<Vec<_>>()
    });
    wrong.collect()
}

/// Returns the reports that a block links to.
fn links(page: &Path, block: &Block) -> Vec<PathBuf> {
    let folder = page.parent().unwrap_or(page);
    let reports = block
        .links
        .iter()
        .filter(|link| link.contains("benchmarks/"));
    reports
        .map(|link| normal(&folder.join(link.split('#').next().unwrap_or_default())))
        .collect()
}

/// Returns what is wrong with the figures of one block.
fn judge(block: &Block, linked: &[PathBuf], pages: &BTreeMap<PathBuf, Vec<Block>>) -> Vec<String> {
    if linked.is_empty() {
        let measured = numbers(&block.text)
            .into_iter()
            .find(|number| starts_with_one_of(number.rest, &MEASURED));
        let problem = |number: Number<'_>| {
            let shown = number.shown();
            format!("{shown} has no report: link to one of {REPORTS}, or delete it")
        };
        return measured.map(problem).into_iter().collect();
    }
    let blocks = linked
        .iter()
        .filter_map(|report| pages.get(report))
        .flatten();
    let there: Vec<f64> = blocks
        .flat_map(|block| {
            numbers(&block.source)
                .into_iter()
                .map(|number| number.value)
        })
        .collect();
    let names: Vec<String> = linked.iter().map(|report| shown(report)).collect();
    let missing = figures(block)
        .into_iter()
        .filter(|figure| !there.contains(&figure.value));
    missing
        .map(|figure| format!("{} is not in {}", figure.shown(), names.join(", ")))
        .collect()
}

/// Returns the figures of a paragraph or a table.
fn figures(block: &Block) -> Vec<Number<'_>> {
    let mut figures = numbers(&block.text);
    let is_figure = |number: &Number<'_>| number.text.contains([',', '.']) || has_unit(number.rest);
    figures.retain(|number| block.kind == Kind::Table || is_figure(number));
    figures
}

/// A number and the text behind it.
#[derive(Debug, Clone, Copy)]
struct Number<'a> {
    value: f64,
    text: &'a str,
    rest: &'a str,
}

impl Number<'_> {
    /// Returns the number with the word behind it.
    fn shown(&self) -> String {
        let behind: String = self.rest.chars().take(12).collect();
        let line = behind.lines().next().unwrap_or_default().trim_end();
        format!("{:?}", format!("{}{line}", self.text))
    }
}

/// Returns the numbers of `text`; versions such as 2.11.0 and digits within words are none.
fn numbers(text: &str) -> Vec<Number<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = text[at..]
        .find(|c: char| c.is_ascii_digit())
        .map(|n| at + n)
    {
        let before = text[..start].chars().next_back();
        let length = length(&text[start..]);
        let end = start + length;
        let is_word = before.is_some_and(|c| c.is_alphabetic() || c == '_' || c == '.');
        let is_version = text[start..end].matches('.').count() > 1;
        if !is_word && !is_version {
            let digits = text[start..end].replace(',', "");
            if let Ok(value) = digits.parse() {
                found.push(Number {
                    value,
                    text: &text[start..end],
                    rest: &text[end..],
                });
            }
        }
        at = end;
    }
    found
}

/// Returns the number of bytes of the number that `text` begins with.
fn length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut at = 0;
    loop {
        match bytes.get(at) {
            Some(byte) if byte.is_ascii_digit() => at += 1,
            Some(b'.') if digit(at + 1) => at += 2,
            // A separator of thousands stands before exactly three digits.
            Some(b',') if (1..=3).all(|n| digit(at + n)) && !digit(at + 4) => at += 4,
            _ => return at,
        }
    }
}

/// Returns `true` if a unit follows, also behind a second number: "184–235 tokens/s", "2.3 to 2.6 times".
fn has_unit(rest: &str) -> bool {
    if starts_with_one_of(rest, &UNITS) {
        return true;
    }
    let connected = ["–", " to ", " and ", ", ", "/"]
        .iter()
        .find_map(|connector| rest.strip_prefix(connector));
    connected.is_some_and(|after| {
        let length = length(after);
        length > 0 && has_unit(&after[length..])
    })
}

/// Returns `true` if `rest` begins with one of the words, behind a space or none.
fn starts_with_one_of(rest: &str, words: &[&str]) -> bool {
    let adjacent = rest.trim_start_matches('*');
    let rest = adjacent.trim_start();
    words.iter().any(|word| {
        // "2 x 3" is a shape.
        let rest = if *word == "x" { adjacent } else { rest };
        rest.strip_prefix(word)
            .is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markdown::blocks;

    /// Returns what is wrong with a README beside one report, without the place.
    fn judged(page: &str) -> Vec<String> {
        let (root, report) = (Path::new("/r"), Path::new("/r/docs/benchmarks/a.md"));
        let pages = BTreeMap::from([
            (report.to_owned(), blocks("| a | 1.52x | 2,107 |\n")),
            (root.join("README.md"), blocks(page)),
        ]);
        let problems = problems(root, &pages).into_iter();
        let own =
            problems.filter_map(|problem| Some(problem.split_once("README.md:")?.1.to_owned()));
        own.collect()
    }

    #[test]
    fn figures_stand_in_the_report_that_is_linked_and_speeds_have_one() {
        let link = "([report](docs/benchmarks/a.md#speed))";
        let table =
            |x| format!("By {link}:\n\n| 7 | 8 |\n|---|---|\n| 5 streams | **{x}x** `12` |\n");
        for good in [
            format!("1.52x the speed, 2107 tokens/s {link}.\n"),
            table("1.52"),
            "At most 64 MiB, 4096x4096, libtorch 2.11.0, `1.5x`.\n".to_owned(),
            "<!-- figures: assumed -->\n9 ms\n".to_owned(),
        ] {
            assert_eq!(judged(&good), Vec::<String>::new());
        }
        for (bad, line, what) in [
            (format!("1.53x the speed {link}.\n"), 1, "is not in"),
            (table("1.53"), 3, "is not in"),
            ("It is 3 times as fast.\n".to_owned(), 1, "has no report"),
        ] {
            let found = judged(&bad);
            assert!(
                found.len() == 1 && found[0].starts_with(&format!("{line}: ")),
                "{found:?}"
            );
            assert!(found[0].contains(what), "{found:?}");
        }
    }
}
