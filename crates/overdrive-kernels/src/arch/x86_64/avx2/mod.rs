//! AVX2 with FMA and F16C: registers of 8 floats, two for a vector of 16.

mod floats;
mod four_bit;
mod int8;
mod vector;

pub(super) use floats::{e4m3_as_f16, reduce_each};
pub(super) use int8::{nearest_256, total_each};

token! {
    /// A proof that the machine has AVX2, FMA and F16C.
    Avx2: "avx2", "fma", "f16c"; "avx2,fma,f16c"
}
