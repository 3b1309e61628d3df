//! The context of a section in its process.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use anyhow::Result;
use overdrive::core::panic_text;
use tch::{Device, Kind, Tensor};

use crate::finding::{Finding, NO_TIME};
use crate::line::Line;

/// Runs the checks of a section and reports each of them.
pub(crate) struct Context {
    device: Device,
    deadline: Instant,
    /// The checks before this one were reported by an earlier process.
    first: usize,
    next: usize,
    /// If `true`, a device that rejects every operation ends the section.
    is_watched: bool,
    emit: Box<dyn FnMut(&Line)>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .field("first", &self.first)
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

/// The error that ends a section whose device is no longer usable.
#[derive(Debug)]
pub(crate) struct Lost;

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the device is unusable after this check")
    }
}

impl std::error::Error for Lost {}

impl Context {
    /// Returns a context that reports the checks from number `first` on to `emit`. No check begins after `deadline`.
    pub(crate) fn new(
        device: Device,
        first: usize,
        deadline: Instant,
        emit: impl FnMut(&Line) + 'static,
    ) -> Self {
        Self {
            device,
            deadline,
            first,
            next: 0,
            is_watched: true,
            emit: Box::new(emit),
        }
    }

    /// Lets the section continue on a device that rejects every operation, to find out why.
    pub(crate) fn examine_the_device(&mut self) {
        self.is_watched = false;
    }

    /// Returns the error of the device if it cannot compute.
    pub(crate) fn check_device(&self) -> Result<()> {
        works(self.device)
    }

    /// Returns the device that is checked.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Returns `true` for the sizes of a GPU, `false` for those of a test on a CPU.
    pub(crate) fn is_full(&self) -> bool {
        self.device != Device::Cpu
    }

    /// Returns the value for the device: the first on a GPU, the second on a CPU.
    pub(crate) fn sized<T>(&self, full: T, small: T) -> T {
        if self.is_full() { full } else { small }
    }

    /// Returns `true` if an earlier process of the section ended prematurely, after reporting the first checks.
    pub(crate) fn is_resumed(&self) -> bool {
        self.first > 0
    }

    /// Returns the time until the section has to end.
    pub(crate) fn time_left(&self) -> std::time::Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Reports that the section cannot continue.
    pub(crate) fn fail(&mut self, name: &str, reason: &str) {
        let index = self.next.max(self.first);
        let check = Finding::failed(first_lines(reason)).into_check(name.to_owned(), 0.0);
        (self.emit)(&Line::Done { index, check });
    }

    /// Runs one check. An error and a panic are failures of the check, and the section continues.
    pub(crate) fn check(
        &mut self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<Finding>,
    ) -> Result<()> {
        let index = self.next;
        self.next += 1;
        if index < self.first {
            return Ok(());
        }
        let name = name.into();
        if Instant::now() >= self.deadline {
            let check = Finding::skipped(NO_TIME).into_check(name, 0.0);
            (self.emit)(&Line::Done { index, check });
            return Ok(());
        }
        (self.emit)(&Line::Begin {
            index,
            name: name.clone(),
        });
        let began = Instant::now();
        let mut finding = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(finding)) => finding,
            Ok(Err(error)) => Finding::failed(first_lines(&format!("{error:#}"))),
            Err(panic) => Finding::failed(format!(
                "panicked: {}",
                first_lines(panic_text(panic.as_ref()))
            )),
        };
        let works = match self.is_watched {
            true => works(self.device),
            false => Ok(()),
        };
        if let Err(error) = &works {
            let outcome = Finding::failed(format!("{Lost}: {}", first_lines(&error.to_string())));
            finding = Finding {
                detail: finding.noting(outcome.detail).detail,
                ..Finding::failed("")
            };
        }
        let check = finding.into_check(name, began.elapsed().as_secs_f64());
        (self.emit)(&Line::Done { index, check });
        match works {
            Ok(()) => Ok(()),
            Err(_) => Err(Lost.into()),
        }
    }
}

/// Reads a result from the device. CUDA reports errors of kernels late, and after some errors rejects every operation.
fn works(device: Device) -> Result<()> {
    Tensor::f_ones([1], (Kind::Float, device))?.f_double_value(&[0])?;
    Ok(())
}

/// libtorch appends a C++ stack trace to its messages.
fn first_lines(text: &str) -> String {
    let text = text.split("\nException raised from").next().unwrap_or(text);
    let lines: Vec<&str> = text.lines().map(str::trim).take(6).collect();
    lines.join(" ").trim().chars().take(600).collect()
}
