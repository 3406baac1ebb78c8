//! The plan: every strategy with its prediction, and the choice with its reason. It allocates
//! nothing and starts nothing.

use bafs_sched::{SimulatedPlan, Strategy};
use serde::Serialize;

use super::environment::Environment;
use super::prediction::predict_allocation;
use super::printed_equations::predict_printed_allocation;
use super::shape::Shape;
use super::strategy::{Allocation, StrategyAllocation};

/// Seconds within which predictions count as equal: no model is better than that.
const TIE_TOLERANCE_S: f64 = 1.0;

/// A strategy with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StrategyCandidate {
    /// The data placement and its consequences.
    #[serde(flatten)]
    pub allocation: Allocation,
    /// Pipelines that run at once with the processors that there are.
    pub running_pipelines: u64,
    /// Run time by the corrected model; `None` if the strategy is impossible or never finishes, or
    /// if a job fits on no node at the start.
    pub predicted_s: Option<f64>,
    /// Run time by the printed equations, for comparison.
    pub printed_s: Option<f64>,
}

/// The chosen strategy, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StrategyChoice {
    /// The strategy.
    pub strategy: Strategy,
    /// Why, in one sentence with numbers.
    pub reason: String,
}

/// All strategies, in the order of [`Strategy::CANDIDATES`], and the choice among them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Sizes and work of the workload.
    pub shape: Shape,
    /// The strategies.
    pub candidates: Vec<StrategyCandidate>,
    /// The choice; `None` if only remote I/O is possible, which only the user may choose.
    pub choice: Option<StrategyChoice>,
    /// Why there is no choice, in one sentence.
    pub refusal: Option<String>,
}

/// Plans `shape` in `environment`. The same arguments give the same plan.
pub fn plan_workload(shape: Shape, environment: &Environment) -> Plan {
    plan_with_simulations(shape, environment, None)
}

/// The same with the model corrected by simulations of a similar workload.
pub fn plan_with_simulations(
    shape: Shape,
    environment: &Environment,
    advice: Option<&SimulatedPlan>,
) -> Plan {
    let environment = &*environment.usable_nodes(&shape);
    let width_error = shape.why_too_wide(environment);
    let timed = |seconds: Option<f64>| seconds.filter(|_| width_error.is_none());
    let candidate = |strategy: Strategy| {
        let allocation = strategy.plan_allocation(&shape, environment);
        let predicted_s = predict_allocation(&allocation, &shape, environment, 1.0);
        let corrected = |seconds| match advice {
            Some(advice) => advice.correct_prediction(strategy, seconds),
            None => seconds,
        };
        StrategyCandidate {
            running_pipelines: allocation.running_pipelines(&shape, environment),
            predicted_s: timed(predicted_s.map(corrected)),
            printed_s: timed(predict_printed_allocation(&allocation, &shape, environment)),
            allocation,
        }
    };
    let candidates: Vec<StrategyCandidate> = Strategy::CANDIDATES.map(candidate).into();
    let choice = choose_candidate(&candidates);
    let refusal = match choice {
        Some(_) => None,
        None => {
            Some(width_error.unwrap_or_else(|| describe_refusal(&candidates, &shape, environment)))
        }
    };
    Plan {
        shape,
        candidates,
        choice,
        refusal,
    }
}

impl StrategyCandidate {
    /// Whether it is possible, ends, and needs no consent.
    fn is_eligible(&self) -> bool {
        self.predicted_s.is_some() && self.allocation.strategy != Strategy::Remote
    }

    /// Whether it is possible and needs no consent, but never ends.
    fn is_endless(&self) -> bool {
        let is_told = !matches!(self.allocation.strategy, Strategy::Remote | Strategy::Need);
        is_told && self.allocation.is_possible() && self.predicted_s.is_none()
    }

    fn comparison_s(&self) -> f64 {
        self.predicted_s.unwrap_or(f64::INFINITY)
    }

    /// Of equally fast strategies, the one with fewer refetches, fewer waits and less storage;
    /// [`Strategy::Need`] only if it is faster.
    fn tie_break_key(&self) -> (bool, u64, u64, u128, Strategy) {
        let allocation = &self.allocation;
        let Allocation {
            refetches,
            barriers,
            required_bytes,
            strategy,
            ..
        } = *allocation;
        let is_none = strategy == Strategy::Need;
        (is_none, refetches, barriers, required_bytes, strategy)
    }
}

/// Whether a run without a plan, which has no guarantee, is enough faster than the best strategy:
/// by two thousandths.
pub(crate) fn is_need_worthwhile(need_s: f64, strategy_s: f64) -> bool {
    need_s < strategy_s * 0.998
}

fn choose_candidate(candidates: &[StrategyCandidate]) -> Option<StrategyChoice> {
    let is_none = |candidate: &StrategyCandidate| candidate.allocation.strategy == Strategy::Need;
    let all = || candidates.iter().filter(|it| it.is_eligible());
    let planned = all()
        .filter(|it| !is_none(it))
        .map(StrategyCandidate::comparison_s);
    let planned_s = planned.fold(f64::INFINITY, f64::min);
    let eligible =
        || all().filter(|it| !is_none(it) || is_need_worthwhile(it.comparison_s(), planned_s));
    let least_s = eligible()
        .map(StrategyCandidate::comparison_s)
        .fold(f64::INFINITY, f64::min);
    let best = eligible()
        .filter(|candidate| candidate.comparison_s() <= least_s + TIE_TOLERANCE_S)
        .min_by_key(|candidate| candidate.tie_break_key())?;
    let strategy = best.allocation.strategy;
    let others = all().filter(|candidate| candidate.allocation.strategy != strategy);
    let second = others.min_by(|a, b| {
        let by_price = || a.tie_break_key().cmp(&b.tie_break_key());
        a.comparison_s()
            .total_cmp(&b.comparison_s())
            .then_with(by_price)
    });
    let reason = match second {
        Some(second) => describe_margin(best, second),
        None => format!(
            "{strategy} is {}, {:.0} s with {} pipelines running at once",
            match candidates.iter().any(StrategyCandidate::is_endless) {
                true => "the only strategy that finishes at this failure rate",
                false => "the only possible strategy",
            },
            best.comparison_s(),
            best.running_pipelines
        ),
    };
    Some(StrategyChoice { strategy, reason })
}

fn describe_margin(best: &StrategyCandidate, second: &StrategyCandidate) -> String {
    let (name, other) = (best.allocation.strategy, second.allocation.strategy);
    if other == Strategy::Need && second.comparison_s() < best.comparison_s() {
        return format!(
            "{name} takes {:.0} s; {other}, not guaranteed to finish, takes hardly less ({:.0} s)",
            best.comparison_s(),
            second.comparison_s()
        );
    }
    if (second.comparison_s() - best.comparison_s()).abs() <= TIE_TOLERANCE_S {
        return format!(
            "{name} and {other} both take {:.0} s; {name} has {} refetches, {} barriers and needs \
             {} bytes, {other} {}, {} and {}",
            best.comparison_s(),
            best.allocation.refetches,
            best.allocation.barriers,
            best.allocation.required_bytes,
            second.allocation.refetches,
            second.allocation.barriers,
            second.allocation.required_bytes,
        );
    }
    format!(
        "{name} takes {:.0} s, {:.1} % less than {other} ({:.0} s): {} pipelines run at once \
         (with {other} {}), {} barriers ({}), {} batch volumes fetched again ({})",
        best.comparison_s(),
        100.0 * (1.0 - best.comparison_s() / second.comparison_s()),
        second.comparison_s(),
        best.running_pipelines,
        second.running_pipelines,
        best.allocation.barriers,
        second.allocation.barriers,
        best.allocation.refetches,
        second.allocation.refetches,
    )
}

fn describe_refusal(
    candidates: &[StrategyCandidate],
    shape: &Shape,
    environment: &Environment,
) -> String {
    if candidates.iter().any(StrategyCandidate::is_endless) {
        return "no strategy finishes at this failure rate: pipelines fail faster than they finish"
            .to_owned();
    }
    if shape.largest_volume_bytes > environment.largest_node_bytes() {
        return "no node can hold the largest scratch volume; `bafs run --remote-io` needs no \
                storage, but reads and writes every byte over the link to home"
            .to_owned();
    }
    "no strategy fits into the storage; plain `bafs run` may finish if pipelines need their data \
     one after the other (test it with `bafs sim --strategy need`); `bafs run --remote-io` needs \
     no storage, but reads and writes every byte over the link to home"
        .to_owned()
}
