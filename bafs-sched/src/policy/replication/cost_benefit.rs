//! The rule of the thesis (*Data-Driven Batch Scheduling*, 2005, section 3.2.6): copy when benefit
//! > cost.

use bafs_workflow::VolumeIndex;

use super::copy_estimate::{benefit_us, may_try};
use super::{Policy, Replication, View};
use crate::state::copy_costs::CopyDecision;

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
