//! The architectures on which the kernels are used by default.

/// An architecture on which a run of gpu-check has shown that every kernel is correct, and faster than what it replaces
/// or within a few per cent of it.
#[derive(Debug)]
pub(crate) struct Verified {
    /// The target of its images.
    pub(crate) target: &'static str,
    /// The report in the repository.
    pub(crate) report: &'static str,
}

/// The verified architectures. A new entry needs a report of the sections `own_kernels`, `decode_kernel` and `kernels`
/// on that architecture.
pub(crate) const VERIFIED: &[Verified] = &[Verified {
    target: "sm_90a",
    report: "docs/benchmarks/gpu_h200_2026-11-27.md",
}];

/// The kernels that no report has, because they are newer than all of them: they are used only on request.
const UNVERIFIED: [&str; 4] = ["causal_conv1d", "delta_rule", "fp8_amax", "fp8_cast"];

/// Variants that no report has, by the value of a constant.
const UNVERIFIED_VARIANTS: [(&str, (&str, i64)); 1] = [("decode_attention", ("DIRECT", 1))];

/// Returns `true` if a variant of a kernel is used on a GPU whose others are: as the user chose, else if a report has it.
pub(crate) fn is_kernel_used(
    kernel: &str,
    constants: &[(&'static str, i64)],
    asked: Option<bool>,
) -> bool {
    asked.unwrap_or_else(|| {
        let is_new = |&(name, constant): &(&str, (&str, i64))| {
            name == kernel && constants.contains(&constant)
        };
        !UNVERIFIED.contains(&kernel) && !UNVERIFIED_VARIANTS.iter().any(is_new)
    })
}

/// Returns the report that verifies the images of a target.
pub(crate) fn report_of(target: &str) -> Option<&'static str> {
    let found = VERIFIED.iter().find(|verified| verified.target == target);
    found.map(|verified| verified.report)
}

/// Returns `true` if the kernels of a target are used: as the user chose, else if they are verified.
pub(crate) fn is_used(target: &str, asked: Option<bool>) -> bool {
    asked.unwrap_or_else(|| report_of(target).is_some())
}
