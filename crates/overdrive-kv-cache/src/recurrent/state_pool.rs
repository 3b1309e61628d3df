use overdrive_linear_attention::{
    CausalConv1dOptions, DeltaRuleInputs, StateSlot, causal_conv1d_update, gated_delta_rule_update,
};
use tch::{Kind, Tensor};

use super::DeltaRuleStep;
use crate::key_values::check_truncation;
use crate::{Error, Result};

/// The largest step whose inputs are kept, so that its first tokens can be computed again after a truncation: enough for
/// what speculation proposes, and too few to count beside a state.
const MOST_KEPT: i64 = 64;

/// The states of sequences in all recurrent layers, in slots of one tensor a layer.
///
/// A step reads the state of a sequence from one slot and writes the next one to another, so that a step that fails
/// changes nothing. An earlier state is kept, with the inputs of few tokens since, from which a truncation computes the
/// state after some of them again.
#[derive(Debug)]
pub(crate) struct StatePool {
    /// `None` until the layer has run.
    layers: Vec<Option<LayerStates>>,
    free: Vec<i64>,
    slots: i64,
    /// The number of last tokens that a truncation reaches, besides those of the last step.
    slack: i64,
}

#[derive(Debug)]
struct LayerStates {
    /// The last inputs of the convolution, `(S, C, K - 1)`.
    inputs: Tensor,
    /// The state of the recurrence, f32 `(S, H, D_k, D_v)`.
    recurrent: Tensor,
}

/// The state of a sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceState {
    len: i64,
    /// The slot of the state after `len` tokens; `None` for no tokens.
    slot: Option<i64>,
    earlier: Option<Earlier>,
}

/// An earlier state of a sequence.
#[derive(Debug, Default)]
struct Earlier {
    len: i64,
    slot: Option<i64>,
    /// The inputs of each recurrent layer since then, step by step; empty if they were not kept.
    steps: Vec<Vec<DeltaRuleStep>>,
}

/// A step of some sequences that takes effect when it is committed.
#[derive(Debug)]
pub(crate) struct StateStep {
    sequences: Vec<StateSlot>,
    /// The first token of each sequence among those of all, and their number.
    offsets: Vec<i64>,
    /// The inputs of each recurrent layer that has run.
    inputs: Vec<Option<DeltaRuleStep>>,
}

impl StateStep {
    /// Returns `true` if all recurrent layers have run.
    pub(crate) fn is_complete(&self) -> bool {
        self.inputs.iter().all(Option::is_some)
    }

    /// Returns `true` if the recurrent layer has run.
    pub(crate) fn has_run(&self, layer: usize) -> bool {
        self.inputs.get(layer).is_some_and(Option::is_some)
    }

    /// Forgets what the recurrent layers have computed.
    pub(crate) fn restart(&mut self) {
        self.inputs.iter_mut().for_each(|inputs| *inputs = None);
    }

    /// Returns the number of tokens of all sequences.
    fn tokens(&self) -> i64 {
        self.offsets.last().copied().unwrap_or(0)
    }
}

impl SequenceState {
    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> i64 {
        self.len
    }
}

impl StatePool {
    /// Creates an empty pool for a model with this many recurrent layers.
    pub(crate) fn new(layers: usize, slack: i64) -> StatePool {
        StatePool {
            layers: (0..layers).map(|_| None).collect(),
            free: Vec::new(),
            slots: 0,
            slack,
        }
    }

    /// Returns an empty pool with the options of this one.
    pub(crate) fn emptied(&self) -> StatePool {
        StatePool::new(self.layers.len(), self.slack)
    }

    /// Returns the number of slots that a pool has for so many sequences in one step.
    pub(crate) fn slots_of(sequences: u64) -> u64 {
        // The states before and after the step, and the earlier one; slots are doubled from two on.
        sequences
            .saturating_mul(3)
            .checked_next_power_of_two()
            .unwrap_or(u64::MAX)
            .max(2)
    }

    /// Returns the largest number of sequences for which a pool has at most so many slots.
    pub(crate) fn sequences_of(slots: u64) -> usize {
        let allocated = slots.checked_ilog2().map_or(0, |exponent| 1u64 << exponent);
        usize::try_from(allocated / 3).unwrap_or(usize::MAX)
    }

    /// Returns the number of recurrent layers.
    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Begins a step of sequences and their numbers of new tokens.
    pub(crate) fn begin<'a>(
        &mut self,
        sequences: impl IntoIterator<Item = (&'a SequenceState, i64)>,
    ) -> Result<StateStep> {
        let mut step = StateStep {
            sequences: Vec::new(),
            offsets: vec![0],
            inputs: (0..self.layers.len()).map(|_| None).collect(),
        };
        for (state, tokens) in sequences {
            match self.take() {
                Ok(to) => step.sequences.push(StateSlot {
                    from: state.slot,
                    to,
                }),
                Err(error) => {
                    self.cancel(step);
                    return Err(error);
                }
            }
            step.offsets.push(step.tokens() + tokens);
        }
        Ok(step)
    }

    /// Advances the states of a recurrent layer by the inputs `(N, …)` of all sequences; returns `(N, H, D_v)`.
    pub(crate) fn advance(
        &mut self,
        step: &mut StateStep,
        layer: usize,
        inputs: DeltaRuleStep,
    ) -> Result<Tensor> {
        let found = inputs.mixed.size();
        if found.first() != Some(&step.tokens()) {
            let expected = format!("{} rows, one for each new token of the step", step.tokens());
            return Err(overdrive_core::Error::shape("mixed", found, expected).into());
        }
        let output = self.run(layer, &step.sequences, &step.offsets, &inputs)?;
        step.inputs[layer] = Some(inputs);
        Ok(output)
    }

    fn run(
        &mut self,
        layer: usize,
        sequences: &[StateSlot],
        offsets: &[i64],
        inputs: &DeltaRuleStep,
    ) -> Result<Tensor> {
        let slots = self.slots;
        let layers = self.layers.len();
        let states = match self.layers.get_mut(layer) {
            Some(Some(states)) => states,
            Some(empty) => empty.insert(LayerStates::new(slots, inputs)?),
            None => return Err(Error::NoSuchLayer { layer, layers }),
        };
        let convolution = CausalConv1dOptions {
            backend: inputs.options.backend,
            ..CausalConv1dOptions::default()
        };
        let convolved = causal_conv1d_update(
            &inputs.mixed,
            &inputs.convolution,
            None,
            &mut states.inputs,
            sequences,
            offsets,
            &convolution,
        )?;
        let [query, key, value] = inputs.heads.split(&convolved)?;
        let tensors = DeltaRuleInputs {
            query: &query,
            key: &key,
            value: &value,
            decay: &inputs.decay,
            beta: &inputs.beta,
        };
        Ok(gated_delta_rule_update(
            tensors,
            &mut states.recurrent,
            sequences,
            offsets,
            &inputs.options,
        )?)
    }

    /// Makes the states after the step those of its sequences, given in the order of `begin`.
    pub(crate) fn commit<'a>(
        &mut self,
        step: StateStep,
        sequences: impl IntoIterator<Item = &'a mut SequenceState>,
    ) -> Result<()> {
        let ends = step
            .offsets
            .windows(2)
            .map(|ends| (ends[0], ends[1] - ends[0]));
        // The inputs are cut before anything changes. A step of one token can only be undone as a whole.
        let most = MOST_KEPT.max(self.slack + 1);
        let cut = ends.map(|(start, tokens)| {
            let is_kept = tokens <= most && (tokens > 1 || self.slack > 0);
            let inputs = step.inputs.iter().flatten().filter(|_| is_kept);
            let inputs = inputs.map(|inputs| inputs.narrow(start, tokens));
            Ok((tokens, inputs.collect::<Result<Vec<_>>>()?))
        });
        let cut = match cut.collect::<Result<Vec<_>>>() {
            Ok(cut) => cut,
            Err(error) => {
                self.cancel(step);
                return Err(error);
            }
        };
        for (state, (advance, (tokens, inputs))) in
            sequences.into_iter().zip(step.sequences.iter().zip(cut))
        {
            let is_whole = |earlier: &Earlier| {
                self.slack > 0 && !inputs.is_empty() && !earlier.steps.is_empty()
            };
            match &mut state.earlier {
                // The earlier state stays, and the one before this step is not needed.
                Some(earlier) if is_whole(earlier) => {
                    for (steps, inputs) in earlier.steps.iter_mut().zip(inputs) {
                        steps.push(inputs);
                    }
                    self.free
                        .extend(state.slot.filter(|_| state.slot != earlier.slot));
                }
                _ => {
                    let earlier = state.earlier.replace(Earlier {
                        len: state.len,
                        slot: state.slot,
                        steps: inputs.into_iter().map(|inputs| vec![inputs]).collect(),
                    });
                    let slot = earlier.and_then(|earlier| earlier.slot);
                    self.free.extend(slot.filter(|_| slot != state.slot));
                }
            }
            state.slot = Some(advance.to);
            state.len += tokens;
            // It only saves memory. The step is complete: its tokens must not advance the state again, as they would
            // after an error. The next step tries again.
            let _brought_forward = self.bring_forward(state);
        }
        Ok(())
    }

    /// Computes a later earlier state if many tokens were kept since, so that their number stays bounded. An error leaves
    /// the earlier state as it was.
    fn bring_forward(&mut self, state: &mut SequenceState) -> Result<()> {
        let (len, slack) = (state.len, self.slack);
        let Some(earlier) = &mut state.earlier else {
            return Ok(());
        };
        let tokens = len - slack - earlier.len;
        if earlier.steps.is_empty() || slack == 0 || tokens < slack.max(MOST_KEPT) {
            return Ok(());
        }
        let rest = |all: DeltaRuleStep| all.narrow(tokens, slack);
        let (slot, steps) = self.replay(earlier, tokens, rest)?;
        self.free.extend(earlier.slot.replace(slot));
        (earlier.len, earlier.steps) = (earlier.len + tokens, steps);
        Ok(())
    }

    /// Computes the state `tokens` after an earlier one again, and returns its slot, which is new, and what is to be kept
    /// of the inputs of each layer since the earlier one.
    fn replay(
        &mut self,
        earlier: &Earlier,
        tokens: i64,
        kept: impl Fn(DeltaRuleStep) -> Result<DeltaRuleStep>,
    ) -> Result<(i64, Vec<Vec<DeltaRuleStep>>)> {
        let to = self.take()?;
        let advance = StateSlot {
            from: earlier.slot,
            to,
        };
        let layers = earlier.steps.iter().enumerate().map(|(layer, steps)| {
            let all = joined(steps)?;
            let _outputs = self.run(layer, &[advance], &[0, tokens], &all.narrow(0, tokens)?)?;
            Ok(vec![kept(all)?])
        });
        let steps = layers.collect::<Result<_>>();
        if steps.is_err() {
            self.free.push(to);
        }
        Ok((to, steps?))
    }

    /// Discards a step.
    pub(crate) fn cancel(&mut self, step: StateStep) {
        self.free
            .extend(step.sequences.iter().map(|advance| advance.to));
    }

    /// Returns a sequence to its first `len` tokens: all, none, the last `slack` fewer, or those at or after the beginning
    /// of its last step.
    pub(crate) fn truncate(&mut self, state: &mut SequenceState, len: i64) -> Result<()> {
        check_truncation(len, state.len)?;
        if len == state.len {
            return Ok(());
        }
        if len == 0 {
            self.release(std::mem::take(state));
            return Ok(());
        }
        let dropped = |state: &SequenceState| Error::StateDropped {
            len,
            held: state.len,
            earlier: state.earlier.as_ref().map_or(0, |earlier| earlier.len),
        };
        let Some(earlier) = state.earlier.as_mut().filter(|earlier| earlier.len <= len) else {
            return Err(dropped(state));
        };
        let tokens = len - earlier.len;
        if tokens == 0 {
            let slot = earlier.slot;
            self.free.extend(state.slot.filter(|_| state.slot != slot));
            (state.len, state.slot, state.earlier) = (len, slot, None);
            return Ok(());
        }
        if earlier.steps.is_empty() {
            return Err(dropped(state));
        }
        let first = |all: DeltaRuleStep| all.narrow(0, tokens);
        let (slot, steps) = self.replay(earlier, tokens, first)?;
        earlier.steps = steps;
        self.free.extend(state.slot.replace(slot));
        state.len = len;
        Ok(())
    }

    /// Returns a copy of a sequence, without its earlier state.
    pub(crate) fn fork(&mut self, state: &SequenceState) -> Result<SequenceState> {
        let slot = match state.slot {
            None => None,
            Some(from) => {
                let to = self.take()?;
                let mut pools = self.layers.iter().flatten();
                let copied = pools.try_for_each(|states| states.copy(from, to));
                if copied.is_err() {
                    self.free.push(to);
                }
                copied?;
                Some(to)
            }
        };
        Ok(SequenceState {
            len: state.len,
            slot,
            earlier: None,
        })
    }

    /// Frees the slots of a sequence.
    pub(crate) fn release(&mut self, state: SequenceState) {
        let earlier = state.earlier.and_then(|earlier| earlier.slot);
        self.free.extend(earlier.filter(|_| earlier != state.slot));
        self.free.extend(state.slot);
    }

    /// Returns the number of bytes that are allocated.
    pub(crate) fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flatten();
        layers
            .flat_map(|states| [&states.inputs, &states.recurrent])
            .map(|pool| pool.numel() as u64 * pool.kind().elt_size_in_bytes() as u64)
            .sum()
    }

    /// Returns the states of sequences in a recurrent layer, `(S, C, K - 1)` and `(S, H, D_k, D_v)`; `None` if the layer
    /// has not run, or a sequence has no tokens.
    pub(crate) fn states(
        &self,
        layer: usize,
        sequences: &[SequenceState],
    ) -> Result<Option<[Tensor; 2]>> {
        let slots: Option<Vec<i64>> = sequences.iter().map(|state| state.slot).collect();
        let (Some(Some(states)), Some(slots)) = (self.layers.get(layer), slots) else {
            return Ok(None);
        };
        let slots = Tensor::f_from_slice(&slots)?.f_to_device(states.inputs.device())?;
        Ok(Some([
            states.inputs.f_index_select(0, &slots)?,
            states.recurrent.f_index_select(0, &slots)?,
        ]))
    }

    /// Returns a pool with the options of this one and its sequences of `len` tokens with these states of each recurrent
    /// layer; an empty one without any.
    pub(crate) fn with_states(
        &self,
        layers: Vec<[Tensor; 2]>,
        len: i64,
    ) -> (StatePool, Vec<SequenceState>) {
        if layers.is_empty() {
            return (self.emptied(), Vec::new());
        }
        let rows = layers.first().map_or(0, |[inputs, _]| inputs.size()[0]);
        let layers = layers
            .into_iter()
            .map(|[inputs, recurrent]| Some(LayerStates { inputs, recurrent }));
        let sequence = |slot| SequenceState {
            len,
            slot: Some(slot),
            earlier: None,
        };
        let pool = StatePool {
            layers: layers.collect(),
            free: Vec::new(),
            slots: rows,
            slack: self.slack,
        };
        (pool, (0..rows).map(sequence).collect())
    }

    fn take(&mut self) -> Result<i64> {
        if self.free.is_empty() {
            // Doubled: the copies are a geometric series.
            let slots = (2 * self.slots).max(2);
            for states in self.layers.iter_mut().flatten() {
                *states = states.resized(slots)?;
            }
            self.free.extend((self.slots..slots).rev());
            self.slots = slots;
        }
        let Some(slot) = self.free.pop() else {
            return Err(overdrive_core::Error::internal("a pool of states has no slot").into());
        };
        Ok(slot)
    }
}

impl LayerStates {
    fn copy(&self, from: i64, to: i64) -> Result<()> {
        for pool in [&self.inputs, &self.recurrent] {
            pool.f_narrow(0, to, 1)?
                .f_copy_(&pool.f_narrow(0, from, 1)?)?;
        }
        Ok(())
    }

    /// Allocates the states of `slots` sequences for a layer with these inputs.
    fn new(slots: i64, inputs: &DeltaRuleStep) -> Result<LayerStates> {
        let (mixed, heads) = (&inputs.mixed, inputs.heads);
        let device = mixed.device();
        let past = inputs.convolution.size().last().copied().unwrap_or(1) - 1;
        let sizes = [slots, heads.values, heads.key_dim, heads.value_dim];
        Ok(LayerStates {
            inputs: Tensor::f_zeros([slots, heads.width(), past], (mixed.f_kind()?, device))?,
            recurrent: Tensor::f_zeros(sizes, (Kind::Float, device))?,
        })
    }

    fn resized(&self, slots: i64) -> Result<LayerStates> {
        let resized = |pool: &Tensor| -> Result<Tensor> {
            let mut size = pool.size();
            let held = std::mem::replace(&mut size[0], slots);
            let new = Tensor::f_zeros(&size, (pool.f_kind()?, pool.device()))?;
            new.f_narrow(0, 0, held)?.f_copy_(pool)?;
            Ok(new)
        };
        Ok(LayerStates {
            inputs: resized(&self.inputs)?,
            recurrent: resized(&self.recurrent)?,
        })
    }
}

/// Joins the inputs of a layer in several steps.
fn joined(steps: &[DeltaRuleStep]) -> Result<DeltaRuleStep> {
    let [first, ..] = steps else {
        return Err(overdrive_core::Error::internal("a step of no inputs was kept").into());
    };
    let all = |of: fn(&DeltaRuleStep) -> &Tensor| {
        Tensor::f_cat(&steps.iter().map(of).collect::<Vec<_>>(), 0)
    };
    Ok(DeltaRuleStep {
        mixed: all(|step| &step.mixed)?,
        convolution: first.convolution.shallow_clone(),
        decay: all(|step| &step.decay)?,
        beta: all(|step| &step.beta)?,
        heads: first.heads,
        options: first.options,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_for_some_sequences_has_room_for_no_fewer() {
        for slots in 0..200 {
            let sequences = StatePool::sequences_of(slots);
            assert!(sequences == 0 || StatePool::slots_of(sequences as u64) <= slots);
            assert!(StatePool::slots_of(sequences as u64 + 1) > slots);
        }
        assert_eq!(StatePool::slots_of(u64::MAX), u64::MAX);
    }

    /// Two tokens of a layer with one head.
    fn two_tokens(number: i64) -> DeltaRuleStep {
        let heads = crate::DeltaRuleHeads {
            keys: 1,
            key_dim: 2,
            values: 1,
            value_dim: 2,
        };
        let values = |columns: i64| {
            let all = Tensor::arange(2 * columns, (Kind::Float, tch::Device::Cpu));
            ((all + number * 7).sin() * 0.5).view([2, columns])
        };
        DeltaRuleStep {
            mixed: values(heads.width()),
            convolution: Tensor::ones([heads.width(), 3], (Kind::Float, tch::Device::Cpu)),
            decay: -values(1).abs(),
            beta: values(1).sigmoid(),
            heads,
            options: Default::default(),
        }
    }

    #[test]
    fn inputs_that_cannot_be_computed_again_leave_the_state_as_it_is() {
        let states = [false, true].map(|spoil| {
            let (mut pool, mut state) = (StatePool::new(1, 1), SequenceState::default());
            for number in 0..60 {
                let mut step = pool.begin([(&state, 2)]).unwrap();
                let _output = pool.advance(&mut step, 0, two_tokens(number)).unwrap();
                pool.commit(step, [&mut state]).unwrap();
                if spoil && number == 9 {
                    state.earlier.as_mut().unwrap().steps[0][0].decay = Tensor::new();
                }
                assert_eq!(state.len(), 2 * (number + 1));
                let used = pool.slots - i64::try_from(pool.free.len()).unwrap();
                assert!(used <= 2, "{used}");
            }
            let sequences = [state];
            let before = pool.states(0, &sequences).unwrap().unwrap();
            let [mut state] = sequences;
            assert_eq!(pool.truncate(&mut state, 119).is_err(), spoil);
            assert_eq!(state.len(), if spoil { 120 } else { 119 });
            if spoil {
                assert_eq!(pool.states(0, &[state]).unwrap().unwrap(), before);
            }
            before
        });
        assert_eq!(states[0], states[1]);
    }
}
