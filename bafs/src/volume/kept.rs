//! `bafs volume delete --kept`: frees what a run that failed or was cancelled keeps for the next.

use std::path::Path;

use anyhow::Result;
use bafs_proto::message::{DeleteVolume, ServerKind};
use bafs_sched::driver::EarlierRun;
use serde_json::json;

use super::connection::connect;
use crate::args::ClientArgs;
use crate::failure::{ClassifiedError, FailureClass, class_of};
use crate::history::find_journal;
use crate::output::Printer;
use crate::run::is_run_locked;

/// Deletes the volumes that the last run of a workflow keeps. Those that are gone are no failure.
///
/// # Errors
/// The run goes on, or a node that lives does not delete its volumes.
pub(super) async fn delete_kept_volumes(
    args: &ClientArgs,
    run: &Path,
    output: Printer,
) -> Result<()> {
    let journal = find_journal(run)?;
    let earlier = EarlierRun::read(&journal)?;
    if is_run_locked(&journal) || earlier.as_ref().is_some_and(|run| !run.is_over) {
        return Err(ClassifiedError::with_remedy(
            FailureClass::Busy,
            format!("the run of {} is not over", journal.display()),
            "wait for its end, or cancel it",
        ));
    }
    let kept = earlier.map(|run| run.kept).unwrap_or_default();
    let client = connect(args)?;
    let nodes = client.list_servers(Some(ServerKind::Node)).await?;
    let (mut deleted, mut away) = (Vec::new(), 0_usize);
    for volume in kept {
        let Some(node) = nodes.iter().find(|node| node.id == volume.server) else {
            away += 1;
            continue;
        };
        let call = DeleteVolume { volume: volume.id };
        match client.call(&node.address, call).await {
            Ok(_) => deleted.push(volume.id.to_string()),
            // It gave way to another run.
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let mut text = match deleted.len() {
        1 => "deleted 1 kept volume".to_owned(),
        count => format!("deleted {count} kept volumes"),
    };
    if away > 0 {
        text += &format!("; the nodes of {away} more are away, and delete them in time");
    }
    output.print_result(&text, &json!({ "deleted": deleted, "away": away }))
}

fn is_gone(error: &anyhow::Error) -> bool {
    matches!(class_of(error), FailureClass::NotFound | FailureClass::Lost)
}
