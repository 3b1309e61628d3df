//! The slot for adapters, with an adapter that multiplies the output by a number.

use overdrive_nn::{Adapter, Linear, LinearWeight, Result, joint_forward};
use tch::{Device, Kind, Tensor};

#[derive(Debug)]
struct Scale {
    factor: f64,
    active: bool,
    replaced: usize,
}

impl Adapter for Scale {
    fn is_active(&self) -> bool {
        self.active
    }

    fn active_names(&self) -> Vec<&str> {
        if self.active {
            vec!["scale"]
        } else {
            Vec::new()
        }
    }

    fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> Result<Tensor> {
        let y = layer.weight().forward(x, layer.bias(), fused)?;
        Ok(y.f_mul_scalar(self.factor)?)
    }

    fn weight_replaced(&mut self) {
        self.replaced += 1;
    }
}

/// A copy of the weight that takes its place.
#[derive(Debug)]
struct Copy(LinearWeight);

impl Adapter for Copy {
    fn is_active(&self) -> bool {
        false
    }

    fn active_names(&self) -> Vec<&str> {
        vec!["copy"]
    }

    fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> Result<Tensor> {
        layer.weight().forward(x, layer.bias(), fused)
    }

    fn replacement(&self) -> Option<(&LinearWeight, Option<&Tensor>)> {
        Some((&self.0, None))
    }
}

fn ones(shape: [i64; 2]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

fn scaled(factor: f64, active: bool) -> Linear {
    let mut layer = Linear::dense(ones([2, 4]), None).unwrap();
    let adapter = Scale {
        factor,
        active,
        replaced: 0,
    };
    assert!(layer.set_adapter(Box::new(adapter)).is_none());
    layer
}

#[test]
fn only_an_active_adapter_computes() {
    let x = ones([3, 4]);
    assert_eq!(scaled(3.0, true).forward(&x).unwrap(), ones([3, 2]) * 12);
    assert_eq!(scaled(3.0, false).forward(&x).unwrap(), ones([3, 2]) * 4);
    assert!(scaled(3.0, true).dense_weight().is_none());
    assert!(scaled(3.0, false).dense_weight().is_some());
}

#[test]
fn an_adapter_without_a_joint_form_is_computed_layer_by_layer() {
    let (one, two, plain) = (
        scaled(3.0, true),
        scaled(5.0, true),
        Linear::dense(ones([1, 4]), None).unwrap(),
    );
    let y = joint_forward(&ones([1, 4]), &[&plain, &one, &two]).unwrap();
    assert_eq!(
        y,
        Tensor::from_slice(&[4f32, 12., 12., 20., 20.]).view([1, 5])
    );
}

#[test]
fn an_adapter_is_found_by_its_type_and_told_of_a_new_weight() {
    let mut layer = scaled(3.0, true);
    assert!(layer.adapter_as::<Copy>().is_none());
    let weight = LinearWeight::Dense {
        weight: ones([2, 4]) * 2,
        transposed: false,
    };
    layer.replace_weight(weight).unwrap();
    assert_eq!(layer.adapter_as::<Scale>().unwrap().replaced, 1);
    let (weight, bias, adapter) = layer.split_mut::<Scale>();
    assert_eq!((weight.size(), bias.is_none()), ([2, 4], true));
    adapter.unwrap().factor = 1.0;
    assert_eq!(layer.forward(&ones([1, 4])).unwrap(), ones([1, 2]) * 8);
    assert!(layer.take_adapter().is_some() && layer.adapter().is_none());
}

#[test]
fn a_replacement_is_computed_with_and_lent() {
    let mut layer = Linear::dense(ones([2, 4]), None).unwrap();
    let copy = ones([2, 4]) * 7;
    let weight = LinearWeight::Dense {
        weight: copy.shallow_clone(),
        transposed: false,
    };
    layer.set_adapter(Box::new(Copy(weight)));
    assert_eq!(layer.forward(&ones([1, 4])).unwrap(), ones([1, 2]) * 28);
    let plain = Linear::dense(ones([1, 4]), None).unwrap();
    let y = joint_forward(&ones([1, 4]), &[&layer, &plain]).unwrap();
    assert_eq!(y, Tensor::from_slice(&[28f32, 28., 4.]).view([1, 3]));
    assert_eq!(layer.dense_weight().unwrap().data_ptr(), copy.data_ptr());
}
