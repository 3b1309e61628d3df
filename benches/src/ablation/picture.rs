use std::path::Path;

use plotters::prelude::*;

use super::Table;
use crate::StepResult;

const SPEED: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const MEMORY: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const INK: RGBColor = RGBColor(0x3f, 0x3f, 0x46);
const ROW: i32 = 56;
const TOP: i32 = 64;
const LEFT: i32 = 240;
const WIDTH: i32 = 860;
const FONT: &str = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif";

/// Draws speed and memory of each configuration relative to the default, as bars in an SVG file.
///
/// # Errors
/// An error if the file cannot be written.
pub fn write_picture(table: &Table, path: &Path) -> StepResult<()> {
    let rows = table.rows.iter();
    let rows: Vec<_> = rows
        .map(|row| (row.name.clone(), row.speed, row.memory))
        .collect();
    draw("Speed and peak memory, default = 1", &rows, path)
}

/// Draws the name, the relative speed and the relative memory of each row.
pub(super) fn draw(title: &str, rows: &[(String, f64, f64)], path: &Path) -> StepResult<()> {
    let height = TOP + ROW * i32::try_from(rows.len())? + 24;
    let area =
        SVGBackend::new(path, (WIDTH.cast_unsigned(), height.cast_unsigned())).into_drawing_area();
    area.fill(&WHITE)?;
    let ratios = rows.iter().flat_map(|&(_, speed, memory)| [speed, memory]);
    let most = ratios.fold(1.0, f64::max);
    let scale = f64::from(WIDTH - LEFT - 90) / most;
    let text = |size: i32, color: RGBColor| (FONT, size).into_font().color(&color);
    let at = |ratio: f64| LEFT + (ratio * scale) as i32;

    area.draw(&Text::new(title, (24, 18), text(18, INK)))?;
    for (x, color, name) in [
        (LEFT + 190, SPEED, "speed: longer is better"),
        (LEFT + 390, MEMORY, "memory: shorter is better"),
    ] {
        area.draw(&Rectangle::new([(x, 22), (x + 12, 34)], color.filled()))?;
        area.draw(&Text::new(name, (x + 18, 20), text(14, INK)))?;
    }
    area.draw(&PathElement::new(
        vec![(at(1.0), TOP - 8), (at(1.0), height - 20)],
        INK.mix(0.4).stroke_width(1),
    ))?;
    for (index, (name, speed, memory)) in rows.iter().enumerate() {
        let y = TOP + ROW * i32::try_from(index)?;
        area.draw(&Text::new(name.clone(), (24, y + 12), text(15, INK)))?;
        let bars = [
            (*speed, SPEED, format!("{speed:.2}x"), y),
            (*memory, MEMORY, format!("{:.0}%", memory * 100.0), y + 21),
        ];
        for (ratio, color, label, y) in bars {
            area.draw(&Rectangle::new(
                [(LEFT, y), (at(ratio), y + 18)],
                color.filled(),
            ))?;
            area.draw(&Text::new(label, (at(ratio) + 8, y + 2), text(14, INK)))?;
        }
    }
    area.present()?;
    Ok(())
}
