//! The HTML page of a report.

use std::fmt::Write;

use overdrive_core::units;
use overdrive_profiling::{Machine, Phase};
use serde_json::Value;

use super::chart::Chart;
use super::{curves, summary};
use crate::{Report, Result, Sample};

const STYLE: &str = include_str!("page.css");

pub(super) fn html(report: &Report) -> Result<String> {
    let title = escape(if report.title.is_empty() {
        "Training run"
    } else {
        &report.title
    });
    let mut body = String::new();
    body.push_str(&header(report, &title));
    body.push_str(&notes(report));
    body.push_str(&figures(report));
    let loss = curves::loss(&report.metrics);
    if !loss.is_empty() {
        body.push_str(&section("Loss", &figure(&loss, true)?));
    }
    body.push_str(&breakdown(report));
    let mut small = String::new();
    for chart in curves::others(&report.metrics) {
        small.push_str(&figure(&chart, false)?);
    }
    if !small.is_empty() {
        body.push_str(&section(
            "Over the run",
            &format!("<div class=\"grid\">{small}</div>"),
        ));
    }
    body.push_str(&samples(&report.samples));
    body.push_str(&configuration(&report.configuration));
    body.push_str(&report.machine.as_ref().map(machine).unwrap_or_default());
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\
         <footer>Made by overdrive-tracking {}.</footer>\n</main>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION"),
    ))
}

/// Escapes a text for elements and quoted attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // HTML cannot represent control characters, which a model can generate.
            letter if letter.is_control() && !matches!(letter, '\n' | '\t') => {
                escaped.push(char::REPLACEMENT_CHARACTER);
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

fn section(title: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n{content}\n</section>\n")
}

fn header(report: &Report, title: &str) -> String {
    let mut header = format!("<header>\n<h1>{title}</h1>\n");
    if !report.description.is_empty() {
        header.push_str(&format!("<p>{}</p>\n", escape(&report.description)));
    }
    header.push_str("</header>\n");
    header
}

fn notes(report: &Report) -> String {
    let not_finite = report
        .metrics
        .iter()
        .filter(|step| !step.loss.is_finite())
        .count();
    let not_finite = (not_finite > 0).then(|| match not_finite {
        1 => "The loss of 1 step is not finite; the curve has a gap there.".to_owned(),
        steps => format!("The loss of {steps} steps is not finite; the curve has gaps there."),
    });
    report
        .notes
        .iter()
        .chain(&not_finite)
        .map(|note| format!("<p class=\"note\">{}</p>\n", escape(note)))
        .collect()
}

fn figures(report: &Report) -> String {
    let tiles: String = summary::figures(report)
        .iter()
        .map(|figure| {
            format!(
                "<div><dt>{}</dt><dd>{}</dd><dd class=\"detail\">{}</dd></div>\n",
                figure.name,
                escape(&figure.value),
                escape(&figure.detail)
            )
        })
        .collect();
    if tiles.is_empty() {
        tiles
    } else {
        format!("<dl class=\"figures\">\n{tiles}</dl>\n")
    }
}

fn figure(chart: &Chart, large: bool) -> Result<String> {
    let legend: String = chart
        .series
        .iter()
        .filter(|_| large)
        .map(|series| {
            format!(
                "<span class=\"key {}\">{}</span>",
                series.role.class(),
                series.name
            )
        })
        .collect();
    let caption = if large {
        legend
    } else {
        chart.title.to_owned()
    };
    let class = if large { "large" } else { "small" };
    Ok(format!(
        "<figure class=\"{class}\"><figcaption>{caption}</figcaption>{}</figure>\n",
        chart.inline()?
    ))
}

fn phase_title(phase: Phase) -> &'static str {
    match phase {
        Phase::Data => "Data",
        Phase::HostToDevice => "Host to device",
        Phase::Forward => "Forward",
        Phase::Backward => "Backward",
        Phase::Accumulate => "Accumulate",
        Phase::Optimizer => "Optimizer",
        Phase::Other => "Other",
    }
}

fn breakdown(report: &Report) -> String {
    let Some((seconds, steps)) = summary::phases(&report.metrics) else {
        return String::new();
    };
    let mut bar = String::new();
    let mut rows = String::new();
    for (phase, share) in summary::shares(&seconds) {
        let percent = share * 100.0;
        let name = phase.name();
        // Below this a phase is narrower than half a pixel.
        if percent >= 0.05 {
            // A label fits from about this width on.
            let label = if percent >= 7.0 {
                format!("{percent:.0}%")
            } else {
                String::new()
            };
            let _ = write!(
                bar,
                "<span class=\"{name}\" style=\"width:{percent:.2}%\" \
                 title=\"{}: {percent:.1}%\">{label}</span>",
                phase_title(phase)
            );
        }
        let per_step = seconds.get(phase) / steps as f64;
        let _ = writeln!(
            rows,
            "<tr><td><span class=\"key {name}\">{}</span></td><td>{}</td><td>{percent:.1}%</td></tr>",
            phase_title(phase),
            milliseconds(per_step),
        );
    }
    let whole = milliseconds(seconds.total() / steps as f64);
    section(
        "Where a step's time goes",
        &format!(
            "<div class=\"bar\" role=\"img\" aria-label=\"Share of each phase\">{bar}</div>\n\
             <table class=\"phases\">\n<thead><tr><th>Phase</th><th>Mean per step</th>\
             <th>Share</th></tr></thead>\n<tbody>\n{rows}</tbody>\n<tfoot><tr><td>Step</td>\
             <td>{whole}</td><td></td></tr></tfoot>\n</table>"
        ),
    )
}

fn milliseconds(seconds: f64) -> String {
    let milliseconds = seconds * 1e3;
    match milliseconds {
        value if value < 10.0 => format!("{value:.2} ms"),
        value if value < 100.0 => format!("{value:.1} ms"),
        value => format!("{} ms", units::rounded(value)),
    }
}

fn samples(samples: &[Sample]) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let texts: String = samples
        .iter()
        .map(|sample| {
            format!(
                "<pre><b>{}</b>{}</pre>\n",
                escape(&sample.prompt),
                escape(&sample.completion)
            )
        })
        .collect();
    let note = "<p class=\"hint\">The prompt is bold; the rest was written by the model.</p>\n";
    section("What the model writes", &format!("{note}{texts}"))
}

fn configuration(configuration: &Value) -> String {
    let mut rows = Vec::new();
    flatten("", configuration, &mut rows);
    table("Configuration", &rows)
}

/// Adds every leaf of nested objects by its dotted name.
fn flatten(prefix: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let name = if prefix.is_empty() {
                    key.clone()
                } else {
                    format!("{prefix}.{key}")
                };
                flatten(&name, value, rows);
            }
        }
        Value::Null => {}
        Value::String(text) => rows.push((prefix.to_owned(), text.clone())),
        other => rows.push((prefix.to_owned(), other.to_string())),
    }
}

fn machine(machine: &Machine) -> String {
    let mut rows = vec![("Processor".to_owned(), machine.cpu.clone())];
    let mut add = |name: &str, value: String| rows.push((name.to_owned(), value));
    if let Some(accelerator) = &machine.accelerator {
        add("Accelerator", accelerator.clone());
    }
    if machine.cuda_devices > 0 {
        add("CUDA devices", machine.cuda_devices.to_string());
    }
    if !machine.cpu_capability.is_empty() {
        add("Vector instructions", machine.cpu_capability.clone());
    }
    add("Logical cores", machine.logical_cores.to_string());
    add("libtorch threads", machine.threads.to_string());
    if let Some(memory) = machine.memory_bytes {
        add("Main memory", units::bytes(memory));
    }
    add("System", machine.system.clone());
    add("libtorch", machine.libtorch.clone());
    table("Machine", &rows)
}

fn table(title: &str, rows: &[(String, String)]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let row = |(name, value): &(String, String)| {
        format!(
            "<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n",
            escape(name),
            escape(value)
        )
    };
    // Two halves, which a wide window shows side by side.
    let half = if rows.len() > 3 {
        rows.len().div_ceil(2)
    } else {
        rows.len()
    };
    let columns: String = rows
        .chunks(half)
        .map(|rows| {
            let rows: String = rows.iter().map(row).collect();
            format!("<table class=\"pairs\">\n<tbody>\n{rows}</tbody>\n</table>\n")
        })
        .collect();
    section(title, &format!("<div class=\"columns\">\n{columns}</div>"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_in_elements_and_attributes() {
        assert_eq!(
            escape("<b a='1' c=\"2\">&"),
            "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;"
        );
        assert_eq!(
            escape("a\u{0}\u{1b}[31m\n\tb"),
            "a\u{fffd}\u{fffd}[31m\n\tb"
        );
    }

    #[test]
    fn nested_configuration_becomes_dotted_names_and_null_is_left_out() {
        let mut rows = Vec::new();
        let value = serde_json::json!({"lr": 0.1, "model": {"layers": 6, "x": null}, "d": ["a"]});
        flatten("", &value, &mut rows);
        let rows: Vec<_> = rows
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            rows,
            [("lr", "0.1"), ("model.layers", "6"), ("d", "[\"a\"]")]
        );
    }
}
