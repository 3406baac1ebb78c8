//! Disks that are full although their nodes offer more: how that is told from a volume that is too
//! small, and what goes from there. What follows is in `transition/full_disks.rs`. What becomes of
//! volumes that are too small is `policy/failure/resize.rs`.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use super::space_refusals::{describe_too_small, disk_of, found_no_space, refused_for_space};
use crate::decision::QuarantineReason;
use crate::describe::describe_bytes;
use crate::policy::View;
use crate::settings::ClusterLifetime;
use crate::space::Space;
use crate::state::disk_fullness::{DiskLack, DiskResource};
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;

/// Where nobody knows what the disk had free: so often a job may have met it as it seems, before a
/// lack of space is the declaration's fault.
const FULL_DISKS_MAX: u32 = 2;

/// A disk may have no space so often, one time after the other, before it is believed to be full:
/// somebody else may have taken it, and the next listing shows that.
const PASSING_MAX: u32 = 1;

/// Jobs that are named when all wait for a full disk.
const NAMES_SHOWN: usize = 3;

/// What refused a job space: the disk below this volume, not the volume.
struct Refusal {
    volume: VolumeIndex,
    /// What the disk had free; nothing where that is only believed.
    disk: Option<Space>,
}

/// Which node's disk had no space, and why it was that: it has less than the volume may still
/// take. Where nobody knows that, volumes there refused the job that were not half full; as a
/// single call may ask for more than a whole volume is to have, this is believed a few times.
pub(crate) fn find_full_disk(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> Option<(ServerId, DiskLack)> {
    if !found_no_space(view, job, report) {
        return None;
    }
    let Refusal { volume, disk } = refused_by_disk(view, job, report)?;
    let server = node_of(view, job, volume)?;
    let times = view.graph.job(job).failure_history.environment.full_disks;
    if disk.is_none() && times >= FULL_DISKS_MAX {
        return None;
    }
    let name = &view.graph.workflow.volume(volume).name;
    let (why, lacks) = match disk {
        Some(free) => {
            let size = limit_of(view, volume);
            let lacks = lacking_resource(size, free);
            let disk = describe_disk(view, server, (size, free), lacks);
            let why = format!("volume '{name}' ran out of space below its limit of {disk}");
            (why, lacks)
        }
        None => {
            let why = format!(
                "volume '{name}' ran out of space when less than half full: the disk of node {} \
                 may be full",
                view.fleet.name(server)
            );
            (why, DiskResource::Bytes)
        }
    };
    Some((server, DiskLack { why, lacks }))
}

/// What a disk with so much free lacks for a volume that may hold so much.
fn lacking_resource(size: Space, free: Space) -> DiskResource {
    let lacks_files = free.files == 0 || (free.files < size.files && free.bytes >= size.bytes);
    match lacks_files {
        true => DiskResource::Inodes,
        false => DiskResource::Bytes,
    }
}

/// What a volume may hold and the disk of its node has free, in what that lacks.
fn describe_disk(
    view: View<'_>,
    server: ServerId,
    (size, free): (Space, Space),
    lacks: DiskResource,
) -> String {
    let node = view.fleet.name(server);
    if lacks == DiskResource::Bytes {
        let (size, free) = (describe_bytes(size), describe_bytes(free));
        return format!("{size}: the disk of node {node} has {free} free");
    }
    let offered = view
        .fleet
        .get(server)
        .map_or(0, |node| node.seen.capacity.files);
    let [size, free, all] = [size.files, free.files, offered].map(with_commas);
    let left = if free == "0" { "no" } else { "few" };
    format!(
        "{size} files: the disk of node {node} has {left} files (inodes) left: {free} of the \
         {all} that it offers"
    )
}

/// The most that a volume may hold, which of a watched one is less than its reservation.
fn limit_of(view: View<'_>, volume: VolumeIndex) -> Space {
    let (size, spec) = (view.size_of(volume), view.graph.workflow.volume(volume));
    let (bytes, files) = spec.limit.limit_for_reservation(size.bytes, size.files);
    Space { bytes, files }
}

/// The node of a scratch volume of a job; the job's own where the volume is gone.
fn node_of(view: View<'_>, job: JobIndex, volume: VolumeIndex) -> Option<ServerId> {
    let scratch = view.volumes.scratch(volume).and_then(|(_, server)| server);
    scratch.or_else(|| view.graph.job(job).last_server)
}

/// The first of the volumes that refused a job space because of the disk below it.
fn refused_by_disk(view: View<'_>, job: JobIndex, report: &JobReport) -> Option<Refusal> {
    let mut refused = refused_for_space(view, job, report);
    if refused.is_empty() {
        refused = view.scratch_written(job);
    }
    let used_of = |volume: VolumeIndex| {
        let name = &view.graph.workflow.volume(volume).name;
        report.volumes.iter().find(|used| used.name == *name)
    };
    let mut known = refused.iter().filter_map(|volume| {
        let used = used_of(*volume)?;
        let (size, disk) = (view.size_of(*volume), disk_of(used)?);
        let held = Space {
            bytes: used.used_bytes,
            files: used.used_files,
        };
        Some((*volume, disk, disk.can_hold(size.saturating_sub(held))))
    });
    if let Some((volume, disk, _)) = known.clone().find(|(.., has_room)| !has_room) {
        let disk = Some(disk);
        return Some(Refusal { volume, disk });
    }
    let is_half_full =
        |volume: &VolumeIndex| may_be_half_full(view.size_of(*volume), used_of(*volume));
    let is_unknown = known.next().is_none() && !refused.iter().any(is_half_full);
    let volume = *refused.first().filter(|_| is_unknown)?;
    Some(Refusal { volume, disk: None })
}

/// Whether a volume of this size may have been half full at some time. Nobody knows it of a watched
/// one that was not measured at the end: its server ended the job because it was past its limit.
fn may_be_half_full(size: Space, used: Option<&VolumeUse>) -> bool {
    used.is_none_or(|used| {
        let is_unmeasured = used.has_no_counts && used.used_bytes == 0 && disk_of(used).is_none();
        // What a program removed before it ended may have filled the volume.
        is_unmeasured
            || used.used_bytes.max(used.written_bytes) >= size.bytes.div_ceil(2)
            || used.used_files.max(used.changes) >= size.files.div_ceil(2)
    })
}

/// What to add to the reason of a failure that a lack of space explains.
pub(crate) fn describe_full(view: View<'_>, job: JobIndex, report: &JobReport) -> String {
    let full = refused_for_space(view, job, report).into_iter();
    let names = full.map(|volume| format!("'{}'", view.graph.workflow.volume(volume).name));
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return String::new();
    }
    let names = names.join(" and ");
    let refusal = refused_by_disk(view, job, report);
    if let Some(server) = refusal.and_then(|refusal| node_of(view, job, refusal.volume)) {
        let node = view.fleet.name(server);
        return format!(
            " when volume {names} ran out of space without being full: the disk of node {node} \
             may be full; {}",
            remedy(view, DiskResource::Bytes)
        );
    }
    let full = refused_for_space(view, job, report);
    let lack = describe_too_small(view, &full);
    format!(" when volume {names} ran out of space: it {lack}")
}

/// Whether a disk that had no space so often may have it again in a moment.
pub(crate) fn may_pass(times: u32) -> bool {
    times <= PASSING_MAX
}

/// Why a node whose disk had no space so often is in quarantine.
pub(crate) fn quarantine_reason(view: View<'_>, times: u32) -> QuarantineReason {
    match times >= view.settings.environment_faults_max {
        true => QuarantineReason::DiskLongFull,
        false => QuarantineReason::DiskFull,
    }
}

/// Volumes of a job on a full disk.
#[derive(Debug, Default)]
pub(crate) struct VolumesOnFullDisk {
    /// Those that go, so that they are made elsewhere.
    pub(crate) leaving: Vec<(VolumeIndex, VolumeId)>,
    /// Whether others stay, which hold the job there.
    pub(crate) has_staying: bool,
}

/// Which volumes of a job go from a full disk: those that hold nobody's work. What an attempt left
/// half-written went when that ended, so they are as if no job had ever run. What was filled goes
/// when the disk was full twice: it crosses the link to home again.
pub(crate) fn find_leaving(view: View<'_>, job: JobIndex, server: ServerId) -> VolumesOnFullDisk {
    let node = view.fleet.get(server);
    let may_pass = node.is_some_and(|node| may_pass(node.full.times()));
    let mut found = VolumesOnFullDisk::default();
    for volume in view.scratch_written(job) {
        let Some((id, Some(on))) = view.volumes.scratch(volume) else {
            continue;
        };
        if on != server {
            continue;
        }
        let mut writers = view.graph.volume(volume).writers.iter();
        let is_empty = writers.all(|writer| view.graph.state(*writer) != JobState::Done);
        let mut uses = view.attempts.values().flat_map(|attempt| &attempt.uses);
        let is_used = uses.any(|used| used.id == id);
        let kind = &view.graph.workflow.volume(volume).kind;
        let is_filled = !matches!(kind, VolumeKind::Scratch { fill: None });
        match !is_empty || is_used || (is_filled && may_pass) {
            true => found.has_staying = true,
            false => found.leaving.push((volume, id)),
        }
    }
    found
}

/// Whether the disk of a node was full so often in a row that nobody waits for it any more when
/// nothing else goes on.
fn is_long_full(view: View<'_>, server: ServerId) -> bool {
    let node = view.fleet.get(server);
    node.is_some_and(|node| node.full.times() >= view.settings.environment_faults_max)
}

/// Whether a job that begins on a node, and lets these make volumes, tells if the node's disk
/// has space again.
pub(crate) fn is_probe(
    view: View<'_>,
    job: JobIndex,
    server: ServerId,
    made_on: &BTreeSet<ServerId>,
) -> bool {
    let full = view.fleet.get(server).map(|node| &node.full);
    full.is_some_and(|full| {
        full.for_volumes > 0 && made_on.contains(&server)
            || full.for_writers > 0 && written_nodes(view, job).contains(&server)
    })
}

/// Where the scratch volumes are that a job writes.
pub(crate) fn written_nodes(view: View<'_>, job: JobIndex) -> BTreeSet<ServerId> {
    let written = view.scratch_written(job).into_iter();
    let servers = written.filter_map(|volume| view.volumes.scratch(volume)?.1);
    servers.collect()
}

impl State {
    /// What to tell when nothing goes on because all nodes that could run these jobs have had full
    /// disks for long.
    pub(crate) fn describe_full_disks(&self, waiting: &[JobIndex]) -> Option<String> {
        let mut nodes: Vec<ServerId> = Vec::new();
        for &job in waiting {
            let (need, slots) = (self.need_of(job), self.slots_of(job));
            let refused_by = &self.graph.job(job).failure_history.refused_by;
            let able = self.fleet.live().filter(|(id, node)| {
                node.seen.slots >= slots
                    && !refused_by.contains(id)
                    && self.can_ever_hold(job, *id, need)
            });
            let able: Vec<ServerId> = able.map(|(id, _)| id).collect();
            let first = *able.first()?;
            if !able.into_iter().all(|id| is_long_full(View::new(self), id)) {
                return None;
            }
            if !nodes.contains(&first) {
                nodes.push(first);
            }
        }
        let server = *nodes.first()?;
        let name = |job: &JobIndex| format!("'{}'", self.graph.workflow.job(*job).name);
        let names: Vec<String> = waiting.iter().take(NAMES_SHOWN).map(name).collect();
        let left = self.graph.workflow.jobs.len() as u64 - self.graph.finals();
        let more = match left.saturating_sub(names.len() as u64) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let node = self.fleet.get(server)?;
        Some(format!(
            "no node can run job {}{more}: the disk of node {} was full {} times in a row (last: \
             {}); {}; then {}",
            names.join(", "),
            self.fleet.name(server),
            node.full.times(),
            node.full.why,
            remedy(View::new(self), node.full.lacks),
            rerun_hint(View::new(self))
        ))
    }
}

/// What a user can do about a full disk.
pub(crate) fn remedy(view: View<'_>, lacks: DiskResource) -> &'static str {
    match (view.settings.cluster, lacks) {
        (ClusterLifetime::BeyondRun, DiskResource::Bytes) => {
            "free some of it, or start the node with a smaller --size"
        }
        (ClusterLifetime::BeyondRun, DiskResource::Inodes) => {
            "remove files from its disk, or start the node on another disk"
        }
        (ClusterLifetime::OneRun, DiskResource::Bytes) => {
            "free some of it, or give a smaller --node-size"
        }
        (ClusterLifetime::OneRun, DiskResource::Inodes) => {
            "remove files from it, or set TMPDIR to a directory on another disk"
        }
    }
}

/// What a user can do when the run has ended.
fn rerun_hint(view: View<'_>) -> &'static str {
    match view.settings.cluster {
        ClusterLifetime::BeyondRun => {
            "repeat the command: it runs what is not done; results at home are kept"
        }
        ClusterLifetime::OneRun => "run it again",
    }
}

/// A number with commas between its thousands.
fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let with_comma = |(at, digit): (usize, char)| {
        let comma = (at > 0 && at % 3 == first).then_some(',');
        [comma, Some(digit)]
    };
    let shown = digits.chars().enumerate().flat_map(with_comma);
    shown.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_without_inodes_lacks_files() {
        let space = |bytes, files| Space { bytes, files };
        let size = space(1_000, 10);
        let lacks = [(0, 20), (5_000, 9), (900, 9), (5_000, 0), (0, 0)]
            .map(|(bytes, files)| lacking_resource(size, space(bytes, files)));
        use DiskResource::{Bytes, Inodes};
        assert_eq!(lacks, [Bytes, Inodes, Bytes, Inodes, Inodes]);
    }

    #[test]
    fn large_numbers_have_commas() {
        let shown = [0, 12, 999, 1_000, 1_400, 12_345, 123_456, 1_234_567].map(with_commas);
        let expected = [
            "0",
            "12",
            "999",
            "1,000",
            "1,400",
            "12,345",
            "123,456",
            "1,234,567",
        ];
        assert_eq!(shown, expected);
    }
    #[test]
    fn unmeasured_watched_volume_blames_no_disk() {
        let size = Space {
            bytes: 100,
            files: 100,
        };
        let counted = VolumeUse::default();
        let watched = VolumeUse {
            has_no_counts: true,
            changes: 1,
            ..VolumeUse::default()
        };
        let measured = VolumeUse {
            used_bytes: 7,
            ..watched.clone()
        };
        let full = VolumeUse {
            used_bytes: 50,
            ..watched.clone()
        };
        let may = |used| may_be_half_full(size, used);
        assert!(may(None) && may(Some(&watched)) && may(Some(&full)));
        assert!(!may(Some(&counted)) && !may(Some(&measured)));
    }
}
