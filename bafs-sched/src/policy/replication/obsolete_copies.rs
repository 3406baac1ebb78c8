//! Which copies of scratch volumes go. When one is made says `policy/replication/copy_estimate.rs`.
//!
//! While a newer copy of a volume is made, the older one stays: it spares what was done before it
//! until the newer is complete, and what has not changed since need not cross the network again.

use bafs_proto::ids::VolumeId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::state::copies::Copy;
use crate::state::volumes::InstanceState;

/// Copies of a volume, but for one.
pub(crate) fn copies_beside(view: View<'_>, volume: VolumeIndex, kept: VolumeId) -> Vec<VolumeId> {
    copies_where(view, volume, |copy| copy.id != kept)
}

/// All copies of a volume.
pub(crate) fn all_copies(view: View<'_>, volume: VolumeIndex) -> Vec<VolumeId> {
    copies_where(view, volume, |_| true)
}

/// What is being copied of a volume that changes now.
pub(crate) fn unfinished_copies(view: View<'_>, volume: VolumeIndex) -> Vec<VolumeId> {
    let is_unfinished = |copy: &Copy| view.copy_state(copy) == Some(InstanceState::Copying);
    copies_where(view, volume, is_unfinished)
}

/// Copies of a volume with what a job that runs again, or a later one, made there.
pub(crate) fn copies_since(view: View<'_>, volume: VolumeIndex, job: JobIndex) -> Vec<VolumeId> {
    let is_since = |writer: &JobIndex| view.graph.rank(*writer) >= view.graph.rank(job);
    copies_where(view, volume, |copy| copy.writers.iter().any(is_since))
}

fn copies_where(
    view: View<'_>,
    volume: VolumeIndex,
    goes: impl Fn(&Copy) -> bool,
) -> Vec<VolumeId> {
    let copies = view.checkpoints.copies.of(volume).iter();
    copies.filter(|copy| goes(copy)).map(|c| c.id).collect()
}

/// Volumes whose copies go since a newer stage of their pipeline is safe: what that was made from
/// need not be.
pub(crate) fn volumes_of_older_stages(view: View<'_>, newer: VolumeIndex) -> Vec<VolumeIndex> {
    let Some(pipeline) = view.graph.pipeline_of(newer) else {
        return Vec::new();
    };
    let copied = view.checkpoints.copies.of_pipeline(pipeline).into_iter();
    let is_older = |volume: &VolumeIndex| *volume != newer && view.graph.volume(*volume).is_idle();
    copied.filter(is_older).collect()
}

/// Volumes whose copies go since nothing in their pipeline can have to run again.
pub(crate) fn volumes_of_closed(view: View<'_>, pipeline: u32) -> Vec<VolumeIndex> {
    match view.graph.is_pipeline_closed(pipeline) {
        true => view.checkpoints.copies.of_pipeline(pipeline),
        false => Vec::new(),
    }
}
