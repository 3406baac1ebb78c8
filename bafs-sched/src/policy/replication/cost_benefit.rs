//! The rule of the thesis (*Data-Driven Batch Scheduling*, 2005, section 3.2.6): copy when benefit
//! > cost.

use bafs_workflow::VolumeIndex;

use super::copy_policy::Replication;
use crate::policy::{Policy, View};
use crate::state::copy_costs::{ASSUMED_BYTES_PER_MS, CopyDecision, benefit_us};

/// Of the time of all jobs that are left, the part that may be spent to learn what copies cost, as
/// one over it.
const TRIAL_PART: u64 = 100;

/// Copies what would cost more to compute again.
#[derive(Debug)]
pub(super) struct CostBenefit;

impl Policy for CostBenefit {
    fn name(&self) -> &'static str {
        "cost-benefit"
    }

    fn summary(&self) -> &'static str {
        "a volume is copied when its loss would cost more, by what is known, than the copy does"
    }
}

impl Replication for CostBenefit {
    fn weighs(&self) -> bool {
        true
    }

    fn is_worthwhile(&self, view: View<'_>, volume: VolumeIndex, estimate: &CopyDecision) -> bool {
        if estimate.copy_ms.is_none() {
            return estimate.benefit_us > 0 && may_try(view, volume, estimate);
        }
        let cost_ms = estimate.wait_ms.saturating_add(estimate.space_ms);
        estimate.is_cheap || estimate.benefit_us > cost_ms.saturating_mul(1_000)
    }

    fn keeps_older(&self, estimate: &CopyDecision, spared_ms: u64, space_ms: u64) -> bool {
        benefit_us(spared_ms, estimate.risk_ppm) >= space_ms.saturating_mul(1_000)
    }
}

/// Whether a copy is made to learn what copies cost: one at a time, and, while nothing was
/// measured, only one that takes a small part of the work that is left, or hardly more than
/// it is worth, over a network as it is assumed.
fn may_try(view: View<'_>, volume: VolumeIndex, estimate: &CopyDecision) -> bool {
    let assumed_ms = view.held_bytes(volume) / ASSUMED_BYTES_PER_MS;
    let cost_ms = assumed_ms.saturating_add(estimate.space_ms);
    let jobs = view.graph.workflow.jobs.len() as u64;
    let jobs_left = jobs.saturating_sub(view.graph.finals());
    let work_ms = jobs_left.saturating_mul(view.checkpoints.mean_attempt_ms());
    let most_ms = (work_ms / TRIAL_PART).max(estimate.benefit_us / 1_000);
    view.checkpoints.copies.is_empty() && cost_ms <= most_ms
}
