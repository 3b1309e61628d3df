use tch::{Device, Kind, Tensor};

use crate::Result;

/// Random numbers by seed and name (SplitMix64), the same on every device and apart from libtorch's
/// generators.
#[derive(Debug)]
pub(crate) struct Stream {
    state: u64,
    spare: Option<f64>,
}

impl Stream {
    pub(crate) fn new(seed: u64, name: &str) -> Stream {
        // FNV-1a of the name, mixed with the seed: one stream a tensor.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut stream = Stream {
            state: hash ^ seed,
            spare: None,
        };
        stream.state = stream.bits() ^ seed.rotate_left(32);
        stream
    }

    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        // In (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.unit()).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Uniform within `±bound`.
    pub(crate) fn uniform_tensor(
        &mut self,
        shape: [i64; 2],
        bound: f64,
        place: (Kind, Device),
    ) -> Result<Tensor> {
        self.tensor(shape, place, |stream| bound * (2.0 * stream.unit() - 1.0))
    }

    /// Normal with deviation `std`.
    pub(crate) fn normal_tensor(
        &mut self,
        shape: [i64; 2],
        std: f64,
        place: (Kind, Device),
    ) -> Result<Tensor> {
        self.tensor(shape, place, |stream| std * stream.normal())
    }

    fn tensor(
        &mut self,
        shape: [i64; 2],
        (kind, device): (Kind, Device),
        mut draw: impl FnMut(&mut Stream) -> f64,
    ) -> Result<Tensor> {
        let count = shape[0] * shape[1];
        let numbers = Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?;
        let flat = numbers.f_view([-1])?;
        let mut start = 0;
        while start < count {
            let len = (count - start).min(1 << 16);
            let values: Vec<f32> = (0..len).map(|_| draw(self) as f32).collect();
            flat.f_narrow(0, start, len)?
                .f_copy_(&Tensor::f_from_slice(&values)?)?;
            start += len;
        }
        Ok(numbers.f_to_device(device)?.f_to_kind(kind)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_seed_and_name_and_have_the_bounds_and_deviation_asked_for() {
        let place = (Kind::Float, Device::Cpu);
        let uniform = |seed, name: &str| {
            let mut stream = Stream::new(seed, name);
            stream.uniform_tensor([100, 1000], 0.5, place)
        };
        let (one, again, other) = (uniform(1, "a"), uniform(1, "a"), uniform(2, "a"));
        let (Ok(one), Ok(again), Ok(other)) = (one, again, other) else {
            panic!("drawing failed");
        };
        assert_eq!(one, again);
        assert_ne!(one, other);
        // A uniform's deviation is its width over the root of 12; five standard errors at 1e5 numbers.
        let std = one.std(true).double_value(&[]);
        assert!((std - 1.0 / 12f64.sqrt()).abs() < 2e-3, "{std}");
        assert!(one.abs().max().double_value(&[]) <= 0.5);
        assert!(one.mean(Kind::Float).double_value(&[]).abs() < 5e-3);
        let Ok(normal) = Stream::new(3, "b").normal_tensor([100, 1000], 0.25, place) else {
            panic!("drawing failed");
        };
        assert!((normal.std(true).double_value(&[]) - 0.25).abs() < 3e-3);
        assert!(normal.mean(Kind::Float).double_value(&[]).abs() < 5e-3);
    }
}
