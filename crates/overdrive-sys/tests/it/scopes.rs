//! Closures that borrow: after their scope none of them runs, however it ended.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_core::panic_text;
use overdrive_sys::scoped_closure::{Scope, ScopedClosure, scope};

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a destructor");
    }
}

fn is_revoked(closure: &ScopedClosure) -> bool {
    let error = closure.call(&[]).map_err(|error| error.to_string());
    error.is_err_and(|text| text.contains("after its scope ended"))
}

#[test]
fn a_panic_in_the_drop_of_a_captured_value_leaves_no_closure_callable() {
    let runs = Cell::new(0);
    let kept = RefCell::new(Vec::new());
    let payload = catch_unwind(AssertUnwindSafe(|| {
        scope(|scope| {
            for index in 0..4 {
                let bomb = (index % 2 == 0).then_some(Bomb);
                let runs = &runs;
                kept.borrow_mut().push(scope.register(move |_| {
                    let _ = &bomb;
                    runs.set(runs.get() + 1);
                    Ok(())
                }));
            }
        });
    }))
    .unwrap_err();
    assert_eq!(panic_text(&*payload), "a destructor");
    assert!(kept.borrow().iter().all(is_revoked));
    assert_eq!(runs.get(), 0);
}

#[test]
fn a_panic_of_the_body_is_not_hidden_by_one_of_a_captured_value() {
    let kept = RefCell::new(None);
    let payload = catch_unwind(AssertUnwindSafe(|| {
        scope(|scope| {
            let bomb = Bomb;
            *kept.borrow_mut() = Some(scope.register(move |_| {
                let _ = &bomb;
                Ok(())
            }));
            panic!("the body");
        });
    }))
    .unwrap_err();
    assert_eq!(panic_text(&*payload), "the body");
    assert!(kept.borrow().as_ref().is_some_and(is_revoked));
}

#[test]
fn a_closure_that_a_captured_value_registers_in_its_drop_is_never_callable() {
    struct Registers<'scope, 'env> {
        scope: &'scope Scope<'scope, 'env>,
        runs: &'env Cell<usize>,
        into: &'env RefCell<Vec<ScopedClosure>>,
    }
    impl Drop for Registers<'_, '_> {
        fn drop(&mut self) {
            let runs = self.runs;
            let late = self.scope.register(move |_| {
                runs.set(runs.get() + 1);
                Ok(())
            });
            // Another closure of the scope is out of reach by now too.
            assert!(self.into.borrow().iter().all(is_revoked));
            self.into.borrow_mut().push(late);
        }
    }
    let (runs, kept) = (Cell::new(0), RefCell::new(Vec::new()));
    scope(|scope| {
        let registers = Registers {
            scope,
            runs: &runs,
            into: &kept,
        };
        let first = scope.register(move |_| {
            let _ = &registers;
            Ok(())
        });
        kept.borrow_mut().push(first);
        let other = scope.register(|_| Ok(()));
        kept.borrow_mut().push(other);
    });
    let kept = kept.borrow();
    assert_eq!(kept.len(), 3);
    assert!(kept.iter().all(is_revoked));
    assert_eq!(runs.get(), 0);
}
