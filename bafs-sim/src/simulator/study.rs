//! Studies of how well the planner chooses: the thesis' sensitivity studies (its figures 4.20 to
//! 4.28), workloads drawn at random, and the comparison of every strategy at one point. It neither
//! runs points side by side nor prints.

use bafs_workflow::Workflow;
use serde::Serialize;

use super::canonical::build_canonical_workflow;
use super::engine::Simulation;
use super::load::LoadModel;
use super::policy::{Policy, Scenario};
use super::simulated_plan::plan_from_trials;
use super::simulation_result::{SimulationResult, StalledRunError};
use super::strategy_trials::{TrialScope, decide_by_simulation};
use crate::deterministic_math::power;
use crate::planner::{
    CanonicalWorkload, Environment, NodeClass, Plan, PrivateLayout, RESTART_S_DEFAULT,
    SimulatedPlan, Strategy, StrategyCandidate, plan_workload,
};
use crate::seeded_rng::SeededRng;

const MB: f64 = 1e6;
const GB: f64 = 1e9;
/// Jobs of a random workload at most, so that a point takes a moment.
const RANDOM_JOBS_MAX: u64 = 4_000;
/// No plan is left when it takes so many times the time of the best plan, or the records of the
/// longest: it is no choice there.
const HOPELESS_FACTOR: f64 = 4.0;
/// Records that it may examine in any case: it was the best with thirty times as many as others.
const RECORDS_EXAMINED_MIN: u64 = 1_000_000_000;
/// Records that each strategy may examine for a point of a chart: some seconds.
const SKETCH_RECORDS_MAX: u64 = 200_000_000;
/// The most pipelines for each processor in the thesis' studies, and in all on its fifty.
const WIDTH_PER_CPU: f64 = 20.0;
const WIDTH_THESIS: f64 = 1_000.0;
/// Jobs of the widest workload where there are more processors: it is to be simulated.
const WIDTH_JOBS_MAX: f64 = 50_000.0;

/// The quantity that a study varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StudyVariable {
    /// Pipelines for each processor.
    Width,
    /// Jobs of a pipeline.
    Depth,
    /// A batch volume, in hundredths of the storage.
    Batch,
    /// A private volume, in hundredths of the storage.
    Private,
    /// Computing time of a job, in seconds.
    Run,
    /// Standard deviation of the computing time over its mean.
    Variability,
    /// The same with computing a thousand times as long.
    LongVariability,
    /// Rate of the link to home over that of the nodes' links.
    HomeRate,
    /// Failures of nodes in a day.
    Failures,
}

/// One workload in one environment.
#[derive(Debug, Clone)]
pub struct StudyPoint {
    /// Value of the quantity that is varied.
    pub x: f64,
    /// The workload.
    pub canonical: CanonicalWorkload,
    /// The machines.
    pub environment: Environment,
}

/// A strategy at one point.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StrategyTime {
    /// Which.
    pub strategy: Strategy,
    /// The planner's prediction, in seconds; `None` if it predicts that the strategy never
    /// finishes.
    pub predicted_s: Option<f64>,
    /// As simulated, the mean over all seeds, in seconds; nothing when it never ends, or was left
    /// as far too slow (no plan).
    pub simulated_s: Option<f64>,
}

/// Every possible strategy at one point, and the planner's choice.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StrategyComparison {
    /// The model's choice.
    pub model_choice: Option<Strategy>,
    /// The choice after candidates that the model cannot tell apart are simulated, with other seeds
    /// than those of the comparison.
    pub simulated_choice: Option<Strategy>,
    /// The strategies that need no consent, in the order of the table.
    pub times: Vec<StrategyTime>,
    /// Mean simulated time of a scheduler that gets these simulations as advice, begins with their
    /// choice, and changes its strategy for the rest of the run if another seems better, in
    /// seconds; `None` if it never finishes.
    pub adaptive_s: Option<f64>,
}

/// The thesis' environment: 50 nodes of one processor and 5 GB, 1 and 12 MB/s.
pub fn thesis_environment() -> Environment {
    Environment {
        nodes: vec![NodeClass::new(50, 1, 5_000_000_000)],
        home_bytes_per_s: 1_000_000,
        local_bytes_per_s: 12_000_000,
        mtbf_s: None,
        restart_s: RESTART_S_DEFAULT,
    }
}

/// The thesis' three baseline workloads (its table 4.4), with their names.
pub fn baseline_workloads() -> [(&'static str, CanonicalWorkload); 3] {
    let of = |batch_bytes, private_bytes| CanonicalWorkload {
        width: 350,
        depth: 5,
        batch_bytes,
        private_bytes,
        batch_files: 1,
        private_files: 1,
        run_s: 5_000.0,
        variability: 0.1,
        layout: PrivateLayout::Chain,
    };
    [
        ("batch", of(176_600_000_000, 203_600_000)),
        ("private", of(30_000_000_000, 2_500_000_000)),
        ("mixed", of(45_000_000_000, 500_000_000)),
    ]
}

impl StudyVariable {
    /// All studies in the order of the thesis.
    pub const ALL: [Self; 9] = [
        Self::Width,
        Self::Depth,
        Self::Batch,
        Self::Private,
        Self::Run,
        Self::Variability,
        Self::LongVariability,
        Self::HomeRate,
        Self::Failures,
    ];

    /// A name without spaces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Width => "width",
            Self::Depth => "depth",
            Self::Batch => "batch",
            Self::Private => "private",
            Self::Run => "run",
            Self::Variability => "variability",
            Self::LongVariability => "long-variability",
            Self::HomeRate => "home-rate",
            Self::Failures => "failures",
        }
    }

    /// The varied parameter, with its unit.
    pub fn axis_label(self) -> &'static str {
        match self {
            Self::Width => "pipelines for each processor",
            Self::Depth => "jobs in a pipeline",
            Self::Batch => "batch volume, % of the storage",
            Self::Private => "private volume, % of the storage",
            Self::Run => "computing of a job, s",
            Self::Variability => "deviation of the computing time over its mean",
            Self::LongVariability => "the same, computing 1000 times as long",
            Self::HomeRate => "rate to home over rate of a node",
            Self::Failures => "failures in a day",
        }
    }

    /// Whether the axis is better logarithmic.
    pub fn is_logarithmic(self) -> bool {
        matches!(self, Self::Run | Self::HomeRate)
    }

    /// The `step`th of `steps` points with all else as in `base`, in the thesis' environment.
    pub fn point(self, base: &CanonicalWorkload, step: u32, steps: u32) -> StudyPoint {
        self.point_in(&thesis_environment(), base, step, steps)
    }

    /// The same in another environment.
    pub fn point_in(
        self,
        environment: &Environment,
        base: &CanonicalWorkload,
        step: u32,
        steps: u32,
    ) -> StudyPoint {
        let mut point = StudyPoint {
            x: 0.0,
            canonical: base.clone(),
            environment: environment.clone(),
        };
        let (canonical, environment) = (&mut point.canonical, &mut point.environment);
        let storage_bytes = environment.storage_bytes() as f64;
        let part = f64::from(step + 1) / f64::from(steps);
        let from_zero = f64::from(step) / f64::from(steps.max(2) - 1);
        let between = |low: f64, high: f64| low * power(high / low, from_zero);
        point.x = match self {
            Self::Width => {
                let affordable = (WIDTH_JOBS_MAX / f64::from(canonical.depth)).max(WIDTH_THESIS);
                let most = (WIDTH_PER_CPU * environment.cpus() as f64).min(affordable);
                canonical.width = (most * part).round().max(1.0) as u32;
                f64::from(canonical.width) / environment.cpus() as f64
            }
            Self::Depth => {
                canonical.depth = (20.0 * part).round().max(1.0) as u32;
                f64::from(canonical.depth)
            }
            Self::Batch => {
                canonical.batch_bytes = (0.96 * part * storage_bytes).round() as u64;
                96.0 * part
            }
            Self::Private => {
                canonical.private_bytes = (0.02 * part * storage_bytes).round() as u64;
                2.0 * part
            }
            Self::Run => {
                canonical.run_s = between(10.0, 1e6).round();
                canonical.run_s
            }
            Self::Variability | Self::LongVariability => {
                canonical.variability = 1.9 * from_zero;
                if self == Self::LongVariability {
                    canonical.run_s *= 1_000.0;
                }
                canonical.variability
            }
            Self::HomeRate => {
                let local = environment.local_bytes_per_s as f64;
                let home = (local * between(0.005, 2.0)).round() as u64;
                point.environment = point.environment.with_rates(Some(home), None);
                home as f64 / local
            }
            Self::Failures => {
                let in_a_day = 4.0 * from_zero;
                environment.mtbf_s = (in_a_day > 0.0).then(|| (86_400.0 / in_a_day) as u64);
                in_a_day
            }
        };
        point
    }
}

/// A workload and machines drawn at random. The same seed gives the same.
pub fn random_point(seed: u64) -> StudyPoint {
    let mut rng = SeededRng::new(seed ^ 0x7e57);
    let mut between = |low: f64, high: f64| {
        let part = rng.next_below(1 << 32) as f64 / f64::from(u32::MAX);
        low * power(high / low, part)
    };
    let nodes = between(8.0, 100.0).round() as u32;
    let node_bytes = between(GB, 50.0 * GB).round();
    let storage_bytes = f64::from(nodes) * node_bytes;
    let local = between(10.0 * MB, 120.0 * MB).round();
    let depth = between(1.0, 12.0).round() as u32;
    let most = (RANDOM_JOBS_MAX / u64::from(depth)).min(1_000) as f64;
    let environment = Environment {
        nodes: vec![NodeClass::new(nodes, 1, node_bytes as u64)],
        home_bytes_per_s: (local * between(0.01, 1.0)).round() as u64,
        local_bytes_per_s: local as u64,
        mtbf_s: None,
        restart_s: RESTART_S_DEFAULT,
    };
    let canonical = CanonicalWorkload {
        width: between(10.0, most).round() as u32,
        depth,
        batch_bytes: (storage_bytes * between(0.01, 0.9)).round() as u64,
        private_bytes: (storage_bytes * between(0.000_3, 0.02)).min(node_bytes) as u64,
        batch_files: 1,
        private_files: 1,
        run_s: between(50.0, 50_000.0).round(),
        variability: between(0.01, 1.0),
        layout: PrivateLayout::Chain,
    };
    StudyPoint {
        x: seed as f64,
        canonical,
        environment,
    }
}

/// Simulates every strategy that is possible at a point, `seeds` times each. With failures some
/// may never end.
///
/// # Errors
/// When a simulated run does not end as it should: a defect.
pub fn compare_strategies(
    point: &StudyPoint,
    seeds: u64,
) -> Result<StrategyComparison, StalledRunError> {
    let shape = point.canonical.shape();
    let mut plan = plan_workload(shape, &point.environment);
    let choice = |plan: &Plan| plan.choice.as_ref().map(|choice| choice.strategy);
    let chosen = choice(&plan);
    let mut timing = StrategyTimer::new(point, seeds);
    let (workflow, load) = (&timing.workflow, &timing.load);
    let work = (workflow.jobs.len() as u64, || workflow.clone());
    let doubts = decide_by_simulation(&mut plan, TrialScope::Ties, work, &point.environment, load)?;
    let decided = choice(&plan);
    timing.simulated_plan = plan_from_trials(&plan, &point.environment, &doubts);
    let timed = timing.time_candidates(&plan.candidates)?;
    Ok(StrategyComparison {
        model_choice: chosen,
        simulated_choice: decided,
        times: timed,
        adaptive_s: timing.mean_s(Policy::Adaptive)?,
    })
}

/// The same for a picture: each strategy is simulated once, and one that cannot be done there after
/// all, or is too much to simulate, has no time.
///
/// # Errors
/// As [`compare_strategies`].
pub fn sketch_point(point: &StudyPoint) -> Result<Vec<StrategyTime>, StalledRunError> {
    let plan = plan_workload(point.canonical.shape(), &point.environment);
    let mut timing = StrategyTimer::new(point, 1);
    timing.records_examined_max = SKETCH_RECORDS_MAX;
    timing.time_candidates(&plan.candidates)
}

/// Where strategies are timed one after the other, in the order of the table.
struct StrategyTimer<'t> {
    point: &'t StudyPoint,
    workflow: Workflow,
    load: LoadModel,
    seeds: u64,
    /// The advice for a scheduler that plans by itself.
    simulated_plan: Option<SimulatedPlan>,
    /// Records that any run may examine. A planned run without failures that is not done is a
    /// defect where it may look at all.
    records_examined_max: u64,
    /// The shortest mean so far, in seconds.
    best_s: f64,
    /// Largest number of records that a run has examined.
    records_examined_most: u64,
}

impl<'t> StrategyTimer<'t> {
    fn new(point: &'t StudyPoint, seeds: u64) -> Self {
        Self {
            point,
            workflow: build_canonical_workflow(&point.canonical),
            load: LoadModel::Declared {
                variability_ppm: (point.canonical.variability * 1e6).round() as u64,
            },
            seeds,
            simulated_plan: None,
            records_examined_max: u64::MAX,
            best_s: f64::INFINITY,
            records_examined_most: 0,
        }
    }

    /// The possible strategies that need no consent.
    fn time_candidates(
        &mut self,
        candidates: &[StrategyCandidate],
    ) -> Result<Vec<StrategyTime>, StalledRunError> {
        let mut timed = Vec::new();
        for candidate in candidates {
            let strategy = candidate.allocation.strategy;
            if candidate.allocation.is_planned() {
                timed.push(StrategyTime {
                    strategy,
                    predicted_s: candidate.predicted_s,
                    simulated_s: self.mean_s(Policy::from(strategy))?,
                });
            }
        }
        Ok(timed)
    }

    /// Mean over all seeds, in seconds; nothing when one never ends. Without a plan a run may take
    /// hours to simulate until it is stopped. It is stopped here after several times the simulated
    /// time or the records of the others.
    fn mean_s(&mut self, policy: Policy) -> Result<Option<f64>, StalledRunError> {
        let environment = &self.point.environment;
        // No strategy is guaranteed to finish without a plan.
        let is_planned = matches!(policy, Policy::Strategy(_));
        let is_bounded = !is_planned && self.best_s.is_finite();
        let is_strict = self.records_examined_max == u64::MAX;
        let mut sum_s = 0.0;
        for seed in 0..self.seeds {
            let mut scenario =
                Scenario::new(environment.clone(), policy, self.load.clone(), seed + 1);
            scenario.records_examined_max = self.records_examined_max;
            scenario.simulated_plan = self.simulated_plan.clone();
            let mut limit_us = u64::MAX;
            if is_bounded {
                limit_us = (HOPELESS_FACTOR * self.best_s * 1e6) as u64;
                let most = HOPELESS_FACTOR as u64 * self.records_examined_most;
                scenario.records_examined_max = self
                    .records_examined_max
                    .min(most.max(RECORDS_EXAMINED_MIN));
            }
            let simulation = Simulation::new(self.workflow.clone(), scenario);
            let (run, looked_at) = simulation.run_until(limit_us)?;
            let failure = run.as_ref().and_then(SimulationResult::failure);
            let is_defect = is_planned && is_strict && environment.mtbf_s.is_none();
            if let Some(why) = failure.filter(|_| is_defect) {
                return Err(StalledRunError(format!("{policy}, seed {seed}: {why}")));
            }
            let Some(run) = run.filter(SimulationResult::is_complete) else {
                return Ok(None);
            };
            self.records_examined_most = self.records_examined_most.max(looked_at);
            sum_s += run.seconds();
        }
        let mean_s = sum_s / self.seeds.max(1) as f64;
        self.best_s = self.best_s.min(mean_s);
        Ok(Some(mean_s))
    }
}

impl StrategyComparison {
    /// The strategy that is fastest in the simulation; nothing when none ever ends.
    pub fn best(&self) -> Option<StrategyTime> {
        self.finished_times()
            .min_by(|a, b| a.seconds().total_cmp(&b.seconds()))
    }

    /// The slowest finished strategy in the simulation.
    pub fn worst(&self) -> Option<StrategyTime> {
        self.finished_times()
            .max_by(|a, b| a.seconds().total_cmp(&b.seconds()))
    }

    fn finished_times(&self) -> impl Iterator<Item = StrategyTime> {
        let timed = self.times.iter().copied();
        timed.filter(|timed| timed.simulated_s.is_some())
    }

    /// Simulated time of the model's choice over that of the best: infinite when there is no
    /// choice, or one that never ends, although others do. `None` if none does.
    pub fn regret(&self) -> Option<f64> {
        self.regret_of(self.model_choice)
    }

    /// The same of the choice that simulations made sure.
    pub fn simulated_regret(&self) -> Option<f64> {
        self.regret_of(self.simulated_choice)
    }

    /// The same for a run that plans by itself, with simulations; below one if a change of strategy
    /// pays.
    pub fn adaptive_regret(&self) -> Option<f64> {
        Some(self.adaptive_s.unwrap_or(f64::INFINITY) / self.best()?.seconds())
    }

    fn regret_of(&self, choice: Option<Strategy>) -> Option<f64> {
        let mut timed = self.times.iter();
        let chosen = timed.find(|timed| Some(timed.strategy) == choice);
        let chosen_s = chosen.map_or(f64::INFINITY, StrategyTime::seconds);
        Some(chosen_s / self.best()?.seconds())
    }
}

impl StrategyTime {
    /// As simulated, in seconds; infinite when it never ends.
    pub fn seconds(&self) -> f64 {
        self.simulated_s.unwrap_or(f64::INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Departing nodes take their planned work with them.
    fn leaving_nodes_point() -> StudyPoint {
        let text = "width=4,depth=2,batch=1GB,private=1GB,run=5000s";
        let mut environment = thesis_environment();
        (environment.nodes[0].count, environment.nodes[0].departure_s) = (2, Some(6_000));
        StudyPoint {
            x: 0.0,
            canonical: CanonicalWorkload::parse(text).expect("a workload"),
            environment,
        }
    }

    #[test]
    fn sketch_shows_impossible_points_as_missing() {
        let strict = compare_strategies(&leaving_nodes_point(), 1);
        assert!(strict.is_err(), "a benchmark wants to know: {strict:?}");
        let timed = sketch_point(&leaving_nodes_point()).expect("a picture");
        assert!(timed.len() > 1 && timed.iter().all(|timed| timed.simulated_s.is_none()));
    }

    #[test]
    fn study_widths_scale_with_the_processors() {
        let (_, base) = &baseline_workloads()[0];
        let mut large = thesis_environment();
        large.nodes[0].count = 400;
        let widest =
            |environment: &Environment| StudyVariable::Width.point_in(environment, base, 5, 6);
        let (small, large) = (widest(&thesis_environment()), widest(&large));
        assert_eq!((small.x, small.canonical.width), (20.0, 1_000));
        assert_eq!((large.x, large.canonical.width), (20.0, 8_000));
        let mut huge = thesis_environment();
        huge.nodes[0].count = 5_000;
        assert_eq!(
            widest(&huge).canonical.jobs(),
            50_000,
            "no more are simulated"
        );
    }

    #[test]
    fn point_without_a_choice_has_infinite_regret() {
        let timed = |strategy, simulated_s| StrategyTime {
            strategy,
            predicted_s: None,
            simulated_s,
        };
        let compared = |chosen, times: [Option<f64>; 2]| StrategyComparison {
            model_choice: chosen,
            simulated_choice: None,
            times: vec![
                timed(Strategy::Slice, times[0]),
                timed(Strategy::Minimal, times[1]),
            ],
            adaptive_s: None,
        };
        let regret = |chosen, times| compared(chosen, times).regret();
        let never = Some(f64::INFINITY);
        assert_eq!(regret(None, [Some(2.0), None]), never);
        assert_eq!(regret(Some(Strategy::Minimal), [Some(2.0), None]), never);
        assert_eq!(regret(Some(Strategy::Slice), [Some(2.0), None]), Some(1.0));
        assert_eq!(regret(Some(Strategy::Slice), [None, None]), None);
        assert_eq!(
            regret(Some(Strategy::Slice), [Some(3.0), Some(2.0)]),
            Some(1.5)
        );
    }
}
