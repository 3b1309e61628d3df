//! Autocast regions: what they cast, and what they leave behind.

use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_precision::{Autocast, Error, Precision, autocast, is_autocast_enabled};
use overdrive_sys::autocast as raw;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn square() -> Tensor {
    Tensor::ones([4, 4], (Kind::Float, CPU))
}

fn product_kind() -> Kind {
    let a = square();
    a.matmul(&a).kind()
}

#[test]
fn products_run_in_the_chosen_dtype_and_losses_in_fp32() {
    for dtype in [Kind::BFloat16, Kind::Half] {
        let _autocast = autocast(CPU, dtype).unwrap();
        let product = square().matmul(&square());
        let target = Tensor::zeros([4], (Kind::Int64, CPU));
        let loss = product.cross_entropy_for_logits(&target);
        assert_eq!(product.kind(), dtype);
        assert_eq!(product.double_value(&[0, 0]), 4.0);
        assert_eq!(loss.kind(), Kind::Float);
    }
    assert_eq!(product_kind(), Kind::Float);
}

#[test]
fn regions_nest_and_can_be_switched_off_inside() {
    {
        let _bf16 = autocast(CPU, Kind::BFloat16).unwrap();
        assert_eq!(product_kind(), Kind::BFloat16);
        {
            let _fp16 = autocast(CPU, Kind::Half).unwrap();
            assert_eq!(product_kind(), Kind::Half);
        }
        assert_eq!(product_kind(), Kind::BFloat16);
        {
            let _full = Autocast::new(CPU).enabled(false).enter().unwrap();
            assert_eq!(product_kind(), Kind::Float);
            assert!(!is_autocast_enabled(CPU).unwrap());
        }
        assert_eq!(product_kind(), Kind::BFloat16);
    }
    assert!(!is_autocast_enabled(CPU).unwrap());
}

#[test]
fn an_early_return_ends_the_region() {
    let forward = |weight: &Tensor| -> overdrive_precision::Result<Tensor> {
        let _autocast = autocast(CPU, Kind::BFloat16)?;
        Ok(square().f_matmul(weight)?)
    };
    assert_eq!(forward(&square()).unwrap().kind(), Kind::BFloat16);
    assert!(!is_autocast_enabled(CPU).unwrap());
    let wrong_shape = Tensor::ones([3, 3], (Kind::Float, CPU));
    assert!(matches!(forward(&wrong_shape), Err(Error::Tch(_))));
    assert!(!is_autocast_enabled(CPU).unwrap());
}

#[test]
fn a_panic_leaves_no_trace() {
    let before = raw::state(CPU).unwrap();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _outer = autocast(CPU, Kind::Half).unwrap();
        let _inner = Autocast::new(CPU).cache_enabled(false).enter().unwrap();
        panic!("inside")
    }));
    assert!(unwound.is_err());
    assert_eq!(raw::state(CPU).unwrap(), before);
    assert!(raw::cache_enabled().unwrap());
    // The depth is back at 0: the next region is the outermost again.
    assert_eq!(raw::increment_nesting().unwrap(), 1);
    assert_eq!(raw::decrement_nesting().unwrap(), 0);
}

#[test]
fn guards_dropped_out_of_order_leave_the_settings_of_the_last_one() {
    let before = raw::state(CPU).unwrap();
    let outer = autocast(CPU, Kind::Half).unwrap();
    let inner = Autocast::new(CPU)
        .enabled(false)
        .cache_enabled(false)
        .enter()
        .unwrap();
    drop(outer);
    assert!(!is_autocast_enabled(CPU).unwrap() && !raw::cache_enabled().unwrap());
    drop(inner);
    assert_eq!(raw::state(CPU).unwrap(), before);
    assert!(raw::cache_enabled().unwrap());
    assert_eq!(raw::increment_nesting().unwrap(), 1);
    assert_eq!(raw::decrement_nesting().unwrap(), 0);
}

#[test]
fn a_dtype_that_cannot_be_cast_to_is_refused_and_changes_nothing() {
    let before = raw::state(CPU).unwrap();
    for dtype in [Kind::Int64, Kind::Float, Kind::Double] {
        let error = autocast(CPU, dtype).unwrap_err();
        assert!(matches!(error, Error::UnsupportedDtype { .. }));
        assert!(error.to_string().contains(&format!("{dtype:?}")), "{error}");
    }
    assert_eq!(raw::state(CPU).unwrap(), before);
    assert_eq!(raw::increment_nesting().unwrap(), 1);
    assert_eq!(raw::decrement_nesting().unwrap(), 0);
}

#[test]
fn the_default_dtype_is_that_of_the_device_type() {
    let _autocast = Autocast::new(CPU).enter().unwrap();
    assert_eq!(product_kind(), Kind::BFloat16);
}

#[test]
fn a_weight_is_cast_once_in_a_region_and_the_copy_goes_with_it() {
    let weight = Tensor::ones([512, 512], (Kind::Float, CPU)).set_requires_grad(true);
    let x = Tensor::ones([1, 512], (Kind::Float, CPU));
    let allocations = || overdrive_sys::memory::stats(CPU).unwrap().allocations;
    let count = |cache: bool| {
        let region = Autocast::new(CPU).dtype(Kind::BFloat16);
        let _autocast = region.cache_enabled(cache).enter().unwrap();
        let _first = x.matmul(&weight);
        // Tests beside this one allocate too: the fewest of many tries is ours alone.
        (0..50)
            .map(|_| {
                let before = allocations();
                let _again = x.matmul(&weight);
                allocations() - before
            })
            .min()
            .unwrap()
    };
    assert!(
        count(true) < count(false),
        "a cached weight must not be cast again"
    );

    // The weight changes between two regions: a copy that outlived the first would be stale.
    let product = || {
        let _autocast = autocast(CPU, Kind::BFloat16).unwrap();
        x.matmul(&weight).double_value(&[0, 0])
    };
    assert_eq!(product(), 512.0);
    tch::no_grad(|| {
        let _ = weight.shallow_clone().fill_(2.0);
    });
    assert_eq!(product(), 1024.0);
}

#[test]
fn another_thread_is_not_in_the_region() {
    let _autocast = autocast(CPU, Kind::BFloat16).unwrap();
    let outside = std::thread::spawn(product_kind).join().unwrap();
    assert_eq!(outside, Kind::Float);
}

#[test]
fn a_precision_has_its_region() {
    let product_kind_in = |precision: Precision| {
        let _autocast = precision.autocast(CPU).unwrap();
        product_kind()
    };
    assert_eq!(product_kind_in(Precision::Bf16), Kind::BFloat16);
    assert_eq!(product_kind_in(Precision::Fp32), Kind::Float);
    let _autocast = autocast(CPU, Kind::BFloat16).unwrap();
    assert_eq!(product_kind_in(Precision::Fp32), Kind::Float);
}

#[test]
fn gradients_of_a_bf16_forward_are_fp32_for_fp32_weights() {
    let weight = Tensor::ones([4, 4], (Kind::Float, CPU)).set_requires_grad(true);
    let loss = {
        let _autocast = autocast(CPU, Kind::BFloat16).unwrap();
        square().matmul(&weight).sum(Kind::Float)
    };
    loss.backward();
    assert_eq!(weight.grad().kind(), Kind::Float);
    assert_eq!(weight.grad().double_value(&[3, 3]), 4.0);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn regions_on_a_gpu_cast_there() {
    let a = Tensor::ones([16, 16], (Kind::Float, Device::Cuda(0)));
    for dtype in [Kind::BFloat16, Kind::Half] {
        let _autocast = autocast(a.device(), dtype).unwrap();
        assert_eq!(a.matmul(&a).kind(), dtype);
    }
}
