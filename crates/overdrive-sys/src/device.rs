//! The numbers of libtorch's device types and dtypes.

use tch::{Device, Kind};

/// Returns the `c10::DeviceType`.
pub(crate) fn device_type(device: Device) -> i32 {
    match device {
        Device::Cpu => 0,
        Device::Cuda(_) => 1,
        Device::Vulkan => 10,
        Device::Mps => 13,
    }
}

pub(crate) fn device_index(device: Device) -> i32 {
    match device {
        Device::Cuda(index) => i32::try_from(index).unwrap_or(i32::MAX),
        _ => 0,
    }
}

/// The dtypes that autocast can cast to, with their `at::ScalarType`.
const AUTOCAST_KINDS: [(Kind, i32); 4] = [
    (Kind::Half, 5),
    (Kind::Float, 6),
    (Kind::Double, 7),
    (Kind::BFloat16, 15),
];

pub(crate) fn scalar_type(kind: Kind) -> Option<i32> {
    AUTOCAST_KINDS
        .iter()
        .find(|(k, _)| *k == kind)
        .map(|(_, code)| *code)
}

pub(crate) fn kind(scalar_type: i32) -> Option<Kind> {
    AUTOCAST_KINDS
        .iter()
        .find(|(_, code)| *code == scalar_type)
        .map(|(k, _)| *k)
}

/// Returns the `at::ScalarType` of any dtype.
pub(crate) fn scalar_code(kind: Kind) -> i64 {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::QInt8 => 12,
        Kind::QUInt8 => 13,
        Kind::QInt32 => 14,
        Kind::BFloat16 => 15,
        // 16 to 22 are quantized types and bit types, for which tch has no `Kind`.
        Kind::Float8e5m2 => 23,
        Kind::Float8e4m3fn => 24,
        Kind::Float8e5m2fnuz => 25,
        Kind::Float8e4m3fnuz => 26,
    }
}
