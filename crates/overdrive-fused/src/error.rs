use tch::Kind;

/// What can go wrong in a fused function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has a shape that does not fit the others.
    #[error("{function}: {name} has shape {found:?}, expected {expected}")]
    Shape {
        /// The function.
        function: &'static str,
        /// The argument.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// What it must be, and why.
        expected: String,
    },
    /// A tensor has a dtype that the function cannot take.
    #[error("{function}: {name} is {found:?}, expected {expected}")]
    Kind {
        /// The function.
        function: &'static str,
        /// The argument.
        name: &'static str,
        /// Its dtype.
        found: Kind,
        /// What it may be.
        expected: &'static str,
    },
    /// Arguments are on different devices.
    #[error("{function}: {name} is on {found:?}, but {other} is on {expected:?}; move one of them")]
    Device {
        /// The function.
        function: &'static str,
        /// The argument.
        name: &'static str,
        /// Its device.
        found: tch::Device,
        /// The argument it must lie beside.
        other: &'static str,
        /// That one's device.
        expected: tch::Device,
    },
    /// A label is no class.
    #[error(
        "{function}: the label of row {row} is {label}, expected 0..{classes}, or {ignore_index} for a row to ignore"
    )]
    Label {
        /// The function.
        function: &'static str,
        /// The first row (of the flattened labels) that has such a label.
        row: usize,
        /// The label.
        label: i64,
        /// How many classes there are.
        classes: i64,
        /// The label that marks rows to ignore.
        ignore_index: i64,
    },
    /// An option is outside its range.
    #[error("{option} is {value}, expected {expected}")]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// The second backward pass through something that the first used up.
    #[error(
        "{function}: a second backward pass, but the first used its buffers up; set {option} in the options"
    )]
    BackwardAgain {
        /// The function.
        function: &'static str,
        /// What to set.
        option: &'static str,
    },
    /// An error of the graph, or of a function in it.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
