//! The loop for when nothing goes on: it takes the measures of `policy/admission/deadlock.rs` one
//! after the other until one helps.

use bafs_workflow::JobIndex;

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::admission::deadlock::{DeadlockMeasure, MEASURES, StalledJobs};
use crate::policy::order::node_demand::Concession;
use crate::state::planned_volumes::Care;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

impl State {
    /// When jobs are ready, nothing is under way and none of them can start: jobs may leave their
    /// node, then other pipelines are preempted, then the workflow fails. It never just waits.
    pub(crate) fn resolve_deadlock(&mut self) {
        if !View::new(self).is_stalled() {
            return;
        }
        if let Some(end) = View::new(self).end_urgency() {
            self.commit(end);
            self.place_all();
            if !View::new(self).is_without_progress() {
                return;
            }
        }
        let heads = View::new(self).heads_of_queues();
        if let Some(reason) = self.describe_full_disks(&heads) {
            return self.commit(Decision::GiveUp { reason });
        }
        if View::new(self).is_protection_in_vain() {
            return self.commit(Decision::Unprotect);
        }
        if self.pass_stuck_probes_on() {
            return;
        }
        // Nobody of this run reads them, and others may wait for their room.
        if self.fleet.is_shared() && self.evict_idle_caches() {
            return self.look_again_soon();
        }
        let jobs = View::new(self).stalled_jobs(heads);
        match self.concede(&jobs.in_order()) {
            Concession::Nothing => return,
            Concession::Caches => {
                self.evict(View::new(self).unused_caches(&jobs.in_order()));
                return;
            }
            Concession::Work => {}
        }
        if self.has_workers() && MEASURES.iter().any(|it| self.take_measure(*it, &jobs)) {
            if View::new(self).is_without_progress() {
                // With remote I/O nothing is deleted that would be followed by a fact.
                self.look_again_soon();
            }
            return;
        }
        self.wait_for_space(jobs.all.first().copied());
    }

    /// Takes a measure. Answers whether it changed anything.
    fn take_measure(&mut self, measure: DeadlockMeasure, jobs: &StalledJobs) -> bool {
        match measure {
            DeadlockMeasure::Start(kind, care) => self.try_all(jobs.of(kind), care),
            DeadlockMeasure::RelaxLimits => self.relax_limits(),
            DeadlockMeasure::DropCopies => self.drop_all_copies(),
            DeadlockMeasure::EvictUnusedCaches => {
                self.evict(View::new(self).unused_caches(&jobs.first))
            }
            DeadlockMeasure::EvictAllCaches => self.evict(View::new(self).all_caches()),
            // Nodes that did not answer yet offer nothing: their answer may be all that lacks.
            DeadlockMeasure::Preempt if self.fleet.is_unanswered() => false,
            DeadlockMeasure::Preempt => self.preempt_for(jobs),
        }
    }

    /// Has the first of these jobs start that can; of starts that are safe all, or those that wait
    /// at other nodes than have room for them would go on one after the other.
    fn try_all(&mut self, jobs: &[JobIndex], care: Care) -> bool {
        let mut is_any = false;
        let mut most = self.most_left_in_a_group();
        for &job in jobs {
            // Without it each job has each node divide a cache in vain.
            if View::new(self).has_cache_beyond(job, most) {
                self.is_space_wanted = true;
            } else if self.try_place_anywhere(job, care) {
                if care != Care::Safe {
                    return true;
                }
                is_any = true;
                most = self.most_left_in_a_group();
            }
        }
        is_any
    }

    /// Limits of the strategy give way, if there are any.
    fn relax_limits(&mut self) -> bool {
        let relaxation = match self.fleet.is_unanswered() {
            true => None,
            false => View::new(self).relax_limits(),
        };
        let is_any = relaxation.is_some();
        if let Some(relaxation) = relaxation {
            self.commit(Decision::RelaxLimits(relaxation));
        }
        is_any
    }

    fn preempt_for(&mut self, jobs: &StalledJobs) -> bool {
        let Some(job) = View::new(self).first_unbound(jobs) else {
            return false;
        };
        self.preemptions.note_progress(self.graph.totals.done);
        let preemption = View::new(self).choose_preemption(job);
        let is_any = preemption.is_some();
        if let Some(preemption) = preemption {
            self.commit(preemption);
        }
        is_any
    }

    /// Drops the volumes of a pipeline, and lets only the other one start jobs until it is through.
    pub(super) fn preempt(&mut self, victim: u32, beneficiary: u32) {
        let dropped = View::new(self).preempted_volumes(victim);
        *self.preemptions.made.entry(victim).or_default() += 1;
        self.protected = Some(beneficiary);
        self.end_claims(victim);
        for &(id, volume) in &dropped {
            self.retire(id);
            self.take_back_extracts(volume, id);
        }
        let dropped = dropped.into_iter().map(|(_, volume)| volume);
        self.redo(Vec::new(), dropped.collect());
    }

    /// Lets all pipelines start jobs again when the protected one is through.
    pub(crate) fn unprotect_if_done(&mut self) {
        if self
            .protected
            .is_some_and(|pipeline| self.graph.is_pipeline_final(pipeline))
        {
            self.protected = None;
            self.queues.wake_all();
        }
    }

    /// The protected pipeline waits for jobs of others: all may start jobs again.
    pub(super) fn unprotect(&mut self) {
        self.unprotected += 1;
        self.protected = None;
        self.queues.wake_all();
        self.look_again_soon();
    }

    /// Nothing helps: waits for what others have, for a home or for the user, or for a while, and
    /// gives up then.
    fn wait_for_space(&mut self, job: Option<JobIndex>) {
        // Who waits for a home may leave room when it is back.
        let is_homeless = |job: JobIndex| View::new(self).is_homeless(job);
        let waits_for_home = self.timers.has_job(is_homeless);
        if self.waits_for_others() || waits_for_home || self.waits_for_user() {
            return;
        }
        let until = *self
            .wait_until
            .get_or_insert_with(|| self.now.plus_ms(self.settings.space_timeout_ms));
        if self.now < until {
            self.timers.set(until, Timer::WaitTimeout);
            return;
        }
        let reason = View::new(self).describe_deadlock(job);
        self.commit(Decision::GiveUp { reason });
    }

    /// No fact need follow that would make anybody look again.
    fn look_again_soon(&mut self) {
        self.timers.set(self.now.plus_ms(1), Timer::WaitTimeout);
    }
}
