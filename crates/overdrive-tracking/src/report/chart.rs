//! Line charts as SVG in the colors of the reader's color scheme.

use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

use crate::{Error, Result};

/// The role of a line, which determines its color in both color schemes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The thin line of the raw values behind a smoothed line.
    Faint,
    /// The main line of the chart.
    Main,
    /// A line to compare with the main one.
    Second,
}

impl Role {
    /// Returns the class of the role in style sheets and legends.
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::Faint => "faint",
            Self::Main => "main",
            Self::Second => "second",
        }
    }

    /// Returns the color that plotters draws with. [`themed`] replaces it by the class, so the values only
    /// have to differ from one another.
    fn placeholder(self) -> RGBColor {
        match self {
            Self::Faint => RGBColor(1, 0, 1),
            Self::Main => RGBColor(2, 0, 2),
            Self::Second => RGBColor(3, 0, 3),
        }
    }
}

// Placeholder of text, which `themed` replaces by a class.
const INK: RGBColor = RGBColor(4, 0, 4);
// Placeholder of the grid lines.
const GRID: RGBColor = RGBColor(5, 0, 5);
// Placeholder of the axes.
const AXIS: RGBColor = RGBColor(6, 0, 6);

// More points than a chart has pixels would make the file larger and the line no better.
const MOST_POINTS: usize = 700;

// The colors of a standalone chart; the page has the same in its own style sheet.
const STANDALONE_STYLE: &str = "<style>\
    .bg{fill:#fff}.f-ink{fill:#52525b}.s-grid{stroke:#e7e7ea}.s-axis{stroke:#a1a1aa}\
    .s-faint{stroke:#0072b2;stroke-opacity:.4}.s-main{stroke:#0072b2}.f-main{fill:#0072b2}\
    .s-second{stroke:#d55e00}.f-second{fill:#d55e00}\
    text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif}\
    @media(prefers-color-scheme:dark){.bg{fill:#16181d}.f-ink{fill:#a8adb8}.s-grid{stroke:#2a2e37}\
    .s-axis{stroke:#565c69}.s-faint,.s-main{stroke:#56b4e9}.f-main{fill:#56b4e9}\
    .s-second{stroke:#f0a35e}.f-second{fill:#f0a35e}}</style>";

/// One line of a chart.
#[derive(Debug, Clone)]
pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) role: Role,
    /// If `true`, each point gets a dot: for few, measured points.
    pub(super) dots: bool,
    /// The points by x. A y that is not finite breaks the line.
    pub(super) points: Vec<(f64, f64)>,
}

/// A line chart over the steps of a run.
#[derive(Debug, Clone)]
pub(super) struct Chart {
    pub(super) title: &'static str,
    /// The label of the y axis, with its unit.
    pub(super) y_label: &'static str,
    /// The format of the tick labels of the y axis.
    pub(super) y_format: fn(f64) -> String,
    /// If `true`, the y axis begins at zero.
    pub(super) from_zero: bool,
    pub(super) size: (u32, u32),
    pub(super) series: Vec<Series>,
}

impl Chart {
    /// Returns `true` if there is no point to draw.
    pub(super) fn is_empty(&self) -> bool {
        !self.finite().any(|_| true)
    }

    /// Returns the chart for a page that has the colors in its style sheet.
    pub(super) fn inline(&self) -> Result<String> {
        let (width, height) = self.size;
        let open = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{} by step\">",
            self.title
        );
        Ok(format!("{open}{}</svg>", self.body()?))
    }

    /// Returns the chart as a standalone file, with title, legend and background.
    pub(super) fn standalone(&self) -> Result<String> {
        let (width, height) = self.size;
        let top = 44;
        // The page has padding around the chart; a standalone file needs some too.
        let (left, width) = (8, width + 16);
        let mut legend = String::new();
        let mut x = width.saturating_sub(16);
        // Drawn from right to left, so in reverse order.
        for series in self.series.iter().rev() {
            // Anchored at the right end; about 6.4 pixels a letter at this size.
            let text_width = series.name.chars().count() as u32 * 64 / 10;
            let role = series.role.class();
            let line = x.saturating_sub(text_width + 26);
            legend.push_str(&format!(
                "<line x1=\"{line}\" x2=\"{}\" y1=\"24\" y2=\"24\" stroke-width=\"3\" \
                 class=\"s-{role}\"/><text x=\"{}\" y=\"28\" font-size=\"13\" \
                 class=\"f-ink\">{}</text>",
                line + 18,
                line + 24,
                series.name,
            ));
            x = line.saturating_sub(18);
        }
        Ok(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" \
             viewBox=\"0 0 {width} {}\" role=\"img\" aria-label=\"{} by step\">{STANDALONE_STYLE}\
             <rect class=\"bg\" width=\"100%\" height=\"100%\"/>\
             <text x=\"16\" y=\"29\" font-size=\"17\" font-weight=\"600\" class=\"f-ink\">{}</text>\
             {legend}<g transform=\"translate({left} {top})\">{}</g></svg>\n",
            height + top,
            height + top,
            self.title,
            self.title,
            self.body()?,
        ))
    }

    fn finite(&self) -> impl Iterator<Item = (f64, f64)> {
        let points = self
            .series
            .iter()
            .flat_map(|series| series.points.iter().copied());
        points.filter(|(x, y)| x.is_finite() && y.is_finite())
    }

    /// Draws the elements inside the `svg` element.
    fn body(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|message| Error::Chart {
            chart: self.title.to_owned(),
            message,
        })?;
        // plotters writes an `svg` element with fixed pixel sizes; the page needs one that scales.
        let inside = svg
            .split_once("<svg")
            .and_then(|(_, rest)| rest.split_once('>'))
            .and_then(|(_, rest)| rest.rsplit_once("</svg>"))
            .map(|(inside, _)| inside);
        Ok(themed(inside.unwrap_or_default()))
    }

    fn draw(&self, svg: &mut String) -> std::result::Result<(), String> {
        let area = SVGBackend::with_string(svg, self.size).into_drawing_area();
        let x = padded(self.finite().map(|point| point.0), 0.0, false);
        let y = padded(self.finite().map(|point| point.1), 0.06, self.from_zero);
        let text = ("sans-serif", 16).into_font().color(&INK);
        let mut context = ChartBuilder::on(&area)
            .margin_top(10)
            .margin_right(18)
            .x_label_area_size(if self.size.1 < 300 { 44 } else { 56 })
            .y_label_area_size(66)
            .build_cartesian_2d(Axis::new(x, step_label), Axis::new(y, self.y_format))
            .map_err(|error| error.to_string())?;
        context
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(AXIS)
            .x_labels(if self.size.0 < 600 { 5 } else { 9 })
            .y_labels(if self.size.1 < 300 { 5 } else { 8 })
            // Fewer labels on small charts, where they would overlap.
            .label_style(text.clone())
            .axis_desc_style(text)
            .x_desc("step")
            .y_desc(self.y_label)
            .draw()
            .map_err(|error| error.to_string())?;
        for series in &self.series {
            let color = series.role.placeholder();
            let width = if series.role == Role::Faint { 1 } else { 2 };
            for run in thinned(&series.points) {
                // A line of one point between two gaps would be invisible.
                if series.dots || run.len() == 1 {
                    let dots = run
                        .iter()
                        .map(|&point| Circle::new(point, 4, color.filled()));
                    context
                        .draw_series(dots)
                        .map_err(|error| error.to_string())?;
                }
                let line = LineSeries::new(run, color.stroke_width(width));
                context
                    .draw_series(line)
                    .map_err(|error| error.to_string())?;
            }
        }
        area.present().map_err(|error| error.to_string())
    }
}

/// A linear axis with a label format of its own.
struct Axis {
    range: std::ops::Range<f64>,
    inner: plotters::coord::types::RangedCoordf64,
    format: fn(f64) -> String,
}

impl Axis {
    fn new(range: std::ops::Range<f64>, format: fn(f64) -> String) -> Self {
        Self {
            inner: range.clone().into(),
            range,
            format,
        }
    }
}

impl Ranged for Axis {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.inner.map(value, limit)
    }

    fn key_points<Hint: plotters::coord::ranged1d::KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        self.inner.key_points(hint)
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        (self.format)(*value)
    }
}

fn step_label(step: f64) -> String {
    // There is no step 2.5; short runs have such tick marks.
    if step.fract() == 0.0 {
        overdrive_core::units::rounded(step)
    } else {
        String::new()
    }
}

/// Returns the range of the values with some margin; never empty, as an axis must have a length.
fn padded(values: impl Iterator<Item = f64>, margin: f64, from_zero: bool) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    // Without any finite value the fold is inverted.
    if low > high {
        return 0.0..1.0;
    }
    let low = if from_zero { low.min(0.0) } else { low };
    // A constant curve gets a tenth of its value, so that it lies in the middle and not on an edge.
    let span = if high > low {
        high - low
    } else {
        high.abs().max(1.0) * 0.1
    };
    let below = if from_zero && low == 0.0 {
        0.0
    } else {
        span * margin
    };
    let above = if high > low { span * margin } else { span };
    low - below..high + above
}

/// Returns the consecutive finite points, each sequence thinned to the lowest and highest value of about every pixel,
/// so that spikes are kept.
fn thinned(points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
    // Each bucket keeps two points.
    let bucket = points.len().div_ceil(MOST_POINTS / 2).max(1);
    points
        .split(|(x, y)| !x.is_finite() || !y.is_finite())
        .filter(|run| !run.is_empty())
        .map(|run| {
            if bucket <= 2 {
                return run.to_vec();
            }
            run.chunks(bucket).flat_map(extremes).collect()
        })
        .collect()
}

/// Returns the lowest and the highest point of a chunk, in their order.
fn extremes(chunk: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
    let low = chunk.iter().min_by(by_value);
    let high = chunk.iter().max_by(by_value);
    let mut both: Vec<_> = low.into_iter().chain(high).copied().collect();
    both.sort_by(|a, b| a.0.total_cmp(&b.0));
    both.dedup();
    both
}

/// Replaces the placeholder colors by classes, so that a style sheet sets the colors.
fn themed(svg: &str) -> String {
    // The font is that of the page.
    let mut svg = svg.replace(" font-family=\"sans-serif\"", "");
    let classes = [
        (Role::Faint.placeholder(), "faint"),
        (Role::Main.placeholder(), "main"),
        (Role::Second.placeholder(), "second"),
        (INK, "ink"),
        (GRID, "grid"),
        (AXIS, "axis"),
    ];
    for (RGBColor(r, g, b), class) in classes {
        let color = format!("#{r:02X}{g:02X}{b:02X}");
        svg = svg
            .replace(
                &format!("fill=\"{color}\""),
                &format!("class=\"f-{class}\""),
            )
            .replace(
                &format!("stroke=\"{color}\""),
                &format!("class=\"s-{class}\""),
            );
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        Chart {
            title: "Loss",
            y_label: "loss",
            y_format: overdrive_core::units::compact,
            from_zero: false,
            size: (600, 300),
            series: vec![Series {
                name: "train",
                role: Role::Main,
                dots: false,
                points,
            }],
        }
    }

    #[test]
    fn no_placeholder_color_is_left_in_a_chart() {
        let points = (0..50)
            .map(|x| (f64::from(x), f64::from(x).sqrt()))
            .collect();
        let svg = chart(points).standalone().expect("draws");
        assert!(svg.contains("class=\"s-main\""), "{svg}");
        assert!(svg.contains("class=\"f-ink\""), "{svg}");
        for left in [
            "#0100", "#0200", "#0300", "#0400", "#0500", "#0600", "#000000",
        ] {
            assert!(!svg.contains(left), "{left} in {svg}");
        }
    }

    #[test]
    fn points_that_are_not_finite_break_the_line() {
        let runs = thinned(&[
            (1.0, 2.0),
            (2.0, f64::NAN),
            (3.0, 4.0),
            (4.0, f64::INFINITY),
        ]);
        assert_eq!(runs, [vec![(1.0, 2.0)], vec![(3.0, 4.0)]]);
    }

    #[test]
    fn a_long_curve_is_thinned_and_keeps_its_spikes() {
        let mut points: Vec<_> = (0..100_000).map(|x| (f64::from(x), 1.0)).collect();
        points[54_321].1 = 9.0;
        let runs = thinned(&points);
        assert_eq!(runs.len(), 1);
        assert!(runs[0].len() <= 2 * MOST_POINTS, "{}", runs[0].len());
        assert!(runs[0].contains(&(54_321.0, 9.0)));
    }

    #[test]
    fn charts_of_nothing_one_point_and_a_flat_line_draw() {
        assert!(chart(vec![]).is_empty());
        assert!(chart(vec![(1.0, f64::NAN)]).is_empty());
        for points in [
            vec![],
            vec![(1.0, 3.0)],
            vec![(1.0, 3.0), (2.0, 3.0)],
            vec![(1.0, 0.0)],
        ] {
            let svg = chart(points).standalone().expect("draws");
            assert!(!svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn an_axis_leaves_air_around_the_values() {
        assert_eq!(padded([2.0, 4.0].into_iter(), 0.1, false), 1.8..4.2);
        assert_eq!(padded([2.0, 4.0].into_iter(), 0.1, true), 0.0..4.4);
        assert_eq!(padded(std::iter::empty(), 0.1, true), 0.0..1.0);
    }
}
