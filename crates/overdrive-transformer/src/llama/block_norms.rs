use crate::config::NormPosition;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, Result};

/// The norms of a block, at most one for each position, with their names.
#[derive(Debug)]
pub(super) struct BlockNorms(Vec<(NormPosition, &'static str, RmsNorm)>);

impl BlockNorms {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<BlockNorms> {
        let norms = config.family.block_norms().iter();
        let norms = norms.map(|&(position, name)| {
            let norm = RmsNorm::take(parameters, &format!("{prefix}.{name}"), config)?;
            Ok((position, name, norm))
        });
        Ok(BlockNorms(norms.collect::<Result<_>>()?))
    }

    /// Returns the norm at `position`, if the block has one there.
    pub(super) fn at(&self, position: NormPosition) -> Option<&RmsNorm> {
        let mut norms = self.0.iter();
        norms
            .find(|(own, ..)| *own == position)
            .map(|(.., norm)| norm)
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.0.iter_mut().try_for_each(|(_, name, norm)| {
            norm.visit_parameters(&format!("{prefix}.{name}"), visit)
        })
    }
}
