//! The checks of a vision tower's configuration.

use super::VisionConfig;
use crate::Result;
use crate::activation_names::activation_named;
use crate::config::fields::bad;
use crate::config::sizes::{check_layers, check_parameters, check_size};

impl VisionConfig {
    /// Checks the tower, for a text model with hidden states of width `hidden_size`, heads of `head_dim` channels, and
    /// `layers` layers.
    pub(in crate::config) fn validate(
        &self,
        hidden_size: i64,
        head_dim: i64,
        layers: i64,
    ) -> Result<()> {
        self.check_sizes()?;
        activation_named("vision_config.hidden_act", &self.hidden_act)?;
        if self.hidden_size % (4 * self.num_heads) != 0 {
            let expected = format!("a multiple of 4 x num_heads ({})", self.num_heads);
            let value = self.hidden_size.into();
            return Err(bad("vision_config.hidden_size", &value, &expected));
        }
        if self.out_hidden_size != hidden_size {
            let expected = format!("the hidden_size of the text model, {hidden_size}");
            let value = self.out_hidden_size.into();
            return Err(bad("vision_config.out_hidden_size", &value, &expected));
        }
        if self.position_side().pow(2) != self.num_position_embeddings {
            let key = "vision_config.num_position_embeddings";
            return Err(bad(
                key,
                &self.num_position_embeddings.into(),
                "a square number",
            ));
        }
        if self.rope_theta <= 0.0 {
            let key = "vision_config.rope_parameters.rope_theta";
            return Err(bad(key, &self.rope_theta.into(), "a positive number"));
        }
        self.check_deepstack(layers)?;
        self.check_sections(head_dim / 2)
    }

    /// Checks each size, and that products of them fit 64 bits.
    fn check_sizes(&self) -> Result<()> {
        check_layers("vision_config.depth", self.depth)?;
        for (key, value) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("in_channels", self.in_channels),
            ("patch_size", self.patch_size),
            ("spatial_merge_size", self.spatial_merge_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("num_position_embeddings", self.num_position_embeddings),
        ] {
            check_size(&format!("vision_config.{key}"), value)?;
        }
        let [hidden, inner, depth] =
            [self.hidden_size, self.intermediate_size, self.depth].map(i128::from);
        let square = |side: i64| i128::from(side) * i128::from(side);
        let frames = i128::from(self.in_channels) * i128::from(self.temporal_patch_size);
        // Saturating: the largest sizes exceed 128 bits, too.
        let patch = frames.saturating_mul(square(self.patch_size));
        let merged = hidden.saturating_mul(square(self.spatial_merge_size));
        let outputs = merged.saturating_add(i128::from(self.out_hidden_size));
        let mergers = 1 + self.deepstack_visual_indexes.len() as i128;
        let all = [
            hidden.saturating_mul(patch.saturating_add(i128::from(self.num_position_embeddings))),
            depth.saturating_mul(4 * hidden * (hidden + inner)),
            mergers.saturating_mul(merged.saturating_mul(outputs)),
        ];
        let all = all.into_iter().fold(0, i128::saturating_add);
        check_parameters(all, "the sizes of vision_config")
    }

    fn check_deepstack(&self, layers: i64) -> Result<()> {
        let deep = &self.deepstack_visual_indexes;
        let rising = deep.windows(2).all(|pair| pair[0] < pair[1]);
        let known = deep.iter().all(|layer| (0..self.depth).contains(layer));
        if rising && known && deep.len() as i64 <= layers {
            return Ok(());
        }
        let expected = format!(
            "rising layers below depth ({}), at most as many as the text model has layers ({layers})",
            self.depth
        );
        let key = "vision_config.deepstack_visual_indexes";
        Err(bad(key, &deep.clone().into(), &expected))
    }

    /// Checks that the sections are those of `frequencies` rotary frequencies.
    fn check_sections(&self, frequencies: i64) -> Result<()> {
        let sections = &self.mrope_section;
        let fit = sections.iter().all(|n| (0..=frequencies).contains(n));
        if fit && sections.iter().sum::<i64>() == frequencies {
            return Ok(());
        }
        let expected = format!("three numbers whose sum is {frequencies}, half of head_dim");
        Err(bad("mrope_section", &sections.to_vec().into(), &expected))
    }
}
