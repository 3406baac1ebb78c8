//! Everything that the scheduler knows, and what each fact and each timer starts. How facts change
//! the state is in `transition/`, the rules are in `policy/`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex, Workflow};
use serde::{Deserialize, Serialize};

use crate::action::{Action, MountedVolume};
use crate::decision::Decision;
use crate::earlier_work::EarlierWork;
use crate::event::{Event, NodeInfo};
use crate::policy_names::PolicyPositions;
use crate::settings::Settings;
use crate::space::Space;
use crate::state::attempt_index::UnderWay;
use crate::state::attempts::{Attempt, AttemptState};
use crate::state::cache_statistics::CacheStatistics;
use crate::state::copy_costs::Checkpoints;
use crate::state::critical_path::Urgency;
use crate::state::deletions::Leaving;
use crate::state::extractions::Extractions;
use crate::state::isolation::CutOff;
use crate::state::job_records::JobRecords;
use crate::state::jobs::{Graph, JobState};
use crate::state::limits::StrategyLimits;
use crate::state::lost_volumes::LostVolume;
use crate::state::node_surveys::Surveys;
use crate::state::nodes::Fleet;
use crate::state::observed_access::ObservedAccess;
use crate::state::pipeline_homes::Claims;
use crate::state::preemptions::Preemptions;
use crate::state::prefetch::PrefetchState;
use crate::state::progress::{JobFailure, Outcome, Progress};
use crate::state::ready_queue::Queues;
use crate::state::strategy::Guided;
use crate::state::timers::{Timer, Timers};
use crate::state::tracked::{Keys, Rows, Table};
use crate::state::user_commands::Steering;
use crate::state::volume_sizes::Sizes;
use crate::state::volumes::{InstanceState, Volumes};
use crate::strategy_selector::StrategySelector;

/// Ids that one series has, as a power of two.
const SERIES_BITS: u32 = 32;

/// What the core is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// Waits for a fleet that the workflow fits into.
    Gathering,
    /// Runs jobs.
    Running,
    /// Starts nothing any more and deletes what is left.
    Finishing,
    /// Nothing is left.
    Over,
}

/// Decides what a workflow needs done next. Deterministic: equal facts give equal decisions.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub(crate) run: RunId,
    pub(crate) settings: Settings,
    /// Those that the settings name.
    pub(crate) policies: PolicyPositions,
    pub(crate) now: Time,
    pub(crate) phase: Phase,
    pub(crate) is_cancelled: bool,
    /// Since when no node answers, if the scheduler is cut off.
    pub(crate) cut_off: Option<CutOff>,
    pub(crate) graph: Graph,
    pub(crate) volumes: Volumes,
    pub(crate) fleet: Fleet,
    pub(crate) queues: Queues,
    pub(crate) attempts: Table<JobIndex, Attempt>,
    /// The same by node, and by what they read.
    pub(crate) under_way: UnderWay,
    pub(crate) executions: BTreeMap<ExecutionId, JobIndex>,
    pub(crate) extractions: Extractions,
    pub(crate) checkpoints: Checkpoints,
    /// Volumes that a server may still have although they were given up: to be deleted there.
    pub(crate) stale: Table<VolumeId, ServerId>,
    /// Those of them that can be used again if their node comes back and has them.
    pub(crate) left: Table<VolumeId, LostVolume>,
    /// Jobs that were done while there were such volumes, each with the last id given then.
    pub(crate) redone: Table<JobIndex, u64>,
    /// Parts of caches that are being deleted: what they leave is free in a moment.
    pub(crate) leaving: Leaving,
    /// Volumes whose next jobs cannot end on their nodes before these leave.
    pub(crate) wanted_moves: Keys<VolumeIndex>,
    /// Steps until jobs are tried again on nodes that have nothing to do.
    pub(crate) away_rest: usize,
    /// Executions that were given up with their node, which may run them yet: to be killed there.
    pub(crate) orphaned_executions: Table<ExecutionId, ServerId>,
    /// Volumes that were given up while they were being created: they may yet come to exist.
    pub(crate) unanswered: Table<VolumeId, ServerId>,
    /// Volumes that were made after they were given up; their deletion is under way.
    pub(crate) late: Keys<VolumeId>,
    pub(crate) timers: Timers,
    /// Until when the core waits for nodes or space.
    pub(crate) wait_until: Option<Time>,
    /// Beside other runs: since when a job has slots, and no room.
    pub(crate) lacks_room_since: Option<Time>,
    /// Whether it waits for further nodes, some being there.
    pub(crate) is_settling: bool,
    /// When pipelines block each other, the only one that may start jobs.
    pub(crate) protected: Option<u32>,
    /// How often that ended before the pipeline did, since the last pipeline ended.
    pub(crate) unprotected: u32,
    /// Pipelines whose volumes were dropped for others.
    pub(crate) preemptions: Preemptions,
    /// What a strategy limits, when one is followed.
    pub(crate) limits: Option<StrategyLimits>,
    /// How often rules gave way.
    pub(crate) rules_eased: u64,
    /// Which strategy is followed, when the scheduler chooses by itself.
    pub(crate) guided: Option<Guided>,
    /// Where pipelines are at home, and which need room elsewhere.
    pub(crate) claims: Claims,
    /// What was found on nodes lately, for the same question.
    pub(crate) surveys: Surveys,
    /// Losses and restarts of nodes that ran jobs, and the last of them.
    pub(crate) nodes_gone: u64,
    pub(crate) last_gone: Option<(ServerId, Time)>,
    /// What users wished of pipelines.
    pub(crate) steering: Steering,
    /// Sizes that are not declared, or were too small.
    pub(crate) sizes: Sizes,
    /// What is known of finished jobs, for the next run.
    pub(crate) records: JobRecords,
    /// What jobs did, to compare it with what is declared.
    pub(crate) observed_access: ObservedAccess,
    /// What came from home again.
    pub(crate) cache_statistics: CacheStatistics,
    /// Batch volumes that come before their readers start.
    pub(crate) prefetching: PrefetchState,
    /// Caches that are kept only for users that may have to run again.
    pub(crate) idle_caches: Keys<VolumeIndex>,
    /// Which ready jobs go first because of the jobs after them.
    pub(crate) urgency: Urgency,
    /// Whether a job with a free slot found no space since this was last looked at.
    pub(crate) is_space_wanted: bool,
    /// Whether a job that had room was kept back lately, so that others can end.
    pub(crate) is_held_back: bool,
    /// The most scratch space that one job needs at once.
    pub(crate) scratch_need_max: Space,
    /// The largest scratch volume, in bytes.
    pub(crate) scratch_volume_max: u64,
    /// The most that the caches of one job need.
    pub(crate) cache_need_max: Space,
    /// The most CPUs that one job asks for.
    pub(crate) cpus_max: u32,
    /// While finishing: attempts that were left when idle volumes were deleted last.
    pub(crate) cleaned_with: Option<usize>,
    pub(crate) next_id: u64,
    pub(crate) started: u64,
    pub(crate) failures: Rows<JobFailure>,
    pub(crate) messages: Rows<String>,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) out: Vec<Action>,
    /// What was decided, in this order, since it was taken last.
    pub(crate) decisions: Vec<Decision>,
}

impl State {
    /// Of a workflow of which nothing is done yet.
    pub(crate) fn new(
        run: RunId,
        workflow: Arc<Workflow>,
        settings: Settings,
        policies: PolicyPositions,
        selector: &dyn StrategySelector,
    ) -> Self {
        let extractions = Extractions::new(workflow.extracts.len());
        let volumes = Volumes::new(&workflow);
        let graph = Graph::new(workflow);
        let mut scheduler = Self {
            run,
            policies,
            now: Time(0),
            phase: Phase::Gathering,
            is_cancelled: false,
            cut_off: None,
            sizes: Sizes::new(&graph),
            steering: Steering::new(&graph),
            prefetching: PrefetchState::new(&graph),
            graph,
            volumes,
            fleet: Fleet::new(settings.slack_permille).with_limits(settings.user.is_some()),
            queues: Queues::default(),
            attempts: Table::default(),
            under_way: UnderWay::default(),
            executions: BTreeMap::new(),
            extractions,
            checkpoints: Checkpoints::default(),
            stale: Table::default(),
            left: Table::default(),
            redone: Table::default(),
            leaving: Leaving::default(),
            wanted_moves: Keys::default(),
            away_rest: 0,
            orphaned_executions: Table::default(),
            unanswered: Table::default(),
            late: Keys::default(),
            timers: Timers::default(),
            wait_until: None,
            lacks_room_since: None,
            is_settling: false,
            protected: None,
            unprotected: 0,
            preemptions: Preemptions::default(),
            limits: None,
            rules_eased: 0,
            guided: None,
            claims: Claims::default(),
            surveys: Surveys::default(),
            nodes_gone: 0,
            last_gone: None,
            records: JobRecords::default(),
            observed_access: ObservedAccess::default(),
            cache_statistics: CacheStatistics::default(),
            idle_caches: Keys::default(),
            urgency: Urgency::default(),
            is_space_wanted: false,
            is_held_back: false,
            scratch_need_max: Space::ZERO,
            scratch_volume_max: 0,
            cache_need_max: Space::ZERO,
            cpus_max: 1,
            cleaned_with: None,
            next_id: 0,
            started: 0,
            failures: Rows::default(),
            messages: Rows::default(),
            outcome: None,
            out: Vec::new(),
            decisions: Vec::new(),
            settings,
        };
        scheduler.follow_settings(selector);
        scheduler.note_needs();
        scheduler.enqueue_ready();
        scheduler
    }

    /// Takes the limits and the strategy selector that the settings name.
    fn follow_settings(&mut self, selector: &dyn StrategySelector) {
        let rules = self.settings.allocation_rules.clone();
        self.limits = rules.map(|rules| StrategyLimits::new(rules, &self.graph));
        let guide = self.settings.strategy_selector.clone();
        let workflow = &self.graph.workflow;
        self.guided = guide.and_then(|guide| Guided::new(guide, workflow, selector));
    }

    pub(crate) fn enqueue_ready(&mut self) {
        for job in self.graph.job_indexes() {
            if self.graph.state(job) == JobState::Ready {
                self.enqueue(job);
            }
        }
    }

    /// Takes note of the most that one job needs.
    fn note_needs(&mut self) {
        self.scratch_volume_max = self.largest_scratch_volume();
        self.scratch_need_max = self.largest_scratch_need();
        self.cache_need_max = self.largest_cache_need();
        let all = self.graph.job_indexes();
        self.cpus_max = all.map(|job| self.slots_of(job)).max().unwrap_or(1);
    }

    /// Prepares a step at `now`: time passes, and timers that are due fire.
    pub(crate) fn pass_time(&mut self, now: Time, event: &Event) {
        if matches!(event, Event::SchedulerResumed { .. }) {
            self.skip_absence(now);
        }
        // Clocks of machines step back now and then; the core's time does not.
        self.now = self.now.max(now);
        self.checkpoints.observe(self.now, self.fleet.alive);
        while !self.has_time_stopped()
            && let Some(timer) = self.timers.take_due(self.now)
        {
            self.fire(timer);
        }
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_timer(&self) -> Option<Time> {
        let is_none_due = self.phase == Phase::Over || self.has_time_stopped();
        (!is_none_due).then(|| self.timers.next()).flatten()
    }

    /// How the workflow ended, once nothing of it is left.
    pub fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// The workflow.
    pub fn workflow(&self) -> &Arc<Workflow> {
        &self.graph.workflow
    }

    /// The run.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// How it is run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What was last seen of a node, lost or not.
    pub fn node(&self, server: ServerId) -> Option<&NodeInfo> {
        self.fleet.get(server).map(|node| &node.seen)
    }

    /// All nodes that were seen, lost or not.
    pub fn nodes(&self) -> impl Iterator<Item = (ServerId, &NodeInfo)> {
        self.fleet.iter().map(|(server, node)| (server, &node.seen))
    }

    /// Whether a node that was seen has been given up since.
    pub fn is_lost(&self, server: ServerId) -> bool {
        self.fleet.get(server).is_some_and(|node| node.is_lost)
    }

    /// Whether a node said that it drains.
    pub fn is_draining(&self, server: ServerId) -> bool {
        self.fleet.is_draining(server)
    }

    /// What the run's own volumes reserve on a node.
    pub fn reserved(&self, server: ServerId) -> Space {
        self.fleet
            .get(server)
            .map_or(Space::ZERO, |node| node.reserved)
    }

    /// The job of an execution that is under way, with its node.
    pub fn execution(&self, execution: ExecutionId) -> Option<(JobIndex, ServerId)> {
        let job = *self.executions.get(&execution)?;
        Some((job, self.attempts.get(&job)?.server))
    }

    /// How many executions of a job ended.
    pub fn ended_attempts(&self, job: JobIndex) -> u32 {
        self.graph.job(job).ended
    }

    /// When the last event was received, or later where the clock was set back.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Where a job is in its life.
    pub fn job_state(&self, job: JobIndex) -> JobState {
        self.graph.state(job)
    }

    /// Jobs that are done.
    pub fn jobs_done(&self) -> u64 {
        self.graph.totals.done
    }

    /// Records of jobs, volumes, nodes and queues that were looked at so far: how much work the
    /// decisions were, whatever the machine.
    pub fn records_examined(&self) -> u64 {
        let (volumes, nodes) = (self.volumes.tally.total(), self.fleet.tally.total());
        self.graph.tally.total() + volumes + nodes + self.queues.tally.total()
    }

    /// Executions that run and must be watched.
    pub fn running_executions(&self) -> impl Iterator<Item = (ExecutionId, ServerId)> {
        let is_running = |attempt: &&Attempt| attempt.stage == AttemptState::Running;
        self.attempts
            .values()
            .filter(is_running)
            .map(|attempt| (attempt.execution, attempt.server))
    }

    /// The execution of a job that runs, and its node.
    pub fn running_attempt(&self, job: JobIndex) -> Option<(ExecutionId, ServerId)> {
        let attempt = self.attempts.get(&job)?;
        (attempt.stage == AttemptState::Running).then_some((attempt.execution, attempt.server))
    }

    /// Volumes that are ready, by server: what must be kept alive.
    pub fn ready_volumes(&self) -> BTreeMap<ServerId, Vec<VolumeId>> {
        let mut ready: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        for (id, instance) in self.volumes.iter() {
            if let (true, Some(server)) = (instance.state.is_complete(), instance.server) {
                ready.entry(server).or_default().push(id);
            }
        }
        ready
    }

    /// Volumes that hold results which are not at home: what must outlive this scheduler.
    pub fn result_volumes(&self) -> BTreeSet<VolumeId> {
        self.extractions.holders()
    }

    /// Whether results are left that could not be sent home, for the user to fetch.
    pub fn has_unsent_results(&self) -> bool {
        !self.extractions.kept().is_empty()
    }

    /// Everything that was asked for and not answered yet; what a driver does first after a
    /// restart. All of it is safe to repeat.
    pub fn outstanding_actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (id, instance) in self.volumes.iter() {
            let Some(server) = instance.server else {
                continue;
            };
            let (volume, size) = (instance.volume, instance.size);
            match instance.state {
                InstanceState::Creating => {
                    actions.push(Action::CreateVolume {
                        id,
                        volume,
                        server,
                        size,
                    });
                }
                InstanceState::Copying => actions.extend(self.copy_action(id, instance)),
                InstanceState::Deleting => actions.push(Action::DeleteVolume { id, server }),
                InstanceState::Ready | InstanceState::Copy | InstanceState::Held => {}
            }
        }
        let asked = self.asked_for().into_iter();
        actions.extend(asked.map(|(server, volumes)| Action::FindVolumes { server, volumes }));
        let is_awaited = |id: &VolumeId| self.left.get(id).is_some_and(LostVolume::is_awaited);
        for (&id, &server) in self.stale.iter().filter(|(id, server)| {
            !is_awaited(id) && !self.is_lost(**server) || self.late.contains(id)
        }) {
            actions.push(Action::DeleteVolume { id, server });
        }
        let orphaned_executions = self.orphaned_executions.iter();
        let orphaned_executions = orphaned_executions.filter(|(_, server)| !self.is_lost(**server));
        actions.extend(
            orphaned_executions.map(|(&execution, &server)| Action::KillJob { execution, server }),
        );
        for (job, attempt) in &self.attempts {
            let (execution, server) = (attempt.execution, attempt.server);
            match attempt.stage {
                AttemptState::Starting => actions.push(self.start_action(*job, attempt)),
                AttemptState::Stopping => actions.push(Action::KillJob { execution, server }),
                AttemptState::Preparing | AttemptState::Running => {}
            }
        }
        actions.extend(self.asked_to_warm());
        for (index, extract, id) in self.extractions.under_way() {
            let volume = self.graph.workflow.extracts[index as usize].volume;
            let server = self.volumes.get(id).and_then(|instance| instance.server);
            let source = MountedVolume { volume, id, server };
            actions.push(Action::ExtractFile {
                extract,
                index,
                source,
            });
        }
        if let Some(outcome) = &self.outcome {
            actions.push(Action::Finish {
                outcome: outcome.clone(),
            });
        }
        actions
    }

    /// Jobs that failed for good so far, in the order of their failing.
    pub fn failures(&self) -> &[JobFailure] {
        &self.failures
    }

    /// What else went wrong so far.
    pub fn messages(&self) -> &[String] {
        &self.messages
    }

    /// Numbers for a progress display.
    pub fn progress(&self) -> Progress {
        let totals = self.graph.totals;
        let running = self
            .attempts
            .values()
            .filter(|attempt| attempt.stage == AttemptState::Running);
        Progress {
            jobs_total: self.graph.workflow.jobs.len() as u64,
            jobs_done: totals.done,
            jobs_running: running.count() as u64,
            jobs_failed: totals.failed,
            jobs_skipped: totals.skipped,
            executions: self.started,
            extracts_total: self.graph.workflow.extracts.len() as u64,
            extracts_done: self.extractions.done,
            extracted_bytes: self.extractions.bytes,
            extracts_failed: self.extractions.failed,
            volumes: self.volumes.len() as u64,
            nodes: self.fleet.live().count() as u64,
            nodes_lost: self.fleet.lost,
        }
    }

    /// The next id of this run: never used before, and the same again in a replay.
    pub(crate) fn next_id(&mut self) -> u128 {
        self.next_id += 1;
        self.run.derive(self.next_id)
    }

    /// The last number that [`Self::next_id`] made an id of.
    pub(crate) fn last_id(&self) -> u64 {
        self.next_id
    }

    /// Applies one fact. Few are taken over as they are: the others are of use to the caller.
    pub(crate) fn apply(&mut self, event: &Event) {
        match *event {
            Event::NodesListed {
                ref nodes,
                unlisted: ref missed,
            } => self.servers_seen(nodes.clone(), missed),
            Event::QuotasChanged { ref quotas } => self.quotas_changed(quotas),
            Event::ServerSilent { server } => self.lose_server(server),
            Event::CutOff {
                silent_ms,
                has_catalog,
            } => self.begin_cut_off(silent_ms, has_catalog),
            Event::Reconnected => self.end_cut_off(),
            Event::VolumeCreated { volume } => self.volume_created(volume),
            Event::VolumeCopied {
                volume,
                received_bytes,
            } => self.volume_copied(volume, received_bytes),
            Event::SourceWarningsReceived {
                volume,
                ref warnings,
            } => self.volume_warned(volume, warnings),
            Event::VolumeCreateFailed { volume, ref error } => self.create_failed(volume, error),
            Event::JobStarted { execution } => self.job_started(execution),
            Event::JobStartFailed {
                execution,
                ref error,
            } => self.start_failed(execution, error),
            Event::JobEnded {
                execution,
                ref report,
            } => self.job_ended(execution, report),
            Event::JobUnknown { execution } => self.job_unknown(execution),
            // It is kept for the driver: the core knows no homes.
            Event::HomeListed { .. } => {}
            Event::CacheInspected {
                volume,
                refetched_bytes,
                ..
            } => self.note_refetched(volume, refetched_bytes),
            Event::VolumesProbed { server, ref lost } => self.volumes_probed(server, lost),
            Event::VolumesFound { server, ref found } => self.volumes_found(server, found),
            Event::EarlierWorkFound(ref work) => self.earlier_work_found(EarlierWork::clone(work)),
            Event::ResultIdentified { index, identity } => self.result_identified(index, identity),
            Event::FileExtracted { extract, bytes } => self.file_extracted(extract, bytes),
            Event::ExtractFailed { extract, ref error } => self.extract_failed(extract, error),
            Event::VolumeDeleted { volume } => self.volume_deleted(volume),
            Event::VolumeDeleteFailed { volume } => self.delete_failed(volume),
            Event::CancelRequested => self.cancel(),
            Event::CommandReceived { count, command } => self.steer(count, command),
            Event::Tick => {}
            Event::SchedulerResumed { id_prefix: series } => {
                self.next_id = u64::from(series) << SERIES_BITS;
                self.delete_unanswered();
            }
        }
    }

    /// While no scheduler ran nothing could be heard and nobody was waited for.
    fn skip_absence(&mut self, now: Time) {
        let away_ms = now.ms_since(self.now);
        self.put_off(away_ms);
        if let Some(cut_off) = &mut self.cut_off {
            cut_off.since = cut_off.since.plus_ms(away_ms);
        }
    }

    /// What was to happen after so long happens as much later.
    pub(crate) fn put_off(&mut self, away_ms: u64) {
        self.timers.put_off(away_ms);
        self.wait_until = self.wait_until.map(|until| until.plus_ms(away_ms));
        self.lacks_room_since = self.lacks_room_since.map(|since| since.plus_ms(away_ms));
        self.fleet.put_off(away_ms);
        self.extractions.put_off(away_ms);
        self.checkpoints.put_off(away_ms);
        if let Some(guided) = &mut self.guided {
            guided.put_off(away_ms);
        }
    }

    fn fire(&mut self, timer: Timer) {
        match timer {
            Timer::Missing(server) => self.give_up_missing(server),
            Timer::Aside(server) | Timer::Full(server) => self.end_quarantine(server),
            Timer::Job(job) => {
                if self.graph.state(job) == JobState::HeldBack {
                    self.settle(job, 0);
                }
            }
            Timer::Extract(index) => self.send_again(index),
            Timer::Copy(id) => self.copy_is_overdue(id),
            Timer::Delete(volume) => self.delete_again(volume),
            Timer::Cleanup => self.stop_cleaning(),
            // The time is compared where it matters.
            Timer::WaitTimeout => {}
        }
    }
}
