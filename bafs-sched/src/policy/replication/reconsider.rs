//! When losses turn out to be more frequent than was believed, or it is known for the first time
//! what a copy costs, the volumes that have none are weighed once more: jobs of equal length end
//! together, and their volumes are all weighed before anything is known. How they are weighed says
//! `policy/replication/copy_estimate.rs`.

use bafs_workflow::VolumeIndex;

use super::copy_policy::Replication;
use crate::policy::View;
use crate::state::jobs::JobState;
use crate::state::volumes::InstanceState;

/// Volumes that have no copy and are weighed again.
pub(crate) fn volumes_to_weigh(view: View<'_>, policy: &dyn Replication) -> Vec<VolumeIndex> {
    if !policy.weighs() {
        return Vec::new();
    }
    let instances = view.volumes.iter();
    let scratch = instances.filter(|(_, instance)| {
        let is_cache = view.graph.volume(instance.volume).is_cache;
        instance.state == InstanceState::Ready && !is_cache
    });
    let volumes = scratch.map(|(_, instance)| instance.volume);
    volumes
        .filter(|volume| is_finished(view, *volume) && !view.is_being_copied(*volume))
        .collect()
}

/// Whether a volume has what a finished job wrote, of which there is no copy, and nobody changes it
/// now.
fn is_finished(view: View<'_>, volume: VolumeIndex) -> bool {
    let writers = &view.graph.volume(volume).writers;
    view.good_copy(volume).is_none()
        && writers
            .iter()
            .any(|writer| view.graph.state(*writer) == JobState::Done)
        && !writers
            .iter()
            .any(|writer| view.attempts.contains_key(writer))
}
