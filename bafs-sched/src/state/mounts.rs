//! The volumes of each job, found once: a job that gathers from all others is asked for its volumes
//! whenever one of these is done. Knows no states.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bafs_workflow::{Job, JobIndex, VolumeIndex, Workflow};

/// So few mounts of a job are compared with each other.
const MOUNTS_FEW: usize = 16;

/// A volume, and whether the job may write it.
type MountAccess = (VolumeIndex, bool);

/// The volumes of all jobs, one job after the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mounts {
    all: Arc<[MountAccess]>,
    /// Where those of each job end.
    ends: Vec<u32>,
}

/// The volumes of a job, each once. It borrows nothing, so that what it names may be changed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Mounted {
    all: Arc<[MountAccess]>,
    range: Range<usize>,
}

/// [`Mounted`], one after the other.
pub(crate) struct Each(Mounted);

impl Mounts {
    pub(crate) fn new(workflow: &Workflow) -> Self {
        let (mut all, mut ends) = (Vec::new(), Vec::with_capacity(workflow.jobs.len()));
        for job in &workflow.jobs {
            add(&mut all, job);
            ends.push(u32::try_from(all.len()).expect("a workflow has fewer mounts"));
        }
        let all = all.into();
        Self { all, ends }
    }

    pub(crate) fn of(&self, job: JobIndex) -> Mounted {
        let at = job.as_usize();
        let from = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        Mounted {
            all: Arc::clone(&self.all),
            range: from as usize..self.ends[at] as usize,
        }
    }
}

fn add(all: &mut Vec<MountAccess>, job: &Job) {
    let first = all.len();
    // Of the many of a job that gathers from all others nobody is looked for one by one.
    let mut known = BTreeMap::new();
    for mount in &job.mounts {
        let at = match job.mounts.len() <= MOUNTS_FEW {
            true => {
                let mut own = all[first..].iter();
                let at = own.position(|(volume, _)| *volume == mount.volume);
                at.map(|at| first + at)
            }
            false => {
                let next = all.len();
                let at = *known.entry(mount.volume).or_insert(next);
                (at < next).then_some(at)
            }
        };
        match at {
            Some(at) => all[at].1 |= mount.writable,
            None => all.push((mount.volume, mount.writable)),
        }
    }
}

impl Deref for Mounted {
    type Target = [MountAccess];

    fn deref(&self) -> &[MountAccess] {
        &self.all[self.range.clone()]
    }
}

impl IntoIterator for Mounted {
    type Item = MountAccess;
    type IntoIter = Each;

    fn into_iter(self) -> Each {
        Each(self)
    }
}

impl Iterator for Each {
    type Item = MountAccess;

    fn next(&mut self) -> Option<MountAccess> {
        let at = self.0.range.next()?;
        Some(self.0.all[at])
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.range.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    /// However many there are.
    #[test]
    fn repeated_mounts_of_a_volume_are_merged() {
        for count in [3, 40] {
            let mut text = String::from("job i {\nexecutable = x\n}\njob j {\nexecutable = x\n}\n");
            for volume in 0..count {
                text += &format!(
                    "volume v{volume} scratch 1 MB from bafs://h/v\n\
                     mount v{volume} j /a{volume:02} ro\n"
                );
            }
            text += "mount v1 j /again\nmount v2 j /more ro\nmount v2 i /i\n";
            let none = |_: &str| Err("no files".to_owned());
            let parsed = parse_workflow("w.bafs", &text, &none).expect("it parses");
            let mounts = Mounts::new(&parsed.workflow);
            assert_eq!(mounts.of(JobIndex(0))[..], [(VolumeIndex(2), true)]);
            let mounted = mounts.of(JobIndex(1));
            let expected = (0..count).map(|volume| (VolumeIndex(volume), volume == 1));
            assert_eq!(mounted[..], expected.clone().collect::<Vec<_>>());
            assert!(mounted.into_iter().eq(expected));
        }
    }
}
