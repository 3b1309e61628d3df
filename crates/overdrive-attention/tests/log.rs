//! The log lines under `tracing`. A target of its own: a back end is logged once in a process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use overdrive_attention::{AttentionOptions, Backend, attention};
use tch::{Device, Kind, Tensor};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps the lines of this crate.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("overdrive_attention")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

#[test]
fn the_back_end_that_runs_is_said_once_for_each_kind_of_call() {
    let lines = Lines::default();
    let x = Tensor::ones([1, 1, 3, 4], (Kind::Float, Device::Cpu));
    let run = |backend| {
        let options = AttentionOptions {
            backend,
            ..AttentionOptions::default()
        };
        drop(attention(&x, &x, &x, &options).unwrap());
    };
    tracing::subscriber::with_default(lines.clone(), || {
        run(Backend::Auto);
        run(Backend::Auto);
        run(Backend::Flash);
    });
    let lines = lines.0.lock().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines[0].starts_with("DEBUG message=attention: blockwise on Cpu in Float: "),
        "{lines:?}"
    );
    assert!(
        lines[1].contains("flash on Cpu in Float: it was requested"),
        "{lines:?}"
    );
}
