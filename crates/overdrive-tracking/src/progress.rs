//! The progress of a run at the terminal.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use overdrive_core::units;

use crate::StepMetrics;

// By default a plain line appears at least this often, because CI systems stop jobs that print nothing for long.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

// By default a plain line appears at least after this fraction of the run, so that a short log covers all of it.
const PLAIN_LINES: u64 = 10;

/// A progress bar with loss, learning rate, tokens per second, peak memory and the remaining time, on
/// standard error.
///
/// If standard error is not a terminal (a log of a CI job, a file), it prints a plain line instead at
/// the first step, the last one, and after every tenth of the run or ten seconds, or at the steps
/// of [`with_logging_steps`](Self::with_logging_steps). Output that cannot be written is dropped, since
/// that is no reason to stop a training run.
///
/// ```
/// use overdrive_tracking::{StepMetrics, TrainingProgress};
///
/// let mut progress = TrainingProgress::new(2);
/// for step in 1..=2 {
///     progress.update(&StepMetrics { step, loss: 8.0, ..Default::default() });
/// }
/// progress.finish();
/// ```
pub struct TrainingProgress {
    output: Output,
    total_steps: u64,
    logging_steps: Option<u64>,
    created: Instant,
    /// The first step that was shown, and its end in seconds.
    first_step: Option<(u64, f64)>,
    last_printed: Option<(u64, Instant)>,
}

enum Output {
    Bar(ProgressBar),
    Plain(Box<dyn Write + Send>),
}

impl TrainingProgress {
    /// Creates the progress of `total_steps` optimizer steps: a bar on a terminal, otherwise plain lines.
    pub fn new(total_steps: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::plain(total_steps, std::io::stderr());
        }
        let bar = ProgressBar::with_draw_target(Some(total_steps), ProgressDrawTarget::stderr());
        // The remaining time comes first: a narrow terminal truncates the message on the right.
        let template = "{bar:16.cyan/dim} {pos}/{len}  {prefix}{wide_msg}";
        // The default style stands in for a template that does not parse.
        let style = ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━━─");
        bar.set_style(style);
        Self::with_output(total_steps, Output::Bar(bar))
    }

    /// Creates progress that prints plain lines to any writer.
    pub fn plain(total_steps: u64, writer: impl Write + Send + 'static) -> Self {
        Self::with_output(total_steps, Output::Plain(Box::new(writer)))
    }

    /// Creates progress without output, for all processes of a run except the first.
    pub fn silent() -> Self {
        Self::plain(0, std::io::sink())
    }

    /// Prints a plain line at the first step, the last one, and every `steps` steps (`logging_steps`).
    #[must_use]
    pub fn with_logging_steps(mut self, steps: u64) -> Self {
        self.logging_steps = Some(steps.max(1));
        self
    }

    fn with_output(total_steps: u64, output: Output) -> Self {
        Self {
            output,
            total_steps,
            logging_steps: None,
            created: Instant::now(),
            first_step: None,
            last_printed: None,
        }
    }

    /// Shows a step. Its `elapsed_seconds`, if set, are used to estimate the remaining time. An evaluation gets its own
    /// permanent line. For step 0, an evaluation before training, only this line is shown.
    pub fn update(&mut self, metrics: &StepMetrics) {
        if metrics.step == 0 {
            if let Some(text) = evaluation(metrics) {
                self.println(&text);
            }
            return;
        }
        let now = Instant::now();
        // On a GPU, several steps are shown at once, when their losses are read, so the time of showing a step says
        // nothing about its duration.
        let ended = metrics
            .elapsed_seconds
            .unwrap_or_else(|| now.duration_since(self.created).as_secs_f64());
        // The rate is counted from the first shown step, which excludes the compilation of kernels and, in a resumed
        // run, the work of other processes.
        let (first_step, first_ended) = *self.first_step.get_or_insert((metrics.step, ended));
        let done_since = metrics.step.saturating_sub(first_step);
        let steps_left = self.total_steps.saturating_sub(metrics.step);
        let remaining = (done_since > 0 && steps_left > 0).then(|| {
            let per_step = (ended - first_ended) / done_since as f64;
            units::seconds(per_step * steps_left as f64)
        });
        let figures = figures(metrics);
        match &self.output {
            Output::Bar(bar) => {
                bar.set_position(metrics.step);
                bar.set_prefix(remaining.map_or_else(String::new, |time| format!("left {time}  ")));
                bar.set_message(figures);
            }
            Output::Plain(_) => {
                if self.line_is_due(metrics.step, now) {
                    self.last_printed = Some((metrics.step, now));
                    let total = self.total_steps;
                    let percent = metrics.step * 100 / total.max(1);
                    let width = total.to_string().len();
                    let step = metrics.step;
                    let left = remaining.map_or_else(String::new, |time| format!("  left {time}"));
                    self.println(&format!(
                        "step {step:>width$}/{total} {percent:>3}%  {figures}{left}"
                    ));
                }
            }
        }
        if let Some(text) = evaluation(metrics) {
            self.println(&text);
        }
    }

    /// Prints a line; on a terminal, it appears above the bar.
    pub fn println(&mut self, text: &str) {
        match &mut self.output {
            Output::Bar(bar) => bar.println(text),
            Output::Plain(writer) => {
                // Errors are dropped on purpose, as the documentation of the type says.
                let _ = writeln!(writer, "{text}").and_then(|()| writer.flush());
            }
        }
    }

    /// Ends the bar, and leaves its last state on the screen.
    pub fn finish(&mut self) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
    }

    fn line_is_due(&self, step: u64, now: Instant) -> bool {
        let Some((last_step, last_time)) = self.last_printed else {
            return true;
        };
        if let Some(every) = self.logging_steps {
            return step.is_multiple_of(every) || step >= self.total_steps;
        }
        let tenth = |step: u64| step * PLAIN_LINES / self.total_steps.max(1);
        step >= self.total_steps
            || tenth(step) > tenth(last_step)
            || now.duration_since(last_time) >= PLAIN_INTERVAL
    }
}

impl fmt::Debug for TrainingProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingProgress")
            .field("total_steps", &self.total_steps)
            .field("bar", &matches!(self.output, Output::Bar(_)))
            .finish_non_exhaustive()
    }
}

fn figures(metrics: &StepMetrics) -> String {
    let mut text = format!(
        "loss {:.3}  lr {}  {} tok/s  peak {}",
        metrics.loss,
        units::compact(metrics.learning_rate),
        units::rounded(metrics.tokens_per_second),
        units::bytes(metrics.peak_memory_bytes),
    );
    if let Some(mfu) = metrics.mfu.filter(|mfu| mfu.is_finite()) {
        text.push_str(&format!("  mfu {:.0}%", 100.0 * mfu));
    }
    if let Some(busy) = metrics.gpu.and_then(|gpu| gpu.utilization) {
        text.push_str(&format!("  gpu {:.0}%", 100.0 * busy));
    }
    text
}

fn evaluation(metrics: &StepMetrics) -> Option<String> {
    let loss = metrics.eval_loss?;
    let mut text = format!("eval at step {}: loss {loss:.3}", metrics.step);
    if let Some(bits) = metrics.eval_bits_per_byte {
        text.push_str(&format!(", {bits:.3} bits per byte"));
    }
    for (name, value) in &metrics.extra {
        if let (Some(name), Some(value)) = (name.strip_prefix("eval_"), value.as_f64()) {
            text.push_str(&format!(", {name} {value:.3}"));
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Log {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().expect("lock").clone()).expect("UTF-8")
        }
    }

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("lock").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 5.2134,
            learning_rate: 1.9e-3,
            tokens_per_second: 2311.6,
            peak_memory_bytes: 812 << 20,
            ..Default::default()
        }
    }

    #[test]
    fn lines_come_every_logging_steps_and_at_the_first_and_last_step() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(10, log.clone()).with_logging_steps(4);
        for step in 1..=10 {
            progress.update(&StepMetrics {
                step,
                ..StepMetrics::default()
            });
        }
        let text = log.text();
        let steps: Vec<&str> = text.lines().map(|line| &line[5..7]).collect();
        assert_eq!(steps, [" 1", " 4", " 8", "10"]);
    }

    #[test]
    fn a_log_gets_a_line_every_tenth_of_the_run_and_not_every_step() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(1000, log.clone());
        for number in 1..=1000 {
            progress.update(&step(number));
        }
        progress.finish();
        let text = log.text();
        assert_eq!(text.lines().count(), 11, "{text}");
        let first = "step    1/1000   0%  loss 5.213  lr 0.0019  2,312 tok/s  peak 812 MiB";
        assert_eq!(text.lines().next(), Some(first));
        let last = text.lines().last().expect("a line");
        assert!(
            last.starts_with("step 1000/1000 100%  loss 5.213"),
            "{last}"
        );
        assert!(last.ends_with("peak 812 MiB"), "nothing is left: {last}");
        assert!(
            text.lines()
                .nth(5)
                .is_some_and(|line| line.contains("MiB  left ")),
            "{text}"
        );
    }

    #[test]
    fn the_remaining_time_is_that_of_the_steps_and_not_of_their_display() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(100, log.clone()).with_logging_steps(10);
        // The losses of ten steps of three seconds are read and shown at once.
        for number in 1..=10 {
            progress.update(&StepMetrics {
                elapsed_seconds: Some(20.0 + 3.0 * number as f64),
                ..step(number)
            });
        }
        let text = log.text();
        assert!(text.ends_with("  left 4m 30s\n"), "{text}");
    }

    #[test]
    fn utilisation_is_shown_where_it_is_known() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(10, log.clone());
        let mut gpu = overdrive_profiling::GpuSample::default();
        gpu.utilization = Some(0.97);
        progress.update(&StepMetrics {
            mfu: Some(0.412),
            gpu: Some(gpu),
            ..step(1)
        });
        assert!(
            log.text().ends_with("peak 812 MiB  mfu 41%  gpu 97%\n"),
            "{}",
            log.text()
        );
    }

    #[test]
    fn an_evaluation_gets_its_own_line() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(10, log.clone());
        let metrics = StepMetrics {
            eval_loss: Some(4.4321),
            eval_bits_per_byte: Some(2.0101),
            extra: [("eval_accuracy", 0.5), ("rate", 1.0)]
                .map(|(name, value)| (name.to_owned(), value.into()))
                .into(),
            ..step(5)
        };
        progress.update(&metrics);
        let text = log.text();
        let line = "eval at step 5: loss 4.432, 2.010 bits per byte, accuracy 0.500";
        assert_eq!(text.lines().nth(1), Some(line), "{text}");
    }

    #[test]
    fn a_writer_that_fails_does_not_stop_the_run() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut progress = TrainingProgress::plain(0, Full);
        progress.update(&step(1));
        progress.finish();
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_shown_as_such() {
        let log = Log::default();
        let mut progress = TrainingProgress::plain(1, log.clone());
        progress.update(&StepMetrics {
            loss: f64::NAN,
            ..step(1)
        });
        assert!(log.text().contains("loss NaN"), "{}", log.text());
    }
}
