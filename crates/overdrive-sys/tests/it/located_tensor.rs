//! Tensors whose elements are found once.
#![allow(unsafe_code, reason = "the functions under test are unsafe")]

use overdrive_sys::raw::{LocatedTensor, slice};
use tch::{Device, Kind, Tensor};

#[test]
fn elements_are_those_of_the_tensor() {
    let tensor = Tensor::from_slice(&[1_i32, 2, 3, 4]).view([2, 2]);
    let located = LocatedTensor::from(tensor.shallow_clone());
    assert_eq!((located.kind(), located.device()), (Kind::Int, Device::Cpu));
    // SAFETY: one thread, and no slice lives on.
    unsafe {
        assert_eq!(located.slice::<i32>().unwrap(), [1, 2, 3, 4]);
        located.slice_mut::<i32>().unwrap()[3] = 5;
        assert_eq!(slice::<i32>(&tensor).unwrap(), [1, 2, 3, 5]);
        let error = located.slice::<f32>().unwrap_err().to_string();
        assert_eq!(error, slice::<f32>(&tensor).unwrap_err().to_string());
    }
    let narrow = LocatedTensor::from(tensor.narrow(0, 1, 1));
    // SAFETY: as above.
    assert_eq!(unsafe { narrow.slice::<i32>().unwrap() }, [3, 5]);
}

#[test]
fn elements_are_found_once() {
    let mut tensor = Tensor::from_slice(&[1.0_f32, 2.0]);
    let located = LocatedTensor::from(tensor.shallow_clone());
    tensor.set_data(&Tensor::from_slice(&[3.0_f32]));
    // SAFETY: one thread, and no slice lives on.
    unsafe {
        assert_eq!(slice::<f32>(&located).unwrap(), [3.0]);
        assert_eq!(located.slice::<f32>().unwrap(), [1.0, 2.0]);
    }
}

#[test]
fn a_storage_that_was_resized_is_found_again() {
    let mut tensor = Tensor::from_slice(&[1.0_f32, 2.0]);
    let located = LocatedTensor::from(tensor.shallow_clone());
    // Grows: the old memory is freed.
    let _same = tensor.resize_([1 << 20]);
    // SAFETY: one thread, and no slice lives on.
    let found = unsafe { located.slice::<f32>().unwrap() };
    assert_eq!((found.len(), &found[..2]), (1 << 20, &[1.0, 2.0][..]));
    let view = LocatedTensor::from(tensor.narrow(0, 0, 2));
    let _same = tensor.resize_([1 << 21]);
    // SAFETY: as above.
    assert_eq!(unsafe { view.slice::<f32>().unwrap() }, [1.0, 2.0]);
}
