use std::sync::{Arc, Mutex};

use overdrive_autograd::NoGradGuard;
use tch::Tensor;

use crate::adapters::{adapter_names, set_requires_grad};
use crate::init::svd;
use crate::linear::check_name;
use crate::merge::change;
use crate::{AdaptedLinear, Adapter, AdapterHost, Error, LoraConfig, Result, TargetModules};

/// How adapters are combined (PEFT's `combination_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Combination {
    /// The best approximation of the weighted sum of products of this rank (`None`: the largest rank
    /// of the adapters), by singular values.
    Svd {
        /// The new rank.
        rank: Option<i64>,
    },
    /// A's and B's side by side: exact; the ranks add up.
    #[default]
    Cat,
    /// Weighted sums of A's and of B's: adapters of one rank only, and rough, as products of
    /// different adapters come in.
    Linear,
}

/// Adds the adapter `name`, a weighted sum of others (PEFT's `add_weighted_adapter`). It is not active, and
/// does not learn.
///
/// Its scale is 1: `lora_alpha` is its rank. Its configuration is otherwise that of the first.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::BadName`], and [`Error::BadInput`] for no adapter, other ranks with
/// [`Combination::Linear`], DoRA, and biases of B or full copies, which have no sum.
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
        return Err(Error::BadName {
            name: name.to_owned(),
            reason: "it is taken",
        });
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
    let config = Arc::new(plan(host, adapters, combination)?);
    host.visit_linears(&mut |map_name, map| {
        map.refuse_merged("adding an adapter")?;
        let own: Vec<(&Adapter, f64)> = adapters
            .iter()
            .filter_map(|(name, weight)| Some((map.adapter(name)?, *weight)))
            .collect();
        if own.is_empty() {
            return Ok(());
        }
        let (a, b) = combine(map, map_name, &own, config.r, combination)?;
        let adapter = Adapter {
            config: Arc::clone(&config),
            alpha: config.r as f64,
            scale: 1.0,
            a,
            b,
            bias: None,
            magnitude: None,
            lengths: Mutex::default(),
        };
        map.adapters.push((name.to_owned(), adapter));
        Ok(())
    })?;
    set_requires_grad(host, &[name], false)
}

/// The new configuration, after looking at all maps: nothing is changed before it is known to fit.
fn plan<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapters: &[(&str, f64)],
    combination: Combination,
) -> Result<LoraConfig> {
    let mut first: Option<LoraConfig> = None;
    let mut targets: Vec<String> = Vec::new();
    let mut rank = 0;
    let bad = |what: String, found: &str, expected: &str| Error::BadInput {
        name: what,
        found: found.to_owned(),
        expected: expected.to_owned(),
    };
    host.visit_linears(&mut |map_name, map| {
        let mut ranks = Vec::new();
        for (name, _) in adapters {
            if map.copies.iter().any(|(own, ..)| own == name) {
                let what = format!("the adapter `{name}`");
                return Err(bad(what, "one with full copies of modules", "one without"));
            }
            let Some(adapter) = map.adapter(name) else {
                continue;
            };
            if adapter.magnitude.is_some() || adapter.bias.is_some() {
                let what = format!("the adapter `{name}`");
                return Err(bad(what, "one with DoRA or a bias of B", "a plain one"));
            }
            if first.is_none() {
                first = Some(adapter.config.as_ref().clone());
            }
            ranks.push(adapter.rank());
        }
        if ranks.is_empty() {
            return Ok(());
        }
        targets.push(map_name.to_owned());
        let own = match combination {
            Combination::Cat => ranks.iter().sum(),
            Combination::Svd { rank: Some(rank) } => rank,
            _ => ranks.iter().copied().max().unwrap_or(1),
        };
        let differ = ranks.iter().any(|rank| *rank != ranks[0]) || (rank != 0 && rank != own);
        if combination == Combination::Linear && differ {
            let what = format!("the adapters of `{map_name}`");
            return Err(bad(
                what,
                "of several ranks",
                "of one rank: use `Cat` or `Svd`",
            ));
        }
        rank = rank.max(own);
        Ok(())
    })?;
    let has_copies = host.module_copies().is_some_and(|copies| {
        let is_meant = |own: &str| adapters.iter().any(|(name, _)| *name == own);
        copies.entries.iter().any(|entry| is_meant(&entry.adapter))
    });
    let (Some(first), false) = (first, has_copies) else {
        let found = if has_copies {
            "some with full copies of modules"
        } else {
            "none"
        };
        return Err(bad(
            "the adapters to combine".to_owned(),
            found,
            "plain ones, at least one",
        ));
    };
    if rank < 1 {
        return Err(bad(
            "the rank".to_owned(),
            &rank.to_string(),
            "a positive number",
        ));
    }
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

/// A and B of the sum, of `rank`: what is left over is zero.
fn combine(
    map: &AdaptedLinear,
    map_name: &str,
    adapters: &[(&Adapter, f64)],
    rank: i64,
    combination: Combination,
) -> Result<(Tensor, Tensor)> {
    let [outputs, inputs] = map.base().size();
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
                // Each factor has the root; one of them the sign.
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
                return Err(Error::BadInput {
                    name: format!("the rank for `{map_name}`"),
                    found: rank.to_string(),
                    expected: format!("at most {}", outputs.min(inputs)),
                });
            }
            let mut sum = Tensor::f_zeros([outputs, inputs], place)?;
            for (adapter, weight) in adapters {
                let _same = sum.f_add_(&change(adapter, kind)?.f_mul_scalar(*weight)?)?;
            }
            let (u, s, vh) = svd(&sum)?;
            let u = u.f_narrow(1, 0, rank)?.f_mul(&s.f_narrow(0, 0, rank)?)?;
            (vh.f_narrow(0, 0, rank)?.f_contiguous()?, u.f_contiguous()?)
        }
    };
    if a.size()[0] == rank {
        return Ok((a, b));
    }
    // A map with fewer of the adapters than others.
    let own = a.size()[0];
    let whole = (
        Tensor::f_zeros([rank, inputs], place)?,
        Tensor::f_zeros([outputs, rank], place)?,
    );
    whole.0.f_narrow(0, 0, own)?.f_copy_(&a)?;
    whole.1.f_narrow(1, 0, own)?.f_copy_(&b)?;
    Ok(whole)
}
