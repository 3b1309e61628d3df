//! The time and memory of each operator over all its calls.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use overdrive_core::units;
use serde::Serialize;

use super::TraceEvent;

/// libtorch's name for an allocation or release among the events.
pub(super) const MEMORY: &str = "[memory]";
/// `c10::DeviceType::CPU`.
pub(super) const CPU: i32 = 0;
/// `at::RecordScope::USER_SCOPE`.
pub(super) const USER_SCOPE: i32 = 7;

/// The grouping of events into rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GroupBy {
    /// Groups operators by name.
    #[default]
    Name,
    /// Groups operators by name and input shapes; needs a profile with shapes.
    NameAndShapes,
}

/// The order of rows, the largest value first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SortBy {
    /// By CPU time without the operators inside.
    #[default]
    SelfCpuTime,
    /// By CPU time.
    TotalCpuTime,
    /// By device time of the operator's own kernels.
    SelfDeviceTime,
    /// By bytes allocated and not released, without the operators inside.
    SelfCpuMemory,
    /// By floating-point operations.
    Flops,
    /// By the number of calls.
    Calls,
}

/// The time and memory of an operator, range or kernel over all its calls.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OperatorStats {
    /// The name.
    pub name: String,
    /// The shapes of its inputs, if rows are grouped by them.
    pub shapes: String,
    /// The number of calls.
    pub calls: u64,
    /// The nanoseconds on the CPU without the operators that it called.
    pub self_cpu_ns: u64,
    /// The nanoseconds on the CPU from begin to end. A call inside another of the same row counts once.
    pub total_cpu_ns: u64,
    /// The nanoseconds of the kernels that it launched itself; for a kernel its own.
    pub self_device_ns: u64,
    /// The nanoseconds of the kernels that it and the operators inside it launched.
    pub total_device_ns: u64,
    /// The bytes of main memory that it allocated itself, less those that it released.
    pub self_cpu_bytes: i64,
    /// The same including the operators inside it.
    pub total_cpu_bytes: i64,
    /// The bytes of device memory that it allocated itself, less those that it released.
    pub self_device_bytes: i64,
    /// The floating-point operations, if the profile has them and libtorch knows a formula.
    pub flops: u64,
    /// If `true`, it ran on the device: a kernel or copy.
    pub on_device: bool,
}

/// The time and memory of each operator: the table of `torch.profiler`'s `key_averages()`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct KeyAverages {
    rows: Vec<OperatorStats>,
}

/// An event in the tree of its thread.
struct Node {
    event: usize,
    parent: Option<usize>,
    children: Vec<usize>,
    own_bytes: i64,
    own_device_bytes: i64,
    kernel_ns: u64,
}

type Cell = fn(&OperatorStats) -> Option<String>;

impl KeyAverages {
    pub(super) fn of(events: &[TraceEvent], group_by: GroupBy) -> Self {
        let nodes = nest(events);
        let mut rows: BTreeMap<(&str, &str, bool), OperatorStats> = BTreeMap::new();
        // Children come after their parents: in reverse order each sum is complete when it is added to the parent.
        let mut device_ns: Vec<u64> = nodes.iter().map(|node| node.kernel_ns).collect();
        let mut bytes: Vec<i64> = nodes.iter().map(|node| node.own_bytes).collect();
        for index in (0..nodes.len()).rev() {
            if let Some(parent) = nodes[index].parent {
                device_ns[parent] += device_ns[index];
                bytes[parent] += bytes[index];
            }
        }
        let of_node = |node: &Node| key(&events[node.event], group_by, false);
        for (index, node) in nodes.iter().enumerate() {
            let event = &events[node.event];
            let own_key = of_node(node);
            let mut ancestors = std::iter::successors(node.parent, |&up| nodes[up].parent);
            let inside_itself = ancestors.any(|up| of_node(&nodes[up]) == own_key);
            let inner: u64 = node
                .children
                .iter()
                .map(|&c| length(&events[nodes[c].event]))
                .sum();
            let row = rows.entry(own_key).or_default();
            // libtorch dispatches some operators a second time under the same name with nothing else inside;
            // that is one call.
            let repeats_its_parent = node.parent.is_some_and(|parent| {
                nodes[parent].children.len() == 1 && events[nodes[parent].event].name == event.name
            });
            row.calls += u64::from(!repeats_its_parent);
            row.self_cpu_ns += length(event).saturating_sub(inner);
            row.self_device_ns += node.kernel_ns;
            row.self_cpu_bytes += node.own_bytes;
            row.self_device_bytes += node.own_device_bytes;
            row.flops += event.flops;
            if !inside_itself {
                row.total_cpu_ns += length(event);
                row.total_device_ns += device_ns[index];
                row.total_cpu_bytes += bytes[index];
            }
        }
        for event in device_work(events) {
            let row = rows.entry(key(event, group_by, true)).or_default();
            row.calls += 1;
            row.self_device_ns += length(event);
            row.total_device_ns += length(event);
        }
        let rows = rows
            .into_iter()
            .map(|((name, shapes, on_device), row)| OperatorStats {
                name: name.to_owned(),
                shapes: shapes.to_owned(),
                on_device,
                ..row
            });
        let mut averages = Self {
            rows: rows.collect(),
        };
        averages.sort_by(SortBy::default());
        averages
    }

    /// Returns the rows, by default in the order of their own CPU time, the largest first.
    pub fn rows(&self) -> &[OperatorStats] {
        &self.rows
    }

    /// Returns the first row of a name.
    pub fn get(&self, name: &str) -> Option<&OperatorStats> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Sorts the rows.
    pub fn sort_by(&mut self, by: SortBy) {
        self.rows.sort_by_key(|row| {
            let size: i128 = match by {
                SortBy::SelfCpuTime => row.self_cpu_ns.into(),
                SortBy::TotalCpuTime => row.total_cpu_ns.into(),
                SortBy::SelfDeviceTime => row.self_device_ns.into(),
                SortBy::SelfCpuMemory => row.self_cpu_bytes.into(),
                SortBy::Flops => row.flops.into(),
                SortBy::Calls => row.calls.into(),
            };
            std::cmp::Reverse(size)
        });
    }

    /// Returns the nanoseconds of CPU time of all operators.
    pub fn cpu_ns(&self) -> u64 {
        self.rows.iter().map(|row| row.self_cpu_ns).sum()
    }

    /// Returns the nanoseconds of device time of all kernels and copies.
    pub fn device_ns(&self) -> u64 {
        let kernels = self.rows.iter().filter(|row| row.on_device);
        kernels.map(|row| row.self_device_ns).sum()
    }

    /// Returns the first `limit` rows as a table, without empty columns.
    pub fn table(&self, limit: usize) -> String {
        let cpu = self.cpu_ns().max(1) as f64;
        let columns: [(&str, Cell); 9] = [
            ("self CPU", |row| some(row.self_cpu_ns).map(time)),
            ("CPU total", |row| some(row.total_cpu_ns).map(time)),
            ("calls", |row| some(row.calls).map(units::thousands)),
            ("CPU per call", |row| {
                some(row.total_cpu_ns).map(|total| time(total / row.calls.max(1)))
            }),
            ("self device", |row| some(row.self_device_ns).map(time)),
            ("device total", |row| some(row.total_device_ns).map(time)),
            ("self CPU mem", |row| signed_bytes(row.self_cpu_bytes)),
            ("self dev mem", |row| signed_bytes(row.self_device_bytes)),
            ("GFLOP", |row| {
                some(row.flops).map(|flops| format!("{:.3}", flops as f64 * 1e-9))
            }),
        ];
        let rows = &self.rows[..limit.min(self.rows.len())];
        let used: Vec<_> = columns
            .into_iter()
            .filter(|(_, value)| rows.iter().any(|row| value(row).is_some()))
            .collect();
        let label = |row: &OperatorStats| match row.shapes.as_str() {
            "" => row.name.clone(),
            shapes => format!("{} {shapes}", row.name),
        };
        let width = rows.iter().map(|row| label(row).chars().count());
        let width = width.max().unwrap_or(0).clamp(4, 60);
        let mut text = format!("{:<width$} {:>7}", "name", "self %");
        used.iter()
            .for_each(|(title, _)| text.push_str(&format!(" {title:>12}")));
        text.push('\n');
        for row in rows {
            let mut name: String = label(row).chars().take(width).collect();
            if label(row).chars().count() > width {
                name.pop();
                name.push('…');
            }
            let share = 100.0 * row.self_cpu_ns as f64 / cpu;
            text.push_str(&format!("{name:<width$} {share:>6.1}%"));
            for (_, value) in &used {
                text.push_str(&format!(" {:>12}", value(row).unwrap_or_default()));
            }
            text.push('\n');
        }
        text.push_str(&format!("CPU time in total: {}", time(self.cpu_ns())));
        if self.device_ns() > 0 {
            text.push_str(&format!(
                "; device time in total: {}",
                time(self.device_ns())
            ));
        }
        text.push('\n');
        text
    }
}

impl fmt::Display for KeyAverages {
    /// Writes the first 30 rows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(30))
    }
}

fn length(event: &TraceEvent) -> u64 {
    event.end_ns.saturating_sub(event.start_ns)
}

fn some(number: u64) -> Option<u64> {
    (number > 0).then_some(number)
}

fn time(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.1} µs", ns as f64 * 1e-3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 * 1e-6),
        _ => format!("{:.3} s", ns as f64 * 1e-9),
    }
}

fn signed_bytes(bytes: i64) -> Option<String> {
    let sign = if bytes < 0 { "-" } else { "" };
    some(bytes.unsigned_abs()).map(|size| format!("{sign}{}", units::bytes(size)))
}

/// Returns what the events of a row have in common: the name, the shapes, and whether the device ran them.
fn key(event: &TraceEvent, group_by: GroupBy, on_device: bool) -> (&str, &str, bool) {
    let shapes = match group_by {
        GroupBy::Name => "",
        GroupBy::NameAndShapes => &event.shapes,
    };
    (&event.name, shapes, on_device)
}

/// Returns the kernels and copies, without the ranges of the user, which Kineto also lists on the device.
fn device_work(events: &[TraceEvent]) -> impl Iterator<Item = &TraceEvent> {
    let ranges: HashSet<&str> = events
        .iter()
        .filter(|event| event.device_type == CPU && event.scope == USER_SCOPE)
        .map(|event| event.name.as_str())
        .collect();
    events.iter().filter(move |event| {
        event.device_type != CPU
            && event.name != MEMORY
            && !event.is_hidden
            && !ranges.contains(event.name.as_str())
    })
}

/// Returns the operators and ranges of each thread as a tree, parents before children, with their own allocations
/// and kernels.
fn nest(events: &[TraceEvent]) -> Vec<Node> {
    let is_operator = |event: &TraceEvent| {
        event.device_type == CPU
            && event.name != MEMORY
            && !event.is_hidden
            && !event.is_async
            && event.thread == event.end_thread
    };
    // Events of the CUDA runtime have the system's thread id and a link to their operator; libtorch's own
    // events have libtorch's thread numbers.
    let threads: HashMap<u64, u64> = events
        .iter()
        .filter(|event| is_operator(event) && event.linked_correlation == 0)
        .map(|event| (event.correlation, event.thread))
        .collect();
    let thread_of = |event: &TraceEvent| match event.linked_correlation {
        0 => event.thread,
        operator => threads.get(&operator).copied().unwrap_or(event.thread),
    };
    let mut order: Vec<usize> = (0..events.len())
        .filter(|&index| is_operator(&events[index]) || events[index].name == MEMORY)
        .collect();
    order.sort_by_key(|&index| {
        let event = &events[index];
        (
            thread_of(event),
            event.start_ns,
            std::cmp::Reverse(event.end_ns),
        )
    });
    let mut nodes: Vec<Node> = Vec::with_capacity(order.len());
    let mut open: Vec<usize> = Vec::new();
    let mut thread = None;
    for index in order {
        let event = &events[index];
        if thread != Some(thread_of(event)) {
            thread = Some(thread_of(event));
            open.clear();
        }
        // Events that have ended before this one cannot contain it.
        while let Some(&top) = open.last() {
            let enclosing = &events[nodes[top].event];
            if event.end_ns <= enclosing.end_ns && event.start_ns < enclosing.end_ns.max(1) {
                break;
            }
            open.pop();
        }
        let parent = open.last().copied();
        if event.name == MEMORY {
            if let Some(parent) = parent {
                let node = &mut nodes[parent];
                if event.device_type == CPU {
                    node.own_bytes += event.bytes;
                } else {
                    node.own_device_bytes += event.bytes;
                }
            }
            continue;
        }
        let this = nodes.len();
        if let Some(parent) = parent {
            nodes[parent].children.push(this);
        }
        nodes.push(Node {
            event: index,
            parent,
            children: Vec::new(),
            own_bytes: 0,
            own_device_bytes: 0,
            kernel_ns: 0,
        });
        open.push(this);
    }
    let by_correlation: HashMap<u64, usize> = nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| events[node.event].linked_correlation == 0)
        .map(|(index, node)| (events[node.event].correlation, index))
        .collect();
    for kernel in device_work(events) {
        if let Some(&operator) = by_correlation.get(&kernel.linked_correlation) {
            nodes[operator].kernel_ns += length(kernel);
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, start_ns: u64, end_ns: u64, correlation: u64) -> TraceEvent {
        let mut event = TraceEvent::default();
        event.name = name.to_owned();
        (event.start_ns, event.end_ns) = (start_ns, end_ns);
        (event.thread, event.end_thread) = (1, 1);
        event.correlation = correlation;
        event
    }

    fn memory(at: u64, bytes: i64) -> TraceEvent {
        let mut event = event(MEMORY, at, at, 0);
        event.bytes = bytes;
        event
    }

    fn kernel(name: &str, start_ns: u64, end_ns: u64, operator: u64) -> TraceEvent {
        let mut event = event(name, start_ns, end_ns, 0);
        event.device_type = 1;
        event.linked_correlation = operator;
        event
    }

    #[test]
    fn an_operators_own_time_is_its_time_without_the_operators_inside() {
        let events = [
            event("linear", 0, 100, 1),
            event("addmm", 10, 70, 2),
            event("copy", 20, 30, 3),
            event("linear", 200, 250, 4),
        ];
        let averages = KeyAverages::of(&events, GroupBy::Name);
        let linear = averages.get("linear").expect("linear");
        assert_eq!(
            (linear.calls, linear.self_cpu_ns, linear.total_cpu_ns),
            (2, 90, 150)
        );
        let addmm = averages.get("addmm").expect("addmm");
        assert_eq!((addmm.self_cpu_ns, addmm.total_cpu_ns), (50, 60));
        assert_eq!(averages.cpu_ns(), 150, "the own times add up to the whole");
        assert_eq!(
            averages.rows()[0].name,
            "linear",
            "the largest own time first"
        );
    }

    #[test]
    fn threads_are_nested_apart() {
        let mut other = event("backward", 10, 20, 2);
        (other.thread, other.end_thread) = (2, 2);
        let averages = KeyAverages::of(&[event("forward", 0, 100, 1), other], GroupBy::Name);
        assert_eq!(
            averages.get("forward").map(|row| row.self_cpu_ns),
            Some(100)
        );
        assert_eq!(averages.cpu_ns(), 110);
    }

    #[test]
    fn allocations_belong_to_the_innermost_operator() {
        let events = [
            event("matmul", 0, 100, 1),
            event("mm", 10, 90, 2),
            memory(20, 4096),
            memory(95, -1024),
            memory(500, 7),
        ];
        let averages = KeyAverages::of(&events, GroupBy::Name);
        let matmul = averages.get("matmul").expect("matmul");
        assert_eq!(
            (matmul.self_cpu_bytes, matmul.total_cpu_bytes),
            (-1024, 3072)
        );
        assert_eq!(averages.get("mm").map(|row| row.self_cpu_bytes), Some(4096));
    }

    #[test]
    fn kernels_count_for_the_operator_that_started_them_and_those_around_it() {
        let events = [
            event("linear", 0, 10, 1),
            event("addmm", 2, 8, 2),
            kernel("gemm", 100, 400, 2),
            kernel("gemm", 500, 600, 2),
        ];
        let averages = KeyAverages::of(&events, GroupBy::Name);
        let linear = averages.get("linear").expect("linear");
        assert_eq!((linear.self_device_ns, linear.total_device_ns), (0, 400));
        assert_eq!(
            averages.get("addmm").map(|row| row.self_device_ns),
            Some(400)
        );
        let gemm = averages.get("gemm").expect("gemm");
        assert_eq!(
            (gemm.calls, gemm.on_device, gemm.self_device_ns),
            (2, true, 400)
        );
        assert_eq!(averages.device_ns(), 400);
    }

    #[test]
    fn a_range_on_the_device_is_no_kernel() {
        let mut range = event("forward", 0, 10, 1);
        range.scope = USER_SCOPE;
        let events = [
            range,
            kernel("forward", 100, 900, 0),
            kernel("gemm", 100, 200, 1),
        ];
        let averages = KeyAverages::of(&events, GroupBy::Name);
        assert_eq!(averages.device_ns(), 100);
    }

    #[test]
    fn an_operator_that_only_calls_itself_once_more_is_one_call() {
        let events = [event("sum", 0, 10, 1), event("sum", 1, 9, 2)];
        let averages = KeyAverages::of(&events, GroupBy::Name);
        let sum = averages.get("sum").expect("sum");
        assert_eq!((sum.calls, sum.total_cpu_ns, sum.self_cpu_ns), (1, 10, 10));
    }

    #[test]
    fn rows_can_be_told_apart_by_shapes_and_ordered() {
        let shaped = |start, shapes: &str| {
            let mut event = event("mm", start, start + 10, start);
            event.shapes = shapes.to_owned();
            event.flops = start;
            event
        };
        let events = [
            shaped(1, "[2, 3]"),
            shaped(100, "[4, 5]"),
            shaped(200, "[2, 3]"),
        ];
        let mut averages = KeyAverages::of(&events, GroupBy::NameAndShapes);
        averages.sort_by(SortBy::Flops);
        let rows: Vec<_> = averages
            .rows()
            .iter()
            .map(|r| (r.shapes.as_str(), r.calls))
            .collect();
        assert_eq!(rows, [("[2, 3]", 2), ("[4, 5]", 1)]);
        assert_eq!(KeyAverages::of(&events, GroupBy::Name).rows().len(), 1);
    }

    #[test]
    fn the_table_has_only_columns_with_values() {
        let averages = KeyAverages::of(&[event("aten::mm", 0, 2_500_000, 1)], GroupBy::Name);
        let text = averages.to_string();
        assert!(text.contains("aten::mm  100.0%      2.50 ms"), "{text}");
        assert!(
            !text.contains("device") && !text.contains("GFLOP"),
            "{text}"
        );
        assert!(text.ends_with("CPU time in total: 2.50 ms\n"), "{text}");
    }
}
