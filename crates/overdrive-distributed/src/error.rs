//! What can go wrong between processes.

use std::time::Duration;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A variable that the launcher should have set is not there.
    #[error("{variable} is not set, but {because}; {way_out}")]
    MissingVariable {
        /// The variable.
        variable: &'static str,
        /// Why it is needed.
        because: String,
        /// What to do.
        way_out: &'static str,
    },
    /// A variable holds something else than what it should.
    #[error("{variable}={value:?}: expected {expected}")]
    InvalidVariable {
        /// The variable.
        variable: String,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// Variables that cannot all be right.
    #[error(
        "{problem}; the launcher sets these variables, so look at how the processes are started"
    )]
    ContradictoryVariables {
        /// The variables, their values and what is wrong about them.
        problem: String,
    },
    /// The store at which processes meet could not be opened or reached.
    #[error(
        "rank {rank} could not {what} the store at {address} within {timeout:?}: {source}; {way_out}"
    )]
    Store {
        /// This process.
        rank: usize,
        /// `open` or `reach`.
        what: &'static str,
        /// Host and port.
        address: String,
        /// How long it was tried.
        timeout: Duration,
        /// What to look at.
        way_out: &'static str,
        /// libtorch's words.
        source: Box<overdrive_sys::Error>,
    },
    /// Not every rank came.
    #[error(
        "rank {rank} waited {timeout:?} for the group of {world_size} processes; missing: {missing}; \
         see whether they were started, and what ended them"
    )]
    Incomplete {
        /// This process.
        rank: usize,
        /// How many there should be.
        world_size: usize,
        /// The ranks that did not come.
        missing: String,
        /// How long it was waited.
        timeout: Duration,
    },
    /// Two processes have the same rank, or they disagree about the size of the group.
    #[error("rank {rank} ({here}) {problem}")]
    Disagreement {
        /// This process.
        rank: usize,
        /// Its host and process id.
        here: String,
        /// What does not fit.
        problem: String,
    },
    /// A collective failed: a peer is lost, stuck, or does something else.
    #[error("{message}")]
    Collective {
        /// The ranks at fault, as far as is known.
        ranks: Vec<usize>,
        /// The collective, this rank, the rank at fault and what is known of it.
        message: String,
    },
    /// The model is not the same on all ranks.
    #[error("the model of rank {rank} differs from that of rank 0: {differences}")]
    ModelMismatch {
        /// The rank.
        rank: usize,
        /// Parameters and buffers with the shapes that they have here and there.
        differences: String,
    },
    /// The last backward left parameters without a gradient, so that their reduction never began.
    #[error(
        "rank {rank}: the last backward gave no gradient to these parameters: {names}; set \
         find_unused_parameters, or let every parameter take part in the loss; if a backward failed \
         before, make the DistributedDataParallel anew"
    )]
    UnusedParameters {
        /// This process.
        rank: usize,
        /// The parameters.
        names: String,
    },
    /// A micro-batch before its window's last ran where gradients are reduced.
    #[error(
        "rank {rank}: the forward of a micro-batch that is not the last of its window ran outside \
         no_sync, so its gradients would be reduced; hold ddp.no_sync() while \
         !accumulator.sync_gradients(), or run forward passes outside ddp.forward"
    )]
    ReducedTooEarly {
        /// This process.
        rank: usize,
    },
    /// What rank 0 did for all did not succeed there.
    #[error("rank 0 could not {what}: {message}")]
    OnMain {
        /// What was being done.
        what: String,
        /// The error of rank 0.
        message: String,
    },
    /// A value could not be written as JSON, or one of another rank is of another type.
    #[error("a value for other ranks: {source}")]
    Value {
        /// serde's words.
        #[from]
        source: serde_json::Error,
    },
    /// Ranks that are in different collectives, or bring different tensors to one.
    #[error(
        "rank {rank} brings other tensors than rank 0: {there}, and rank 0 {on_main}; all ranks call the same \
         collectives, with tensors of one dtype and shape, in the same order"
    )]
    TensorMismatch {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Its collective and tensors.
        there: String,
        /// Those of rank 0.
        on_main: String,
    },
    /// Tensors that do not fit the collective.
    #[error("{operation}: {problem}")]
    InvalidTensor {
        /// The collective.
        operation: &'static str,
        /// What was expected and what was given.
        problem: String,
    },
    /// An argument that cannot be.
    #[error("{argument} = {value}: expected {expected}")]
    InvalidArgument {
        /// The argument.
        argument: &'static str,
        /// What was given.
        value: String,
        /// What is possible.
        expected: String,
    },
    /// A process of a launch failed, the first to do so.
    #[error("rank {rank} failed first: {status}{last_lines}")]
    Launched {
        /// Its rank on this machine.
        rank: usize,
        /// How it ended.
        status: String,
        /// The last lines of its standard error, each after a line break.
        last_lines: String,
    },
    /// A process could not be started or watched.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The thread that looks after the peers could not do its work.
    #[error("looking after the peers: {problem}")]
    Monitor {
        /// What happened.
        problem: String,
    },
    /// An error of the optimizer under a sharded one.
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
