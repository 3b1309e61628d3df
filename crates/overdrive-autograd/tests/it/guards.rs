//! Guards that are dropped in another order than the reverse of their creation.

use std::rc::Rc;
use std::sync::Arc;

use overdrive_autograd::{
    BackwardOnThisThread, EnableGradGuard, InferenceModeGuard, NoGradGuard,
    backward_stays_on_this_thread, is_grad_enabled, is_inference_mode_enabled,
};
use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{
    DispatchMode, OperatorCall, OperatorNames, current_operator, push_mode,
};
use tch::Tensor;

#[test]
fn grad_mode_is_that_of_the_last_guard_that_is_left() {
    let outer = NoGradGuard::new();
    let inner = EnableGradGuard::new();
    drop(outer);
    assert!(is_grad_enabled());
    drop(inner);
    assert!(is_grad_enabled());

    let (first, second, third) = (
        NoGradGuard::new(),
        EnableGradGuard::new(),
        NoGradGuard::new(),
    );
    drop(second);
    assert!(!is_grad_enabled());
    drop(third);
    assert!(!is_grad_enabled());
    drop(first);
    assert!(is_grad_enabled());
}

#[test]
fn a_guard_inside_a_callback_restores_the_mode_of_the_callback() {
    let _outer = EnableGradGuard::new();
    tch::no_grad(|| {
        drop(EnableGradGuard::new());
        assert!(!is_grad_enabled());
    });
}

#[test]
fn inference_mode_does_not_bring_back_modes_that_ended_inside_it() {
    let no_grad = NoGradGuard::new();
    let on_this_thread = BackwardOnThisThread::new();
    let inference = InferenceModeGuard::new().unwrap();
    drop(no_grad);
    drop(on_this_thread);
    assert!(is_inference_mode_enabled() && !is_grad_enabled());
    drop(inference);
    assert!(!is_inference_mode_enabled() && is_grad_enabled());
    assert!(!backward_stays_on_this_thread());
}

struct Counts(std::cell::Cell<usize>);

impl DispatchMode for Counts {
    fn before(
        &self,
        _: &OperatorCall,
    ) -> CallbackResult<Option<Arc<overdrive_sys::dispatch_mode::Results>>> {
        self.0.set(self.0.get() + 1);
        Ok(None)
    }
}

#[test]
fn a_dispatch_mode_outlives_the_inference_mode_that_it_was_pushed_in() {
    let inference = InferenceModeGuard::new().unwrap();
    let counts = Rc::new(Counts(std::cell::Cell::new(0)));
    let mode = push_mode(Rc::clone(&counts) as Rc<dyn DispatchMode>);
    drop(inference);
    let x = Tensor::from_slice(&[1.0]);
    let before = counts.0.get();
    let _ = x.neg();
    assert_eq!(counts.0.get(), before + 1);
    drop(mode);
    let _ = x.neg();
    assert_eq!(counts.0.get(), before + 1);
}

#[test]
fn operator_names_are_recorded_until_the_last_guard_is_dropped() {
    struct Name(std::cell::RefCell<Option<String>>);
    impl DispatchMode for Name {
        fn after(&self, _: &OperatorCall) -> CallbackResult<()> {
            *self.0.borrow_mut() = current_operator()?;
            Ok(())
        }
    }
    let name = Rc::new(Name(std::cell::RefCell::default()));
    let _mode = push_mode(Rc::clone(&name) as Rc<dyn DispatchMode>);
    let x = Tensor::from_slice(&[1.0]);
    let named = || {
        let _ = x.neg();
        name.0.take()
    };
    let (outer, inner) = (OperatorNames::new(), OperatorNames::new());
    drop(outer);
    assert_eq!(named().as_deref(), Some("aten::neg"));
    drop(inner);
    assert_eq!(named(), None);
}

#[test]
fn guards_in_a_thread_local_are_dropped_with_the_thread() {
    thread_local! {
        static KEPT: std::cell::RefCell<Vec<NoGradGuard>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    std::thread::spawn(|| KEPT.with_borrow_mut(|kept| kept.push(NoGradGuard::new())))
        .join()
        .unwrap();
}
