//! The instruction sets of this machine's processor: the rule for choosing a precision on a CPU.
//!
//! The rule is in this crate because `cargo xtask doctor`, which runs before there is a libtorch, and
//! overdrive-precision must give the same answer, and every crate may depend on this one.

/// The instruction sets of a CPU that matter for training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CpuFeatures {
    /// x86-64: 256-bit integer vectors.
    pub avx2: bool,
    /// x86-64: fused multiply-add.
    pub fma: bool,
    /// x86-64: 512-bit vectors (AVX-512 F).
    pub avx512: bool,
    /// x86-64: int8 dot products (AVX-512 VNNI or AVX-VNNI), for quantized inference.
    pub vnni: bool,
    /// x86-64: bf16 dot products (AVX-512 BF16).
    pub avx512_bf16: bool,
    /// x86-64: bf16 tiles (AMX BF16).
    pub amx_bf16: bool,
    /// aarch64: 128-bit vectors (NEON), on every such CPU.
    pub neon: bool,
    /// aarch64: bf16 dot products (`FEAT_BF16`).
    pub bf16: bool,
}

impl CpuFeatures {
    /// Parses the space-separated feature names in `/proc/cpuinfo` of x86-64 (`flags`) and aarch64
    /// (`Features`).
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

    /// Returns `true` if the CPU has bf16 instructions for matmuls. Without them libtorch emulates bf16
    /// matmuls, tens to thousands of times slower than fp32.
    #[must_use]
    pub fn multiplies_bf16(&self) -> bool {
        self.avx512_bf16 || self.amx_bf16 || self.bf16
    }

    /// Returns the features of this machine. On Linux they are the kernel's list, which also shows the
    /// features that the kernel permits (AMX needs a permission); elsewhere they are read from the CPU.
    #[must_use]
    pub fn detect() -> Self {
        match std::fs::read_to_string("/proc/cpuinfo") {
            Ok(text) => Self::from_flags(flags_of(&text).unwrap_or_default()),
            Err(_) => Self::from_cpu(),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn from_cpu() -> Self {
        use std::arch::is_x86_feature_detected as has;
        Self {
            avx2: has!("avx2"),
            fma: has!("fma"),
            avx512: has!("avx512f"),
            vnni: has!("avx512vnni") || has!("avxvnni"),
            avx512_bf16: has!("avx512bf16"),
            // The CPU alone does not show whether the kernel permits AMX.
            amx_bf16: false,
            neon: false,
            bf16: false,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn from_cpu() -> Self {
        use std::arch::is_aarch64_feature_detected as has;
        Self {
            neon: has!("neon"),
            bf16: has!("bf16"),
            ..Self::default()
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn from_cpu() -> Self {
        Self::default()
    }
}

/// Returns the feature list of the first processor in the text of `/proc/cpuinfo`.
fn flags_of(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features").then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_needs_a_cpu_with_bf16_instructions() {
        let skylake = CpuFeatures::from_flags("sse2 avx avx2 fma avx512f avx512_vnni");
        assert!(skylake.avx512 && skylake.vnni && !skylake.multiplies_bf16());
        assert!(CpuFeatures::from_flags("avx2 avx512f avx512_bf16").multiplies_bf16());
        assert!(CpuFeatures::from_flags("avx2 amx_tile amx_bf16").multiplies_bf16());
        assert!(CpuFeatures::from_flags("fp asimd i8mm bf16").multiplies_bf16());
        assert!(!CpuFeatures::from_flags("fp asimd").multiplies_bf16());
    }

    #[test]
    fn a_flag_is_a_whole_word() {
        // "avx512_bf16" contains "bf16", and "avx2x" contains "avx2".
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
