//! The check that the figures of the README and the guide stand in the reports of `docs/benchmarks`.
//!
//! A paragraph or a table names its report by a link (`docs/benchmarks/training_….md#the-table`); a table without a
//! link takes those of the paragraph before it. Then each figure in it must be a number of the report, or of the
//! section that the link names. Figures are, in a table, the numbers outside of the first row and column; in a
//! paragraph, those with a decimal point, a separator of thousands, or a unit. Inline code holds none.
//!
//! A speed or a ratio without a link is a problem. A comment `<!-- figures: REASON -->` exempts what follows up to
//! the next heading, such as arithmetic with assumptions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::guide::{is_of_guide, shown};
use crate::markdown::{self, Block, Kind, anchor};

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
                Kind::Heading(_) => exempt = false,
                Kind::Comment if block.text.trim_start().starts_with("figures:") => exempt = true,
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
            (names_a_command(&text), "names no command"),
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

fn names_a_command(text: &str) -> bool {
    let commands = ["cargo ", "python3 ", "target/release/"];
    commands.iter().any(|command| text.contains(command))
}

/// A report, or the section of one, that a block links to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Link {
    report: PathBuf,
    section: Option<String>,
}

impl Link {
    /// Returns the blocks of the section, or of the report.
    fn blocks<'a>(&self, pages: &'a BTreeMap<PathBuf, Vec<Block>>) -> &'a [Block] {
        let blocks = pages.get(&self.report);
        section(blocks.map(Vec::as_slice).unwrap_or_default(), &self.section)
    }
}

fn links(page: &Path, block: &Block) -> Vec<Link> {
    let folder = page.parent().unwrap_or(page);
    let links = markdown::links(&block.text).into_iter();
    links
        .filter(|link| link.contains("benchmarks/"))
        .map(|link| {
            let (file, section) = match link.split_once('#') {
                Some((file, section)) => (file, Some(section.to_owned())),
                None => (&*link, None),
            };
            Link {
                report: crate::new::normal(&folder.join(file)),
                section,
            }
        })
        .collect()
}

/// Returns what is wrong with the figures of one block.
fn judge(block: &Block, linked: &[Link], pages: &BTreeMap<PathBuf, Vec<Block>>) -> Vec<String> {
    let text = markdown::without_targets(&markdown::without_code(&block.text));
    if linked.is_empty() {
        let measured = numbers(&text)
            .into_iter()
            .find(|number| is_measured(number.rest));
        return measured
            .map(|number| {
                format!(
                    "{} has no report: link to one of {REPORTS}, or delete it",
                    number.shown()
                )
            })
            .into_iter()
            .collect();
    }
    let there: Vec<f64> = linked
        .iter()
        .flat_map(|link| link.blocks(pages))
        .flat_map(|block| numbers(&block.text).into_iter().map(|number| number.value))
        .collect();
    let without_command = linked.iter().filter(|link| {
        let mut blocks = link.blocks(pages).iter();
        !blocks.any(|block| names_a_command(&block.text))
    });
    let mut problems: Vec<String> = without_command
        .map(|link| {
            let section = link.section.as_deref().unwrap_or_default();
            format!("{}#{section} names no command", shown(&link.report))
        })
        .collect();
    let names: Vec<String> = linked.iter().map(|link| shown(&link.report)).collect();
    let missing = figures(&text, &block.kind)
        .into_iter()
        .filter(|figure| !there.contains(&figure.value));
    problems
        .extend(missing.map(|figure| format!("{} is not in {}", figure.shown(), names.join(", "))));
    problems
}

/// Returns the blocks of the section with this anchor, of all if there is none.
fn section<'a>(blocks: &'a [Block], anchor_of: &Option<String>) -> &'a [Block] {
    let Some(wanted) = anchor_of else {
        return blocks;
    };
    let level = |block: &Block| match block.kind {
        Kind::Heading(level) => Some(level),
        _ => None,
    };
    let start = blocks
        .iter()
        .position(|block| level(block).is_some() && anchor(&block.text) == *wanted);
    let Some(start) = start else {
        return &[];
    };
    let own = level(&blocks[start]);
    let after = blocks[start + 1..]
        .iter()
        .position(|block| level(block).is_some_and(|other| Some(other) <= own));
    &blocks[start..after.map_or(blocks.len(), |after| start + 1 + after)]
}

/// Returns the figures of a paragraph or a table.
fn figures<'a>(text: &'a str, kind: &Kind) -> Vec<Number<'a>> {
    if *kind != Kind::Table {
        let mut figures = numbers(text);
        figures.retain(|number| number.text.contains([',', '.']) || has_unit(number.rest));
        return figures;
    }
    let rows = text.lines().skip(2);
    rows.flat_map(|row| {
        let cells = row.trim().trim_matches('|').split('|').skip(1);
        cells.flat_map(numbers)
    })
    .collect()
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

fn is_measured(rest: &str) -> bool {
    starts_with_one_of(rest, &MEASURED)
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

    #[test]
    fn numbers_are_read_with_separators_and_without_versions() {
        let values =
            |text: &str| -> Vec<f64> { numbers(text).iter().map(|number| number.value).collect() };
        assert_eq!(
            values("**2,107** of 1,234,567, 0.997 and 1/3.6"),
            [2107.0, 1_234_567.0, 0.997, 1.0, 3.6]
        );
        assert_eq!(
            values("libtorch 2.11.0, INT8, Zen4, 4096x4096, 184–235."),
            [4096.0, 184.0, 235.0]
        );
        assert_eq!(values("1, 2,34"), [1.0, 2.0, 34.0]);
    }

    #[test]
    fn a_unit_makes_a_figure_of_a_paragraph() {
        let figures = |text: &str| -> Vec<String> {
            let figures = figures(text, &Kind::Paragraph);
            figures
                .iter()
                .map(|number| number.text.to_owned())
                .collect()
        };
        let text = "2 cores: 89% of 516 MiB, 184–235 tokens/s, 12 to 13 times, 60.5, 2,107 of 4096 tokens, 2 blocks of 4096x4096";
        assert_eq!(
            figures(text),
            ["89", "516", "184", "235", "12", "13", "60.5", "2,107"]
        );
    }

    fn judged(page: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let report = "# A claim\n\n2 cores, `cargo xtask ablation`\n\n## Speed\n\n`cargo xtask bench`\n\n| a | 1.52x | 2,107 |\n\n### More\n\n9%\n\n\
                      ## Memory\n\n`cargo xtask bench`\n\n| a | 89 % |\n\n## By hand\n\n7 ms\n";
        for folder in ["docs/src", REPORTS] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let name = "a_b-2cores_2026-11-21.md";
        let mut pages = BTreeMap::new();
        for (path, text) in [
            (format!("{REPORTS}/{name}"), report),
            ("README.md".to_owned(), page),
            ("docs/src/benchmarks.md".to_owned(), name),
        ] {
            fs::write(root.join(&path), text).unwrap();
            pages.insert(root.join(path), markdown::blocks(text).unwrap());
        }
        problems(root, &pages)
            .iter()
            .map(|problem| {
                problem
                    .rsplit_once("README.md:")
                    .unwrap_or(("", problem))
                    .1
                    .to_owned()
            })
            .collect()
    }

    const LINK: &str = "[report](docs/benchmarks/a_b-2cores_2026-11-21.md";

    #[test]
    fn figures_must_stand_in_the_report_that_is_linked() {
        assert_eq!(
            judged(&format!("1.52x the speed, 89% ({LINK})).\n")),
            Vec::<String>::new()
        );
        assert_eq!(
            judged(&format!("2107 and 9% ({LINK}#speed)).\n")),
            Vec::<String>::new()
        );
        let found = judged(&format!("1.53x the speed ({LINK})).\n"));
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("1: \"1.53x the speed") && found[0].contains("is not in"),
            "{found:?}"
        );
        let found = judged(&format!("89% ({LINK}#speed)).\n"));
        assert_eq!(found.len(), 1, "another section: {found:?}");
        let found = judged(&format!("7 ms ({LINK}#by-hand)).\n"));
        assert!(
            found.len() == 1 && found[0].ends_with("#by-hand names no command"),
            "{found:?}"
        );
    }

    #[test]
    fn a_table_is_compared_without_its_first_row_and_column() {
        let table = "| 7 | 8 |\n|---|---|\n| decode, 5 streams | **1.52x** `12` |\n";
        assert_eq!(
            judged(&format!("By {LINK}):\n\n{table}")),
            Vec::<String>::new()
        );
        let found = judged(&format!("By {LINK}):\n\n{}", table.replace("1.52", "1.53")));
        assert!(found.len() == 1 && found[0].starts_with("3: "), "{found:?}");
    }

    #[test]
    fn a_speed_without_a_report_is_a_problem_unless_it_is_exempt() {
        for text in [
            "It is 1.52x as fast.",
            "3 times as fast",
            "60 tokens/s",
            "| a | 9 ms |",
        ] {
            assert!(judged(text)[0].contains("has no report"), "{text}");
        }
        for text in [
            "At most 64 MiB, 89 %, 4096x4096.",
            "Three times a day.",
            "`1.52x`",
        ] {
            assert_eq!(judged(text), Vec::<String>::new());
        }
        let exempt = "<!-- figures: assumed -->\n9 ms\n\n10 ms\n\n# Next\n\n11 ms\n";
        let found = judged(exempt);
        assert!(found.len() == 1 && found[0].starts_with("8: "), "{found:?}");
    }

    #[test]
    fn a_report_has_a_name_a_command_a_machine_and_a_line_in_the_guide() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(REPORTS).join("notes.md");
        let pages = BTreeMap::from([(path.clone(), Vec::new())]);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "# Notes\n").unwrap();
        assert_eq!(reports(folder.path(), &pages).len(), 4);
    }
}
