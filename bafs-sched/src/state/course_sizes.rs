//! What pipelines need at once, counted anew when sizes of volumes changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::space::Space;
use crate::state::job_order::Courses;
use crate::state::jobs::{Graph, JobState};

impl Graph {
    /// Changes what is to be reserved for a volume.
    pub(crate) fn resize(&mut self, volume: VolumeIndex, size: Space) {
        // Whoever shares the workflow keeps it as it was given.
        let workflow = Arc::make_mut(&mut self.workflow);
        let spec = &mut workflow.volumes[volume.as_usize()];
        (spec.size_bytes, spec.size_files) = (size.bytes, size.files);
        self.sizes.insert(volume, size);
    }

    /// Whether another size is reserved for a volume than the workflow file says.
    pub(crate) fn is_resized(&self, volume: VolumeIndex) -> bool {
        self.sizes.contains_key(&volume)
    }

    /// Sizes of one pipeline changed: what it needs at once is counted anew.
    pub(crate) fn measure_course(&mut self, pipeline: u32) {
        let mut members: Vec<JobIndex> = self.members(pipeline).collect();
        members.sort_unstable_by_key(|job| self.rank(*job));
        // What its home must keep free is counted anew, too.
        if let Some(first) = members.first() {
            self.begun.note(*first);
        }
        let states = members.iter().map(|job| (*job, self.state(*job)));
        let states: BTreeMap<JobIndex, JobState> = states.collect();
        let has_begun = |job: JobIndex| states[&job].has_begun();
        self.courses
            .measure(&self.workflow, pipeline, members, has_begun);
    }

    /// Sizes changed: what pipelines need at once is counted anew. Courses stay when they are as
    /// good.
    pub(crate) fn measure_courses(&mut self) {
        let pipelines: Vec<u32> = self.job_indexes().map(|job| self.pipeline(job)).collect();
        let order = self.workflow.topological_order();
        let mut courses = Courses::new(&self.workflow, &pipelines, &order);
        let has_begun = |job: JobIndex| self.state(job).has_begun();
        for job in &order {
            courses.moved(pipelines[job.as_usize()], *job, has_begun);
        }
        for job in order.iter().rev() {
            courses.moved(pipelines[job.as_usize()], *job, has_begun);
        }
        self.courses = courses;
        self.begun.note_all();
    }
}
