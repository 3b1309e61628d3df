//! Selective checkpointing: the results of some operators are kept, the others are recomputed.
//!
//! (Korthikanti et al. 2022, <https://arxiv.org/abs/2205.05198>; `create_selective_checkpoint_contexts`
//! in PyTorch.)

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, Results};
use overdrive_sys::{CallbackResult, random};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{Error, Result};

/// The operators whose results a checkpoint keeps from its first pass.
///
/// A kept result occupies memory until backward has gone through the checkpoint, and its operator does
/// not run again. Results that share memory with an argument (views, in-place operators) are never kept.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SavePolicy {
    /// No results: everything is recomputed. The default.
    #[default]
    Nothing,
    /// The results of matrix products and convolutions.
    Matmuls,
    /// The results of fused attention.
    Attention,
    /// The results of matrix products, convolutions and fused attention, which compute most per byte.
    MatmulsAndAttention,
    /// The results of the operators with these names (`aten::addmm`), in every overload. A name without its namespace
    /// or with an overload (`aten::addmm.out`) is an error.
    Operators(Vec<String>),
    /// The results for which the function returns `true`.
    #[serde(skip)]
    Custom(PolicyFn),
}

type Decide = dyn Fn(&PolicyCall<'_>) -> bool + Send + Sync;

/// A function that returns `true` for the calls whose results are kept.
#[derive(Clone)]
pub struct PolicyFn(Arc<Decide>);

/// A call for which a policy decides.
#[derive(Debug)]
pub struct PolicyCall<'a> {
    /// The operator.
    pub operator: &'a OperatorCall,
    /// The number of earlier calls of the same name and overload in the same pass.
    pub occurrence: usize,
}

impl SavePolicy {
    /// Returns a policy that calls `decide` for each call of an operator. In the recomputation it is
    /// called again, before the operator runs, and must return the same: it should decide by the operator
    /// and its occurrence.
    ///
    /// ```
    /// use overdrive_checkpointing::SavePolicy;
    ///
    /// let every_other_matmul = SavePolicy::custom(|call| {
    ///     call.operator.name() == "aten::addmm" && call.occurrence % 2 == 0
    /// });
    /// ```
    pub fn custom(decide: impl Fn(&PolicyCall<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self::Custom(PolicyFn(Arc::new(decide)))
    }

    /// Checks that the names of operators have the form in which they are compared: another one matches no call, and
    /// the checkpoint would silently keep nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let Self::Operators(names) = self else {
            return Ok(());
        };
        let is_name = |name: &str| {
            let parts = name.split_once("::");
            parts.is_some_and(|(space, name)| {
                !space.is_empty() && !name.is_empty() && !name.contains('.')
            })
        };
        // Every checkpointed call comes here, so a text is only made for an error.
        let Some(wrong) = names.iter().find(|name| !is_name(name)) else {
            return Ok(());
        };
        let given = format!("a list with `{wrong}`");
        let expected =
            "a list of operators with their namespaces and without overloads, such as aten::addmm";
        Err(overdrive_core::Error::option("policy.operators", given, expected).into())
    }

    pub(crate) fn keeps_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    pub(crate) fn is_custom(&self) -> bool {
        matches!(self, Self::Custom(_))
    }

    fn keeps(&self, call: &PolicyCall<'_>) -> bool {
        let name = call.operator.name();
        match self {
            Self::Nothing => false,
            Self::Matmuls => is_matmul(name),
            Self::Attention => is_attention(name),
            Self::MatmulsAndAttention => is_matmul(name) || is_attention(name),
            Self::Operators(names) => names.iter().any(|known| known == name),
            Self::Custom(PolicyFn(decide)) => decide(call),
        }
    }
}

impl PartialEq for SavePolicy {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Operators(a), Self::Operators(b)) => a == b,
            (Self::Custom(a), Self::Custom(b)) => Arc::ptr_eq(&a.0, &b.0),
            (Self::Operators(_) | Self::Custom(_), _) => false,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

impl fmt::Debug for SavePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("Nothing"),
            Self::Matmuls => f.write_str("Matmuls"),
            Self::Attention => f.write_str("Attention"),
            Self::MatmulsAndAttention => f.write_str("MatmulsAndAttention"),
            Self::Operators(names) => f.debug_tuple("Operators").field(names).finish(),
            Self::Custom(decide) => decide.fmt(f),
        }
    }
}

impl fmt::Debug for PolicyFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Custom(a function)")
    }
}

/// Returns `true` for matrix products with a kernel, into which `linear`, `matmul` and `einsum` are
/// decomposed.
fn is_matmul(name: &str) -> bool {
    const NAMES: [&str; 14] = [
        "overdrive::mm",
        "aten::mm",
        "aten::addmm",
        "aten::_addmm_activation",
        "aten::bmm",
        "aten::baddbmm",
        "aten::mv",
        "aten::addmv",
        "aten::dot",
        "aten::linear",
        "aten::mkldnn_linear",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::convolution",
    ];
    NAMES.contains(&name)
}

/// Returns `true` for `scaled_dot_product_attention` of every back end except the composite one, which
/// consists of matrix products.
fn is_attention(name: &str) -> bool {
    const STARTS: [&str; 5] = [
        "overdrive::attention",
        "aten::_scaled_dot_product_",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
    ];
    STARTS.iter().any(|start| name.starts_with(start)) && !name.ends_with("backward")
}

/// The results that one checkpoint keeps: for each operator, the results of its calls in order.
#[derive(Debug, Default)]
pub(crate) struct KeptResults {
    calls: Mutex<HashMap<String, Vec<Option<KeptCall>>>>,
}

#[derive(Debug, Clone)]
struct KeptCall {
    results: Arc<Results>,
    /// The states of the generators after a random operator, which does not run again to advance them.
    random: Option<Generators>,
}

/// The states of random generators. In a mutex, because tensors are not `Sync`.
type Generators = Arc<Mutex<Vec<(Device, Tensor)>>>;

impl KeptResults {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<Option<KeptCall>>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns `true` if the results of a call can be kept.
fn can_be_kept(call: &OperatorCall) -> CallbackResult<bool> {
    // Uninitialized memory is never kept: the in-place operators that fill it run again.
    const EMPTY: [&str; 5] = [
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    ];
    Ok(!EMPTY.contains(&call.name()) && !call.aliases()? && !call.mutates()?)
}

/// The dispatch mode of the first pass, which keeps results.
pub(crate) struct KeepMode {
    pub(crate) policy: SavePolicy,
    pub(crate) kept: Arc<KeptResults>,
}

impl DispatchMode for KeepMode {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        if !can_be_kept(call)? {
            return Ok(());
        }
        let name = call.full_name();
        let occurrence = self.kept.lock().get(&name).map_or(0, Vec::len);
        let keep = self.policy.keeps(&PolicyCall {
            operator: call,
            occurrence,
        });
        let kept = if keep {
            Some(KeptCall {
                random: generators_after(call)?,
                results: Arc::new(call.keep()?),
            })
        } else {
            None
        };
        // `None` for a call that is not kept: the position in the list is the occurrence.
        self.kept.lock().entry(name).or_default().push(kept);
        Ok(())
    }
}

fn generators_after(call: &OperatorCall) -> CallbackResult<Option<Generators>> {
    if !call.is_random()? {
        return Ok(None);
    }
    let mut states: Vec<(Device, Tensor)> = Vec::new();
    // A random operator draws from the generators of its results' devices.
    for device in call.tensors()?.iter().map(Tensor::device) {
        if states.iter().all(|(known, _)| *known != device) {
            states.push((device, random::state(device)?));
        }
    }
    Ok(Some(Arc::new(Mutex::new(states))))
}

/// The dispatch mode of the recomputation, which replaces operators by their kept results.
pub(crate) struct ReplayMode {
    policy: SavePolicy,
    kept: Arc<KeptResults>,
    seen: RefCell<HashMap<String, usize>>,
    preserve_rng_state: bool,
}

impl ReplayMode {
    pub(crate) fn new(
        policy: SavePolicy,
        kept: Arc<KeptResults>,
        preserve_rng_state: bool,
    ) -> Self {
        Self {
            policy,
            kept,
            seen: RefCell::default(),
            preserve_rng_state,
        }
    }
}

impl DispatchMode for ReplayMode {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        if !can_be_kept(call)? {
            return Ok(None);
        }
        let name = call.full_name();
        let occurrence = {
            let mut seen = self.seen.borrow_mut();
            let count = seen.entry(name.clone()).or_insert(0);
            *count += 1;
            *count - 1
        };
        let keep = self.policy.keeps(&PolicyCall {
            operator: call,
            occurrence,
        });
        if !keep {
            return Ok(None);
        }
        let (found, first) = {
            let calls = self.kept.lock();
            let of_name = calls.get(&name).map_or(&[][..], Vec::as_slice);
            (of_name.get(occurrence).cloned().flatten(), of_name.len())
        };
        let Some(found) = found else {
            return Err(Box::new(Error::KeptOperator {
                operator: name,
                occurrence: occurrence + 1,
                first,
            }));
        };
        // Later random operators must draw the numbers of the first pass.
        if let (true, Some(states)) = (self.preserve_rng_state, &found.random) {
            let states = states.lock().unwrap_or_else(PoisonError::into_inner);
            for (device, state) in states.iter() {
                random::set_state(*device, state)?;
            }
        }
        Ok(Some(found.results))
    }
}
