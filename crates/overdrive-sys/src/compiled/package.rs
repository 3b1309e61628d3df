use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use tch::{Device, Kind, Tensor};

use super::ffi;
use crate::error::{Error, Result, check, take_string};
use crate::ffi::RawTensor;
use crate::function::{handle, push_tensor};

/// An empty library called `libtorch.so`, on which compiled code depends; see build.rs.
#[cfg(target_os = "linux")]
const LIBTORCH_NAME: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libtorch_name.so"));
#[cfg(not(target_os = "linux"))]
const LIBTORCH_NAME: &[u8] = &[];

/// The options for opening a [`Package`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackageOptions {
    /// The number of threads that may run the model at a time; others wait. Each runner has its own
    /// memory for intermediate results, and all share the constants. Default: 1.
    pub runners: usize,
    /// If `true`, the compiled code takes no locks, and [`Package::run`] admits one thread at a time.
    /// Needed for work inside a captured CUDA graph. Default: `false`.
    pub single_threaded: bool,
    /// The CUDA device, for a package that was compiled for CUDA. Default: the current device.
    pub device_index: Option<usize>,
}

impl Default for PackageOptions {
    fn default() -> Self {
        PackageOptions {
            runners: 1,
            single_threaded: false,
            device_index: None,
        }
    }
}

/// A constant of a compiled model, usually a weight.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Constant {
    /// The name in the Python module.
    pub name: String,
    /// The dtype.
    pub kind: Kind,
    /// The shape.
    pub shape: Vec<i64>,
    /// The device.
    pub device: Device,
}

/// A model of a package (`.pt2`) that `torch.export` and AOTInductor created
/// (`torch::inductor::AOTIModelPackageLoader`).
///
/// One thread for each runner may [`run`](Package::run) it at a time. New constants are prepared
/// while it runs, and swapped in between two runs.
#[derive(Debug)]
pub struct Package {
    raw: *mut ffi::RawPackage,
    single_threaded: bool,
    /// Held for reading during a run, and for writing while constants are swapped.
    runs: RwLock<()>,
    /// Held while constants are read or prepared.
    constants: Mutex<()>,
}

// SAFETY: libtorch's container gives each run its own model under its own lock; `runs` and `constants` guard
// the rest (swapping constants, a container opened as single-threaded).
unsafe impl Send for Package {}
// SAFETY: as above.
unsafe impl Sync for Package {}

impl Package {
    /// Unpacks the model into a temporary folder, which is deleted with this value, and loads its code.
    ///
    /// The code is native: it runs with the rights of this process. The caller must have checked that the
    /// file is complete and was compiled for this libtorch, device and processor.
    ///
    /// # Errors
    /// [`Error::Torch`] with libtorch's message; [`Error::Common`] for an option out of its range;
    /// [`Error::BadArgument`] for a path that is not UTF-8 or a zero byte in a name.
    pub fn open(path: &Path, model: &str, options: PackageOptions) -> Result<Self> {
        let operation = "opening a package";
        let bad = |message: String| Error::BadArgument {
            operation: operation.to_owned(),
            message,
        };
        overdrive_core::check_at_least("runners", options.runners, 1)?;
        let text = path
            .to_str()
            .ok_or_else(|| bad(format!("the path {} is not UTF-8", path.display())))?;
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| bad(format!("{text:?} contains a zero byte")))
        };
        let index = match options.device_index {
            None => -1,
            // libtorch's `DeviceIndex` has 8 bits.
            Some(index) => i8::try_from(index).map(i32::from).map_err(|_| {
                overdrive_core::Error::option("device_index", index, "the index of a CUDA device")
            })?,
        };
        let (path, name) = (c_string(text)?, c_string(model)?);
        // SAFETY: the bytes are constant.
        let status =
            unsafe { ffi::od_package_name_libtorch(LIBTORCH_NAME.as_ptr(), LIBTORCH_NAME.len()) };
        check(status, operation)?;
        let mut raw = ptr::null_mut();
        // SAFETY: both texts outlive the call; `raw` is written only on success.
        let status = unsafe {
            ffi::od_package_open(
                path.as_ptr(),
                name.as_ptr(),
                i32::from(options.single_threaded),
                options.runners,
                index,
                &raw mut raw,
            )
        };
        check(status, operation)?;
        Ok(Package {
            raw,
            single_threaded: options.single_threaded,
            runs: RwLock::new(()),
            constants: Mutex::new(()),
        })
    }

    /// Returns the tree specs of inputs and outputs as JSON (`torch.utils._pytree.treespec_dumps`).
    ///
    /// # Errors
    /// [`Error::Torch`] if the code has no specs.
    pub fn call_spec(&self) -> Result<(String, String)> {
        let (mut inputs, mut outputs) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: both are written only on success, and each is taken once.
        unsafe {
            let status = ffi::od_package_call_spec(self.raw, &raw mut inputs, &raw mut outputs);
            check(status, "reading the call spec of a compiled model")?;
            Ok((take_string(inputs), take_string(outputs)))
        }
    }

    /// Runs the model and returns its outputs. Gradients are not recorded. The model may write to its inputs.
    ///
    /// At most as many threads as there are runners may call this at a time: threads that wait inside
    /// libtorch's container hold a lock that the first run after
    /// [`replace_constants`](Package::replace_constants) needs, so more threads could deadlock.
    /// overdrive-packages enforces this.
    ///
    /// [`call_spec`](Package::call_spec) describes the inputs. Their number is checked here, their dtypes and
    /// sizes by the code, unless `AOTI_RUNTIME_CHECK_INPUTS=0` is in the environment.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for another number of inputs than the code takes, for an input that is not contiguous,
    /// and if the storage of a shared constant was resized; [`Error::Torch`] if the code fails (it writes the reason
    /// to standard error) or libtorch throws.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let handles: Vec<RawTensor> = inputs.iter().map(|tensor| handle(tensor)).collect();
        let mut outputs: Vec<Tensor> = Vec::new();
        // Declared out here, so that the lock is held until the function returns.
        let shared;
        let alone;
        if self.single_threaded {
            alone = self.runs.write().unwrap_or_else(PoisonError::into_inner);
            let _ = &alone;
        } else {
            shared = self.runs.read().unwrap_or_else(PoisonError::into_inner);
            let _ = &shared;
        }
        // SAFETY: the package and the inputs are alive during the call, and `push_tensor` is of the type of
        // `outputs`.
        let status = unsafe {
            ffi::od_package_run(
                self.raw,
                handles.as_ptr(),
                handles.len(),
                (&raw mut outputs).cast(),
                push_tensor,
            )
        };
        check(status, "running a compiled model")?;
        Ok(outputs)
    }

    /// Returns the constants, sorted by name, without those that the model computes from other constants
    /// in its first run.
    ///
    /// # Errors
    /// [`Error::Torch`] if the code cannot list them.
    pub fn constants(&self) -> Result<Vec<Constant>> {
        let mut found: Vec<Constant> = Vec::new();
        self.each_constant(false, |name, tensor| {
            found.push(Constant {
                name,
                kind: tensor.f_kind()?,
                shape: tensor.size(),
                device: tensor.device(),
            });
            Ok(())
        })?;
        // The container lists constants in the order of a hash map, which differs between runs.
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Returns a copy of a constant; `None` if there is no constant of this name.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the storage of a shared constant was resized; [`Error::Tch`] if memory runs
    /// out.
    pub fn constant(&self, name: &str) -> Result<Option<Tensor>> {
        let mut found = None;
        self.each_constant(true, |this, tensor| {
            if this == name {
                // A copy: the memory is the package's, and is freed by the next swap of constants.
                let mut copy = tensor.f_empty_like()?;
                copy.f_copy_(tensor)?;
                found = Some(copy);
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Calls `visit` with each constant, whose elements it may read if `readable`.
    fn each_constant(
        &self,
        readable: bool,
        visit: impl FnMut(String, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let _guard = self.lock_constants();
        let mut visitor = ConstantVisitor {
            visit,
            result: Ok(()),
        };
        let take = callback_of(&visitor);
        // SAFETY: `take` has the type of `visitor`, which outlives the call.
        let status = unsafe {
            let visitor = (&raw mut visitor).cast();
            ffi::od_package_constants(self.raw, i32::from(readable), visitor, take)
        };
        check(status, "listing the constants of a compiled model")?;
        visitor.result
    }

    /// Replaces the constants `names` by `tensors`, all at once between two runs; the others stay. The
    /// model may run while the new set is prepared.
    ///
    /// With `share` the package uses the memory of the tensors that have the right strides and device, and
    /// keeps it alive: writing to them changes the model, and after resizing one in place
    /// [`run`](Package::run) refuses until the constant is replaced. Otherwise it copies them.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown name and [`Error::BadArgument`] for a dtype or a shape that
    /// does not fit. No constant is changed after an error.
    pub fn replace_constants(
        &self,
        names: &[&str],
        tensors: &[&Tensor],
        share: bool,
    ) -> Result<()> {
        let operation = "replacing constants of a compiled model";
        let bad = |message: String| Error::BadArgument {
            operation: operation.to_owned(),
            message,
        };
        if names.len() != tensors.len() {
            let (names, tensors) = (names.len(), tensors.len());
            return Err(bad(format!("{names} names for {tensors} tensors")));
        }
        let names: Vec<CString> = names
            .iter()
            .map(|name| CString::new(*name))
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| bad("a name contains a zero byte".to_owned()))?;
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let handles: Vec<RawTensor> = tensors.iter().map(|tensor| handle(tensor)).collect();
        let _guard = self.lock_constants();
        // SAFETY: names and tensors are alive during the call; `constants` is held.
        let status = unsafe {
            ffi::od_package_prepare(
                self.raw,
                pointers.as_ptr(),
                handles.as_ptr(),
                handles.len(),
                i32::from(share),
            )
        };
        check(status, operation)?;
        let _alone = self.runs.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: no run is in progress while `runs` is held for writing.
        let status = unsafe { ffi::od_package_commit(self.raw) };
        check(status, operation)
    }

    fn lock_constants(&self) -> MutexGuard<'_, ()> {
        self.constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; no run is in progress, since a run borrows `self`.
        unsafe { ffi::od_package_free(self.raw) }
    }
}

struct ConstantVisitor<F> {
    visit: F,
    /// The first error of `visit`; C++ has no way to stop the listing.
    result: Result<()>,
}

/// Returns the callback for the type of a visitor, which cannot be named because it contains a closure.
fn callback_of<F: FnMut(String, &Tensor) -> Result<()>>(
    _: &ConstantVisitor<F>,
) -> ffi::RawTakeConstant {
    take_constant::<F>
}

unsafe extern "C" fn take_constant<F>(into: *mut c_void, name: *const c_char, tensor: *const c_void)
where
    F: FnMut(String, &Tensor) -> Result<()>,
{
    // SAFETY: `into` is the visitor of `each_constant`, of the type that `callback_of` was given.
    let visitor = unsafe { &mut *into.cast::<ConstantVisitor<F>>() };
    if visitor.result.is_err() {
        return;
    }
    // SAFETY: a C string and an `at::Tensor` that live as long as this call.
    let (name, tensor) = unsafe {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        (name, Tensor::clone_from_ptr(tensor.cast_mut().cast()))
    };
    visitor.result = (visitor.visit)(name, &tensor);
}
