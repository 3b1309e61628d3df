use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Tensor;

use super::statistics::{InputStatistics, Moments};
use crate::Result;

/// An observer of the input of each linear layer of a model while it runs.
pub trait InputObserver {
    /// Observes `x (…, I)`, the input of the layer `name` (as in the checkpoint, without `.weight`).
    ///
    /// # Errors
    /// An error with which the forward pass fails.
    fn observe(&mut self, name: &str, x: &Tensor) -> Result<()>;
}

thread_local! {
    static OBSERVER: RefCell<Option<Rc<RefCell<dyn InputObserver>>>> = const { RefCell::new(None) };
}

/// Runs `body` while `observer` observes the inputs of all linear layers that run on this thread and call
/// [`observe_input`]. Returns the observer and the result of `body`.
///
/// ```
/// use overdrive_quantization::{InputCollector, Moments, observe_input, observe_inputs};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let collector = InputCollector::new(Moments::Full);
/// let (collector, seen) = observe_inputs(collector, || {
///     // A model does this in its linear layers.
///     observe_input("up_proj", &Tensor::ones([4, 8], (Kind::Float, Device::Cpu)))
/// });
/// seen?;
/// assert_eq!(collector.get("up_proj").map(|statistics| statistics.rows()), Some(4));
/// # Ok(())
/// # }
/// ```
pub fn observe_inputs<O: InputObserver + 'static, T>(
    observer: O,
    body: impl FnOnce() -> T,
) -> (O, T) {
    /// A guard that restores the outer observer, also after a panic.
    struct Restore(Option<Rc<RefCell<dyn InputObserver>>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let outer = self.0.take();
            OBSERVER.with(|slot| *slot.borrow_mut() = outer);
        }
    }
    let shared = Rc::new(RefCell::new(observer));
    let inner: Rc<RefCell<dyn InputObserver>> = shared.clone();
    let restore = Restore(OBSERVER.with(|slot| slot.borrow_mut().replace(inner)));
    let result = body();
    drop(restore);
    let observer = Rc::into_inner(shared);
    // The thread-local slot had the only other handle, and `observe_input` keeps none.
    let observer = observer.expect("the slot has released its handle");
    (observer.into_inner(), result)
}

/// Returns `true` if this thread has an observer.
pub fn is_observed() -> bool {
    OBSERVER.with(|slot| slot.borrow().is_some())
}

/// Passes the input of the layer `name` to the observer of this thread, if there is one. Layers that an
/// observer runs are not observed.
///
/// # Errors
/// Those of the observer.
pub fn observe_input(name: &str, x: &Tensor) -> Result<()> {
    // Cloned, so that the slot is not borrowed while the observer itself runs layers.
    let observer = OBSERVER.with(|slot| slot.borrow().clone());
    match observer {
        None => Ok(()),
        Some(observer) => match observer.try_borrow_mut() {
            Ok(mut observer) => observer.observe(name, x),
            // The observer is running, so this layer is one that it runs.
            Err(_) => Ok(()),
        },
    }
}

/// An observer that collects [`InputStatistics`] for each layer. Consecutive layers with the same input tensor
/// (query, key and value) share one.
#[derive(Debug)]
pub struct InputCollector {
    moments: Moments,
    /// The index of the statistics of each layer.
    names: BTreeMap<String, usize>,
    statistics: Vec<InputStatistics>,
    /// The last input and the index of its statistics. The tensor is kept alive, so that no other tensor gets
    /// its address.
    last: Option<(Tensor, usize)>,
}

impl InputCollector {
    /// Creates an empty collector.
    pub fn new(moments: Moments) -> InputCollector {
        InputCollector {
            moments,
            names: BTreeMap::new(),
            statistics: Vec::new(),
            last: None,
        }
    }

    /// Returns the statistics of the inputs of the layer `name`.
    pub fn get(&self, name: &str) -> Option<&InputStatistics> {
        self.names.get(name).map(|&index| &self.statistics[index])
    }

    /// Returns the names of all layers that were observed.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Releases the last input, which is kept to recognize it.
    pub fn finish(&mut self) {
        self.last = None;
    }
}

impl InputObserver for InputCollector {
    fn observe(&mut self, name: &str, x: &Tensor) -> Result<()> {
        // The same address and shape: query, key and value take the same tensor.
        let same = |last: &Tensor| last.data_ptr() == x.data_ptr() && last.size() == x.size();
        let again = self.last.as_ref().filter(|(last, _)| same(last));
        let known = self.names.get(name).copied();
        let again = again.map(|&(_, index)| index);
        match (again, known) {
            // The layer before has the same input, which is counted already.
            (Some(index), None) => {
                self.names.insert(name.to_owned(), index);
                return Ok(());
            }
            (Some(index), Some(known)) if index == known => return Ok(()),
            _ => {}
        }
        let index = match known {
            Some(index) => index,
            None => {
                let inputs = x.size().last().copied().unwrap_or(0);
                let new = InputStatistics::new(inputs, self.moments, x.device())?;
                self.statistics.push(new);
                let index = self.statistics.len() - 1;
                self.names.insert(name.to_owned(), index);
                index
            }
        };
        self.statistics[index].add(x)?;
        self.last = Some((x.f_detach()?, index));
        Ok(())
    }
}
