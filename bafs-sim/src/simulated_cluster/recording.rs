//! Compares the core with one that is told only what its steps wrote.

use std::sync::Arc;

use bafs_sched::{RecordedStep, Scheduler};

use super::SimulatedCluster;

impl SimulatedCluster {
    /// Compares the core after each step with one that was told only what the steps wrote.
    pub fn check_recording(&mut self) {
        self.restored = Some(self.new_scheduler());
    }

    /// A core of the same run of which nothing is done.
    pub fn new_scheduler(&self) -> Scheduler {
        let workflow = Arc::clone(&self.given_workflow);
        Scheduler::new(
            self.scheduler.run(),
            workflow,
            self.scheduler.settings().clone(),
        )
    }

    /// Tells the other core what a step wrote, and notes what is different then.
    pub(super) fn compare_restored(&mut self, step: &RecordedStep) {
        if let Some(restored) = &mut self.restored {
            restored.redo(&step.changes);
            let found = self.scheduler.restored_differences(restored);
            if !found.is_empty() {
                // Later ones are not to follow from these.
                *restored = self.scheduler.clone();
                let found = found.into_iter();
                let event = &step.event;
                let told = found.map(|text| format!("after {event:?}\n  {text}"));
                self.restored_differences.extend(told);
            }
        }
    }
}
