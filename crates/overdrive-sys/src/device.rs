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

macro_rules! kinds {
    ($($kind:ident = $code:literal),* $(,)?) => {
        /// The dtypes that tch has.
        pub(crate) const KINDS: &[Kind] = &[$(Kind::$kind),*];

        /// Returns the `at::ScalarType` of a dtype.
        pub(crate) fn scalar_code(kind: Kind) -> i64 {
            match kind {
                $(Kind::$kind => $code),*
            }
        }
    };
}

// 16 to 22 are quantized types and bit types, for which tch has no `Kind`.
kinds! {
    Uint8 = 0, Int8 = 1, Int16 = 2, Int = 3, Int64 = 4,
    Half = 5, Float = 6, Double = 7,
    ComplexHalf = 8, ComplexFloat = 9, ComplexDouble = 10,
    Bool = 11, QInt8 = 12, QUInt8 = 13, QInt32 = 14, BFloat16 = 15,
    Float8e5m2 = 23, Float8e4m3fn = 24, Float8e5m2fnuz = 25, Float8e4m3fnuz = 26,
}

/// The dtypes that autocast can cast to.
const AUTOCAST_KINDS: [Kind; 4] = [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16];

/// Returns the `at::ScalarType` of a dtype that autocast can cast to.
pub(crate) fn scalar_type(kind: Kind) -> Option<i32> {
    // The numbers are below 30.
    AUTOCAST_KINDS
        .contains(&kind)
        .then(|| scalar_code(kind) as i32)
}

/// Returns the dtype of an `at::ScalarType` that autocast can cast to.
pub(crate) fn kind(scalar_type: i32) -> Option<Kind> {
    let mut kinds = AUTOCAST_KINDS.into_iter();
    kinds.find(|kind| scalar_code(*kind) == i64::from(scalar_type))
}
