//! The course of each pipeline: an order of its jobs that needs little space at once, and what
//! space it still needs from each job on. Knows no servers.

use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::cache_parts::floor;
use crate::state::recorded::kept;

/// Pipelines with so many jobs are also ordered job by job, by what each leaves; that takes time
/// in the square of their number.
const CAREFUL_JOBS_MAX: usize = 64;

/// What a pipeline still needs on a node, beyond the volumes that exist.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RemainingNeed {
    /// With the least part of each cache that lets its readers run.
    pub(crate) least: Space,
    /// With whole caches, as if no other node had a part of them.
    pub(crate) whole: Space,
}

impl RemainingNeed {
    pub(crate) fn most(self, other: Self) -> Self {
        Self {
            least: self.least.component_max(other.least),
            whole: self.whole.component_max(other.whole),
        }
    }
}

/// All courses. Whoever goes on with a pipeline from its first job that has not begun, in this
/// order, needs no more than `rest` beyond the volumes that exist.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Courses {
    /// The jobs, those of one pipeline one after the other.
    jobs: Vec<JobIndex>,
    /// Where each job is in `jobs`.
    position: Vec<u32>,
    /// What is needed beyond what exists to go on from each position to the end of its course.
    rest: Vec<RemainingNeed>,
    /// By pipeline: where in `jobs` its course begins and ends.
    span: Vec<(u32, u32)>,
    /// By pipeline: the first position whose job has not begun.
    frontier: Vec<u32>,
    /// The most of `rest`, in each respect.
    pub(crate) most: RemainingNeed,
}

kept! {
    /// What was written of the courses.
    CourseChanges of Courses;
    values { most: RemainingNeed }
    tables {}
    indexed {}
    parts {}
    rebuilt { jobs, position, rest, span, frontier }
}

impl Courses {
    /// Courses of all pipelines; `pipeline` has that of each job, `order` all jobs, parents first.
    pub(crate) fn new(workflow: &Workflow, pipeline: &[u32], order: &[JobIndex]) -> Self {
        let count = workflow.jobs.len();
        let mut members: Vec<Vec<JobIndex>> = vec![Vec::new(); count];
        for job in order {
            members[pipeline[job.as_usize()] as usize].push(*job);
        }
        let mut meter = Meter::new(workflow);
        let mut courses = Self {
            jobs: Vec::with_capacity(count),
            position: vec![0; count],
            rest: Vec::with_capacity(count),
            span: vec![(0, 0); count],
            frontier: vec![0; count],
            most: RemainingNeed::default(),
        };
        for (name, members) in members.into_iter().enumerate() {
            let start = at(courses.jobs.len());
            let course = meter.best(members);
            courses.rest.extend(meter.rests(&course));
            for job in course {
                courses.position[job.as_usize()] = at(courses.jobs.len());
                courses.jobs.push(job);
            }
            courses.span[name] = (start, at(courses.jobs.len()));
            courses.frontier[name] = start;
        }
        let most = courses.rest.iter().copied();
        courses.most = most.fold(RemainingNeed::default(), RemainingNeed::most);
        courses
    }

    /// Sizes of volumes of one pipeline changed: its course is found anew among `members`, which
    /// come parents first. `most` never falls.
    pub(crate) fn measure(
        &mut self,
        workflow: &Workflow,
        pipeline: u32,
        members: Vec<JobIndex>,
        has_begun: impl Fn(JobIndex) -> bool,
    ) {
        let (start, end) = self.span[pipeline as usize];
        let mut meter = Meter::new(workflow);
        let course = meter.best(members);
        let rests = meter.rests(&course);
        for (position, (job, rest)) in (start..end).zip(course.into_iter().zip(rests)) {
            self.jobs[position as usize] = job;
            self.position[job.as_usize()] = position;
            self.rest[position as usize] = rest;
            self.most = self.most.most(rest);
        }
        let is_left = |position: &u32| !has_begun(self.jobs[*position as usize]);
        self.frontier[pipeline as usize] = (start..end).find(is_left).unwrap_or(end);
    }

    /// The jobs of a pipeline in the order of its course.
    pub(crate) fn of(&self, pipeline: u32) -> &[JobIndex] {
        let (start, end) = self.span[pipeline as usize];
        &self.jobs[start as usize..end as usize]
    }

    /// The space that a whole pipeline needs at once, when it is run by its course.
    pub(crate) fn peak(&self, pipeline: u32) -> Space {
        self.peaks(pipeline).least
    }

    /// The same, also with whole caches.
    pub(crate) fn peaks(&self, pipeline: u32) -> RemainingNeed {
        self.rest_from(pipeline, self.span[pipeline as usize].0)
    }

    /// A job has begun, or is not begun any more; `has_begun` tells of every job, this one as it
    /// is now.
    pub(crate) fn moved(
        &mut self,
        pipeline: u32,
        job: JobIndex,
        has_begun: impl Fn(JobIndex) -> bool,
    ) {
        let position = self.position[job.as_usize()];
        let frontier = self.frontier[pipeline as usize];
        self.frontier[pipeline as usize] = match has_begun(job) {
            true if position == frontier => self.next(pipeline, position, has_begun),
            true => frontier,
            false => frontier.min(position),
        };
    }

    /// What a pipeline needs beyond what exists once `job` has begun.
    pub(crate) fn rest_with(
        &self,
        pipeline: u32,
        job: JobIndex,
        has_begun: impl Fn(JobIndex) -> bool,
    ) -> RemainingNeed {
        let mut frontier = self.frontier[pipeline as usize];
        if self.position[job.as_usize()] == frontier {
            frontier = self.next(pipeline, frontier, has_begun);
        }
        self.rest_from(pipeline, frontier)
    }

    /// What a pipeline needs beyond what exists.
    pub(crate) fn rest(&self, pipeline: u32) -> RemainingNeed {
        self.rest_from(pipeline, self.frontier[pipeline as usize])
    }

    /// The first job of a pipeline that has not begun.
    pub(crate) fn next_of(&self, pipeline: u32) -> Option<JobIndex> {
        let frontier = self.frontier[pipeline as usize];
        let is_left = frontier < self.span[pipeline as usize].1;
        is_left.then(|| self.jobs[frontier as usize])
    }

    fn rest_from(&self, pipeline: u32, frontier: u32) -> RemainingNeed {
        let is_left = frontier < self.span[pipeline as usize].1;
        let rest = is_left.then(|| self.rest[frontier as usize]);
        rest.unwrap_or_default()
    }

    fn next(&self, pipeline: u32, from: u32, has_begun: impl Fn(JobIndex) -> bool) -> u32 {
        let end = self.span[pipeline as usize].1;
        let mut behind = from + 1..end;
        let first = behind.find(|position| !has_begun(self.jobs[*position as usize]));
        first.unwrap_or(end)
    }
}

/// Counts what exists while jobs run one after the other.
struct Meter<'w> {
    workflow: &'w Workflow,
    /// Of each scratch volume that exists, users that have not run; 0 of all others. Back to zero
    /// at the end of each course.
    left: Vec<u32>,
}

/// What one job does to the space.
#[derive(Clone, Copy, Default)]
struct Change {
    /// Created before it starts.
    made: Space,
    /// Freed when it is done.
    freed: Space,
    /// Of caches, the least that its node must have a part of.
    cached: Space,
    /// Its caches as a whole.
    caches: Space,
}

impl<'w> Meter<'w> {
    fn new(workflow: &'w Workflow) -> Self {
        let left = vec![0; workflow.volumes.len()];
        Self { workflow, left }
    }

    /// The order of these jobs with the lowest peak of a few that are tried.
    fn best(&mut self, declared: Vec<JobIndex>) -> Vec<JobIndex> {
        if declared.len() < 3 {
            return declared;
        }
        let peak = |meter: &mut Self, order: &[JobIndex]| {
            let rests = meter.rests(order);
            rests.first().map(|rest| rest.least).unwrap_or_default()
        };
        let lowest = peak(self, &declared);
        // No order needs less than its most demanding job.
        let floor = declared.iter().map(|job| self.mounted(*job)).max();
        if Some(lowest) <= floor {
            return declared;
        }
        let mut best = (lowest, declared);
        let mut others = vec![self.depth_first(&best.1)];
        if best.1.len() <= CAREFUL_JOBS_MAX {
            others.push(self.least_left(&best.1));
        }
        for order in others {
            let peak = peak(self, &order);
            if peak < best.0 {
                best = (peak, order);
            }
        }
        best.1
    }

    /// What is needed beyond what exists from each job on.
    fn rests(&mut self, order: &[JobIndex]) -> Vec<RemainingNeed> {
        let mut live = Space::ZERO;
        let mut rests = Vec::with_capacity(order.len());
        let mut uses = Vec::with_capacity(order.len());
        for &job in order {
            let change = self.run(job);
            let made = live.saturating_add(change.made);
            uses.push((
                live,
                made.saturating_add(change.cached),
                made.saturating_add(change.caches),
            ));
            live = made.saturating_sub(change.freed);
        }
        let (mut least, mut whole) = (Space::ZERO, Space::ZERO);
        for (before, used, with_caches) in uses.into_iter().rev() {
            (least, whole) = (least.component_max(used), whole.component_max(with_caches));
            rests.push(RemainingNeed {
                least: least.saturating_sub(before),
                whole: whole.saturating_sub(before),
            });
        }
        rests.reverse();
        rests
    }

    /// Every job after all that it needs, and those right before it.
    fn depth_first(&self, declared: &[JobIndex]) -> Vec<JobIndex> {
        let mut order = Vec::with_capacity(declared.len());
        let mut seen = std::collections::BTreeSet::new();
        let of_here: std::collections::BTreeSet<JobIndex> = declared.iter().copied().collect();
        for &last in declared {
            let job = self.workflow.job(last);
            if job.children.iter().any(|child| of_here.contains(child)) {
                continue;
            }
            let mut stack = vec![(last, false)];
            while let Some((job, is_entered)) = stack.pop() {
                if is_entered {
                    order.push(job);
                } else if seen.insert(job) {
                    stack.push((job, true));
                    let parents = self.workflow.job(job).parents.iter().rev();
                    let here = parents.filter(|parent| of_here.contains(parent));
                    stack.extend(here.map(|parent| (*parent, false)));
                }
            }
        }
        // A job of which only jobs of other pipelines depend is its own end.
        order.extend(declared.iter().filter(|job| !seen.contains(job)));
        match self.is_in_order(&order) {
            true => order,
            false => declared.to_vec(),
        }
    }

    /// At each point the job that leaves least, as far as one job sees.
    fn least_left(&mut self, declared: &[JobIndex]) -> Vec<JobIndex> {
        let mut waiting = declared.to_vec();
        let mut order = Vec::with_capacity(waiting.len());
        while !waiting.is_empty() {
            let is_waiting = |job: &JobIndex| waiting.contains(job);
            let ready = |position: &usize| {
                let job = self.workflow.job(waiting[*position]);
                !job.parents.iter().any(is_waiting)
            };
            let ready: Vec<usize> = (0..waiting.len()).filter(ready).collect();
            let leaves = |meter: &mut Self, position: usize| {
                let (change, before) = (meter.look(waiting[position]), Space::ZERO);
                let grown = before
                    .saturating_add(change.made)
                    .bytes
                    .saturating_sub(change.freed.bytes);
                let shrunk = change.freed.bytes.saturating_sub(change.made.bytes);
                (grown, std::cmp::Reverse(shrunk), change.made.bytes)
            };
            let best = ready
                .into_iter()
                .min_by_key(|position| leaves(self, *position));
            let job = waiting.remove(best.unwrap_or(0));
            self.run(job);
            order.push(job);
        }
        order
    }

    fn is_in_order(&self, order: &[JobIndex]) -> bool {
        let mut done = std::collections::BTreeSet::new();
        let here: std::collections::BTreeSet<JobIndex> = order.iter().copied().collect();
        order.iter().all(|job| {
            let parents = self.workflow.job(*job).parents.iter();
            let is_fine = parents
                .filter(|parent| here.contains(parent))
                .all(|parent| done.contains(parent));
            done.insert(*job);
            is_fine
        })
    }

    /// What a job has mounted, in sum.
    fn mounted(&self, job: JobIndex) -> Space {
        let volumes = self.volumes(job).into_iter();
        volumes.fold(Space::ZERO, |sum, (volume, is_scratch)| match is_scratch {
            true => sum.saturating_add(self.size(volume)),
            false => sum.saturating_add(floor(self.size(volume))),
        })
    }

    fn run(&mut self, job: JobIndex) -> Change {
        let change = self.look(job);
        for (volume, is_scratch) in self.volumes(job) {
            if is_scratch {
                let users = at(self.workflow.volume(volume).users.len());
                let left = &mut self.left[volume.as_usize()];
                *left = if *left == 0 { users } else { *left } - 1;
            }
        }
        change
    }

    fn look(&self, job: JobIndex) -> Change {
        let mut change = Change::default();
        for (volume, is_scratch) in self.volumes(job) {
            let size = self.size(volume);
            let users = at(self.workflow.volume(volume).users.len());
            let left = self.left[volume.as_usize()];
            if !is_scratch {
                change.cached = change.cached.saturating_add(floor(size));
                change.caches = change.caches.saturating_add(size);
                continue;
            }
            if left == 0 {
                change.made = change.made.saturating_add(size);
            }
            if left == 1 || users == 1 {
                change.freed = change.freed.saturating_add(size);
            }
        }
        change
    }

    /// The volumes of a job, each once, with whether they are scratch volumes.
    fn volumes(&self, job: JobIndex) -> Vec<(VolumeIndex, bool)> {
        let mut volumes: Vec<(VolumeIndex, bool)> = Vec::new();
        for mount in &self.workflow.job(job).mounts {
            if !volumes.iter().any(|(volume, _)| *volume == mount.volume) {
                let kind = &self.workflow.volume(mount.volume).kind;
                let is_scratch = matches!(kind, VolumeKind::Scratch { .. });
                volumes.push((mount.volume, is_scratch));
            }
        }
        volumes
    }

    fn size(&self, volume: VolumeIndex) -> Space {
        let spec = self.workflow.volume(volume);
        Space {
            bytes: spec.size_bytes,
            files: spec.size_files,
        }
    }
}

fn at(length: usize) -> u32 {
    u32::try_from(length).expect("the workflow's own indexes have 32 bits")
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    fn workflow(text: &str) -> Workflow {
        let none = |path: &str| Err(path.to_owned());
        let text = text.replace("JOB", "{\n  executable = x\n}");
        parse_workflow("w.bafs", &text, &none)
            .expect("it is right")
            .workflow
    }

    fn courses(workflow: &Workflow) -> Courses {
        let order = workflow.topological_order();
        Courses::new(workflow, &vec![0; workflow.jobs.len()], &order)
    }

    const CHAIN: &str = "job a JOB\njob b JOB\njob c JOB\nparent a child b\nparent b child c\n\
        volume x scratch 10 MB files 1\nvolume y scratch 50 MB files 2\n\
        volume z scratch 20 MB files 3\nmount x a /x\nmount x b /x ro\nmount y b /y\n\
        mount y c /y ro\nmount z c /z\n";

    #[test]
    fn remaining_need_of_a_chain_decreases() {
        let workflow = workflow(CHAIN);
        let courses = courses(&workflow);
        let megabytes: Vec<u64> = courses
            .rest
            .iter()
            .map(|rest| rest.least.bytes / 1_000_000)
            .collect();
        // a: 10, then 10 + 50, then 50 + 20.
        assert_eq!(megabytes, [70, 60, 20]);
        assert_eq!(courses.peak(0).files, 5);
    }

    #[test]
    fn started_jobs_need_space_again_only_when_undone() {
        let workflow = workflow(CHAIN);
        let mut courses = courses(&workflow);
        courses.moved(0, JobIndex(0), |job| job.0 == 0);
        assert_eq!(courses.rest(0).least.bytes, 60_000_000);
        let rest = courses.rest_with(0, JobIndex(1), |job| job.0 == 0);
        assert_eq!(rest.least.bytes, 20_000_000);
        courses.moved(0, JobIndex(0), |_| false);
        assert_eq!(courses.rest(0).least.bytes, 70_000_000);
    }

    #[test]
    fn need_counts_both_least_part_and_whole_cache() {
        let text = "volume d cache bafs://h/d 40 MB files 9\nmount d c /d\n";
        let workflow = workflow(&(CHAIN.to_owned() + text));
        let courses = courses(&workflow);
        let whole = courses.rest.iter().map(|rest| rest.whole.bytes / 1_000_000);
        // c: 50 + 20 + 40.
        assert_eq!(whole.collect::<Vec<_>>(), [110, 100, 60]);
        assert!(courses.rest(0).least.bytes < 80_000_000);
        assert_eq!(courses.rest(0).least.files, 14);
    }

    /// Two branches that each need much at once and leave little: one after the other.
    #[test]
    fn job_order_runs_branches_one_by_one() {
        let mut text = String::from("job end JOB\n");
        for branch in 0..4 {
            text += &format!(
                "job a{branch} JOB\njob b{branch} JOB\nparent a{branch} child b{branch}\n\
                 parent b{branch} child end\nvolume t{branch} scratch 90 MB files 1\n\
                 volume r{branch} scratch 1 MB files 1\nmount t{branch} a{branch} /t\n\
                 mount t{branch} b{branch} /t ro\nmount r{branch} b{branch} /r\n\
                 mount r{branch} end /r{branch} ro\n"
            );
        }
        let branched = workflow(&text);
        let all = courses(&branched);
        assert_eq!(all.peak(0).bytes, 94_000_000);
        let names: Vec<&str> = all
            .of(0)
            .iter()
            .map(|job| &*branched.job(*job).name)
            .collect();
        assert_eq!(names.last(), Some(&"end"));
    }
}
