//! Hooks and functions that change what they run in: they remove themselves, register others, or run backward
//! passes through their own tensors.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use overdrive_autograd::{
    BackwardContext, BackwardOptions, EnableGradGuard, ForwardContext, Function, FunctionResult,
    GradOptions, HookHandle, apply, backward, grad, register_hook,
    register_post_accumulate_grad_hook,
};
use tch::Tensor;

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// A value that reports when it is dropped.
struct Captured {
    number: usize,
    dropped: Arc<AtomicBool>,
}

impl Captured {
    fn new(number: usize) -> (Self, Arc<AtomicBool>) {
        let dropped = Arc::new(AtomicBool::new(false));
        let captured = Self {
            number,
            dropped: Arc::clone(&dropped),
        };
        (captured, dropped)
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.number = 0;
        self.dropped.store(true, Ordering::SeqCst);
    }
}

type Slot = Arc<Mutex<Option<HookHandle>>>;

#[test]
fn a_hook_that_removes_itself_keeps_its_captures_until_it_ends() {
    let x = leaf(&[1.0]);
    let (captured, dropped) = Captured::new(7);
    let (slot, seen) = (Slot::default(), Arc::new(AtomicUsize::new(0)));
    let (own, counter) = (Arc::clone(&slot), Arc::clone(&seen));
    let handle = register_hook(&x, move |_| {
        own.lock().unwrap().take().unwrap().remove()?;
        assert!(!captured.dropped.load(Ordering::SeqCst));
        counter.fetch_add(captured.number, Ordering::SeqCst);
        Ok(None)
    })
    .unwrap();
    *slot.lock().unwrap() = Some(handle);
    x.sum(None).backward();
    assert_eq!(seen.load(Ordering::SeqCst), 7);
    assert!(dropped.load(Ordering::SeqCst));
    x.sum(None).backward();
    assert_eq!(seen.load(Ordering::SeqCst), 7);
}

#[test]
fn a_post_accumulate_hook_that_removes_itself_keeps_its_captures_until_it_ends() {
    let x = leaf(&[1.0]);
    let (captured, dropped) = Captured::new(7);
    let slot = Slot::default();
    let own = Arc::clone(&slot);
    let handle = register_post_accumulate_grad_hook(&x, move |_| {
        own.lock().unwrap().take().unwrap().remove()?;
        assert!(!captured.dropped.load(Ordering::SeqCst));
        Ok(())
    })
    .unwrap();
    *slot.lock().unwrap() = Some(handle);
    x.sum(None).backward();
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn a_hook_that_another_thread_removes_while_it_runs_keeps_its_captures() {
    let x = leaf(&[1.0]);
    let (captured, dropped) = Captured::new(7);
    let (slot, seen) = (Slot::default(), Arc::new(AtomicUsize::new(0)));
    let (own, counter) = (Arc::clone(&slot), Arc::clone(&seen));
    let handle = register_hook(&x, move |_| {
        // The whole value is captured, not a copy of its number.
        let captured = &captured;
        let handle = own.lock().unwrap().take().unwrap();
        std::thread::spawn(move || handle.remove())
            .join()
            .unwrap()?;
        counter.fetch_add(captured.number, Ordering::SeqCst);
        Ok(None)
    })
    .unwrap();
    *slot.lock().unwrap() = Some(handle);
    x.sum(None).backward();
    assert_eq!(seen.load(Ordering::SeqCst), 7);
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn a_handle_removes_its_own_hook_after_an_in_place_operation() {
    let x = leaf(&[1.0]);
    let mut y = &x * 2.0;
    let counted = || {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        let hook = move |_: &Tensor| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(None)
        };
        (count, hook)
    };
    let ((first, before), (second, after)) = (counted(), counted());
    let before = register_hook(&y, before).unwrap();
    // From here on `y` is the result of another node, whose first hook is the next one.
    let _ = y.f_add_scalar_(1.0).unwrap();
    register_hook(&y, after).unwrap();
    before.remove().unwrap();
    y.sum(None).backward();
    assert_eq!(first.load(Ordering::SeqCst), 0);
    assert_eq!(second.load(Ordering::SeqCst), 1);
}

#[test]
fn a_hook_registers_the_first_hook_of_another_output_of_its_node() {
    let x = leaf(&[1.0, 2.0, 3.0]);
    let parts = x.split(1, 0);
    let others: Vec<Tensor> = parts[1..].iter().map(Tensor::shallow_clone).collect();
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let handle = register_hook(&parts[0], move |_| {
        for other in &others {
            let counter = Arc::clone(&counter);
            register_hook(other, move |gradient| {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok(Some(gradient * 10.0))
            })?;
        }
        Ok(None)
    })
    .unwrap();
    let run = || {
        let total = (&parts[0] + &parts[1] + &parts[2]).sum(None);
        grad(
            &[&total],
            &[&x],
            &GradOptions {
                retain_graph: Some(true),
                ..GradOptions::default()
            },
        )
    };
    let first = run().unwrap().remove(0).unwrap();
    // Without the hook's captures the graph does not own itself.
    handle.remove().unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 0);
    assert_eq!(first, Tensor::from_slice(&[1.0, 1.0, 1.0]));
    let second = run().unwrap().remove(0).unwrap();
    assert_eq!(second, Tensor::from_slice(&[1.0, 10.0, 10.0]));
}

#[test]
fn a_hook_whose_gradient_has_another_shape_is_refused() {
    let x = leaf(&[1.0, 2.0]);
    register_hook(&x, |_| Ok(Some(Tensor::from_slice(&[1.0, 2.0, 3.0])))).unwrap();
    let error = backward(&[&x.sum(None)], &BackwardOptions::default()).unwrap_err();
    assert!(error.to_string().contains("changed the size"), "{error}");
}

#[test]
fn a_hook_that_runs_a_backward_pass_through_its_own_tensor_gets_an_error() {
    let x = leaf(&[3.0]);
    let own = x.shallow_clone();
    let found = Arc::new(Mutex::new(String::new()));
    let inner = Arc::clone(&found);
    let handle = register_hook(&x, move |_| {
        let _recording = EnableGradGuard::new();
        let error = grad(&[&own.square().sum(None)], &[&own], &GradOptions::default());
        *inner.lock().unwrap() = error.unwrap_err().to_string();
        Ok(None)
    })
    .unwrap();
    x.sum(None).backward();
    let text = found.lock().unwrap().clone();
    assert!(text.contains("calls the hook again"), "{text}");
    // The pass around it goes on, and the hook can run again.
    assert_eq!(x.grad().double_value(&[0]), 1.0);
    x.sum(None).backward();
    assert_eq!(x.grad().double_value(&[0]), 2.0);
    handle.remove().unwrap();
}

#[test]
fn a_post_accumulate_hook_may_take_gradients_of_its_leaf_but_not_accumulate_them() {
    let x = leaf(&[3.0]);
    let found = Arc::new(Mutex::new((0.0, String::new())));
    let inner = Arc::clone(&found);
    register_post_accumulate_grad_hook(&x, move |leaf| {
        let _recording = EnableGradGuard::new();
        let own = grad(
            &[&leaf.square().sum(None)],
            &[leaf],
            &GradOptions::default(),
        )?;
        let error = backward(&[&leaf.square().sum(None)], &BackwardOptions::default());
        let gradient = own[0].as_ref().map_or(0.0, |own| own.double_value(&[0]));
        *inner.lock().unwrap() = (gradient, error.unwrap_err().to_string());
        Ok(())
    })
    .unwrap();
    x.sum(None).backward();
    let (gradient, text) = found.lock().unwrap().clone();
    assert_eq!(gradient, 6.0);
    assert!(text.contains("accumulates into its own leaf"), "{text}");
    assert_eq!(x.grad().double_value(&[0]), 1.0);
}

/// The identity, whose backward differentiates its own result.
struct DifferentiatesItself;

impl Function for DifferentiatesItself {
    const NAME: &'static str = "DifferentiatesItself";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let result = inputs[0].f_mul_scalar(1.0)?;
        context.save_for_backward(&[inputs[0], &result]);
        Ok(vec![result])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        _: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [input, result] = context.saved() else {
            return Err("two tensors were saved".into());
        };
        let options = GradOptions {
            retain_graph: Some(true),
            ..GradOptions::default()
        };
        Ok(grad(&[result], &[input], &options)?)
    }
}

#[test]
fn a_function_that_differentiates_its_own_node_gets_an_error() {
    let x = leaf(&[3.0]);
    let y = apply(DifferentiatesItself, &[&(&x * 2.0)])
        .unwrap()
        .remove(0);
    let error = backward(&[&y.sum(None)], &BackwardOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("reaches the function's own node"), "{text}");
}
