//! How long a strategy takes by the equations that the thesis prints in §4.4, with its errata
//! corrected. Seconds in `f64`. BAFS only compares its own model with it, and uses its own.

use bafs_sched::Strategy;

use super::environment::Environment;
use super::prediction::{CacheState, allocate_part, with_failures};
use super::shape::Shape;
use super::strategy::{Allocation, StrategyAllocation, count_fitting_pipelines};

/// The predicted run time by the printed equations (Figs 4.10 to 4.15), errata corrected: bytes are
/// divided by bandwidths; v_batch is rounded down; v_ave is capped by the processors; v_warm leaves
/// out the cold phase. `None` if the strategy is impossible, never finishes at this failure rate,
/// or is [`Strategy::Remote`] or [`Strategy::Need`], for which the thesis has no model.
pub fn predict_printed(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
) -> Option<f64> {
    let environment = &*environment.usable_nodes(shape);
    predict_printed_allocation(
        &strategy.plan_allocation(shape, environment),
        shape,
        environment,
    )
}

/// The same when it is known how the strategy runs this shape, on nodes as its jobs see them.
pub(super) fn predict_printed_allocation(
    allocation: &Allocation,
    shape: &Shape,
    environment: &Environment,
) -> Option<f64> {
    let strategy = allocation.strategy;
    if matches!(strategy, Strategy::Remote | Strategy::Need) || !allocation.is_possible() {
        return None;
    }
    let round = |width, caches| {
        let (shape, allocation) = &allocate_part(allocation, shape, environment, width);
        let seconds = printed_round_s(allocation, shape, environment, caches);
        // §4.4.6: run time · failure rate pipelines are lost, of which the whole ones count.
        let failed = |mtbf_s| seconds / mtbf_s;
        (
            seconds,
            environment
                .mtbf_s
                .map_or(0.0, |mtbf_s| failed(mtbf_s as f64))
                .floor(),
        )
    };
    with_failures(strategy, shape.width, round)
}

/// T_total of one round by the printed equations.
fn printed_round_s(
    allocation: &Allocation,
    shape: &Shape,
    environment: &Environment,
    caches: CacheState,
) -> f64 {
    if allocation.strategy != Strategy::Minimal {
        return printed_part_s(allocation.strategy, shape, environment, caches);
    }
    let part = |width| {
        printed_part_s(
            Strategy::Slice,
            &shape.with_width(width),
            environment,
            caches,
        )
    };
    (allocation.cycles - 1) as f64 * part(allocation.part_width) + part(allocation.last_part_width)
}

fn printed_part_s(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
    caches: CacheState,
) -> f64 {
    let remote = environment.home_bytes_per_s as f64;
    let local = environment.local_bytes_per_s as f64;
    let serial = 1.0 / (1.0 / remote + 1.0 / local);
    let depth = shape.depth as f64;
    let total_batch = depth * shape.batch_read_bytes;
    let t_private =
        shape.private_io_bytes / serial + (depth - 1.0) * shape.private_io_bytes / local;
    let wait = match printed_batch_volumes(strategy, shape, environment) {
        Some(v_batch) => shape.run_s * shape.variability / v_batch,
        None => 0.0,
    };
    let t_compute = (shape.run_s + wait) * depth;
    let cold = total_batch / serial + 2.0 * t_private + t_compute;
    let warm = total_batch / local + 2.0 * t_private + t_compute;
    let phases = (shape.width as f64 / printed_concurrency(strategy, shape, environment)).ceil();
    let first = if caches == CacheState::Warm {
        warm
    } else {
        cold
    };
    first + (phases - 1.0) * warm
}

/// V_batch (4.20, 4.22); nothing for strategies without barriers.
fn printed_batch_volumes(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
) -> Option<f64> {
    let width = u128::from(shape.width);
    let private_bytes = match strategy {
        Strategy::AllPrivate => shape.retained_bytes * width,
        Strategy::Slice => {
            // As printed: not capped, neither by the width nor by the processors.
            let v_exec = count_fitting_pipelines(Strategy::Slice, shape, environment);
            shape.waiting_bytes * (width + v_exec)
        }
        _ => return None,
    };
    let free = environment.storage_bytes().saturating_sub(private_bytes);
    // Without batch volumes there is nothing to wait for.
    Some((free.checked_div(shape.batch_bytes)?).max(1) as f64)
}

/// min(V_exec, C_cpu), or V_ave (4.25) with each of its terms capped so.
fn printed_concurrency(strategy: Strategy, shape: &Shape, environment: &Environment) -> f64 {
    let cpus = environment.cpus();
    let capped = |pipelines: u64| pipelines.min(cpus) as f64;
    let v_exec = capped(match strategy {
        // Possible for all pipelines, so for some.
        Strategy::All | Strategy::AllPrivate => shape.width,
        _ => strategy.plan_allocation(shape, environment).concurrency,
    });
    if strategy != Strategy::Slice {
        return v_exec;
    }
    let n = Strategy::Minimal
        .plan_allocation(shape, environment)
        .concurrency;
    let jobs = shape.width as f64 * shape.depth as f64;
    let ends = (2.0 * n as f64).min(jobs);
    (ends * capped(n) + (jobs - ends) * v_exec) / jobs
}
