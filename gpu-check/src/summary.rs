//! The first ten lines of a report: the failures, and the ratio of the default to each peer.

use crate::finding::{Check, Outcome};
use crate::report::{Report, value_text};

/// The maximum number of failures that are named.
const NAMED: usize = 3;

/// A figure of Overdrive with default settings, and the figures of the programs that it is compared with.
struct Comparison {
    title: &'static str,
    section: &'static str,
    /// The start of the name of our check.
    ours: &'static str,
    figure: &'static str,
    unit: &'static str,
    /// Further figures of our check with their units.
    further: &'static [(&'static str, &'static str)],
    /// The names of the checks of the other programs, and their labels in the line.
    peers: &'static [(&'static str, &'static str)],
}

const NOTHING: Comparison = Comparison {
    title: "",
    section: "",
    ours: "",
    figure: "tokens/s",
    unit: "tokens/s",
    further: &[],
    peers: &[],
};

const COMPARISONS: &[Comparison] = &[
    Comparison {
        title: "training step",
        section: "train_step",
        ours: "Overdrive in ",
        further: &[("peak GiB", "GiB")],
        peers: &[
            ("PyTorch, eager", "PyTorch eager"),
            ("PyTorch, compile", "torch.compile"),
            ("PyTorch, liger", "Liger"),
            ("PyTorch, adamw-8bit", "PyTorch with AdamW in 8 bits"),
            ("PyTorch, flash-attn", "PyTorch with flash-attn"),
        ],
        ..NOTHING
    },
    Comparison {
        title: "all techniques",
        section: "ablation",
        ours: "all (",
        figure: "speed",
        unit: "times the default's speed",
        further: &[("of default", "of its memory")],
        ..NOTHING
    },
    Comparison {
        title: "decode, 1 stream, generate",
        section: "decode",
        ours: "dense, 1 streams, generate",
        peers: &[
            ("transformers, eager, 1 streams", "transformers"),
            ("transformers, compile, 1 streams", "with torch.compile"),
        ],
        ..NOTHING
    },
    Comparison {
        title: "decode, many streams, engine",
        section: "decode",
        ours: "dense, {many} streams, engine",
        peers: &[
            ("transformers, eager, {many} streams", "transformers"),
            (
                "transformers, compile, {many} streams",
                "with torch.compile",
            ),
        ],
        ..NOTHING
    },
    Comparison {
        title: "QLoRA of 8B",
        section: "finetune",
        ours: "QLoRA",
        further: &[("peak GiB", "GiB")],
        peers: &[("PEFT with bitsandbytes", "PEFT with bitsandbytes")],
        ..NOTHING
    },
    Comparison {
        title: "from the file to the first token",
        section: "start",
        ours: "from the file to the first token",
        figure: "s",
        unit: "s",
        ..NOTHING
    },
    Comparison {
        title: "from the file to the first step",
        ours: "from the file to the first step",
        section: "start",
        figure: "s",
        unit: "s",
        ..NOTHING
    },
];

/// Returns the lines, at most ten.
pub(crate) fn lines(report: &Report) -> Vec<String> {
    let mut lines = vec![format!(
        "{} passed, {} failed, {} skipped",
        report.passed, report.failed, report.skipped
    )];
    lines.extend(failures(report));
    // On a GPU and in a test on a CPU there are different numbers of streams.
    let many = if report.device == "cpu" { "4" } else { "64" };
    let compared = COMPARISONS.iter();
    lines.extend(compared.filter_map(|comparison| comparison.line(report, many)));
    lines
}

/// Returns the names of the failures.
fn failures(report: &Report) -> Option<String> {
    let failed: Vec<String> = report
        .sections
        .iter()
        .flat_map(|section| {
            let failed = section.checks.iter();
            let failed = failed.filter(|check| check.finding.outcome == Outcome::Failed);
            failed.map(|check| format!("{}: {}", section.name, check.name))
        })
        .collect();
    let named = &failed[..failed.len().min(NAMED)];
    let more = match failed.len() - named.len() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    (!failed.is_empty()).then(|| format!("failed: {}{more}", named.join("; ")))
}

impl Comparison {
    /// Returns the line; `None` if our check did not run.
    fn line(&self, report: &Report, many: &str) -> Option<String> {
        let sections = &report.sections;
        let section = sections
            .iter()
            .find(|section| section.name == self.section)?;
        let of = |name: &str| name.replace("{many}", many);
        let ours = of(self.ours);
        // The default is the first of its section.
        let ours = section.checks.iter().find(|c| c.name.starts_with(&ours))?;
        let Some(value) = figure(ours, self.figure) else {
            return Some(format!("{}: not measured", self.title));
        };
        let mut line = format!("{}: {} {}", self.title, value_text(Some(value)), self.unit);
        for (name, unit) in self.further {
            if let Some(value) = figure(ours, name) {
                line += &format!(", {} {unit}", value_text(Some(value)));
            }
        }
        let peers: Vec<String> = self
            .peers
            .iter()
            .map(|(check, label)| {
                let check = of(check);
                let found = section.checks.iter().find(|c| c.name == check);
                let theirs = found.and_then(|found| figure(found, self.figure));
                match theirs {
                    Some(theirs) if theirs > 0.0 => format!("{:.2}x {label}", value / theirs),
                    _ => format!("{label} not measured"),
                }
            })
            .collect();
        if !peers.is_empty() {
            line += &format!("; {}", peers.join(", "));
        }
        Some(line)
    }
}

/// Returns a figure of a check that passed.
fn figure(check: &Check, name: &str) -> Option<f64> {
    if check.finding.outcome != Outcome::Passed {
        return None;
    }
    let found = check
        .finding
        .figures
        .iter()
        .find(|figure| figure.name == name);
    found.and_then(|figure| figure.value)
}
