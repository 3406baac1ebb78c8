//! The strategy selector of BAFS: which strategy is best for what is left, by the model and by what
//! was simulated before the run.
//!
//! The simulated plan says what to begin with on the nodes of the simulation, and corrects the
//! model from then on. A change costs: pipelines that have begun end as they began, and what the
//! other strategy needs besides is fetched. So it must gain more than the model is usually off.

use std::sync::Arc;

use bafs_sched::{
    NodeKind, RemainingPipelines, Selection, SelectionQuery, SimulatedPlan, Strategy,
    StrategySelector, StrategySelectorConfig, WorkloadModel,
};
use bafs_workflow::Workflow;

use crate::planner::{
    Environment, NodeClass, Shape, StrategyAllocation, plan_with_simulations, predict_remaining,
};

/// A strategy that is followed is left for one that takes so much less of the time, in thousandths:
/// between strategies the model is rarely off by more.
const GAIN_PERMILLE: u64 = 100;

/// The strategy that was simulated as the best is left only for so much: of a small random workload
/// the model took another one to save 13 % of what was left, and the run took 13 % longer.
const GAIN_ADVISED_PERMILLE: u64 = 250;

/// Selects by model and simulation.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModelSelector;

impl StrategySelector for ModelSelector {
    fn model_workload(
        &self,
        workflow: &Workflow,
        config: &StrategySelectorConfig,
    ) -> Option<Arc<dyn WorkloadModel>> {
        Some(Arc::new(ShapeModel::new(workflow, config.clone())))
    }
}

/// The shape of a workflow, and what a user said of its environment.
#[derive(Debug, Clone, PartialEq)]
struct ShapeModel {
    shape: Shape,
    config: StrategySelectorConfig,
}

impl ShapeModel {
    fn new(workflow: &Workflow, config: StrategySelectorConfig) -> Self {
        let variability = config.variability_ppm as f64 / 1e6;
        Self {
            shape: Shape::from_workflow(workflow, variability),
            config,
        }
    }

    /// What the nodes of a question are for the planner.
    fn environment(&self, kinds: &[NodeKind]) -> Environment {
        let nodes = kinds.iter().map(|kind| NodeClass {
            files: kind.space.files,
            cluster: kind.group.clone(),
            ..NodeClass::new(kind.count, kind.slots, kind.space.bytes)
        });
        Environment {
            nodes: nodes.collect(),
            home_bytes_per_s: self.config.home_bytes_per_s.max(1),
            local_bytes_per_s: self.config.local_bytes_per_s.max(1),
            mtbf_s: self.config.mtbf_s,
            restart_s: self.config.restart_s,
        }
    }
}

impl WorkloadModel for ShapeModel {
    fn with_sizes(&self, workflow: &Workflow) -> Arc<dyn WorkloadModel> {
        Arc::new(Self::new(workflow, self.config.clone()))
    }

    fn level_count(&self) -> u64 {
        self.shape.width * self.shape.depth
    }

    fn mean_run_s(&self) -> f64 {
        self.shape.run_s
    }

    fn select(&self, query: &SelectionQuery) -> Option<Selection> {
        let environment = self.environment(&query.nodes);
        let mut shape = self.shape.clone();
        shape.run_s = query.run_s;
        let advice = self.config.simulated_plan.as_ref();
        let (cpus, bytes) = (query.cpus, query.bytes);
        let is_for = advice.is_some_and(|advice| advice.is_valid_for(cpus, bytes.into()));
        let left = RemainingWork {
            shape: &shape,
            environment: &environment,
            rest: query.remaining,
            advice,
            is_as_simulated: is_for && query.has_declared_times,
        };
        let (strategy, reason) = match query.present {
            None => left.first(cpus, bytes),
            // The model knows no time for what is left of it.
            Some(Strategy::Need) if left.is_advised(Strategy::Need) => return None,
            // Nor how much of what a failure costs is hidden behind other pipelines, nor that other
            // nodes are to come, or leave. That was simulated, to the end.
            Some(present) if left.is_as_simulated_blindly(present) => {
                if query.has_simulated_rules && !query.has_measured_sizes {
                    return None;
                }
                (Some(present), String::new())
            }
            Some(present) => left.next(present),
        };
        let is_advised = strategy.is_some_and(|strategy| left.is_advised(strategy));
        // Also a strategy that is kept has other numbers on other nodes.
        let rules = strategy.and_then(|strategy| {
            let shape = shape.with_width(query.remaining.open);
            strategy
                .plan_allocation(&shape, &environment)
                .allocation_rules(&shape)
        });
        Some(Selection {
            has_simulated_rules: is_advised && left.is_as_simulated,
            strategy,
            reason,
            rules,
        })
    }
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
