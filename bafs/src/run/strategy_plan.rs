//! What a run needs to choose a strategy by itself: from an environment file, or from what earlier
//! runs have taught. Decides nothing.

use std::path::Path;

use anyhow::{Result, anyhow};
use bafs_sched::StrategySelectorConfig;
use bafs_sim::planner::Environment;
use bafs_sim::simulator::{LoadModel, derive_simulated_plan};
use bafs_workflow::Workflow;

use crate::args::{RunArgs, StartOrder};
use crate::learned;
use crate::live_environment;
use crate::output::print_notice;
use crate::plan;

/// What computing times of jobs are taken to deviate from their mean, in millionths of it.
const VARIABILITY_PPM: u64 = 100_000;

/// What the scheduler cannot see of an environment, and what is simulated of the workflow there.
pub(super) fn build_strategy_selector(
    path: &Path,
    workflow: &Workflow,
) -> Result<StrategySelectorConfig> {
    let environment = plan::read_environment(path)?;
    configure_strategy_selector(&environment, workflow)
}

/// What a strategy selector works with.
fn configure_strategy_selector(
    environment: &Environment,
    workflow: &Workflow,
) -> Result<StrategySelectorConfig> {
    let load = LoadModel::Declared {
        variability_ppm: VARIABILITY_PPM,
    };
    let variability = VARIABILITY_PPM as f64 / 1e6;
    let advice = derive_simulated_plan(workflow, variability, environment, &load);
    Ok(StrategySelectorConfig {
        home_bytes_per_s: environment.home_bytes_per_s,
        local_bytes_per_s: environment.local_bytes_per_s,
        mtbf_s: environment.mtbf_s,
        restart_s: environment.restart_s,
        variability_ppm: VARIABILITY_PPM,
        simulated_plan: advice.map_err(|stuck| anyhow!("cannot simulate a strategy: {stuck}"))?,
    })
}

/// Plans with what earlier runs have taught, where nobody asks for another plan. Nothing where too
/// little is known: the run takes what fits, as its first one did.
pub(super) async fn plan_from_learned(
    args: &RunArgs,
    workflow: &Workflow,
    (identity, catalog): (&Path, &str),
) -> Option<StrategySelectorConfig> {
    let is_planned = args.plan.is_some() || args.remote_io || args.cache_only;
    if is_planned || args.order != StartOrder::Need || !args.policies.is_default() {
        return None;
    }
    let store = learned::find_store(&args.learned)?;
    let rates = tokio::task::block_in_place(|| store.link_rates(catalog));
    let (home, local) = rates.home.zip(rates.local)?;
    let mut known = workflow.clone();
    if !tokio::task::block_in_place(|| store.fill_for_plan(&mut known)) {
        return None;
    }
    let nodes = live_environment::find_nodes(identity, catalog, home, local).await;
    let configure = |environment| configure_strategy_selector(&environment, &known);
    let configure = || nodes.and_then(configure);
    match tokio::task::block_in_place(configure) {
        Ok(config) => {
            print_notice("the run is planned with what earlier runs have taught (`bafs learned`)");
            Some(config)
        }
        Err(error) => {
            tracing::debug!("no plan from learned values: {error:#}");
            None
        }
    }
}
