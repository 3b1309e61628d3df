//! Errors between processes.

use std::time::Duration;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or environment variable outside its range, a tensor of the wrong shape, or a program that
    /// could not be started.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An environment variable that the launcher should have set is missing.
    #[error("{variable} is not set, but {because}; {remedy}")]
    MissingVariable {
        /// The variable.
        variable: &'static str,
        /// The reason why it is needed.
        because: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// Environment variables that contradict each other.
    #[error("{problem}; the launcher sets these variables, so check how the processes are started")]
    ContradictoryVariables {
        /// The variables, their values and the contradiction.
        problem: String,
    },
    /// The rendezvous store could not be opened or reached.
    #[error(
        "rank {rank} could not {action} the store at {address} within {timeout:?}: {source}; {remedy}"
    )]
    Store {
        /// The rank of this process.
        rank: usize,
        /// The action that failed: `open` or `reach`.
        action: &'static str,
        /// The host and port of the store.
        address: String,
        /// The time after which this rank gave up.
        timeout: Duration,
        /// The remedy.
        remedy: &'static str,
        /// The error of libtorch.
        source: Box<overdrive_sys::Error>,
    },
    /// At least one rank did not join the rendezvous in time.
    #[error(
        "rank {rank} waited {timeout:?} for the group of {world_size} processes; missing: {missing}; \
         check whether they were started, and why they ended"
    )]
    Incomplete {
        /// The rank of this process.
        rank: usize,
        /// The number of processes in the group.
        world_size: usize,
        /// The ranks that did not join.
        missing: String,
        /// The time after which this rank gave up.
        timeout: Duration,
    },
    /// Two processes have the same rank, or they disagree about the size of the group.
    #[error("rank {rank} ({process}) {problem}")]
    Disagreement {
        /// The rank of this process.
        rank: usize,
        /// The host and process id of this process.
        process: String,
        /// The contradiction with the other process.
        problem: String,
    },
    /// A collective failed: a peer is lost, is stuck, or called another collective.
    #[error("{message}")]
    Collective {
        /// The ranks at fault, as far as is known.
        ranks: Vec<usize>,
        /// The collective, this rank, the rank at fault and its last known state.
        message: String,
    },
    /// The model is not the same on all ranks.
    #[error("the model of rank {rank} differs from that of rank 0: {differences}")]
    ModelMismatch {
        /// The rank.
        rank: usize,
        /// The parameters and buffers that differ, with their shapes on both ranks.
        differences: String,
    },
    /// The last backward pass left parameters without a gradient, so their reduction never started.
    #[error(
        "rank {rank}: the last backward gave no gradient to these parameters: {names}; set \
         find_unused_parameters, or use every parameter in the loss; if an earlier backward failed, \
         create the DistributedDataParallel again"
    )]
    UnusedParameters {
        /// The rank of this process.
        rank: usize,
        /// The parameters.
        names: String,
    },
    /// The forward pass of a micro-batch before the last of its window ran outside `no_sync`.
    #[error(
        "rank {rank}: the forward of a micro-batch that is not the last of its window ran outside \
         no_sync, so its gradients would be reduced; hold ddp.no_sync() while \
         !accumulator.sync_gradients(), or run forward passes outside ddp.forward"
    )]
    ReducedTooEarly {
        /// The rank of this process.
        rank: usize,
    },
    /// An action that rank 0 runs for all ranks failed there.
    #[error("rank 0 could not {action}: {message}")]
    OnMain {
        /// The action, as a verb phrase.
        action: String,
        /// The error message of rank 0.
        message: String,
    },
    /// A value could not be serialized as JSON, or the value of another rank has another type.
    #[error("cannot exchange a value between the ranks: {source}")]
    Value {
        /// The error of serde.
        #[from]
        source: serde_json::Error,
    },
    /// The ranks call different collectives, or pass different tensors to the same one.
    #[error(
        "rank {rank} calls {call}, but rank 0 calls {main_call}; all ranks must call the same collectives, \
         with tensors of one dtype and shape, in the same order"
    )]
    TensorMismatch {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The collective and tensors of that rank.
        call: String,
        /// The collective and tensors of rank 0.
        main_call: String,
    },
    /// The first process of a launch that failed.
    #[error("rank {rank} failed first: {status}{last_lines}")]
    Launched {
        /// The rank of the process on this machine.
        rank: usize,
        /// The exit status of the process.
        status: String,
        /// The last lines of its standard error, each after a line break.
        last_lines: String,
    },
    /// The monitor thread of the group failed.
    #[error("the monitor thread of the group failed: {problem}")]
    Monitor {
        /// The cause.
        problem: String,
    },
    /// An error of the optimizer that a sharded optimizer wraps.
    #[error(transparent)]
    Optim(#[from] overdrive_optim::Error),
    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;
