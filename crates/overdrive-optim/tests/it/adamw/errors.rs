//! The errors of AdamW for invalid parameters and options.

use super::*;

#[test]
fn the_error_of_an_invalid_parameter_names_it() {
    let float = || Tensor::ones([3], (Kind::Float, Device::Cpu));
    let integers = Tensor::ones([3], (Kind::Int64, Device::Cpu));
    assert!(
        one(integers)
            .unwrap_err()
            .to_string()
            .starts_with("`weight` is Int64;")
    );
    let complex = Tensor::ones([3], (Kind::ComplexFloat, Device::Cpu));
    assert!(
        one(complex)
            .unwrap_err()
            .to_string()
            .contains("it must be a floating-point parameter")
    );
    let derived = float().set_requires_grad(true) * 2.0;
    assert!(one(derived).unwrap_err().to_string().contains("not a leaf"));

    let pair = |a: &str, b: &str, second: Tensor, first: Tensor| {
        let group = ParamGroup::new("all", vec![(a.into(), first), (b.into(), second)]);
        AdamW::new(vec![group], config()).unwrap_err().to_string()
    };
    assert!(pair("w", "w", float(), float()).contains("`w` is listed twice"));
    let tied = float();
    let message = pair("embed", "head", tied.shallow_clone(), tied);
    assert!(
        message.contains("`embed` and `head` share their memory"),
        "{message}"
    );
}

#[test]
fn the_error_of_an_invalid_option_names_its_range() {
    let error = |config: AdamWConfig| AdamW::new(vec![], config).unwrap_err().to_string();
    let message = error(AdamWConfig {
        betas: (0.9, 1.0),
        ..config()
    });
    assert_eq!(message, "`betas.1` is 1; it must be at least 0 and below 1");
    let message = error(AdamWConfig {
        learning_rate: -1.0,
        ..config()
    });
    assert_eq!(message, "`learning_rate` is -1; it must be 0 or positive");
    let unknown = serde_json::from_str::<AdamWConfig>(r#"{"beta1": 0.9}"#).unwrap_err();
    assert!(
        unknown.to_string().contains("unknown field `beta1`"),
        "{unknown}"
    );
}

#[test]
fn a_converted_parameter_is_an_error_that_names_it() {
    let mut parameter = leaf(&Tensor::ones([3], (Kind::Float, Device::Cpu)), Kind::Float);
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    grad::clear(&parameter).unwrap();
    parameter.set_data(&parameter.detach().to_kind(Kind::Double));
    parameter.sum(Kind::Double).backward();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("`weight` is Double on Cpu, but its optimizer state is Float"),
        "{message}"
    );
}

#[test]
fn a_resized_or_restrided_parameter_is_never_read_beyond_its_state() {
    let data = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    let mut parameter = leaf(&data(), Kind::Float);
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();

    // The same shape in column-major memory: still right.
    let column_major = data().tr().contiguous().tr();
    parameter.set_data(&column_major);
    let gradient = Tensor::from_slice(&[1f32, -1.0, 1.0, 1.0, -1.0, -1.0]).view([2, 3]) * 1e3;
    grad::set(&parameter, &gradient).unwrap();
    optimizer.step().unwrap();
    assert!(parameter.sign().equal(&-gradient.sign()));
    optimizer.zero_grad().unwrap();

    parameter.set_data(&Tensor::zeros([500, 3], (Kind::Float, Device::Cpu)));
    parameter.sum(Kind::Float).backward();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("`weight` is [500, 3], but its optimizer state is [2, 3]"),
        "{message}"
    );
}
