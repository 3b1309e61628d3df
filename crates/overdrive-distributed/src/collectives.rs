//! The implementation of the collectives.

use std::time::Duration;

use overdrive_sys::c10d::{self, Collective, Work};
use tch::{Device, Kind, Tensor};

use crate::pending::{Finish, contiguous};
use crate::{Backend, Error, Pending, ProcessGroup, Result};

/// The reduction of the values of several ranks (`torch.distributed.ReduceOp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The mean. The mean of integers is truncated towards zero.
    Avg,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// The product.
    Product,
}

/// The collectives of a group with a timeout of their own; see [`ProcessGroup::with_timeout`].
#[derive(Debug, Clone, Copy)]
pub struct GroupCalls<'a> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) timeout: Option<Duration>,
    /// If `true`, tensors are not compared between the ranks, whatever the group's `check_tensors` is.
    pub(crate) unchecked: bool,
}

/// The collectives are documented at [`ProcessGroup`].
#[allow(clippy::missing_errors_doc, reason = "as on ProcessGroup")]
impl GroupCalls<'_> {
    /// [`ProcessGroup::all_reduce`].
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.all_reduce_async(tensor, op)?.wait()
    }

    /// [`ProcessGroup::all_reduce_async`].
    pub fn all_reduce_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        self.in_place(tensor, op, |tensor, op| Collective::AllReduce(tensor, op))
    }

    /// [`ProcessGroup::broadcast`].
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.broadcast_async(tensor, root)?.wait()
    }

    /// [`ProcessGroup::broadcast_async`].
    pub fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        self.check_rank("root", root)?;
        self.in_place(tensor, ReduceOp::Sum, |tensor, _| {
            Collective::Broadcast(tensor, root)
        })
    }

    /// [`ProcessGroup::reduce`].
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<()> {
        self.check_rank("root", root)?;
        self.in_place(tensor, op, |tensor, op| {
            Collective::Reduce(tensor, op, root)
        })?
        .wait()
    }

    /// [`ProcessGroup::all_gather`].
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let input = detached_contiguous(tensor)?;
        let outputs = self.empty_like(&input, self.group.world_size())?;
        if self.is_single() {
            return copy_to_all(&input, outputs);
        }
        self.run(&Collective::AllGather(&input, &outputs))?;
        Ok(outputs)
    }

    /// [`ProcessGroup::reduce_scatter`].
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let input = detached_contiguous(tensor)?;
        let chunks = self.chunks(&input)?;
        let output = chunks[self.group.rank()].f_empty_like()?;
        if self.is_single() {
            copy_to_all(&input, vec![output.shallow_clone()])?;
            return Ok(output);
        }
        let (plain_op, divide) = self.backend_op(op, &output);
        self.run(&Collective::ReduceScatter(&input, &output, plain_op))?;
        self.pending(None, divide.into_iter().collect()).wait()?;
        Ok(output)
    }

    /// [`ProcessGroup::gather`].
    pub fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>> {
        self.check_rank("root", root)?;
        let input = detached_contiguous(tensor)?;
        let is_root = self.group.rank() == root;
        let outputs = self.empty_like(&input, if is_root { self.group.world_size() } else { 0 })?;
        if self.is_single() {
            return copy_to_all(&input, outputs).map(Some);
        }
        self.run(&Collective::Gather(&input, &outputs, root))?;
        Ok(is_root.then_some(outputs))
    }

    /// [`ProcessGroup::scatter`].
    pub fn scatter(&self, tensors: &[Tensor], output: &Tensor, root: usize) -> Result<()> {
        self.check_rank("root", root)?;
        let is_root = self.group.rank() == root;
        let expected = if is_root { self.group.world_size() } else { 0 };
        if tensors.len() != expected {
            return Err(overdrive_core::Error::option(
                "tensors",
                format!(
                    "a list of {} at rank {}",
                    tensors.len(),
                    self.group.rank()
                ),
                format!(
                    "a list of {expected}: one tensor for each rank at rank {root}, none at the others"
                ),
            )
            .into());
        }
        let inputs = tensors
            .iter()
            .map(detached_contiguous)
            .collect::<Result<Vec<_>>>()?;
        if self.is_single() {
            copy_to_all(&inputs[0], vec![output.f_detach()?])?;
            return Ok(());
        }
        let (target, copy_back) = contiguous(output)?;
        self.run(&Collective::Scatter(&inputs, &target, root))?;
        self.pending(None, copy_back.into_iter().collect()).wait()
    }

    /// [`ProcessGroup::all_to_all`].
    pub fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor> {
        let input = detached_contiguous(tensor)?;
        self.chunks(&input)?;
        let output = input.f_empty_like()?;
        if self.is_single() {
            copy_to_all(&input, vec![output.shallow_clone()])?;
            return Ok(output);
        }
        self.run(&Collective::AllToAll(&input, &output))?;
        Ok(output)
    }

    /// [`ProcessGroup::send`].
    pub fn send(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<()> {
        self.check_peer("to", to)?;
        self.run(&Collective::Send(&detached_contiguous(tensor)?, to, tag))
    }

    /// [`ProcessGroup::recv`].
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: i32) -> Result<()> {
        self.check_peer("from", from)?;
        let (target, copy_back) = contiguous(tensor)?;
        self.run(&Collective::Recv(&target, from, tag))?;
        self.pending(None, copy_back.into_iter().collect()).wait()
    }

    /// [`ProcessGroup::barrier`].
    pub fn barrier(&self) -> Result<()> {
        if self.is_single() {
            return Ok(());
        }
        self.run(&Collective::Barrier)
    }

    /// [`ProcessGroup::all_gather_bytes`].
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.is_single() {
            return Ok(vec![bytes.to_vec()]);
        }
        let device = self.device();
        // all_gather needs equal shapes, so the lengths are exchanged first and the bytes padded to the longest.
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?.f_to_device(device)?;
        // These tensors are made here, so they match on all ranks; a check would call this method again.
        let unchecked = self.without_check();
        let lengths = unchecked.all_gather(&length)?;
        let lengths = lengths
            .iter()
            .map(|length| Ok(length.f_int64_value(&[0])?))
            .collect::<Result<Vec<i64>>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = bytes.to_vec();
        // At least one byte, so that no collective gets an empty tensor.
        padded.resize(usize::try_from(longest).unwrap_or(0).max(1), 0);
        let padded = Tensor::f_from_slice(&padded)?.f_to_device(device)?;
        let all = unchecked.all_gather(&padded)?;
        all.iter()
            .zip(lengths)
            .map(|(bytes, length)| Ok(Vec::<u8>::try_from(bytes.f_narrow(0, 0, length)?)?))
            .collect()
    }

    /// [`ProcessGroup::broadcast_bytes`].
    pub fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>> {
        self.check_rank("root", root)?;
        if self.is_single() {
            return Ok(bytes.to_vec());
        }
        let device = self.device();
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?.f_to_device(device)?;
        self.broadcast(&length, root)?;
        let length = length.f_int64_value(&[0])?;
        if length == 0 {
            return Ok(Vec::new());
        }
        let buffer = if self.group.rank() == root {
            Tensor::f_from_slice(bytes)?.f_to_device(device)?
        } else {
            Tensor::f_zeros([length], (Kind::Uint8, device))?
        };
        self.broadcast(&buffer, root)?;
        Ok(Vec::<u8>::try_from(buffer)?)
    }
}

impl GroupCalls<'_> {
    fn is_single(&self) -> bool {
        self.group.shared.connected.is_none()
    }

    fn device(&self) -> Device {
        match self.group.shared.config.backend {
            Backend::Gloo => Device::Cpu,
            Backend::Nccl => self.group.device(),
        }
    }

    fn without_check(&self) -> Self {
        Self {
            unchecked: true,
            ..*self
        }
    }

    fn start(&self, collective: &Collective<'_>) -> Result<Option<Work>> {
        let Some(connected) = &self.group.shared.connected else {
            return Ok(None);
        };
        if self.group.shared.config.check_tensors && !self.unchecked {
            self.check_tensors(collective)?;
        }
        // An error here may be a consequence of an earlier failure of the group, which is then the better message.
        let started = connected.group.start(collective, self.timeout);
        started.map(Some).map_err(|error| self.group.error(error))
    }

    /// Checks that all ranks are about to call the same collective on the same kind of tensors.
    fn check_tensors(&self, collective: &Collective<'_>) -> Result<()> {
        let own = describe(collective);
        if own.is_empty() {
            return Ok(());
        }
        let all = self.without_check().all_gather_bytes(own.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else {
            return Ok(());
        };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        Err(Error::TensorMismatch {
            rank,
            call: text(rank),
            main_call: text(0),
        })
    }

    fn run(&self, collective: &Collective<'_>) -> Result<()> {
        let work = self.start(collective)?;
        self.pending(work, Vec::new()).wait()
    }

    fn pending(&self, work: Option<Work>, finish: Vec<Finish>) -> Pending {
        Pending {
            group: self.group.clone(),
            work,
            finish,
        }
    }

    fn in_place<'t>(
        &self,
        tensor: &Tensor,
        op: ReduceOp,
        collective: impl for<'c> Fn(&'c Tensor, c10d::ReduceOp) -> Collective<'c> + 't,
    ) -> Result<Pending> {
        if self.is_single() {
            return Ok(self.pending(None, Vec::new()));
        }
        let (target, copy_back) = contiguous(tensor)?;
        let (op, divide) = self.backend_op(op, &target);
        let work = self.start(&collective(&target, op))?;
        // The division applies to the reduced tensor, so it comes before the copy.
        Ok(self.pending(work, divide.into_iter().chain(copy_back).collect()))
    }

    /// Returns the backend's reduction and the operation that completes it: Gloo has no mean.
    fn backend_op(&self, op: ReduceOp, tensor: &Tensor) -> (c10d::ReduceOp, Option<Finish>) {
        let by = i64::try_from(self.group.world_size()).unwrap_or(i64::MAX);
        match op {
            ReduceOp::Sum => (c10d::ReduceOp::Sum, None),
            ReduceOp::Min => (c10d::ReduceOp::Min, None),
            ReduceOp::Max => (c10d::ReduceOp::Max, None),
            ReduceOp::Product => (c10d::ReduceOp::Product, None),
            ReduceOp::Avg if self.group.shared.config.backend == Backend::Nccl => {
                (c10d::ReduceOp::Avg, None)
            }
            ReduceOp::Avg => {
                let tensor = tensor.shallow_clone();
                (c10d::ReduceOp::Sum, Some(Finish::Divide { tensor, by }))
            }
        }
    }

    fn empty_like(&self, tensor: &Tensor, count: usize) -> Result<Vec<Tensor>> {
        (0..count).map(|_| Ok(tensor.f_empty_like()?)).collect()
    }

    /// Splits the first dimension into one chunk per rank.
    fn chunks(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let ranks = i64::try_from(self.group.world_size()).unwrap_or(i64::MAX);
        let size = tensor.size();
        match size.first() {
            Some(first) if first % ranks == 0 => Ok(tensor.f_chunk(ranks, 0)?),
            _ => {
                let expected =
                    format!("a shape whose first dimension is a multiple of the {ranks} ranks");
                Err(overdrive_core::Error::shape("tensor", size, expected).into())
            }
        }
    }

    fn check_rank(&self, argument: &'static str, rank: usize) -> Result<()> {
        let ranks = self.group.world_size();
        let expected = format!("a rank of the group, less than {ranks}");
        Ok(overdrive_core::check_option(
            rank < ranks,
            argument,
            rank,
            expected,
        )?)
    }

    fn check_peer(&self, argument: &'static str, rank: usize) -> Result<()> {
        self.check_rank(argument, rank)?;
        let is_other = rank != self.group.rank();
        Ok(overdrive_core::check_option(
            is_other,
            argument,
            rank,
            "a rank other than this one",
        )?)
    }
}

/// Describes what must be equal on all ranks; empty for a send or receive, which only two ranks call.
fn describe(collective: &Collective<'_>) -> String {
    let (name, tensor) = match collective {
        Collective::AllReduce(tensor, op) => (format!("all_reduce of {op:?}"), Some(*tensor)),
        Collective::Broadcast(tensor, root) => (format!("broadcast from {root}"), Some(*tensor)),
        Collective::Reduce(tensor, op, root) => {
            (format!("reduce of {op:?} to {root}"), Some(*tensor))
        }
        Collective::AllGather(tensor, _) => ("all_gather".to_owned(), Some(*tensor)),
        Collective::ReduceScatter(_, tensor, op) => {
            (format!("reduce_scatter of {op:?}"), Some(*tensor))
        }
        Collective::Gather(tensor, _, root) => (format!("gather to {root}"), Some(*tensor)),
        Collective::Scatter(_, tensor, root) => (format!("scatter from {root}"), Some(*tensor)),
        Collective::AllToAll(tensor, _) => ("all_to_all".to_owned(), Some(*tensor)),
        Collective::Barrier => ("barrier".to_owned(), None),
        Collective::Send(..) | Collective::Recv(..) => return String::new(),
    };
    match tensor {
        Some(tensor) => format!("{name}, {:?} {:?}", tensor.kind(), tensor.size()),
        None => name,
    }
}

/// Returns the tensor without its graph, in contiguous memory, as c10d requires.
fn detached_contiguous(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_contiguous()?)
}

fn copy_to_all(input: &Tensor, mut outputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let _no_grad = tch::no_grad_guard();
    for output in &mut outputs {
        output.f_copy_(input)?;
    }
    Ok(outputs)
}
