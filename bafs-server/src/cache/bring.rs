//! Brings blocks to the disk for agents of this machine, who read them there themselves: no byte is
//! copied for them, unless the disk is slow or full. Reads nothing itself.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::message::ReadKind;
use bafs_proto::time::Deadline;

use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::read::{Errand, Read, count_hits, fly, note_wait, read_beside};
use crate::clock;

/// How long a reader waits for the disk to take what has come; then it gets the bytes.
const KEPT_MAX: Duration = Duration::from_millis(50);

/// What an agent gets.
#[derive(Debug)]
pub(crate) enum Brought {
    /// Its map says that it can read the blocks.
    Here,
    /// The blocks.
    Bytes(Read),
}

/// Sees to it that an agent gets the blocks of a run.
///
/// # Errors
/// As of [`super::read::read`].
pub(crate) async fn bring(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: Run,
    deadline: Deadline,
) -> Result<Brought> {
    let (disk, errand) = (&generation.disk, Errand::of(&ReadKind::Agent));
    let absent: Vec<_> = {
        let table = disk.table();
        (0..run.count)
            .filter(|n| !table.contains(run.key(*n)))
            .collect()
    };
    count_hits(generation, &run, |n| absent.binary_search(&n).is_err());
    let began = clock::monotonic_us();
    let mut landed = fly(fetcher, generation, &run, (&errand, &absent), deadline).await?;
    if !absent.is_empty() {
        note_wait(generation, began);
    }
    let over = async {
        for (_, flight, _) in &mut landed {
            flight.until_over().await;
        }
    };
    // Whether or not that is in time, the table knows.
    let _ = tokio::time::timeout(KEPT_MAX, over).await;
    if disk.shows_all(&run) {
        return Ok(Brought::Here);
    }
    let landed = landed.into_iter().map(|(n, _, block)| (n, block)).collect();
    let read = read_beside(fetcher, generation, run, (errand, landed), deadline).await?;
    Ok(Brought::Bytes(read))
}
