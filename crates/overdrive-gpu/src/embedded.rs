//! The kernels embedded in the program: `kernels/kernels.json` describes the contents of `kernels/kernels.bin.zst`.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::OnceLock;

use ruzstd::decoding::StreamingDecoder;
use serde::Deserialize;

use crate::error::{Result, embedded};

const TABLE: &str = include_str!("../kernels/kernels.json");
const PACKED: &[u8] = include_bytes!("../kernels/kernels.bin.zst");

/// The name of the target that the driver compiles for any GPU.
pub(crate) const PTX: &str = "ptx";

/// The table of the embedded kernels.
#[derive(Debug, Deserialize)]
pub(crate) struct Table {
    /// The number of unused pointers to scratch memory that each kernel takes after its arguments.
    pub(crate) hidden_pointers: usize,
    /// The SHA-256 of the kernels' source files.
    #[cfg_attr(not(test), allow(dead_code, reason = "read by the tests"))]
    pub(crate) sources: BTreeMap<String, String>,
    pub(crate) targets: BTreeMap<String, Packed>,
    pub(crate) variants: Vec<Variant>,
}

/// The part of `kernels.bin.zst` with the images of one target, as a zstd stream.
#[derive(Debug, Deserialize)]
pub(crate) struct Packed {
    pub(crate) offset: usize,
    pub(crate) length: usize,
    /// The uncompressed length of the images.
    pub(crate) size: usize,
}

/// A kernel for one dtype and one set of constants.
#[derive(Debug, Deserialize)]
pub(crate) struct Variant {
    pub(crate) kernel: String,
    pub(crate) dtype: String,
    /// If `true`, the integers that the manifest names are multiples of 16.
    pub(crate) aligned: bool,
    pub(crate) constants: BTreeMap<String, i64>,
    pub(crate) warps: u32,
    /// The name of the function in the images.
    pub(crate) symbol: String,
    /// The names and types of the arguments.
    pub(crate) arguments: Vec<(String, String)>,
    pub(crate) images: BTreeMap<String, Image>,
}

/// The code of a variant for one target.
#[derive(Debug, Deserialize)]
pub(crate) struct Image {
    /// Its offset in the images of the target.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    /// The shared memory of a block in bytes.
    pub(crate) shared: u32,
    #[cfg_attr(not(test), allow(dead_code, reason = "read by the tests"))]
    pub(crate) sha256: String,
}

impl Variant {
    /// Returns a constant of the kernel's source.
    pub(crate) fn constant(&self, name: &str) -> Result<i64> {
        let value = self.constants.get(name).copied();
        value.ok_or_else(|| embedded(format!("{} has no constant {name}", self.kernel)))
    }

    /// Returns a positive constant of the kernel's source.
    pub(crate) fn size(&self, name: &str) -> Result<usize> {
        let value = self.constant(name)?;
        usize::try_from(value)
            .ok()
            .filter(|&value| value > 0)
            .ok_or_else(|| embedded(format!("{name} of {} is {value}", self.kernel)))
    }
}

/// Returns the table of the embedded kernels.
pub(crate) fn table() -> Result<&'static Table> {
    static PARSED: OnceLock<std::result::Result<Table, String>> = OnceLock::new();
    let parsed =
        PARSED.get_or_init(|| serde_json::from_str(TABLE).map_err(|error| error.to_string()));
    parsed
        .as_ref()
        .map_err(|reason| embedded(format!("kernels.json: {reason}")))
}

/// Returns the concatenated images of a target.
pub(crate) fn images(target: &str) -> Result<Vec<u8>> {
    let missing = || embedded(format!("there are no images for {target}"));
    let packed = table()?.targets.get(target).ok_or_else(missing)?;
    let bytes = PACKED
        .get(packed.offset..packed.offset + packed.length)
        .ok_or_else(missing)?;
    let mut images = Vec::with_capacity(packed.size);
    let damaged = |reason: String| embedded(format!("the images for {target}: {reason}"));
    StreamingDecoder::new(bytes)
        .map_err(|error| damaged(error.to_string()))?
        .read_to_end(&mut images)
        .map_err(|error| damaged(error.to_string()))?;
    if images.len() != packed.size {
        return Err(embedded(format!("the images for {target} are truncated")));
    }
    Ok(images)
}

/// Returns the target whose images run on a GPU of this compute capability.
pub(crate) fn target_for((major, minor): (u32, u32)) -> Option<&'static str> {
    match (major, minor) {
        // A cubin also runs on later minor versions of its major version.
        (8, _) => Some("sm_80"),
        // The `a` marks code for one specific architecture.
        (9, 0) => Some("sm_90a"),
        (10, 0) => Some("sm_100a"),
        (12, 0) => Some("sm_120a"),
        (9.., _) => Some(PTX),
        _ => None,
    }
}
