//! AVX-512 with VNNI: one register for a vector of 16 floats or 64 bytes.

mod floats;
mod four_bit;
mod int8;
mod vector;

// VNNI is required although only `Int8` needs it: it came one generation after the other four (Cascade Lake and
// Zen 4 have all of them). With a second AVX-512 token, each kernel would be compiled once more only for
// Skylake-X, which runs the AVX2 kernels instead.
token! {
    /// A proof that the machine has AVX-512 F, BW, DQ, VL and VNNI.
    Avx512:
        "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx2", "fma", "f16c";
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
}
