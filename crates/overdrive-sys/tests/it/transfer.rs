//! Copies on a stream of their own, and what only a GPU has.

use overdrive_sys::transfer::{copy_async, on_side_stream, record_stream};
use overdrive_sys::{cuda, memory};
use tch::{Device, Tensor};

#[test]
fn a_side_stream_of_the_cpu_does_its_work_at_once() {
    let from = Tensor::from_slice(&[1_f32, 2.0]);
    let copy = || {
        let copy = from.copy();
        record_stream(&copy).unwrap();
        copy
    };
    let (copied, end) = on_side_stream(Device::Cpu, copy).unwrap();
    end.wait_on(Device::Cpu).unwrap();
    end.wait().unwrap();
    let to = copied.zeros_like();
    copy_async(&copied, &to).unwrap().wait().unwrap();
    assert_eq!(to, from);
}

#[test]
fn what_only_a_gpu_has_is_an_error_without_one() {
    assert!(memory::free_bytes(Device::Cpu).is_err());
    if !tch::Cuda::is_available() {
        assert!(cuda::cudnn_version().is_err());
        assert!(memory::free_bytes(Device::Cuda(0)).is_err());
    }
}
