//! The lines that the process of a section writes to its standard output.

use serde::{Deserialize, Serialize};

use crate::finding::Check;
use crate::report::KernelUse;

/// The prefix that distinguishes these lines from the output of libraries.
const MARK: &str = "@gpu-check ";

/// An event of a section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    /// A check begins. If this is the last line, the check ended the process.
    Begin {
        /// The number of the check in its section, from 0.
        index: usize,
        /// The name of the check.
        name: String,
    },
    /// A check has ended.
    Done {
        /// The number of the check.
        index: usize,
        /// The result.
        check: Check,
    },
    /// The device is unusable after the last check: after some errors, CUDA rejects every operation. The process ends,
    /// and another process continues with the next check.
    Lost,
    /// The use of Overdrive's kernels by the process, before it ends.
    Kernels(KernelUse),
    /// The section is complete.
    End,
}

impl Line {
    /// Returns the line as text.
    pub(crate) fn to_text(&self) -> String {
        let json = serde_json::to_string(self);
        format!("{MARK}{}", json.unwrap_or_default())
    }

    /// Returns the event in a line of output; `None` for the output of a library.
    pub(crate) fn of_text(text: &str) -> Option<Self> {
        // A library may have left a line without its end.
        let at = text.find(MARK)?;
        serde_json::from_str(&text[at + MARK.len()..]).ok()
    }
}
