use overdrive::precision::{Precision, Recommendation};
use overdrive_build::cpu::CpuFeatures;
use tch::Device;

/// The precision of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPrecision {
    /// fp32.
    Full,
    /// The low precision that the device multiplies in hardware, even if fp32 is faster.
    Mixed,
    /// The recommended precision of the device.
    Recommended,
}

/// The precisions of the rows on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Precisions {
    /// The recommended one, which may be fp32.
    pub recommended: Precision,
    /// The low precision that the device multiplies in hardware, if there is one.
    pub mixed: Option<Precision>,
    /// The reason for the recommendation.
    pub reason: String,
}

impl Precisions {
    /// Returns the precisions of `device`, by [`Precision::recommend`].
    pub fn of(device: Device) -> Self {
        let Recommendation {
            precision, reason, ..
        } = Precision::recommend(device);
        let bf16_in_hardware = device == Device::Cpu && CpuFeatures::detect().multiplies_bf16();
        let mixed = match precision {
            Precision::Fp32 => bf16_in_hardware.then_some(Precision::Bf16),
            low => Some(low),
        };
        Self {
            recommended: precision,
            mixed,
            reason,
        }
    }

    /// Returns the notes under the table.
    pub fn notes(&self) -> Vec<String> {
        let mixed = match self.mixed {
            Some(low) => format!("Mixed precision is {low}."),
            None => "There is no row of mixed precision.".to_owned(),
        };
        let all = format!(
            "The rows of \"all\" run in {}, the recommended precision: {}.",
            self.recommended, self.reason
        );
        vec![mixed, all]
    }
}

/// A row of the table: the techniques that are on, as flags of the trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    /// The name in the table.
    pub name: &'static str,
    /// The precision of the row.
    pub precision: RowPrecision,
    /// If `true`, `flash_attention_2` instead of `eager`.
    pub flash_attention: bool,
    /// If `true`, backward recomputes every block.
    pub checkpointing: bool,
    /// If `true`, fused kernels, joint matmuls and the chunked loss.
    pub fused_kernels: bool,
}

const DEFAULT: Configuration = Configuration {
    name: "default",
    precision: RowPrecision::Full,
    flash_attention: false,
    checkpointing: false,
    fused_kernels: false,
};

/// The rows, the default first.
pub const CONFIGURATIONS: [Configuration; 7] = [
    DEFAULT,
    Configuration {
        name: "+ mixed precision",
        precision: RowPrecision::Mixed,
        ..DEFAULT
    },
    Configuration {
        name: "+ flash attention",
        flash_attention: true,
        ..DEFAULT
    },
    Configuration {
        name: "+ activation checkpointing",
        checkpointing: true,
        ..DEFAULT
    },
    Configuration {
        name: "+ fused kernels",
        fused_kernels: true,
        ..DEFAULT
    },
    Configuration {
        name: "all but checkpointing",
        precision: RowPrecision::Recommended,
        flash_attention: true,
        fused_kernels: true,
        ..DEFAULT
    },
    Configuration {
        name: "all",
        precision: RowPrecision::Recommended,
        flash_attention: true,
        checkpointing: true,
        fused_kernels: true,
    },
];

impl Configuration {
    /// Returns the configurations of the table on a device with these precisions, the default first. Those that
    /// would repeat the default are left out.
    pub fn rows(precisions: &Precisions) -> Vec<Self> {
        let default = CONFIGURATIONS[0];
        let repeats = |other: &Self| {
            *other != default && other.flags(precisions) == default.flags(precisions)
        };
        let rows = CONFIGURATIONS.into_iter();
        rows.filter(|other| !repeats(other)).collect()
    }

    /// Returns the name in the table; rows in the recommended precision name it.
    pub fn title(&self, precisions: &Precisions) -> String {
        match self.precision {
            RowPrecision::Recommended => format!("{} ({})", self.name, precisions.recommended),
            _ => self.name.to_owned(),
        }
    }

    /// Returns the trainer's flags.
    pub fn flags(&self, precisions: &Precisions) -> Vec<&'static str> {
        let mut flags = vec![
            "--attn-implementation",
            if self.flash_attention {
                "flash_attention_2"
            } else {
                "eager"
            },
        ];
        if !self.fused_kernels {
            flags.push("--no-fused-kernels");
        }
        if self.checkpointing {
            flags.push("--gradient-checkpointing");
        }
        let precision = match self.precision {
            RowPrecision::Full => Precision::Fp32,
            RowPrecision::Mixed => precisions.mixed.unwrap_or_default(),
            RowPrecision::Recommended => precisions.recommended,
        };
        flags.push(precision_flag(precision));
        flags
    }
}

/// Returns the trainer's flag of a precision.
pub(super) fn precision_flag(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp16 => "--fp16",
        Precision::Bf16 => "--bf16",
        Precision::Tf32 => "--tf32",
        Precision::Fp8 => "--fp8",
        // The trainer would take the recommended precision by itself.
        Precision::Fp32 => "--no-auto-precision",
    }
}
