//! One workflow in the three orders of the thesis, in turns, each beside its simulation.

use anyhow::{Context, Result, anyhow, ensure};
use bafs_sched::JobStartOrder;
use bafs_sim::simulator::Policy;

use super::curve_plot;
use super::simulator_accuracy::{ExperimentSite, SimulatedResults, SimulationModel, duration_s};
use super::test_bed::{MeasuredRun, TestBed};
use crate::bench::measure::Samples;

/// The orders that are compared, with their names in tables.
pub(super) const ORDERS: [(JobStartOrder, &str); 3] = [
    (JobStartOrder::Need, "ours"),
    (JobStartOrder::BreadthFirst, "breadth first"),
    (JobStartOrder::DepthFirst, "depth first"),
];

/// The figures of one order.
pub(super) struct OrderResult {
    pub(super) seconds: Samples,
    /// As the simulator counts.
    pub(super) simulator_s: Samples,
    /// The mean over the rounds.
    pub(super) home_bytes: f64,
    /// The mean over the rounds.
    pub(super) jobs_at_once: f64,
    /// Jobs that did not get done, in all rounds.
    pub(super) jobs_failed: u64,
    pub(super) simulated: SimulatedResults,
}

/// Runs a workflow in each order; each is simulated with the jobs' load of our order, on links as
/// slow as measured in one of the orders. Journals are kept under `name`.
pub(super) fn run_in_each_order(
    field: &mut TestBed,
    name: &str,
    text: &str,
    rounds: usize,
    site: &ExperimentSite,
) -> Result<[OrderResult; 3]> {
    let mut rows: [Vec<(MeasuredRun, f64)>; 3] = Default::default();
    let (mut model, mut others) = (None, Vec::new());
    for round in 0..rounds {
        for at in 0..ORDERS.len() {
            // The first run of a round may find cached data that the others do not.
            let at = (at + round) % ORDERS.len();
            let took = field.run_in_order(ORDERS[at].0, text)?;
            let journal = field.last_journal();
            let kept = format!("{name}-{}-{round}", Policy::Order(ORDERS[at].0));
            curve_plot::keep_journal(&journal, &kept)?;
            match ORDERS[at].0 {
                JobStartOrder::Need if model.is_none() => {
                    model = Some(SimulationModel::from_journal(&journal, site)?)
                }
                _ if round == 0 => others.push(journal.clone()),
                _ => {}
            }
            rows[at].push((took, duration_s(&journal)?));
        }
    }
    let mut model = model.context("ours is one of the orders")?;
    for journal in others {
        model = model.with_measured_links(&journal)?;
    }
    let found = |(at, rows): (usize, Vec<(MeasuredRun, f64)>)| {
        let sample = |of: fn(&(MeasuredRun, f64)) -> f64| rows.iter().map(of).collect::<Vec<f64>>();
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        Ok(OrderResult {
            seconds: Samples::new(sample(|(took, _)| took.seconds)),
            simulator_s: Samples::new(sample(|(_, took_s)| *took_s)),
            home_bytes: mean(sample(|(took, _)| took.home_bytes as f64)),
            jobs_at_once: mean(sample(|(took, _)| took.jobs_at_once)),
            jobs_failed: rows.iter().map(|(took, _)| took.jobs_failed).sum(),
            simulated: model.simulate_variants(ORDERS[at].0)?,
        })
    };
    let all = rows.into_iter().enumerate().map(found);
    let all: Vec<OrderResult> = all.collect::<Result<_>>()?;
    let all: Result<[OrderResult; 3], _> = all.try_into();
    all.map_err(|_| anyhow!("there are three orders"))
}

/// All of these must have been done, or the times compare different work.
pub(super) fn ensure_all_done(name: &str, found: &[OrderResult; 3]) -> Result<()> {
    for (found, (_, order)) in found.iter().zip(ORDERS) {
        ensure!(
            found.jobs_failed == 0,
            "{name}, {order}: {} jobs failed",
            found.jobs_failed
        );
    }
    Ok(())
}
