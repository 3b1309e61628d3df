//! Checkpointed chains of blocks.

use std::rc::Rc;
use std::sync::Arc;

use parking_lot::ReentrantMutex;
use tch::Tensor;

use crate::{
    CheckpointOptions, Error, RegionResult, Result, Schedule, Scope, Shared, checkpoint_with,
};

/// Runs `input` through the blocks, one after another, in `segments` groups, of which all but the last are
/// checkpointed (`torch.utils.checkpoint.checkpoint_sequential`).
///
/// # Errors
/// As [`checkpoint_with`]; [`Error::Common`] for a number of segments that is 0 or above the number of blocks.
///
/// ```
/// use overdrive_checkpointing::{CheckpointOptions, Shared, checkpoint_sequential};
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let blocks: Vec<Shared<nn::Linear>> =
///     (0..9).map(|i| Shared::new(nn::linear(store.root() / i, 16, 16, Default::default()))).collect();
/// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
/// let y = checkpoint_sequential(&blocks, 3, &x, &CheckpointOptions::default(), |layer, x| {
///     Ok(layer.forward(x).f_gelu("none")?)
/// })?;
/// y.f_sum(Kind::Float)?.f_backward()?;
/// # Ok(())
/// # }
/// ```
pub fn checkpoint_sequential<B, F>(
    blocks: &[Shared<B>],
    segments: usize,
    input: &Tensor,
    options: &CheckpointOptions,
    forward: F,
) -> Result<Tensor>
where
    B: Send + 'static,
    F: Fn(&B, &Tensor) -> RegionResult<Tensor> + Send + 'static,
{
    checkpoint_scheduled(
        blocks,
        &Schedule::Segments(segments),
        input,
        options,
        forward,
    )
}

/// Runs `input` through the blocks and checkpoints every n-th, starting with the first.
///
/// # Errors
/// As [`checkpoint_with`]; [`Error::Common`] for an n of 0.
pub fn checkpoint_every_nth<B, F>(
    blocks: &[Shared<B>],
    n: usize,
    input: &Tensor,
    options: &CheckpointOptions,
    forward: F,
) -> Result<Tensor>
where
    B: Send + 'static,
    F: Fn(&B, &Tensor) -> RegionResult<Tensor> + Send + 'static,
{
    checkpoint_scheduled(blocks, &Schedule::EveryNth(n), input, options, forward)
}

/// Runs `input` through the blocks according to a schedule, such as
/// [`Plan::schedule`](crate::Plan::schedule).
///
/// # Errors
/// As [`checkpoint_with`] and [`Schedule::groups`].
pub fn checkpoint_scheduled<B, F>(
    blocks: &[Shared<B>],
    schedule: &Schedule,
    input: &Tensor,
    options: &CheckpointOptions,
    forward: F,
) -> Result<Tensor>
where
    B: Send + 'static,
    F: Fn(&B, &Tensor) -> RegionResult<Tensor> + Send + 'static,
{
    // Shared by the closures of all groups; locked, because backward may run them on other threads.
    let forward = Arc::new(ReentrantMutex::new(forward));
    let mut hidden = input.shallow_clone();
    for group in schedule.groups(blocks.len())? {
        let members: Vec<Shared<B>> = blocks[group.blocks].to_vec();
        let forward = Arc::clone(&forward);
        let run = move |inputs: &[Tensor]| {
            let forward = forward.lock();
            members
                .iter()
                .try_fold(inputs[0].shallow_clone(), |hidden, block| {
                    block.with(|block| forward(block, &hidden))
                })
        };
        hidden = if group.checkpointed {
            checkpoint_with(&[&hidden], options, run)?
        } else {
            run(&[hidden]).map_err(Error::Closure)?
        };
    }
    Ok(hidden)
}

impl<'scope> Scope<'scope, '_> {
    /// Runs `input` through blocks that live outside of the scope, according to a schedule.
    ///
    /// # Errors
    /// As [`checkpoint_with`] and [`Schedule::groups`].
    ///
    /// ```
    /// use overdrive_checkpointing::{CheckpointOptions, Schedule, scope};
    /// use tch::{Device, Kind, Tensor, nn, nn::Module};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = nn::VarStore::new(Device::Cpu);
    /// let blocks: Vec<nn::Linear> =
    ///     (0..9).map(|i| nn::linear(store.root() / i, 16, 16, Default::default())).collect();
    /// let x = Tensor::randn([8, 16], (Kind::Float, Device::Cpu));
    /// let options = CheckpointOptions::default();
    /// scope(|scope| {
    ///     let y = scope.scheduled(&blocks, &Schedule::SqrtSegments, &x, &options, |layer, x| {
    ///         Ok(layer.forward(x).f_gelu("none")?)
    ///     })?;
    ///     scope.backward(&[&y.f_sum(Kind::Float)?])
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn scheduled<B, F>(
        self,
        blocks: &'scope [B],
        schedule: &Schedule,
        input: &Tensor,
        options: &CheckpointOptions,
        forward: F,
    ) -> Result<Tensor>
    where
        F: Fn(&B, &Tensor) -> RegionResult<Tensor> + 'scope,
    {
        let forward = Rc::new(forward);
        let mut hidden = input.shallow_clone();
        for group in schedule.groups(blocks.len())? {
            let members = &blocks[group.blocks];
            let forward = Rc::clone(&forward);
            let run = move |inputs: &[Tensor]| {
                members
                    .iter()
                    .try_fold(inputs[0].shallow_clone(), |hidden, block| {
                        forward(block, &hidden)
                    })
            };
            hidden = if group.checkpointed {
                self.checkpoint_with(&[&hidden], options, run)?
            } else {
                run(&[hidden]).map_err(Error::Closure)?
            };
        }
        Ok(hidden)
    }
}
