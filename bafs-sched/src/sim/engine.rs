//! The simulation itself: what is due next, and who is told. Decides nothing: the scheduler core
//! does, and `serve.rs` obeys.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, VolumeId};
use bafs_proto::time::Time;

use super::clusters::Caches;
use super::copying::Copying;
use super::link::{FlowId, Link, SECOND_US};
use super::load::Jobs;
use super::node::{Node, Scan, node_of, nodes_of};
use super::policy::Scenario;
use super::reading::Level;
use super::record::{Moment, Moments, Run, Spell, Stuck};
use super::transfer::{Flows, Passing};
use super::warming::Warmings;
use crate::dice::SeededRng;
use crate::logic::{Action, Event, MountedVolume, Outcome, Scheduler};
use crate::planner::Shape;
use crate::workflow::{FirstUsers, JobIndex, VolumeIndex, Workflow};

/// The simulator counts so far, in microseconds: sums of two times must not overflow.
const HORIZON_US: u64 = u64::MAX / 2;

/// Attempts that every run may have, however few its jobs: bad luck is no reason to give up.
const ATTEMPTS_MIN: u64 = 2_000;

/// Records that may be looked at in vain for each job and node, beside those of the scenario: at
/// the beginning each is looked at many times.
const IN_VAIN_FOR_EACH: u64 = 2_000;

/// Takes the time of the scheduler's decisions, or does not.
pub trait Watch {
    /// Does `step`.
    fn step(&mut self, step: impl FnOnce());
}

/// Takes no time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn step(&mut self, step: impl FnOnce()) {
        step();
    }
}

/// Whose a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    /// An execution's, with its generation.
    Execution(u32, u32),
    /// A cache's.
    Fetch(u32),
    /// A cluster's, in the background.
    Warm(u32),
    /// A scratch volume's that is filled from home.
    Fill(VolumeId),
    /// A file's on its way home.
    Extract(ExtractionId),
}

/// What happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    /// A flow of a link may have ended.
    Link(u32),
    /// An execution has computed.
    Computed(u32, u32),
    /// Some node fails.
    Fail,
    /// This node fails.
    FailOf(u32),
    /// Who called this node in vain gives it up.
    Silent(u32),
    /// A node comes.
    Return(u32),
    /// A node that failed is there again, and listed.
    Replaced(u32),
    /// A node leaves for good.
    Leave(u32),
    /// The catalog notices that a node is there, or that it is not.
    Noticed(u32),
    /// The catalog has another list.
    List,
}

/// An execution on a node.
#[derive(Debug, Clone)]
pub(super) struct Execution {
    pub(super) id: ExecutionId,
    pub(super) generation: u32,
    pub(super) job: JobIndex,
    pub(super) node: u32,
    pub(super) volumes: Vec<MountedVolume>,
    /// How many things it has begun.
    pub(super) step: usize,
    /// Flows that the present thing waits for.
    pub(super) waits: u32,
    /// What the thing that it reads has to pass after that, the next one last.
    pub(super) levels: Vec<Level>,
    /// What it reads through its node's memory.
    pub(super) scan: Option<(Scan, u32)>,
    /// Its flows under way: one, or one at each end.
    pub(super) flows: [Option<Passing>; 2],
    pub(super) started: u64,
}

/// What comes into a volume.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fill {
    pub(super) from: Filler,
    pub(super) flows: Flows,
}

/// A file on its way home.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    /// From this node.
    pub(super) node: u32,
    pub(super) flows: Flows,
    pub(super) bytes: u64,
}

/// From where a volume is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filler {
    Home,
    /// The node of the volume that is copied.
    Node(u32),
}

/// A workflow on machines that are not there.
#[derive(Debug)]
pub struct Simulation {
    pub(super) scheduler: Scheduler,
    pub(super) scenario: Scenario,
    first_users: FirstUsers,
    /// Volumes of which nobody declares a size.
    pub(super) unknown: BTreeSet<VolumeIndex>,
    pub(super) now: u64,
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    next: u64,
    /// Things that were due, and records that the simulator itself looked at for them.
    pub(super) looked_at: u64,
    /// The most jobs that were done at once so far, and what had been looked at then.
    forward: (u64, u64),
    /// Facts that the core is told at once.
    pub(super) facts: VecDeque<Event>,
    actions: Vec<Action>,
    pub(super) nodes: Vec<Node>,
    /// Each node's link and disk, then each cluster's link to home, then its peers altogether;
    /// then those of the nodes that have parts of a cache, as caches come.
    pub(super) links: Vec<Link<Owner>>,
    /// The earliest time at which each link is looked at.
    looks: Vec<u64>,
    pub(super) clusters: usize,
    /// For each cluster, how many nodes compute.
    pub(super) computing: Vec<u32>,
    pub(super) caches: Caches,
    pub(super) warmings: Warmings,
    pub(super) executions: Vec<Execution>,
    pub(super) free: Vec<u32>,
    /// The execution of each job, if one is under way.
    pub(super) execution_of: Vec<u32>,
    /// Volumes on their way.
    pub(super) fills: BTreeMap<VolumeId, Fill>,
    pub(super) copying: Copying,
    pub(super) extracts: BTreeMap<ExtractionId, Sending>,
    pub(super) dice: SeededRng,
    /// Nodes of which the catalog noticed lately that they are there or not.
    pub(super) noticed: Vec<u32>,
    pub(super) run: Run,
    moments: Moments,
    pub(super) running: u32,
    pub(super) scratch_bytes: u64,
    pub(super) cache_bytes: u64,
}

impl Simulation {
    /// A simulation of which nothing has happened yet.
    pub fn new(workflow: Workflow, scenario: Scenario) -> Self {
        // The spread of run times does not matter for what is allocated.
        let shape = Shape::of(&workflow, 0.0);
        let settings = scenario.settings(&shape);
        let (jobs, first_users) = (workflow.jobs.len(), workflow.first_users());
        let volumes = (0..).map(VolumeIndex).zip(&workflow.volumes);
        let unknown = volumes.filter(|(_, volume)| volume.size_bytes == 0);
        let unknown = unknown.map(|(index, _)| index).collect();
        let (nodes, clusters) = nodes_of(&scenario.environment);
        let links = links(&scenario, &nodes, clusters.len());
        let mut simulation = Self {
            scheduler: Scheduler::new(RunId(scenario.seed), workflow, settings),
            first_users,
            unknown,
            now: 0,
            due: BinaryHeap::new(),
            next: 0,
            looked_at: nodes.len() as u64,
            forward: (0, 0),
            facts: VecDeque::new(),
            actions: Vec::new(),
            computing: computing(&scenario, &nodes, clusters.len()),
            nodes,
            looks: vec![u64::MAX; links.len()],
            links,
            clusters: clusters.len(),
            caches: Caches::default(),
            warmings: Warmings::default(),
            executions: Vec::new(),
            free: Vec::new(),
            execution_of: vec![u32::MAX; jobs],
            fills: BTreeMap::new(),
            copying: Copying::default(),
            extracts: BTreeMap::new(),
            dice: SeededRng::new(scenario.seed ^ 0xfa11),
            noticed: Vec::new(),
            run: empty_run(),
            moments: Moments::default(),
            running: 0,
            scratch_bytes: 0,
            cache_bytes: 0,
            scenario,
        };
        simulation.noticed = (0..simulation.nodes.len() as u32).collect();
        simulation.list();
        simulation.plan_failure();
        for (at, node) in std::mem::take(&mut simulation.scenario.failures) {
            simulation.at(at, Due::FailOf(node));
        }
        simulation.plan_comings();
        simulation
    }

    /// Runs to the end of the workflow, or until so much was done in vain that it will have none,
    /// or as far as time is counted: then the outcome says so.
    ///
    /// # Errors
    /// When nothing is due any more, although the workflow is not over: a defect.
    pub fn run(self) -> Result<Run, Stuck> {
        self.run_watched(&mut Unwatched)
    }

    /// The same, while `watch` takes the time of decisions.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn run_watched(mut self, watch: &mut impl Watch) -> Result<Run, Stuck> {
        while !self.is_over(watch) {
            self.advance(watch)?;
        }
        Ok(self.ended())
    }

    /// The same, unless it takes longer than so many microseconds: then there is no run. Answers as
    /// well how many records were looked at.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn run_until(mut self, limit_us: u64) -> Result<(Option<Run>, u64), Stuck> {
        while !self.is_over(&mut Unwatched) {
            self.advance(&mut Unwatched)?;
            if self.now > limit_us {
                return Ok((None, self.looked_at()));
            }
        }
        let looked_at = self.looked_at();
        Ok((Some(self.ended()), looked_at))
    }

    /// Tells the core what is known now; whether the workflow is over.
    fn is_over(&mut self, watch: &mut impl Watch) -> bool {
        while let Some(fact) = self.facts.pop_front() {
            self.tell(fact, watch);
        }
        if let Some(outcome) = self.scheduler.outcome() {
            self.run.outcome = outcome.clone();
            return true;
        }
        if let Some(why) = self.why_hopeless() {
            self.run.outcome = self.given_up(&why);
            return true;
        }
        if self.next_due().is_some_and(|next| next > HORIZON_US) {
            self.run.outcome = self.too_long();
            return true;
        }
        false
    }

    /// When something is due next.
    fn next_due(&self) -> Option<u64> {
        let first = self.due.peek().map(|Reverse((at, ..))| *at);
        first.into_iter().chain(self.next_timer()).min()
    }

    fn next_timer(&self) -> Option<u64> {
        self.scheduler
            .next_timer()
            .map(|at| at.0.saturating_mul(1_000))
    }

    fn too_long(&self) -> Outcome {
        let progress = self.scheduler.progress();
        let years = HORIZON_US / SECOND_US / (365 * 24 * 3_600);
        let message = format!(
            "given up with {} of {} jobs done: the next thing to happen is more than {years} years \
             after the beginning, and the simulator counts no further",
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
        ATTEMPTS_MIN + jobs * u64::from(self.scenario.attempts_for_job)
    }

    /// Records that were looked at so far.
    fn looked_at(&self) -> u64 {
        self.looked_at + self.scheduler.looked_at()
    }

    /// Why the run is not worth going on with, if so.
    fn why_hopeless(&mut self) -> Option<String> {
        if self.run.executions + self.run.failures > self.attempts_max() {
            return Some("failures come faster than pipelines are done".to_owned());
        }
        let looked_at = self.looked_at();
        let most = self.scenario.looked_at_max;
        if looked_at > most {
            return Some(format!("more than the {most} records that it may look at"));
        }
        let done = self.scheduler.jobs_done();
        if done > self.forward.0 {
            self.forward = (done, looked_at);
        }
        let each = (self.execution_of.len() + self.nodes.len()) as u64;
        let in_vain = IN_VAIN_FOR_EACH.saturating_mul(each);
        let in_vain = in_vain.saturating_add(self.scenario.in_vain_max);
        (looked_at - self.forward.1 > in_vain)
            .then(|| format!("no further job was done while it looked at {in_vain} records"))
    }

    fn given_up(&self, why: &str) -> Outcome {
        let progress = self.scheduler.progress();
        let message = format!(
            "given up after {} simulated s, {} starts of jobs and {} failures of nodes, with {} of \
             {} jobs done: {why}",
            self.now / SECOND_US,
            self.run.executions,
            self.run.failures,
            progress.jobs_done,
            progress.jobs_total
        );
        Outcome::Failed {
            jobs: Vec::new(),
            messages: vec![message],
        }
    }

    fn ended(mut self) -> Run {
        self.run.looked_at = self.looked_at();
        self.run.moments = std::mem::take(&mut self.moments).all();
        self.end_warming();
        for cluster in 0..self.clusters {
            let home = self.home_link(cluster as u32);
            self.run.home_bytes += self.links[home as usize].crossed_bytes;
        }
        self.run.rules_eased = self.scheduler.rules_eased();
        self.run.followed = self.scheduler.followed().to_vec();
        self.run
    }

    fn advance(&mut self, watch: &mut impl Watch) -> Result<(), Stuck> {
        self.looked_at += 1;
        let timer = self.next_timer();
        let first = self.due.peek().map(|Reverse((at, ..))| *at);
        if let Some(timer) = timer
            && first.is_none_or(|first| timer < first)
        {
            self.now = self.now.max(timer);
            self.tell(Event::Tick, watch);
            return Ok(());
        }
        let Some(Reverse((at, _, due))) = self.due.pop() else {
            let progress = self.scheduler.progress();
            return Err(Stuck(format!(
                "nothing is under way after {} s, but only {} of {} jobs are done",
                self.now / SECOND_US,
                progress.jobs_done,
                progress.jobs_total
            )));
        };
        self.now = at;
        match due {
            Due::Link(link) => self.look(link, at),
            Due::Computed(execution, generation) => self.arrived(execution, generation),
            Due::Fail => {
                self.plan_failure();
                let node = self.dice.below(self.nodes.len() as u64) as u32;
                self.fail(node);
            }
            Due::FailOf(node) => self.end_server(node),
            Due::Silent(node) => self.give_up(node),
            Due::Return(node) => self.come(node),
            Due::Replaced(node) => self.replace(node),
            Due::Leave(node) => self.leave(node),
            Due::Noticed(node) => self.notice(node),
            Due::List => self.list(),
        }
        Ok(())
    }

    fn tell(&mut self, fact: Event, watch: &mut impl Watch) {
        let (scheduler, actions) = (&mut self.scheduler, &mut self.actions);
        let now = Time(self.now / 1_000);
        watch.step(|| scheduler.step(now, fact, actions));
        self.run.steps += 1;
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            self.serve(action);
        }
        self.actions = actions;
    }

    pub(super) fn at(&mut self, at: u64, due: Due) {
        self.next += 1;
        self.due.push(Reverse((at, self.next, due)));
    }

    /// Starts a flow of an execution, a cache or a volume.
    pub(super) fn start_flow(&mut self, link: u32, bytes: u64, owner: Owner) -> FlowId {
        self.hold_warming(link);
        let id = self.links[link as usize].start(self.now, bytes, owner);
        self.look_later(link);
        id
    }

    /// Adds a link without any rate yet, of which one flow can take what a node's link carries.
    pub(super) fn add_link(&mut self, flow_rate_max: u64, latency_us: u64) -> u32 {
        self.links
            .push(Link::new(0, flow_rate_max).with_latency(latency_us));
        self.looks.push(u64::MAX);
        self.links.len() as u32 - 1
    }

    pub(super) fn set_rate(&mut self, link: u32, rate: u64) {
        self.links[link as usize].set_rate(self.now, rate);
        self.looks[link as usize] = u64::MAX;
        self.look_later(link);
    }

    /// Ends a flow before its time; answers how many bytes of it did not cross.
    pub(super) fn cut_flow(&mut self, link: u32, id: FlowId) -> u64 {
        let left = self.cut(link, id);
        if let Some(cluster) = self.cluster_of(link) {
            self.warm_on(cluster);
        }
        left
    }

    /// The same, and leaves the link free.
    pub(super) fn cut(&mut self, link: u32, id: FlowId) -> u64 {
        let left = self.links[link as usize].cut(self.now, id);
        self.look_later(link);
        left
    }

    /// Makes sure that a link is looked at when its next flow ends.
    fn look_later(&mut self, link: u32) {
        // An end that is later than can be counted is due all the same, beyond the horizon.
        let end = self.links[link as usize].next_end();
        if let Some(end) = end.map(|end| end.min(u64::MAX - 1))
            && end < self.looks[link as usize]
        {
            self.looks[link as usize] = end;
            self.at(end, Due::Link(link));
        }
    }

    fn look(&mut self, link: u32, at: u64) {
        if self.looks[link as usize] != at {
            return;
        }
        self.looks[link as usize] = u64::MAX;
        while let Some(owner) = self.links[link as usize].take_ended(self.now) {
            self.flow_ended(link, owner);
        }
        if let Some(cluster) = self.cluster_of(link) {
            self.warm_on(cluster);
        }
        self.look_later(link);
    }

    pub(super) fn note_moment(&mut self) {
        self.run.scratch_bytes_max = self.run.scratch_bytes_max.max(self.scratch_bytes);
        self.run.cache_bytes_max = self.run.cache_bytes_max.max(self.cache_bytes);
        if self.scenario.is_recorded {
            self.moments.note(Moment {
                at_us: self.now,
                running: self.running,
                scratch_bytes: self.scratch_bytes,
                cache_bytes: self.cache_bytes,
            });
        }
    }

    pub(super) fn note_spell(&mut self, execution: u32, is_done: bool) {
        let Execution {
            job, node, started, ..
        } = self.executions[execution as usize];
        self.run.busy_us += u128::from(self.now - started);
        if is_done {
            self.run.elapsed_us = self.now;
        }
        if self.scenario.is_recorded {
            let (start_us, end_us) = (started, self.now);
            self.run.spells.push(Spell {
                job: job.0,
                node,
                start_us,
                end_us,
                is_done,
            });
        }
    }

    pub(super) fn jobs(&self) -> Jobs<'_> {
        Jobs {
            workflow: self.scheduler.workflow(),
            first_users: &self.first_users,
            unknown: &self.unknown,
        }
    }

    pub(super) fn node_at(&self, server: bafs_proto::ids::ServerId) -> usize {
        node_of(server)
    }
}

/// The links of all nodes and clusters, in the order of [`Simulation::links`].
fn links(scenario: &Scenario, nodes: &[Node], clusters: usize) -> Vec<Link<Owner>> {
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

fn computing(scenario: &Scenario, nodes: &[Node], clusters: usize) -> Vec<u32> {
    let mut computing = vec![0; clusters];
    for node in nodes {
        let class = &scenario.environment.nodes[node.class as usize];
        computing[node.cluster as usize] += u32::from(class.cpus > 0);
    }
    computing
}

fn empty_run() -> Run {
    Run {
        elapsed_us: 0,
        outcome: Outcome::Cancelled,
        executions: 0,
        home_bytes: 0,
        fetched_bytes: 0,
        peer_bytes: 0,
        failures: 0,
        steps: 0,
        looked_at: 0,
        busy_us: 0,
        scratch_bytes_max: 0,
        cache_bytes_max: 0,
        rules_eased: 0,
        followed: Vec::new(),
        moments: Vec::new(),
        spells: Vec::new(),
    }
}
