//! Operators by name, setting and clearing gradients, and the errors of both.

use overdrive_sys::op::{Output, Value, call, call_unchecked, schema};
use overdrive_sys::{Error, amp, grad};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn one(mut outputs: Vec<Output>) -> Output {
    assert_eq!(outputs.len(), 1);
    outputs.remove(0)
}

#[test]
fn a_list_operator_returns_a_list() {
    let tensors = [
        Tensor::from_slice(&[3.0f32, 4.0]),
        Tensor::from_slice(&[5.0f32, 12.0]),
    ];
    let args = [Value::Tensors(&tensors), Value::Int(2)];
    let norms = one(call("aten::_foreach_norm", "Scalar", &args).unwrap())
        .into_tensors()
        .unwrap();
    assert_eq!(
        norms
            .iter()
            .map(|n| n.double_value(&[]))
            .collect::<Vec<_>>(),
        [5.0, 13.0]
    );
}

#[test]
fn an_in_place_list_operator_writes_to_its_tensors() {
    let tensors = [Tensor::ones([2], F32), Tensor::ones([3], F32)];
    call(
        "aten::_foreach_mul_",
        "Scalar",
        &[Value::Tensors(&tensors), Value::Float(2.5)],
    )
    .unwrap();
    assert_eq!(tensors[0].double_value(&[1]), 2.5);
    assert_eq!(tensors[1].double_value(&[2]), 2.5);
}

#[test]
fn defaults_of_the_schema_fill_what_is_left_out() {
    let x = Tensor::from_slice(&[1.0f32, 2.0]);
    let y = Tensor::from_slice(&[10.0f32, 20.0]);
    let sum = call(
        "aten::add",
        "Tensor",
        &[Value::Tensor(&x), Value::Tensor(&y)],
    )
    .unwrap();
    assert_eq!(one(sum).into_tensor().unwrap().double_value(&[1]), 22.0);
}

#[test]
fn optional_list_elements_may_be_undefined() {
    let x = Tensor::from_slice2(&[[1i64, 2, 3], [4, 5, 6]]);
    let indices = [Tensor::new(), Tensor::from_slice(&[2i64, 0])];
    let out = call(
        "aten::index",
        "Tensor",
        &[Value::Tensor(&x), Value::Tensors(&indices)],
    )
    .unwrap();
    let out = one(out).into_tensor().unwrap();
    assert_eq!(Vec::<Vec<i64>>::try_from(out).unwrap(), [[3, 1], [6, 4]]);
}

#[test]
fn several_outputs_come_in_order() {
    let x = Tensor::from_slice(&[1.0f32, 9.0, 4.0]);
    let mut out = call("aten::max", "dim", &[Value::Tensor(&x), Value::Int(0)]).unwrap();
    assert_eq!(out.len(), 2);
    assert_eq!(out.remove(0).into_tensor().unwrap().double_value(&[]), 9.0);
    assert_eq!(out.remove(0).into_tensor().unwrap().int64_value(&[]), 1);
}

#[test]
fn autograd_goes_through_a_boxed_call() {
    let x = Tensor::from_slice(&[2.0f32]).set_requires_grad(true);
    let y = call(
        "aten::mul",
        "Tensor",
        &[Value::Tensor(&x), Value::Tensor(&x)],
    )
    .unwrap();
    one(y).into_tensor().unwrap().sum(Kind::Float).backward();
    assert_eq!(x.grad().double_value(&[0]), 4.0);
}

#[test]
fn an_operator_that_is_not_there_is_named() {
    let error = call("aten::no_such_thing", "", &[]).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }));
    assert!(error.to_string().contains("aten::no_such_thing"), "{error}");
    assert!(matches!(
        schema("aten::mul", "NoOverload").unwrap_err(),
        Error::NotFound { .. }
    ));
    assert!(matches!(
        call("aten::\0mul", "", &[]).unwrap_err(),
        Error::BadArgument { .. }
    ));
}

#[test]
fn a_wrong_argument_is_named_with_what_was_expected_and_given() {
    let x = Tensor::ones([2], F32);
    let error = call("aten::silu", "", &[Value::Float(1.0)])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`self`") && error.contains("Tensor") && error.contains("a float"),
        "{error}"
    );
    let error = call("aten::mul", "Tensor", &[Value::Tensor(&x)])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`other`") && error.contains("must be given"),
        "{error}"
    );
    let args = [Value::Tensor(&x), Value::Tensor(&x)];
    let error = call("aten::silu", "", &args).unwrap_err().to_string();
    assert!(error.contains("2 arguments given"), "{error}");
}

#[test]
fn a_cpp_exception_becomes_an_error_with_its_message() {
    let (a, b) = (Tensor::ones([2, 3], F32), Tensor::ones([2, 3], F32));
    let error = call("aten::mm", "", &[Value::Tensor(&a), Value::Tensor(&b)]).unwrap_err();
    assert!(matches!(error, Error::Torch { .. }));
    let text = error.to_string();
    assert!(
        text.contains("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        "{text}"
    );
    assert!(
        !text.contains("#0"),
        "a C++ backtrace is no message for a user: {text}"
    );
}

#[test]
fn an_error_of_tch_has_no_frames_of_cpp() {
    let error = Tensor::ones([3], F32).f_reshape([7]).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains("frame #"), "{text}");
    let plain = overdrive_sys::without_backtrace(&text);
    assert!(
        plain.ends_with("shape '[7]' is invalid for input of size 3"),
        "{plain}"
    );
    // The remedy that a caller adds after libtorch's text stays.
    let plain = overdrive_sys::without_backtrace(&format!("{text}use another shape"));
    assert!(plain.ends_with("size 3\nuse another shape"), "{plain}");
}

#[test]
fn a_gradient_is_cleared_and_the_next_backward_writes_it_anew() {
    let x = Tensor::from_slice(&[3.0f32]).set_requires_grad(true);
    (&x * &x).sum(Kind::Float).backward();
    assert_eq!(x.grad().double_value(&[0]), 6.0);
    grad::clear(&x).unwrap();
    assert!(!x.grad().defined());
    grad::clear(&x).unwrap();
    (&x * 5.0).sum(Kind::Float).backward();
    assert_eq!(x.grad().double_value(&[0]), 5.0);
}

#[test]
fn a_gradient_of_another_shape_or_dtype_is_refused() {
    let x = Tensor::ones([2], F32).set_requires_grad(true);
    grad::set(&x, &Tensor::from_slice(&[1.0f32, 2.0])).unwrap();
    assert_eq!(x.grad().double_value(&[1]), 2.0);
    assert!(
        grad::set(&x, &Tensor::ones([3], F32))
            .unwrap_err()
            .to_string()
            .contains("shape")
    );
    assert!(grad::set(&x, &Tensor::ones([2], (Kind::Double, Device::Cpu))).is_err());
}

#[test]
fn unscale_finds_infinities_and_nans_and_leaves_finite_gradients_scaled() {
    for (value, found) in [(2.0f32, 0.0), (f32::INFINITY, 1.0), (f32::NAN, 1.0)] {
        let grads = [
            Tensor::from_slice(&[4.0f32, 8.0]),
            Tensor::from_slice(&[value]),
        ];
        let found_inf = Tensor::zeros([1], F32);
        amp::non_finite_check_and_unscale(&grads, &found_inf, &Tensor::from_slice(&[0.5f32]))
            .unwrap();
        assert_eq!(found_inf.double_value(&[0]), found);
        assert_eq!(grads[0].double_value(&[1]), 4.0);
    }
    amp::non_finite_check_and_unscale(&[], &Tensor::zeros([1], F32), &Tensor::ones([1], F32))
        .unwrap();
}

#[test]
fn tensors_and_lists_come_back_with_one_owner_each() {
    // A hundred thousand round trips through the shim: a handle lost on each would show here and in valgrind, a handle
    // freed twice would crash.
    let x = Tensor::ones([1024], F32);
    let before = overdrive_sys::memory::stats(Device::Cpu)
        .unwrap()
        .allocated_bytes;
    for _ in 0..100_000 {
        let out = call(
            "aten::split",
            "Tensor",
            &[Value::Tensor(&x), Value::Int(512)],
        )
        .unwrap();
        let parts = one(out).into_tensors().unwrap();
        assert_eq!(parts.len(), 2);
        drop(call("aten::neg", "", &[Value::Tensor(&parts[1])]).unwrap());
    }
    let after = overdrive_sys::memory::stats(Device::Cpu)
        .unwrap()
        .allocated_bytes;
    // Other tests run beside this one, some with tensors of megabytes; the lost results would be 200 MB.
    assert!(
        after < before + (100 << 20),
        "{before} bytes before, {after} after"
    );
}

#[test]
#[allow(unsafe_code, reason = "a function under test is unsafe")]
fn operators_that_do_not_check_their_arguments_need_the_unsafe_call() {
    let x = Tensor::from_slice(&[1.0f32, 2.0]);
    // It reads N · C · HxW elements, whatever the size of its input.
    let normalize = [
        Value::Tensor(&x),
        Value::None,
        Value::None,
        Value::Int(1),
        Value::Int(2),
        Value::Int(1),
        Value::Int(1),
        Value::Float(1e-5),
    ];
    let address = [
        Value::Tensor(&x),
        Value::Ints(&[1]),
        Value::Ints(&[1]),
        Value::Int(1),
    ];
    for (name, arguments) in [
        ("aten::native_group_norm", &normalize[..]),
        ("inductor::_reinterpret_tensor", &address),
    ] {
        let error = call(name, "", arguments).unwrap_err();
        assert!(matches!(error, Error::BadArgument { .. }), "{error}");
        assert!(error.to_string().contains("call_unchecked"), "{error}");
    }
    // SAFETY: one element, the second of two.
    let mut second =
        unsafe { call_unchecked("inductor::_reinterpret_tensor", "", &address) }.unwrap();
    let second = second.remove(0).into_tensor().unwrap();
    assert_eq!(second.double_value(&[0]), 2.0);
}

#[test]
fn a_fused_optimizer_takes_only_lists_of_one_layout() {
    let tensors = |size: i64| [Tensor::zeros([size, 2], F32)];
    let fused = |lists: [&[Tensor]; 5], steps: &[Tensor], amsgrad: bool| {
        let [parameters, gradients, averages, squares, largest] = lists.map(Value::Tensors);
        let arguments = [
            parameters,
            gradients,
            averages,
            squares,
            largest,
            Value::Tensors(steps),
            Value::Float(0.1),
            Value::Float(0.9),
            Value::Float(0.99),
            Value::Float(0.0),
            Value::Float(1e-8),
            Value::Bool(amsgrad),
            Value::Bool(false),
        ];
        call("aten::_fused_adamw_", "", &arguments).map(drop)
    };
    let steps = [Tensor::from(1f32)];
    let [a, b, c, d] = [(); 4].map(|()| tensors(64));
    let short = tensors(1);
    fused([&a, &b, &c, &d, &[]], &steps, false).unwrap();
    let refused = |lists: [&[Tensor]; 5], steps: &[Tensor], amsgrad, name: &str| {
        let error = fused(lists, steps, amsgrad).unwrap_err();
        assert!(matches!(error, Error::BadArgument { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    };
    refused([&a, &short, &c, &d, &[]], &steps, false, "`grads`");
    refused([&a, &b, &[], &d, &[]], &steps, false, "`exp_avgs`");
    refused([&a, &b, &c, &d, &[]], &[], false, "`state_steps`");
    refused([&a, &b, &c, &d, &[]], &steps, true, "`max_exp_avg_sqs`");
    // One element in memory under a shape of 128.
    let expanded = [Tensor::zeros([1, 1], F32).expand([64, 2], false)];
    refused([&expanded, &b, &c, &d, &[]], &steps, false, "`self`");
    let transposed = [Tensor::zeros([2, 64], F32).tr()];
    refused([&a, &transposed, &c, &d, &[]], &steps, false, "`grads`");
}

#[test]
fn a_dtype_that_does_not_exist_is_refused() {
    let size = Value::Ints(&[2]);
    for code in [-1, 300] {
        let error = call("aten::empty", "memory_format", &[size, Value::Int(code)]).unwrap_err();
        assert!(error.to_string().contains("`dtype`"), "{error}");
    }
    call(
        "aten::empty",
        "memory_format",
        &[size, Value::Kind(Kind::Half)],
    )
    .unwrap();
}
