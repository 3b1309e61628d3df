use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use tch::{Device, Kind, Tensor};

use super::ffi;
use crate::error::{Error, Result, check, take_string};
use crate::ffi::RawTensor;
use crate::function::handle;

/// An empty library called `libtorch.so`, which compiled code names; see build.rs.
#[cfg(target_os = "linux")]
const LIBTORCH_NAME: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libtorch_name.so"));
#[cfg(not(target_os = "linux"))]
const LIBTORCH_NAME: &[u8] = &[];

/// How a [`Package`] is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackageOptions {
    /// How many threads may run the model at a time; others wait. Each has memory of its own for
    /// intermediate results, all share the constants. Default 1.
    pub runners: usize,
    /// Leaves out the locks of the compiled code; [`Package::run`] then lets in one thread at a time.
    /// For work inside a captured CUDA graph. Default false.
    pub single_threaded: bool,
    /// Which CUDA device, for a package that was made for CUDA. Default: the current one.
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

/// A constant of a compiled model: most often a weight.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Constant {
    /// Its name in the Python module.
    pub name: String,
    /// Its element type.
    pub kind: Kind,
    /// Its sizes.
    pub shape: Vec<i64>,
    /// Where it lies.
    pub device: Device,
}

/// One model of a package (`.pt2`) that `torch.export` and AOTInductor made:
/// `torch::inductor::AOTIModelPackageLoader`.
///
/// As many threads as there are runners may [`run`](Package::run) it at a time. New
/// constants are prepared beside them, and put in place between two runs.
#[derive(Debug)]
pub struct Package {
    raw: *mut ffi::RawPackage,
    single_threaded: bool,
    /// Held for reading during a run, for writing while constants change places.
    runs: RwLock<()>,
    /// Held while constants are read or prepared.
    constants: Mutex<()>,
}

// SAFETY: libtorch's container hands each run a model of its own under a lock of its own; what it does
// not guard (the exchange of constants, a container opened as single-threaded) `runs` and `constants` do.
unsafe impl Send for Package {}
// SAFETY: as above.
unsafe impl Sync for Package {}

impl Package {
    /// Unpacks the model into a temporary folder, which goes away with this value, and loads its code.
    ///
    /// The code is native: whoever made the file runs with this process's rights. That it is whole and
    /// made for this libtorch, device and processor is for the caller to have checked.
    ///
    /// # Errors
    /// [`Error::Torch`] with libtorch's words; [`Error::BadArgument`] for no runners, or a path or a name
    /// that C++ cannot be given.
    pub fn open(path: &Path, model: &str, options: PackageOptions) -> Result<Self> {
        let operation = "opening a package";
        let bad = |message: String| Error::BadArgument {
            operation: operation.to_owned(),
            message,
        };
        if options.runners == 0 {
            return Err(bad("a model needs at least one runner".to_owned()));
        }
        let text = path
            .to_str()
            .ok_or_else(|| bad(format!("the path {} is not UTF-8", path.display())))?;
        let c_string =
            |text: &str| CString::new(text).map_err(|_| bad(format!("{text:?} holds a zero byte")));
        let index = match options.device_index {
            None => -1,
            Some(index) => i8::try_from(index)
                .map(i32::from)
                .map_err(|_| bad(format!("there is no CUDA device {index}")))?,
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

    /// The tree specs of inputs and outputs, JSON as `torch.utils._pytree.treespec_dumps` writes it.
    ///
    /// # Errors
    /// [`Error::Torch`] if the code has none.
    pub fn call_spec(&self) -> Result<(String, String)> {
        let (mut inputs, mut outputs) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: both are written only on success, and each is taken once.
        unsafe {
            let status = ffi::od_package_call_spec(self.raw, &raw mut inputs, &raw mut outputs);
            check(status, "reading how a compiled model is called")?;
            Ok((take_string(inputs), take_string(outputs)))
        }
    }

    /// Runs the model. No gradient is recorded. Inputs that the model writes to are written to.
    ///
    /// No more threads than there are runners may be in here at a time: those that wait inside libtorch's
    /// container hold a lock that the first run after [`replace_constants`](Package::replace_constants)
    /// needs, and all would wait for one another. (overdrive-compiled sees to that.)
    ///
    /// How many inputs there are is not checked by the compiled code: fewer than it has reads memory
    /// that is not there. [`call_spec`](Package::call_spec) says how many.
    ///
    /// # Errors
    /// [`Error::Torch`] if the code refuses (it writes why to standard error) or libtorch fails.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let handles: Vec<RawTensor> = inputs.iter().map(|tensor| handle(tensor)).collect();
        let mut outputs: Vec<Tensor> = Vec::new();
        let shared;
        let alone;
        if self.single_threaded {
            alone = self.runs.write().unwrap_or_else(PoisonError::into_inner);
            let _ = &alone;
        } else {
            shared = self.runs.read().unwrap_or_else(PoisonError::into_inner);
            let _ = &shared;
        }
        // SAFETY: the package and the inputs are alive during the call, and `push` is of the type of
        // `outputs`.
        let status = unsafe {
            ffi::od_package_run(
                self.raw,
                handles.as_ptr(),
                handles.len(),
                (&raw mut outputs).cast(),
                push,
            )
        };
        check(status, "running a compiled model")?;
        Ok(outputs)
    }

    /// The constants, by name. Those that are computed from others when the model first runs are not
    /// among them.
    ///
    /// # Errors
    /// [`Error::Torch`] if the code cannot list them.
    pub fn constants(&self) -> Result<Vec<Constant>> {
        let mut found: Vec<Constant> = Vec::new();
        self.each_constant(|name, tensor| {
            found.push(Constant {
                name,
                kind: tensor.f_kind()?,
                shape: tensor.size(),
                device: tensor.device(),
            });
            Ok(())
        })?;
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// A copy of a constant; `None` where there is none of this name.
    ///
    /// # Errors
    /// [`Error::Tch`] if memory runs out.
    pub fn constant(&self, name: &str) -> Result<Option<Tensor>> {
        let mut found = None;
        self.each_constant(|this, tensor| {
            if this == name {
                let mut copy = tensor.f_empty_like()?;
                copy.f_copy_(tensor)?;
                found = Some(copy);
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn each_constant(&self, see: impl FnMut(String, &Tensor) -> Result<()>) -> Result<()> {
        let _guard = self.lock_constants();
        let mut walk = Walk {
            see,
            result: Ok(()),
        };
        // SAFETY: `take_constant` is of the type of `walk`, which outlives the call.
        let status =
            unsafe { ffi::od_package_constants(self.raw, (&raw mut walk).cast(), taker_of(&walk)) };
        check(status, "listing the constants of a compiled model")?;
        walk.result
    }

    /// Replaces the constants `names` by `tensors`, all at once between two runs; the others stay. Runs
    /// go on while the new set is made ready.
    ///
    /// With `share` the package uses the memory of the tensors that have the right strides and device,
    /// and keeps it: who writes to them changes the model. Else it copies them.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a name that there is not and [`Error::BadArgument`] for a kind or sizes
    /// that do not fit; nothing is changed then, nor after another error.
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
            .map_err(|_| bad("a name holds a zero byte".to_owned()))?;
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
        // SAFETY: no run is under way while `runs` is held for writing.
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
        // SAFETY: owned by `self`, freed once; no run is under way, since a run borrows `self`.
        unsafe { ffi::od_package_free(self.raw) }
    }
}

struct Walk<F> {
    see: F,
    result: Result<()>,
}

fn taker_of<F: FnMut(String, &Tensor) -> Result<()>>(_: &Walk<F>) -> ffi::RawTakeConstant {
    take_constant::<F>
}

unsafe extern "C" fn take_constant<F>(into: *mut c_void, name: *const c_char, tensor: *const c_void)
where
    F: FnMut(String, &Tensor) -> Result<()>,
{
    // SAFETY: `into` is the `Walk` of `each_constant`, whose type `taker_of` has read off.
    let walk = unsafe { &mut *into.cast::<Walk<F>>() };
    if walk.result.is_err() {
        return;
    }
    // SAFETY: a C string and an `at::Tensor` that live as long as this call.
    let (name, tensor) = unsafe {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        (name, Tensor::clone_from_ptr(tensor.cast_mut().cast()))
    };
    walk.result = (walk.see)(name, &tensor);
}

unsafe extern "C" fn push(into: *mut c_void, owned: RawTensor) {
    // SAFETY: `into` is the vector of `run`, the handle a new one.
    unsafe { (*into.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(owned.cast())) }
}
