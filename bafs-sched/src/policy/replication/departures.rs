//! What becomes of volumes on nodes that leave: data that only such a node has go to another node
//! in time, whatever a copy costs. When nodes leave, they say themselves. Who asks, for each job
//! and volume in turn, is `transition/departures.rs`.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::copy_estimate::target_of_copy;
use crate::action::MountedVolume;
use crate::decision::Decision;
use crate::policy::View;
use crate::state::attempts::AttemptState;
use crate::state::jobs::JobState;
use crate::state::volumes::InstanceState;

/// Jobs whose volumes are still being made on nodes that drain: they start elsewhere.
pub(crate) fn jobs_to_withdraw(view: View<'_>) -> Vec<JobIndex> {
    let there = view.fleet.draining();
    let jobs = there.flat_map(|server| view.under_way.on(server));
    let is_preparing = |job: &JobIndex| {
        let attempt = view.attempts.get(job);
        attempt.is_some_and(|attempt| attempt.stage == AttemptState::Preparing)
    };
    jobs.filter(is_preparing).collect()
}

/// Volumes on nodes that drain.
pub(crate) fn volumes_on_draining(view: View<'_>) -> Vec<(VolumeIndex, VolumeId)> {
    let there = view.fleet.draining();
    let there = there.flat_map(|server| view.volumes.on_server(server));
    there.map(|(id, volume)| (volume, id)).collect()
}

/// What is done now with a volume on a node that drains, so that the node gets empty.
pub(crate) fn judge_departure(
    view: View<'_>,
    volume: VolumeIndex,
    id: VolumeId,
) -> Option<Decision> {
    let instance = view.volumes.get(id)?;
    // Blocks of caches are at home, too.
    if view.graph.volume(volume).is_cache || instance.is_kept {
        return None;
    }
    match instance.state {
        InstanceState::Ready => {}
        InstanceState::Copy => {
            let copies = vec![id];
            return Some(Decision::DropCopies { volume, copies });
        }
        InstanceState::Creating
        | InstanceState::Copying
        | InstanceState::Held
        | InstanceState::Deleting => return None,
    }
    if let Some(copy) = view.copy_that_stays(volume) {
        return switch_to_copy(view, volume, id, copy);
    }
    let writers = &view.graph.volume(volume).writers;
    let is_done = |writer: &JobIndex| view.graph.state(*writer) == JobState::Done;
    if !writers.iter().any(is_done) {
        let is_used = !view.users_of(id, volume).is_empty();
        return (!is_used).then_some(Decision::DropVolume { id });
    }
    let server = instance.server;
    let source = MountedVolume { volume, id, server };
    copy_to(view, source, target_of_copy(view, source))
}

/// What is done now with a volume whose next job cannot end on its node before that leaves.
/// Nothing moves twice for the same reason.
pub(crate) fn judge_move(view: View<'_>, volume: VolumeIndex) -> Option<Decision> {
    let (id, server) = view.volumes.scratch(volume)?;
    let instance = view.volumes.get(id)?;
    if instance.is_kept || instance.state != InstanceState::Ready {
        return None;
    }
    if let Some(copy) = view.copy_that_stays(volume) {
        return switch_to_copy(view, volume, id, copy);
    }
    let source = MountedVolume { volume, id, server };
    copy_to(view, source, find_longer_lived(view, source, server?))
}

/// Whether a volume that was to move is still on a node that leaves.
pub(crate) fn is_move_wanted(view: View<'_>, volume: VolumeIndex) -> bool {
    let server = view.volumes.scratch(volume).and_then(|(_, server)| server);
    server.is_some_and(|server| view.fleet.departure(server).at.is_some())
}

/// The copy of a volume takes its place, unless somebody uses the volume.
fn switch_to_copy(
    view: View<'_>,
    volume: VolumeIndex,
    id: VolumeId,
    copy: VolumeId,
) -> Option<Decision> {
    let mut sent = view.extractions.under_way();
    let is_sent = sent.any(|(_, _, from)| from == id);
    let is_used = is_sent || !view.users_of(id, volume).is_empty();
    (!is_used).then_some(Decision::SwitchToCopy { volume, id, copy })
}

/// A volume that somebody needs is copied. What a running job writes cannot be: the job ends in
/// time, or runs again.
fn copy_to(view: View<'_>, source: MountedVolume, target: Option<ServerId>) -> Option<Decision> {
    let volume = source.volume;
    let node = view.graph.volume(volume);
    let is_done = |writer: &JobIndex| view.graph.state(*writer) == JobState::Done;
    let is_written = node.writers.iter().any(is_done);
    if !is_written || node.is_idle() || node.writer.is_some() || view.is_being_copied(volume) {
        return None;
    }
    let server = target?;
    let older = view.older_copy(volume);
    let base = older.filter(|(_, older)| older.server == Some(server));
    Some(Decision::CopyVolume {
        source,
        server,
        base_copy: base.map(|(id, _)| id),
    })
}

/// The node with most room of those that live longer than the node of a volume.
fn find_longer_lived(view: View<'_>, source: MountedVolume, from: ServerId) -> Option<ServerId> {
    let size = view.size_of(source.volume);
    let end = |server| view.fleet.departure(server).at.unwrap_or(Time(u64::MAX));
    let mut roomiest = view.fleet.roomiest();
    roomiest.find(|server| end(*server) > end(from) && view.fleet.available(*server).can_hold(size))
}

impl View<'_> {
    /// Whether a job has to wait because its data are about to move from a node that leaves.
    pub(crate) fn awaits_departure(&self, job: JobIndex) -> bool {
        if self.fleet.draining().next().is_none() && self.wanted_moves.is_empty() {
            return false;
        }
        self.graph.mounted(job).into_iter().any(|(volume, _)| {
            let there = self.volumes.scratch(volume).and_then(|(_, server)| server);
            let leaves = there.is_some_and(|server| self.fleet.is_draining(server));
            !self.graph.volume(volume).is_cache
                && (leaves || self.wanted_moves.contains(&volume))
                && (self.is_being_copied(volume) || self.copy_that_stays(volume).is_some())
        })
    }
}
