//! Hooks on the tensors that the graph saves for backward: what
//! `torch.autograd.graph.saved_tensors_hooks` is in Python.
//!
//! While a [`HooksGuard`] lives, everything that an operator saves on this thread goes through its
//! `pack`, and what that returned stands in the graph in the tensor's place until backward asks for
//! the tensor again. Activation checkpointing and offloading are made of this.
//!
//! libtorch does not check tensors behind hooks for in-place changes.

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::thread::{self, ThreadId};

use tch::{Device, Tensor};

use crate::callback::{self, CallbackError, CallbackResult};
use crate::device::{device_index, device_type};
use crate::dispatch_mode;
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle};

/// A tensor that the graph is about to save.
#[derive(Debug)]
pub struct Saved {
    /// The tensor. It may hold the node that saves it (an operator that saves its own result): keep
    /// `tensor.f_detach()` rather than this, or neither is ever freed.
    pub tensor: Tensor,
    /// Whether it is a leaf that requires a gradient, or a view of one: a weight, whose memory is
    /// taken anyway.
    pub is_parameter: bool,
}

/// What stands in the graph for a saved tensor. Dropped when the graph lets go of it, on any thread.
pub trait Packed: Send {
    /// The tensor again, of the same shape, dtype and device. May be asked for more than once where a
    /// graph is retained, and on whichever thread runs backward.
    ///
    /// # Errors
    /// What is returned becomes the error of the backward pass.
    fn unpack(&self) -> CallbackResult<Tensor>;
}

type PackHook = dyn Fn(Saved) -> CallbackResult<Box<dyn Packed>>;

thread_local! {
    static STACK: RefCell<Vec<(u64, Rc<PackHook>)>> = const { RefCell::new(Vec::new()) };
}

/// Hooks on this thread's stack, until dropped. Guards may be dropped in any order; the one pushed last
/// is the one that is called.
#[derive(Debug)]
#[must_use = "the hooks are gone when the guard is dropped"]
pub struct HooksGuard {
    id: u64,
    /// The stack is the thread's: the guard stays there.
    on_this_thread: PhantomData<*const ()>,
}

/// Pushes a hook. It is called without gradient recording; an error of it becomes the error of the
/// operator that saves.
///
/// # Errors
/// [`crate::Error::Torch`] if another autograd engine has taken over in this process (libtorch's Python
/// part was loaded).
pub fn push_hooks(
    pack: impl Fn(Saved) -> CallbackResult<Box<dyn Packed>> + 'static,
) -> Result<HooksGuard> {
    static INSTALLED: Once = Once::new();
    static CALLBACKS: ffi::RawSavedTensorCallbacks = ffi::RawSavedTensorCallbacks {
        pack: call_pack,
        unpack: call_unpack,
        drop: drop_packed,
    };
    // SAFETY: a static of functions that keep the shim's contract.
    INSTALLED.call_once(|| unsafe { ffi::od_saved_tensors_install(&raw const CALLBACKS) });
    let (id, depth) = STACK.with_borrow_mut(|stack| {
        let id = stack.last().map_or(0, |(last, _)| last + 1);
        stack.push((id, Rc::new(pack)));
        (id, stack.len())
    });
    let guard = HooksGuard {
        id,
        on_this_thread: PhantomData,
    };
    set_depth(depth)?;
    Ok(guard)
}

fn set_depth(depth: usize) -> Result<()> {
    // SAFETY: sets a thread-local number.
    let status =
        unsafe { ffi::od_saved_tensors_set_depth(i32::try_from(depth).unwrap_or(i32::MAX)) };
    check(status, "setting hooks on saved tensors")
}

impl Drop for HooksGuard {
    fn drop(&mut self) {
        // Taken out first and dropped last: a hook may own anything.
        let removed = STACK.with_borrow_mut(|stack| {
            let at = stack.iter().position(|(id, _)| *id == self.id)?;
            Some((stack.remove(at), stack.len()))
        });
        if let Some((_hook, depth)) = removed {
            // Fewer hooks than before, for which nothing is checked but the number 0 or the engine that
            // was there when this guard was made.
            let _ = set_depth(depth);
        }
    }
}

unsafe extern "C" fn call_pack(
    tensor: RawTensor,
    parameter: i32,
    packed: *mut *mut c_void,
) -> ffi::RawFailure {
    // SAFETY: the shim gives the handle away.
    let tensor = unsafe { Tensor::from_ptr(tensor.cast()) };
    callback::contain(|| {
        let hook = STACK
            .with_borrow(|stack| stack.last().map(|(_, hook)| Rc::clone(hook)))
            .ok_or_else(|| CallbackError::from("no hook on this thread's stack"))?;
        // What a hook does is not what the thread computes.
        let value = dispatch_mode::unseen(|| {
            hook(Saved {
                tensor,
                is_parameter: parameter != 0,
            })
        })?;
        // SAFETY: a place for one pointer, given back to `call_unpack` and once to `drop_packed`.
        unsafe { *packed = Box::into_raw(Box::new(value)).cast() };
        Ok(())
    })
}

unsafe extern "C" fn call_unpack(packed: *mut c_void, out: *mut RawTensor) -> ffi::RawFailure {
    callback::contain(|| {
        // SAFETY: made by `call_pack`, not dropped yet; the shim lets one thread at a time in.
        let value = unsafe { &*packed.cast::<Box<dyn Packed>>().cast_const() };
        let tensor = value.unpack()?;
        // SAFETY: a place for one handle, which the shim takes over.
        unsafe { *out = into_handle(tensor) };
        Ok(())
    })
}

unsafe extern "C" fn drop_packed(packed: *mut c_void) {
    // A panic in a destructor has nobody to go to; it must not unwind into C++ either.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: made by `call_pack`, dropped once.
        unsafe { drop(Box::from_raw(packed.cast::<Box<dyn Packed>>())) }
    }));
}

/// A tensor saved as a node of the graph saves its inputs: it goes through the hooks of the thread that
/// makes it, keeps its place in the graph, and is checked for in-place changes when it is taken out.
#[derive(Debug)]
pub struct SavedVariable {
    raw: *mut ffi::RawSavedVariable,
}

// SAFETY: it is what libtorch's nodes hold, which go from thread to thread; what stands behind hooks is
// `Send` (see `Packed`).
unsafe impl Send for SavedVariable {}

impl SavedVariable {
    /// Saves `tensor`.
    ///
    /// # Errors
    /// libtorch's for tensors made in inference mode, or what a hook returned.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is valid while borrowed; `raw` is written only on success.
        let status = unsafe { ffi::od_saved_variable_new(handle(tensor), &raw mut raw) };
        check(status, "saving a tensor")?;
        Ok(Self { raw })
    }

    /// The tensor, with its place in the graph.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if it was changed in place since, or what a hook returned.
    pub fn unpack(&self) -> Result<Tensor> {
        let mut raw = ptr::null_mut();
        // SAFETY: alive with `self`; on success `raw` is a new handle that nobody else owns.
        unsafe {
            let status = ffi::od_saved_variable_unpack(self.raw, &raw mut raw);
            check(status, "taking out a saved tensor")?;
            Ok(Tensor::from_ptr(raw.cast()))
        }
    }
}

impl Drop for SavedVariable {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_saved_variable_free(self.raw) }
    }
}

/// A number for the backward pass that this thread is in, different for each; `None` outside of one.
pub fn backward_pass() -> Option<u64> {
    // SAFETY: reads a thread-local.
    u64::try_from(unsafe { ffi::od_graph_task_id() }).ok()
}

/// Backward passes that this thread starts run on this thread alone until the guard is dropped, on a
/// GPU too (`torch.autograd.set_multithreading_enabled(False)`).
#[derive(Debug)]
#[must_use = "the setting ends when the guard is dropped"]
pub struct BackwardOnThisThread {
    before: i32,
    on_this_thread: PhantomData<*const ()>,
}

impl BackwardOnThisThread {
    /// From here on.
    pub fn new() -> Self {
        Self {
            // SAFETY: sets a thread-local flag.
            before: unsafe { ffi::od_backward_threads_set(0) },
            on_this_thread: PhantomData,
        }
    }
}

impl Default for BackwardOnThisThread {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BackwardOnThisThread {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { ffi::od_backward_threads_set(self.before) };
    }
}

/// The identity of a tensor's memory: while one is held, no other memory has its [`address`](Self::address),
/// even if the tensor is gone.
#[derive(Debug)]
pub struct StorageId {
    raw: *mut ffi::RawStorage,
    address: usize,
}

// SAFETY: a weak reference with an atomic count, and a number.
unsafe impl Send for StorageId {}

impl StorageId {
    /// Of the memory behind `tensor`, which views of it share.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for tensors without memory of the usual kind (sparse ones).
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let (mut raw, mut address) = (ptr::null_mut(), ptr::null());
        // SAFETY: the handle is valid while borrowed; both are written only on success.
        let status = unsafe { ffi::od_storage_of(handle(tensor), &raw mut raw, &raw mut address) };
        check(status, "reading a tensor's storage")?;
        Ok(Self {
            raw,
            address: address as usize,
        })
    }

    /// A number that only this memory has.
    pub fn address(&self) -> usize {
        self.address
    }
}

impl Drop for StorageId {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_storage_free(self.raw) }
    }
}

/// The end of a copy that runs beside the computation.
#[derive(Debug)]
pub struct Copied {
    raw: *mut ffi::RawCopied,
}

// SAFETY: an event handle of the device, which libtorch's events let any thread wait for.
unsafe impl Send for Copied {}

impl Copied {
    /// Makes what `device`'s current stream does from here on wait for the copy. Does not block.
    ///
    /// # Errors
    /// The device's.
    pub fn wait_on(&self, device: Device) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: alive with `self`.
        let status =
            unsafe { ffi::od_copied_wait(self.raw, device_type(device), device_index(device)) };
        check(status, "waiting for a copy")
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; null is let be.
        unsafe { ffi::od_copied_free(self.raw) }
    }
}

/// Copies `from` into `to`, of the same shape and dtype, one on the host and one on a device: on a
/// stream of its own, after what the current stream has been given so far. The host's tensor should be
/// pinned, must not be touched before the copy is done, and must stay alive until then. Between host
/// tensors it is a plain copy.
///
/// # Errors
/// libtorch's.
pub fn copy_aside(from: &Tensor, to: &Tensor) -> Result<Copied> {
    let mut raw = ptr::null_mut();
    // SAFETY: the handles are valid while borrowed; `to` is written as by an in-place operator on a
    // shallow clone.
    let status = unsafe { ffi::od_copy_aside(handle(from), handle(to), &raw mut raw) };
    check(status, "copying between host and device")?;
    Ok(Copied { raw })
}

type Borrowing<'a> = dyn Fn(&[Tensor]) -> CallbackResult<()> + 'a;

/// A closure that may borrow, called from code without a lifetime as long as it is lent.
struct Loan {
    owner: ThreadId,
    /// Read and emptied on the owner's thread only.
    call: RefCell<Option<Rc<Borrowing<'static>>>>,
}

// SAFETY: `Lent` checks the thread before it touches the closure, and `lending` empties the loan on its
// own thread before any reference to it outlives the borrows: what is dropped elsewhere is empty.
unsafe impl Send for Loan {}
// SAFETY: as above.
unsafe impl Sync for Loan {}

/// A closure lent by [`lending`]: it can be kept anywhere, and called on the lender's thread until the
/// lending ends.
#[derive(Clone)]
pub struct Lent(Arc<Loan>);

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lent").field(&self.0.owner).finish()
    }
}

impl Lent {
    /// Calls the closure.
    ///
    /// # Errors
    /// On another thread than the lender's, after the lending has ended, and the closure's own.
    pub fn call(&self, inputs: &[Tensor]) -> CallbackResult<()> {
        if thread::current().id() != self.0.owner {
            return Err(
                "it borrows what belongs to the thread that ran it first, and this is another \
                        one: run backward on that thread and keep it there (BackwardOnThisThread)"
                    .into(),
            );
        }
        let call = self.0.call.borrow().clone();
        let call = call.ok_or("what it borrows is gone: run backward inside of its scope")?;
        call(inputs)
    }

    /// Gives the closure back before the lending ends, if this is its thread.
    pub fn end(&self) {
        if thread::current().id() == self.0.owner {
            let closure = self.0.call.take();
            drop(closure);
        }
    }
}

/// Lends closures; see [`lending`].
#[derive(Debug)]
pub struct Lender<'scope, 'env: 'scope> {
    lent: Rc<RefCell<Vec<Lent>>>,
    /// Invariant, as in `std::thread::Scope`: the scope can be neither lengthened nor shortened.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope> Lender<'scope, '_> {
    /// Lends a closure until the scope ends.
    pub fn lend(&self, closure: impl Fn(&[Tensor]) -> CallbackResult<()> + 'scope) -> Lent {
        let closure: Rc<Borrowing<'scope>> = Rc::new(closure);
        // SAFETY: only the lifetime changes. `lending` takes the closure out of the loan before 'scope
        // ends, whatever way its body ends, and on the thread that all calls are made on; a call keeps
        // its own count of it only while it runs, on the stack above that body.
        let closure: Rc<Borrowing<'static>> = unsafe { std::mem::transmute(closure) };
        let lent = Lent(Arc::new(Loan {
            owner: thread::current().id(),
            call: RefCell::new(Some(closure)),
        }));
        let mut loans = self.lent.borrow_mut();
        // Those that ended early; at each doubling, so that it costs little.
        if loans.len() == loans.capacity() {
            loans.retain(|lent| lent.0.call.borrow().is_some());
        }
        loans.push(lent.clone());
        lent
    }
}

/// Runs `body` with a lender. Every closure that was lent has been dropped when this returns; what still
/// holds one gets an error from it.
///
/// Closures may borrow what lives outside of `body`:
///
/// ```
/// use overdrive_sys::saved_tensors::lending;
///
/// let weight = tch::Tensor::from(2.0);
/// let kept = lending(|lender| {
///     let lent = lender.lend(|inputs| Ok(drop(inputs[0].f_mul(&weight)?)));
///     lent.call(&[tch::Tensor::from(1.0)]).map(|()| lent)
/// })?;
/// assert!(kept.call(&[tch::Tensor::from(1.0)]).is_err());
/// # Ok::<(), overdrive_sys::CallbackError>(())
/// ```
///
/// and not what lives inside:
///
/// ```compile_fail,E0597
/// overdrive_sys::saved_tensors::lending(|lender| {
///     let weight = tch::Tensor::from(2.0);
///     lender.lend(|inputs| Ok(drop(inputs[0].f_mul(&weight)?)));
/// });
/// ```
pub fn lending<'env, T>(body: impl for<'scope> FnOnce(&'scope Lender<'scope, 'env>) -> T) -> T {
    struct End(Rc<RefCell<Vec<Lent>>>);
    impl Drop for End {
        fn drop(&mut self) {
            for lent in self.0.take() {
                let closure = lent.0.call.take();
                drop(closure);
            }
        }
    }
    let lender = Lender {
        lent: Rc::default(),
        scope: PhantomData,
        env: PhantomData,
    };
    // Dropped before the lender, to which the closures may hold references.
    let _end = End(Rc::clone(&lender.lent));
    body(&lender)
}
