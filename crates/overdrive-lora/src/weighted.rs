use std::sync::{Arc, Mutex};

use overdrive_autograd::NoGradGuard;
use overdrive_nn::AdapterHost;
use tch::Tensor;

use crate::adapters::{adapter_names, delete_adapter, set_requires_grad};
use crate::host::{module_copies, visit_linears};
use crate::init::svd;
use crate::layer_adapters::{adapters_mut, adapters_of, check_name, taken};
use crate::merge::change;
use crate::{Error, LoraAdapter, LoraConfig, Result, TargetModules};

/// The way in which adapters are combined (PEFT's `combination_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Combination {
    /// The best approximation of the weighted sum of all `B · A` at this rank (`None`: the largest rank of the
    /// adapters), by singular value decomposition.
    Svd {
        /// The new rank.
        rank: Option<i64>,
    },
    /// The concatenation of all A and of all B matrices: exact; the rank is the sum of the ranks.
    #[default]
    Cat,
    /// Weighted sums of the A and of the B matrices. It needs adapters of the same rank, and is a rough
    /// approximation, since it contains products of one adapter's A with another's B.
    Linear,
}

/// Adds the adapter `name`, a weighted sum of others (PEFT's `add_weighted_adapter`). It is neither active nor
/// trainable.
///
/// The default of [`Combination`] is the exact one, [`Combination::Cat`]; PEFT's is `svd`. PEFT's `ties`,
/// `dare_linear`, `dare_ties` and `magnitude_prune` (also with `_svd`), which drop elements by `density`, are not supported.
///
/// Its `lora_alpha` equals its rank, so its scale is 1. Its configuration is otherwise that of the first adapter.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::BadName`], [`Error::Merged`], [`Error::Common`] for a rank out of range, and
/// [`Error::NotCombinable`] for no adapter, for different ranks with [`Combination::Linear`], and for DoRA, biases
/// of B or full copies, which cannot be summed. The model is then unchanged.
pub fn add_weighted_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    adapters: &[(&str, f64)],
    combination: Combination,
) -> Result<()> {
    let _no_grad = NoGradGuard::new();
    check_name(name)?;
    let available = adapter_names(host)?;
    if available.iter().any(|own| own == name) {
        return Err(taken(name));
    }
    if let Some((unknown, _)) = adapters
        .iter()
        .find(|(name, _)| !available.iter().any(|own| own == name))
    {
        return Err(Error::UnknownAdapter {
            name: (*unknown).to_owned(),
            available,
        });
    }
    // All layers share one configuration, since their ranks are padded to the same rank.
    let config = Arc::new(plan(host, adapters, combination)?);
    let added = visit_linears(host, |layer, linear| {
        let size = linear.weight().size();
        let Some(own) = adapters_mut(linear) else {
            return Ok(());
        };
        let found: Vec<(&LoraAdapter, f64)> = adapters
            .iter()
            .filter_map(|(name, weight)| Some((own.get(name)?, *weight)))
            .collect();
        if found.is_empty() {
            return Ok(());
        }
        let (a, b) = combine(size, layer, &found, config.r, combination)?;
        let adapter = LoraAdapter {
            config: Arc::clone(&config),
            alpha: config.r as f64,
            scale: 1.0,
            a,
            b,
            bias: None,
            magnitude: None,
            row_norms: Mutex::default(),
        };
        own.adapters.push((name.to_owned(), adapter));
        Ok(())
    });
    if added.is_err() {
        // A decomposition can fail at a later layer; the first error is reported.
        let _ = delete_adapter(host, name);
    }
    added?;
    // As in PEFT, a new adapter is inactive until `set_adapter`.
    set_requires_grad(host, &[name], false)
}

/// Checks all layers and returns the new configuration; nothing is changed until all checks have passed.
fn plan<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapters: &[(&str, f64)],
    combination: Combination,
) -> Result<LoraConfig> {
    let mut first: Option<LoraConfig> = None;
    let mut targets: Vec<String> = Vec::new();
    let mut rank = 0;
    let refused = |adapters: String, reason: &str| Error::NotCombinable {
        adapters,
        reason: reason.to_owned(),
    };
    visit_linears(host, |layer, linear| {
        let Some(own) = adapters_of(linear) else {
            return Ok(());
        };
        own.refuse_merged("adding an adapter")?;
        let mut ranks = Vec::new();
        for (name, _) in adapters {
            if own.copy(name).is_some() {
                let reason = "it has full copies of modules (`modules_to_save`), which have no sum";
                return Err(refused(format!("the adapter `{name}`"), reason));
            }
            let Some(adapter) = own.get(name) else {
                continue;
            };
            if adapter.magnitude.is_some() || adapter.bias.is_some() {
                let reason = "it has DoRA magnitudes or a bias of B, which cannot be summed";
                return Err(refused(format!("the adapter `{name}`"), reason));
            }
            if first.is_none() {
                first = Some(adapter.config.as_ref().clone());
            }
            ranks.push(adapter.rank());
        }
        if ranks.is_empty() {
            return Ok(());
        }
        targets.push(layer.to_owned());
        let needed = match combination {
            Combination::Cat => ranks.iter().sum(),
            Combination::Svd { rank: Some(rank) } => rank,
            _ => ranks.iter().copied().max().unwrap_or(1),
        };
        let differ = ranks.iter().any(|rank| *rank != ranks[0]) || (rank != 0 && rank != needed);
        if combination == Combination::Linear && differ {
            let reason = "they have different ranks; use `Combination::Cat` or `Svd`";
            return Err(refused(format!("the adapters of `{layer}`"), reason));
        }
        rank = rank.max(needed);
        Ok(())
    })?;
    if let Some(copies) = module_copies(host) {
        let copied = |(name, _): &&(&str, f64)| !copies.names(name).is_empty();
        if let Some((name, _)) = adapters.iter().find(copied) {
            let reason = "it has full copies of modules (`modules_to_save`), which have no sum";
            return Err(refused(format!("the adapter `{name}`"), reason));
        }
    }
    let Some(first) = first else {
        let reason = "at least one adapter must have weights in a linear layer";
        return Err(refused("no adapters".to_owned(), reason));
    };
    overdrive_core::check_positive("rank", rank)?;
    Ok(LoraConfig {
        r: rank,
        lora_alpha: rank as f64,
        use_rslora: false,
        target_modules: Some(TargetModules::Names(targets)),
        exclude_modules: None,
        layers_to_transform: None,
        layers_pattern: None,
        rank_pattern: Vec::new(),
        alpha_pattern: Vec::new(),
        ..first
    })
}

/// Returns A and B of the sum, filled up with zeros to `rank`. `layer` is for an error message.
fn combine(
    [outputs, inputs]: [i64; 2],
    layer: &str,
    adapters: &[(&LoraAdapter, f64)],
    rank: i64,
    combination: Combination,
) -> Result<(Tensor, Tensor)> {
    let kind = adapters[0].0.a.kind();
    let place = (kind, adapters[0].0.a.device());
    let (a, b) = match combination {
        Combination::Cat => {
            let a = adapters.iter().map(|(adapter, weight)| {
                Ok(adapter
                    .a
                    .f_detach()?
                    .f_mul_scalar(weight * adapter.scale)?
                    .f_to_kind(kind)?)
            });
            let b = adapters
                .iter()
                .map(|(adapter, _)| Ok(adapter.b.f_detach()?.f_to_kind(kind)?));
            let (a, b) = (
                a.collect::<Result<Vec<_>>>()?,
                b.collect::<Result<Vec<_>>>()?,
            );
            (Tensor::f_cat(&a, 0)?, Tensor::f_cat(&b, 1)?)
        }
        Combination::Linear => {
            let mut a = Tensor::f_zeros([rank, inputs], place)?;
            let mut b = Tensor::f_zeros([outputs, rank], place)?;
            for (adapter, weight) in adapters {
                // A and B are each scaled by the square root of the weight, so that their product has the weight;
                // only one of them has the sign.
                let weight = weight * adapter.scale;
                let root = weight.abs().sqrt();
                let _same =
                    a.f_add_(&adapter.a.f_detach()?.f_mul_scalar(root * weight.signum())?)?;
                let _same = b.f_add_(&adapter.b.f_detach()?.f_mul_scalar(root)?)?;
            }
            (a, b)
        }
        Combination::Svd { .. } => {
            if rank > outputs.min(inputs) {
                let expected = format!("at most {} for `{layer}`", outputs.min(inputs));
                return Err(overdrive_core::Error::option("rank", rank, expected).into());
            }
            let mut sum = Tensor::f_zeros([outputs, inputs], place)?;
            for (adapter, weight) in adapters {
                let _same = sum.f_add_(&change(adapter, kind)?.f_mul_scalar(*weight)?)?;
            }
            // B takes the singular values, so that A's rows stay orthonormal as in PEFT.
            let (u, s, vh) = svd(&sum)?;
            let u = u.f_narrow(1, 0, rank)?.f_mul(&s.f_narrow(0, 0, rank)?)?;
            (vh.f_narrow(0, 0, rank)?.f_contiguous()?, u.f_contiguous()?)
        }
    };
    if a.size()[0] == rank {
        return Ok((a, b));
    }
    // In a layer that has only some of the adapters, the sum of ranks is smaller.
    let own = a.size()[0];
    let whole = (
        Tensor::f_zeros([rank, inputs], place)?,
        Tensor::f_zeros([outputs, rank], place)?,
    );
    whole.0.f_narrow(0, 0, own)?.f_copy_(&a)?;
    whole.1.f_narrow(1, 0, own)?.f_copy_(&b)?;
    Ok(whole)
}
