use anyhow::Result;
use overdrive::distributed::ProcessGroup;
use overdrive::trainer::{Finetuned, RunEnd, print_line};

use crate::model_name;

/// Writes the results of a fine-tuning on rank 0 unless the run was interrupted, and returns on all ranks how it ended.
pub fn write_tuned(tuned: Finetuned, group: &ProcessGroup) -> Result<RunEnd> {
    let end = tuned.summary.end();
    if group.is_main() {
        let name = model_name(&tuned.arguments.model_name_or_path);
        if let Some(results) = tuned.write(&name)? {
            print_line(results);
        }
    }
    Ok(end)
}
