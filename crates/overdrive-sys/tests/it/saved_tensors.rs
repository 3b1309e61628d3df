//! Hooks on saved tensors and dispatch modes, on graphs small enough to follow by hand.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use overdrive_sys::dispatch_mode::{
    DispatchMode, OperatorCall, OperatorNames, Results, current_operator, push_mode,
};
use overdrive_sys::op::{Value, call};
use overdrive_sys::saved_tensors::{
    BackwardOnThisThread, PackedTensor, SavedTensor, SavedVariable, backward_pass, push_hooks,
};
use overdrive_sys::{CallbackError, CallbackResult};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

struct Scaled {
    tensor: Tensor,
    unpacked: Arc<AtomicUsize>,
}

impl PackedTensor for Scaled {
    fn unpack(&self) -> CallbackResult<Tensor> {
        self.unpacked.fetch_add(1, Ordering::Relaxed);
        assert!(backward_pass().is_some());
        Ok(self.tensor.f_mul_scalar(10.0)?)
    }
}

#[test]
fn backward_computes_with_the_tensors_that_hooks_unpack() {
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let unpacked = Arc::new(AtomicUsize::new(0));
    let parameters = Rc::new(RefCell::new(Vec::new()));
    let y = {
        let (unpacked, parameters) = (Arc::clone(&unpacked), Rc::clone(&parameters));
        let _hooks = push_hooks(move |saved: SavedTensor| {
            parameters.borrow_mut().push(saved.is_parameter);
            Ok(Box::new(Scaled {
                tensor: saved.tensor.f_detach()?,
                unpacked: Arc::clone(&unpacked),
            }))
        })
        .unwrap();
        // Saves its input twice (x times x), then its result.
        (&x * &x).exp()
    };
    assert_eq!(*parameters.borrow(), [true, true, false]);
    let after = &y + 0.0; // Outside of the guard: saved without the hook.
    after.sum(Kind::Float).backward();
    assert_eq!(unpacked.load(Ordering::Relaxed), 3);
    // d exp(x²) = exp(x²) 2x, with each saved tensor ten times too large.
    let expected = (&x * &x).exp() * 10.0 * (&x * 20.0);
    assert!(x.grad().allclose(&expected.detach(), 1e-6, 0.0, false));
    assert_eq!(backward_pass(), None);
}

#[test]
fn errors_of_hooks_are_errors_of_forward_and_of_backward() {
    struct Failing;
    impl PackedTensor for Failing {
        fn unpack(&self) -> CallbackResult<Tensor> {
            Err("the disk is gone".into())
        }
    }
    let x = Tensor::ones([2], F32).set_requires_grad(true);
    let y = {
        let _hooks = push_hooks(|_| Ok(Box::new(Failing))).unwrap();
        x.f_exp().unwrap()
    };
    let error = y.sum(Kind::Float).f_backward().unwrap_err();
    assert!(error.to_string().contains("the disk is gone"), "{error}");

    let _hooks = push_hooks(|saved| {
        Err(CallbackError::from(format!(
            "no room for {:?}",
            saved.tensor.size()
        )))
    })
    .unwrap();
    let error = x.f_exp().unwrap_err();
    assert!(error.to_string().contains("no room for [2]"), "{error}");
}

#[test]
fn a_saved_variable_stays_attached_to_the_graph_and_detects_changes() {
    let leaf = Tensor::ones([2], F32).set_requires_grad(true);
    let mut y = &leaf * 3.0;
    let saved = SavedVariable::new(&y).unwrap();
    let again = saved.unpack().unwrap();
    again.sum(Kind::Float).backward();
    assert_eq!(Vec::<f32>::try_from(leaf.grad()).unwrap(), [3.0, 3.0]);
    let _ = y.f_add_scalar_(1.0).unwrap();
    let error = saved.unpack().unwrap_err().to_string();
    assert!(
        error.contains("modified by an inplace operation"),
        "{error}"
    );
}

#[derive(Default)]
struct Recorder {
    names: RefCell<Vec<String>>,
    results: RefCell<Vec<Vec<i64>>>,
}

impl DispatchMode for Recorder {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        let mut name = call.full_name();
        for (mark, is) in [
            ('!', call.mutates()?),
            ('~', call.aliases()?),
            ('?', call.is_random()?),
        ] {
            if is {
                name.push(mark);
            }
        }
        self.names.borrow_mut().push(name);
        Ok(None)
    }

    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        let shapes = call.tensors()?.into_iter().map(|tensor| tensor.size());
        self.results.borrow_mut().extend(shapes);
        Ok(())
    }
}

#[test]
fn a_mode_sees_which_copies_do_not_wait_before_they_run() {
    #[derive(Default)]
    struct Copies(RefCell<Vec<(String, bool)>>);
    impl DispatchMode for Copies {
        fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
            let is_asynchronous = call.is_set(c"non_blocking")?;
            assert!(!call.is_set(c"no_such_argument")?);
            self.0
                .borrow_mut()
                .push((call.full_name(), is_asynchronous));
            Ok(None)
        }

        fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
            let error = call.is_set(c"non_blocking").unwrap_err().to_string();
            assert!(error.contains("when it has run"), "{error}");
            Ok(())
        }
    }
    let (x, y) = (Tensor::ones([2], F32), Tensor::zeros([2], F32));
    let copies = Rc::new(Copies::default());
    {
        let _mode = push_mode(Rc::clone(&copies) as Rc<dyn DispatchMode>);
        for wanted in [false, true] {
            let arguments = [Value::Tensor(&y), Value::Tensor(&x), Value::Bool(wanted)];
            call("aten::copy_", "", &arguments).unwrap();
            let _copy = x.to_device_(Device::Cpu, Kind::Double, wanted, true);
        }
    }
    let found = copies.0.take();
    let expected = [("aten::copy_", false), ("aten::_to_copy", false)].into_iter();
    let expected = expected.chain([("aten::copy_", true), ("aten::_to_copy", true)]);
    let expected: Vec<_> = expected.map(|(name, is)| (name.to_owned(), is)).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_mode_sees_the_operators_that_have_kernels() {
    let weight = Tensor::ones([4, 3], F32).set_requires_grad(true);
    let bias = Tensor::ones([4], F32).set_requires_grad(true);
    let x = Tensor::ones([2, 3], F32);
    let recorder = Rc::new(Recorder::default());
    {
        let _mode = push_mode(Rc::clone(&recorder) as Rc<dyn DispatchMode>);
        let mut y = x.linear(&weight, Some(&bias)).relu();
        let _ = y.f_mul_scalar_(2.0).unwrap();
        let _ = Tensor::randn([5], F32);
    }
    let _ = x.exp();
    let names = recorder.names.borrow();
    assert_eq!(
        *names,
        [
            "aten::t~",
            "aten::addmm",
            "aten::relu",
            "aten::mul_.Scalar!~",
            "aten::randn?"
        ]
    );
    let results = recorder.results.borrow();
    assert_eq!(
        *results,
        [vec![3, 4], vec![2, 4], vec![2, 4], vec![2, 4], vec![5]]
    );
}

/// Stores the matrix products of the first pass, and replaces those of the second by them.
#[derive(Default)]
struct Cache {
    kept: Mutex<Vec<Arc<Results>>>,
    answering: bool,
}

impl DispatchMode for Cache {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        if self.answering && call.name() == "aten::mm" {
            return Ok(Some(self.kept.lock().unwrap().remove(0)));
        }
        Ok(None)
    }

    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        if !self.answering && call.name() == "aten::mm" {
            self.kept.lock().unwrap().push(Arc::new(call.keep()?));
        }
        Ok(())
    }
}

#[test]
fn a_mode_can_replace_results_by_stored_ones_without_changing_the_graph() {
    let weight = Tensor::randn([3, 3], F32).set_requires_grad(true);
    let first = Rc::new(Cache::default());
    let x = Tensor::randn([2, 3], F32);
    let y = {
        let _mode = push_mode(Rc::clone(&first) as Rc<dyn DispatchMode>);
        x.mm(&weight)
    };
    let kept = std::mem::take(&mut *first.kept.lock().unwrap());
    let second = Rc::new(Cache {
        kept: Mutex::new(kept),
        answering: true,
    });
    let again = {
        let _mode = push_mode(second as Rc<dyn DispatchMode>);
        // Another input: the values are the stored ones, the graph is that of this call.
        Tensor::zeros([2, 3], F32).mm(&weight)
    };
    assert_eq!(again, y);
    again.sum(Kind::Float).backward();
    assert_eq!(weight.grad(), Tensor::zeros([3, 3], F32));
}

#[test]
fn a_stored_result_that_was_changed_in_place_is_an_error() {
    let x = Tensor::randn([2, 2], F32);
    let first = Rc::new(Cache::default());
    {
        let _mode = push_mode(Rc::clone(&first) as Rc<dyn DispatchMode>);
        let mut y = x.mm(&x);
        let _ = y.f_relu_().unwrap();
    }
    let kept = std::mem::take(&mut *first.kept.lock().unwrap());
    let second = Rc::new(Cache {
        kept: Mutex::new(kept),
        answering: true,
    });
    let _mode = push_mode(second as Rc<dyn DispatchMode>);
    let error = x.f_mm(&x).unwrap_err().to_string();
    assert!(error.contains("aten::mm"), "{error}");
    assert!(error.contains("changed in place"), "{error}");
}

#[test]
fn the_operator_that_saves_a_tensor_has_a_name() {
    let x = Tensor::ones([2, 3], F32).set_requires_grad(true);
    let named = Rc::new(RefCell::new(Vec::new()));
    {
        let inner = Rc::clone(&named);
        let _hooks = push_hooks(move |saved| {
            inner.borrow_mut().push(current_operator()?);
            Ok(Box::new(Scaled {
                tensor: saved.tensor.f_detach()?,
                unpacked: Arc::default(),
            }))
        })
        .unwrap();
        let _names = OperatorNames::new();
        let _ = x.exp().linear(&x, None::<&Tensor>).softmax(-1, Kind::Float);
    }
    assert_eq!(current_operator().unwrap(), None);
    let named: Vec<String> = named.borrow().iter().flatten().cloned().collect();
    assert_eq!(
        named,
        ["aten::exp", "aten::mm", "aten::mm", "aten::_softmax"]
    );
}

#[test]
fn hooks_of_other_threads_are_not_called() {
    let x = Tensor::ones([2], F32).set_requires_grad(true);
    let _hooks = push_hooks(|_| Err("this thread's".into())).unwrap();
    let shared = x.shallow_clone();
    std::thread::spawn(move || shared.f_exp().unwrap().sum(Kind::Float).backward())
        .join()
        .unwrap();
    assert!(x.grad().defined());
    let _single = BackwardOnThisThread::new();
}

#[test]
fn no_other_storage_has_the_address_of_a_storage_id_that_lives() {
    use overdrive_sys::storage::StorageId;
    use overdrive_sys::transfer::copy_async;

    let x = Tensor::ones([64], F32);
    let id = StorageId::of(&x).unwrap();
    assert_eq!(
        StorageId::of(&x.view([8, 8])).unwrap().address(),
        id.address()
    );
    let copy = Tensor::zeros([64], F32);
    let done = copy_async(&x, &copy).unwrap();
    done.wait_on(Device::Cpu).unwrap();
    assert_eq!(copy, x);
    drop(x);
    for _ in 0..100 {
        let other = Tensor::ones([64], F32);
        assert_ne!(StorageId::of(&other).unwrap().address(), id.address());
    }
}
