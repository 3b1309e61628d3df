//! Random tensors by seed and name.

use overdrive_core::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// The number of elements that are drawn at a time, which limits the temporary copy to 256 KiB.
const CHUNK: i64 = 1 << 16;

/// Returns a tensor of the uniform distribution in `±bound`.
pub(crate) fn uniform_tensor(
    generator: &mut Generator,
    shape: [i64; 2],
    bound: f64,
    (kind, device): (Kind, Device),
) -> Result<Tensor> {
    fill(shape, (kind, device), || {
        bound * (2.0 * generator.uniform() - 1.0)
    })
}

/// Returns a tensor of the normal distribution with mean 0 and standard deviation `std`.
pub(crate) fn normal_tensor(
    generator: &mut Generator,
    shape: [i64; 2],
    std: f64,
    (kind, device): (Kind, Device),
) -> Result<Tensor> {
    fill(shape, (kind, device), || std * generator.normal())
}

/// Draws on the CPU in fp32, regardless of device and dtype, so that the same seed gives the same adapter
/// everywhere, up to rounding.
fn fill(
    shape: [i64; 2],
    (kind, device): (Kind, Device),
    mut draw: impl FnMut() -> f64,
) -> Result<Tensor> {
    let count = shape[0] * shape[1];
    let tensor = Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?;
    let flat = tensor.f_view([-1])?;
    let mut start = 0;
    while start < count {
        let len = (count - start).min(CHUNK);
        let values: Vec<f32> = (0..len).map(|_| draw() as f32).collect();
        flat.f_narrow(0, start, len)?
            .f_copy_(&Tensor::f_from_slice(&values)?)?;
        start += len;
    }
    Ok(tensor.f_to_device(device)?.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_and_name_and_have_the_bound_and_deviation_asked_for() {
        let place = (Kind::Float, Device::Cpu);
        let uniform = |seed, name: &str| {
            uniform_tensor(&mut Generator::named(seed, name), [100, 1000], 0.5, place)
        };
        let (one, again, other) = (uniform(1, "a"), uniform(1, "a"), uniform(2, "a"));
        let (Ok(one), Ok(again), Ok(other)) = (one, again, other) else {
            panic!("drawing failed");
        };
        assert_eq!(one, again);
        assert_ne!(one, other);
        // A uniform's deviation is its width over the root of 12; five standard errors at 1e5 elements.
        let std = one.std(true).double_value(&[]);
        assert!((std - 1.0 / 12f64.sqrt()).abs() < 2e-3, "{std}");
        assert!(one.abs().max().double_value(&[]) <= 0.5);
        assert!(one.mean(Kind::Float).double_value(&[]).abs() < 5e-3);
        let normal = normal_tensor(&mut Generator::named(3, "b"), [100, 1000], 0.25, place);
        let Ok(normal) = normal else {
            panic!("drawing failed");
        };
        assert!((normal.std(true).double_value(&[]) - 0.25).abs() < 3e-3);
        assert!(normal.mean(Kind::Float).double_value(&[]).abs() < 5e-3);
    }
}
