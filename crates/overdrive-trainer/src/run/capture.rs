//! Forward and backward passes as CUDA graphs: which are captured, and why others are not.

use std::time::{Duration, Instant};

use overdrive_graphs::{BackwardGraphs, MicroBatchKey};
use overdrive_precision::Precision;
use overdrive_profiling::Phase;
use tch::{Cuda, Device, Tensor};

use super::micro_batch::MicroBatch;
use super::training_run::{TrainingRun, shared};
use crate::arguments::{CudaGraphs, TrainingArguments};
use crate::{Error, ProgramError, Result};

/// The number of equal micro-batches in a row before the next one is measured: the first passes load kernels and fill the
/// allocator's cache.
const WARM_UPS: u32 = 3;
/// The number of micro-batches that may differ from the one before them until `auto` gives up.
const MOST_CHANGES: u32 = 20;
/// The maximum number of graphs: those of a full micro-batch, of the last one of an epoch, and some more.
const MOST_GRAPHS: usize = 8;
/// The maximum number of kinds of micro-batches whose ids are remembered.
const MOST_CHECKED: usize = 64;
/// The share of the host in the time of a pass from which `auto` captures: below it, the GPU is busy most of the time
/// anyway.
const HOST_BOUND: f64 = 0.75;

/// The captured passes of a run.
#[derive(Debug)]
pub(super) struct Capture {
    /// The decision about the passes.
    state: State,
    /// The micro-batch before, and the number of its repetitions.
    last: Option<(MicroBatchKey, u32)>,
    /// The number of micro-batches that differed from the one before them.
    changes: u32,
    /// The ids that each captured pass has checked.
    checked: Vec<(MicroBatchKey, (i64, i64))>,
}

#[derive(Debug)]
enum State {
    /// No pass is captured.
    Off,
    /// No pass is captured; the reason is printed with the first one.
    Refused(&'static str),
    /// The passes are launched until one has been measured.
    Measuring,
    /// The passes are captured.
    On(Option<BackwardGraphs>),
}

/// A way to run the next pass.
#[derive(Debug)]
enum Pass {
    /// Every operator is launched.
    Launched,
    /// Launched and measured.
    Measured,
    /// By the graph of this key, with these inputs.
    Captured(MicroBatchKey, Vec<Tensor>),
}

impl Capture {
    pub(super) fn of(
        arguments: &TrainingArguments,
        processes: usize,
        precision: Precision,
        device: Device,
    ) -> Self {
        let always = arguments.cuda_graphs == CudaGraphs::Always;
        #[rustfmt::skip]
        let refused = [
            (!device.is_cuda() && !always, "the run is not on a CUDA device"),
            (processes > 1, "gradients are reduced over several processes while backward runs"),
            (precision == Precision::Fp16, "`fp16` needs a loss scaler; train with `bf16`"),
            (arguments.gradient_checkpointing, "`gradient_checkpointing` saves and restores random states"),
        ];
        let refused = refused
            .into_iter()
            .find_map(|(holds, reason)| holds.then_some(reason));
        let state = match (arguments.cuda_graphs, refused) {
            (CudaGraphs::Never, _) => State::Off,
            (_, Some(reason)) => State::Refused(reason),
            (CudaGraphs::Auto, None) => State::Measuring,
            (CudaGraphs::Always, None) => State::On(None),
        };
        Self {
            state,
            last: None,
            changes: 0,
            checked: Vec::new(),
        }
    }

    /// Decides about the pass of a micro-batch.
    fn choose<B: MicroBatch>(&mut self, batch: &B) -> Pass {
        if matches!(self.state, State::Off | State::Refused(_)) {
            return Pass::Launched;
        }
        let Some(inputs) = batch.static_inputs() else {
            self.state = State::Refused(
                "the micro-batches have numbers on the host, such as the lengths of packed sequences",
            );
            return Pass::Launched;
        };
        let labels = batch.label_count().map(|count| count as i64);
        let key = MicroBatchKey::new::<B>(&inputs.tensors, labels.as_slice());
        let repeats = match self.last.take() {
            Some((last, repeats)) if last == key => repeats + 1,
            Some(_) => {
                self.changes += 1;
                0
            }
            None => 0,
        };
        self.last = Some((key.clone(), repeats));
        match &mut self.state {
            State::On(graphs) => {
                let has_room = graphs
                    .as_mut()
                    .is_none_or(|graphs| graphs.contains(&key) || graphs.len() < MOST_GRAPHS);
                match has_room && self.covers(&key, inputs.id_range) {
                    true => Pass::Captured(key, inputs.tensors),
                    false => Pass::Launched,
                }
            }
            _ if repeats >= WARM_UPS => Pass::Measured,
            _ if self.changes > MOST_CHANGES => {
                self.state =
                    State::Refused("the shapes or the label counts of the micro-batches vary");
                Pass::Launched
            }
            _ => Pass::Launched,
        }
    }

    /// Returns `true` if the program has checked ids of this range in a pass of this key. The pass of new ids is launched, by
    /// which it checks them.
    fn covers(&mut self, key: &MicroBatchKey, ids: Option<(i64, i64)>) -> bool {
        let Some((least, most)) = ids else {
            return true;
        };
        match self.checked.iter_mut().find(|(known, _)| known == key) {
            Some((_, (from, to))) => {
                let covered = *from <= least && most <= *to;
                (*from, *to) = ((*from).min(least), (*to).max(most));
                covered
            }
            None => {
                if self.checked.len() < MOST_CHECKED {
                    self.checked.push((key.clone(), (least, most)));
                }
                false
            }
        }
    }

    /// Decides by the times of a pass: of the host alone, and with the device. Returns a line for the log.
    fn judge(&mut self, host: Duration, whole: Duration) -> Option<String> {
        let share = host.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let (host, whole) = (host.as_secs_f64() * 1e3, whole.as_secs_f64() * 1e3);
        if share >= HOST_BOUND {
            self.state = State::On(None);
            return None;
        }
        self.state = State::Off;
        Some(format!(
            "cuda graphs not used: the GPU is the limit (a pass takes {whole:.1} ms, the host {host:.1} ms)"
        ))
    }
}

impl TrainingRun {
    /// Runs the forward and backward pass of the next micro-batch: [`forward`](Self::forward) with the program's `loss`, and
    /// [`backward`](Self::backward) from its result. With the key `cuda_graphs`, passes of equal micro-batches are captured
    /// in a CUDA graph and replayed; a line of the log says so, or why not.
    ///
    /// `loss` must compute the same for each micro-batch of the same [`static_inputs`](MicroBatch::static_inputs) and read
    /// what differs from its argument, because in a replay it does not run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`backward`](Self::backward).
    pub fn forward_backward<B: MicroBatch, E: Into<ProgramError>>(
        &mut self,
        batch: B,
        mut loss: impl FnMut(&B) -> std::result::Result<Tensor, E>,
    ) -> Result<()> {
        let pass = self.capture.choose(&batch);
        if let State::Refused(reason) = self.capture.state {
            self.capture.state = State::Off;
            self.log.say(&format!("cuda graphs not used: {reason}"));
        }
        match pass {
            Pass::Launched => self.launch(&batch, loss),
            Pass::Measured => {
                synchronize(self.device);
                let begun = Instant::now();
                self.launch(&batch, loss)?;
                let host = begun.elapsed();
                synchronize(self.device);
                if let Some(line) = self.capture.judge(host, begun.elapsed()) {
                    self.log.say(&line);
                }
                Ok(())
            }
            Pass::Captured(key, inputs) => {
                let (precision, device) = (self.precision, self.device);
                let mut loss = |batch: &B| -> std::result::Result<Tensor, ProgramError> {
                    let _autocast = precision.autocast(device)?;
                    loss(batch).map_err(Into::into)
                };
                self.replay(&key, batch, &inputs, &mut loss)
            }
        }
    }

    /// Launches every operator of a pass.
    fn launch<B, E: Into<ProgramError>>(
        &mut self,
        batch: &B,
        mut loss: impl FnMut(&B) -> std::result::Result<Tensor, E>,
    ) -> Result<()> {
        let loss = self.forward(|| loss(batch))?;
        self.backward(&loss)
    }

    /// Captures the pass of a micro-batch unless it is captured, and replays it. If the capture fails, which ends all captures,
    /// the pass is launched.
    fn replay<B: MicroBatch>(
        &mut self,
        key: &MicroBatchKey,
        batch: B,
        inputs: &[Tensor],
        loss: &mut impl FnMut(&B) -> std::result::Result<Tensor, ProgramError>,
    ) -> Result<()> {
        let State::On(graphs) = &mut self.capture.state else {
            return self.launch(&batch, loss);
        };
        let graphs = match graphs {
            Some(graphs) => graphs,
            None => {
                let parameters = shared(&self.parameters).into_iter().map(|(_, one)| one);
                graphs.insert(BackwardGraphs::new(parameters.collect())?)
            }
        };
        if !graphs.contains(key) {
            if let Err((error, batch)) = graphs.capture(key.clone(), batch, inputs, &mut *loss) {
                self.capture.state = State::Off;
                self.log.say(&format!("cuda graphs not used: {error}"));
                return self.launch(&batch, loss);
            }
            let (count, mib) = (graphs.len(), graphs.bytes().div_ceil(1 << 20));
            self.log.say(&match self.device.is_cuda() {
                true => format!(
                    "cuda graphs {count} captured: forward and backward of a micro-batch ({mib} MiB)"
                ),
                false => format!(
                    "cuda graphs none on {:?}: passes run on the tensors that a graph would have",
                    self.device
                ),
            });
        }
        let accumulator = &mut self.accumulator;
        // The graph does not divide the phases.
        self.log.recorder.phase(Phase::Backward, || {
            accumulator.backward_by(|factor| {
                let replayed = graphs.replay(key, inputs, factor, loss);
                replayed.map_err(|error| match error {
                    overdrive_graphs::Error::Work { source } => Error::of_program(source),
                    error => error.into(),
                })
            })
        })
    }
}

/// Waits for a GPU.
fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use overdrive_datasets::{RowLayout, TokenizedExample, collate};
    use tch::Kind;

    use super::*;

    const GPU: Device = Device::Cuda(0);

    fn capture(cuda_graphs: CudaGraphs, change: impl FnOnce(&mut TrainingArguments)) -> Capture {
        let mut arguments = TrainingArguments {
            cuda_graphs,
            ..TrainingArguments::default()
        };
        change(&mut arguments);
        Capture::of(&arguments, 1, arguments.precision(), GPU)
    }

    /// Returns how the pass of `rows` rows runs.
    fn next(capture: &mut Capture, rows: i64) -> &'static str {
        let batch = Tensor::zeros([rows, 2], (Kind::Float, Device::Cpu));
        name(&capture.choose(&batch))
    }

    fn name(pass: &Pass) -> &'static str {
        match pass {
            Pass::Launched => "launched",
            Pass::Measured => "measured",
            Pass::Captured(..) => "captured",
        }
    }

    fn reason(capture: &Capture) -> &'static str {
        match capture.state {
            State::Refused(reason) => reason,
            _ => "",
        }
    }

    #[test]
    fn a_run_that_cannot_capture_says_why() {
        use CudaGraphs::{Always, Auto, Never};
        for (choice, bf16, fp16, recomputes, processes, device, expected) in [
            (Never, false, true, true, 2, Device::Cpu, ""),
            (
                Auto,
                false,
                false,
                false,
                1,
                Device::Cpu,
                "not on a CUDA device",
            ),
            (Always, false, false, false, 1, Device::Cpu, ""),
            (Auto, true, false, false, 1, GPU, ""),
            (Auto, true, false, false, 2, GPU, "several processes"),
            (Auto, false, true, false, 1, GPU, "loss scaler"),
            (
                Always,
                true,
                false,
                true,
                1,
                GPU,
                "`gradient_checkpointing`",
            ),
        ] {
            let arguments = TrainingArguments {
                cuda_graphs: choice,
                bf16,
                fp16,
                gradient_checkpointing: recomputes,
                ..TrainingArguments::default()
            };
            let found = Capture::of(&arguments, processes, arguments.precision(), device);
            let found = reason(&found);
            assert_eq!(found.is_empty(), expected.is_empty(), "{found}");
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn equal_passes_are_measured_after_some_of_them() {
        let mut auto = capture(CudaGraphs::Auto, |_| {});
        for rows in [4, 4, 4, 3, 4, 4, 4] {
            assert_eq!(next(&mut auto, rows), "launched");
        }
        assert_eq!(next(&mut auto, 4), "measured");
        let ms = Duration::from_millis;
        let line = auto.judge(ms(50), ms(210)).unwrap();
        let expected =
            "cuda graphs not used: the GPU is the limit (a pass takes 210.0 ms, the host 50.0 ms)";
        assert_eq!(line, expected);
        assert!(matches!(auto.state, State::Off));
        assert_eq!(next(&mut auto, 4), "launched");

        let mut auto = capture(CudaGraphs::Auto, |_| {});
        assert_eq!(auto.judge(ms(9), ms(10)), None);
        assert_eq!(next(&mut auto, 4), "captured");
    }

    #[test]
    fn passes_that_vary_are_not_captured() {
        let mut auto = capture(CudaGraphs::Auto, |_| {});
        let changes = 0..=i64::from(MOST_CHANGES);
        for rows in changes {
            assert_eq!(next(&mut auto, 1 + rows % 2), "launched");
        }
        assert_eq!(next(&mut auto, 5), "launched");
        assert!(reason(&auto).contains("vary"), "{}", reason(&auto));
        assert_eq!(next(&mut auto, 5), "launched");
    }

    fn batch(ids: &[i64]) -> overdrive_datasets::Batch {
        // The padding token counts as an id.
        let layout = RowLayout::Padded {
            pad_token: 6,
            multiple_of: 1,
        };
        collate(&[TokenizedExample::from(ids.to_vec())], layout).unwrap()
    }

    #[test]
    fn ids_that_no_pass_has_checked_are_launched() {
        let mut always = capture(CudaGraphs::Always, |_| {});
        let mut pass = |ids: &[i64]| name(&always.choose(&batch(ids)));
        assert_eq!(pass(&[5, 9, 7]), "launched");
        assert_eq!(pass(&[5, 6, 7]), "captured");
        assert_eq!(pass(&[5, 10, 7]), "launched");
        assert_eq!(pass(&[6, 10, 7]), "captured");
    }
}
