//! Volumes that proved too small: they and their like are made larger, and jobs run again. How much
//! larger says `policy/failure/resize.rs`.

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::describe::describe;
use crate::policy::View;
use crate::policy::failure::resize::{self, GrowthPlan, Lesson};
use crate::space::Space;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
use crate::state::volume_sizes::Growth;

impl State {
    /// A job found no space. Its volumes are made larger, and it runs again; answers whether it
    /// does. What was declared is made larger once.
    pub(crate) fn grow(&mut self, job: JobIndex, report: &JobReport) -> bool {
        let growths = resize::find_growths(View::new(self), job, report);
        let pipeline = self.graph.pipeline(job);
        let kind = self.kind(pipeline);
        let Some(GrowthPlan { growths, sizes }) = self.find_fitting_growth(pipeline, &growths)
        else {
            return false;
        };
        self.commit(Decision::Resize { pipeline, sizes });
        let lesson = resize::find_lesson(View::new(self), pipeline, kind, &growths);
        self.grow_alike(&lesson);
        self.abandon_attempt(job);
        for growth in &growths {
            let (volume, ..) = *growth;
            if let Some((id, _)) = self.volumes.scratch(volume) {
                self.retire(id);
                self.take_back_extracts(volume, id);
            }
            // They are no larger than it was.
            self.drop_copies(volume);
            self.sizes.grown.insert(volume);
            self.tell_grown(job, growth);
        }
        self.raise_measured(&growths);
        let volumes = growths.into_iter().map(|(volume, ..)| volume).collect();
        self.redo(Vec::new(), volumes);
        self.commit(Decision::Retry { job, pause_ms: 0 });
        true
    }

    fn tell_grown(&mut self, job: JobIndex, growth: &Growth) {
        let &(volume, before, after) = growth;
        let name = &self.graph.workflow.volume(volume).name;
        let job_name = &self.graph.workflow.job(job).name;
        let (before, after) = (describe(before), describe(after));
        let text = match self.sizes.is_undeclared(volume) {
            true => format!(
                "job '{job_name}' ran out of space in volume '{name}' of unknown size ({before} \
                 reserved): it runs again with {after}"
            ),
            false => format!(
                "job '{job_name}' ran out of space in volume '{name}' of {before}: it runs again \
                 once with {after}; declare a larger size"
            ),
        };
        self.tell(RunWarning {
            job: Some(job),
            volume: Some(volume),
            node: None,
            text,
        });
    }

    /// The first way to make volumes of a pipeline larger with which it can still run: so large a
    /// need that it could not is its own fault.
    fn find_fitting_growth(&mut self, pipeline: u32, growths: &[Growth]) -> Option<GrowthPlan> {
        let plans = resize::plan_growths(View::new(self), pipeline, growths).into_iter();
        let mut plans = plans.filter(|plan| self.may_fit_with(pipeline, &plan.sizes));
        plans.next()
    }

    /// Whether a pipeline may fit with other sizes. They are set for the moment of the question.
    fn may_fit_with(&mut self, pipeline: u32, sizes: &[(VolumeIndex, Space)]) -> bool {
        let before = sizes
            .iter()
            .map(|(volume, _)| (*volume, self.size_of(*volume)));
        let before: Vec<(VolumeIndex, Space)> = before.collect();
        self.set_sizes(pipeline, sizes);
        let may_fit = !View::new(self).can_never_fit(pipeline);
        self.set_sizes(pipeline, &before);
        may_fit
    }

    fn set_sizes(&mut self, pipeline: u32, sizes: &[(VolumeIndex, Space)]) {
        for &(volume, size) in sizes {
            self.resize(volume, size);
        }
        self.graph.measure_course(pipeline);
    }

    /// Volumes of a pipeline get other sizes. Only this pipeline is looked at: many of a large
    /// workflow may find no space.
    pub(crate) fn resize_volumes(&mut self, pipeline: u32, sizes: &[(VolumeIndex, Space)]) {
        self.set_sizes(pipeline, sizes);
        for (_, size) in sizes {
            self.scratch_volume_max = self.scratch_volume_max.max(size.bytes);
        }
        let members: Vec<JobIndex> = self.graph.members(pipeline).collect();
        for job in members {
            let need = self.first_need(job);
            self.scratch_need_max = self.scratch_need_max.component_max(need);
        }
        self.enqueue_members(pipeline);
    }

    /// Pipelines that are like one of which volumes proved too small get larger ones too.
    fn grow_alike(&mut self, lesson: &Lesson) {
        let mut is_new = false;
        for taught in lesson.taught() {
            is_new |= self.sizes.taught.insert(taught);
        }
        // All of its like are looked at once.
        if !is_new {
            return;
        }
        for pipeline in resize::find_alike(View::new(self), lesson) {
            let sizes = resize::sizes_by_lesson(View::new(self), pipeline, lesson);
            for (volume, _) in &sizes {
                // As for the first of them, once; what is measured may be less.
                if !self.sizes.is_undeclared(*volume) {
                    self.sizes.grown.insert(*volume);
                }
            }
            self.commit(Decision::Resize { pipeline, sizes });
        }
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
        let refused = scheduler
            .state
            .find_fitting_growth(pipeline, &[(grown, size, beyond)]);
        assert!(refused.is_none());
        assert_eq!(volumes.map(|volume| scheduler.size_of(volume)), before);
    }
}
