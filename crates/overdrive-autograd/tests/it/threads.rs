//! Backward from several threads at once, and over graphs that another thread built.

use overdrive_autograd::{
    BackwardContext, BackwardOptions, ForwardContext, Function, FunctionResult, apply, backward,
};
use tch::{Device, Kind, Tensor};

struct Scale(f64);

impl Function for Scale {
    const NAME: &'static str = "Scale";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        Ok(vec![inputs[0].f_mul_scalar(self.0)?])
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        Ok(vec![gradients[0].as_ref().map(|g| g * self.0)])
    }
}

#[test]
fn many_threads_run_backward_through_rust_functions_at_once() {
    let threads: Vec<_> = (1..=8)
        .map(|k| {
            std::thread::spawn(move || {
                let x = Tensor::ones([64], (Kind::Double, Device::Cpu)).set_requires_grad(true);
                for _ in 0..50 {
                    let y = apply(Scale(f64::from(k)), &[&x]).unwrap().remove(0);
                    backward(&[&y.sum(None)], &BackwardOptions::default()).unwrap();
                }
                x.grad().double_value(&[63])
            })
        })
        .collect();
    for (k, thread) in (1..=8).zip(threads) {
        assert_eq!(thread.join().unwrap(), 50.0 * f64::from(k));
    }
}

#[test]
fn a_graph_built_on_one_thread_runs_backward_on_another() {
    let x = Tensor::ones([4], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let y = apply(Scale(3.0), &[&x]).unwrap().remove(0).sum(None);
    std::thread::spawn(move || backward(&[&y], &BackwardOptions::default()).unwrap())
        .join()
        .unwrap();
    assert_eq!(x.grad().double_value(&[0]), 3.0);
}
