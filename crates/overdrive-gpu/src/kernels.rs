//! The kernels of one GPU: looked up in the table, loaded once, launched with arguments that are checked by name.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fmt::Debug;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use overdrive_core::Error as Common;
use overdrive_sys::raw::data_address;
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};
use tracing::{debug, info, warn};

use crate::counters::Counters;
use crate::delta_rule::UploadedPlan;
use crate::driver::{Context, Driver, Function, Grid, Value};
use crate::embedded::{Image, Variant, images, table, target_for};
use crate::error::{Error, Result, embedded};
use crate::few_bits::Book;
use crate::verified::{is_kernel_used, is_used, report_of};

const VARIABLE: &str = "OVERDRIVE_GPU_KERNELS";
const DRIVER: &str = "libcuda.so.1";
/// The alignment in bytes that the kernels are compiled for, as loads of 16 bytes need it.
const ALIGNMENT: usize = 16;

/// The kernels of one GPU.
pub struct Kernels {
    context: Context,
    device: Device,
    target: &'static str,
    images: Vec<u8>,
    loaded: Mutex<HashMap<Request, Option<Loaded>>>,
    books: Mutex<Vec<(&'static [f32; 16], Tensor)>>,
    pub(crate) rounded_books: Mutex<Vec<(&'static [f32; 16], Kind, Book)>>,
    pub(crate) counters: Mutex<Option<Counters>>,
    /// The plan of the last step over states.
    pub(crate) state_plan: Mutex<Option<UploadedPlan>>,
    /// The variants by the name of the kernel.
    launches: BTreeMap<&'static str, AtomicU64>,
}

impl Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels")
            .field("device", &self.device)
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

/// The requested variant of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    pub(crate) kernel: &'static str,
    pub(crate) dtype: &'static str,
    /// Constants that must be equal.
    pub(crate) constants: Vec<(&'static str, i64)>,
    /// A constant that must be at least as large; the variant with the smallest value is chosen.
    pub(crate) least: (&'static str, i64),
    /// If `true`, integers that the manifest names are multiples of 16.
    pub(crate) aligned: bool,
}

impl Request {
    fn fits(&self, variant: &Variant) -> bool {
        let has = |name: &str| variant.constants.get(name).copied();
        variant.kernel == self.kernel
            && variant.dtype == self.dtype
            && variant.aligned == self.aligned
            && self
                .constants
                .iter()
                .all(|&(name, value)| has(name) == Some(value))
            && has(self.least.0).is_some_and(|value| value >= self.least.1)
    }

    /// Returns the variant, if there is one.
    pub(crate) fn variant<'a>(&self, variants: &'a [Variant]) -> Option<&'a Variant> {
        let fitting = variants.iter().filter(|variant| self.fits(variant));
        fitting.min_by_key(|variant| variant.constants.get(self.least.0).copied())
    }
}

/// A variant that is ready to launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loaded {
    function: Function,
    pub(crate) variant: &'static Variant,
}

/// An argument of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// The first element of a tensor.
    Tensor(&'a Tensor),
    /// A later element of a tensor.
    Element(&'a Tensor, usize),
    I32(i64),
    I64(i64),
    F32(f64),
}

/// Returns the kernels for tensors on a device; `None` if libtorch's operators should be used.
///
/// By default they are used on the architectures for which a report shows that they are correct: compute capability 9.0
/// (H100, H200). `OVERDRIVE_GPU_KERNELS=1` uses them elsewhere as well; `=0` turns them off. The variable is read once;
/// [`set_enabled`] overrides it.
///
/// # Errors
/// [`Error::Common`] if `OVERDRIVE_GPU_KERNELS` has another value, [`Error::Library`] and [`Error::Driver`] if the CUDA
/// driver cannot be used.
pub fn kernels(device: Device) -> Result<Option<&'static Kernels>> {
    match device {
        Device::Cuda(index) => {
            let asked = asked()?;
            let capability = || Ok(overdrive_sys::cuda::compute_capability(index)?);
            GPUS.get(index, asked, capability, || open(index))
        }
        Device::Cpu => Ok(STAND_IN.get().copied()),
        _ => Ok(None),
    }
}

/// Returns the user's choice, if there is one.
fn asked() -> Result<Option<bool>> {
    match OVERRIDE.load(Ordering::Relaxed) {
        OFF => Ok(Some(false)),
        ON => Ok(Some(true)),
        _ => switch(),
    }
}

const UNSET: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;
static OVERRIDE: AtomicU8 = AtomicU8::new(UNSET);

/// Turns the kernels on or off for all threads, regardless of `OVERDRIVE_GPU_KERNELS`, to compare both in one process.
/// The backward pass of a function runs on the same path as its forward pass.
pub fn set_enabled(enabled: bool) {
    let value = if enabled { ON } else { OFF };
    OVERRIDE.store(value, Ordering::Relaxed);
}

/// Returns the kernels of a device if they were used or requested before, even if they are off now.
pub fn opened(device: Device) -> Option<&'static Kernels> {
    match device {
        Device::Cuda(index) => GPUS.opened(index),
        Device::Cpu => STAND_IN.get().copied(),
        _ => None,
    }
}

static GPUS: Gpus = Gpus::new();

/// Turns the kernels on or off, as [`set_enabled`] does, until the returned guard is dropped, which restores the
/// previous setting.
pub fn override_enabled(enabled: bool) -> EnabledGuard {
    let value = if enabled { ON } else { OFF };
    EnabledGuard(OVERRIDE.swap(value, Ordering::Relaxed))
}

/// A guard that restores the setting before [`override_enabled`] when it is dropped.
#[derive(Debug)]
#[must_use = "the previous setting is restored when the guard is dropped"]
pub struct EnabledGuard(u8);

impl Drop for EnabledGuard {
    fn drop(&mut self) {
        OVERRIDE.store(self.0, Ordering::Relaxed);
    }
}

/// The GPUs of the process that kernels were requested for.
pub(crate) struct Gpus(Mutex<BTreeMap<usize, Gpu>>);

#[derive(Clone, Copy)]
struct Gpu {
    /// The target whose images run on the GPU.
    target: Option<&'static str>,
    /// The kernels, after their first use.
    opened: Option<&'static Kernels>,
}

impl Gpus {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Returns the kernels of a GPU if they are used there. `asked` is the user's choice; `open` is called at their
    /// first use, so that the driver is not needed if they are not used.
    pub(crate) fn get(
        &self,
        index: usize,
        asked: Option<bool>,
        capability: impl FnOnce() -> Result<(u32, u32)>,
        open: impl FnOnce() -> Result<&'static Kernels>,
    ) -> Result<Option<&'static Kernels>> {
        if asked == Some(false) {
            return Ok(None);
        }
        let mut gpus = self.0.lock();
        let mut gpu = match gpus.get(&index) {
            Some(known) => *known,
            None => {
                let capability = capability()?;
                let target = target_for(capability);
                report_choice(index, capability, target, asked);
                Gpu {
                    target,
                    opened: None,
                }
            }
        };
        let used = gpu.target.is_some_and(|target| is_used(target, asked));
        if used && gpu.opened.is_none() {
            gpu.opened = Some(open()?);
        }
        gpus.insert(index, gpu);
        Ok(gpu.opened.filter(|_| used))
    }

    fn opened(&self, index: usize) -> Option<&'static Kernels> {
        self.0.lock().get(&index)?.opened
    }
}

/// Logs which kernels a GPU uses, and why.
fn report_choice(
    index: usize,
    (major, minor): (u32, u32),
    target: Option<&'static str>,
    asked: Option<bool>,
) {
    let Some(target) = target else {
        info!(
            "GPU {index} uses libtorch's operators: Overdrive has no kernels for its compute capability, {major}.{minor}"
        );
        return;
    };
    match (report_of(target), asked) {
        (Some(report), _) => info!(
            "GPU {index} uses Overdrive's kernels for {target}, which are verified by {report}; {VARIABLE}=0 turns \
             them off"
        ),
        (None, Some(true)) => info!(
            "GPU {index} uses Overdrive's kernels for {target}, which no report verifies, because they were \
             requested"
        ),
        (None, _) => info!(
            "GPU {index} uses libtorch's operators: no report verifies Overdrive's kernels for {target}; {VARIABLE}=1 \
             turns them on"
        ),
    }
}

/// Opens the driver for a GPU.
fn open(index: usize) -> Result<&'static Kernels> {
    let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
    let context = Context::new(Driver::open(OsStr::new(DRIVER), None)?, ordinal)?;
    // One for each GPU, for the life of the process.
    Ok(Box::leak(Box::new(Kernels::new(
        context,
        Device::Cuda(index),
    )?)))
}

/// Returns the setting in `OVERDRIVE_GPU_KERNELS`.
fn switch() -> Result<Option<bool>> {
    static READ: OnceLock<std::result::Result<Option<bool>, String>> = OnceLock::new();
    let read = READ.get_or_init(|| parse(std::env::var_os(VARIABLE).as_deref()));
    let expected = "0 (libtorch's operators) or 1 (Overdrive's kernels)";
    read.clone()
        .map_err(|value| Common::option(VARIABLE, value, expected).into())
}

fn parse(value: Option<&OsStr>) -> std::result::Result<Option<bool>, String> {
    match value.map(OsStr::to_string_lossy).as_deref() {
        None | Some("") => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => Err(other.to_owned()),
    }
}

static STAND_IN: OnceLock<&'static Kernels> = OnceLock::new();

/// For tests: makes [`kernels`] serve tensors on the CPU with a library that replaces the CUDA driver and libtorch's
/// current stream. The library decides what to do with launches.
///
/// # Safety
/// The library has the functions of the driver with the same types.
///
/// # Errors
/// As [`kernels`].
#[doc(hidden)]
#[allow(unsafe_code, reason = "code of the caller's choice is run")]
pub unsafe fn serve_cpu_with(library: &Path) -> Result<&'static Kernels> {
    let driver = Driver::open(library.as_os_str(), Some(library.as_os_str()))?;
    let made = Kernels::new(Context::new(driver, 0)?, Device::Cpu)?;
    Ok(STAND_IN.get_or_init(|| Box::leak(Box::new(made))))
}

impl Kernels {
    pub(crate) fn new(context: Context, device: Device) -> Result<Self> {
        let (major, minor) = context.capability;
        let target = target_for(context.capability)
            .ok_or_else(|| embedded(format!("there are no images for {major}.{minor}")))?;
        Ok(Self {
            context,
            device,
            target,
            images: images(target)?,
            loaded: Mutex::default(),
            books: Mutex::default(),
            rounded_books: Mutex::default(),
            counters: Mutex::default(),
            state_plan: Mutex::default(),
            launches: table()?
                .variants
                .iter()
                .map(|variant| (variant.kernel.as_str(), AtomicU64::new(0)))
                .collect(),
        })
    }

    /// Returns the target of the images in use: `sm_90a`, or `ptx` if the driver compiles them.
    pub fn target(&self) -> &'static str {
        self.target
    }

    /// Returns the report in the repository that verifies these kernels on this architecture; `None` if there is none,
    /// in which case they are used only on request.
    pub fn report(&self) -> Option<&'static str> {
        report_of(self.target)
    }

    /// Returns the number of launches of each kernel so far, by name. A launch in a capture counts once; its replays do
    /// not count.
    pub fn launches(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.launches.iter();
        counts
            .map(|(kernel, count)| (*kernel, count.load(Ordering::Relaxed)))
            .collect()
    }

    /// Loads every kernel for this GPU, as its first use would, and returns their number, to check that the driver
    /// accepts all of them. They stay loaded until the process ends.
    ///
    /// # Errors
    /// [`Error::Driver`] with the name of the first kernel that the driver rejects.
    pub fn load_all(&self) -> Result<usize> {
        let variants = &table()?.variants;
        for variant in variants {
            let (image, bytes) = self.image(variant)?;
            self.context.load(bytes, &variant.symbol, image.shared)?;
        }
        Ok(variants.len())
    }

    /// Returns a code book on the GPU, where it is cached, since an upload waits for the device.
    pub(crate) fn book(&self, numbers: &'static [f32; 16]) -> Result<Tensor> {
        let mut books = self.books.lock();
        if let Some((_, book)) = books.iter().find(|(known, _)| *known == numbers) {
            return Ok(book.shallow_clone());
        }
        let book = Tensor::f_from_slice(numbers)?.f_to_device(self.device)?;
        books.push((numbers, book.shallow_clone()));
        Ok(book)
    }

    /// Returns the device that the kernels run on.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Returns `true` if libtorch's current stream is being captured.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        self.context.is_capturing()
    }

    /// Returns what distinguishes launches that may run at the same time: libtorch's current stream, and the id of the
    /// capture that it is part of, or 0. `None` if the driver cannot identify the capture.
    pub(crate) fn sequence(&self) -> Result<Option<(usize, u64)>> {
        self.context.sequence()
    }

    /// Returns the number of multiprocessors of the GPU.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.context.multiprocessors as usize
    }

    /// Returns a variant, which is loaded at its first use; `None` if there is none, if no report verifies it and the user
    /// has not asked for it, or if it would have to be loaded in a capture.
    pub(crate) fn find(&self, request: &Request) -> Result<Option<Loaded>> {
        // The stand-in of tests runs all of them.
        if self.device != Device::Cpu && !is_kernel_used(request.kernel, asked()?) {
            return Ok(None);
        }
        let mut loaded = self.loaded.lock();
        if let Some(known) = loaded.get(request) {
            return Ok(*known);
        }
        let Some(variant) = request.variant(&table()?.variants) else {
            debug!("there is no kernel for {request:?}");
            loaded.insert(request.clone(), None);
            return Ok(None);
        };
        // Loading may synchronize the device, which ends a capture. Run the step once before the capture to load it.
        if self.context.is_capturing()? {
            warn!(
                "kernel {} was not used before this capture; libtorch's operators are captured instead",
                variant.kernel
            );
            return Ok(None);
        }
        let (image, bytes) = self.image(variant)?;
        let function = self.context.load(bytes, &variant.symbol, image.shared)?;
        debug!(
            "loaded {} for {} ({request:?})",
            variant.kernel, self.target
        );
        let found = Loaded { function, variant };
        loaded.insert(request.clone(), Some(found));
        Ok(Some(found))
    }

    fn image(&self, variant: &'static Variant) -> Result<(&'static Image, &[u8])> {
        let missing = || {
            embedded(format!(
                "{} has no image for {}",
                variant.kernel, self.target
            ))
        };
        let image = variant.images.get(self.target).ok_or_else(missing)?;
        let bytes = self.images.get(image.offset..image.offset + image.length);
        Ok((image, bytes.ok_or_else(missing)?))
    }

    /// Launches a variant on libtorch's current stream. The arguments are those of the kernel's source, in order.
    pub(crate) fn launch(
        &self,
        loaded: &Loaded,
        blocks: [usize; 2],
        arguments: &[(&'static str, Argument<'_>)],
    ) -> Result<()> {
        let variant = loaded.variant;
        let kernel = &variant.kernel;
        if arguments.len() != variant.arguments.len() {
            let given = arguments.len();
            return Err(embedded(format!(
                "{kernel} takes {}, not {given}",
                variant.arguments.len()
            )));
        }
        let mut values = Vec::with_capacity(arguments.len());
        for (&(name, argument), (expected, kind)) in arguments.iter().zip(&variant.arguments) {
            let value = self.value(kernel, name, argument, kind)?;
            if name != expected || !value.fits(kind) {
                return Err(embedded(format!(
                    "{kernel} takes {expected} of {kind}, not {name}"
                )));
            }
            values.push(value);
        }
        // The driver rejects an empty grid.
        if blocks.contains(&0) {
            return Ok(());
        }
        let grid = Grid {
            blocks: [
                checked(kernel, "x", blocks[0], i32::MAX as usize)?,
                checked(kernel, "y", blocks[1], usize::from(u16::MAX))?,
            ],
            warps: variant.warps,
        };
        let hidden = table()?.hidden_pointers;
        self.context
            .launch(loaded.function, &variant.symbol, grid, &values, hidden)?;
        if let Some(count) = self.launches.get(kernel.as_str()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn value(
        &self,
        kernel: &str,
        name: &'static str,
        argument: Argument<'_>,
        kind: &str,
    ) -> Result<Value> {
        let (tensor, offset) = match argument {
            Argument::Tensor(tensor) => (tensor, 0),
            Argument::Element(tensor, offset) => (tensor, offset),
            Argument::I32(value) => {
                let narrow = i32::try_from(value);
                return narrow
                    .map(Value::I32)
                    .map_err(|_| too_large(kernel, name, value));
            }
            Argument::I64(value) => return Ok(Value::I64(value)),
            Argument::F32(value) => return Ok(Value::F32(value as f32)),
        };
        if tensor.device() != self.device {
            let expected = format!("on {:?}, as the other tensors are", self.device);
            return Err(Common::device(name, tensor.device(), expected).into());
        }
        if element_type(tensor.kind()).is_none_or(|element| kind.strip_prefix('*') != Some(element))
        {
            return Err(Common::dtype(name, tensor.kind(), format!("elements of {kind}")).into());
        }
        let address = data_address(tensor).map_or(0, |address| address.get());
        let address = address + offset * tensor.kind().elt_size_in_bytes();
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(embedded(format!(
                "{name} of {kernel} is not aligned to {ALIGNMENT} bytes"
            )));
        }
        Ok(Value::Pointer(address))
    }
}

fn too_large(kernel: &str, name: &str, value: i64) -> Error {
    Common::option(
        format!("{name} of {kernel}"),
        value,
        "less than 2³¹; split the batch",
    )
    .into()
}

fn checked(kernel: &str, axis: &str, blocks: usize, most: usize) -> Result<u32> {
    let fits = u32::try_from(blocks).ok().filter(|_| blocks <= most);
    fits.ok_or_else(|| {
        let option = format!("the grid of {kernel} along {axis}");
        Common::option(option, blocks, format!("at most {most}; split the batch")).into()
    })
}

/// Returns Triton's name of a dtype.
fn element_type(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("fp32"),
        Kind::Half => Some("fp16"),
        Kind::BFloat16 => Some("bf16"),
        Kind::Int64 => Some("i64"),
        Kind::Int => Some("i32"),
        Kind::Uint8 => Some("u8"),
        Kind::Int8 => Some("i8"),
        _ => None,
    }
}

/// Returns the manifest's name of a dtype that kernels compute with.
pub(crate) fn dtype(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("f32"),
        Kind::Half => Some("f16"),
        Kind::BFloat16 => Some("bf16"),
        _ => None,
    }
}

/// Returns the tensor, or a copy of it, contiguous and aligned to 16 bytes as kernels require.
///
/// # Errors
/// [`Error::Tch`] if memory for the copy runs out.
pub fn dense(tensor: &Tensor) -> Result<Tensor> {
    if tensor.is_contiguous() && is_aligned(tensor) {
        return Ok(tensor.shallow_clone());
    }
    copy(tensor)
}

/// Returns the tensor with its strides if the last stride is 1 and the address is aligned; else a copy.
pub(crate) fn strided(tensor: &Tensor) -> Result<Tensor> {
    if tensor.stride().last() == Some(&1) && is_aligned(tensor) {
        return Ok(tensor.shallow_clone());
    }
    copy(tensor)
}

pub(crate) fn is_aligned(tensor: &Tensor) -> bool {
    data_address(tensor).is_none_or(|address| address.get().is_multiple_of(ALIGNMENT))
}

fn copy(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Returns `true` if all of these are multiples of 16.
pub(crate) fn multiples_of_16(numbers: &[i64]) -> bool {
    numbers.iter().all(|number| number % 16 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_ends_with_its_guard() {
        let outer = override_enabled(true);
        let inner = override_enabled(false);
        assert_eq!(OVERRIDE.load(Ordering::Relaxed), OFF);
        drop(inner);
        assert_eq!(OVERRIDE.load(Ordering::Relaxed), ON);
        drop(outer);
        assert_eq!(OVERRIDE.load(Ordering::Relaxed), UNSET);
    }

    #[test]
    fn the_switch_has_two_values() {
        let of = |text: &str| parse(Some(OsStr::new(text)));
        assert_eq!(parse(None), Ok(None));
        assert_eq!(of(""), Ok(None));
        assert_eq!(of("0"), Ok(Some(false)));
        assert_eq!(of("1"), Ok(Some(true)));
        assert_eq!(of("yes"), Err("yes".to_owned()));
    }
}
