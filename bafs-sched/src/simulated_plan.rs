//! What was simulated of strategies before a run, for a scheduler that plans by itself: which one
//! to begin with, and by how much the model is off. Simulates nothing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::allocation_strategy::Strategy;

/// A model that is right, in thousandths.
pub const EXACT_PERMILLE: u64 = 1_000;

/// Processors or bytes of nodes that may differ from those of the simulation, in thousandths: a
/// scheduler leaves a little space of each node, and a node may be away.
const NODES_TOLERANCE_PERMILLE: u128 = 100;

/// What simulations say of a workload on certain nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulatedPlan {
    /// What to begin with.
    pub strategy: Strategy,
    /// Why, in one sentence with numbers.
    pub reason: String,
    /// Processors and bytes of the nodes that were there at once: several where some came later or
    /// left.
    pub node_totals: Vec<(u64, u128)>,
    /// Simulated time over the model's, in thousandths.
    pub corrections: BTreeMap<Strategy, u64>,
}

impl SimulatedPlan {
    /// Whether nodes came later or left in the simulation.
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

    /// A prediction of the model, in seconds, with what the simulation says of it.
    pub fn correct_prediction(&self, strategy: Strategy, predicted_s: f64) -> f64 {
        let permille = self.corrections.get(&strategy);
        predicted_s * *permille.unwrap_or(&EXACT_PERMILLE) as f64 / 1_000.0
    }
}
