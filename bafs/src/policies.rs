//! `bafs policies`: which rules the scheduler can follow.

use anyhow::Result;
use bafs_sched::list_policies;

use crate::output::Printer;

/// Runs the command.
pub(crate) fn run(output: Printer) -> Result<()> {
    let all = list_policies();
    let mut text = String::new();
    let mut family = "";
    for policy in &all {
        if policy.family != family {
            family = policy.family;
            text += &format!("{family}\n");
        }
        let mark = if policy.is_default { "*" } else { " " };
        text += &format!("  {mark} {:<15} {}\n", policy.name, policy.summary);
    }
    text += "\n* is the default; choose another with --policy FAMILY=NAME";
    output.print_result(&text, &all)
}
