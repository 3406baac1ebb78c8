//! Sizes that are too small: doubled when a job found no space, for all of their like that have not
//! begun; declared ones once, others as long as a node has more. What nobody declared is measured
//! by `policy/failure/sizes.rs`; whether it was the disk of the node that had no space says
//! `policy/failure/full_disk.rs`.

use bafs_proto::ErrorClass;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::describe;
use crate::space::Space;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
use crate::state::volume_sizes::{Offered, Taught};

/// A volume with its size and a larger one.
type Growth = (VolumeIndex, Space, Space);

/// Of which pipelines which volumes are made larger.
struct Lesson {
    /// Sizes of the scratch volumes of each job.
    kind: Vec<Vec<Space>>,
    /// Positions of jobs, places among their volumes, sizes before and after.
    places: Vec<(usize, usize, Space, Space)>,
}

/// Into so many parts a growth is divided where not all of it fits.
const GROWTH_PARTS: u64 = 4;

impl State {
    /// Whether a job that failed found no space in a volume that it may write: its environment
    /// says so, or it ended by itself after calls that failed for that.
    pub(crate) fn found_no_space(&self, job: JobIndex, report: &JobReport) -> bool {
        match &report.outcome {
            JobOutcome::EnvironmentFailed(error) => error.class() == ErrorClass::NoSpace,
            // It does not begin where its output finds no place.
            JobOutcome::Exited(_) | JobOutcome::Signaled(_) | JobOutcome::NotStarted(_) => {
                !self.refused_for_space(job, report).is_empty()
            }
            JobOutcome::Killed => false,
        }
    }

    /// Scratch volumes that a job may write and in which calls of it failed for lack of space.
    /// Where nothing is counted the disk tells that, as it was at the least.
    pub(crate) fn refused_for_space(&self, job: JobIndex, report: &JobReport) -> Vec<VolumeIndex> {
        let is_refused = |volume: &VolumeIndex| {
            let name = &self.graph.workflow.volume(*volume).name;
            let mut used = report.volumes.iter().filter(|used| used.name == *name);
            used.any(|used| used.no_space_errors > 0 || self.met_full_disk(*volume, used, report))
        };
        let mut written = self.scratch_written(job);
        written.retain(is_refused);
        written
    }

    /// Scratch volumes that a job may write.
    pub(crate) fn scratch_written(&self, job: JobIndex) -> Vec<VolumeIndex> {
        if self.settings.has_private_data_at_home() {
            return Vec::new();
        }
        let mounted = self.graph.mounted(job).into_iter();
        let written = mounted
            .filter(|(volume, is_writable)| *is_writable && !self.graph.volume(*volume).is_cache);
        written.map(|(volume, _)| volume).collect()
    }

    /// A job found no space. Its volumes are made larger, and it runs again; answers whether it
    /// does. What was declared is made larger once.
    pub(crate) fn grow(&mut self, job: JobIndex, report: &JobReport) -> bool {
        let changes = self.growths(job, report);
        let pipeline = self.graph.pipeline(job);
        let kind = self.kind(pipeline);
        let Some(changes) = self.resize_to_fit(pipeline, changes) else {
            return false;
        };
        let lesson = self.lesson(pipeline, kind, &changes);
        self.teach(lesson);
        self.abandon_attempt(job);
        for &(volume, before, after) in &changes {
            if let Some((id, _)) = self.volumes.scratch(volume) {
                self.retire(id);
                self.take_back_extracts(volume, id);
            }
            // They are no larger than it was.
            self.drop_copies(volume);
            self.sizes.grown.insert(volume);
            let name = &self.graph.workflow.volume(volume).name;
            let job_name = &self.graph.workflow.job(job).name;
            let (before, after) = (describe(before), describe(after));
            let text = match self.sizes.is_undeclared(volume) {
                true => format!(
                    "job '{job_name}' ran out of space in volume '{name}' of unknown size \
                     ({before} reserved): it runs again with {after}"
                ),
                false => format!(
                    "job '{job_name}' ran out of space in volume '{name}' of {before}: it runs \
                     again once with {after}; declare a larger size"
                ),
            };
            self.tell(RunWarning {
                job: Some(job),
                volume: Some(volume),
                node: None,
                text,
            });
        }
        self.raise_measured(&changes);
        let volumes = changes.into_iter().map(|(volume, ..)| volume).collect();
        self.redo(Vec::new(), volumes);
        self.settle(job, 0);
        true
    }

    /// Volumes of a job that found no space, with their sizes and larger ones: those in which it
    /// found none, else those that are nearly full, else all that it may write, unless they were
    /// declared and made larger before.
    fn growths(&self, job: JobIndex, report: &JobReport) -> Vec<Growth> {
        let mounted = self.graph.mounted(job).into_iter();
        let is_scratch = |(volume, writable): &(VolumeIndex, bool)| {
            *writable && !self.graph.volume(*volume).is_cache && self.may_grow(*volume)
        };
        let all: Vec<VolumeIndex> = mounted
            .filter(is_scratch)
            .map(|(volume, _)| volume)
            .collect();
        let is_full = |volume: &VolumeIndex| {
            let (size, spec) = (self.size_of(*volume), self.graph.workflow.volume(*volume));
            let mut used = report.volumes.iter().filter(|used| used.name == spec.name);
            used.any(|used| {
                used.used_bytes >= size.bytes - size.bytes / 10
                    || used.used_files >= size.files - size.files / 10
            })
        };
        let refused = self.refused_for_space(job, report);
        let volumes: Vec<VolumeIndex> = if !refused.is_empty() {
            all.into_iter().filter(|v| refused.contains(v)).collect()
        } else if all.iter().any(is_full) {
            all.into_iter().filter(is_full).collect()
        } else {
            all
        };
        let largest = self.largest_offered();
        let offered = Offered {
            largest,
            ..self.offered()
        };
        let larger = |volume: VolumeIndex| {
            let size = self.size_of(volume);
            let kind = self.sizes.kind_of.get(&volume);
            // Where nodes were small when its size was made up, or one was measured that needs less
            // than others, twice that says little.
            let made_up = kind.map(|kind| self.made_up(*kind, offered));
            let twice = size
                .saturating_add(size)
                .component_max(made_up.unwrap_or_default());
            twice.component_min(largest).component_max(size)
        };
        let grows = |volume: &VolumeIndex| larger(*volume) != self.size_of(*volume);
        let volumes: Vec<VolumeIndex> = volumes.into_iter().filter(grows).collect();
        let change = |volume: VolumeIndex| {
            let before = self.size_of(volume);
            (volume, before, larger(volume))
        };
        volumes.into_iter().map(change).collect()
    }

    /// Whether a volume may be made larger: a declared size once, as more would be a guess.
    fn may_grow(&self, volume: VolumeIndex) -> bool {
        self.sizes.is_undeclared(volume) || !self.sizes.grown.contains(&volume)
    }

    /// What a job lacks that found too little space in these volumes.
    pub(crate) fn describe_too_small(&self, volumes: &[VolumeIndex]) -> String {
        let is_undeclared = |volume: &VolumeIndex| self.sizes.is_undeclared(*volume);
        if volumes.is_empty() || !volumes.iter().all(is_undeclared) {
            return "needs a larger volume than declared".to_owned();
        }
        let had = volumes.iter().map(|volume| self.size_of(*volume));
        let had = had.fold(Space::ZERO, Space::component_max);
        format!(
            "needs more than {}, but its pipeline does not fit on these nodes with a larger \
             volume; add storage",
            describe(had)
        )
    }

    /// What a pipeline of this `kind` was before some of its volumes were made larger.
    fn lesson(&self, pipeline: u32, kind: Vec<Vec<Space>>, changes: &[Growth]) -> Lesson {
        let mut places = Vec::new();
        for (position, job) in self.graph.courses.of(pipeline).iter().enumerate() {
            for (place, volume) in self.scratch_of(*job).into_iter().enumerate() {
                let change = changes.iter().find(|(changed, ..)| *changed == volume);
                places.extend(change.map(|(_, before, after)| (position, place, *before, *after)));
            }
        }
        Lesson { kind, places }
    }

    /// Pipelines that have not begun and are like one of which volumes proved too small get larger
    /// ones too, or each would find that out by failing.
    fn teach(&mut self, lesson: Lesson) {
        let Lesson { kind, places } = lesson;
        let length = kind.len();
        let taught = places.iter().map(|(position, place, before, _)| {
            let taught: Taught = (length, *position, *place, *before);
            taught
        });
        let taught: Vec<Taught> = taught.collect();
        let mut is_new = false;
        for taught in taught {
            is_new |= self.sizes.taught.insert(taught);
        }
        // All of its like are looked at once.
        if !is_new {
            return;
        }
        let has_begun = |job| self.graph.state(job).has_begun();
        let is_alike = |pipeline: &u32| {
            let is_first = self.graph.pipeline(JobIndex(*pipeline)) == *pipeline;
            is_first
                && self.graph.courses.of(*pipeline).len() == length
                && !self.graph.members(*pipeline).any(has_begun)
                && self.kind(*pipeline) == kind
        };
        let heads = self.graph.job_indexes().map(|job| job.0);
        let alike: Vec<u32> = heads.filter(is_alike).collect();
        for pipeline in alike {
            for &(position, place, _, after) in &places {
                let job = self.graph.courses.of(pipeline)[position];
                let volume = self.scratch_of(job)[place];
                if self.may_grow(volume) && after.can_hold(self.size_of(volume)) {
                    self.resize(volume, after);
                    // As for the first of them, once; what is measured may be less.
                    if !self.sizes.is_undeclared(volume) {
                        self.sizes.grown.insert(volume);
                    }
                }
            }
            self.graph.measure_course(pipeline);
            self.enqueue_members(pipeline);
        }
    }

    /// Makes volumes of a pipeline larger, as far as it then fits; answers how much. Of sizes that
    /// nobody declared a part of the growth may do, and what others are taken to need that were
    /// not measured is made up anew.
    fn resize_to_fit(&mut self, pipeline: u32, changes: Vec<Growth>) -> Option<Vec<Growth>> {
        if changes.is_empty() {
            return None;
        }
        let is_declared = |(volume, ..): &Growth| !self.sizes.is_undeclared(*volume);
        let least = match changes.iter().any(is_declared) {
            true => GROWTH_PARTS,
            false => 1,
        };
        for part in (least..=GROWTH_PARTS).rev() {
            let more = |before: u64, after: u64| before + (after - before) / GROWTH_PARTS * part;
            let partly = changes.iter().map(|&(volume, before, after)| {
                let after = match part == GROWTH_PARTS {
                    true => after,
                    false => Space {
                        bytes: more(before.bytes, after.bytes),
                        files: more(before.files, after.files),
                    },
                };
                (volume, before, after)
            });
            let partly: Vec<Growth> = partly
                .filter(|(_, before, after)| before != after)
                .collect();
            let mut cut = Vec::new();
            for growth in &partly {
                cut.extend(self.make_way_for_grown(pipeline, growth));
            }
            if !partly.is_empty() && self.resize_if_fit(pipeline, &partly) {
                return Some(partly);
            }
            // What was cut for nothing is as before; of one that was cut twice the first counts.
            for (volume, before) in cut.into_iter().rev() {
                self.resize(volume, before);
            }
            self.graph.measure_course(pipeline);
        }
        None
    }

    /// Makes volumes of a pipeline larger, from the first size to the second, unless it could
    /// never run then: so large a need is its own fault. Answers whether it did.
    fn resize_if_fit(&mut self, pipeline: u32, changes: &[Growth]) -> bool {
        for &(volume, _, after) in changes {
            self.resize(volume, after);
        }
        self.graph.measure_course(pipeline);
        if crate::policy::View::new(self).can_never_fit(pipeline) {
            for &(volume, before, _) in changes {
                self.resize(volume, before);
            }
            self.graph.measure_course(pipeline);
            return false;
        }
        // Only this pipeline is looked at: many of a large workflow may find no space.
        for &(.., after) in changes {
            self.scratch_volume_max = self.scratch_volume_max.max(after.bytes);
        }
        let members: Vec<JobIndex> = self.graph.members(pipeline).collect();
        for job in members {
            let need = self.first_need(job);
            self.scratch_need_max = self.scratch_need_max.component_max(need);
        }
        self.enqueue_members(pipeline);
        true
    }

    /// The scratch space that must exist before a job can start the first time.
    fn first_need(&self, job: JobIndex) -> Space {
        let is_first = |volume: &VolumeIndex| {
            // A cache may have a million users.
            if self.graph.volume(*volume).is_cache {
                return false;
            }
            let users = self.graph.workflow.volume(*volume).users.iter();
            users.min_by_key(|user| self.graph.rank(**user)) == Some(&job)
        };
        let mounted = self.graph.mounted(job).into_iter();
        let made = mounted.map(|(volume, _)| volume).filter(is_first);
        made.fold(Space::ZERO, |sum, volume| {
            sum.saturating_add(self.size_of(volume))
        })
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_proto::time::Time;

    use super::*;
    use crate::Scheduler;
    use crate::{Event, NodeInfo, Settings};

    #[test]
    fn refused_growth_leaves_sibling_sizes_alone() {
        let text = "volume a scratch unknown\nvolume b scratch unknown\nvolume c scratch unknown\n\
            job p {\nexecutable = x\n}\njob q {\nexecutable = x\n}\njob r {\nexecutable = x\n}\n\
            job all {\nexecutable = x\n}\nmount a p /w\nmount b q /w\nmount c r /w\n\
            mount a all /a ro\nmount b all /b ro\nmount c all /c ro\nparent p q r child all\n";
        let none = |path: &str| Err(path.to_owned());
        let checked = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = checked.expect("it is right").workflow;
        let mut scheduler = Scheduler::new(RunId(0), workflow, Settings::default());
        let capacity = Space {
            bytes: 100_000_000,
            files: 100_000,
        };
        let node = NodeInfo::single_group(ServerId(1), capacity, 1);
        scheduler.step(Time(1), Event::nodes_listed(vec![node]), &mut Vec::new());
        let volumes = [0, 1, 2].map(VolumeIndex);
        let grown = volumes
            .into_iter()
            .find(|it| scheduler.volumes.is_live(*it));
        let grown = grown.expect("a first one is made");
        let before = volumes.map(|volume| scheduler.size_of(volume));
        let (size, beyond) = (
            scheduler.size_of(grown),
            Space {
                bytes: 1 << 40,
                files: 1 << 40,
            },
        );
        let pipeline = scheduler.graph.pipeline(JobIndex(0));
        assert!(
            scheduler
                .state
                .resize_to_fit(pipeline, vec![(grown, size, beyond)])
                .is_none()
        );
        assert_eq!(volumes.map(|volume| scheduler.size_of(volume)), before);
    }
}
