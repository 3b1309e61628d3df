use overdrive_sys::storage::memory_overlaps;
use tch::Tensor;

use crate::{Error, Result};

/// The rows of a pool of states before and after the tokens of a sequence. A row number stands for one row, whose state
/// is replaced.
///
/// ```
/// use overdrive_linear_attention::StateSlot;
///
/// assert_eq!(StateSlot::from(3), StateSlot { from: Some(3), to: 3 });
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSlot {
    /// The row of the state before the tokens, which stays as it is unless it is `to`; `None`: a state of zeros.
    pub from: Option<i64>,
    /// The row that gets the state after the tokens.
    pub to: i64,
}

impl From<i64> for StateSlot {
    fn from(row: i64) -> StateSlot {
        StateSlot {
            from: Some(row),
            to: row,
        }
    }
}

/// Returns the slots of `sequences`, each of which has a row of its own to write in a pool of `states` rows, and reads
/// none that another one writes.
pub(crate) fn checked_slots<T: Copy + Into<StateSlot>>(
    slots: &[T],
    sequences: usize,
    states: i64,
) -> Result<Vec<StateSlot>> {
    let slots: Vec<StateSlot> = slots.iter().map(|&slot| slot.into()).collect();
    let error = |problem: String| {
        Err(Error::Sequences {
            argument: "slots",
            problem,
        })
    };
    if slots.len() != sequences {
        return error(format!(
            "it has {} rows of the pool; it must have {sequences}, one for each sequence of `offsets`",
            slots.len()
        ));
    }
    let mut rows = slots
        .iter()
        .flat_map(|slot| slot.from.into_iter().chain([slot.to]));
    if let Some(row) = rows.find(|row| !(0..states).contains(row)) {
        return error(format!(
            "it has row {row}; rows must be in 0..{states}, the rows of `states`"
        ));
    }
    let mut written: Vec<i64> = slots.iter().map(|slot| slot.to).collect();
    written.sort_unstable();
    if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        return error(format!(
            "it has row {} twice; each sequence needs a row of its own",
            pair[0]
        ));
    }
    let of_another = |slot: &&StateSlot| {
        let from = slot.from.filter(|&from| from != slot.to);
        from.is_some_and(|from| written.binary_search(&from).is_ok())
    };
    if let Some(StateSlot {
        from: Some(row), ..
    }) = slots.iter().find(of_another)
    {
        return error(format!(
            "row {row} is read for one sequence and written for another; write another row"
        ));
    }
    Ok(slots)
}

/// Returns a copy of an input that has elements of the pool, which is written while inputs are read; else a handle.
pub(crate) fn apart(input: &Tensor, pool: &Tensor) -> Result<Tensor> {
    if !memory_overlaps(input, pool) {
        return Ok(input.shallow_clone());
    }
    let mut copy = input.f_empty_like()?;
    copy.f_copy_(input)?;
    Ok(copy)
}

/// Copies each state to the row that is written, for operators that then replace it.
pub(crate) fn copy_states(pool: &Tensor, slots: &[StateSlot]) -> Result<()> {
    for slot in slots {
        let mut to = pool.f_narrow(0, slot.to, 1)?;
        match slot.from {
            Some(from) if from == slot.to => {}
            Some(from) => to.f_copy_(&pool.f_narrow(0, from, 1)?)?,
            None => drop(to.f_zero_()?),
        }
    }
    Ok(())
}
