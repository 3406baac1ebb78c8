//! What simulations found, for a scheduler that plans by itself. Simulates nothing.

use bafs_sched::{EXACT_PERMILLE, SimulatedPlan, Strategy};

use super::environment::Environment;
use super::plan_choice::Plan;

/// What `plan` chose after simulations, which took so many seconds; nothing for a strategy that
/// was given up or not simulated at all. No advice when nothing was chosen, or nothing timed.
pub fn summarise_simulations(
    plan: &Plan,
    environment: &Environment,
    simulated_s: impl Fn(Strategy) -> Option<f64>,
) -> Option<SimulatedPlan> {
    let choice = plan.choice.as_ref()?;
    let strategies = plan.candidates.iter().map(|it| it.allocation.strategy);
    let times = strategies.filter_map(&simulated_s);
    let best_s = times.min_by(f64::total_cmp)?;
    let correction = |predicted_s: f64, simulated_s: Option<f64>| match simulated_s {
        Some(simulated_s) => to_permille(simulated_s / predicted_s),
        // Whoever was given up is no faster than the best, nor is who was far behind it.
        None => to_permille(best_s / predicted_s).max(EXACT_PERMILLE),
    };
    let corrections = plan.candidates.iter().filter_map(|candidate| {
        let strategy = candidate.allocation.strategy;
        let predicted_s = candidate.predicted_s.filter(|seconds| *seconds > 0.0)?;
        Some((strategy, correction(predicted_s, simulated_s(strategy))))
    });
    Some(SimulatedPlan {
        strategy: choice.strategy,
        reason: choice.reason.clone(),
        node_totals: environment.node_totals(),
        corrections: corrections.collect(),
    })
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

    /// The model believes in Slice, and AllBatch and Minimal are behind.
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
        let advice = summarise_simulations(&plan, &test_environment(), |strategy| match strategy {
            Strategy::Slice => Some(2.0 * slice_s),
            _ => None,
        });
        let advice = advice.unwrap();
        assert_eq!(advice.correct_prediction(Strategy::Slice, 100.0), 200.0);
        // What was left alone is not believed to be faster than the best that was simulated.
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
            summarise_simulations(&mixed_plan(), &test_environment(), |_| None),
            None
        );
    }

    #[test]
    fn simulated_plan_applies_to_similar_nodes_only() {
        let advice =
            summarise_simulations(&mixed_plan(), &test_environment(), |_| Some(1.0)).unwrap();
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
        let advice = summarise_simulations(&mixed_plan(), &changing, |_| Some(1.0)).unwrap();
        let is_for = |nodes: u64| advice.is_valid_for(nodes, u128::from(nodes * 5 * GB));
        assert!(is_for(60) && is_for(70) && is_for(20));
        assert!(is_for(40), "not all have left yet");
        assert!(!is_for(10) && !is_for(80) && advice.has_changing_nodes());
    }
}
