//! The processes of a job, found in `/proc`. Signals none of them.

use std::fs;
use std::io;

/// Most processes that are looked at: those of a job that has more are partly not seen.
const PROCESSES_MAX: usize = 16_384;

/// A process and all that descend from it, itself first. Blocks.
pub(super) fn find_descendants(process: u32) -> Vec<u32> {
    let mut found = vec![process];
    let mut at = 0;
    while at < found.len().min(PROCESSES_MAX) {
        // A process that ended meanwhile has no children.
        found.extend(children(found[at]).unwrap_or_default());
        at += 1;
    }
    found
}

fn children(process: u32) -> io::Result<Vec<u32>> {
    let mut children = Vec::new();
    for thread in fs::read_dir(format!("/proc/{process}/task"))?.flatten() {
        let Ok(listed) = fs::read_to_string(thread.path().join("children")) else {
            continue;
        };
        let numbers = listed.split_ascii_whitespace();
        children.extend(numbers.filter_map(|number| number.parse::<u32>().ok()));
    }
    Ok(children)
}
