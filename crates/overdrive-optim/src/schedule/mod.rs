//! Learning-rate schedules, equal to those of transformers.

mod curve;
mod kind;
mod options;
mod scheduler;
mod warmup;

pub use curve::Schedule;
pub use kind::{LrSchedulerType, RampType};
pub use options::{ScheduleLength, ScheduleOptions};
pub use scheduler::{LrScheduler, LrSchedulerState};
pub use warmup::Warmup;
