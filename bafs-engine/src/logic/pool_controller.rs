//! When pilots are submitted and ended. It has no clock: `now_ms` is an argument.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Demand, NodeUse, PauseReason, PilotNumber, PilotStatus, PilotSummary, PoolAction, PoolEvent,
    PoolSettings,
};
use crate::{PilotId, PilotState};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// Nobody asked the batch system yet whether it accepts pilots.
    Unchecked,
    /// It was asked.
    Checking,
    /// Pilots are submitted as needed.
    Open,
    /// No pilot is submitted; those that are there go on.
    Paused(PauseReason),
    /// All pilots end.
    Closing,
}

/// A pilot that was submitted and has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pilot {
    id: Option<PilotId>,
    /// By the queue.
    state: PilotState,
    /// Whether its node was in the catalog since the pilot last began to run.
    was_listed: bool,
    /// By the catalog, now.
    node: Option<NodeUse>,
    /// Since when it runs without a node in the catalog.
    silent_since_ms: Option<u64>,
    idle_since_ms: Option<u64>,
    is_leaving: bool,
    is_copying: bool,
}

impl Pilot {
    fn new(id: Option<PilotId>) -> Self {
        Self {
            id,
            state: PilotState::Waiting,
            was_listed: false,
            node: None,
            silent_since_ms: None,
            idle_since_ms: None,
            is_leaving: false,
            is_copying: false,
        }
    }

    fn is_queued(&self) -> bool {
        self.state == PilotState::Waiting
    }

    fn status(&self) -> PilotStatus {
        match (
            self.is_leaving || self.state == PilotState::Ending,
            &self.id,
        ) {
            (true, _) => PilotStatus::Leaving,
            (false, None) => PilotStatus::Submitting,
            (false, Some(_)) if self.is_queued() => PilotStatus::Queued,
            (false, Some(_)) if self.node.is_some() => PilotStatus::Alive,
            (false, Some(_)) => PilotStatus::Starting,
        }
    }
}

/// Keeps a pool at the size that the work needs.
#[derive(Debug, Clone)]
pub struct PoolController {
    settings: PoolSettings,
    phase: Phase,
    pilots: BTreeMap<PilotNumber, Pilot>,
    /// Pilots that may exist although nobody got their id.
    unconfirmed: BTreeSet<PilotNumber>,
    /// Whether the batch system answered when it was last asked.
    has_answered: bool,
    next_number: u64,
    demand: Demand,
    failed_starts: u32,
    failed_submissions: u32,
}

impl PoolController {
    /// A pool without pilots; it submits none before something demands nodes.
    pub fn new(settings: PoolSettings) -> Self {
        Self {
            settings,
            phase: Phase::Unchecked,
            pilots: BTreeMap::new(),
            unconfirmed: BTreeSet::new(),
            has_answered: false,
            next_number: 1,
            demand: Demand {
                nodes: 0,
                longest_job_s: 0,
            },
            failed_starts: 0,
            failed_submissions: 0,
        }
    }

    /// Takes over the pilots of a controller that ended. `next_number` is above all that it used.
    pub fn resume(
        settings: PoolSettings,
        pilots: BTreeMap<PilotNumber, Option<PilotId>>,
        next_number: u64,
    ) -> Self {
        let mut resumed = Self::new(settings);
        resumed.next_number = next_number;
        for (number, id) in pilots {
            match id {
                Some(id) => drop(resumed.pilots.insert(number, Pilot::new(Some(id)))),
                None => drop(resumed.unconfirmed.insert(number)),
            }
        }
        resumed
    }

    /// Applies one fact.
    pub fn step(&mut self, now_ms: u64, event: PoolEvent, actions: &mut Vec<PoolAction>) {
        match event {
            PoolEvent::Checked(answer) => self.end_check(answer, actions),
            PoolEvent::Submitted { pilot, id } => {
                self.failed_submissions = 0;
                if let Some(found) = self.pilots.get_mut(&pilot) {
                    found.id = Some(id);
                }
            }
            PoolEvent::SubmissionRejected { pilot, reason } => {
                self.pilots.remove(&pilot);
                self.count_rejection(reason, actions);
            }
            PoolEvent::SubmissionUnconfirmed { pilot } => {
                self.pilots.remove(&pilot);
                self.unconfirmed.insert(pilot);
                self.has_answered = false;
            }
            PoolEvent::NameReleased { pilot } => {
                self.unconfirmed.remove(&pilot);
            }
            PoolEvent::Polled(states) => {
                self.apply_states(now_ms, &states, actions);
                self.has_answered = true;
                let names = self.unconfirmed.iter().copied();
                actions.extend(names.map(PoolAction::ReleaseName));
            }
            PoolEvent::EngineSilent => {
                self.has_answered = false;
                if self.phase == Phase::Checking {
                    self.phase = Phase::Unchecked;
                }
            }
            PoolEvent::CancelFailed(id) => {
                self.has_answered = false;
                let mut pilots = self.pilots.values_mut();
                if let Some(pilot) = pilots.find(|pilot| pilot.id.as_ref() == Some(&id)) {
                    pilot.is_leaving = false;
                }
            }
            PoolEvent::NodesListed(nodes) => self.apply_nodes(now_ms, &nodes),
            PoolEvent::DemandChanged(demand) => self.demand = demand,
            PoolEvent::ResumeRequested => self.resume_submissions(),
            PoolEvent::CloseRequested => self.phase = Phase::Closing,
        }
        if self.has_answered {
            self.end_silent_pilots(now_ms, actions);
            self.end_surplus(now_ms, actions);
            self.submit_needed(actions);
        }
    }

    /// Ids to poll.
    pub fn ids(&self) -> Vec<PilotId> {
        self.pilots
            .values()
            .filter_map(|pilot| pilot.id.clone())
            .collect()
    }

    /// Every pilot that may exist.
    pub fn pilots(&self) -> Vec<PilotSummary> {
        let known = self.pilots.iter().map(|(number, pilot)| PilotSummary {
            pilot: *number,
            id: pilot.id.clone(),
            status: pilot.status(),
        });
        let unconfirmed = self.unconfirmed.iter().map(|number| PilotSummary {
            pilot: *number,
            id: None,
            status: PilotStatus::Leaving,
        });
        known.chain(unconfirmed).collect()
    }

    /// The number of the next pilot.
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Why it submits no more, if it does not.
    pub fn pause(&self) -> Option<&PauseReason> {
        match &self.phase {
            Phase::Paused(reason) => Some(reason),
            Phase::Unchecked | Phase::Checking | Phase::Open | Phase::Closing => None,
        }
    }

    /// Whether it was closed and no pilot is left.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closing && self.pilots.is_empty() && self.unconfirmed.is_empty()
    }

    fn end_check(&mut self, answer: Result<(), String>, actions: &mut Vec<PoolAction>) {
        if self.phase != Phase::Checking {
            return;
        }
        match answer {
            Ok(()) => self.phase = Phase::Open,
            Err(said) => self.pause_submissions(PauseReason::CheckFailed(said), actions),
        }
    }

    fn pause_submissions(&mut self, reason: PauseReason, actions: &mut Vec<PoolAction>) {
        if matches!(self.phase, Phase::Paused(_) | Phase::Closing) {
            return;
        }
        actions.push(PoolAction::ReportPause(reason.clone()));
        self.phase = Phase::Paused(reason);
    }

    fn resume_submissions(&mut self) {
        if let Phase::Paused(_) = self.phase {
            self.phase = Phase::Unchecked;
            self.failed_starts = 0;
            self.failed_submissions = 0;
        }
    }

    fn count_rejection(&mut self, reason: String, actions: &mut Vec<PoolAction>) {
        self.failed_submissions += 1;
        if self.failed_submissions >= self.settings.failed_submissions_max {
            let count = self.failed_submissions;
            self.pause_submissions(PauseReason::SubmissionsRejected(count, reason), actions);
        }
    }

    fn apply_states(
        &mut self,
        now_ms: u64,
        states: &BTreeMap<PilotId, PilotState>,
        actions: &mut Vec<PoolAction>,
    ) {
        let mut failed_starts = 0;
        self.pilots.retain(|_, pilot| {
            let Some(id) = &pilot.id else {
                return true;
            };
            // What was submitted after the question is in no answer.
            let Some(state) = states.get(id) else {
                return true;
            };
            match state {
                PilotState::Waiting => {
                    // A requeued pilot starts anew under its id.
                    pilot.was_listed = false;
                    pilot.silent_since_ms = None;
                }
                PilotState::Running { .. } if pilot.node.is_none() => {
                    pilot.silent_since_ms.get_or_insert(now_ms);
                }
                PilotState::Ended if !pilot.was_listed && !pilot.is_leaving => failed_starts += 1,
                PilotState::Running { .. } | PilotState::Ending | PilotState::Ended => {}
            }
            pilot.state = *state;
            *state != PilotState::Ended
        });
        self.count_failed_starts(failed_starts, actions);
    }

    fn count_failed_starts(&mut self, count: u32, actions: &mut Vec<PoolAction>) {
        self.failed_starts += count;
        if count > 0 && self.failed_starts >= self.settings.failed_starts_max {
            self.pause_submissions(PauseReason::StartsFailed(self.failed_starts), actions);
        }
    }

    fn apply_nodes(&mut self, now_ms: u64, nodes: &BTreeMap<PilotNumber, NodeUse>) {
        for (number, pilot) in &mut self.pilots {
            pilot.node = nodes.get(number).copied();
            let Some(node) = pilot.node else {
                pilot.idle_since_ms = None;
                if matches!(pilot.state, PilotState::Running { .. }) {
                    pilot.silent_since_ms.get_or_insert(now_ms);
                }
                continue;
            };
            if !pilot.was_listed {
                pilot.was_listed = true;
                self.failed_starts = 0;
            }
            pilot.silent_since_ms = None;
            if pilot.is_queued() {
                // The catalog knows it before the queue was asked again.
                pilot.state = PilotState::Running { left_s: None };
            }
            if node.jobs == 0 {
                pilot.idle_since_ms.get_or_insert(now_ms);
            } else {
                pilot.idle_since_ms = None;
            }
            pilot.is_copying &= node.sole_copies > 0;
        }
    }

    /// Ends pilots that run without a node in the catalog: a start that hangs, or a node that does.
    fn end_silent_pilots(&mut self, now_ms: u64, actions: &mut Vec<PoolAction>) {
        let limit_ms = self.settings.silence_ms;
        let mut failed_starts = 0;
        for pilot in self.pilots.values_mut() {
            let silent = pilot
                .silent_since_ms
                .is_some_and(|since| now_ms - since >= limit_ms);
            if let (true, false, Some(id)) = (silent, pilot.is_leaving, &pilot.id) {
                actions.push(PoolAction::Cancel(id.clone()));
                pilot.is_leaving = true;
                failed_starts += u32::from(!pilot.was_listed);
            }
        }
        self.count_failed_starts(failed_starts, actions);
    }

    /// Pilots that are wanted: those that do not leave.
    fn count_present(&self) -> usize {
        let stays = |pilot: &&Pilot| !pilot.is_leaving && pilot.state != PilotState::Ending;
        self.pilots.values().filter(stays).count()
    }

    fn target(&self) -> usize {
        match self.phase {
            Phase::Closing => 0,
            Phase::Unchecked | Phase::Checking | Phase::Open | Phase::Paused(_) => {
                self.settings.nodes_max.min(self.demand.nodes)
            }
        }
    }

    /// Queued pilots go first; a node only when it is idle, and not with the only copy of anything.
    fn end_surplus(&mut self, now_ms: u64, actions: &mut Vec<PoolAction>) {
        let mut surplus = self.count_present().saturating_sub(self.target());
        let is_closing = self.phase == Phase::Closing;
        let idle_ms = self.settings.idle_ms;
        let mut numbers: Vec<PilotNumber> = self.pilots.keys().rev().copied().collect();
        numbers.sort_by_key(|number| !self.pilots[number].is_queued());
        for number in numbers {
            let Some(pilot) = self.pilots.get_mut(&number) else {
                continue;
            };
            let Some(id) = pilot.id.clone() else {
                continue;
            };
            if surplus == 0 || pilot.is_leaving || pilot.state == PilotState::Ending {
                continue;
            }
            let is_idle = pilot
                .idle_since_ms
                .is_some_and(|since| now_ms - since >= idle_ms);
            let sole_copies = pilot.node.map_or(0, |node| node.sole_copies);
            if is_closing || pilot.is_queued() || (is_idle && sole_copies == 0) {
                actions.push(PoolAction::Cancel(id));
                pilot.is_leaving = true;
                surplus -= 1;
            } else if is_idle {
                if !pilot.is_copying {
                    actions.push(PoolAction::CopySoleVolumes(number));
                    pilot.is_copying = true;
                }
                surplus -= 1;
            }
        }
    }

    fn submit_needed(&mut self, actions: &mut Vec<PoolAction>) {
        if self.count_present() >= self.target() {
            return;
        }
        match self.phase {
            Phase::Unchecked => {
                self.phase = Phase::Checking;
                actions.push(PoolAction::Check);
                return;
            }
            Phase::Open => {}
            Phase::Checking | Phase::Paused(_) | Phase::Closing => return,
        }
        let need_s = self.demand.longest_job_s;
        if let Some(limit_s) = self
            .settings
            .time_limit_s
            .filter(|limit_s| *limit_s < need_s)
        {
            self.pause_submissions(PauseReason::PilotsTooShort(limit_s, need_s), actions);
            return;
        }
        let is_waiting = |pilot: &&Pilot| pilot.is_queued() && !pilot.is_leaving;
        let mut queued = self.pilots.values().filter(is_waiting).count();
        let mut present = self.count_present();
        while queued < self.settings.backlog_max && present < self.target() {
            let number = PilotNumber(self.next_number);
            self.next_number += 1;
            self.pilots.insert(number, Pilot::new(None));
            actions.push(PoolAction::Submit(number));
            queued += 1;
            present += 1;
        }
    }
}

#[cfg(test)]
mod tests;
