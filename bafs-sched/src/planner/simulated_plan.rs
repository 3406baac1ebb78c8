//! Simulations of strategies before a run, for a scheduler that plans by itself: the strategy to
//! begin with, and the error of the model. Simulates nothing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::environment::Environment;
use super::plan_choice::Plan;
use super::strategy::Strategy;

/// A model that is right, in thousandths.
const EXACT_PERMILLE: u64 = 1_000;

/// Processors or bytes of nodes that may differ from those of the simulation, in thousandths: a
/// scheduler leaves a little space of each node, and a node may be away.
const NODES_TOLERANCE_PERMILLE: u128 = 100;

/// Results of simulations for a workload on certain nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulatedPlan {
    /// The strategy to begin with.
    pub strategy: Strategy,
    /// Why, in one sentence with numbers.
    pub reason: String,
    /// Processors and bytes of the nodes that were present at once: several entries if nodes arrive
    /// or leave.
    node_totals: Vec<(u64, u128)>,
    /// Simulated time over the model's, in thousandths.
    corrections: BTreeMap<Strategy, u64>,
}

impl SimulatedPlan {
    /// The simulated choice of `plan`, with its seconds; `None` for a strategy that was stopped
    /// early or not simulated. No advice when nothing was chosen, or nothing timed.
    pub fn new(
        plan: &Plan,
        environment: &Environment,
        simulated_s: impl Fn(Strategy) -> Option<f64>,
    ) -> Option<Self> {
        let choice = plan.choice.as_ref()?;
        let strategies = plan.candidates.iter().map(|it| it.allocation.strategy);
        let times = strategies.filter_map(&simulated_s);
        let best_s = times.min_by(f64::total_cmp)?;
        let correction = |predicted_s: f64, simulated_s: Option<f64>| match simulated_s {
            Some(simulated_s) => to_permille(simulated_s / predicted_s),
            // A strategy that was stopped early or far behind is no faster than the best.
            None => to_permille(best_s / predicted_s).max(EXACT_PERMILLE),
        };
        let corrections = plan.candidates.iter().filter_map(|candidate| {
            let strategy = candidate.allocation.strategy;
            let predicted_s = candidate.predicted_s.filter(|seconds| *seconds > 0.0)?;
            Some((strategy, correction(predicted_s, simulated_s(strategy))))
        });
        Some(Self {
            strategy: choice.strategy,
            reason: choice.reason.clone(),
            node_totals: environment.node_totals(),
            corrections: corrections.collect(),
        })
    }

    /// Whether nodes arrived or left in the simulation.
    pub fn has_changing_nodes(&self) -> bool {
        self.node_totals.len() > 1
    }

    /// Whether nodes with so many processors and bytes are about those of the simulation at some
    /// time, or between two times: nodes come and leave one after the other.
    pub fn is_valid_for(&self, cpus: u64, storage_bytes: u128) -> bool {
        let is_near = |a: u128, b: u128, there: u128| {
            let there = there.saturating_mul(1_000);
            let least = a.min(b).saturating_mul(1_000 - NODES_TOLERANCE_PERMILLE);
            let most = a.max(b).saturating_mul(1_000 + NODES_TOLERANCE_PERMILLE);
            (least..=most).contains(&there)
        };
        let is_between = |before: &(u64, u128), after: &(u64, u128)| {
            is_near(before.0.into(), after.0.into(), cpus.into())
                && is_near(before.1, after.1, storage_bytes)
        };
        let after = self
            .node_totals
            .iter()
            .skip(1)
            .chain(self.node_totals.last());
        self.node_totals
            .iter()
            .zip(after)
            .any(|(a, b)| is_between(a, b))
    }

    /// A prediction of the model, in seconds, with the simulation's correction.
    pub fn correct_prediction(&self, strategy: Strategy, predicted_s: f64) -> f64 {
        let permille = self.corrections.get(&strategy);
        predicted_s * *permille.unwrap_or(&EXACT_PERMILLE) as f64 / 1_000.0
    }
}

/// A ratio in thousandths, at least one.
fn to_permille(ratio: f64) -> u64 {
    ((ratio * 1_000.0).round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{CanonicalWorkload, NodeClass, plan_workload};

    const GB: u64 = 1_000_000_000;

    fn test_environment() -> Environment {
        Environment {
            nodes: vec![NodeClass::new(50, 1, 5 * GB)],
            home_bytes_per_s: 1_000_000,
            local_bytes_per_s: 12_000_000,
            mtbf_s: None,
            restart_s: 60,
        }
    }

    /// The model prefers Slice, and AllBatch and Minimal are behind.
    fn mixed_plan() -> Plan {
        let text = "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s";
        let plan = plan_workload(
            CanonicalWorkload::parse(text).unwrap().shape(),
            &test_environment(),
        );
        let choice = plan.choice.as_ref().map(|choice| choice.strategy);
        assert_eq!(choice, Some(Strategy::Slice));
        plan
    }

    fn predicted_s(plan: &Plan, strategy: Strategy) -> f64 {
        let mut candidates = plan.candidates.iter();
        let found = candidates.find(|it| it.allocation.strategy == strategy);
        found.and_then(|it| it.predicted_s).unwrap()
    }

    #[test]
    fn simulation_corrects_the_model() {
        let plan = mixed_plan();
        let slice_s = predicted_s(&plan, Strategy::Slice);
        let advice = SimulatedPlan::new(&plan, &test_environment(), |strategy| match strategy {
            Strategy::Slice => Some(2.0 * slice_s),
            _ => None,
        });
        let advice = advice.unwrap();
        assert_eq!(advice.correct_prediction(Strategy::Slice, 100.0), 200.0);
        // A strategy that was not simulated never counts as faster than the best simulated one.
        let minimal_s = predicted_s(&plan, Strategy::Minimal);
        let corrected_s = advice.correct_prediction(Strategy::Minimal, minimal_s);
        assert!(corrected_s >= 1.998 * slice_s, "{corrected_s}");
        assert_eq!(
            advice.correct_prediction(Strategy::All, 100.0),
            100.0,
            "impossible"
        );
    }

    #[test]
    fn simulated_plan_requires_a_simulation() {
        assert_eq!(
            SimulatedPlan::new(&mixed_plan(), &test_environment(), |_| None),
            None
        );
    }

    #[test]
    fn simulated_plan_applies_to_similar_nodes_only() {
        let advice = SimulatedPlan::new(&mixed_plan(), &test_environment(), |_| Some(1.0)).unwrap();
        let bytes = u128::from(250 * GB);
        assert!(advice.is_valid_for(50, bytes));
        assert!(advice.is_valid_for(49, bytes / 100 * 98));
        assert!(!advice.is_valid_for(40, bytes));
        assert!(!advice.is_valid_for(50, bytes * 2));
        assert!(!advice.has_changing_nodes());
    }

    #[test]
    fn simulated_plan_applies_while_nodes_change_as_simulated() {
        let mut changing = test_environment();
        changing.nodes[0].departure_s = Some(9_000);
        let (mut late, mut early) = (changing.nodes[0].clone(), changing.nodes[0].clone());
        (late.count, late.arrival_s, late.departure_s) = (20, 500, None);
        (early.count, early.departure_s) = (10, Some(500));
        changing.nodes.extend([late, early]);
        let advice = SimulatedPlan::new(&mixed_plan(), &changing, |_| Some(1.0)).unwrap();
        let is_for = |nodes: u64| advice.is_valid_for(nodes, u128::from(nodes * 5 * GB));
        assert!(is_for(60) && is_for(70) && is_for(20));
        assert!(is_for(40), "not all have left yet");
        assert!(!is_for(10) && !is_for(80) && advice.has_changing_nodes());
    }
}
