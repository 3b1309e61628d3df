//! Ignored and masked labels, extreme logits, and what is refused.

use super::*;

#[test]
fn where_every_label_is_ignored_the_mean_is_nan_and_the_gradient_zero_as_in_pytorch() {
    let labels = Tensor::from_slice(&[-100_i64; 5]);
    let theirs = values(&[5, 8], 1).set_requires_grad(true);
    let mean = theirs.cross_entropy_loss(&labels, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0);
    mean.backward();
    assert!(mean.double_value(&[]).is_nan());
    assert_eq!(theirs.grad().abs().max().double_value(&[]), 0.0);

    for kind in [Kind::Float, Kind::Double] {
        let logits = values(&[5, 8], 1).to_kind(kind).set_requires_grad(true);
        let ours = cross_entropy(&logits, &labels, &CrossEntropyOptions::default()).unwrap();
        ours.loss.backward();
        assert!(ours.loss.double_value(&[]).is_nan());
        assert_eq!(ours.tokens().unwrap(), 0);
        assert_eq!(logits.grad().abs().max().double_value(&[]), 0.0);

        let hidden = values(&[5, 4], 1).to_kind(kind).set_requires_grad(true);
        let weight = values(&[8, 4], 2).to_kind(kind).set_requires_grad(true);
        let options = LinearCrossEntropyOptions::default();
        let linear = linear_cross_entropy(&hidden, &weight, &labels, &options).unwrap();
        linear.loss.backward();
        assert!(linear.loss.double_value(&[]).is_nan());
        for leaf in [&hidden, &weight] {
            assert_eq!(leaf.grad().abs().max().double_value(&[]), 0.0);
        }
    }
}

#[test]
fn a_known_number_of_labels_changes_nothing_and_is_checked_on_a_cpu() {
    let labels = Tensor::from_slice(&[3_i64, -100, 0, -100, -100]);
    let logits = values(&[5, 8], 1);
    let with = |label_count| CrossEntropyOptions {
        label_count,
        ..CrossEntropyOptions::default()
    };
    let unknown = cross_entropy(&logits, &labels, &with(None)).unwrap();
    let known = cross_entropy(&logits, &labels, &with(Some(2))).unwrap();
    assert_eq!(known.loss, unknown.loss);
    let error = cross_entropy(&logits, &labels, &with(Some(3))).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("label_count") && error.contains("is 3"),
        "{error}"
    );
}

#[test]
fn a_sum_over_ignored_labels_is_zero_and_an_empty_batch_too() {
    let sum = CrossEntropyOptions {
        reduction: Reduction::Sum,
        ..CrossEntropyOptions::default()
    };
    let ignored = Tensor::from_slice(&[-100_i64; 5]);
    let loss = cross_entropy(&values(&[5, 8], 1), &ignored, &sum)
        .unwrap()
        .loss;
    assert_eq!(loss.double_value(&[]), 0.0);

    let none = Tensor::zeros([0], (Kind::Int64, Device::Cpu));
    let loss = cross_entropy(&values(&[0, 8], 1), &none, &sum)
        .unwrap()
        .loss;
    assert_eq!(loss.double_value(&[]), 0.0);
    let mean = cross_entropy(&values(&[0, 8], 1), &none, &CrossEntropyOptions::default());
    assert!(mean.unwrap().loss.double_value(&[]).is_nan());

    let weight = values(&[8, 4], 2).set_requires_grad(true);
    let options = LinearCrossEntropyOptions {
        loss: sum,
        ..LinearCrossEntropyOptions::default()
    };
    let loss = linear_cross_entropy(&values(&[0, 4], 1), &weight, &none, &options)
        .unwrap()
        .loss;
    assert_eq!(loss.double_value(&[]), 0.0);
    loss.backward();
    assert_eq!(weight.grad().abs().max().double_value(&[]), 0.0);
}

#[test]
fn masked_logits_have_no_probability_and_no_gradient() {
    let masked = f32::NEG_INFINITY;
    let row = [1.0_f32, masked, 2.0, masked, 0.5];
    let logits = Tensor::from_slice2(&[row]).set_requires_grad(true);
    let label = Tensor::from_slice(&[2_i64]);
    let loss = cross_entropy(&logits, &label, &CrossEntropyOptions::default())
        .unwrap()
        .loss;
    let theirs =
        logits.cross_entropy_loss(&label, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0);
    assert_close("loss", &loss, &theirs, 1e-6);
    loss.backward();
    assert_eq!(logits.grad().double_value(&[0, 1]), 0.0);
}

#[test]
fn an_ordinary_extreme_row_neither_overflows_nor_vanishes() {
    let logits = Tensor::from_slice2(&[[1e4_f32, -1e4, 0.0], [-1e4, -1e4, -1e4]]);
    let labels = Tensor::from_slice(&[1_i64, 0]);
    let sum = CrossEntropyOptions {
        reduction: Reduction::Sum,
        ..CrossEntropyOptions::default()
    };
    let loss = cross_entropy(&logits, &labels, &sum)
        .unwrap()
        .loss
        .double_value(&[]);
    assert!((loss - 20_000.0 - 3.0_f64.ln()).abs() < 0.01, "{loss}");
}

#[test]
fn nan_in_a_row_makes_the_loss_nan() {
    for at in [0, 3, 70] {
        let mut row = vec![0.5_f32; 75];
        row[at] = f32::NAN;
        let logits = Tensor::from_slice(&row).unsqueeze(0);
        let loss = cross_entropy(
            &logits,
            &Tensor::from_slice(&[1_i64]),
            &CrossEntropyOptions::default(),
        );
        assert!(loss.unwrap().loss.double_value(&[]).is_nan());
    }
}

#[test]
fn a_label_that_is_no_class_is_refused_with_its_row_and_value() {
    let logits = values(&[2, 3, 8], 1);
    for (bad, row) in [(8_i64, 4_usize), (-1, 2)] {
        let mut all = [1_i64, 2, 3, 4, 5, -100];
        all[row] = bad;
        let labels = Tensor::from_slice(&all).reshape([2, 3]);
        let expected = format!(
            "the label of row {row} is {bad}; it must be in 0..8, or -100 for an ignored row"
        );
        let error = cross_entropy(&logits, &labels, &CrossEntropyOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), format!("cross_entropy: {expected}"));
        let (hidden, weight) = (values(&[2, 3, 4], 1), values(&[8, 4], 2));
        let options = LinearCrossEntropyOptions::default();
        let error = linear_cross_entropy(&hidden, &weight, &labels, &options).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("linear_cross_entropy: {expected}")
        );
    }
}

#[test]
fn shapes_dtypes_and_options_that_do_not_fit_are_refused() {
    let (hidden, weight) = (values(&[5, 4], 1), values(&[8, 4], 2));
    let options = LinearCrossEntropyOptions::default();
    let loss = |hidden: &Tensor, labels: &Tensor, options: &LinearCrossEntropyOptions<'_>| {
        linear_cross_entropy(hidden, &weight, labels, options)
            .unwrap_err()
            .to_string()
    };
    let fit = labels(&[5], 8, 0, 1);
    assert_eq!(
        loss(&values(&[5, 3], 1), &fit, &options),
        "`hidden of linear_cross_entropy` has shape [5, 3]; it must be (…, 4) for a weight of shape [8, 4]"
    );
    assert_eq!(
        loss(&hidden, &labels(&[4], 8, 0, 1), &options),
        "`labels of linear_cross_entropy` has shape [4]; it must be [5], one label for each row"
    );
    assert_eq!(
        loss(&hidden, &fit.to_kind(Kind::Int), &options),
        "`labels of linear_cross_entropy` is Int; it must be Int64"
    );
    let bias = values(&[7], 1);
    let biased = LinearCrossEntropyOptions {
        bias: Some(&bias),
        ..options
    };
    assert_eq!(
        loss(&hidden, &fit, &biased),
        "`bias of linear_cross_entropy` has shape [7]; it must be [8], one element for each row of weight"
    );
    let capped = LinearCrossEntropyOptions {
        loss: CrossEntropyOptions {
            softcap: Some(0.0),
            ..CrossEntropyOptions::default()
        },
        ..options
    };
    assert_eq!(
        loss(&hidden, &fit, &capped),
        "`softcap` is 0; it must be positive and finite, or none"
    );
    let smoothed = CrossEntropyOptions {
        label_smoothing: 1.5,
        ..CrossEntropyOptions::default()
    };
    assert_eq!(
        cross_entropy(&values(&[5, 8], 1), &fit, &smoothed)
            .unwrap_err()
            .to_string(),
        "`label_smoothing` is 1.5; it must be between 0 and 1"
    );
}
