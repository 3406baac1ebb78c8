//! Which queue a ready job is in, and when its place there is asked for again. The place itself is
//! decided in `policy/order` and `policy/placement`.

use std::cmp::Reverse;

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::state::ready_queue::ReadyKey;
use crate::state::scheduler_state::State;

impl State {
    /// Puts a ready job into the queue where its data are, unless the user holds it.
    pub(crate) fn enqueue(&mut self, job: JobIndex) {
        if self.is_held(job) {
            self.queues.take(job);
            return;
        }
        let (view, policies) = (View::new(self), self.policies());
        let need = self.need_of(job);
        let binding = policies.placement.binding(view, job, need);
        let order = policies.order.key(view, job, need);
        let pipeline = self.graph.pipeline(job);
        let key = ReadyKey {
            waits: self.waits_for_probe(pipeline),
            behind: self.behind(pipeline),
            turn: order.turn,
            chain: Reverse(order.chain),
            need: order.need,
            starts_pipeline: !self.is_pipeline_of_job_begun(job),
            kind: self.graph.kind(job),
            job,
        };
        self.queues.put(binding, key);
    }

    /// Whether a job has parents, or scratch volumes that exist: its pipeline has begun.
    fn is_pipeline_of_job_begun(&self, job: JobIndex) -> bool {
        let mut mounted = self.graph.mounted(job).into_iter();
        !self.graph.workflow.job(job).parents.is_empty()
            || mounted.any(|(volume, _)| {
                self.volumes.is_live(volume) && !self.graph.volume(volume).is_cache
            })
    }

    /// The need of jobs changed because a volume came or went.
    pub(crate) fn requeue_users(&mut self, volume: VolumeIndex) {
        for position in 0..self.graph.workflow.volume(volume).users.len() {
            let job = self.graph.workflow.volume(volume).users[position];
            if self.queues.contains(job) {
                self.enqueue(job);
            }
        }
    }

    /// The order of all ready jobs changed.
    pub(crate) fn requeue_all(&mut self) {
        for job in self.queues.jobs() {
            self.enqueue(job);
        }
    }
}
