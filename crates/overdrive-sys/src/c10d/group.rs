//! Collectives between the processes of a group.

use std::ptr;
use std::time::Duration;

use tch::Tensor;

use super::ffi::CollectiveKind;
use super::{Store, c_string, ffi, handles, millis};
use crate::error::{Result, check, take_string};
use crate::ffi::RawTensor;

/// The reduction of the values of several ranks to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The mean. Only NCCL has it; with Gloo, use the sum and divide.
    Avg,
    /// The product.
    Product,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
}

impl ReduceOp {
    fn code(self) -> i32 {
        // c10d::ReduceOp::RedOpType.
        match self {
            Self::Sum => 0,
            Self::Avg => 1,
            Self::Product => 2,
            Self::Min => 3,
            Self::Max => 4,
        }
    }
}

/// The network device that Gloo listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkDevice<'a> {
    /// The device of the machine's host name; loopback if the name does not resolve.
    HostName,
    /// The interface of this name, such as `eth0`.
    Interface(&'a str),
    /// The device of an address or a host name.
    Address(&'a str),
}

/// A collective with its tensors, which must be on one device. [`Group::start`] refuses those that are not
/// contiguous.
#[derive(Debug, Clone, Copy)]
pub enum Collective<'a> {
    /// Reduces the tensors of all ranks and stores the result in all of them, in place.
    AllReduce(&'a Tensor, ReduceOp),
    /// Copies the root's tensor into the tensors of all ranks.
    Broadcast(&'a Tensor, usize),
    /// Reduces the tensors of all ranks into the root's tensor.
    Reduce(&'a Tensor, ReduceOp, usize),
    /// Copies the inputs of all ranks into the outputs of all ranks; each rank has one output per rank.
    AllGather(&'a Tensor, &'a [Tensor]),
    /// Reduces chunk k of the inputs of all ranks, equal chunks along the first dimension, into the output of rank k.
    ReduceScatter(&'a Tensor, &'a Tensor, ReduceOp),
    /// Copies the inputs of all ranks into the root's outputs; the other ranks pass no outputs.
    Gather(&'a Tensor, &'a [Tensor], usize),
    /// Copies the root's input k into the output of rank k; the other ranks pass no inputs.
    Scatter(&'a [Tensor], &'a Tensor, usize),
    /// Sends chunk k of the first dimension to rank k, and receives one chunk from each rank.
    AllToAll(&'a Tensor, &'a Tensor),
    /// Sends a tensor to a rank, with a tag.
    Send(&'a Tensor, usize, i32),
    /// Receives a tensor from a rank, with a tag.
    Recv(&'a Tensor, usize, i32),
    /// Waits for all ranks.
    Barrier,
}

/// A process group whose collectives are watched for failures.
///
/// Collectives may be started from several threads, but in the same order on every rank.
#[derive(Debug)]
pub struct Group {
    pub(super) raw: *mut ffi::RawGroup,
}

// SAFETY: the backends of the shim start collectives under a lock, and the watch has its own lock.
unsafe impl Send for Group {}
// SAFETY: as above; the handle itself is never changed after construction.
unsafe impl Sync for Group {}

impl Group {
    /// Connects `size` processes over Gloo. All of them must make this call with the same store.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if a peer does not connect within `timeout`, which is also the default
    /// timeout of every collective.
    pub fn gloo(
        store: &Store,
        rank: usize,
        size: usize,
        timeout: Duration,
        device: NetworkDevice<'_>,
    ) -> Result<Self> {
        let operation = "connecting a Gloo group";
        let (interface, address) = match device {
            NetworkDevice::HostName => (None, None),
            NetworkDevice::Interface(name) => (Some(c_string(name, operation)?), None),
            NetworkDevice::Address(name) => (None, Some(c_string(name, operation)?)),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the store is alive; the strings outlive the call or are null.
        let status = unsafe {
            ffi::od_group_gloo(
                store.raw,
                int(rank),
                int(size),
                millis(timeout),
                interface.as_ref().map_or(ptr::null(), |text| text.as_ptr()),
                address.as_ref().map_or(ptr::null(), |text| text.as_ptr()),
                &raw mut raw,
            )
        };
        check(status, operation)?;
        Ok(Self { raw })
    }

    /// Connects `size` processes over NCCL, this one with its CUDA device `device`.
    ///
    /// # Errors
    /// [`crate::Error::BadArgument`] in a build without the feature `nccl`.
    pub fn nccl(
        store: &Store,
        rank: usize,
        size: usize,
        timeout: Duration,
        device: usize,
    ) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the store is alive.
        let status = unsafe {
            ffi::od_group_nccl(
                store.raw,
                int(rank),
                int(size),
                millis(timeout),
                int(device),
                &raw mut raw,
            )
        };
        check(status, "connecting an NCCL group")?;
        Ok(Self { raw })
    }

    /// Starts a collective. The tensors are kept alive until it has ended. Before [`Work::wait`] they
    /// must not be written to, and the contents of its outputs are undefined.
    ///
    /// # Errors
    /// [`crate::Error::BadArgument`] for a tensor that is not contiguous or whose storage was resized;
    /// [`crate::Error::Torch`] for tensors that do not fit, and after the group has failed.
    pub fn start(&self, collective: &Collective<'_>, timeout: Option<Duration>) -> Result<Work> {
        let call = Call::of(collective);
        let raw_call = ffi::RawCollective {
            kind: call.kind,
            reduce_op: call.op.code(),
            inputs: call.inputs.as_ptr(),
            n_inputs: call.inputs.len(),
            outputs: call.outputs.as_ptr(),
            n_outputs: call.outputs.len(),
            root: i64::try_from(call.root).unwrap_or(i64::MAX),
            tag: call.tag,
            timeout_ms: timeout.map_or(0, millis),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: group and tensors are alive; the shim copies the handles it keeps.
        let status = unsafe { ffi::od_group_start(self.raw, &raw const raw_call, &raw mut raw) };
        check(status, "starting a collective")?;
        Ok(Work { raw })
    }

    /// Sets the text that follows the ranks in messages, such as the name of a subgroup.
    ///
    /// # Errors
    /// [`crate::Error::BadArgument`] for a zero byte.
    pub fn label(&self, label: &str) -> Result<()> {
        let operation = "naming a group";
        let label = c_string(label, operation)?;
        // SAFETY: the group is alive; the label outlives the call.
        check(
            unsafe { ffi::od_watch_label(self.raw, label.as_ptr()) },
            operation,
        )
    }

    /// Starts the watch: from here on a collective that fails ends only when [`abort`](Self::abort) is
    /// called. A thread of the caller polls for failures and finds their cause.
    pub fn begin_watch(&self) {
        // SAFETY: the group is alive.
        unsafe { ffi::od_watch_begin(self.raw) }
    }

    /// Waits until a collective fails, [`wake`](Self::wake) is called or the time has passed, and returns the
    /// state of the group.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn poll(&self, wait: Duration) -> Result<WatchState> {
        let mut state = ffi::RawWatchState {
            started: 0,
            finished: 0,
            failed: 0,
            aborted: 0,
            failed_number: 0,
            recent: ptr::null_mut(),
            failed_what: ptr::null_mut(),
            failed_text: ptr::null_mut(),
        };
        // SAFETY: the group is alive; `state` is a local.
        let status = unsafe { ffi::od_watch_poll(self.raw, millis(wait), &raw mut state) };
        check(status, "watching a group")?;
        // SAFETY: the call succeeded; each string is taken once.
        let (recent, what, text) = unsafe {
            (
                take_string(state.recent),
                take_string(state.failed_what),
                take_string(state.failed_text),
            )
        };
        Ok(WatchState {
            started: state.started,
            finished: state.finished,
            recent: recent
                .lines()
                .filter_map(StartedCollective::parse)
                .collect(),
            failure: (state.failed != 0).then_some(CollectiveFailure {
                number: state.failed_number,
                what,
                text,
            }),
            aborted: state.aborted != 0,
        })
    }

    /// Ends the [`poll`](Self::poll) of another thread.
    pub fn wake(&self) {
        // SAFETY: the group is alive.
        unsafe { ffi::od_watch_wake(self.raw) }
    }

    /// Ends all running collectives, and all later ones, with an error of this message. Only the first
    /// call has an effect. The connections are closed, so that no peer waits for this process.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch throws.
    pub fn abort(&self, message: &str) -> Result<()> {
        // A zero byte must not keep a failed group from ending.
        let message = c_string(&message.replace('\0', " "), "aborting a group")?;
        // SAFETY: the group is alive; the message outlives the call.
        check(
            unsafe { ffi::od_watch_abort(self.raw, message.as_ptr()) },
            "aborting a group",
        )
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; works and reducers own what they need.
        unsafe { ffi::od_group_free(self.raw) }
    }
}

/// A collective as the shim takes it.
struct Call {
    kind: CollectiveKind,
    /// Ignored by collectives that do not reduce.
    op: ReduceOp,
    inputs: Vec<RawTensor>,
    outputs: Vec<RawTensor>,
    /// The rank of the root or the peer.
    root: usize,
    tag: i32,
}

impl Call {
    fn of(collective: &Collective<'_>) -> Call {
        use CollectiveKind as Kind;
        let one = |tensor: &Tensor| handles(std::slice::from_ref(tensor));
        let new = |kind, inputs, outputs| Call {
            kind,
            op: ReduceOp::Sum,
            inputs,
            outputs,
            root: 0,
            tag: 0,
        };
        match *collective {
            Collective::AllReduce(tensor, op) => Call {
                op,
                ..new(Kind::AllReduce, one(tensor), Vec::new())
            },
            Collective::Broadcast(tensor, root) => Call {
                root,
                ..new(Kind::Broadcast, one(tensor), Vec::new())
            },
            Collective::Reduce(tensor, op, root) => Call {
                op,
                root,
                ..new(Kind::Reduce, one(tensor), Vec::new())
            },
            Collective::AllGather(input, outputs) => {
                new(Kind::AllGather, one(input), handles(outputs))
            }
            Collective::ReduceScatter(input, output, op) => Call {
                op,
                ..new(Kind::ReduceScatter, one(input), one(output))
            },
            Collective::Gather(input, outputs, root) => Call {
                root,
                ..new(Kind::Gather, one(input), handles(outputs))
            },
            Collective::Scatter(inputs, output, root) => Call {
                root,
                ..new(Kind::Scatter, handles(inputs), one(output))
            },
            Collective::AllToAll(input, output) => new(Kind::AllToAll, one(input), one(output)),
            Collective::Send(tensor, root, tag) => Call {
                root,
                tag,
                ..new(Kind::Send, one(tensor), Vec::new())
            },
            Collective::Recv(tensor, root, tag) => Call {
                root,
                tag,
                ..new(Kind::Recv, one(tensor), Vec::new())
            },
            Collective::Barrier => new(Kind::Barrier, Vec::new(), Vec::new()),
        }
    }
}

/// The state of a group's collectives.
#[derive(Debug, Clone)]
pub struct WatchState {
    /// The number of collectives that were started.
    pub started: u64,
    /// The number of them that have ended.
    pub finished: u64,
    /// The collectives that were started last, the newest at the end.
    pub recent: Vec<StartedCollective>,
    /// The first collective that failed, until the group is aborted.
    pub failure: Option<CollectiveFailure>,
    /// If `true`, the group has been aborted.
    pub aborted: bool,
}

/// A collective that has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveFailure {
    /// Its number in the group, from 1; 0 for a send or a receive.
    pub number: u64,
    /// Its name.
    pub what: String,
    /// libtorch's message.
    pub text: String,
}

/// A collective that this rank has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedCollective {
    /// Its number in the group, from 1.
    pub number: u64,
    /// Its name.
    pub what: String,
    /// The dtype and the shape of its tensors; empty for a barrier.
    pub tensors: String,
}

impl StartedCollective {
    /// Parses a line of `od_watch_state::recent`.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(3, '\t');
        Some(Self {
            number: fields.next()?.parse().ok()?,
            what: fields.next()?.to_owned(),
            tensors: fields.next()?.to_owned(),
        })
    }
}

/// A collective that was started.
#[derive(Debug)]
pub struct Work {
    raw: *mut ffi::RawWork,
}

// SAFETY: libtorch's work has a lock, and may be waited for on any thread.
unsafe impl Send for Work {}

impl Work {
    /// Waits until the collective has ended, at most for `timeout`. After a timeout it continues to run.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if it failed or the time has passed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: the work is alive.
        let status = unsafe { ffi::od_work_wait(self.raw, timeout.map_or(0, millis)) };
        check(status, "collective")
    }

    /// Returns `true` if it has ended, with or without an error.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        // SAFETY: the work is alive.
        unsafe { ffi::od_work_is_completed(self.raw) != 0 }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; a running collective continues without it.
        unsafe { ffi::od_work_free(self.raw) }
    }
}

// Numbers beyond i32 become i32::MAX, which is not a valid rank, size or device either.
fn int(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
