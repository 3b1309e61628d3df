use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Tensor;

use super::statistics::{InputStatistics, Moments};
use crate::Result;

/// Sees the input of each linear map of a model while it runs.
pub trait InputObserver {
    /// Takes note of `x (…, I)`, the input of the map `name` (as in the checkpoint, without `.weight`).
    ///
    /// # Errors
    /// What makes the observation useless; the forward pass fails with it.
    fn observe(&mut self, name: &str, x: &Tensor) -> Result<()>;
}

thread_local! {
    static OBSERVER: RefCell<Option<Rc<RefCell<dyn InputObserver>>>> = const { RefCell::new(None) };
}

/// Runs `body` while `observer` sees the inputs of all linear maps that run on this thread and tell of
/// them by [`observe_input`]. Gives the observer back with what `body` returned.
///
/// ```
/// use overdrive_quantization::{InputCollector, Moments, observe_input, observe_inputs};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let collector = InputCollector::new(Moments::Full);
/// let (collector, seen) = observe_inputs(collector, || {
///     // What a model does in its linear maps.
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
    /// Puts back what was there, on a panic too.
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
    // The slot held the only other handle, and `observe_input` keeps none.
    let observer = observer.expect("nobody else holds the observer");
    (observer.into_inner(), result)
}

/// Tells the observer of this thread, where there is one, what goes into the map `name`. What an observer
/// runs itself while it observes is not observed.
///
/// # Errors
/// Those of the observer.
pub fn observe_input(name: &str, x: &Tensor) -> Result<()> {
    let observer = OBSERVER.with(|slot| slot.borrow().clone());
    match observer {
        None => Ok(()),
        Some(observer) => match observer.try_borrow_mut() {
            Ok(mut observer) => observer.observe(name, x),
            // It is observing: this map is one of its own.
            Err(_) => Ok(()),
        },
    }
}

/// Gathers [`InputStatistics`] by name. Maps that are given the same tensor one after another (query,
/// key and value) share theirs.
#[derive(Debug)]
pub struct InputCollector {
    moments: Moments,
    /// Where the statistics of each name lie.
    names: BTreeMap<String, usize>,
    statistics: Vec<InputStatistics>,
    /// The last input and its statistics. Kept alive, so that its address is nobody else's.
    last: Option<(Tensor, usize)>,
}

impl InputCollector {
    /// Of nothing yet.
    pub fn new(moments: Moments) -> InputCollector {
        InputCollector {
            moments,
            names: BTreeMap::new(),
            statistics: Vec::new(),
            last: None,
        }
    }

    /// What was gathered of the inputs of `name`.
    pub fn get(&self, name: &str) -> Option<&InputStatistics> {
        self.names.get(name).map(|&place| &self.statistics[place])
    }

    /// The names of all maps that were seen.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Forgets the last input, which is kept to know it again.
    pub fn finish(&mut self) {
        self.last = None;
    }
}

impl InputObserver for InputCollector {
    fn observe(&mut self, name: &str, x: &Tensor) -> Result<()> {
        let same = |last: &Tensor| last.data_ptr() == x.data_ptr() && last.size() == x.size();
        let again = self.last.as_ref().filter(|(last, _)| same(last));
        let known = self.names.get(name).copied();
        let again = again.map(|&(_, place)| place);
        match (again, known) {
            // Counted already, for the map before this one.
            (Some(place), None) => {
                self.names.insert(name.to_owned(), place);
                return Ok(());
            }
            (Some(place), Some(known)) if place == known => return Ok(()),
            _ => {}
        }
        let place = match known {
            Some(place) => place,
            None => {
                let inputs = x.size().last().copied().unwrap_or(0);
                let new = InputStatistics::new(inputs, self.moments, x.device())?;
                self.statistics.push(new);
                let place = self.statistics.len() - 1;
                self.names.insert(name.to_owned(), place);
                place
            }
        };
        self.statistics[place].add(x)?;
        self.last = Some((x.f_detach()?, place));
        Ok(())
    }
}
