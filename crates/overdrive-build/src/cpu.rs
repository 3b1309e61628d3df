//! What this machine's processor multiplies fast: the rule for choosing a precision on a CPU.
//!
//! It lives here, in the one crate that everything may depend on and that needs no libtorch,
//! because `cargo xtask doctor` (no libtorch yet) and overdrive-precision must give one answer.

/// The instructions of a CPU that matter to training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CpuFeatures {
    /// x86-64: 256-bit integer vectors.
    pub avx2: bool,
    /// x86-64: fused multiply-add.
    pub fma: bool,
    /// x86-64: 512-bit vectors (AVX-512 F).
    pub avx512: bool,
    /// x86-64: products of int8 (AVX-512 VNNI or AVX-VNNI), for quantized inference.
    pub vnni: bool,
    /// x86-64: products of bf16 (AVX-512 BF16).
    pub avx512_bf16: bool,
    /// x86-64: tiles of bf16 (AMX BF16).
    pub amx_bf16: bool,
    /// aarch64: vectors (NEON), on every such CPU.
    pub neon: bool,
    /// aarch64: products of bf16 (`FEAT_BF16`).
    pub bf16: bool,
}

impl CpuFeatures {
    /// The names of the features that `/proc/cpuinfo` of x86-64 (`flags`) and aarch64 (`Features`)
    /// lists, separated by spaces.
    #[must_use]
    pub fn from_flags(flags: &str) -> Self {
        let has = |name: &str| flags.split_ascii_whitespace().any(|flag| flag == name);
        Self {
            avx2: has("avx2"),
            fma: has("fma"),
            avx512: has("avx512f"),
            vnni: has("avx512_vnni") || has("avx_vnni"),
            avx512_bf16: has("avx512_bf16"),
            amx_bf16: has("amx_bf16"),
            neon: has("asimd"),
            bf16: has("bf16"),
        }
    }

    /// Whether the CPU has instructions for products of bf16. Without them libtorch emulates
    /// these products, tens to thousands of times slower than those of fp32.
    #[must_use]
    pub fn multiplies_bf16(&self) -> bool {
        self.avx512_bf16 || self.amx_bf16 || self.bf16
    }

    /// The features of the machine this runs on: the kernel's list on Linux, because it also says
    /// what the kernel lets programs use (AMX needs its permission), elsewhere the CPU's own word.
    #[must_use]
    pub fn detect() -> Self {
        match std::fs::read_to_string("/proc/cpuinfo") {
            Ok(text) => Self::from_flags(flags_of(&text).unwrap_or_default()),
            Err(_) => Self::ask_the_cpu(),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn ask_the_cpu() -> Self {
        use std::arch::is_x86_feature_detected as has;
        Self {
            avx2: has!("avx2"),
            fma: has!("fma"),
            avx512: has!("avx512f"),
            vnni: has!("avx512vnni") || has!("avxvnni"),
            avx512_bf16: has!("avx512bf16"),
            amx_bf16: false,
            neon: false,
            bf16: false,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn ask_the_cpu() -> Self {
        use std::arch::is_aarch64_feature_detected as has;
        Self {
            neon: has!("neon"),
            bf16: has!("bf16"),
            ..Self::default()
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn ask_the_cpu() -> Self {
        Self::default()
    }
}

/// The list of features of the first processor in the text of `/proc/cpuinfo`.
#[must_use]
pub fn flags_of(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features").then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_for_cpus_that_multiply_it() {
        let skylake = CpuFeatures::from_flags("sse2 avx avx2 fma avx512f avx512_vnni");
        assert!(skylake.avx512 && skylake.vnni && !skylake.multiplies_bf16());
        assert!(CpuFeatures::from_flags("avx2 avx512f avx512_bf16").multiplies_bf16());
        assert!(CpuFeatures::from_flags("avx2 amx_tile amx_bf16").multiplies_bf16());
        assert!(CpuFeatures::from_flags("fp asimd i8mm bf16").multiplies_bf16());
        assert!(!CpuFeatures::from_flags("fp asimd").multiplies_bf16());
    }

    #[test]
    fn a_flag_is_a_whole_word() {
        // "avx512_bf16" holds "bf16", and "avx2x" would hold "avx2".
        let features = CpuFeatures::from_flags("avx512_bf16 avx2x");
        assert!(!features.bf16);
        assert!(!features.avx2);
    }

    #[test]
    fn the_flags_of_both_architectures_are_found() {
        assert_eq!(
            flags_of("processor : 0\nflags\t\t: fpu avx2\n"),
            Some("fpu avx2")
        );
        assert_eq!(
            flags_of("processor : 0\nFeatures\t: fp asimd\n"),
            Some("fp asimd")
        );
        assert_eq!(flags_of("processor : 0\n"), None);
    }
}
