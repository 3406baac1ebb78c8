//! What becomes of volumes on nodes that leave: data that only such a node has go to another node
//! in time, whatever a copy costs. When nodes leave, they say themselves.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::View;
use crate::action::MountedVolume;
use crate::state::attempts::AttemptState;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

/// One step by which a node gets empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    /// A job whose volumes are still being made there starts elsewhere.
    WithdrawJob(JobIndex),
    /// A volume is copied to a node that stays.
    CopyVolume {
        source: MountedVolume,
        target: ServerId,
    },
    /// The copy of a volume takes its place.
    UseCopy { volume: VolumeIndex, id: VolumeId },
    /// Nobody needs what a volume has, or another node has the volume itself.
    DeleteVolume(VolumeId),
}

/// The steps that are possible now. Each is decided as if it were the only one.
pub(crate) fn plan_departures(view: View<'_>) -> Vec<Departure> {
    let mut steps = Vec::new();
    for server in view.fleet.draining() {
        let jobs = view.under_way.on(server).into_iter();
        let unbegun = jobs.filter(|job| {
            let attempt = view.attempts.get(job);
            attempt.is_some_and(|attempt| attempt.stage == AttemptState::Preparing)
        });
        steps.extend(unbegun.map(Departure::WithdrawJob));
        let there = view.volumes.on_server(server).into_iter();
        steps.extend(there.filter_map(|(id, volume)| plan_departure(view, volume, id)));
    }
    let wanted = view.wanted_moves.iter().filter_map(|volume| {
        let (id, server) = view.volumes.scratch(*volume)?;
        let step = plan_departure(view, *volume, id)?;
        // Nothing moves twice for the same reason.
        match step {
            Departure::WithdrawJob(_) | Departure::DeleteVolume(_) => None,
            Departure::UseCopy { .. } => Some(step),
            Departure::CopyVolume { source, .. } => {
                let target = find_longer_lived(view, source, server?)?;
                Some(Departure::CopyVolume { source, target })
            }
        }
    });
    steps.extend(wanted);
    steps
}

/// The node with most room of those that live longer than the node of a volume.
fn find_longer_lived(view: View<'_>, source: MountedVolume, from: ServerId) -> Option<ServerId> {
    let size = view.size_of(source.volume);
    let end = |server| view.fleet.departure(server).at.unwrap_or(Time(u64::MAX));
    let mut roomiest = view.fleet.roomiest();
    roomiest.find(|server| end(*server) > end(from) && view.fleet.available(*server).can_hold(size))
}

fn plan_departure(view: View<'_>, volume: VolumeIndex, id: VolumeId) -> Option<Departure> {
    let instance = view.volumes.get(id)?;
    // Blocks of caches are at home, too.
    if view.graph.volume(volume).is_cache || instance.is_kept {
        return None;
    }
    match instance.state {
        InstanceState::Ready => {}
        InstanceState::Copy => return Some(Departure::DeleteVolume(id)),
        InstanceState::Creating
        | InstanceState::Copying
        | InstanceState::Held
        | InstanceState::Deleting => return None,
    }
    let is_used = !view.users_of(id, volume).is_empty();
    if view.has_copy_that_stays(volume) {
        let mut sent = view.extractions.under_way();
        let is_sent = sent.any(|(_, _, from)| from == id);
        return (!is_used && !is_sent).then_some(Departure::UseCopy { volume, id });
    }
    let node = view.graph.volume(volume);
    let is_done = |writer: &JobIndex| view.graph.state(*writer) == JobState::Done;
    if !node.writers.iter().any(is_done) {
        return (!is_used).then_some(Departure::DeleteVolume(id));
    }
    // What a running job writes cannot be copied: the job ends in time, or runs again.
    if node.is_idle() || node.writer.is_some() || view.is_being_copied(volume) {
        return None;
    }
    let server = instance.server;
    let source = MountedVolume { volume, id, server };
    let target = view.target_of_copy(source)?;
    Some(Departure::CopyVolume { source, target })
}

impl State {
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
                && (self.is_being_copied(volume) || self.has_copy_that_stays(volume))
        })
    }
}
