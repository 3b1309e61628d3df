//! Asynchronous copies of each step's overflow flag and scale to the host.

use std::collections::VecDeque;

use overdrive_sys::op::{self, Value};
use overdrive_sys::profiler::DeviceEvent;
use overdrive_sys::raw::host_value;
use overdrive_sys::transfer::empty_pinned;
use tch::{Device, Kind, Tensor};

use crate::{CollapseThresholds, Result, ScaleWarning, ScalerStatistics};

// Samples on a device without events (MPS). Reading one waits for the device, so it happens once in 64 steps, when
// the oldest has surely been computed.
const MAX_UNREAD: usize = 64;

/// The statistics of a scaler and the samples that have not been counted yet.
#[derive(Debug)]
pub(crate) struct ScaleMonitor {
    statistics: ScalerStatistics,
    pub(crate) thresholds: CollapseThresholds,
    warned: bool,
    pending: VecDeque<Sample>,
    /// Host buffers and events that were read. They are reused: pinning memory stops the device.
    free: Vec<(Tensor, DeviceEvent)>,
}

/// The flag and the scale of one step, two fp32 elements.
#[derive(Debug)]
enum Sample {
    /// A copy in pinned memory, complete when the device has passed the event.
    Copying(Tensor, DeviceEvent),
    /// A tensor on a device without events.
    OnDevice(Tensor),
}

impl ScaleMonitor {
    pub(crate) fn new(scale: f64) -> Self {
        Self {
            statistics: ScalerStatistics::new(scale),
            thresholds: CollapseThresholds::default(),
            warned: false,
            pending: VecDeque::new(),
            free: Vec::new(),
        }
    }

    pub(crate) fn statistics(&self) -> &ScalerStatistics {
        &self.statistics
    }

    pub(crate) fn collapse_warning(&self) -> Option<ScaleWarning> {
        self.statistics.collapse_warning(&self.thresholds)
    }

    /// Drops the pending samples and records the scale of a loaded state.
    pub(crate) fn restart_at(&mut self, scale: f64) {
        // The samples are of steps before the state that was loaded.
        self.pending.clear();
        self.statistics.set_scale(scale);
    }

    /// Replaces the statistics.
    pub(crate) fn resume(&mut self, statistics: ScalerStatistics) {
        self.pending.clear();
        self.statistics = statistics;
    }

    /// Records a step's flag and the scale after it, tensors of one element, and counts the previous steps whose
    /// samples have arrived.
    pub(crate) fn observe(&mut self, found_inf: &Tensor, scale: &Tensor) -> Result<()> {
        // On a CPU a value can be read without waiting, and without an operator.
        if let (Some(found_inf), Some(scale)) = (host_value(found_inf), host_value(scale)) {
            self.count(found_inf != 0.0, scale);
            return Ok(());
        }
        // The scale changes in place in the next step: the stack is a copy.
        let sample = Tensor::f_stack(&[found_inf, scale], 0)?;
        let sample = match scale.device() {
            Device::Cuda(_) => self.send(&sample)?,
            _ => Sample::OnDevice(sample),
        };
        self.pending.push_back(sample);
        self.receive(false)
    }

    /// Waits for every sample.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.receive(true)
    }

    fn send(&mut self, sample: &Tensor) -> Result<Sample> {
        let (host, mut event) = match self.free.pop() {
            Some(pair) => pair,
            // Only a copy to pinned memory is asynchronous.
            None => (
                empty_pinned(&[2], Kind::Float)?,
                DeviceEvent::new(sample.device())?,
            ),
        };
        let non_blocking = Value::Bool(true);
        let arguments = [Value::Tensor(&host), Value::Tensor(sample), non_blocking];
        op::call("aten::copy_", "", &arguments)?;
        event.record()?;
        Ok(Sample::Copying(host, event))
    }

    fn receive(&mut self, wait: bool) -> Result<()> {
        while let Some(sample) = self.pending.pop_front() {
            let ready = match &sample {
                Sample::Copying(_, event) => {
                    if wait {
                        event.wait()?;
                    }
                    wait || event.is_done()?
                }
                Sample::OnDevice(_) => wait || self.pending.len() >= MAX_UNREAD,
            };
            if !ready {
                self.pending.push_front(sample);
                break;
            }
            let (Sample::Copying(values, _) | Sample::OnDevice(values)) = &sample;
            let (found_inf, scale) = (values.f_double_value(&[0])?, values.f_double_value(&[1])?);
            self.count(found_inf != 0.0, scale);
            if let Sample::Copying(host, event) = sample {
                self.free.push((host, event));
            }
        }
        Ok(())
    }

    fn count(&mut self, overflowed: bool, scale: f64) {
        self.statistics.record(overflowed, scale);
        // Once: a collapse lasts, and a warning in each step would fill the log.
        if !self.warned
            && let Some(warning) = self.collapse_warning()
        {
            self.warned = true;
            tracing::warn!(
                step = warning.step,
                scale = warning.scale,
                consecutive_skips = warning.consecutive_skips,
                "{warning}"
            );
        }
    }
}
