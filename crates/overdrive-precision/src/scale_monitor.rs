//! Brings each step's overflow flag and scale to the host without making the host wait.

use std::collections::VecDeque;

use overdrive_sys::op::{self, Value};
use overdrive_sys::profiler::DeviceEvent;
use tch::{Device, Kind, Tensor};

use crate::{CollapseThresholds, Result, ScaleWarning, ScalerStatistics};

/// Samples that may wait on a device without events before the host reads them, and waits.
const MOST_UNREAD: usize = 64;

/// The statistics of a scaler and the samples on their way into them.
#[derive(Debug)]
pub(crate) struct ScaleMonitor {
    statistics: ScalerStatistics,
    pub(crate) thresholds: CollapseThresholds,
    warned: bool,
    arriving: VecDeque<Sample>,
    /// Host buffers and events that were read, for the next samples.
    free: Vec<(Tensor, DeviceEvent)>,
}

/// Flag and scale of one step, two floats.
#[derive(Debug)]
enum Sample {
    /// Copied to pinned memory behind the event.
    Arriving(Tensor, DeviceEvent),
    /// Left where it is: the device has no events.
    OnDevice(Tensor),
}

impl ScaleMonitor {
    pub(crate) fn new(scale: f64) -> Self {
        Self {
            statistics: ScalerStatistics::new(scale),
            thresholds: CollapseThresholds::default(),
            warned: false,
            arriving: VecDeque::new(),
            free: Vec::new(),
        }
    }

    pub(crate) fn statistics(&self) -> &ScalerStatistics {
        &self.statistics
    }

    pub(crate) fn trouble(&self) -> Option<ScaleWarning> {
        self.statistics.trouble(&self.thresholds)
    }

    /// Forgets what is on its way and notes the scale of a loaded state.
    pub(crate) fn restart_at(&mut self, scale: f64) {
        self.arriving.clear();
        self.statistics.set_scale(scale);
    }

    /// Puts other statistics in the place of these.
    pub(crate) fn resume(&mut self, statistics: ScalerStatistics) {
        self.arriving.clear();
        self.statistics = statistics;
    }

    /// Takes a step's flag and the scale after it, tensors of one element, and counts the steps
    /// before it whose samples have arrived. On a CPU there is nothing to wait for.
    pub(crate) fn observe(&mut self, found_inf: &Tensor, scale: &Tensor) -> Result<()> {
        if scale.device() == Device::Cpu {
            let overflowed = found_inf.f_double_value(&[])? != 0.0;
            self.count(overflowed, scale.f_double_value(&[])?);
            return Ok(());
        }
        // The scale changes in place: the stack is a copy of this step's.
        let sample = Tensor::f_stack(&[found_inf, scale], 0)?;
        let sample = match scale.device() {
            Device::Cuda(_) => self.send(&sample)?,
            _ => Sample::OnDevice(sample),
        };
        self.arriving.push_back(sample);
        self.receive(false)
    }

    /// Waits for every sample.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.receive(true)
    }

    fn send(&mut self, sample: &Tensor) -> Result<Sample> {
        let (host, mut event) = match self.free.pop() {
            Some(pair) => pair,
            None => {
                let plain = Tensor::f_empty([2], (Kind::Float, Device::Cpu))?;
                let pinned = op::call("aten::pin_memory", "", &[Value::Tensor(&plain)])?;
                let pinned = pinned
                    .into_iter()
                    .next()
                    .map_or(Ok(plain), op::Output::into_tensor)?;
                (pinned, DeviceEvent::new(sample.device())?)
            }
        };
        let without_waiting = Value::Bool(true);
        let arguments = [Value::Tensor(&host), Value::Tensor(sample), without_waiting];
        op::call("aten::copy_", "", &arguments)?;
        event.record()?;
        Ok(Sample::Arriving(host, event))
    }

    fn receive(&mut self, wait: bool) -> Result<()> {
        while let Some(sample) = self.arriving.pop_front() {
            let ready = match &sample {
                Sample::Arriving(_, event) => {
                    if wait {
                        event.wait()?;
                    }
                    wait || event.is_done()?
                }
                Sample::OnDevice(_) => wait || self.arriving.len() >= MOST_UNREAD,
            };
            if !ready {
                self.arriving.push_front(sample);
                break;
            }
            let (Sample::Arriving(values, _) | Sample::OnDevice(values)) = &sample;
            let (found_inf, scale) = (values.f_double_value(&[0])?, values.f_double_value(&[1])?);
            self.count(found_inf != 0.0, scale);
            if let Sample::Arriving(host, event) = sample {
                self.free.push((host, event));
            }
        }
        Ok(())
    }

    fn count(&mut self, overflowed: bool, scale: f64) {
        self.statistics.record(overflowed, scale);
        if !self.warned
            && let Some(warning) = self.trouble()
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
