//! Device events, named ranges, the Kineto profiler, the memory of the process and the identity of a GPU.
//!
//! overdrive-profiling builds its public interface on these.

use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;

use tch::Device;

use crate::device::{device_index, device_type};
use crate::error::{Error, Result, check, take_string};
use crate::ffi;

/// An event in a stream of a device (`torch.cuda.Event`). Recording puts it behind the work that was
/// queued so far, and the device stores the time when it reaches the event. Only [`wait`](Self::wait)
/// blocks.
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
    /// Returns an event of `device` that is not recorded yet.
    ///
    /// # Errors
    /// [`Error::Torch`] if no back end for the device is loaded.
    pub fn new(device: Device) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: written only on success; owned by this value from then on.
        let status = unsafe { ffi::od_event_new(device_type(device), &raw mut raw) };
        check(status, "making a device event")?;
        Ok(Self { raw, device })
    }

    /// Records the event in the device's current stream. An event may be recorded again.
    ///
    /// # Errors
    /// [`Error::Torch`] for a device without events (a CPU), or one that does not exist.
    pub fn record(&mut self) -> Result<()> {
        // SAFETY: the event lives, and `&mut` says that nobody else uses it.
        let status = unsafe { ffi::od_event_record(self.raw, device_index(self.device)) };
        check(status, "recording a device event")
    }

    /// Returns `true` if the device has reached the event, or if it was never recorded. Does not block.
    ///
    /// # Errors
    /// [`Error::Torch`] with the error of the device's work.
    pub fn is_done(&self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the event lives; written only on success.
        let status = unsafe { ffi::od_event_query(self.raw, &raw mut done) };
        check(status, "querying a device event")?;
        Ok(done != 0)
    }

    /// Blocks until the device has reached the event.
    ///
    /// # Errors
    /// [`Error::Torch`] with the error of the device's work.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        let status = unsafe { ffi::od_event_wait(self.raw) };
        check(status, "waiting for a device event")
    }

    /// Returns the seconds of device time from `start` to this event, both of which must be done. CUDA has a
    /// resolution of half a microsecond.
    ///
    /// # Errors
    /// [`Error::Torch`] if one of them is not recorded or not done.
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

/// A named range of this thread's time, from [`Range::begin`] to its drop (`torch.profiler.record_function`).
/// Without a running profiler it costs about ten nanoseconds.
///
/// A range must be dropped on the thread that began it; overlapping ranges are nested:
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
    /// Begins a range.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
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

/// Marks operators and [`Range`]s as NVTX ranges until it is dropped, for Nsight Systems
/// (`torch.autograd.profiler.emit_nvtx`): those of the thread that started it, and of the threads that autograd
/// starts for that thread.
#[derive(Debug)]
#[must_use = "the marks end when this is dropped; bind it to a name such as `_nvtx`"]
pub struct NvtxRanges {
    not_send: PhantomData<*const ()>,
}

impl NvtxRanges {
    /// Starts marking. With `record_shapes` the marks of operators have the shapes of their inputs.
    ///
    /// # Errors
    /// [`Error::BadArgument`] while a profile is taken; [`Error::Torch`] if libtorch's CUDA libraries are not loaded.
    pub fn start(record_shapes: bool) -> Result<Self> {
        // SAFETY: takes no memory of ours.
        let status = unsafe { ffi::od_nvtx_start(record_shapes.into()) };
        check(status, "marking operators for NVTX")?;
        Ok(Self {
            not_send: PhantomData,
        })
    }
}

impl Drop for NvtxRanges {
    fn drop(&mut self) {
        // SAFETY: started on this thread (`!Send`), stopped here, once.
        unsafe { ffi::od_nvtx_stop() }
    }
}

/// The contents of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfilerOptions {
    /// If `true`, the profile contains the operators that the CPU calls, and the ranges.
    pub cpu: bool,
    /// If `true`, the profile contains the kernels and copies of a GPU.
    pub cuda: bool,
    /// If `true`, the profile contains the shapes of each operator's inputs.
    pub record_shapes: bool,
    /// If `true`, the profile contains every allocation and release.
    pub profile_memory: bool,
    /// If `true`, the profile contains the floating-point operations of matrix products and convolutions. It
    /// implies `record_shapes`.
    pub with_flops: bool,
}

/// A running profiler. A process can take one profile at a time: of the thread that started it, and of the threads
/// that autograd starts for that thread.
#[derive(Debug)]
#[must_use = "the profile is discarded when this is dropped; call `stop`"]
pub struct ProfilerSession {
    running: bool,
    cupti_error: Option<String>,
    not_send: PhantomData<*const ()>,
}

impl ProfilerSession {
    /// Starts the profiler.
    ///
    /// # Errors
    /// [`Error::BadArgument`] while another profile is taken; [`Error::Torch`] if libtorch was built without
    /// Kineto.
    pub fn start(options: ProfilerOptions) -> Result<Self> {
        let raw = ffi::RawProfilerOptions {
            cpu: options.cpu.into(),
            cuda: options.cuda.into(),
            // libtorch computes FLOPs from the recorded shapes.
            record_shapes: (options.record_shapes || options.with_flops).into(),
            profile_memory: options.profile_memory.into(),
            with_flops: options.with_flops.into(),
        };
        let mut cupti = ptr::null_mut();
        // SAFETY: `raw` is read before the call returns; the text is written only on success, and taken once.
        let cupti_error = unsafe {
            check(
                ffi::od_profiler_start(&raw const raw, &raw mut cupti),
                "starting the profiler",
            )?;
            take_string(cupti)
        };
        Ok(Self {
            running: true,
            cupti_error: Some(cupti_error).filter(|text| !text.is_empty()),
            not_send: PhantomData,
        })
    }

    /// Returns the error that CUPTI, NVIDIA's profiling library, had when the profiler was started, such as
    /// `CUPTI_ERROR_INSUFFICIENT_PRIVILEGES`. libtorch's profiler only logs it, and records no GPU work.
    pub fn cupti_error(&self) -> Option<&str> {
        self.cupti_error.as_deref()
    }

    /// Stops the profiler and returns the profile.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch throws.
    pub fn stop(mut self) -> Result<Profile> {
        self.running = false;
        stop()
    }
}

impl Drop for ProfilerSession {
    fn drop(&mut self) {
        if self.running {
            // A destructor cannot report an error.
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

/// The events that the profiler recorded.
#[derive(Debug)]
pub struct Profile {
    raw: *mut ffi::Profile,
}

/// An event of a profile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileEvent {
    /// The name of the operator, range or kernel; `[memory]` for an allocation or release.
    pub name: String,
    /// The shapes of its inputs, such as `[2, 3], [3, 4]`; empty if they were not recorded.
    pub shapes: String,
    /// The time of its begin, in nanoseconds since 1970.
    pub start_ns: u64,
    /// The time of its end, in nanoseconds since 1970.
    pub end_ns: u64,
    /// The thread on which it began, in libtorch's numbering.
    pub thread: u64,
    /// The thread on which it ended.
    pub end_thread: u64,
    /// The number that connects an operator with its kernels.
    pub correlation: u64,
    /// For a kernel: the `correlation` of its operator.
    pub linked_correlation: u64,
    /// The floating-point operations, if the profiler knows a formula for the operator; else 0.
    pub flops: u64,
    /// For `[memory]`: the bytes allocated, or released (negative).
    pub bytes: i64,
    /// The number that connects a forward operator with its backward; -1 for none.
    pub sequence: i64,
    /// `c10::DeviceType`: 0 for the CPU, 1 for CUDA.
    pub device_type: i32,
    /// The index of the device among those of its type.
    pub device_index: i32,
    /// `at::RecordScope`: 0 for an operator, 1 for a backward function, 7 for a range of the user.
    pub scope: i32,
    /// If `true`, the event may end on another thread, outside the nesting of its own.
    pub is_async: bool,
    /// If `true`, libtorch leaves the event out of its own tables.
    pub is_hidden: bool,
}

impl Profile {
    /// Returns all events in libtorch's order.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
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

    /// Returns the time when the profile began, in nanoseconds since 1970.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch throws.
    pub fn start_ns(&self) -> Result<u64> {
        let mut start = 0;
        // SAFETY: the profile lives; written only on success.
        let status = unsafe { ffi::od_profile_start_ns(self.raw, &raw mut start) };
        check(status, "reading a profile")?;
        Ok(start)
    }

    /// Writes Kineto's Chrome trace. It can be called once. Kineto does not report a file that it cannot
    /// write: check that the file exists.
    ///
    /// # Errors
    /// [`Error::Torch`] the second time; [`Error::BadArgument`] for a path that is not UTF-8 or contains
    /// a zero byte.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let text = path.to_str().and_then(|text| CString::new(text).ok());
        let text = text.ok_or_else(|| Error::BadArgument {
            operation: "writing a trace".to_owned(),
            message: format!(
                "the path {} is not UTF-8 without zero bytes",
                path.display()
            ),
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

/// The main memory of the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// The bytes of the resident set, including libraries and caches.
    pub resident_bytes: u64,
    /// The maximum of the resident set since the process started.
    pub peak_resident_bytes: u64,
}

/// Returns the main memory that the process uses.
///
/// # Errors
/// [`Error::Torch`] if the system does not report it.
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

/// The hardware behind a CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaIdentity {
    /// The name that the device reports, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The address on the PCI bus, by which other tools identify it, such as `0000:65:00.0`.
    pub pci_bus_id: String,
}

/// Returns the identity of CUDA device `index`, in the numbering of `CUDA_VISIBLE_DEVICES`, from the driver.
///
/// # Errors
/// [`Error::Torch`] if there is no driver or no such device.
pub fn cuda_identity(index: usize) -> Result<CudaIdentity> {
    let index = i32::try_from(index).unwrap_or(i32::MAX);
    let (mut name, mut pci_bus_id) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: both are written only on success, and then taken once.
    unsafe {
        check(
            ffi::od_cuda_identity(index, &raw mut name, &raw mut pci_bus_id),
            "identifying a CUDA device",
        )?;
        Ok(CudaIdentity {
            name: take_string(name),
            pci_bus_id: take_string(pci_bus_id),
        })
    }
}
