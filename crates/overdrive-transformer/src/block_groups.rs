//! Blocks that run one after another, groups of them as checkpoints.

use overdrive_checkpointing::{Shared, checkpoint_with};
use overdrive_kv_cache::KvCache;
use tch::Tensor;

use crate::attend::CachedLayer;
use crate::{Execution, Result};

type Forward<B, C> = fn(&B, &Tensor, &C, Option<CachedLayer<'_, '_>>) -> Result<Tensor>;

/// Computes `x (B, T, C)` by `forward` of each block, which also gets `context` and the cache with its layer. Backward
/// runs the blocks of a checkpoint again, so it shares the context.
pub(crate) fn run_blocks<B, C>(
    blocks: &[Shared<B>],
    mut x: Tensor,
    context: C,
    execution: &Execution,
    mut cache: Option<&mut (dyn KvCache + '_)>,
    forward: Forward<B, C>,
) -> Result<Tensor>
where
    B: Send + 'static,
    C: Send + 'static,
{
    let context = Shared::new(context);
    for group in execution.checkpointing.groups(blocks.len())? {
        // With a cache a second run would append the tokens twice.
        if group.checkpointed && cache.is_none() {
            let (members, context) = (blocks[group.blocks].to_vec(), context.clone());
            x = checkpoint_with(&[&x], &execution.checkpoint_options, move |inputs| {
                let mut x = inputs[0].shallow_clone();
                for block in &members {
                    x = context
                        .with(|context| block.with(|block| forward(block, &x, context, None)))?;
                }
                Ok(x)
            })?;
            continue;
        }
        for layer in group.blocks {
            let cache = cache.as_deref_mut().map(|cache| (layer, cache));
            x = context
                .with(|context| blocks[layer].with(|block| forward(block, &x, context, cache)))?;
        }
    }
    Ok(x)
}
