//! Which strategy the scheduler follows, and when another one is better for what is left. The model
//! predicts; this decides when to ask it and whether a change pays. Places nothing.
//!
//! What was simulated before the run says what to begin with on the nodes of the simulation, and
//! corrects the model from then on. The model is asked when nodes come or go, when a sixteenth of
//! the jobs is done, when as many of the unknown sizes were measured, and when jobs compute much
//! longer or shorter than they were expected to. A change costs: pipelines that have begun end as
//! they began, and what the other strategy needs besides is fetched. It must also gain more than
//! the model is usually off.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bafs_proto::time::Time;
use bafs_workflow::Workflow;
use serde::{Deserialize, Serialize};

use super::computing::{Computing, MEASURED_MIN};
use super::expected_nodes::LostNodes;
use super::graph::JobState;
use super::rules::{Admission, AllocationRules};
use super::scheduler::Scheduler;
use crate::planner::{
    Environment, Shape, SimulatedPlan, Strategy, plan_with_simulations, predict_remaining,
};

/// A strategy that is followed is left for one that takes so much less of the time, in thousandths:
/// between strategies the model is rarely off by more.
const GAIN_PERMILLE: u64 = 100;

/// The strategy that was simulated as the best is left only for so much: of a small random workload
/// the model took another one to save 13 % of what was left, and the run took 13 % longer.
const GAIN_ADVISED_PERMILLE: u64 = 250;

/// The model is asked again when so many thousandths of all jobs were done since.
const PROGRESS_PERMILLE: u64 = 63;

/// Processors or bytes that must have come or gone, in thousandths of what there was.
const FLEET_PERMILLE: u64 = 50;

/// How often shared nodes are asked what they keep for this run, in milliseconds.
const LOOK_MS: u64 = 1_000;

/// A whole pipeline, in parts that are added up.
const WHOLE: u64 = 1_000_000;

/// What the scheduler must be told to plan by itself: it sees nodes, but not links. Kept in the
/// journal with the other settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategySelectorConfig {
    /// Rate of the link to home, in bytes per second.
    pub home_bytes_per_s: u64,
    /// Rate of each node's link, in bytes per second.
    pub local_bytes_per_s: u64,
    /// Mean time between failures of any of the nodes, in seconds.
    pub mtbf_s: Option<u64>,
    /// How long a node that failed is away, in seconds.
    pub restart_s: u64,
    /// Standard deviation of computing times over their mean, in millionths.
    pub variability_ppm: u64,
    /// What was simulated of the workload; nothing when nothing was.
    pub simulated_plan: Option<SimulatedPlan>,
}

/// A decision to follow a strategy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StrategyChange {
    /// When.
    pub changed_at: Time,
    /// Which; nothing when none fits and need alone decides.
    pub strategy: Option<Strategy>,
    /// Why, in one sentence.
    pub reason: String,
}

/// What is followed, and what was known when that was decided.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Guided {
    pub(super) guide: StrategySelectorConfig,
    /// The whole workflow; its `run_s` is what is expected to be computed.
    shape: Shape,
    /// For each job the first one of its pipeline, as the planner counts them.
    pipeline: Arc<[u32]>,
    followed: Vec<StrategyChange>,
    /// Whether the present rules are those that were simulated as the best.
    has_simulated_rules: bool,
    asked: Option<SelectionInputs>,
    pub(super) computing: Computing,
    pub(super) lost_nodes: LostNodes,
}

/// What the last question was about.
#[derive(Debug, Clone, Copy, PartialEq)]
struct SelectionInputs {
    alive: u64,
    lost: u64,
    cpus: u64,
    bytes: u64,
    done: u64,
    /// Jobs whose computing was measured.
    computed: u64,
    /// When the nodes are looked at again, also when none came or went.
    look_at: Option<Time>,
    /// Kinds of volumes whose sizes were measured.
    sizes: usize,
}

/// What is left to do, in pipelines.
#[derive(Debug, Clone, Copy)]
struct RemainingPipelines {
    /// Of which something is left.
    open: u64,
    /// Of which nothing has begun.
    fresh: u64,
    /// What is left of those that have begun, as whole ones, rounded up.
    begun: u64,
    /// The part of the batch data still needed that no cache is made for.
    missing: f64,
}

impl Guided {
    /// No scheduler ran for so long, in milliseconds: what was to be looked at is so much later.
    pub(super) fn put_off(&mut self, ms: u64) {
        self.lost_nodes.put_off(ms);
        if let Some(asked) = &mut self.asked {
            asked.look_at = asked.look_at.map(|at| at.plus_ms(ms));
        }
    }
}

impl StrategySelectorConfig {
    fn shape(&self, workflow: &Workflow) -> Shape {
        Shape::from_workflow(workflow, self.variability_ppm as f64 / 1e6)
    }
}

impl Guided {
    pub(super) fn new(guide: StrategySelectorConfig, workflow: &Workflow) -> Self {
        let shape = guide.shape(workflow);
        Self {
            computing: Computing::new(&shape, workflow),
            guide,
            shape,
            pipeline: workflow.connected_pipelines().into(),
            followed: Vec::new(),
            has_simulated_rules: false,
            asked: None,
            lost_nodes: LostNodes::default(),
        }
    }

    fn strategy(&self) -> Option<Strategy> {
        self.followed.last().and_then(|last| last.strategy)
    }

    /// Whether the simulation was of what is there: of such nodes, and of such jobs.
    fn is_as_simulated(&self, cpus: u64, bytes: u64) -> bool {
        let advice = self.guide.simulated_plan.as_ref();
        let is_for = advice.is_some_and(|advice| advice.is_valid_for(cpus, bytes.into()));
        is_for && self.shape.run_s == self.computing.declared_run_s
    }
}

impl Scheduler {
    /// The strategies that were followed, the first one first; none without a guide.
    pub fn strategy_changes(&self) -> &[StrategyChange] {
        self.guided.as_ref().map_or(&[], |guided| &guided.followed)
    }

    /// Asks the model when something has changed that may matter to it.
    pub(super) fn reconsider(&mut self) {
        let Some(guided) = &self.guided else {
            return;
        };
        let done = self.graph.totals.done;
        let total = self.graph.workflow.jobs.len() as u64;
        let Some(asked) = guided.asked else {
            return self.ask(done);
        };
        let sizes = (self.sizes.learned.len(), self.sizes.kinds.len());
        if is_much_learned(asked.sizes, sizes.0, sizes.1) {
            return self.ask(done);
        }
        let progress = done.saturating_sub(asked.done) * 1_000;
        let is_much_done = progress >= (total * PROGRESS_PERMILLE).max(1_000);
        // What was looked at is looked at again when twice as much is known.
        let is_more_known = guided.computing.jobs >= 2 * asked.computed;
        let is_contradicted = (is_much_done || is_more_known) && self.learn_contradiction();
        if is_much_done || is_contradicted || self.note_nodes(asked) {
            self.ask(done);
        }
    }

    /// Expects from now on what was measured, where that contradicts what was expected; answers
    /// whether it did.
    fn learn_contradiction(&mut self) -> bool {
        let Some(guided) = &self.guided else {
            return false;
        };
        let (computing, expected_s) = (&guided.computing, guided.shape.run_s);
        let measured_s = computing.contradiction_s(expected_s, || self.running_ms());
        if let Some(guided) = &mut self.guided {
            guided.shape.run_s = measured_s.unwrap_or(expected_s);
            if let Some(asked) = &mut guided.asked {
                asked.computed = guided.computing.jobs.max(asked.computed);
            }
        }
        measured_s.is_some()
    }

    /// Takes note of nodes that came or went; answers whether those to plan with are others than
    /// when the model was asked.
    fn note_nodes(&mut self, asked: SelectionInputs) -> bool {
        let is_look_due = asked.look_at.is_some_and(|at| self.now >= at);
        if asked.alive == self.fleet.alive && asked.lost == self.fleet.lost && !is_look_due {
            return false;
        }
        let look_at = self.look_at();
        let (cpus, bytes) = self.processors_and_bytes();
        let is_near = |before: u64, now: u64| {
            before.abs_diff(now) * 1_000 <= before.saturating_mul(FLEET_PERMILLE)
        };
        if !is_near(asked.cpus, cpus) || !is_near(asked.bytes, bytes) {
            return true;
        }
        let asked = self.guided.as_mut().and_then(|it| it.asked.as_mut());
        if let Some(asked) = asked {
            (asked.alive, asked.lost) = (self.fleet.alive, self.fleet.lost);
            asked.look_at = look_at;
        }
        false
    }

    /// When the nodes to plan with may be others though none comes or goes: one that failed does
    /// not come back, or shared ones keep another part for this run.
    fn look_at(&mut self) -> Option<Time> {
        let is_shared = self.settings.user.is_some();
        let share_at = is_shared.then(|| self.now.plus_ms(LOOK_MS));
        let gone_at = self.forget_lost_nodes();
        [share_at, gone_at].into_iter().flatten().min()
    }

    fn ask(&mut self, done: u64) {
        let look_at = self.look_at();
        let (cpus, bytes) = self.processors_and_bytes();
        let (alive, lost) = (self.fleet.alive, self.fleet.lost);
        let Some(guided) = self.guided.as_mut().filter(|_| cpus > 0) else {
            return;
        };
        guided.asked = Some(SelectionInputs {
            alive,
            lost,
            cpus,
            bytes,
            done,
            computed: guided.computing.jobs.max(MEASURED_MIN / 2),
            look_at,
            sizes: self.sizes.learned.len(),
        });
        if !self.sizes.kind_of.is_empty() {
            // Unknown sizes are made up, then measured.
            let run_s = guided.shape.run_s;
            let workflow = match guided.guide.simulated_plan.is_some() {
                true => Cow::Owned(self.sizes.measured(&self.graph.workflow)),
                false => Cow::Borrowed(&self.graph.workflow),
            };
            guided.shape = guided.guide.shape(&workflow);
            guided.shape.run_s = run_s;
        }
        let rest = self.rest();
        // Files may still be on their way home when nothing is left to plan.
        if rest.open > 0 {
            self.decide(rest, (cpus, bytes));
        }
    }

    /// Decides what is followed from now on, on nodes of so many processors and bytes.
    fn decide(&mut self, rest: RemainingPipelines, (cpus, bytes): (u64, u64)) {
        let Some(guided) = self.guided.clone() else {
            return;
        };
        let environment = self.environment(&guided.guide);
        let left = RemainingWork {
            shape: &guided.shape,
            environment: &environment,
            rest,
            advice: guided.guide.simulated_plan.as_ref(),
            is_as_simulated: guided.is_as_simulated(cpus, bytes),
        };
        let (strategy, reason) = match guided.strategy() {
            None => left.first(cpus, bytes),
            // The model knows no time for what is left of it.
            Some(Strategy::Need) if left.is_advised(Strategy::Need) => return,
            // Nor how much of what a failure costs is hidden behind other pipelines, nor that other
            // nodes are to come, or leave. That was simulated, to the end.
            Some(present) if left.is_as_simulated_blindly(present) => {
                if guided.has_simulated_rules && self.sizes.learned.is_empty() {
                    return;
                }
                (Some(present), String::new())
            }
            Some(present) => left.next(present),
        };
        let is_advised = strategy.is_some_and(|strategy| left.is_advised(strategy));
        let has_simulated_rules = is_advised && left.is_as_simulated;
        let is_new = guided.followed.last().map(|last| last.strategy) != Some(strategy);
        if let Some(guided) = &mut self.guided {
            guided.has_simulated_rules = has_simulated_rules;
            if is_new {
                guided.followed.push(StrategyChange {
                    changed_at: self.now,
                    strategy,
                    reason,
                });
            }
        }
        // Also a strategy that is kept has other numbers on other nodes.
        let rules = strategy.and_then(|strategy| {
            let shape = guided.shape.with_width(rest.open);
            strategy
                .plan_allocation(&shape, &environment)
                .allocation_rules(&shape)
        });
        self.follow(rules);
    }

    /// Takes other rules from now on. What has begun goes on.
    fn follow(&mut self, rules: Option<AllocationRules>) {
        if rules.as_ref() == self.admission.as_ref().map(|admission| &admission.rules) {
            return;
        }
        match (rules, &mut self.admission) {
            (Some(rules), Some(admission)) => admission.change(rules),
            (Some(rules), none) => {
                *none = Some(Admission::new(rules, &self.graph));
                self.begin_what_has_begun();
            }
            (None, admission) => *admission = None,
        }
        for job in self.graph.job_indexes() {
            if self.graph.state(job) == JobState::Ready && self.queues.contains(job) {
                self.enqueue(job);
            }
        }
        self.queues.wake_all();
    }

    fn begin_what_has_begun(&mut self) {
        for job in self.graph.job_indexes() {
            let pipeline = self.graph.pipeline(job);
            let has_begun = matches!(self.graph.state(job), JobState::Done | JobState::Active);
            if has_begun && !self.graph.is_pipeline_final(pipeline) {
                self.begin_pipeline(pipeline);
            }
        }
        for volume in self.graph.volume_indexes() {
            if self.volumes.is_live(volume) {
                self.note_batch(volume);
            }
        }
    }

    fn rest(&self) -> RemainingPipelines {
        let pipeline = self.guided.as_ref().map_or(&[][..], |it| &it.pipeline[..]);
        let mut left: BTreeMap<u32, (u64, u64, bool)> = BTreeMap::new();
        for (job, first) in self.graph.job_indexes().zip(pipeline) {
            let state = self.graph.state(job);
            let (jobs, undone, has_begun) = left.entry(*first).or_default();
            *jobs += 1;
            *undone += u64::from(!state.is_final());
            *has_begun |= matches!(state, JobState::Done | JobState::Active);
        }
        // What is left of those that have begun, in millionths of a whole one.
        let (mut open, mut fresh, mut begun) = (0, 0, 0);
        for (jobs, undone, has_begun) in left.into_values() {
            open += u64::from(undone > 0);
            match has_begun {
                false if undone > 0 => fresh += 1,
                _ => begun += undone * WHOLE / jobs,
            }
        }
        let needed = self.graph.volume_indexes().filter(|volume| {
            self.graph.is_batch(*volume) && self.graph.volume(*volume).users_left > 0
        });
        let (mut there, mut all) = (0u128, 0u128);
        for volume in needed {
            let bytes = u128::from(self.size_of(volume).bytes);
            all += bytes;
            there += if self.volumes.is_live(volume) {
                bytes
            } else {
                0
            };
        }
        RemainingPipelines {
            open,
            fresh,
            begun: u64::div_ceil(begun, WHOLE),
            missing: match all {
                0 => 0.0,
                _ => (all - there) as f64 / all as f64,
            },
        }
    }
}

/// Whether many more sizes are known than before, of so many: each question looks at the whole
/// workflow.
fn is_much_learned(before: usize, learned: usize, all: usize) -> bool {
    let news = learned.saturating_sub(before);
    let is_much = news as u64 * 1_000 >= all as u64 * PROGRESS_PERMILLE;
    news > 0 && (is_much || learned >= 2 * before || learned == all)
}

/// What is left to do, where, and what is known of it.
struct RemainingWork<'l> {
    shape: &'l Shape,
    environment: &'l Environment,
    rest: RemainingPipelines,
    advice: Option<&'l SimulatedPlan>,
    /// Whether nodes and run times are those of the simulation.
    is_as_simulated: bool,
}

impl RemainingWork<'_> {
    fn is_advised(&self, strategy: Strategy) -> bool {
        self.advice
            .is_some_and(|advice| advice.strategy == strategy)
    }

    /// Whether the strategy does what was simulated as the best, with what the model is blind to.
    /// Where nodes leave it came to its end though it was not possible as bytes tell any more.
    fn is_as_simulated_blindly(&self, strategy: Strategy) -> bool {
        let is_changing = self.advice.is_some_and(SimulatedPlan::has_changing_nodes);
        let is_failing = self.environment.mtbf_s.is_some();
        let is_blind = is_changing || is_failing && self.is_possible(strategy);
        is_blind && self.is_as_simulated && self.is_advised(strategy)
    }

    /// Whether what is left fits in so; what has begun holds its data beside what follows.
    fn is_possible(&self, strategy: Strategy) -> bool {
        let shape = self.shape.with_width(self.rest.open);
        strategy
            .plan_allocation(&shape, self.environment)
            .is_possible()
    }

    /// What to begin with on nodes of so many processors and bytes, and why.
    fn first(&self, cpus: u64, bytes: u64) -> (Option<Strategy>, String) {
        let advice = self
            .advice
            .filter(|advice| advice.is_valid_for(cpus, bytes.into()));
        // A run without a plan was simulated whatever it is said to lack.
        let is_feasible = |strategy| strategy == Strategy::Need || self.is_possible(strategy);
        match advice.filter(|advice| is_feasible(advice.strategy)) {
            Some(advice) => (Some(advice.strategy), advice.reason.clone()),
            None => self.best_by_model(),
        }
    }

    fn best_by_model(&self) -> (Option<Strategy>, String) {
        let shape = self.shape.with_width(self.rest.open);
        let plan = plan_with_simulations(shape, self.environment, self.advice);
        match plan.choice {
            Some(choice) => (Some(choice.strategy), choice.reason),
            None => (None, plan.refusal.unwrap_or_default()),
        }
    }

    /// How long `left` pipelines' worth of work on `open` ones takes.
    fn seconds(&self, strategy: Strategy, open: u64, left: u64) -> Option<f64> {
        // By stages all of them take space until the end, so that the last stage is no faster than
        // the first.
        let (width, part) = match strategy.is_level_by_level() {
            true => (open, left as f64 / open.max(1) as f64),
            false => (left, 1.0),
        };
        if width == 0 {
            return Some(0.0);
        }
        let shape = self.shape.with_width(width);
        let whole_s = predict_remaining(strategy, &shape, self.environment, self.rest.missing)?;
        let corrected_s = match self.advice {
            Some(advice) => advice.correct_prediction(strategy, whole_s),
            None => whole_s,
        };
        Some(part * corrected_s)
    }

    /// How long what is left takes as it was followed: all at once, or where there are no stages
    /// what has begun and then the rest, as it is added up for others.
    fn kept_seconds(&self, present: Strategy) -> Option<f64> {
        let rest = self.rest;
        let whole_s = self.seconds(present, rest.open, rest.fresh + rest.begun)?;
        let begun_s = self.seconds(present, rest.open - rest.fresh, rest.begun);
        let fresh_s = self.seconds(present, rest.fresh, rest.fresh);
        let added_s = begun_s.zip(fresh_s).map(|(begun, fresh)| begun + fresh);
        let added_s = added_s.filter(|_| !present.is_level_by_level());
        Some(added_s.map_or(whole_s, |added_s| added_s.min(whole_s)))
    }

    /// The strategy for what is left when `present` was followed, and why.
    fn next(&self, present: Strategy) -> (Option<Strategy>, String) {
        let rest = self.rest;
        let all = rest.fresh + rest.begun;
        let kept_s = self
            .is_possible(present)
            .then(|| self.kept_seconds(present));
        let Some(Some(kept_s)) = kept_s else {
            let why = match kept_s {
                None => "is no longer possible",
                Some(_) => "has no predictable end",
            };
            let (strategy, reason) = self.best_by_model();
            return (strategy, format!("{present} {why}; {reason}"));
        };
        // What has begun ends as it began, but stage by stage it becomes a part of what follows.
        let begun_s = self.seconds(present, rest.open - rest.fresh, rest.begun);
        let begun_s = begun_s.unwrap_or(kept_s);
        let with_begun_s = |strategy: Strategy| {
            if !self.is_possible(strategy) {
                return None;
            }
            match present.is_level_by_level() && strategy.is_level_by_level() {
                true => self.seconds(strategy, rest.open, all),
                false => Some(begun_s + self.seconds(strategy, rest.fresh, rest.fresh)?),
            }
        };
        let others = Strategy::CANDIDATES.into_iter().filter(|strategy| {
            *strategy != present && *strategy != Strategy::Remote && rest.fresh > 0
        });
        let timed = others.filter_map(|strategy| Some((strategy, with_begun_s(strategy)?)));
        let best = timed.min_by(|a, b| a.1.total_cmp(&b.1));
        let gain_permille = match self.is_as_simulated && self.is_advised(present) {
            true => GAIN_ADVISED_PERMILLE,
            false => GAIN_PERMILLE,
        };
        let limit_s = kept_s * (1_000 - gain_permille) as f64 / 1_000.0;
        match best.filter(|(_, other_s)| *other_s < limit_s) {
            Some((strategy, other_s)) => {
                let reason = format!(
                    "the remaining work takes {other_s:.0} s with {strategy}, but {kept_s:.0} s \
                     with {present}"
                );
                (Some(strategy), reason)
            }
            None => (Some(present), String::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_workflow::{JobIndex, parse_workflow};

    use super::*;
    use crate::logic::fleet::{FleetNode, Limit};
    use crate::logic::{Event, NodeInfo, Settings, Space};
    use crate::planner::{CanonicalWorkload, NodeClass, plan_workload};

    fn scheduler(text: &str) -> Scheduler {
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let guide = StrategySelectorConfig {
            home_bytes_per_s: 1_000_000,
            local_bytes_per_s: 1_000_000,
            mtbf_s: None,
            restart_s: 60,
            variability_ppm: 0,
            simulated_plan: None,
        };
        let settings = Settings {
            strategy_selector: Some(guide),
            ..Settings::default()
        };
        Scheduler::new(RunId(1), workflow, settings)
    }

    /// Ten pipelines of a short job and a long one, with eight of its like beside it.
    fn unlike() -> Scheduler {
        let mut text = String::new();
        for pipeline in 0..10 {
            text += &format!(
                "volume v{pipeline} scratch 1 MB\n\
                 job a{pipeline} {{\nexecutable = x\nruntime = 10 s\n}}\n\
                 mount v{pipeline} a{pipeline} /v\n"
            );
            for job in 0..9 {
                text += &format!(
                    "job b{pipeline}x{job} {{\nexecutable = x\nruntime = 1000 s\n}}\n\
                     parent a{pipeline} child b{pipeline}x{job}\n\
                     mount v{pipeline} b{pipeline}x{job} /v ro\n"
                );
            }
        }
        scheduler(&text)
    }

    #[test]
    fn begun_wide_pipeline_counts_as_one() {
        let mut scheduler = unlike();
        scheduler.graph.set_state(JobIndex(0), JobState::Done);
        let rest = scheduler.rest();
        assert_eq!((rest.open, rest.fresh, rest.begun), (10, 9, 1));
    }

    #[test]
    fn plan_uses_only_the_quota_of_shared_nodes() {
        let mut scheduler = unlike();
        let space = Space {
            bytes: 1_000,
            files: 1_000,
        };
        let node = NodeInfo::single_group(ServerId(1), space, 4);
        let seen = Event::nodes_listed(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        assert_eq!(scheduler.processors_and_bytes().0, 4);
        let limit = Limit {
            space,
            slots: 1,
            is_shared: true,
            is_over: false,
        };
        let set = |node: &mut FleetNode| node.limit = Some(limit);
        scheduler.fleet.update(ServerId(1), set);
        assert_eq!(scheduler.processors_and_bytes().0, 1);
        let guide = scheduler.guided.as_ref().unwrap().guide.clone();
        assert_eq!(scheduler.environment(&guide).cpus(), 1);
    }

    #[test]
    fn few_new_measurements_do_not_trigger_replanning() {
        assert!(is_much_learned(0, 1, 10_000), "the first one");
        assert!(!is_much_learned(1_000, 1_001, 10_000));
        assert!(is_much_learned(1_000, 1_630, 10_000));
        assert!(is_much_learned(9_999, 10_000, 10_000), "the last one");
        assert!(is_much_learned(3, 4, 10), "of few each one");
        assert!(!is_much_learned(4, 4, 10));
    }

    /// What is held of a volume of unknown size when a node is there.
    fn held_of_unknown(advice: Option<SimulatedPlan>) -> u128 {
        let mut scheduler =
            scheduler("volume v scratch unknown\njob a {\nexecutable = x\n}\nmount v a /v\n");
        if let Some(guided) = &mut scheduler.guided {
            guided.guide.simulated_plan = advice;
        }
        let held = |scheduler: &Scheduler| scheduler.guided.as_ref().unwrap().shape.retained_bytes;
        assert_eq!(held(&scheduler), 0);
        let space = Space {
            bytes: 1_000_000,
            files: 1_000,
        };
        let node = NodeInfo::single_group(ServerId(1), space, 4);
        let seen = Event::nodes_listed(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        held(&scheduler)
    }

    #[test]
    fn undeclared_sizes_are_planned_as_simulated() {
        assert!(held_of_unknown(None) > 0, "made up");
        let canonical =
            CanonicalWorkload::parse("width=1,depth=1,batch=1MB,private=1MB,run=5s").unwrap();
        let environment = Environment {
            nodes: vec![NodeClass::new(1, 4, 1_000_000_000)],
            home_bytes_per_s: 1_000_000,
            local_bytes_per_s: 1_000_000,
            mtbf_s: None,
            restart_s: 60,
        };
        let plan = plan_workload(canonical.shape(), &environment);
        let advice = SimulatedPlan::new(&plan, &environment, |_| Some(1.0));
        assert_eq!(held_of_unknown(advice), 0, "empty, as in the simulation");
    }
}
