//! Which strategy the scheduler follows, and when another one is better for what is left. The model
//! predicts; this decides when to ask it and whether a change pays. Places nothing.
//!
//! What was simulated before the run says what to begin with on the nodes of the simulation, and
//! corrects the model from then on. The model is asked when nodes come or go, when a sixteenth of
//! the jobs is done, and when jobs compute much longer or shorter than they were expected to. A
//! change costs: pipelines that have begun end as they began, and what the other strategy needs
//! besides is fetched. It must also gain more than the model is usually off.

use std::collections::BTreeMap;

use bafs_proto::message::JobReport;
use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use super::graph::JobState;
use super::rules::{Admission, Rules};
use super::scheduler::Scheduler;
use super::space::Space;
use crate::planner::{Advice, Environment, NodeClass, Shape, Strategy, plan_advised, predict_rest};
use crate::workflow::{JobIndex, Workflow};

/// A strategy that is followed is left for one that takes so much less of the time, in thousandths:
/// between strategies the model is rarely off by more.
const GAIN_PERMILLE: u64 = 100;

/// The model is asked again when so many thousandths of all jobs were done since.
const PROGRESS_PERMILLE: u64 = 63;

/// Processors or bytes that must have come or gone, in thousandths of what there was.
const FLEET_PERMILLE: u64 = 50;

/// Computing that differs by so many thousandths from what was expected contradicts the plan.
const CONTRADICTION_PERMILLE: u64 = 250;

/// How often shared nodes are asked what they keep for this run, in milliseconds.
const LOOK_MS: u64 = 1_000;

/// Jobs whose computing must have been measured before that counts.
const MEASURED_MIN: u64 = 8;

/// A whole pipeline, in parts that are added up.
const WHOLE: u64 = 1_000_000;

/// What the scheduler must be told to plan by itself: it sees nodes, but not links. Kept in the
/// journal with the other settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guide {
    /// Rate of the link to home, in bytes per second.
    pub home_bytes_per_s: u64,
    /// Rate of each node's link, in bytes per second.
    pub local_bytes_per_s: u64,
    /// Mean time between failures of any of the nodes, in seconds.
    pub mtbf_s: Option<u64>,
    /// Standard deviation of computing times over their mean, in millionths.
    pub variability_ppm: u64,
    /// What was simulated of the workload; nothing when nothing was.
    pub advice: Option<Advice>,
}

/// A decision to follow a strategy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Followed {
    /// When.
    pub at: Time,
    /// Which; nothing when none fits and need alone decides.
    pub strategy: Option<Strategy>,
    /// Why, in one sentence.
    pub reason: String,
}

/// What is followed, and what was known when that was decided.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Guided {
    guide: Guide,
    /// The whole workflow; its `run_s` is what is expected to be computed.
    shape: Shape,
    /// The same as it was declared.
    declared_run_s: f64,
    /// Jobs of a mean pipeline over its stages.
    stage_jobs: f64,
    followed: Vec<Followed>,
    asked: Option<Asked>,
    /// Computing of finished jobs in milliseconds, as measured and as declared, and their number.
    computed_ms: u64,
    declared_ms: u64,
    computed: u64,
}

/// What the last question was about.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Asked {
    alive: u64,
    lost: u64,
    cpus: u64,
    bytes: u64,
    done: u64,
    computed: u64,
    /// When the nodes were looked at.
    looked: Time,
    /// Kinds of volumes whose sizes were measured.
    sizes: usize,
}

/// What is left to do, in pipelines.
#[derive(Debug, Clone, Copy)]
struct Rest {
    /// Of which something is left.
    open: u64,
    /// Of which nothing has begun.
    fresh: u64,
    /// What is left of those that have begun, as whole ones, rounded up.
    begun: u64,
    /// Batch data that are there and still needed.
    resident_bytes: u128,
}

impl Guide {
    fn shape(&self, workflow: &Workflow) -> Shape {
        Shape::of(workflow, self.variability_ppm as f64 / 1e6)
    }
}

impl Guided {
    pub(super) fn new(guide: Guide, workflow: &Workflow) -> Self {
        let shape = guide.shape(workflow);
        let stages = (shape.width * shape.depth).max(1) as f64;
        Self {
            guide,
            declared_run_s: shape.run_s,
            stage_jobs: workflow.jobs.len() as f64 / stages,
            shape,
            followed: Vec::new(),
            asked: None,
            computed_ms: 0,
            declared_ms: 0,
            computed: 0,
        }
    }

    fn strategy(&self) -> Option<Strategy> {
        self.followed.last().and_then(|last| last.strategy)
    }

    /// What is to be expected by what was measured, when that is not what was expected. Jobs
    /// declare unlike times: they are compared with their own.
    fn contradiction_s(&self) -> Option<f64> {
        if self.computed < MEASURED_MIN {
            return None;
        }
        let measured_s = match self.declared_ms {
            0 => self.stage_jobs * self.computed_ms as f64 / self.computed as f64 / 1_000.0,
            declared_ms => self.declared_run_s * self.computed_ms as f64 / declared_ms as f64,
        };
        let off = (measured_s - self.shape.run_s).abs();
        (off * 1_000.0 > self.shape.run_s * CONTRADICTION_PERMILLE as f64).then_some(measured_s)
    }

    /// Whether the simulation was of what is there: of such nodes, and of such jobs.
    fn is_as_simulated(&self, cpus: u64, bytes: u64) -> bool {
        let advice = self.guide.advice.as_ref();
        let is_for = advice.is_some_and(|advice| advice.is_for(cpus, bytes.into()));
        is_for && self.shape.run_s == self.declared_run_s
    }
}

impl Scheduler {
    /// The strategies that were followed, the first one first; none without a guide.
    pub fn followed(&self) -> &[Followed] {
        self.guided.as_ref().map_or(&[], |guided| &guided.followed)
    }

    /// A job is done: takes note of what it computed. Where others declare run times, one that
    /// does not says nothing about these.
    pub(super) fn learn_computing(&mut self, job: JobIndex, report: &JobReport) {
        let Some(guided) = &mut self.guided else {
            return;
        };
        let declared_s = self.graph.workflow.job(job).runtime_s.unwrap_or(0);
        if declared_s == 0 && guided.declared_run_s > 0.0 {
            return;
        }
        let declared_ms = declared_s.saturating_mul(1_000);
        guided.declared_ms = guided.declared_ms.saturating_add(declared_ms);
        guided.computed_ms = guided.computed_ms.saturating_add(report.computed_ms());
        guided.computed += 1;
    }

    /// Asks the model when something has changed that may matter to it.
    pub(super) fn reconsider(&mut self) {
        let Some(guided) = &self.guided else {
            return;
        };
        let (done, total) = (
            self.graph.totals.done,
            self.graph.workflow.jobs.len() as u64,
        );
        let contradiction_s = guided.contradiction_s();
        let Some(asked) = guided.asked else {
            return self.ask(done);
        };
        if asked.sizes != self.sizes.learned.len() {
            return self.ask(done);
        }
        // What nodes keep for this run changes without a node that comes or goes.
        let is_look_due = self.settings.user.is_some() && self.now >= asked.looked.plus_ms(LOOK_MS);
        let is_fleet_same = asked.alive == self.fleet.alive && asked.lost == self.fleet.lost;
        let is_fleet_same = is_fleet_same && !is_look_due;
        let progress = done.saturating_sub(asked.done) * 1_000;
        let is_little = progress < (total * PROGRESS_PERMILLE).max(1_000);
        // A contradiction is found once: then the measured time is the expected one.
        let is_calm = contradiction_s.is_none_or(|_| guided.computed < 2 * asked.computed);
        if is_fleet_same && is_little && is_calm {
            return;
        }
        let (cpus, bytes) = self.processors_and_bytes();
        let is_near = |before: u64, now: u64| {
            before.abs_diff(now) * 1_000 <= before.saturating_mul(FLEET_PERMILLE)
        };
        if is_near(asked.cpus, cpus) && is_near(asked.bytes, bytes) && is_little && is_calm {
            if let Some(asked) = self
                .guided
                .as_mut()
                .and_then(|guided| guided.asked.as_mut())
            {
                (asked.alive, asked.lost) = (self.fleet.alive, self.fleet.lost);
                asked.looked = self.now;
            }
            return;
        }
        if let (Some(guided), Some(run_s)) = (&mut self.guided, contradiction_s) {
            guided.shape.run_s = run_s;
        }
        self.ask(done);
    }

    fn ask(&mut self, done: u64) {
        let (cpus, bytes) = self.processors_and_bytes();
        let (alive, lost) = (self.fleet.alive, self.fleet.lost);
        let Some(guided) = self.guided.as_mut().filter(|_| cpus > 0) else {
            return;
        };
        let computed = guided.computed.max(MEASURED_MIN / 2);
        guided.asked = Some(Asked {
            alive,
            lost,
            cpus,
            bytes,
            done,
            computed,
            looked: self.now,
            sizes: self.sizes.learned.len(),
        });
        if !self.sizes.kind_of.is_empty() {
            // Unknown sizes are made up, then measured.
            let run_s = guided.shape.run_s;
            guided.shape = guided.guide.shape(&self.graph.workflow);
            guided.shape.run_s = run_s;
        }
        let guided = guided.clone();
        let environment = self.environment(&guided.guide);
        let rest = self.rest();
        // Files may still be on their way home when nothing is left to plan.
        if rest.open == 0 {
            return;
        }
        let left = Left {
            shape: &guided.shape,
            environment: &environment,
            rest,
            advice: guided.guide.advice.as_ref(),
        };
        let (strategy, reason) = match guided.strategy() {
            None => left.first(cpus, bytes),
            // The model knows no time for what is left of it.
            Some(Strategy::Need) if left.is_advised(Strategy::Need) => return,
            // Nor how much of what a failure costs is hidden behind other pipelines. That was
            // simulated, to the end.
            Some(present)
                if environment.mtbf_s.is_some()
                    && left.is_advised(present)
                    && guided.is_as_simulated(cpus, bytes) =>
            {
                (Some(present), String::new())
            }
            Some(present) => left.next(present),
        };
        let is_new = guided.followed.last().map(|last| last.strategy) != Some(strategy);
        if let (true, Some(guided)) = (is_new, &mut self.guided) {
            guided.followed.push(Followed {
                at: self.now,
                strategy,
                reason,
            });
        }
        // Also a strategy that is kept has other numbers on other nodes.
        let rules = strategy.and_then(|strategy| {
            let shape = guided.shape.with_width(rest.open);
            strategy.allocate(&shape, &environment).rules(&shape)
        });
        self.follow(rules);
    }

    /// Takes other rules from now on. What has begun goes on.
    fn follow(&mut self, rules: Option<Rules>) {
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

    fn processors_and_bytes(&self) -> (u64, u64) {
        self.fleet
            .live()
            .fold((0, 0u64), |(cpus, bytes), (id, node)| {
                let usable = self.fleet.usable(id).bytes;
                (cpus + u64::from(node.slots()), bytes.saturating_add(usable))
            })
    }

    /// The live nodes, equal ones together.
    fn environment(&self, guide: &Guide) -> Environment {
        let mut kinds: BTreeMap<(u32, Space, &str), u32> = BTreeMap::new();
        for (id, node) in self.fleet.live() {
            let kind = (
                node.slots(),
                self.fleet.usable(id),
                node.seen.group.as_str(),
            );
            *kinds.entry(kind).or_default() += 1;
        }
        let kinds = kinds.into_iter();
        let nodes = kinds.map(|((slots, space, group), count)| NodeClass {
            files: space.files,
            cluster: group.to_owned(),
            ..NodeClass::new(count, slots, space.bytes)
        });
        Environment {
            nodes: nodes.collect(),
            home_bytes_per_s: guide.home_bytes_per_s.max(1),
            local_bytes_per_s: guide.local_bytes_per_s.max(1),
            mtbf_s: guide.mtbf_s,
            restart_s: 0,
        }
    }

    fn rest(&self) -> Rest {
        let mut left: BTreeMap<u32, (u64, u64, bool)> = BTreeMap::new();
        for job in self.graph.job_indexes() {
            let state = self.graph.state(job);
            let pipeline = left.entry(self.graph.pipeline(job)).or_default();
            let (jobs, undone, has_begun) = pipeline;
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
        let batch = self.graph.volume_indexes().filter(|volume| {
            let is_there = self.graph.is_batch(*volume) && self.volumes.is_live(*volume);
            is_there && self.graph.volume(*volume).users_left > 0
        });
        Rest {
            open,
            fresh,
            begun: u64::div_ceil(begun, WHOLE),
            resident_bytes: batch.map(|v| u128::from(self.size_of(v).bytes)).sum(),
        }
    }
}

/// What is left to do, where, and what is known of it.
struct Left<'l> {
    shape: &'l Shape,
    environment: &'l Environment,
    rest: Rest,
    advice: Option<&'l Advice>,
}

impl Left<'_> {
    fn is_advised(&self, strategy: Strategy) -> bool {
        self.advice
            .is_some_and(|advice| advice.strategy == strategy)
    }

    /// Whether what is left fits in so; what has begun holds its data beside what follows.
    fn is_possible(&self, strategy: Strategy) -> bool {
        let shape = self.shape.with_width(self.rest.open);
        strategy.allocate(&shape, self.environment).is_possible()
    }

    /// What to begin with on nodes of so many processors and bytes, and why.
    fn first(&self, cpus: u64, bytes: u64) -> (Option<Strategy>, String) {
        let advice = self
            .advice
            .filter(|advice| advice.is_for(cpus, bytes.into()));
        match advice.filter(|advice| self.is_possible(advice.strategy)) {
            Some(advice) => (Some(advice.strategy), advice.reason.clone()),
            None => self.best_by_model(),
        }
    }

    fn best_by_model(&self) -> (Option<Strategy>, String) {
        let shape = self.shape.with_width(self.rest.open);
        let plan = plan_advised(shape, self.environment, self.advice);
        match plan.choice {
            Some(choice) => (Some(choice.strategy), choice.reason),
            None => (None, plan.refusal.unwrap_or_default()),
        }
    }

    /// How long `left` pipelines' worth of work on `open` ones takes.
    fn seconds(&self, strategy: Strategy, open: u64, left: u64) -> Option<f64> {
        // By stages all of them take space until the end, so that the last stage is no faster than
        // the first.
        let (width, part) = match strategy.goes_by_stages() {
            true => (open, left as f64 / open.max(1) as f64),
            false => (left, 1.0),
        };
        if width == 0 {
            return Some(0.0);
        }
        let shape = self.shape.with_width(width);
        let resident = self.rest.resident_bytes;
        let whole_s = predict_rest(strategy, &shape, self.environment, resident)?;
        let corrected_s = match self.advice {
            Some(advice) => advice.corrected_s(strategy, whole_s),
            None => whole_s,
        };
        Some(part * corrected_s)
    }

    /// The strategy for what is left when `present` was followed, and why.
    fn next(&self, present: Strategy) -> (Option<Strategy>, String) {
        let rest = self.rest;
        let all = rest.fresh + rest.begun;
        let kept_s = self
            .is_possible(present)
            .then(|| self.seconds(present, rest.open, all));
        let Some(kept_s) = kept_s.flatten() else {
            let (strategy, reason) = self.best_by_model();
            let reason = format!("{present} is not possible any more; {reason}");
            return (strategy, reason);
        };
        // What has begun ends as it began, but stage by stage it becomes a part of what follows.
        let begun_s = self.seconds(present, rest.open - rest.fresh, rest.begun);
        let begun_s = begun_s.unwrap_or(kept_s);
        let with_begun_s = |strategy: Strategy| {
            if !self.is_possible(strategy) {
                return None;
            }
            match present.goes_by_stages() && strategy.goes_by_stages() {
                true => self.seconds(strategy, rest.open, all),
                false => Some(begun_s + self.seconds(strategy, rest.fresh, rest.fresh)?),
            }
        };
        let others = Strategy::CANDIDATES.into_iter().filter(|strategy| {
            *strategy != present && *strategy != Strategy::Remote && rest.fresh > 0
        });
        let timed = others.filter_map(|strategy| Some((strategy, with_begun_s(strategy)?)));
        let best = timed.min_by(|a, b| a.1.total_cmp(&b.1));
        let limit_s = kept_s * (1_000 - GAIN_PERMILLE) as f64 / 1_000.0;
        match best.filter(|(_, other_s)| *other_s < limit_s) {
            Some((strategy, other_s)) => {
                let reason = format!(
                    "what is left takes {other_s:.0} s with {strategy}, what has begun included, \
                     and {kept_s:.0} s with {present}"
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
    use bafs_proto::message::JobOutcome;

    use super::*;
    use crate::logic::fleet::{Limit, Node};
    use crate::logic::{Event, NodeSeen, Settings};
    use crate::workflow::parse_workflow;

    fn scheduler(text: &str) -> Scheduler {
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let guide = Guide {
            home_bytes_per_s: 1_000_000,
            local_bytes_per_s: 1_000_000,
            mtbf_s: None,
            variability_ppm: 0,
            advice: None,
        };
        let settings = Settings {
            guide: Some(guide),
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

    /// Jobs that are done took so many times as long as they declare.
    fn learn(scheduler: &mut Scheduler, declared_s: u64, times: u64) {
        for job in scheduler.graph.job_indexes() {
            if scheduler.graph.workflow.job(job).runtime_s == Some(declared_s) {
                let ms = declared_s * times * 1_000;
                let report = JobReport {
                    outcome: JobOutcome::Exited(0),
                    wall_ms: ms,
                    cpu_ms: ms,
                    output_tail: String::new(),
                    volumes: Vec::new(),
                };
                scheduler.learn_computing(job, &report);
            }
        }
    }

    fn contradiction_s(scheduler: &Scheduler) -> Option<f64> {
        scheduler.guided.as_ref().unwrap().contradiction_s()
    }

    #[test]
    fn short_jobs_that_are_done_first_say_nothing_about_long_ones() {
        let mut scheduler = unlike();
        learn(&mut scheduler, 10, 1);
        assert_eq!(contradiction_s(&scheduler), None);
        learn(&mut scheduler, 1_000, 1);
        assert_eq!(contradiction_s(&scheduler), None);
    }

    #[test]
    fn jobs_that_take_twice_what_they_declare_are_expected_to_go_on_so() {
        let mut scheduler = unlike();
        learn(&mut scheduler, 10, 2);
        let declared_s = scheduler.guided.as_ref().unwrap().declared_run_s;
        assert_eq!(contradiction_s(&scheduler), Some(2.0 * declared_s));
    }

    #[test]
    fn what_is_left_of_a_pipeline_with_wide_stages_is_not_many_pipelines() {
        let mut scheduler = unlike();
        scheduler.graph.set_state(JobIndex(0), JobState::Done);
        let rest = scheduler.rest();
        assert_eq!((rest.open, rest.fresh, rest.begun), (10, 9, 1));
    }

    #[test]
    fn of_a_shared_node_only_the_part_of_this_run_is_planned_with() {
        let mut scheduler = unlike();
        let space = Space {
            bytes: 1_000,
            files: 1_000,
        };
        let node = NodeSeen::alone(ServerId(1), space, 4);
        let seen = Event::seen(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        assert_eq!(scheduler.processors_and_bytes().0, 4);
        let limit = Limit {
            space,
            slots: 1,
            is_shared: true,
            is_over: false,
        };
        let set = |node: &mut Node| node.limit = Some(limit);
        scheduler.fleet.update(ServerId(1), set);
        assert_eq!(scheduler.processors_and_bytes().0, 1);
        let guide = scheduler.guided.as_ref().unwrap().guide.clone();
        assert_eq!(scheduler.environment(&guide).cpus(), 1);
    }

    #[test]
    fn sizes_that_nobody_declared_are_planned_with_when_they_are_known() {
        let mut scheduler =
            scheduler("volume v scratch unknown\njob a {\nexecutable = x\n}\nmount v a /v\n");
        let held = |scheduler: &Scheduler| scheduler.guided.as_ref().unwrap().shape.kept_bytes;
        assert_eq!(held(&scheduler), 0);
        let space = Space {
            bytes: 1_000_000,
            files: 1_000,
        };
        let node = NodeSeen::alone(ServerId(1), space, 4);
        let seen = Event::seen(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        assert!(held(&scheduler) > 0);
    }
}
