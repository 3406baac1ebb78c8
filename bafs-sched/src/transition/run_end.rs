//! The end of a run: nothing starts any more, and what exists is deleted.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};

use crate::action::Action;
use crate::describe::{LEFT_SHOWN, describe_ms};
use crate::state::jobs::JobState;
use crate::state::observed_access::RunWarning;
use crate::state::progress::Outcome;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Starts nothing any more; what is under way is stopped and what exists is deleted.
    pub(crate) fn finish(&mut self) {
        if matches!(self.phase, Phase::Finishing | Phase::Over) {
            return;
        }
        self.phase = Phase::Finishing;
        // Who gives the run up does not wait for them.
        self.extractions.logs.clear();
        self.keep_unsent();
        self.timers.set(
            self.now.plus_ms(self.settings.cleanup_timeout_ms),
            Timer::Cleanup,
        );
        for job in self.attempts.keys().copied().collect::<Vec<_>>() {
            self.stop(job, None);
        }
        self.delete_idle();
    }

    pub(crate) fn cancel(&mut self) {
        self.is_cancelled = true;
        self.finish();
    }

    /// Deletes volumes that no attempt uses any more.
    fn delete_idle(&mut self) {
        let live = self
            .volumes
            .iter()
            .filter(|(_, instance)| instance.state != InstanceState::Deleting);
        let live: Vec<VolumeId> = live.map(|(id, _)| id).collect();
        let kept = self.volumes_left_behind();
        let attempts = self.attempts.values();
        let used: BTreeSet<VolumeId> = attempts
            .flat_map(|attempt| attempt.uses.iter().map(|used| used.id))
            .collect();
        let is_idle = |id: &VolumeId| !used.contains(id) && !kept.contains(id);
        for id in live.into_iter().filter(is_idle) {
            self.retire(id);
        }
        self.cleaned_with = Some(self.attempts.len());
    }

    /// Volumes that outlive the run: with results for the user, or with work for the next run.
    fn volumes_left_behind(&self) -> BTreeSet<VolumeId> {
        let mut kept = self.extractions.kept();
        if self.settings.keep_ms > 0 {
            kept.extend(self.kept_volumes().into_iter().map(|kept| kept.id));
        }
        kept
    }

    pub(crate) fn end_if_clean(&mut self) {
        // Only the end of an attempt lets go of a volume.
        if self.cleaned_with != Some(self.attempts.len()) {
            self.delete_idle();
        }
        let mut left = self.stale.values().chain(self.orphaned_executions.values());
        let is_stale = left.any(|server| !self.is_lost(*server));
        if !self.attempts.is_empty() || is_stale || !self.late.is_empty() {
            return;
        }
        let kept = self.volumes_left_behind();
        if self.volumes.iter().all(|(id, _)| kept.contains(&id)) {
            self.end();
        }
    }

    /// What could not be deleted in time is deleted by its server when its lifetime ends.
    pub(crate) fn stop_cleaning(&mut self) {
        if self.phase == Phase::Finishing {
            self.end();
        }
    }

    fn end(&mut self) {
        self.phase = Phase::Over;
        self.tell_left();
        let unfinished = self
            .graph
            .job_indexes()
            .any(|job| self.graph.state(job) != JobState::Done);
        let unsent: Vec<RunWarning> = self.extractions.messages().cloned().collect();
        let messages = self.messages.iter();
        let messages = messages.chain(unsent.iter().map(|warning| &warning.text));
        let messages: Vec<String> = messages.cloned().collect();
        let outcome = if self.is_cancelled {
            // That outcome says nothing of results that stay.
            unsent.into_iter().for_each(|warning| self.tell(warning));
            Outcome::Cancelled
        } else if unfinished || self.extractions.failed > 0 || !messages.is_empty() {
            Outcome::Failed {
                jobs: self.failures.to_vec(),
                messages,
            }
        } else {
            Outcome::Complete
        };
        self.outcome = Some(outcome.clone());
        self.out.push(Action::Finish { outcome });
    }

    /// Says which volumes nodes may still have, and what becomes of them.
    fn tell_left(&mut self) {
        let kept = self.volumes_left_behind();
        let undeleted = self.volumes.iter().filter(|(id, _)| !kept.contains(id));
        let undeleted = undeleted.filter_map(|(id, instance)| Some((instance.server?, id)));
        let stale = self.stale.iter().map(|(id, server)| (*server, *id));
        let mut left: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        for (server, id) in undeleted.chain(stale) {
            left.entry(server).or_default().push(id);
        }
        for (server, ids) in left {
            let name = self.fleet.name(server);
            let shown = ids.iter().take(LEFT_SHOWN).map(VolumeId::to_string);
            let shown = shown.collect::<Vec<_>>().join(" ");
            let more = match ids.len().saturating_sub(LEFT_SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let text = format!(
                "node {name} did not say that it deleted volumes of this run ({shown}{more}): if \
                 it has them, it deletes them {} after it is back, those with results after {}; \
                 sooner: bafs volume delete ID",
                describe_ms(self.settings.volume_lifetime_ms),
                describe_ms(self.settings.result_lifetime_ms),
            );
            self.tell(RunWarning {
                job: None,
                volume: None,
                node: Some(server),
                text,
            });
        }
    }
}
