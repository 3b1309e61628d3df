//! The kernels of one GPU: looked up in the table, loaded once, launched with arguments that are checked by name.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use overdrive_core::Error as Common;
use overdrive_sys::raw::data_address;
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};
use tracing::{debug, warn};

use crate::choice::asked;
use crate::counters::Counters;
use crate::delta_rule::UploadedPlan;
use crate::driver::{Context, Function, Grid, Value};
use crate::embedded::{Image, Variant, images, table, target_for};
use crate::error::{Error, Result, embedded};
use crate::few_bits::Book;
use crate::verified::{is_kernel_used, report_of};

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
    /// The number of launches of each kernel, by its name.
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
        let used = || Ok::<_, Error>(is_kernel_used(request.kernel, &request.constants, asked()?));
        if self.device != Device::Cpu && !used()? {
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
            let found = format!("at address {address:#x}");
            let expected = format!("aligned to {ALIGNMENT} bytes; use a copy");
            return Err(Common::option(format!("{name} of {kernel}"), found, expected).into());
        }
        Ok(Value::Pointer(address))
    }
}

/// Checks the sizes of tensors whose memory a kernel addresses by numbers that it is given.
pub(crate) fn check_shapes(tensors: &[(&'static str, &Tensor, &[i64])]) -> Result<()> {
    for (name, tensor, expected) in tensors {
        if tensor.size() != *expected {
            return Err(Common::shape(*name, tensor.size(), format!("{expected:?}")).into());
        }
    }
    Ok(())
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
