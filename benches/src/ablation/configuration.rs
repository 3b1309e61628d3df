use overdrive::precision::Precision;
use tch::Device;

/// A row of the table: the techniques that are on, as flags of the trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    /// The name in the table.
    pub name: &'static str,
    /// If `true`, autocast to the low precision that suits the device.
    pub mixed_precision: bool,
    /// If `true`, `flash_attention_2` instead of `eager`.
    pub flash_attention: bool,
    /// If `true`, backward recomputes every block.
    pub checkpointing: bool,
    /// If `true`, fused kernels, joint matmuls and the chunked loss.
    pub fused_kernels: bool,
}

const DEFAULT: Configuration = Configuration {
    name: "default",
    mixed_precision: false,
    flash_attention: false,
    checkpointing: false,
    fused_kernels: false,
};

/// The rows, the default first.
pub const CONFIGURATIONS: [Configuration; 7] = [
    DEFAULT,
    Configuration {
        name: "+ mixed precision",
        mixed_precision: true,
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
        mixed_precision: true,
        flash_attention: true,
        fused_kernels: true,
        ..DEFAULT
    },
    Configuration {
        name: "all",
        mixed_precision: true,
        flash_attention: true,
        checkpointing: true,
        fused_kernels: true,
    },
];

impl Configuration {
    /// Returns the trainer's flags; `low` is the low precision of this device, if it has one.
    pub fn flags(&self, low: Option<Precision>) -> Vec<&'static str> {
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
        match low.filter(|_| self.mixed_precision) {
            Some(Precision::Fp16) => flags.push("--fp16"),
            Some(Precision::Bf16) => flags.push("--bf16"),
            Some(Precision::Tf32) => flags.push("--tf32"),
            _ => {}
        }
        flags
    }
}

/// Returns the low precision of mixed precision on this device.
///
/// # Errors
/// The reason why there is none, from [`Precision::recommend`].
pub fn mixed_precision(device: Device) -> Result<Precision, String> {
    let recommended = Precision::recommend(device);
    match recommended.precision {
        Precision::Fp32 => Err(recommended.reason),
        low => Ok(low),
    }
}
