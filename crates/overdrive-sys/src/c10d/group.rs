//! Collectives between the processes of a group.

use std::ptr;
use std::time::Duration;

use tch::Tensor;

use super::{Store, c_string, ffi, handles, millis};
use crate::error::{Result, check, take_string};

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean. NCCL only: for Gloo, sum and divide.
    Avg,
    /// Their product.
    Product,
    /// The least.
    Min,
    /// The greatest.
    Max,
}

impl ReduceOp {
    fn code(self) -> i32 {
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
    /// That of the machine's host name; loopback where the name does not resolve.
    HostName,
    /// An interface, such as `eth0`.
    Interface(&'a str),
    /// That of an address or host name.
    Address(&'a str),
}

/// A collective, with the tensors that take part. All are on one device, and contiguous.
#[derive(Debug, Clone, Copy)]
pub enum Collective<'a> {
    /// Reduces a tensor of each rank into all of them, in place.
    AllReduce(&'a Tensor, ReduceOp),
    /// Copies the root's tensor into everyone's.
    Broadcast(&'a Tensor, usize),
    /// Reduces a tensor of each rank into the root's.
    Reduce(&'a Tensor, ReduceOp, usize),
    /// Copies everyone's input into everyone's outputs, of which there is one a rank.
    AllGather(&'a Tensor, &'a [Tensor]),
    /// The same into one output, of the ranks' inputs one after another.
    AllGatherInto(&'a Tensor, &'a Tensor),
    /// Reduces input k of each rank into the output of rank k.
    ReduceScatter(&'a [Tensor], &'a Tensor, ReduceOp),
    /// The same with one input, of equal parts along the first dimension.
    ReduceScatterInto(&'a Tensor, &'a Tensor, ReduceOp),
    /// Copies everyone's input into the root's outputs; elsewhere there are none.
    Gather(&'a Tensor, &'a [Tensor], usize),
    /// Copies the root's input k into the output of rank k; elsewhere there are no inputs.
    Scatter(&'a [Tensor], &'a Tensor, usize),
    /// Part k of the first dimension goes to rank k.
    AllToAll(&'a Tensor, &'a Tensor),
    /// Sends to a rank, with a tag.
    Send(&'a Tensor, usize, i32),
    /// Receives from a rank, with a tag.
    Recv(&'a Tensor, usize, i32),
    /// Waits for everyone.
    Barrier,
}

/// A process group under a watch.
///
/// Collectives may be started from several threads; they must be started in the same order on every
/// rank all the same.
#[derive(Debug)]
pub struct Group {
    pub(super) raw: *mut ffi::RawGroup,
}

// SAFETY: the shim starts collectives under a lock, and the watch has one of its own.
unsafe impl Send for Group {}
// SAFETY: as above; the handle itself is never changed after construction.
unsafe impl Sync for Group {}

impl Group {
    /// Connects `size` processes over Gloo. All of them make this call, with the same store.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if a peer does not come within `timeout`, which is also that of every
    /// collective that names no other.
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

    /// Starts a collective. The tensors are kept alive until it has ended; nobody may write to them, and
    /// those that it writes are not worth reading, before [`Work::wait`].
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for tensors that do not fit, and once the group has failed.
    pub fn start(&self, collective: &Collective<'_>, timeout: Option<Duration>) -> Result<Work> {
        let one = |tensor: &Tensor| handles(std::slice::from_ref(tensor));
        let (kind, op, inputs, outputs, root, tag) = match *collective {
            Collective::AllReduce(tensor, op) => (0, Some(op), one(tensor), vec![], 0, 0),
            Collective::Broadcast(tensor, root) => (1, None, one(tensor), vec![], root, 0),
            Collective::Reduce(tensor, op, root) => (2, Some(op), one(tensor), vec![], root, 0),
            Collective::AllGather(input, outputs) => (3, None, one(input), handles(outputs), 0, 0),
            Collective::AllGatherInto(input, output) => (4, None, one(input), one(output), 0, 0),
            Collective::ReduceScatter(inputs, output, op) => {
                (5, Some(op), handles(inputs), one(output), 0, 0)
            }
            Collective::ReduceScatterInto(input, output, op) => {
                (6, Some(op), one(input), one(output), 0, 0)
            }
            Collective::Gather(input, outputs, root) => {
                (7, None, one(input), handles(outputs), root, 0)
            }
            Collective::Scatter(inputs, output, root) => {
                (8, None, handles(inputs), one(output), root, 0)
            }
            Collective::AllToAll(input, output) => (9, None, one(input), one(output), 0, 0),
            Collective::Send(tensor, peer, tag) => (10, None, one(tensor), vec![], peer, tag),
            Collective::Recv(tensor, peer, tag) => (11, None, one(tensor), vec![], peer, tag),
            Collective::Barrier => (12, None, vec![], vec![], 0, 0),
        };
        let call = ffi::RawCollective {
            kind,
            reduce_op: op.unwrap_or(ReduceOp::Sum).code(),
            inputs: inputs.as_ptr(),
            n_inputs: inputs.len(),
            outputs: outputs.as_ptr(),
            n_outputs: outputs.len(),
            root: i64::try_from(root).unwrap_or(i64::MAX),
            tag,
            timeout_ms: timeout.map_or(0, millis),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: group and tensors are alive; the shim copies the handles it keeps.
        let status = unsafe { ffi::od_group_start(self.raw, &raw const call, &raw mut raw) };
        check(status, "starting a collective")?;
        Ok(Work { raw })
    }

    /// What follows the ranks in messages, such as the name of a part of a group.
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

    /// From here on a collective that fails ends only when [`decide`](Self::decide) says with which
    /// words: the caller polls, and finds out.
    pub fn begin_watch(&self) {
        // SAFETY: the group is alive.
        unsafe { ffi::od_watch_begin(self.raw) }
    }

    /// Waits until a collective fails, [`wake`](Self::wake) is called or the time is over.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn poll(&self, wait: Duration) -> Result<WatchState> {
        let mut state = ffi::RawWatchState {
            started: 0,
            finished: 0,
            failed: 0,
            decided: 0,
            failed_number: 0,
            recent: ptr::null_mut(),
            failed_what: ptr::null_mut(),
            failed_text: ptr::null_mut(),
        };
        // SAFETY: the group is alive; the place is ours.
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
            recent: recent.lines().filter_map(Begun::read).collect(),
            failure: (state.failed != 0).then_some((state.failed_number, what, text)),
            decided: state.decided != 0,
        })
    }

    /// Ends a [`poll`](Self::poll) of another thread.
    pub fn wake(&self) {
        // SAFETY: the group is alive.
        unsafe { ffi::od_watch_wake(self.raw) }
    }

    /// Ends all collectives that are under way, and all later ones, with an error of these words. The
    /// first call counts. The connections are closed, so that no peer waits for this process.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch refuses.
    pub fn decide(&self, words: &str) -> Result<()> {
        let words = c_string(&words.replace('\0', " "), "ending a group")?;
        // SAFETY: the group is alive; the words outlive the call.
        check(
            unsafe { ffi::od_watch_decide(self.raw, words.as_ptr()) },
            "ending a group",
        )
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; works and reducers hold what they need themselves.
        unsafe { ffi::od_group_free(self.raw) }
    }
}

/// What a group is doing.
#[derive(Debug, Clone)]
pub struct WatchState {
    /// How many collectives were started.
    pub started: u64,
    /// How many of them have ended.
    pub finished: u64,
    /// The last ones started, the newest at the end.
    pub recent: Vec<Begun>,
    /// Number, name and libtorch's words of the first that failed, until it is decided on. The number is
    /// 0 for a send or a receive.
    pub failure: Option<(u64, String, String)>,
    /// Whether the group has been ended.
    pub decided: bool,
}

/// A collective that a rank has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// Its number in the group, from 1.
    pub number: u64,
    /// Its name.
    pub what: String,
    /// Dtype and shape of what takes part; empty for a barrier.
    pub tensors: String,
}

impl Begun {
    fn read(line: &str) -> Option<Self> {
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
    /// Waits until it has ended; with a `timeout` at most that long, after which it goes on.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if it failed or the time is over.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: the work is alive.
        let status = unsafe { ffi::od_work_wait(self.raw, timeout.map_or(0, millis)) };
        check(status, "collective")
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        // SAFETY: the work is alive.
        unsafe { ffi::od_work_is_completed(self.raw) != 0 }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; what is under way goes on without it.
        unsafe { ffi::od_work_free(self.raw) }
    }
}

fn int(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
