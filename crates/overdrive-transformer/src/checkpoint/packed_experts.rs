//! The experts of gpt-oss, Gemma 4, Qwen3-VL and some files of Qwen3.5: a file has one tensor for all experts of a layer,
//! this crate one for each.

use std::collections::HashMap;

use overdrive_safetensors::StoredTensor;
use tch::Tensor;

use super::quantized::Views;
use crate::config::LlamaConfig;
use crate::{Error, Result};

/// The separator of the module that holds the experts and the rest of a name.
const EXPERTS: &str = ".experts.";

/// The names of the layers of an expert.
const LAYERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// The ends of the names of a tensor: of all experts after the name of the layer, and of one expert.
const ENDS: [(&str, &str); 4] = [
    ("", ".weight"),
    ("_bias", ".bias"),
    ("_blocks", ".blocks"),
    ("_scales", ".scales"),
];

/// Replaces each tensor of all experts by one for each expert, or by two where a model has gate and up apart. Tensors with
/// another number of experts than the configuration remain, and are reported as unexpected.
pub(super) fn split<'a>(views: Views<'a>, config: &LlamaConfig) -> Views<'a> {
    let count = config
        .experts
        .as_ref()
        .map_or(0, |experts| experts.num_experts);
    let mut all = Views::new();
    for (name, view) in views {
        let stack = parts_of_stack(&name).filter(|_| view.shape().first() == Some(&count));
        let Some((block, layer, end)) = stack else {
            all.insert(name, view);
            continue;
        };
        let each = match halves(&view, config).filter(|_| layer == LAYERS[0]) {
            None => view.unstacked(|expert| format!("{block}{EXPERTS}{expert}.{layer}{end}")),
            Some(halves) => halves.unstacked(|half| {
                let part = ["gate_proj", "up_proj"][half % 2];
                format!("{block}{EXPERTS}{}.{part}{end}", half / 2)
            }),
        };
        all.extend(each.into_iter().map(|view| (view.name().to_owned(), view)));
    }
    all
}

/// Returns `(E, 2 · I, C)`, the gates and ups of all experts, as `(2 · E, I, C)` for a model that has them apart.
fn halves<'a>(view: &StoredTensor<'a>, config: &LlamaConfig) -> Option<StoredTensor<'a>> {
    let &[experts, rows, channels] = view.shape() else {
        return None;
    };
    if config.family.has_packed_experts() || rows % 2 != 0 {
        return None;
    }
    let shape = [2 * experts, rows / 2, channels];
    let kind = view.kind()?;
    StoredTensor::new(view.name(), kind, &shape, view.data()).ok()
}

/// Replaces the tensors of all experts of a layer by one. Layers of which an expert has no such tensor keep those of
/// each expert.
pub(super) fn stacked(
    tensors: Vec<(String, Tensor)>,
    config: &LlamaConfig,
) -> Result<Vec<(String, Tensor)>> {
    let count = config
        .experts
        .as_ref()
        .map_or(0, |experts| experts.num_experts);
    let mut groups: HashMap<String, Vec<(i64, &Tensor)>> = HashMap::new();
    for (name, tensor) in &tensors {
        if let Some((stack, expert)) = stack_of(name) {
            groups.entry(stack).or_default().push((expert, tensor));
        }
    }
    // In the order of the experts, each of which is there once.
    groups.retain(|_, group| {
        group.sort_unstable_by_key(|(expert, _)| *expert);
        group.iter().map(|(expert, _)| *expert).eq(0..count)
    });
    let mut all = Vec::new();
    for (name, tensor) in &tensors {
        let whole = stack_of(name).and_then(|(stack, expert)| {
            let group = groups.get(&stack)?;
            Some((stack, expert, group))
        });
        match whole {
            None => all.push((name.clone(), tensor.shallow_clone())),
            // In the place of the first one.
            Some((stack, 0, group)) => {
                let group: Vec<&Tensor> = group.iter().map(|(_, tensor)| *tensor).collect();
                all.push((stack, joined(&group)?));
            }
            Some(_) => {}
        }
    }
    Ok(all)
}

/// Returns `true` for the name of a layer of an expert.
pub(super) fn is_packed_expert(module: &str) -> bool {
    stack_of(&format!("{module}.weight")).is_some()
}

/// Returns the name of the module with the experts, the layer, and the end of the name of a tensor of one expert, if
/// `name` is a tensor of all experts.
fn parts_of_stack(name: &str) -> Option<(&str, &'static str, &'static str)> {
    let (block, rest) = name.rsplit_once(EXPERTS)?;
    let layer = LAYERS.into_iter().find(|layer| rest.starts_with(layer))?;
    let (_, end) = ENDS.iter().find(|(end, _)| rest[layer.len()..] == **end)?;
    Some((block, layer, end))
}

/// Returns the name of the tensor of all experts, and the expert, if `name` is a tensor of one expert.
fn stack_of(name: &str) -> Option<(String, i64)> {
    let (block, rest) = name.rsplit_once(EXPERTS)?;
    let (expert, rest) = rest.split_once('.')?;
    let layer = LAYERS.into_iter().find(|layer| rest.starts_with(layer))?;
    let (end, _) = ENDS.iter().find(|(_, end)| rest[layer.len()..] == **end)?;
    Some((
        format!("{block}{EXPERTS}{layer}{end}"),
        expert.parse().ok()?,
    ))
}

/// Returns the tensors of one shape as one with a dimension more: a view if they lie one behind the other, as a model
/// allocates them, so that saving takes no second copy of all experts.
fn joined(tensors: &[&Tensor]) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Err(overdrive_core::Error::internal("a layer has no experts").into());
    };
    let bytes = first.numel() * first.kind().elt_size_in_bytes();
    let adjacent = tensors.iter().enumerate().all(|(index, tensor)| {
        tensor.is_contiguous()
            && tensor.size() == first.size()
            && tensor.kind() == first.kind()
            && tensor.device() == first.device()
            && tensor.data_ptr() as usize == first.data_ptr() as usize + index * bytes
    });
    if adjacent {
        let mut size = first.size();
        let mut strides = first.stride();
        strides.insert(0, first.numel() as i64);
        size.insert(0, tensors.len() as i64);
        // libtorch refuses a view beyond the storage: neighbours of separate allocations are not one tensor.
        if let Ok(view) = first.f_detach()?.f_as_strided(size, strides, None) {
            return Ok(view);
        }
    }
    let detached = tensors.iter().map(|tensor| tensor.f_detach());
    let detached = detached.collect::<std::result::Result<Vec<_>, _>>();
    Ok(Tensor::f_stack(&detached.map_err(Error::from)?, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_experts_are_those_of_each() {
        for (layer, ends) in LAYERS
            .iter()
            .flat_map(|layer| ENDS.map(|ends| (layer, ends)))
        {
            let (of_all, of_each) = ends;
            let stack = format!("model.layers.3.mlp.experts.{layer}{of_all}");
            let (block, own, end) = parts_of_stack(&stack).expect("a tensor of all experts");
            assert_eq!((block, own, end), ("model.layers.3.mlp", *layer, of_each));
            let name = format!("{block}.experts.12.{own}{end}");
            assert_eq!(stack_of(&name), Some((stack.clone(), 12)));
            assert_eq!((stack_of(&stack), parts_of_stack(&name)), (None, None));
        }
        for name in [
            "model.layers.0.mlp.router.weight",
            "model.layers.0.mlp.experts.up_proj",
        ] {
            assert_eq!((stack_of(name), parts_of_stack(name)), (None, None));
        }
        assert!(is_packed_expert("model.layers.0.mlp.experts.1.down_proj"));
        assert!(!is_packed_expert("model.layers.0.self_attn.o_proj"));
    }
}
