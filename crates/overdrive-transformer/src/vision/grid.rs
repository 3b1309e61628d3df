//! The learned and the rotary positions of patches. Patches are in blocks of those that become one token: the patches of a
//! block are adjacent, and blocks are in rows.

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::config::VisionConfig;

/// Returns the row and the column of each patch of a grid of `[height, width]` patches, in blocks of `merge` times
/// `merge`.
pub(super) fn places([height, width]: [i64; 2], merge: i64) -> Vec<[i64; 2]> {
    let mut places = Vec::with_capacity((height * width).unsigned_abs() as usize);
    for block_row in 0..height / merge {
        for block_column in 0..width / merge {
            for row in 0..merge {
                for column in 0..merge {
                    places.push([block_row * merge + row, block_column * merge + column]);
                }
            }
        }
    }
    places
}

/// Computes the learned position `(N, C)` of each patch of some grids: the table `(side², C)` is a square, from which the
/// positions of a grid are interpolated linearly, corners on corners.
pub(super) fn learned(table: &Tensor, grids: &[[i64; 2]], config: &VisionConfig) -> Result<Tensor> {
    let side = config.position_side();
    let (mut corners, mut weights) = (Vec::new(), Vec::<f32>::new());
    for grid in grids {
        for place in places(*grid, config.spatial_merge_size) {
            let [rows, columns] = [0, 1].map(|axis| neighbours(place[axis], grid[axis], side));
            for (row, row_weight) in rows {
                for (column, column_weight) in columns {
                    corners.push(row * side + column);
                    weights.push(row_weight * column_weight);
                }
            }
        }
    }
    let device = table.device();
    let corners = Tensor::f_from_slice(&corners)?.f_to_device(device)?;
    let weights = Tensor::f_from_slice(&weights)?
        .f_view([-1, 4, 1])?
        .f_to_device(device)?;
    let vectors = table.f_index_select(0, &corners)?.f_unflatten(0, [-1, 4])?;
    // In fp32 at least, as the weights are.
    let sum = vectors.f_mul(&weights)?.f_sum_dim_intlist(1, false, None)?;
    Ok(sum.f_to_kind(table.kind())?)
}

/// Returns the two positions of a table with `side` rows between which row `index` of `size` lies, and their weights. In
/// fp32, as in transformers.
fn neighbours(index: i64, size: i64, side: i64) -> [(i64, f32); 2] {
    let source = index as f32 * (side - 1) as f32 / (size - 1).max(1) as f32;
    let below = source.floor();
    let next = (below as i64 + 1).min(side - 1);
    let distance = source - below;
    [
        (below as i64, 1.0 - distance),
        (next, 1.0 - (distance - 1.0).abs()),
    ]
}

/// Computes the cosines and sines `(N, D/2)` of each patch of some grids, in fp32: the first half of the angles are those
/// of the row, the second half those of the column.
pub(super) fn rotary(
    frequencies: &[f32],
    grids: &[[i64; 2]],
    merge: i64,
    device: Device,
) -> Result<[Tensor; 2]> {
    let places = grids.iter().flat_map(|grid| places(*grid, merge)).flatten();
    let places: Vec<f32> = places.map(|place| place as f32).collect();
    let places = Tensor::f_from_slice(&places)?.f_view([-1, 2, 1])?;
    let frequencies = Tensor::f_from_slice(frequencies)?.f_to_kind(Kind::Float)?;
    let angles = places.f_mul(&frequencies)?.f_flatten(1, 2)?;
    Ok([
        angles.f_cos()?.f_to_device(device)?,
        angles.f_sin()?.f_to_device(device)?,
    ])
}
