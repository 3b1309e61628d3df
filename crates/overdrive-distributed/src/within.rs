//! How each collective is called.

use std::time::Duration;

use overdrive_sys::c10d::{self, Collective, Work};
use tch::{Device, Kind, Tensor};

use crate::pending::{After, contiguous};
use crate::{Backend, Error, Pending, ProcessGroup, ReduceOp, Result};

/// A group whose collectives have another timeout.
#[derive(Debug, Clone, Copy)]
pub struct Within<'a> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) timeout: Option<Duration>,
    /// Whether tensors are not compared, though the group does so.
    pub(crate) unchecked: bool,
}

/// Each as on [`ProcessGroup`].
#[allow(clippy::missing_errors_doc, reason = "as on ProcessGroup")]
impl Within<'_> {
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
        let input = plain(tensor)?;
        let outputs = self.like(&input, self.group.world_size())?;
        if self.alone() {
            return copied(&input, outputs);
        }
        self.run(&Collective::AllGather(&input, &outputs))?;
        Ok(outputs)
    }

    /// [`ProcessGroup::reduce_scatter`].
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let input = plain(tensor)?;
        let parts = self.parts("reduce_scatter", &input)?;
        let output = parts[self.group.rank()].f_empty_like()?;
        if self.alone() {
            copied(&input, vec![output.shallow_clone()])?;
            return Ok(output);
        }
        let (plain_op, divide) = self.divided(op, &output);
        self.run(&Collective::ReduceScatterInto(&input, &output, plain_op))?;
        self.pending(None, divide.into_iter().collect()).wait()?;
        Ok(output)
    }

    /// [`ProcessGroup::gather`].
    pub fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>> {
        self.check_rank("root", root)?;
        let input = plain(tensor)?;
        let here = self.group.rank() == root;
        let outputs = self.like(&input, if here { self.group.world_size() } else { 0 })?;
        if self.alone() {
            return copied(&input, outputs).map(Some);
        }
        self.run(&Collective::Gather(&input, &outputs, root))?;
        Ok(here.then_some(outputs))
    }

    /// [`ProcessGroup::scatter`].
    pub fn scatter(&self, tensors: &[Tensor], output: &Tensor, root: usize) -> Result<()> {
        self.check_rank("root", root)?;
        let here = self.group.rank() == root;
        let expected = if here { self.group.world_size() } else { 0 };
        if tensors.len() != expected {
            return Err(Error::InvalidTensor {
                operation: "scatter",
                problem: format!(
                    "{} tensors at rank {}, expected {expected}: one for each rank at rank {root}, none \
                     elsewhere",
                    tensors.len(),
                    self.group.rank()
                ),
            });
        }
        let inputs = tensors.iter().map(plain).collect::<Result<Vec<_>>>()?;
        if self.alone() {
            copied(&inputs[0], vec![output.f_detach()?])?;
            return Ok(());
        }
        let (target, after) = contiguous(output)?;
        self.run(&Collective::Scatter(&inputs, &target, root))?;
        self.pending(None, after.into_iter().collect()).wait()
    }

    /// [`ProcessGroup::all_to_all`].
    pub fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor> {
        let input = plain(tensor)?;
        self.parts("all_to_all", &input)?;
        let output = input.f_empty_like()?;
        if self.alone() {
            copied(&input, vec![output.shallow_clone()])?;
            return Ok(output);
        }
        self.run(&Collective::AllToAll(&input, &output))?;
        Ok(output)
    }

    /// [`ProcessGroup::send`].
    pub fn send(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<()> {
        self.check_peer("to", to)?;
        self.run(&Collective::Send(&plain(tensor)?, to, tag))
    }

    /// [`ProcessGroup::recv`].
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: i32) -> Result<()> {
        self.check_peer("from", from)?;
        let (target, after) = contiguous(tensor)?;
        self.run(&Collective::Recv(&target, from, tag))?;
        self.pending(None, after.into_iter().collect()).wait()
    }

    /// [`ProcessGroup::barrier`].
    pub fn barrier(&self) -> Result<()> {
        if self.alone() {
            return Ok(());
        }
        self.run(&Collective::Barrier)
    }

    /// [`ProcessGroup::all_gather_bytes`].
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.alone() {
            return Ok(vec![bytes.to_vec()]);
        }
        let device = self.device();
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?.f_to_device(device)?;
        // Of tensors that are made here.
        let unchecked = Within {
            unchecked: true,
            ..*self
        };
        let lengths = unchecked.all_gather(&length)?;
        let lengths = lengths
            .iter()
            .map(|length| Ok(length.f_int64_value(&[0])?))
            .collect::<Result<Vec<i64>>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = bytes.to_vec();
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
        if self.alone() {
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

impl Within<'_> {
    fn alone(&self) -> bool {
        self.group.shared.connected.is_none()
    }

    fn device(&self) -> Device {
        match self.group.shared.config.backend {
            Backend::Gloo => Device::Cpu,
            Backend::Nccl => self.group.device(),
        }
    }

    fn start(&self, collective: &Collective<'_>) -> Result<Option<Work>> {
        let Some(connected) = &self.group.shared.connected else {
            return Ok(None);
        };
        if self.group.shared.config.check_tensors && !self.unchecked {
            self.check_tensors(collective)?;
        }
        let started = connected.group.start(collective, self.timeout);
        started.map(Some).map_err(|error| self.group.error(error))
    }

    /// Whether all ranks are about to do the same.
    fn check_tensors(&self, collective: &Collective<'_>) -> Result<()> {
        let own = described(collective);
        if own.is_empty() {
            return Ok(());
        }
        let unchecked = Within {
            unchecked: true,
            ..*self
        };
        let all = unchecked.all_gather_bytes(own.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else {
            return Ok(());
        };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        Err(Error::TensorMismatch {
            rank,
            there: text(rank),
            on_main: text(0),
        })
    }

    fn run(&self, collective: &Collective<'_>) -> Result<()> {
        let work = self.start(collective)?;
        self.pending(work, Vec::new()).wait()
    }

    fn pending(&self, work: Option<Work>, after: Vec<After>) -> Pending {
        Pending {
            group: self.group.clone(),
            work,
            after,
        }
    }

    fn in_place<'t>(
        &self,
        tensor: &Tensor,
        op: ReduceOp,
        collective: impl for<'c> Fn(&'c Tensor, c10d::ReduceOp) -> Collective<'c> + 't,
    ) -> Result<Pending> {
        if self.alone() {
            return Ok(self.pending(None, Vec::new()));
        }
        let (target, copy_back) = contiguous(tensor)?;
        let (op, divide) = self.divided(op, &target);
        let work = self.start(&collective(&target, op))?;
        // The division is of what was reduced, so before it is copied.
        Ok(self.pending(work, divide.into_iter().chain(copy_back).collect()))
    }

    /// Gloo knows no mean.
    fn divided(&self, op: ReduceOp, tensor: &Tensor) -> (c10d::ReduceOp, Option<After>) {
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
                (c10d::ReduceOp::Sum, Some(After::Divide { tensor, by }))
            }
        }
    }

    fn like(&self, tensor: &Tensor, count: usize) -> Result<Vec<Tensor>> {
        (0..count).map(|_| Ok(tensor.f_empty_like()?)).collect()
    }

    /// The tensor in as many parts as there are ranks.
    fn parts(&self, operation: &'static str, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let ranks = i64::try_from(self.group.world_size()).unwrap_or(i64::MAX);
        let size = tensor.size();
        match size.first() {
            Some(first) if first % ranks == 0 => Ok(tensor.f_chunk(ranks, 0)?),
            _ => Err(Error::InvalidTensor {
                operation,
                problem: format!(
                    "a tensor of shape {size:?}, expected a first dimension that is a multiple of the \
                     {ranks} ranks"
                ),
            }),
        }
    }

    fn check_rank(&self, argument: &'static str, rank: usize) -> Result<()> {
        let ranks = self.group.world_size();
        if rank < ranks {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            argument,
            value: rank.to_string(),
            expected: format!("a rank, less than {ranks}"),
        })
    }

    fn check_peer(&self, argument: &'static str, rank: usize) -> Result<()> {
        self.check_rank(argument, rank)?;
        if rank != self.group.rank() {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            argument,
            value: rank.to_string(),
            expected: "another rank than this one".to_owned(),
        })
    }
}

/// What must be the same on all ranks; nothing for a call between two of them.
fn described(collective: &Collective<'_>) -> String {
    let (name, tensor) = match collective {
        Collective::AllReduce(tensor, op) => (format!("all_reduce of {op:?}"), Some(*tensor)),
        Collective::Broadcast(tensor, root) => (format!("broadcast from {root}"), Some(*tensor)),
        Collective::Reduce(tensor, op, root) => {
            (format!("reduce of {op:?} to {root}"), Some(*tensor))
        }
        Collective::AllGather(tensor, _) | Collective::AllGatherInto(tensor, _) => {
            ("all_gather".to_owned(), Some(*tensor))
        }
        Collective::ReduceScatter(_, tensor, op) | Collective::ReduceScatterInto(_, tensor, op) => {
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

/// Without the graph, and contiguous.
fn plain(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_contiguous()?)
}

fn copied(input: &Tensor, mut outputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let _no_grad = tch::no_grad_guard();
    for output in &mut outputs {
        output.f_copy_(input)?;
    }
    Ok(outputs)
}
