//! Figures that were measured on this processor, in files of the user's cache folder.
//!
//! A file belongs to one [`Processor`] and one subject, and names both in its first lines. A file that is
//! damaged, or of another processor, counts as missing. The module is in this crate because `cargo xtask
//! doctor`, which runs without libtorch, prints the figures that programs with libtorch have measured.

use std::fmt::Write as _;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::Write as _;
use std::path::PathBuf;

use crate::cpu::CpuFeatures;
use crate::{Environment, cache};

/// Figures under their names.
pub type Figures = Vec<(String, f64)>;

/// The first line of a file; the number changes with the format or with the way of measuring.
const FORMAT: &str = "overdrive measurement 1";
/// The line between the processor and the figures.
const BEGIN: &str = "figures";
/// The last line, without which a file is incomplete.
const END: &str = "end";

/// The processor, libtorch's version and its number of threads, on which a figure depends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processor {
    identity: String,
}

impl Processor {
    /// Returns this machine's processor. `libtorch` is a version such as `2.11.0`, whose suffix (`+cpu`) is ignored;
    /// `threads` is the number of threads inside one operator.
    #[must_use]
    pub fn detect(libtorch: &str, threads: usize) -> Self {
        match fs::read_to_string("/proc/cpuinfo") {
            Ok(text) => Self::of(&text, libtorch, threads),
            Err(_) => {
                let features = CpuFeatures::detect();
                let (os, architecture) = (std::env::consts::OS, std::env::consts::ARCH);
                let name = format!("model name: {os} {architecture} {features:?}");
                Self::of(&name, libtorch, threads)
            }
        }
    }

    /// Returns the processor that the text of `/proc/cpuinfo` describes.
    #[must_use]
    pub fn of(cpuinfo: &str, libtorch: &str, threads: usize) -> Self {
        let version = libtorch.split('+').next().unwrap_or_default();
        let mut identity = format!("libtorch: {version}\nthreads: {threads}\n");
        // The first processor stands for all. Names alone do not tell processors of virtual machines apart, and
        // what changes by itself (the clock) must not count.
        let first = cpuinfo.lines().take_while(|line| !line.trim().is_empty());
        for (key, value) in first.filter_map(|line| line.split_once(':')) {
            let key = key.trim();
            if matches!(
                key,
                "vendor_id"
                    | "cpu family"
                    | "model"
                    | "model name"
                    | "stepping"
                    | "cache size"
                    | "flags"
                    | "CPU implementer"
                    | "CPU variant"
                    | "CPU part"
                    | "CPU revision"
                    | "Features"
            ) {
                let _ = writeln!(identity, "{key}: {}", value.trim());
            }
        }
        Self { identity }
    }

    /// Returns the file of `subject` (a file name without its end): `overdrive/measured/<subject>-….txt` in the
    /// user's cache. `None` if the environment has no home folder.
    #[must_use]
    pub fn file(&self, environment: &Environment, subject: &str) -> Option<PathBuf> {
        // FNV-1a. Two processors with one hash would only replace each other's figures.
        let hash = self
            .identity
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
        let name = format!("{subject}-{hash:016x}.txt");
        Some(cache::dir(environment)?.join("measured").join(name))
    }

    /// Returns the stored figures of `subject`; `None` if there are none, or the file is damaged or of another
    /// processor.
    #[must_use]
    pub fn read(&self, environment: &Environment, subject: &str) -> Option<Figures> {
        let text = fs::read_to_string(self.file(environment, subject)?).ok()?;
        let figures = text
            .strip_prefix(&self.header(subject))?
            .strip_suffix(&format!("{END}\n"))?;
        figures
            .lines()
            .map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                let value: f64 = value.parse().ok()?;
                value.is_finite().then(|| (name.to_owned(), value))
            })
            .collect()
    }

    /// Returns the stored figures of `subject`; if there are none, calls `measure` and stores its result.
    ///
    /// The first process that stores figures wins: the others return what it stored, so that processes that
    /// start together agree. `None` if nothing can be stored or `measure` returns `None`; `measure` is not
    /// called if the folder cannot be written.
    pub fn read_or_measure(
        &self,
        environment: &Environment,
        subject: &str,
        measure: impl FnOnce() -> Option<Figures>,
    ) -> Option<Figures> {
        if let Some(figures) = self.read(environment, subject) {
            return Some(figures);
        }
        let path = self.file(environment, subject)?;
        fs::create_dir_all(path.parent()?).ok()?;
        // A random name, and exclusive creation: the processes of two containers can have one id. A `RandomState`
        // is seeded by the operating system.
        let number = RandomState::new().build_hasher().finish();
        let draft = path.with_extension(format!("{number:016x}.tmp"));
        let mut file = fs::File::create_new(&draft).ok()?;
        let stored = measure().and_then(|figures| {
            let mut text = self.header(subject);
            for (name, value) in figures {
                let _ = writeln!(text, "{name} {value}");
            }
            text += END;
            text += "\n";
            file.write_all(text.as_bytes()).ok()?;
            file.sync_all().ok()?;
            // A link, because a rename would replace the figures of a process that was faster.
            let linked = fs::hard_link(&draft, &path).is_ok();
            if !linked && self.read(environment, subject).is_none() {
                // The file there is not valid, or the file system has no links.
                fs::rename(&draft, &path).ok()?;
            }
            self.read(environment, subject)
        });
        let _ = fs::remove_file(&draft);
        stored
    }

    fn header(&self, subject: &str) -> String {
        format!("{FORMAT}\nsubject: {subject}\n{}{BEGIN}\n", self.identity)
    }
}
