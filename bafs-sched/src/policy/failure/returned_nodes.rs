//! Nodes that were given up and come back unharmed: what finished jobs wrote there is used again
//! where nothing has begun in its place, and these jobs do not run again. So are copies. What nodes
//! have that are back together counts together. `transition/returned_nodes.rs` carries it out.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::MountedVolume;
use crate::policy::View;
use crate::space::Space;
use crate::state::attempts::AttemptState;
use crate::state::jobs::JobState;
use crate::state::lost_volumes::{LostVolume, LostVolumeState};
use crate::state::scheduler_state::Phase;
use crate::state::volumes::InstanceState;

/// What can be used again of all that nodes have that are back.
#[derive(Debug, Default)]
pub(crate) struct ReusePlan {
    /// By the volume of the workflow that each is.
    pub(crate) volumes: BTreeMap<VolumeIndex, VolumeId>,
    /// Copies of what is elsewhere.
    pub(crate) copies: BTreeSet<VolumeId>,
    /// Jobs that need not run again then.
    pub(crate) spared: BTreeSet<JobIndex>,
}

impl ReusePlan {
    pub(crate) fn uses(&self, id: VolumeId, left: &LostVolume) -> bool {
        self.volumes.get(&left.volume) == Some(&id) || self.copies.contains(&id)
    }
}

/// What is known of a volume that is forgotten with its node, if it can be used again.
pub(crate) fn find_reusable(view: View<'_>, id: VolumeId) -> Option<LostVolume> {
    let instance = view.volumes.get(id)?;
    let (volume, size) = (instance.volume, instance.size);
    let node = view.graph.volume(volume);
    let is_written = node.writer.is_some_and(|writer| {
        let attempt = view.attempts.get(&writer);
        attempt.is_some_and(|attempt| attempt.stage != AttemptState::Preparing)
    });
    let is_done = |writer: &JobIndex| view.graph.state(*writer) == JobState::Done;
    let is_copy = instance.state == InstanceState::Copy;
    let writers: Vec<JobIndex> = match instance.state {
        InstanceState::Copy => view.writers_of_copy(volume, id),
        InstanceState::Ready if !node.is_cache && !is_written => {
            node.writers.iter().copied().filter(is_done).collect()
        }
        _ => return None,
    };
    (!writers.is_empty()).then(|| LostVolume {
        volume,
        size,
        writers,
        is_copy,
        noted_at: view.last_id(),
        state: LostVolumeState::NodeLost,
    })
}

/// What can be used again, and which jobs need not run again then: all that a job wrote is
/// there, or nobody needs it, and nothing has begun in its place. All counts that nodes may
/// have that are not lost, as far as `is_certain` says so.
pub(crate) fn plan_reuse(view: View<'_>, is_certain: impl Fn(&LostVolume) -> bool) -> ReusePlan {
    if view.phase != Phase::Running || view.left.is_empty() {
        return ReusePlan::default();
    }
    let (mut there, copies) = returned_volumes(view);
    there.retain(|_, id| is_certain(&view.left[id]));
    let writers = there.values().flat_map(|id| view.left[id].writers.iter());
    let mut spared = with_parents(view, writers.copied().collect());
    loop {
        let is_whole = |job: &JobIndex| {
            let mounted = view.graph.mounted(*job).into_iter();
            let mut written = mounted.filter(|(_, writable)| *writable);
            written.all(|(volume, _)| has_output(view, *job, volume, &there, &spared))
        };
        let whole: BTreeSet<JobIndex> = spared.iter().copied().filter(is_whole).collect();
        if whole.len() == spared.len() {
            break;
        }
        spared = whole;
    }
    let is_good = |volume: &VolumeIndex, id: &mut VolumeId| {
        let is_done = |job| view.graph.state(job) == JobState::Done || spared.contains(&job);
        let are_done = view.left[id].writers.iter().all(|job| is_done(*job));
        are_done && is_needed_after(view, *volume, &spared)
    };
    there.retain(is_good);
    let mut plan = ReusePlan {
        volumes: there,
        copies: BTreeSet::new(),
        spared,
    };
    let is_useful = |(id, server): &(VolumeId, ServerId)| {
        let left = &view.left[id];
        is_certain(left) && source_of_copy(view, left, *server, &plan).is_some()
    };
    plan.copies = copies.filter(is_useful).map(|(id, _)| id).collect();
    plan
}

/// What nodes that are not lost may have: of each volume that is gone the newest, a copy only
/// if there is nothing else; and copies of others, one of each.
fn returned_volumes(
    view: View<'_>,
) -> (
    BTreeMap<VolumeIndex, VolumeId>,
    impl Iterator<Item = (VolumeId, ServerId)> + use<>,
) {
    let mut room: BTreeMap<ServerId, Space> = BTreeMap::new();
    let mut there: BTreeMap<VolumeIndex, VolumeId> = BTreeMap::new();
    let mut copies: BTreeMap<VolumeIndex, (VolumeId, ServerId)> = BTreeMap::new();
    view.graph.tally.add(view.left.len() as u64);
    let originals = view.left.iter().rev().filter(|(_, left)| !left.is_copy);
    let copied = view.left.iter().rev().filter(|(_, left)| left.is_copy);
    for (id, left) in originals.chain(copied) {
        let server = view.stale.get(id).filter(|server| !view.is_lost(**server));
        let Some(&server) = server.filter(|_| !is_superseded(view, left)) else {
            continue;
        };
        let is_there = view.volumes.is_live(left.volume) || there.contains_key(&left.volume);
        let is_known = is_there && (!left.is_copy || copies.contains_key(&left.volume));
        let free = view.fleet.available(server);
        let free = room.entry(server).or_insert(free);
        if is_known || !free.can_hold(left.size) {
            continue;
        }
        *free = free.saturating_sub(left.size);
        match is_there {
            true => drop(copies.insert(left.volume, (*id, server))),
            false => drop(there.insert(left.volume, *id)),
        }
    }
    (there, copies.into_values())
}

/// Whether a job whose output a volume has ran again since, and was done.
fn is_superseded(view: View<'_>, left: &LostVolume) -> bool {
    let is_redone = |job| view.redone.get(job).is_some_and(|at| *at > left.noted_at);
    left.writers.iter().any(is_redone)
}

/// The volume of which a copy that is back on a node spares work if it is lost.
pub(crate) fn source_of_returned_copy(
    view: View<'_>,
    left: &LostVolume,
    server: ServerId,
) -> Option<MountedVolume> {
    source_of_copy(view, left, server, &ReusePlan::default())
}

/// The volume of which a copy that is back spares work if it is lost: one that somebody needs,
/// on another node, without another copy.
fn source_of_copy(
    view: View<'_>,
    left: &LostVolume,
    server: ServerId,
    plan: &ReusePlan,
) -> Option<MountedVolume> {
    let volume = left.volume;
    let is_done =
        |job: &JobIndex| view.graph.state(*job) == JobState::Done || plan.spared.contains(job);
    let is_left = |job: &JobIndex| !view.graph.state(*job).is_final() && !plan.spared.contains(job);
    let mut users = view.graph.workflow.volume(volume).users.iter();
    let is_useful =
        left.writers.iter().all(is_done) && users.any(is_left) && view.older_copy(volume).is_none();
    let ready = view.volumes.scratch(volume).filter(|(id, _)| {
        let instance = view.volumes.get(*id);
        instance.is_some_and(|instance| instance.state == InstanceState::Ready)
    });
    let planned = plan.volumes.get(&volume);
    let planned = planned.map(|id| (*id, view.stale.get(id).copied()));
    let (id, at) = ready.or(planned).filter(|_| is_useful)?;
    let source = MountedVolume {
        volume,
        id,
        server: at,
    };
    at.filter(|at| *at != server).map(|_| source)
}

/// Those of these jobs, all of which were done, that are to run again, and with them those
/// before them: these were done, too.
fn with_parents(view: View<'_>, mut open: Vec<JobIndex>) -> BTreeSet<JobIndex> {
    let mut all = BTreeSet::new();
    while let Some(job) = open.pop() {
        if is_to_run_again(view, job) && all.insert(job) {
            open.extend(&view.graph.workflow.job(job).parents);
        }
    }
    all
}

fn is_to_run_again(view: View<'_>, job: JobIndex) -> bool {
    matches!(
        view.graph.state(job),
        JobState::Waiting | JobState::Ready | JobState::HeldBack
    )
}

/// Whether what a job wrote into a volume is in the one that is back, or nobody needs it.
fn has_output(
    view: View<'_>,
    job: JobIndex,
    volume: VolumeIndex,
    there: &BTreeMap<VolumeIndex, VolumeId>,
    spared: &BTreeSet<JobIndex>,
) -> bool {
    let is_done = |job: &JobIndex| view.graph.state(*job) == JobState::Done || spared.contains(job);
    match there.get(&volume).map(|id| &view.left[id].writers) {
        Some(writers) => writers.contains(&job) && writers.iter().all(is_done),
        None => !is_needed_after(view, volume, spared) && !view.volumes.is_live(volume),
    }
}

/// Whether somebody needs a volume once these jobs are done.
fn is_needed_after(view: View<'_>, volume: VolumeIndex, spared: &BTreeSet<JobIndex>) -> bool {
    let is_left = |job: &JobIndex| !view.graph.state(*job).is_final() && !spared.contains(job);
    let mut users = view.graph.workflow.volume(volume).users.iter();
    view.graph.volume(volume).extracts_left > 0 || users.any(is_left)
}
