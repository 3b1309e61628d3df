//! Best fit, the longest first.

use std::collections::{BTreeMap, VecDeque};

use super::Segment;

/// Rows of whole segments, none longer than `capacity`: each segment, the longest first, goes where it
/// leaves the least room, the oldest such row; a new row is opened where it fits into none. That takes
/// at most 11/9 of the fewest rows possible and a few more (Johnson et al. 1974).
///
/// Segments of one length keep their order. Time n·log(capacity).
pub(super) fn best_fit_decreasing(mut segments: Vec<Segment>, capacity: u32) -> Vec<Vec<Segment>> {
    segments.sort_by_key(|segment| std::cmp::Reverse(segment.len));
    let mut rows: Vec<Vec<Segment>> = Vec::new();
    // Open rows by the room they have.
    let mut open: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
    for segment in segments {
        let fitting = open.range(segment.len..).next().map(|(&room, _)| room);
        let (row, room) = match fitting.and_then(|room| Some((pop(&mut open, room)?, room))) {
            Some(found) => found,
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, capacity)
            }
        };
        rows[row].push(segment);
        let left = room - segment.len;
        if left > 0 {
            open.entry(left).or_default().push_back(row);
        }
    }
    rows
}

fn pop(open: &mut BTreeMap<u32, VecDeque<usize>>, room: u32) -> Option<usize> {
    let rows = open.get_mut(&room)?;
    let row = rows.pop_front();
    if rows.is_empty() {
        open.remove(&room);
    }
    row
}
