//! Best-fit-decreasing bin packing.

use std::collections::{BTreeMap, VecDeque};

use super::Segment;

/// Packs whole segments, none longer than `capacity`, into rows. Each segment, the longest first, goes into the
/// oldest row in which it leaves the least room; a new row is opened if it fits into none. The number of rows is
/// at most 11/9 of the smallest possible, plus a constant (Johnson et al. 1974).
///
/// Segments of equal length keep their order. The time is n·log(capacity).
pub(super) fn best_fit_decreasing(mut segments: Vec<Segment>, capacity: u32) -> Vec<Vec<Segment>> {
    segments.sort_by_key(|segment| std::cmp::Reverse(segment.len));
    let mut rows: Vec<Vec<Segment>> = Vec::new();
    // The open rows by their room. A search tree finds the tightest fit without looking at every row.
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
    // The oldest of the rows with equal room, so that the result does not depend on the tree.
    let row = rows.pop_front();
    if rows.is_empty() {
        open.remove(&room);
    }
    row
}
