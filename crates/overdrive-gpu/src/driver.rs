//! The functions of the CUDA driver that a launch needs, from `libcuda.so.1`, and libtorch's current stream.
//!
//! No CUDA header is needed: the driver's interface is a stable C interface of integers and opaque pointers.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, Result, embedded};

const SUCCESS: c_int = 0;
const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
/// The shared memory in bytes that a block can use without raising its limit.
const SHARED_BY_DEFAULT: u32 = 48 * 1024;
const WARP: u32 = 32;

type Handle = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*)),* $(,)?) => {
        /// The driver's functions.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            /// The library is a CUDA driver, or has functions of the same names and types.
            unsafe fn of(library: &Library, path: &str) -> Result<Self> {
                Ok(Self {
                    // SAFETY: the caller's promise; these are the types in NVIDIA's cuda.h.
                    $($field: unsafe { symbol(library, path, $symbol)? },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint),
    device_get = "cuDeviceGet" (*mut c_int, c_int),
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int),
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int),
    current_context = "cuCtxGetCurrent" (*mut Handle),
    push_context = "cuCtxPushCurrent_v2" (Handle),
    pop_context = "cuCtxPopCurrent_v2" (*mut Handle),
    load_module = "cuModuleLoadData" (*mut Handle, *const c_void),
    get_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char),
    set_attribute = "cuFuncSetAttribute" (Handle, c_int, c_int),
    is_capturing = "cuStreamIsCapturing" (Handle, *mut c_int),
    launch = "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    ),
    error_name = "cuGetErrorName" (c_int, *mut *const c_char),
}

/// # Safety
/// `name` is a function of type `F` in the library.
unsafe fn symbol<F: Copy>(library: &Library, path: &str, name: &str) -> Result<F> {
    // SAFETY: the caller's promise.
    match unsafe { library.get::<F>(name.as_bytes()) } {
        Ok(found) => Ok(*found),
        Err(error) => Err(Error::Library {
            library: path.to_owned(),
            reason: error.to_string(),
        }),
    }
}

/// `cuStreamGetCaptureInfo_v2`: returns the status and the id of a stream's capture, and further optional values.
type CaptureInfo = unsafe extern "C" fn(
    Handle,
    *mut c_int,
    *mut u64,
    *mut Handle,
    *mut *const Handle,
    *mut usize,
) -> c_int;

/// The CUDA driver of this process.
pub(crate) struct Driver {
    functions: Functions,
    /// Finishes loading a function before a capture; drivers before 12.4 do not have it.
    load_function: Option<unsafe extern "C" fn(Handle) -> c_int>,
    /// Identifies captures; drivers before 11.3 do not have it.
    capture_info: Option<CaptureInfo>,
    current_stream: unsafe extern "C" fn(i32, *mut Handle) -> i32,
    // Last, so that they are unloaded after the pointers into them are dropped.
    _libraries: [Library; 2],
}

impl Driver {
    /// Opens the driver at `path`. The function for libtorch's current stream comes from `torch` or, if that is `None`,
    /// from the libraries that the program has loaded.
    pub(crate) fn open(path: &OsStr, torch: Option<&OsStr>) -> Result<Self> {
        let open = |path: Option<&OsStr>| {
            // SAFETY: loading runs the constructors of NVIDIA's driver, which libtorch's CUDA library loads as well,
            // or of a stand-in that a test has compiled.
            let opened = unsafe { Library::open(path, RTLD_NOW | RTLD_LOCAL) };
            opened.map_err(|error| Error::Library {
                library: path
                    .unwrap_or(OsStr::new("this program"))
                    .display()
                    .to_string(),
                reason: error.to_string(),
            })
        };
        let (driver, torch) = (open(Some(path))?, open(torch)?);
        let name = path.display().to_string();
        // SAFETY: the file is a CUDA driver or a stand-in, and the types are those of cuda.h; `cuFuncLoad` takes a
        // function.
        let (functions, load_function, capture_info) = unsafe {
            let load = symbol(&driver, &name, "cuFuncLoad").ok();
            let capture = symbol(&driver, &name, "cuStreamGetCaptureInfo_v2").ok();
            (Functions::of(&driver, &name)?, load, capture)
        };
        // SAFETY: libtorch's stable C interface: `AOTITorchError f(int32_t device_index, void** ret_stream)`.
        let current_stream = unsafe {
            symbol(
                &torch,
                "libtorch_cuda.so",
                "aoti_torch_get_current_cuda_stream",
            )?
        };
        let driver = Self {
            functions,
            load_function,
            capture_info,
            current_stream,
            _libraries: [driver, torch],
        };
        // SAFETY: the flags must be 0.
        let status = unsafe { (driver.functions.init)(0) };
        driver.check(status, "cuInit", "the process")?;
        Ok(driver)
    }

    fn check(&self, status: c_int, call: &'static str, subject: &str) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: writes a pointer to a static string, or null for a number that it does not know.
        let known = unsafe { (self.functions.error_name)(status, &raw mut name) } == SUCCESS;
        let name = match known && !name.is_null() {
            // SAFETY: the driver's string ends with a zero and lives as long as the driver.
            true => unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned(),
            false => "an error without a name in this driver".to_owned(),
        };
        Err(Error::Driver {
            call,
            subject: subject.to_owned(),
            name,
            code: status,
        })
    }
}

/// The primary context of a GPU, which libtorch uses as well.
pub(crate) struct Context {
    driver: Driver,
    /// libtorch's index of the device: its index among the devices that the process sees.
    device: i32,
    handle: Handle,
    pub(crate) capability: (u32, u32),
    pub(crate) multiprocessors: u32,
}

// SAFETY: a context is a handle that any thread may use; the functions of the driver are safe to call from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; nothing here is changed after `new`.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .field("capability", &self.capability)
            .finish_non_exhaustive()
    }
}

/// A loaded kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    handle: Handle,
    shared: u32,
}

// SAFETY: a handle into the context, which any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The value of a kernel's parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Pointer(usize),
    I32(i32),
    I64(i64),
    F32(f32),
}

impl Value {
    /// Returns `true` if a parameter of this Triton type takes the value.
    pub(crate) fn fits(self, kind: &str) -> bool {
        match self {
            Self::Pointer(_) => kind.starts_with('*'),
            Self::I32(_) => kind == "i32",
            Self::I64(_) => kind == "i64",
            Self::F32(_) => kind == "fp32",
        }
    }

    /// Returns memory that begins with the value.
    fn memory(self) -> [u8; 8] {
        let mut memory = [0; 8];
        match self {
            Self::Pointer(address) => memory.copy_from_slice(&(address as u64).to_ne_bytes()),
            Self::I32(value) => memory[..4].copy_from_slice(&value.to_ne_bytes()),
            Self::I64(value) => memory.copy_from_slice(&value.to_ne_bytes()),
            Self::F32(value) => memory[..4].copy_from_slice(&value.to_ne_bytes()),
        }
        memory
    }
}

/// A value in memory that is aligned for every type.
#[derive(Clone, Copy)]
#[repr(align(8))]
struct Slot(#[expect(dead_code, reason = "read by the driver through a pointer")] [u8; 8]);

/// The blocks of a launch and the threads of each block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 2],
    pub(crate) warps: u32,
}

impl Context {
    /// Retains the context of a device.
    pub(crate) fn new(driver: Driver, device: i32) -> Result<Self> {
        let subject = format!("device {device}");
        let (mut number, mut handle) = (0, ptr::null_mut());
        let functions = &driver.functions;
        // SAFETY: writes one integer.
        let status = unsafe { (functions.device_get)(&raw mut number, device) };
        driver.check(status, "cuDeviceGet", &subject)?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let status = unsafe { (functions.device_attribute)(&raw mut value, which, number) };
            driver.check(status, "cuDeviceGetAttribute", &subject)?;
            Ok::<_, Error>(u32::try_from(value).unwrap_or(0))
        };
        let capability = (
            attribute(COMPUTE_CAPABILITY_MAJOR)?,
            attribute(COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(MULTIPROCESSOR_COUNT)?.max(1);
        // SAFETY: writes one handle. It is never released: the kernels stay loaded until the process ends.
        let status = unsafe { (functions.retain_context)(&raw mut handle, number) };
        driver.check(status, "cuDevicePrimaryCtxRetain", &subject)?;
        Ok(Self {
            driver,
            device,
            handle,
            capability,
            multiprocessors,
        })
    }

    /// Makes the context current on this thread until the returned guard is dropped.
    fn enter(&self) -> Result<Entered<'_>> {
        let functions = &self.driver.functions;
        let mut current = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (functions.current_context)(&raw mut current) };
        self.driver.check(status, "cuCtxGetCurrent", "a launch")?;
        // Usually libtorch has already made it current, and there is nothing to restore.
        if current == self.handle {
            return Ok(Entered(None));
        }
        // SAFETY: the handle was retained and is never released.
        let status = unsafe { (functions.push_context)(self.handle) };
        self.driver.check(status, "cuCtxPushCurrent", "a launch")?;
        Ok(Entered(Some(&self.driver)))
    }

    /// Loads a function from a cubin, or from PTX that is terminated by a zero.
    pub(crate) fn load(&self, image: &[u8], symbol: &str, shared: u32) -> Result<Function> {
        let _entered = self.enter()?;
        let functions = &self.driver.functions;
        let name = CString::new(symbol).map_err(|_| embedded("a symbol contains a zero"))?;
        let (mut module, mut handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the image is a whole cubin, whose header has its length, or ends with a zero; the driver copies it.
        let status = unsafe { (functions.load_module)(&raw mut module, image.as_ptr().cast()) };
        self.driver.check(status, "cuModuleLoadData", symbol)?;
        // SAFETY: the module was loaded and is never unloaded; the name ends with a zero.
        let status = unsafe { (functions.get_function)(&raw mut handle, module, name.as_ptr()) };
        self.driver.check(status, "cuModuleGetFunction", symbol)?;
        if shared > SHARED_BY_DEFAULT {
            let bytes = c_int::try_from(shared).unwrap_or(c_int::MAX);
            // SAFETY: a valid function and one of its attributes.
            let status =
                unsafe { (functions.set_attribute)(handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes) };
            self.driver.check(status, "cuFuncSetAttribute", symbol)?;
        }
        if let Some(load) = self.driver.load_function {
            // The driver loads lazily: without this, a first launch in a capture would load the code there.
            // SAFETY: a valid function.
            let status = unsafe { load(handle) };
            self.driver.check(status, "cuFuncLoad", symbol)?;
        }
        Ok(Function { handle, shared })
    }

    /// Returns libtorch's current stream of the device on this thread.
    fn stream(&self) -> Result<Handle> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.driver.current_stream)(self.device, &raw mut stream) };
        match status {
            0 => Ok(stream),
            code => Err(Error::Driver {
                call: "aoti_torch_get_current_cuda_stream",
                subject: format!("device {}", self.device),
                name: "an error of libtorch, printed above".to_owned(),
                code,
            }),
        }
    }

    /// Returns `true` if libtorch's current stream is being captured, or if the driver cannot tell because another
    /// stream is being captured.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _entered = self.enter()?;
        let mut status = 0;
        let stream = self.stream()?;
        // SAFETY: libtorch's stream; writes one integer.
        let asked = unsafe { (self.driver.functions.is_capturing)(stream, &raw mut status) };
        Ok(asked != SUCCESS || status != 0)
    }

    /// Returns libtorch's current stream and the id of the capture that it is part of, or 0; `None` if the driver
    /// cannot identify the capture.
    pub(crate) fn sequence(&self) -> Result<Option<(usize, u64)>> {
        let Some(capture_info) = self.driver.capture_info else {
            let stream = self.stream()?;
            return Ok((!self.is_capturing()?).then_some((stream as usize, 0)));
        };
        let _entered = self.enter()?;
        let stream = self.stream()?;
        let (mut status, mut capture) = (0, 0);
        // SAFETY: libtorch's stream; writes two integers, and null is allowed for values that are not requested.
        let asked = unsafe {
            capture_info(
                stream,
                &raw mut status,
                &raw mut capture,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        Ok(match (asked, status) {
            (SUCCESS, 0) => Some((stream as usize, 0)),
            (SUCCESS, 1) => Some((stream as usize, capture)),
            _ => None,
        })
    }

    /// Launches a function on libtorch's current stream. `values` have the types of its parameters and are followed by
    /// `hidden` pointers that it does not use.
    pub(crate) fn launch(
        &self,
        function: Function,
        symbol: &str,
        grid: Grid,
        values: &[Value],
        hidden: usize,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let stream = self.stream()?;
        let null = std::iter::repeat_n(Value::Pointer(0), hidden);
        let slots = values.iter().copied().chain(null);
        let mut slots: Vec<Slot> = slots.map(|value| Slot(value.memory())).collect();
        let mut parameters: Vec<*mut c_void> = slots
            .iter_mut()
            .map(|slot| ptr::from_mut(slot).cast())
            .collect();
        let [x, y] = grid.blocks;
        // SAFETY: `Kernels::launch`, the only caller, has compared the values with the parameters of the function, of
        // which each slot holds one; the driver copies them before it returns. The kernels read and write device
        // memory of tensors only, within the sizes that are among the values.
        let status = unsafe {
            (self.driver.functions.launch)(
                function.handle,
                x,
                y,
                1,
                grid.warps * WARP,
                1,
                1,
                function.shared,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.driver.check(status, "cuLaunchKernel", symbol)
    }
}

/// A context that is current on this thread; dropping it restores the previous one.
struct Entered<'a>(Option<&'a Driver>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(driver) = self.0 {
            let mut popped = ptr::null_mut();
            // SAFETY: `enter` pushed a context on this thread, which a guard cannot leave because it borrows a type
            // that is used on the stack only. A failure has no remedy here.
            let _status = unsafe { (driver.functions.pop_context)(&raw mut popped) };
        }
    }
}
