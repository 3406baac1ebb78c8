//! Has the tree of a scratch volume handed over by a server on this machine, and chooses what shows
//! it: operations in this process, or the directory itself where nobody accounts for operations.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use bafs_proto::fd_passing::{HandoffHeader, HandoffTarget};
use bafs_proto::volume::{LimitKind, WATCHED_BYTES_MIN, WATCHED_FILES_MIN};
use rustix::fs::fstat;

use super::{BindMountTree, InlineTree, RemoteTree, Tree};
use crate::fd_passing::{self, HandoffError, ReceivedHandoff};
use crate::volume_health::VolumeHealth;

/// Where the tree will be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountLocation {
    /// In the name space of a job, which is killed with everything that it sees.
    Job,
    /// On a directory of the host, from which nothing can be taken away safely.
    Host,
}

/// Has the tree of a session handed over. Gives the tree, and why its directory is not shown as it
/// is. Must be called within a tokio runtime.
///
/// # Errors
/// The session and why the server must run its operations; when something broke on the way, the
/// session is of no use any more.
pub async fn take_handoff(
    lease: RemoteTree,
    writable: bool,
    location: MountLocation,
    health: &VolumeHealth,
) -> Result<(Tree, Option<String>), (RemoteTree, HandoffError)> {
    let what = HandoffTarget::Tree {
        tree: lease.tree().clone(),
        epoch: lease.epoch(),
    };
    let received = match fd_passing::fetch_handoff(lease.server(), what).await {
        Ok(received) => received,
        Err(why) => return Err((lease, why)),
    };
    let why = match check_bindable(&received, location) {
        Ok(directory) => {
            let lock = received.files.into_iter().nth(1);
            let tree =
                BindMountTree::new(directory, lease, lock, received.connection, health.clone())
                    .await;
            return Ok((Tree::BindMount(tree), None));
        }
        Err(why) => why,
    };
    let opened = InlineTree::open(lease, received, writable).await;
    let opened = opened.map(|tree| (Tree::Inline(tree), Some(why)));
    opened.map_err(|(lease, why)| (lease, HandoffError::Interrupted(why)))
}

/// The directory's path, if the server allows to show it and it leads there for this process too;
/// otherwise why it is not shown, for people.
fn check_bindable(handoff: &ReceivedHandoff, location: MountLocation) -> Result<PathBuf, String> {
    let (path, size) = match &handoff.header {
        HandoffHeader::Tree(header) => (
            header.bind_path.as_deref(),
            (header.size_bytes, header.size_files),
        ),
        _ => (None, (0, 0)),
    };
    let path = path.ok_or_else(|| explain_exact_limit(size))?;
    if location != MountLocation::Job {
        return Err("only a job, which ends with its volume, gets the directory itself".to_owned());
    }
    let elsewhere = || format!("{path} leads elsewhere here than at the server");
    let found = fs::symlink_metadata(path).map_err(|e| format!("{path}: {e}"))?;
    let handed = handoff.files.first().ok_or_else(elsewhere)?;
    let handed = fstat(handed.as_fd()).map_err(|e| format!("{path}: {e}"))?;
    let is_same = found.is_dir() && (found.dev(), found.ino()) == (handed.st_dev, handed.st_ino);
    is_same.then(|| path.into()).ok_or_else(elsewhere)
}

/// Why the limit of a volume of so many bytes and files is kept exactly, for people.
fn explain_exact_limit((bytes, files): (u64, u64)) -> String {
    let how = "its limit is kept operation by operation";
    match LimitKind::for_size(bytes, files) {
        LimitKind::Watched => format!("{how}, as its owner asked for"),
        LimitKind::Exact => format!(
            "{how}, as it is too small to be watched: that takes {} MB and {WATCHED_FILES_MIN} \
             files",
            WATCHED_BYTES_MIN.div_ceil(1_000_000)
        ),
    }
}
