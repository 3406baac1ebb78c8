//! Which jobs wait for a job beside its children: those whose use of a volume comes after its own.
//! In a run without losses that says nothing new, as jobs between them are declared. But when a
//! job runs again and those between need not, nothing else would keep the later ones back.

use bafs_workflow::{JobIndex, OrderSearch, VolumeIndex, VolumeKind, Workflow};

/// For each job the jobs, other than its children, that start only when it is done.
pub(crate) fn followers(workflow: &Workflow, rank: &[u32]) -> Vec<Vec<JobIndex>> {
    let mut pairs = Vec::new();
    for (position, volume) in workflow.volumes.iter().enumerate() {
        if matches!(volume.kind, VolumeKind::Scratch { .. }) {
            let volume = VolumeIndex(u32::try_from(position).expect("indexes have 32 bits"));
            pairs.extend(pairs_of(workflow, volume, rank));
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
    let mut followers = vec![Vec::new(); workflow.jobs.len()];
    let mut search = None;
    for (earlier, later) in pairs {
        if workflow.job(later).parents.binary_search(&earlier).is_ok() {
            continue;
        }
        // Users of a volume that is filled from a home need not be in an order.
        let search = search.get_or_insert_with(|| OrderSearch::new(&workflow.jobs));
        if search.is_before(earlier, later) == Ok(true) {
            followers[earlier.as_usize()].push(later);
        }
    }
    followers
}

/// Users of a volume that follow each other: each writer and what reads it until the next writer,
/// these and that next writer, writer and next writer. Who comes later than that waits for one of
/// those, which run again together with the first.
fn pairs_of(workflow: &Workflow, volume: VolumeIndex, rank: &[u32]) -> Vec<(JobIndex, JobIndex)> {
    let writes = |job: JobIndex| {
        let mut mounts = workflow.job(job).mounts.iter();
        mounts.any(|mount| mount.volume == volume && mount.writable)
    };
    let mut users = workflow.volume(volume).users.clone();
    users.sort_unstable_by_key(|job| rank[job.as_usize()]);
    let mut pairs = Vec::new();
    let (mut writer, mut readers) = (None, Vec::new());
    for user in users {
        pairs.extend(writer.map(|writer| (writer, user)));
        if writes(user) {
            pairs.extend(readers.drain(..).map(|reader| (reader, user)));
            writer = Some(user);
        } else {
            readers.push(user);
        }
    }
    pairs
}
