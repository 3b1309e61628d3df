//! Selective checkpointing: the results of some operators are kept, the rest is recomputed.
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

use crate::Error;

/// Which operators' results a checkpoint keeps from its first pass.
///
/// A kept result takes memory from then until backward has gone through the checkpoint, and its operator
/// does not run again. Results that share memory with an argument (views, in-place operators) are never
/// kept.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SavePolicy {
    /// None: everything is recomputed.
    #[default]
    Nothing,
    /// Those of matrix products and convolutions.
    Matmuls,
    /// Those of fused attention.
    Attention,
    /// Both: what computes much for its size.
    MatmulsAndAttention,
    /// Those of the operators with these names (`aten::addmm`), in every overload.
    Operators(Vec<String>),
    /// Those for which the function says so.
    #[serde(skip)]
    Custom(PolicyFn),
}

type Decide = dyn Fn(&PolicyCall<'_>) -> bool + Send + Sync;

/// A function that says whether the results of a call are kept.
#[derive(Clone)]
pub struct PolicyFn(Arc<Decide>);

/// A call that a policy decides about.
#[derive(Debug)]
pub struct PolicyCall<'a> {
    /// The operator.
    pub operator: &'a OperatorCall,
    /// How many calls of the same name and overload came before, in the same pass.
    pub occurrence: usize,
}

impl SavePolicy {
    /// A policy that asks `decide` about each call. It is asked again in the recomputation, before the
    /// call, and must then say the same: decide by the operator and by its occurrence.
    ///
    /// ```
    /// use overdrive_checkpointing::SavePolicy;
    ///
    /// let every_other_product = SavePolicy::custom(|call| {
    ///     call.operator.name() == "aten::addmm" && call.occurrence % 2 == 0
    /// });
    /// ```
    pub fn custom(decide: impl Fn(&PolicyCall<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self::Custom(PolicyFn(Arc::new(decide)))
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

/// The products that a kernel exists for: what `linear`, `matmul` and `einsum` become.
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

/// `scaled_dot_product_attention` of every back end but the composite one, which is products.
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

/// The results that one checkpoint keeps: for each operator, those of its calls in order.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    calls: Mutex<HashMap<String, Vec<Option<KeptCall>>>>,
}

#[derive(Debug, Clone)]
struct KeptCall {
    results: Arc<Results>,
    /// Where the generators stood after a random operator, which does not run again to move them.
    random: Option<Generators>,
}

/// States of random generators; shared by the calls' clones, tensors being no `Sync`.
type Generators = Arc<Mutex<Vec<(Device, Tensor)>>>;

impl Kept {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<Option<KeptCall>>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the policy has anything to say about a call. Not about memory that nothing was written to
/// yet: what fills it runs again, in place.
fn can_be_kept(call: &OperatorCall) -> CallbackResult<bool> {
    const EMPTY: [&str; 5] = [
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    ];
    Ok(!EMPTY.contains(&call.name()) && !call.aliases()? && !call.mutates()?)
}

/// The mode of the first pass.
pub(crate) struct Keeping {
    pub(crate) policy: SavePolicy,
    pub(crate) kept: Arc<Kept>,
}

impl DispatchMode for Keeping {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        if !can_be_kept(call)? {
            return Ok(());
        }
        let name = call.full_name();
        let occurrence = self.kept.lock().get(&name).map_or(0, Vec::len);
        let wanted = self.policy.keeps(&PolicyCall {
            operator: call,
            occurrence,
        });
        let kept = if wanted {
            Some(KeptCall {
                random: generators_after(call)?,
                results: Arc::new(call.keep()?),
            })
        } else {
            None
        };
        self.kept.lock().entry(name).or_default().push(kept);
        Ok(())
    }
}

fn generators_after(call: &OperatorCall) -> CallbackResult<Option<Generators>> {
    if !call.is_random()? {
        return Ok(None);
    }
    let mut states: Vec<(Device, Tensor)> = Vec::new();
    for device in call.tensors()?.iter().map(Tensor::device) {
        if states.iter().all(|(known, _)| *known != device) {
            states.push((device, random::state(device)?));
        }
    }
    Ok(Some(Arc::new(Mutex::new(states))))
}

/// The mode of the recomputation.
pub(crate) struct Answering {
    policy: SavePolicy,
    kept: Arc<Kept>,
    seen: RefCell<HashMap<String, usize>>,
    preserve_rng_state: bool,
}

impl Answering {
    pub(crate) fn new(policy: SavePolicy, kept: Arc<Kept>, preserve_rng_state: bool) -> Self {
        Self {
            policy,
            kept,
            seen: RefCell::default(),
            preserve_rng_state,
        }
    }
}

impl DispatchMode for Answering {
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
        let wanted = self.policy.keeps(&PolicyCall {
            operator: call,
            occurrence,
        });
        if !wanted {
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
        if let (true, Some(states)) = (self.preserve_rng_state, &found.random) {
            let states = states.lock().unwrap_or_else(PoisonError::into_inner);
            for (device, state) in states.iter() {
                random::set_state(*device, state)?;
            }
        }
        Ok(Some(found.results))
    }
}
