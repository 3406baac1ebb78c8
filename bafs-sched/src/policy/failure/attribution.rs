//! What a failure means: whose fault it is, whether the job is tried again, when it is over.
//! Lost volumes are `policy/failure/recovery.rs`, full disks `policy/failure/full_disk.rs`.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorClass, ErrorCode};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::Action;
use crate::policy::View;
use crate::state::attempts::AttemptState;
use crate::state::disk_fullness::Finder;
use crate::state::failure_history::Away;
use crate::state::jobs::JobState;
use crate::state::nodes::FleetNode;
use crate::state::observed_access::RunWarning;
use crate::state::progress::JobFailure;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

/// A job is tried so often before it is believed that no node can run it: a refusal may pass.
const HOPELESS_FAULTS_MIN: u32 = 3;

/// Whether an agent that fails in this way fails again in the same way on its node: the machine
/// lacks something, or does not accept who we are.
fn is_hopeless_there(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Unsupported
            | ErrorCode::TokenInvalid
            | ErrorCode::TokenExpired
            | ErrorCode::RightMissing
            | ErrorCode::PeerRefused
            | ErrorCode::VersionMismatch
    )
}

/// So many nodes may say that they cannot run a job; then it is the job.
const REFUSALS_MAX: usize = 3;

/// A failure of a job's environment is forgotten after so long without another, in milliseconds.
const FORGET_MS: u64 = 3_600_000;

/// So many times as many failures of the environment as hold a job back do so although most were
/// forgotten.
const ALL_FAULTS_FACTOR: u32 = 10;

/// Jobs that lose the same node within so long, in milliseconds, lost it once.
const SAME_LOSS_MS: u64 = 5_000;

/// A job is blamed for losses of nodes that chance brings together less than once in so many times.
const TELLING_ODDS: u64 = 1_000;

/// What an environment failed of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Something of its node, or nobody knows.
    Unknown,
    /// A volume that is lost.
    Loss,
    /// A home that does not answer.
    Home,
}

impl Cause {
    fn of(error: &Error) -> Self {
        if error.code == ErrorCode::HomeUnreachable {
            Self::Home
        } else if error.class() == ErrorClass::VolumeLost {
            Self::Loss
        } else {
            Self::Unknown
        }
    }
}

impl State {
    /// The attempt failed by the job's own fault: it is tried again as often as declared.
    pub(crate) fn own_fault(&mut self, job: JobIndex, reason: String, output_tail: String) {
        if let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) {
            self.graph.job_mut(job).troubles.failed_on.insert(server);
        }
        self.graph.job_mut(job).troubles.killed.clear();
        let is_last = self.count_own_fault(job);
        if is_last {
            self.keep_logs(job);
        }
        self.abandon_attempt(job);
        if is_last {
            self.fail(job, reason, output_tail);
        } else {
            let pause_ms = self
                .settings
                .pause_ms(self.graph.job(job).troubles.own_faults);
            self.settle(job, pause_ms);
        }
    }

    /// Counts a failure by the job's own fault; answers whether it was the last one allowed.
    pub(crate) fn count_own_fault(&mut self, job: JobIndex) -> bool {
        let retries = self.graph.workflow.job(job).retries;
        let node = self.graph.job_mut(job);
        node.troubles.own_faults = node.troubles.own_faults.saturating_add(1);
        node.troubles.own_faults > retries
    }

    /// The agent reported that the environment failed.
    pub(crate) fn environment_ended(&mut self, job: JobIndex, error: &Error, tail: String) {
        // Its node is there to report it.
        self.graph.job_mut(job).troubles.killed.clear();
        if error.code == ErrorCode::SourceChanged {
            self.keep_logs(job);
            self.abandon_attempt(job);
            let reason = format!("the source of a cache changed while the workflow ran: {error}");
            self.fail(job, reason, tail);
        } else if error.code == ErrorCode::TemporaryFull {
            // What it needs of the node's disk does not depend on its volumes.
            self.own_fault(job, error.detail.clone(), tail);
        } else if error.class() == ErrorClass::NoSpace {
            let lack = self.describe_too_small(&self.scratch_written(job));
            self.own_fault(job, format!("{lack}: {error}"), tail);
        } else {
            self.environment_failed(job, error);
        }
    }

    /// The attempt failed by no fault of the job's program: whether another try helps, and where.
    pub(crate) fn environment_failed(&mut self, job: JobIndex, error: &Error) {
        match error.code {
            // What it needs is not there, which is nobody's passing weakness.
            ErrorCode::NotFound | ErrorCode::BadPath => {
                self.refused(
                    job,
                    format!("its environment failed: {error}"),
                    String::new(),
                );
            }
            code if is_hopeless_there(code) => self.node_is_unfit(job, error),
            _ => self.environment_fault_of(job, &error.to_string(), Cause::of(error)),
        }
    }

    /// A node cannot run this job, however often it tries; others may. When none is left, or a
    /// few have said the same, the job fails.
    pub(crate) fn refused(&mut self, job: JobIndex, reason: String, output_tail: String) {
        let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.abandon_attempt(job);
        let slots = self.slots_of(job);
        let refused_by = &mut self.graph.job_mut(job).troubles.refused_by;
        refused_by.insert(server);
        let is_common = refused_by.len() >= REFUSALS_MAX;
        let refused_by = &self.graph.job(job).troubles.refused_by;
        let is_other =
            |(id, node): (_, &FleetNode)| !refused_by.contains(&id) && node.seen.slots >= slots;
        let is_last = !self.fleet.live().any(is_other);
        if is_common || is_last {
            self.fail(job, reason, output_tail);
        } else {
            self.settle(job, 0);
        }
    }

    /// The node itself cannot run jobs: it gets no new work while others may still be able to.
    /// When no node is left that might, waiting does not help, and the job fails.
    fn node_is_unfit(&mut self, job: JobIndex, error: &Error) {
        let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.fleet.update(server, |node| node.is_unfit = true);
        let faults = self
            .graph
            .job(job)
            .troubles
            .environment
            .count
            .saturating_add(1);
        if self.fleet.is_any_fit() {
            self.environment_fault(job, &error.to_string());
            self.set_aside(server, self.settings.quarantine_ms);
        } else if faults < HOPELESS_FAULTS_MIN {
            self.environment_fault(job, &error.to_string());
        } else {
            self.abandon_attempt(job);
            self.graph.job_mut(job).troubles.environment.count = faults;
            let name = self.fleet.name(server);
            let reason = format!("no node can run it; node {name} reports: {error}");
            self.fail(job, reason, String::new());
        }
    }

    /// The attempt failed by no fault of the job: volumes are probed, and it is tried again.
    pub(crate) fn environment_fault(&mut self, job: JobIndex, fault: &str) {
        self.environment_fault_of(job, fault, Cause::Unknown);
    }

    /// As [`Self::environment_fault`]; what a node lost with its store is no sign of a bad one, and
    /// while a home is away no job is tried too often.
    fn environment_fault_of(&mut self, job: JobIndex, fault: &str, cause: Cause) {
        let Some(attempt) = self.attempts.get(&job) else {
            return;
        };
        let server = attempt.server;
        let uses = attempt.uses.clone();
        if cause != Cause::Home && self.is_last_environment_fault(job) {
            self.keep_logs(job);
        }
        self.abandon_attempt(job);
        let mut servers: Vec<ServerId> = uses.iter().filter_map(|used| used.server).collect();
        servers.sort_unstable();
        servers.dedup();
        for target in servers {
            let ids = uses
                .iter()
                .filter(|used| used.server == Some(target))
                .map(|used| used.id);
            let volumes: Vec<VolumeId> = ids.collect();
            if !self.is_lost(target) {
                self.out.push(Action::ProbeVolumes {
                    server: target,
                    volumes,
                });
            }
        }
        let is_lost = self.is_lost(server);
        let is_blamed = cause != Cause::Loss && !is_lost;
        if is_blamed {
            self.avoid_after_two(job, server, cause);
        }
        let may_be_the_node = is_blamed && cause == Cause::Unknown;
        if may_be_the_node {
            self.fleet.count_fault(server);
        }
        let policy = self.policies().failure;
        if may_be_the_node && policy.blames_for_faults(View::new(self), server) {
            self.suspect(server);
            let text = format!("fails jobs, but other nodes do not; last reason: {fault}");
            self.tell_aside(server, &text);
        }
        if cause == Cause::Home
            && let Some(tries) = self.wait_for_home(job, fault)
        {
            self.settle(job, self.settings.pause_ms(tries));
            return;
        }
        let faults = self.count_environment_fault(job);
        // Nobody tries again where a server is gone, so that a pause would spare nothing.
        let tries = if is_lost { 1 } else { faults };
        self.try_again(job, faults, self.settings.pause_ms(tries), fault);
    }

    /// The environment of a job failed on a node; when it did so the last time as well others are
    /// tried first: what is wrong there may be told by nobody else.
    fn avoid_after_two(&mut self, job: JobIndex, server: ServerId, cause: Cause) {
        let node = self.graph.job_mut(job);
        if node.troubles.environment.last_on.replace(server) != Some(server) {
            return;
        }
        if cause == Cause::Home {
            // All others may reach it no more than this one, for long.
            node.troubles.faulted_on.clear();
        }
        node.troubles.faulted_on.insert(server);
    }

    /// A home was away when a job needed it: for as long as results wait for it that does not count
    /// against the job. Answers how often in a row it was so; nothing when it is too long.
    fn wait_for_home(&mut self, job: JobIndex, fault: &str) -> Option<u32> {
        let now = self.now;
        let known = self.graph.job(job).troubles.environment.away;
        let known = known.filter(|away| now.ms_since(away.last) < FORGET_MS);
        let away = Away {
            tries: known.map_or(0, |away| away.tries).saturating_add(1),
            since: known.map_or(now, |away| away.since),
            last: now,
        };
        self.graph.job_mut(job).troubles.environment.away = Some(away);
        let waited_ms = now.ms_since(away.since);
        self.tell_of_home(job, waited_ms, fault);
        (waited_ms < self.settings.extract_timeout_ms).then_some(away.tries)
    }

    /// After a failure of its environment that is counted: a job is tried again, or held.
    pub(crate) fn try_again(&mut self, job: JobIndex, faults: u32, pause_ms: u64, fault: &str) {
        let (max, all) = (
            self.settings.environment_faults_max,
            self.graph.job(job).troubles.environment.all,
        );
        // Of attempts that last an hour each failure forgets the one before.
        let is_endless = all >= max.saturating_mul(ALL_FAULTS_FACTOR);
        if faults >= max || is_endless {
            let faults = if is_endless { all } else { faults };
            let reason = format!(
                "is held: its environment failed {faults} times, the last time because {fault}"
            );
            self.fail(job, reason, String::new());
        } else {
            self.settle(job, pause_ms);
        }
    }

    /// Whether another failure of a job's environment makes it fail for good.
    fn is_last_environment_fault(&self, job: JobIndex) -> bool {
        let (now, max) = (self.now, self.settings.environment_faults_max);
        let faults = &self.graph.job(job).troubles.environment;
        let hours = u32::try_from(now.ms_since(faults.last) / FORGET_MS).unwrap_or(u32::MAX);
        let count = faults.count.saturating_sub(hours).saturating_add(1);
        let is_endless = faults.all.saturating_add(1) >= max.saturating_mul(ALL_FAULTS_FACTOR);
        count >= max || is_endless
    }

    /// Another failure of a job's environment; answers how many count. For each hour without one
    /// one is forgotten: of a job that takes days many nodes may go.
    pub(crate) fn count_environment_fault(&mut self, job: JobIndex) -> u32 {
        let now = self.now;
        let faults = &mut self.graph.job_mut(job).troubles.environment;
        let hours = now.ms_since(faults.last) / FORGET_MS;
        let hours = u32::try_from(hours).unwrap_or(u32::MAX);
        faults.count = faults.count.saturating_sub(hours).saturating_add(1);
        faults.last = now;
        faults.all = faults.all.saturating_add(1);
        faults.count
    }

    /// A job succeeded: where it failed before, by its own fault as it seemed, the node may be to
    /// blame.
    pub(crate) fn blame_nodes(&mut self, job: JobIndex) {
        let node = self.graph.job_mut(job);
        if !node.troubles.are_any() {
            return;
        }
        node.troubles.killed.clear();
        node.troubles.faulted_on.clear();
        node.troubles.full_on.clear();
        node.troubles.no_room_on.clear();
        (
            node.troubles.environment.last_on,
            node.troubles.environment.away,
        ) = (None, None);
        let here = self.graph.job(job).last_server;
        for server in std::mem::take(&mut self.graph.job_mut(job).troubles.failed_on) {
            if Some(server) == here {
                continue;
            }
            self.fleet.count_blame(server);
            if self
                .policies()
                .failure
                .blames_for_jobs(View::new(self), server)
            {
                self.suspect(server);
                self.tell_aside(server, "fails jobs that succeed on other nodes");
            }
        }
    }

    fn tell_aside(&mut self, server: ServerId, why: &str) {
        let (name, seconds) = (self.fleet.name(server), self.settings.quarantine_ms / 1_000);
        let text = format!(
            "node {name} {why}; it is in quarantine and gets no new jobs for \
                            {seconds} s"
        );
        self.tell(RunWarning {
            job: None,
            volume: None,
            node: Some(server),
            text,
        });
    }

    /// The node of an attempt was lost, or restarted. A job that this happens to again and again,
    /// while few nodes are lost without it, is believed to be the cause.
    pub(crate) fn node_went(&mut self, job: JobIndex, fault: &str) {
        let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        let has_run = self.attempts[&job].stage == AttemptState::Running;
        if has_run {
            // All jobs of a node tell of one and the same loss.
            let is_known = |(gone, at): &(ServerId, Time)| {
                *gone == server && self.now.ms_since(*at) < SAME_LOSS_MS
            };
            if !self.last_gone.as_ref().is_some_and(is_known) {
                self.nodes_gone += 1;
            }
            self.last_gone = Some((server, self.now));
            self.graph.job_mut(job).troubles.killed.push(server);
        }
        let killed = &self.graph.job(job).troubles.killed;
        // Where all jobs run on one node, its losses tell nothing of any of them.
        let is_one_node = killed.iter().all(|gone| Some(gone) == killed.first());
        // Each loss without it asks for one more with it.
        let with = killed.len() as u64;
        let without = self.nodes_gone.saturating_sub(with);
        let is_poison = !is_one_node && with >= self.telling_losses() + without;
        if !(has_run && is_poison) {
            return self.environment_fault(job, fault);
        }
        let mut times: BTreeMap<ServerId, usize> = BTreeMap::new();
        for server in killed {
            *times.entry(*server).or_default() += 1;
        }
        let name = |(server, times): (&ServerId, &usize)| match times {
            1 => self.fleet.name(*server),
            _ => format!("{}, {times} times", self.fleet.name(*server)),
        };
        let names: Vec<String> = times.iter().map(name).collect();
        let others = match without {
            0 => "and no other node was lost",
            _ => "and few other nodes were lost",
        };
        let reason = format!(
            "is held: every node was lost or restarted while it ran there ({}), {others}; run the \
             job alone to find the cause",
            names.join("; ")
        );
        self.abandon_attempt(job);
        self.fail(job, reason, String::new());
    }

    /// So many losses of nodes with a job on each are no chance: where nodes come and go, one of
    /// four is lost with a job that has nothing to do with it every fourth time.
    fn telling_losses(&self) -> u64 {
        let least = self.settings.killed_nodes_max;
        let nodes = self.fleet.alive.max(2);
        // The first loss chose the job.
        let is_telling = |losses: &u32| nodes.saturating_pow(losses - 1) >= TELLING_ODDS;
        let most = least.saturating_mul(2);
        (least..most).find(is_telling).unwrap_or(most).into()
    }

    /// Jobs fail on a node that do not fail elsewhere.
    fn suspect(&mut self, server: ServerId) {
        self.fleet.update(server, |node| node.is_suspect = true);
        self.set_aside(server, self.settings.quarantine_ms);
    }

    /// Gives a node no new work for a while.
    fn set_aside(&mut self, server: ServerId, ms: u64) {
        self.set_aside_until(server, ms, Timer::Aside(server));
    }

    /// As [`Self::set_aside`], with the timer that ends it.
    pub(crate) fn set_aside_until(&mut self, server: ServerId, ms: u64, timer: Timer) {
        let until = self.now.plus_ms(ms);
        let changed = self.fleet.update(server, |node| {
            let is_longer = node.aside_until.is_none_or(|earlier| earlier < until);
            if is_longer {
                node.aside_until = Some(until);
            }
            is_longer
        });
        if changed == Some(true) {
            self.timers.set(until, timer);
        }
    }

    pub(crate) fn use_again(&mut self, server: ServerId) {
        let now = self.now;
        self.fleet.update(server, |node| {
            if node.aside_until.is_some_and(|until| until <= now) {
                node.pardon();
            }
        });
        self.warming.look_again();
        self.queues.wake(server);
    }

    /// A job failed for good: what depends on it does not run, all else goes on.
    pub(crate) fn fail(&mut self, job: JobIndex, reason: String, output_tail: String) {
        self.queues.take(job);
        let last = self.graph.job(job).last_server;
        self.failures.push(JobFailure {
            job,
            name: self.graph.workflow.job(job).name.clone(),
            node: last
                .map(|server| self.fleet.name(server))
                .unwrap_or_default(),
            reason,
            output_tail,
        });
        self.graph.set_state(job, JobState::Failed);
        self.bury(job);
    }

    /// A job does not run because one that it depends on is dead.
    pub(crate) fn skip(&mut self, job: JobIndex) {
        self.queues.take(job);
        self.graph.set_state(job, JobState::Skipped);
        self.bury(job);
    }

    /// Draws the consequences of a job's death: for its descendants and for the volumes of all.
    fn bury(&mut self, job: JobIndex) {
        let mut dead = vec![job];
        let mut next = 0;
        while next < dead.len() {
            // Where a job ran again, those that follow it may have parents that are done.
            for later in self.graph.waiting_for(dead[next]).collect::<Vec<_>>() {
                let state = self.graph.state(later);
                // An attempt under way goes on: its inputs were there when it started.
                if !state.is_final() && state != JobState::Active {
                    self.queues.take(later);
                    self.graph.set_state(later, JobState::Skipped);
                    dead.push(later);
                }
            }
            next += 1;
        }
        for job in dead {
            for (volume, _) in self.graph.mounted(job) {
                self.give_up_extracts(volume);
                self.release_if_unneeded(volume);
            }
            self.release_kept(self.graph.pipeline(job));
            self.end_pipeline_if_final(self.graph.pipeline(job));
        }
        self.wake_for_batch();
        self.unprotect_if_done();
    }

    /// A volume could not be created. It is deleted all the same, as it may exist.
    pub(crate) fn create_failed(&mut self, id: VolumeId, error: &Error) {
        let server = self.volumes.get(id).and_then(|instance| instance.server);
        if let (ErrorCode::StoreLost, Some(server)) = (error.code, server) {
            return self.lose_store(server);
        }
        if self
            .volumes
            .get(id)
            .is_some_and(|i| i.state == InstanceState::Copying)
        {
            self.copy_failed(id);
            return;
        }
        let creating = self
            .volumes
            .get_mut(id)
            .filter(|i| i.state == InstanceState::Creating);
        let Some(instance) = creating else {
            self.delete_late(id);
            return;
        };
        let (volume, server) = (instance.volume, instance.server);
        let waiters = std::mem::take(&mut instance.waiters);
        self.retire(id);
        self.unanswered.remove(&id);
        let Some(server) = server else { return };
        let name = self.graph.workflow.volume(volume).name.clone();
        let node = self.fleet.name(server);
        let fault = format!("volume '{name}' could not be created on node {node}: {error}");
        match error.class() {
            ErrorClass::NoSpace => {
                // What was to come ahead of its readers keeps nobody from working there.
                if !waiters.is_empty() {
                    self.note_full(server, &fault, Finder::Volume);
                }
                let waiters = waiters.into_iter();
                waiters.for_each(|job| self.lacks_room(job, server, &fault));
            }
            ErrorClass::Transient | ErrorClass::VolumeLost => {
                let (cause, waiters) = (Cause::of(error), waiters.into_iter());
                waiters.for_each(|job| self.environment_fault_of(job, &fault, cause));
            }
            ErrorClass::Denied | ErrorClass::Invalid => {
                if !waiters.is_empty() {
                    waiters
                        .into_iter()
                        .for_each(|job| drop(self.end_attempt(job)));
                    self.fail_users(volume, &fault);
                }
            }
        }
    }

    fn fail_users(&mut self, volume: VolumeIndex, reason: &str) {
        for job in self.graph.workflow.volume(volume).users.clone() {
            let is_under_way = self.attempts.contains_key(&job);
            if !self.graph.state(job).is_final() && !is_under_way {
                self.fail(job, reason.to_owned(), String::new());
            }
        }
    }
}
