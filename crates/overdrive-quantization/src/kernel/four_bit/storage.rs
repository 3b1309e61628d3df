//! Quantized weights as coded weights.

use std::sync::OnceLock;

use overdrive_kernels::{InstructionSet, Table256};
use tch::{Device, Kind};

use super::coded_weight::{CodedWeight, Coding};
use super::scales::{Floats, MagnitudeSlices, Scales};
use crate::codec::dynamic;
use crate::tensors::bytes;
use crate::weight::{self, Storage};
use crate::{Activations, Error, QuantizedWeight, Result};
use overdrive_kernels::tensors::{Source, elements};

/// Returns the slices of a weight; `None` for weights of another storage, or not on the CPU.
///
/// # Errors
/// [`Error::BadWeight`] if tensors are shorter than the shape requires, or an order names inputs that do not
/// exist.
pub(crate) fn coded_weight(weight: &QuantizedWeight) -> Result<Option<CodedWeight<'_>>> {
    if weight.device() != Device::Cpu {
        return Ok(None);
    }
    // The portable kernel of bytes for more than a few rows is slower than that of words.
    let fast = !matches!(InstructionSet::best(), InstructionSet::Portable(_));
    let as_bytes = fast || weight.activations == Activations::Int8;
    let size = |n: i64| usize::try_from(n).unwrap_or(0);
    let (outputs, inputs) = (size(weight.outputs), size(weight.inputs));
    let map = match &weight.storage {
        Storage::Int8 { .. } | Storage::Fp8 { .. } | Storage::Tiled(_) => return Ok(None),
        Storage::Grouped {
            codes,
            scales,
            offsets,
            order,
        } => {
            let (kind, codes) = (codes.kind(), bytes(codes)?);
            let coding = match (2 * codes.len() == outputs * inputs, kind, offsets) {
                (true, _, None) => Coding::integers(8),
                (true, _, Some(_)) => Coding::integers(0),
                (false, Kind::Int8, _) => Coding::Signed,
                (false, ..) => Coding::Unsigned,
            };
            let scales = floats(scales)?;
            // At least 1: a damaged shape must not divide by zero.
            let groups = scales.len().checked_div(outputs).unwrap_or(1).max(1);
            let of_groups = |floats| Scales {
                magnitudes: MagnitudeSlices::Full(floats),
                block: inputs / groups,
            };
            CodedWeight {
                codes,
                coding,
                outputs,
                inputs,
                scales: of_groups(scales),
                offsets: match offsets {
                    Some(offsets) => Some(of_groups(floats(offsets)?)),
                    None => None,
                },
                order: match order {
                    Some(order) => Some(elements::<i32>(order)?),
                    None => None,
                },
                bytes: as_bytes,
            }
        }
        Storage::Blocks { codes, magnitudes } => {
            let (book, options) = weight.scheme.blocks()?;
            CodedWeight {
                codes: bytes(codes)?,
                coding: Coding::book(*book.numbers()),
                outputs,
                inputs,
                scales: Scales {
                    magnitudes: of_blocks(magnitudes)?,
                    block: options.block_size,
                },
                offsets: None,
                order: None,
                bytes: as_bytes,
            }
        }
    };
    // Kernels read without bounds checks, so this is checked for every weight.
    if !map.is_consistent() {
        return Err(Error::BadWeight {
            name: weight.scheme.to_string(),
            reason: format!(
                "its codes, scales or order are too short for {:?}, or the order names inputs that do \
                 not exist; quantize it again",
                weight.size()
            ),
        });
    }
    Ok(Some(map))
}

/// Borrows a tensor of f32 or f16.
pub(crate) fn floats(tensor: &impl Source) -> Result<Floats<'_>> {
    Ok(match tensor.dtype() {
        Kind::Half => Floats::F16(elements(tensor)?),
        _ => Floats::F32(elements(tensor)?),
    })
}

/// Borrows the magnitudes of blocks.
pub(crate) fn of_blocks(magnitudes: &weight::Magnitudes) -> Result<MagnitudeSlices<'_>> {
    Ok(match magnitudes {
        weight::Magnitudes::Full(all) => MagnitudeSlices::Full(floats(all)?),
        weight::Magnitudes::Quantized {
            codes,
            code_book,
            scales,
            offset,
        } => {
            let book = elements::<f32>(code_book)?;
            let book = book.first_chunk().ok_or_else(|| Error::BadWeight {
                name: "magnitudes".to_owned(),
                reason: format!(
                    "their code book has shape {:?}; it must have 256 numbers",
                    code_book.size()
                ),
            })?;
            MagnitudeSlices::Quantized {
                codes: elements(codes)?,
                book,
                planes: (book == dynamic::code_book()).then(usual_book),
                scales: elements(scales)?,
                offset: *offset,
            }
        }
    })
}

/// Returns the table of the code book that bitsandbytes always uses.
fn usual_book() -> &'static Table256 {
    static BOOK: OnceLock<Table256> = OnceLock::new();
    BOOK.get_or_init(|| Table256::new(dynamic::code_book()))
}
