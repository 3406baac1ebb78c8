//! The plan: every strategy with its prediction, and the choice with its reason. It allocates
//! nothing and starts nothing.

use serde::Serialize;

use super::advice::Advice;
use super::environment::Environment;
use super::predict::predict_of;
use super::printed::printed_of;
use super::shape::Shape;
use super::strategy::{Allocation, Strategy};

/// Seconds within which predictions count as equal: no model is better than that.
const EQUAL_S: f64 = 1.0;

/// A strategy with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Candidate {
    /// Where data lie and what follows from it.
    #[serde(flatten)]
    pub allocation: Allocation,
    /// Pipelines that run at once with the processors that there are.
    pub running: u64,
    /// Run time by the corrected model; nothing when not possible, never done, or when a job fits
    /// on no node that is there at the beginning.
    pub predicted_s: Option<f64>,
    /// Run time by the printed equations, for comparison.
    pub printed_s: Option<f64>,
}

/// What is best.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
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
    pub candidates: Vec<Candidate>,
    /// The choice; nothing when no strategy but remote I/O is left, which is the user's to choose.
    pub choice: Option<Choice>,
    /// Why there is no choice, in one sentence.
    pub refusal: Option<String>,
}

/// Plans `shape` in `environment`. The same arguments give the same plan.
pub fn plan(shape: Shape, environment: &Environment) -> Plan {
    plan_advised(shape, environment, None)
}

/// The same with the model corrected by what simulations said of a like workload.
pub fn plan_advised(shape: Shape, environment: &Environment, advice: Option<&Advice>) -> Plan {
    let environment = &*environment.able(&shape);
    let too_wide = shape.too_wide(environment);
    let timed = |seconds: Option<f64>| seconds.filter(|_| too_wide.is_none());
    let candidate = |strategy: Strategy| {
        let allocation = strategy.allocate(&shape, environment);
        let predicted_s = predict_of(&allocation, &shape, environment, 1.0);
        let corrected = |seconds| match advice {
            Some(advice) => advice.corrected_s(strategy, seconds),
            None => seconds,
        };
        Candidate {
            running: allocation.running(&shape, environment),
            predicted_s: timed(predicted_s.map(corrected)),
            printed_s: timed(printed_of(&allocation, &shape, environment)),
            allocation,
        }
    };
    let candidates: Vec<Candidate> = Strategy::CANDIDATES.map(candidate).into();
    let choice = choose(&candidates);
    let refusal = match choice {
        Some(_) => None,
        None => Some(too_wide.unwrap_or_else(|| refusal(&candidates, &shape, environment))),
    };
    Plan {
        shape,
        candidates,
        choice,
        refusal,
    }
}

impl Candidate {
    /// Whether it is possible, ends, and needs no consent.
    fn is_eligible(&self) -> bool {
        self.predicted_s.is_some() && self.allocation.strategy != Strategy::Remote
    }

    /// Whether it is possible and needs no consent, but never ends.
    fn is_never_done(&self) -> bool {
        let is_told = !matches!(self.allocation.strategy, Strategy::Remote | Strategy::Need);
        is_told && self.allocation.is_possible() && self.predicted_s.is_none()
    }

    fn seconds(&self) -> f64 {
        self.predicted_s.unwrap_or(f64::INFINITY)
    }

    /// Of equally fast strategies, the one that fetches less again, waits less often, and needs
    /// less storage; none at all only where that is faster.
    fn price(&self) -> (bool, u64, u64, u128, Strategy) {
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

/// Whether a run without a plan, which promises nothing, takes so much less than the best strategy
/// that it is worth that: two thousandths.
pub(crate) fn is_worth_no_plan(need_s: f64, strategy_s: f64) -> bool {
    need_s < strategy_s * 0.998
}

fn choose(candidates: &[Candidate]) -> Option<Choice> {
    let is_none = |candidate: &Candidate| candidate.allocation.strategy == Strategy::Need;
    let all = || candidates.iter().filter(|it| it.is_eligible());
    let planned = all().filter(|it| !is_none(it)).map(Candidate::seconds);
    let planned_s = planned.fold(f64::INFINITY, f64::min);
    let eligible = || all().filter(|it| !is_none(it) || is_worth_no_plan(it.seconds(), planned_s));
    let least_s = eligible()
        .map(Candidate::seconds)
        .fold(f64::INFINITY, f64::min);
    let best = eligible()
        .filter(|candidate| candidate.seconds() <= least_s + EQUAL_S)
        .min_by_key(|candidate| candidate.price())?;
    let strategy = best.allocation.strategy;
    let others = all().filter(|candidate| candidate.allocation.strategy != strategy);
    let second = others.min_by(|a, b| {
        let by_price = || a.price().cmp(&b.price());
        a.seconds().total_cmp(&b.seconds()).then_with(by_price)
    });
    let reason = match second {
        Some(second) => compared(best, second),
        None => format!(
            "{strategy} is {}, {:.0} s with {} pipelines running at once",
            match candidates.iter().any(Candidate::is_never_done) {
                true => "the only strategy that is ever done at this rate of failures",
                false => "the only possible strategy",
            },
            best.seconds(),
            best.running
        ),
    };
    Some(Choice { strategy, reason })
}

fn compared(best: &Candidate, second: &Candidate) -> String {
    let (name, other) = (best.allocation.strategy, second.allocation.strategy);
    if other == Strategy::Need && second.seconds() < best.seconds() {
        return format!(
            "{name} takes {:.0} s, and {other}, which promises nothing, hardly less ({:.0} s)",
            best.seconds(),
            second.seconds()
        );
    }
    if (second.seconds() - best.seconds()).abs() <= EQUAL_S {
        return format!(
            "{name} and {other} both take {:.0} s; {name} has {} refetches, {} barriers and needs \
             {} bytes, {other} {}, {} and {}",
            best.seconds(),
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
        best.seconds(),
        100.0 * (1.0 - best.seconds() / second.seconds()),
        second.seconds(),
        best.running,
        second.running,
        best.allocation.barriers,
        second.allocation.barriers,
        best.allocation.refetches,
        second.allocation.refetches,
    )
}

fn refusal(candidates: &[Candidate], shape: &Shape, environment: &Environment) -> String {
    if candidates.iter().any(Candidate::is_never_done) {
        return "at this rate of failures no strategy is ever done: failed pipelines are repeated \
                more often than others finish"
            .to_owned();
    }
    if shape.largest_volume_bytes > environment.largest_node_bytes() {
        return "no node can hold the largest scratch volume; `bafs run --remote-io` needs no \
                storage, but every byte of every job would cross the link to home"
            .to_owned();
    }
    "no strategy fits the storage as far as bytes tell; plain `bafs run` may do it where pipelines \
     need their data one after the other (`bafs sim --strategy need` tries that), and `bafs run \
     --remote-io` needs no storage, but every byte of every job would cross the link to home"
        .to_owned()
}
