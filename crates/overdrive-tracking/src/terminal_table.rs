//! A tracker that prints a table.

use std::fmt;
use std::io::Write;

use crate::{Result, StepMetrics, Tracker};
use overdrive_core::units;

// A terminal shows about 40 rows: one heading is always visible.
const HEADING_EVERY: u64 = 40;

/// A tracker that prints a row every few steps, to a terminal or a log file.
///
/// Columns without a value in the first row (MFU, GPU) are left out. Output that cannot be
/// written is dropped, since that is no reason to stop a training run.
///
/// ```
/// use overdrive_tracking::{StepMetrics, TerminalTable, Tracker, Trackers};
///
/// let mut trackers = Trackers::new().with(TerminalTable::new(10));
/// for step in 1..=30 {
///     trackers.log(&StepMetrics { step, loss: 8.0, ..Default::default() })?; // rows 1, 10, 20, 30
/// }
/// # Ok::<(), overdrive_tracking::Error>(())
/// ```
pub struct TerminalTable {
    writer: Box<dyn Write + Send>,
    every: u64,
    columns: Vec<Column>,
    rows: u64,
}

struct Column {
    title: &'static str,
    width: usize,
    value: fn(&StepMetrics) -> Option<String>,
}

const COLUMNS: [Column; 11] = [
    Column {
        title: "step",
        width: 8,
        value: |m| Some(m.step.to_string()),
    },
    Column {
        title: "loss",
        width: 9,
        value: |m| Some(format!("{:.4}", m.loss)),
    },
    Column {
        title: "lr",
        width: 9,
        value: |m| Some(units::compact(m.learning_rate)),
    },
    Column {
        title: "grad",
        width: 8,
        value: |m| m.grad_norm.map(|norm| format!("{norm:.3}")),
    },
    Column {
        title: "tok/s",
        width: 9,
        value: |m| Some(units::rounded(m.tokens_per_second)),
    },
    Column {
        title: "samples/s",
        width: 9,
        value: |m| m.samples_per_second.map(|rate| format!("{rate:.1}")),
    },
    Column {
        title: "it/s",
        width: 7,
        value: |m| m.steps_per_second.map(|rate| format!("{rate:.2}")),
    },
    Column {
        title: "mfu",
        width: 6,
        value: |m| m.mfu.map(|mfu| format!("{:.1}%", 100.0 * mfu)),
    },
    Column {
        title: "peak",
        width: 9,
        value: |m| (m.peak_memory_bytes > 0).then(|| units::bytes(m.peak_memory_bytes)),
    },
    Column {
        title: "gpu",
        width: 5,
        value: |m| {
            let busy = m.gpu?.utilization?;
            Some(format!("{:.0}%", 100.0 * busy))
        },
    },
    Column {
        title: "data",
        width: 6,
        value: |m| {
            let phases = m.device_phase_seconds.or(m.phase_seconds)?;
            let total = phases.total();
            (total > 0.0).then(|| format!("{:.0}%", 100.0 * phases.data / total))
        },
    },
];

impl TerminalTable {
    /// Creates a table on standard output with a row for the first step and every `every`-th step; 0 counts as 1.
    pub fn new(every: u64) -> Self {
        Self::on(std::io::stdout(), every)
    }

    /// Creates a table on any writer.
    pub fn on(writer: impl Write + Send + 'static, every: u64) -> Self {
        Self {
            writer: Box::new(writer),
            every: every.max(1),
            columns: Vec::new(),
            rows: 0,
        }
    }

    fn line(&mut self, cells: impl Iterator<Item = (usize, String)>) {
        let cells: Vec<String> = cells
            .map(|(width, text)| format!("{text:>width$}"))
            .collect();
        // Errors are dropped on purpose, as the documentation of the type says.
        let _ = writeln!(self.writer, "{}", cells.join(" ")).and_then(|()| self.writer.flush());
    }
}

impl Tracker for TerminalTable {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        if self.rows > 0 && !metrics.step.is_multiple_of(self.every) {
            return Ok(());
        }
        if self.rows == 0 {
            let columns = COLUMNS.into_iter();
            self.columns = columns.filter(|c| (c.value)(metrics).is_some()).collect();
        }
        let widths: Vec<usize> = self.columns.iter().map(|column| column.width).collect();
        if self.rows.is_multiple_of(HEADING_EVERY) {
            let titles: Vec<_> = self.columns.iter().map(|c| c.title.to_owned()).collect();
            self.line(widths.iter().copied().zip(titles));
        }
        let cells: Vec<_> = self
            .columns
            .iter()
            .map(|column| (column.value)(metrics).unwrap_or_else(|| "–".to_owned()))
            .collect();
        self.line(widths.into_iter().zip(cells));
        self.rows += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for TerminalTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TerminalTable")
            .field("every", &self.every)
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("lock").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn text(steps: u64, every: u64, metrics: &StepMetrics) -> String {
        let log = Log::default();
        let mut table = TerminalTable::on(log.clone(), every);
        for step in 1..=steps {
            let metrics = StepMetrics {
                step,
                ..metrics.clone()
            };
            table.log(&metrics).expect("log");
        }
        String::from_utf8(log.0.lock().expect("lock").clone()).expect("UTF-8")
    }

    #[test]
    fn the_first_step_and_every_tenth_get_a_row_under_a_heading() {
        let metrics = StepMetrics {
            loss: 5.25,
            learning_rate: 1e-3,
            tokens_per_second: 2311.6,
            peak_memory_bytes: 812 << 20,
            mfu: Some(0.412),
            ..Default::default()
        };
        let text = text(30, 10, &metrics);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert_eq!(
            lines[0],
            "    step      loss        lr     tok/s    mfu      peak"
        );
        assert_eq!(
            lines[1],
            "       1    5.2500     0.001     2,312  41.2%   812 MiB"
        );
        assert!(lines[4].starts_with("      30 "), "{text}");
    }

    #[test]
    fn a_long_table_repeats_its_heading() {
        let text = text(100, 1, &StepMetrics::default());
        assert_eq!(text.lines().filter(|line| line.contains("loss")).count(), 3);
        assert!(!text.contains("gpu"), "{text}");
    }
}
