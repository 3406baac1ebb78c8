//! The simulation itself: the next due event, and its recipient. Decides nothing: the scheduler
//! core does, and `action_handling.rs` obeys.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;

use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, VolumeId};
use bafs_proto::time::Time;
use bafs_sched::io::journal::JournalHeader;
use bafs_sched::{Action, Event, MountedVolume, Outcome, Scheduler};
use bafs_workflow::{FirstUsers, JobIndex, VolumeIndex, Workflow};

use super::cluster_caches::{ClusterCaches, Warmings};
use super::flows::{FlowOwner, FlowPair, PendingFlow, TransferStep, VolumeFill};
use super::link::{FlowId, Link, SECOND_US};
use super::load::WorkflowJobs;
use super::node::{Scan, SimulatedNode, build_nodes, count_computing_nodes, node_index};
use super::policy::Scenario;
use super::simulation_result::{
    ExecutionSpan, SimulationResult, StalledRunError, UsageSample, UsageSamples,
};
use super::volume_contents::VolumeContents;
use crate::planner::Shape;
use crate::seeded_rng::SeededRng;
use crate::strategy_selector::ModelSelector;

/// The simulator counts so far, in microseconds: sums of two times must not overflow.
const HORIZON_US: u64 = u64::MAX / 2;

/// Attempts that every run may have, however few its jobs: bad luck is no reason to stop.
const ATTEMPTS_MIN: u64 = 2_000;

/// Records that may be examined without progress for each job and node, beyond the scenario's: at
/// the start each is examined many times.
const WASTED_RECORDS_PER_ITEM: u64 = 2_000;

/// Takes the time of the scheduler's decisions, or does not.
pub trait StepTimer {
    /// A fact that the scheduler is about to be told.
    fn note_event(&mut self, _now: Time, _event: &Event) {}

    /// Does `step`.
    fn time_step(&mut self, step: impl FnOnce());
}

/// Takes no time.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoStepTimer;

impl StepTimer for NoStepTimer {
    fn time_step(&mut self, step: impl FnOnce()) {
        step();
    }
}

/// An event of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SimulationEvent {
    /// A flow of a link may have ended.
    FlowMayEnd(u32),
    /// An execution has computed.
    Computed(u32, u32),
    /// Some node fails.
    RandomNodeFails,
    /// This node fails.
    NodeFails(u32),
    /// The callers of this node time out.
    NodeGivenUp(u32),
    /// A node comes.
    NodeArrives(u32),
    /// A failed node has restarted and is listed.
    NodeReplaced(u32),
    /// A node leaves permanently.
    NodeLeaves(u32),
    /// The catalog notices that a node is present or absent.
    CatalogNotices(u32),
    /// The catalog has another list.
    CatalogLists,
}

/// An execution on a node.
#[derive(Debug, Clone)]
pub(super) struct SimulatedExecution {
    pub(super) id: ExecutionId,
    pub(super) generation: u32,
    pub(super) job: JobIndex,
    pub(super) node: u32,
    pub(super) volumes: Vec<MountedVolume>,
    /// How many things it has begun.
    pub(super) step: usize,
    /// Flows that the present thing waits for.
    pub(super) pending_count: u32,
    /// Levels that its read still has to pass, the next one last.
    pub(super) transfer_steps: Vec<TransferStep>,
    /// Bytes that it reads through its node's memory.
    pub(super) scan: Option<(Scan, u32)>,
    /// Its flows in progress: one, or one at each end.
    pub(super) pending_flows: [Option<PendingFlow>; 2],
    pub(super) started_us: u64,
}

/// A file on its way home.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimulatedExtract {
    /// From this node.
    pub(super) node: u32,
    pub(super) flows: FlowPair,
    pub(super) bytes: u64,
}

/// A simulated run of a workflow.
#[derive(Debug)]
pub struct Simulation {
    pub(super) scheduler: Scheduler,
    pub(super) scenario: Scenario,
    first_users: FirstUsers,
    /// Volumes without a declared size.
    pub(super) unsized_volumes: BTreeSet<VolumeIndex>,
    pub(super) now: u64,
    due_events: BinaryHeap<Reverse<(u64, u64, SimulationEvent)>>,
    next_sequence: u64,
    /// Due events, and records that the simulator itself examined for them.
    pub(super) records_examined: u64,
    /// The most jobs done at once so far, and the records examined until then.
    progress_mark: (u64, u64),
    /// Facts that the core gets immediately.
    pub(super) pending_events: VecDeque<Event>,
    actions: Vec<Action>,
    pub(super) nodes: Vec<SimulatedNode>,
    /// Each node's link and disk, then each cluster's link to home, then its peers altogether;
    /// then those of the nodes that have parts of a cache, as caches come.
    pub(super) links: Vec<Link<FlowOwner>>,
    /// The next check of each link.
    link_checks: Vec<u64>,
    pub(super) clusters: usize,
    /// For each cluster, how many nodes compute.
    pub(super) computing_nodes: Vec<u32>,
    pub(super) caches: ClusterCaches,
    pub(super) warmings: Warmings,
    pub(super) executions: Vec<SimulatedExecution>,
    pub(super) free_executions: Vec<u32>,
    /// The execution of each job, if one is running.
    pub(super) execution_of: Vec<u32>,
    /// Volumes on their way.
    pub(super) fills: BTreeMap<VolumeId, VolumeFill>,
    pub(super) volume_contents: VolumeContents,
    pub(super) extracts: BTreeMap<ExtractionId, SimulatedExtract>,
    pub(super) rng: SeededRng,
    /// Nodes whose presence the catalog has lately noticed to change.
    pub(super) noticed_nodes: Vec<u32>,
    pub(super) result: SimulationResult,
    samples: UsageSamples,
    pub(super) running_jobs: u32,
    pub(super) scratch_bytes: u64,
    pub(super) cache_bytes: u64,
}

impl Simulation {
    /// A simulation of which nothing has happened yet.
    pub fn new(workflow: Workflow, scenario: Scenario) -> Self {
        // Allocations do not depend on the spread of run times.
        let shape = Shape::from_workflow(&workflow, 0.0);
        let settings = scenario.settings(&shape);
        let (jobs, first_users) = (workflow.jobs.len(), workflow.first_users());
        let volumes = (0..).map(VolumeIndex).zip(&workflow.volumes);
        let unknown = volumes.filter(|(_, volume)| volume.size_bytes == 0);
        let unknown = unknown.map(|(index, _)| index).collect();
        let (nodes, clusters) = build_nodes(&scenario.environment);
        let links = build_links(&scenario, &nodes, clusters.len());
        let mut simulation = Self {
            scheduler: Scheduler::with_strategy_selector(
                RunId(scenario.seed),
                workflow,
                settings,
                &ModelSelector,
            ),
            first_users,
            unsized_volumes: unknown,
            now: 0,
            due_events: BinaryHeap::new(),
            next_sequence: 0,
            records_examined: nodes.len() as u64,
            progress_mark: (0, 0),
            pending_events: VecDeque::new(),
            actions: Vec::new(),
            computing_nodes: count_computing_nodes(&scenario.environment, &nodes, clusters.len()),
            nodes,
            link_checks: vec![u64::MAX; links.len()],
            links,
            clusters: clusters.len(),
            caches: ClusterCaches::default(),
            warmings: Warmings::default(),
            executions: Vec::new(),
            free_executions: Vec::new(),
            execution_of: vec![u32::MAX; jobs],
            fills: BTreeMap::new(),
            volume_contents: VolumeContents::default(),
            extracts: BTreeMap::new(),
            rng: SeededRng::new(scenario.seed ^ 0xfa11),
            noticed_nodes: Vec::new(),
            result: SimulationResult::empty(),
            samples: UsageSamples::default(),
            running_jobs: 0,
            scratch_bytes: 0,
            cache_bytes: 0,
            scenario,
        };
        simulation.noticed_nodes = (0..simulation.nodes.len() as u32).collect();
        simulation.update_listing();
        simulation.schedule_failure();
        for (at, node) in std::mem::take(&mut simulation.scenario.failures) {
            simulation.schedule_event(at, SimulationEvent::NodeFails(node));
        }
        simulation.schedule_arrivals();
        simulation
    }

    /// What a journal of this run would say first.
    pub fn journal_header(&self) -> JournalHeader {
        JournalHeader {
            run: self.scheduler.run(),
            workflow: Arc::clone(self.scheduler.workflow()),
            settings: self.scheduler.settings().clone(),
        }
    }

    /// Runs to the end of the workflow, or until too much work is wasted, or until the end of the
    /// simulated clock; the outcome tells which.
    ///
    /// # Errors
    /// When nothing is due any more, although the workflow is not over: a defect.
    pub fn run(self) -> Result<SimulationResult, StalledRunError> {
        self.run_timed(&mut NoStepTimer)
    }

    /// The same, while `watch` takes the time of decisions.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn run_timed(
        mut self,
        watch: &mut impl StepTimer,
    ) -> Result<SimulationResult, StalledRunError> {
        while !self.is_over_after_events(watch) {
            self.advance(watch)?;
        }
        Ok(self.into_result())
    }

    /// The same, or `None` beyond so many microseconds. Returns the examined records as well.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn run_until(
        mut self,
        limit_us: u64,
    ) -> Result<(Option<SimulationResult>, u64), StalledRunError> {
        while !self.is_over_after_events(&mut NoStepTimer) {
            self.advance(&mut NoStepTimer)?;
            if self.now > limit_us {
                return Ok((None, self.total_records_examined()));
            }
        }
        let looked_at = self.total_records_examined();
        Ok((Some(self.into_result()), looked_at))
    }

    /// Gives the core the known facts; returns whether the workflow is over.
    fn is_over_after_events(&mut self, watch: &mut impl StepTimer) -> bool {
        while let Some(fact) = self.pending_events.pop_front() {
            self.apply_event(fact, watch);
        }
        if let Some(outcome) = self.scheduler.outcome() {
            self.result.outcome = outcome.clone();
            return true;
        }
        if let Some(why) = self.why_hopeless() {
            self.result.outcome = self.abandoned_outcome(&why);
            return true;
        }
        if self.next_due_us().is_some_and(|next| next > HORIZON_US) {
            self.result.outcome = self.overtime_outcome();
            return true;
        }
        false
    }

    /// When something is due next.
    fn next_due_us(&self) -> Option<u64> {
        let first = self.due_events.peek().map(|Reverse((at, ..))| *at);
        first.into_iter().chain(self.next_timer()).min()
    }

    fn next_timer(&self) -> Option<u64> {
        self.scheduler
            .next_timer()
            .map(|at| at.0.saturating_mul(1_000))
    }

    fn overtime_outcome(&self) -> Outcome {
        let progress = self.scheduler.progress();
        let years = HORIZON_US / SECOND_US / (365 * 24 * 3_600);
        let message = format!(
            "simulation stopped with {} of {} jobs done: the next event is more than {years} years \
             after the start, the limit of the simulator",
            progress.jobs_done, progress.jobs_total
        );
        Outcome::Failed {
            jobs: Vec::new(),
            messages: vec![message],
        }
    }

    /// Executions and failures of nodes, each of which costs time to simulate, that a run may have.
    fn attempts_max(&self) -> u64 {
        let jobs = self.execution_of.len() as u64;
        ATTEMPTS_MIN + jobs * u64::from(self.scenario.attempts_per_job_max)
    }

    /// Records examined so far.
    fn total_records_examined(&self) -> u64 {
        self.records_examined + self.scheduler.records_examined()
    }

    /// Why the run is not worth going on with, if so.
    fn why_hopeless(&mut self) -> Option<String> {
        if self.result.executions + self.result.failures > self.attempts_max() {
            return Some("nodes fail faster than pipelines finish".to_owned());
        }
        let looked_at = self.total_records_examined();
        let most = self.scenario.records_examined_max;
        if looked_at > most {
            return Some(format!(
                "it examined more than {most} records, the limit of a simulation"
            ));
        }
        let done = self.scheduler.jobs_done();
        if done > self.progress_mark.0 {
            self.progress_mark = (done, looked_at);
        }
        let each = (self.execution_of.len() + self.nodes.len()) as u64;
        let in_vain = WASTED_RECORDS_PER_ITEM.saturating_mul(each);
        let in_vain = in_vain.saturating_add(self.scenario.wasted_records_max);
        (looked_at - self.progress_mark.1 > in_vain)
            .then(|| format!("no job finished while it examined {in_vain} records"))
    }

    fn abandoned_outcome(&self, why: &str) -> Outcome {
        let progress = self.scheduler.progress();
        let message = format!(
            "simulation stopped after {} simulated s, {} job starts and {} node failures, with {} \
             of {} jobs done: {why}",
            self.now / SECOND_US,
            self.result.executions,
            self.result.failures,
            progress.jobs_done,
            progress.jobs_total
        );
        Outcome::Failed {
            jobs: Vec::new(),
            messages: vec![message],
        }
    }

    fn into_result(mut self) -> SimulationResult {
        self.result.records_examined = self.total_records_examined();
        self.result.samples = std::mem::take(&mut self.samples).into_samples();
        self.end_warming();
        for cluster in 0..self.clusters {
            let home = self.home_link(cluster as u32);
            self.result.home_bytes += self.links[home as usize].crossed_bytes;
        }
        self.result.rule_relaxations = self.scheduler.rule_relaxations();
        self.result.strategy_changes = self.scheduler.strategy_changes().to_vec();
        self.result
    }

    fn advance(&mut self, watch: &mut impl StepTimer) -> Result<(), StalledRunError> {
        self.records_examined += 1;
        let timer = self.next_timer();
        let first = self.due_events.peek().map(|Reverse((at, ..))| *at);
        if let Some(timer) = timer
            && first.is_none_or(|first| timer < first)
        {
            self.now = self.now.max(timer);
            self.apply_event(Event::Tick, watch);
            return Ok(());
        }
        let Some(Reverse((at, _, due))) = self.due_events.pop() else {
            let progress = self.scheduler.progress();
            return Err(StalledRunError(format!(
                "no event is pending after {} s, but only {} of {} jobs are done",
                self.now / SECOND_US,
                progress.jobs_done,
                progress.jobs_total
            )));
        };
        self.now = at;
        match due {
            SimulationEvent::FlowMayEnd(link) => self.check_link_at(link, at),
            SimulationEvent::Computed(execution, generation) => {
                self.finish_flow(execution, generation)
            }
            SimulationEvent::RandomNodeFails => {
                self.schedule_failure();
                let node = self.rng.next_below(self.nodes.len() as u64) as u32;
                self.fail_node(node);
            }
            SimulationEvent::NodeFails(node) => self.fail_server(node),
            SimulationEvent::NodeGivenUp(node) => self.give_up_node(node),
            SimulationEvent::NodeArrives(node) => self.add_node(node),
            SimulationEvent::NodeReplaced(node) => self.replace_node(node),
            SimulationEvent::NodeLeaves(node) => self.remove_node(node),
            SimulationEvent::CatalogNotices(node) => self.notice_node(node),
            SimulationEvent::CatalogLists => self.update_listing(),
        }
        Ok(())
    }

    fn apply_event(&mut self, fact: Event, watch: &mut impl StepTimer) {
        let (scheduler, actions) = (&mut self.scheduler, &mut self.actions);
        let now = Time(self.now / 1_000);
        watch.note_event(now, &fact);
        watch.time_step(|| scheduler.step(now, fact, actions));
        self.result.events += 1;
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            self.serve_action(action);
        }
        self.actions = actions;
    }

    pub(super) fn schedule_event(&mut self, at: u64, due: SimulationEvent) {
        self.next_sequence += 1;
        self.due_events.push(Reverse((at, self.next_sequence, due)));
    }

    /// Starts a flow of an execution, a cache or a volume.
    pub(super) fn start_flow(&mut self, link: u32, bytes: u64, owner: FlowOwner) -> FlowId {
        self.pause_warming(link);
        let id = self.links[link as usize].start_flow(self.now, bytes, owner);
        self.schedule_link_check(link);
        id
    }

    /// Adds a link without a rate of its own, on which one flow gets at most the rate of a node's
    /// link.
    pub(super) fn add_link(&mut self, flow_rate_max: u64, latency_us: u64) -> u32 {
        self.links
            .push(Link::new(0, flow_rate_max).with_latency(latency_us));
        self.link_checks.push(u64::MAX);
        self.links.len() as u32 - 1
    }

    pub(super) fn set_rate(&mut self, link: u32, rate: u64) {
        self.links[link as usize].set_rate(self.now, rate);
        self.link_checks[link as usize] = u64::MAX;
        self.schedule_link_check(link);
    }

    /// Ends a flow before its time; answers how many bytes of it did not cross.
    pub(super) fn cut_flow(&mut self, link: u32, id: FlowId) -> u64 {
        let left = self.cut_and_free(link, id);
        if let Some(cluster) = self.cluster_of(link) {
            self.start_warming(cluster);
        }
        left
    }

    /// The same, and frees the link.
    pub(super) fn cut_and_free(&mut self, link: u32, id: FlowId) -> u64 {
        let left = self.links[link as usize].cut_flow(self.now, id);
        self.schedule_link_check(link);
        left
    }

    /// Schedules a check of a link for the end of its next flow.
    fn schedule_link_check(&mut self, link: u32) {
        // An end that is later than can be counted is due all the same, beyond the horizon.
        let end = self.links[link as usize].next_end();
        if let Some(end) = end.map(|end| end.min(u64::MAX - 1))
            && end < self.link_checks[link as usize]
        {
            self.link_checks[link as usize] = end;
            self.schedule_event(end, SimulationEvent::FlowMayEnd(link));
        }
    }

    fn check_link_at(&mut self, link: u32, at: u64) {
        if self.link_checks[link as usize] != at {
            return;
        }
        self.link_checks[link as usize] = u64::MAX;
        while let Some(owner) = self.links[link as usize].take_ended(self.now) {
            self.handle_flow_end(link, owner);
        }
        if let Some(cluster) = self.cluster_of(link) {
            self.start_warming(cluster);
        }
        self.schedule_link_check(link);
    }

    pub(super) fn record_sample(&mut self) {
        self.result.scratch_bytes_max = self.result.scratch_bytes_max.max(self.scratch_bytes);
        self.result.cache_bytes_max = self.result.cache_bytes_max.max(self.cache_bytes);
        if self.scenario.is_recorded {
            self.samples.add_sample(UsageSample {
                at_us: self.now,
                running: self.running_jobs,
                scratch_bytes: self.scratch_bytes,
                cache_bytes: self.cache_bytes,
            });
        }
    }

    pub(super) fn record_span(&mut self, execution: u32, is_done: bool) {
        let SimulatedExecution {
            job,
            node,
            started_us: started,
            ..
        } = self.executions[execution as usize];
        self.result.busy_us += u128::from(self.now - started);
        if is_done {
            self.result.elapsed_us = self.now;
        }
        if self.scenario.is_recorded {
            let (start_us, end_us) = (started, self.now);
            self.result.execution_spans.push(ExecutionSpan {
                job: job.0,
                node,
                start_us,
                end_us,
                has_succeeded: is_done,
            });
        }
    }

    pub(super) fn workflow_jobs(&self) -> WorkflowJobs<'_> {
        WorkflowJobs {
            workflow: self.scheduler.workflow(),
            first_users: &self.first_users,
            unsized_volumes: &self.unsized_volumes,
        }
    }

    pub(super) fn node_position(&self, server: bafs_proto::ids::ServerId) -> usize {
        node_index(server)
    }
}

/// The links of all nodes and clusters, in the order of [`Simulation::links`].
fn build_links(
    scenario: &Scenario,
    nodes: &[SimulatedNode],
    clusters: usize,
) -> Vec<Link<FlowOwner>> {
    let environment = &scenario.environment;
    let usual = environment.local_bytes_per_s;
    let mut links = Vec::with_capacity(2 * (nodes.len() + clusters));
    let (mut serving, mut fastest) = (vec![0u64; clusters], vec![0u64; clusters]);
    let mut classes = vec![0; clusters];
    for node in nodes {
        let class = &environment.nodes[node.class as usize];
        let local = class.local_bytes_per_s.unwrap_or(usual);
        let disk = class.disk_bytes_per_s.unwrap_or(local);
        links.push(Link::new(local, local).with_latency(class.local_latency_us));
        links.push(Link::new(disk, disk));
        let cluster = node.cluster as usize;
        classes[cluster] = node.class as usize;
        fastest[cluster] = fastest[cluster].max(local);
        if class.storage_bytes > 0 {
            serving[cluster] = serving[cluster].saturating_add(local);
        }
    }
    let class_of = |cluster: usize| &environment.nodes[classes[cluster]];
    links.extend((0..clusters).map(|cluster| {
        let class = class_of(cluster);
        let home = class.home_bytes_per_s;
        let home = home.unwrap_or(environment.home_bytes_per_s);
        let link = Link::new(home, fastest[cluster]).with_burst(class.home_burst_us);
        link.with_latency(class.home_latency_us)
    }));
    links.extend((0..clusters).map(|cluster| {
        let latency_us = class_of(cluster).local_latency_us;
        Link::new(serving[cluster], fastest[cluster]).with_latency(latency_us)
    }));
    links
}
