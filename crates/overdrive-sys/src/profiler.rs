//! What measuring needs from libtorch: device events, named ranges, the Kineto profiler, and the
//! memory of the process.
//!
//! overdrive-profiling is made of these and is what to use.

use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;

use tch::Device;

use crate::device::{device_index, device_type};
use crate::error::{Error, Result, check, take_string};
use crate::ffi;

/// A mark in the work of a device: recording it queues it behind what was asked of the device so
/// far, and it notes the time when the device gets there. Nothing here waits except
/// [`wait`](Self::wait).
///
/// CUDA has events; a CPU has none, because its work is done when a call returns.
#[derive(Debug)]
pub struct DeviceEvent {
    raw: *mut ffi::Event,
    device: Device,
}

// SAFETY: `c10::Event` names no thread; it must only not be used by two at once, which `!Sync` (a raw
// pointer) keeps from happening.
unsafe impl Send for DeviceEvent {}

impl DeviceEvent {
    /// An event of `device` that is not recorded yet.
    ///
    /// # Errors
    /// [`Error::Torch`] where no back end for the device is loaded.
    pub fn new(device: Device) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: written only on success; owned by this value from then on.
        let status = unsafe { ffi::od_event_new(device_type(device), &raw mut raw) };
        check(status, "making a device event")?;
        Ok(Self { raw, device })
    }

    /// Puts it behind the work of the device's present stream; again, if it was recorded before.
    ///
    /// # Errors
    /// [`Error::Torch`] for a device that has no events (a CPU), or one that is not there.
    pub fn record(&mut self) -> Result<()> {
        // SAFETY: the event lives, and `&mut` says that nobody else uses it.
        let status = unsafe { ffi::od_event_record(self.raw, device_index(self.device)) };
        check(status, "recording a device event")
    }

    /// Whether the device got there. Does not wait; true for one that was never recorded.
    ///
    /// # Errors
    /// What the device's work failed with.
    pub fn is_done(&self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the event lives; written only on success.
        let status = unsafe { ffi::od_event_query(self.raw, &raw mut done) };
        check(status, "asking for a device event")?;
        Ok(done != 0)
    }

    /// Waits until the device got there.
    ///
    /// # Errors
    /// What the device's work failed with.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        let status = unsafe { ffi::od_event_wait(self.raw) };
        check(status, "waiting for a device event")
    }

    /// Seconds of device time from `start` to this event; both are recorded and done. CUDA counts in
    /// half microseconds.
    ///
    /// # Errors
    /// [`Error::Torch`] where one is not recorded or not done.
    pub fn seconds_since(&self, start: &Self) -> Result<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; written only on success.
        let status = unsafe { ffi::od_event_elapsed(start.raw, self.raw, &raw mut milliseconds) };
        check(status, "reading the time between device events")?;
        Ok(milliseconds * 1e-3)
    }
}

impl Drop for DeviceEvent {
    fn drop(&mut self) {
        // SAFETY: made by `od_event_new`, freed here, once.
        unsafe { ffi::od_event_free(self.raw) }
    }
}

/// A named range of this thread's time, from [`Range::begin`] to its drop
/// (`torch.profiler.record_function`). Where no profiler runs it costs about ten nanoseconds.
///
/// Ranges belong to their thread, and ones that overlap are nested:
///
/// ```compile_fail
/// let range = overdrive_sys::profiler::Range::begin("forward").unwrap();
/// std::thread::spawn(move || drop(range));
/// ```
#[derive(Debug)]
#[must_use = "the range ends when it is dropped; bind it to a name such as `_range`"]
pub struct Range {
    raw: *mut ffi::Range,
    not_send: PhantomData<*const ()>,
}

impl Range {
    /// Begins it.
    ///
    /// # Errors
    /// Only if memory runs out.
    pub fn begin(name: &str) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the name is copied before the call returns; `raw` is written only on success.
        let status = unsafe { ffi::od_range_begin(name.as_ptr().cast(), name.len(), &raw mut raw) };
        check(status, "beginning a range")?;
        Ok(Self {
            raw,
            not_send: PhantomData,
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: made by `od_range_begin` on this thread (`!Send`), ended here, once; null is
        // allowed.
        unsafe { ffi::od_range_end(self.raw) }
    }
}

/// What a profile holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfilerOptions {
    /// The operators that the CPU calls, and the ranges.
    pub cpu: bool,
    /// The kernels and copies of a GPU.
    pub cuda: bool,
    /// The shapes of each operator's inputs.
    pub record_shapes: bool,
    /// Every allocation and release.
    pub profile_memory: bool,
    /// The floating-point operations of products and convolutions; needs `record_shapes`, which it
    /// switches on.
    pub with_flops: bool,
}

/// libtorch's profiler while it runs. A process takes one profile at a time, on the thread that
/// started it and those that autograd starts for it.
#[derive(Debug)]
#[must_use = "the profile is thrown away when this is dropped; call `stop`"]
pub struct ProfilerSession {
    running: bool,
    not_send: PhantomData<*const ()>,
}

impl ProfilerSession {
    /// Starts it.
    ///
    /// # Errors
    /// [`Error::BadArgument`] while another one runs; [`Error::Torch`] where libtorch was built
    /// without Kineto.
    pub fn start(options: ProfilerOptions) -> Result<Self> {
        let raw = ffi::RawProfilerOptions {
            cpu: options.cpu.into(),
            cuda: options.cuda.into(),
            record_shapes: (options.record_shapes || options.with_flops).into(),
            profile_memory: options.profile_memory.into(),
            with_flops: options.with_flops.into(),
        };
        // SAFETY: `raw` is read before the call returns.
        let status = unsafe { ffi::od_profiler_start(&raw const raw) };
        check(status, "starting the profiler")?;
        Ok(Self {
            running: true,
            not_send: PhantomData,
        })
    }

    /// Stops it and returns what it saw.
    ///
    /// # Errors
    /// What libtorch refuses.
    pub fn stop(mut self) -> Result<Profile> {
        self.running = false;
        stop()
    }
}

impl Drop for ProfilerSession {
    fn drop(&mut self) {
        if self.running {
            // A destructor has nobody to report to.
            let _ = stop();
        }
    }
}

fn stop() -> Result<Profile> {
    let mut raw = ptr::null_mut();
    // SAFETY: written only on success; owned by the profile from then on.
    let status = unsafe { ffi::od_profiler_stop(&raw mut raw) };
    check(status, "stopping the profiler")?;
    Ok(Profile { raw })
}

/// What the profiler saw.
#[derive(Debug)]
pub struct Profile {
    raw: *mut ffi::Profile,
}

/// One thing that happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileEvent {
    /// The operator, range or kernel; `[memory]` for an allocation or release.
    pub name: String,
    /// The shapes of its inputs, as `[2, 3], [3, 4]`; empty where they were not recorded.
    pub shapes: String,
    /// When it began, in nanoseconds since 1970.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The thread it began on, numbered by libtorch.
    pub thread: u64,
    /// The thread it ended on.
    pub end_thread: u64,
    /// Ties an operator to its kernels.
    pub correlation: u64,
    /// For a kernel: the operator's `correlation`.
    pub linked_correlation: u64,
    /// Floating-point operations, where the profiler knows a formula.
    pub flops: u64,
    /// For `[memory]`: bytes allocated, or released (negative).
    pub bytes: i64,
    /// Ties a forward operator to its backward one; -1 for none.
    pub sequence: i64,
    /// `c10::DeviceType`: 0 for the CPU, 1 for CUDA.
    pub device_type: i32,
    /// The device among those of its type.
    pub device_index: i32,
    /// `at::RecordScope`: 0 an operator, 1 a backward function, 7 a range of the user's.
    pub scope: i32,
    /// Whether it ends apart from the order of its thread.
    pub is_async: bool,
    /// Whether libtorch keeps it out of its own tables.
    pub is_hidden: bool,
}

impl Profile {
    /// Everything that happened, in libtorch's order.
    ///
    /// # Errors
    /// Only if memory runs out.
    pub fn events(&self) -> Result<Vec<ProfileEvent>> {
        // SAFETY: the profile lives.
        let len = unsafe { ffi::od_profile_len(self.raw) };
        (0..len).map(|index| self.event(index)).collect()
    }

    fn event(&self, index: usize) -> Result<ProfileEvent> {
        let mut raw = ffi::RawProfileEntry::default();
        // SAFETY: the profile lives; written only on success.
        let status = unsafe { ffi::od_profile_event(self.raw, index, &raw mut raw) };
        check(status, "reading a profile")?;
        Ok(ProfileEvent {
            // SAFETY: both strings end in a zero and live as long as the profile, which `self`
            // borrows.
            name: unsafe { borrowed(raw.name) },
            // SAFETY: as above.
            shapes: unsafe { borrowed(raw.shapes) },
            start_ns: raw.start_ns,
            end_ns: raw.end_ns,
            thread: raw.thread,
            end_thread: raw.end_thread,
            correlation: raw.correlation,
            linked_correlation: raw.linked_correlation,
            flops: raw.flops,
            bytes: raw.bytes,
            sequence: raw.sequence,
            device_type: raw.device_type,
            device_index: raw.device_index,
            scope: raw.scope,
            is_async: raw.is_async != 0,
            is_hidden: raw.is_hidden != 0,
        })
    }

    /// When the profile began, in nanoseconds since 1970.
    ///
    /// # Errors
    /// Only if libtorch throws.
    pub fn start_ns(&self) -> Result<u64> {
        let mut start = 0;
        // SAFETY: the profile lives; written only on success.
        let status = unsafe { ffi::od_profile_start_ns(self.raw, &raw mut start) };
        check(status, "reading a profile")?;
        Ok(start)
    }

    /// Writes the Chrome trace as Kineto makes it. Works once, and says nothing where the file
    /// cannot be written: look whether it is there.
    ///
    /// # Errors
    /// [`Error::Torch`] the second time; [`Error::BadArgument`] for a path with a zero byte or that
    /// is not UTF-8.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let text = path.to_str().and_then(|text| CString::new(text).ok());
        let text = text.ok_or_else(|| Error::BadArgument {
            operation: "writing a trace".to_owned(),
            message: format!("the path {} is not UTF-8 without zeros", path.display()),
        })?;
        // SAFETY: the profile lives and is not shared; the path is a C string.
        let status = unsafe { ffi::od_profile_save(self.raw, text.as_ptr()) };
        check(status, "writing a trace")
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // SAFETY: made by `od_profiler_stop`, freed here, once.
        unsafe { ffi::od_profile_free(self.raw) }
    }
}

/// # Safety
/// `text` is a C string that lives through the call.
unsafe fn borrowed(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Bytes of the process in main memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// Now: the resident set, libraries and caches included.
    pub resident_bytes: u64,
    /// The most there was since the process began.
    pub peak_resident_bytes: u64,
}

/// How much main memory the process takes.
///
/// # Errors
/// [`Error::Torch`] where the system does not tell.
pub fn process_memory() -> Result<ProcessMemory> {
    let (mut resident, mut peak) = (0, 0);
    // SAFETY: both are written only on success.
    let status = unsafe { ffi::od_process_memory(&raw mut resident, &raw mut peak) };
    check(status, "reading the memory of the process")?;
    Ok(ProcessMemory {
        resident_bytes: resident,
        peak_resident_bytes: peak,
    })
}

/// Which piece of hardware a CUDA device is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaIdentity {
    /// As it names itself: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Where it sits, which other tools know it by: `0000:65:00.0`.
    pub pci_bus_id: String,
}

/// Asks the CUDA driver which GPU device `index` is, as `CUDA_VISIBLE_DEVICES` numbers them.
///
/// # Errors
/// [`Error::Torch`] without a driver or such a device.
pub fn cuda_identity(index: usize) -> Result<CudaIdentity> {
    let index = i32::try_from(index).unwrap_or(i32::MAX);
    let (mut name, mut pci_bus_id) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: both are written only on success, and then taken once.
    unsafe {
        check(
            ffi::od_cuda_identity(index, &raw mut name, &raw mut pci_bus_id),
            "asking which GPU this is",
        )?;
        Ok(CudaIdentity {
            name: take_string(name),
            pci_bus_id: take_string(pci_bus_id),
        })
    }
}
