//! The thesis' printed baselines: feasibility, concurrent pipelines, and the speed-up of the
//! fastest strategy.

use anyhow::{Context, Result, ensure};
use bafs_sim::planner::{Strategy, StrategyAllocation};
use bafs_sim::simulator::study::{
    self, StrategyComparison, StudyPoint, compare_strategies, thesis_environment,
};

use super::super::{BenchmarkReport, Options};

fn thesis_point(workload: &str) -> Result<StudyPoint> {
    let mut all = study::baseline_workloads().into_iter();
    let found = all.find(|(name, _)| *name == workload);
    let (_, canonical) = found.context("the baselines have names")?;
    let environment = thesis_environment();
    Ok(StudyPoint {
        x: 0.0,
        canonical,
        environment,
    })
}

/// The possible sets of the thesis' table, and the concurrency of the mixed baseline.
pub(super) fn check_thesis_table(_: &Options, report: &mut BenchmarkReport) -> Result<()> {
    use Strategy::{AllBatch, Minimal, Slice};
    let expected: [(&str, &[Strategy]); 3] = [
        ("batch", &[Slice, Minimal]),
        ("private", &[AllBatch, Minimal]),
        ("mixed", &[AllBatch, Slice, Minimal]),
    ];
    let mut wrong = 0;
    for (workload, possible) in expected {
        let StudyPoint {
            canonical,
            environment,
            ..
        } = thesis_point(workload)?;
        let shape = canonical.shape();
        let found = Strategy::THESIS_STRATEGIES.into_iter().filter(|strategy| {
            *strategy != Strategy::Remote
                && strategy.plan_allocation(&shape, &environment).is_possible()
        });
        wrong += u32::from(!found.eq(possible.iter().copied()));
    }
    report.add_figure("possible_sets_wrong", f64::from(wrong));
    let mixed = thesis_point("mixed")?;
    let shape = mixed.canonical.shape();
    for (strategy, figure, thesis) in [
        (AllBatch, "concurrency_all_batch", 25),
        (Slice, "concurrency_slice", 60),
        (Minimal, "concurrency_minimal", 205),
    ] {
        let allocation = strategy.plan_allocation(&shape, &mixed.environment);
        report.add_figure(figure, allocation.concurrency as f64);
        let found = allocation.concurrency;
        ensure!(
            found == thesis,
            "{strategy} runs {found} pipelines, in the thesis {thesis}"
        );
        if strategy == Minimal {
            report.add_figure_with_target(
                "minimal_last_part",
                allocation.last_part_width as f64,
                145.0..=145.0,
            );
        }
    }
    ensure!(wrong == 0, "{wrong} possible sets differ from the thesis'");
    Ok(())
}

/// Each baseline under each strategy, simulated.
pub(super) fn simulate_baselines(report: &mut BenchmarkReport) -> Result<[StrategyComparison; 3]> {
    let mut rows = vec![
        [
            "workload",
            "strategy",
            "simulated s",
            "predicted s",
            "chosen",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let mut all = Vec::new();
    for workload in ["batch", "private", "mixed"] {
        let compared = compare_strategies(&thesis_point(workload)?, 1)?;
        for timed in &compared.times {
            let is_chosen = compared.model_choice == Some(timed.strategy);
            rows.push(vec![
                workload.to_owned(),
                timed.strategy.to_string(),
                format!("{:.0}", timed.seconds()),
                format!("{:.0}", timed.predicted_s.unwrap_or(f64::NAN)),
                if is_chosen { "yes" } else { "" }.to_owned(),
            ]);
        }
        all.push(compared);
    }
    report.print_table(&rows);
    all.try_into()
        .map_err(|_| anyhow::anyhow!("there are three baselines"))
}

/// The winners' lead, in per cent of the other time: the thesis has 20, 15 and 25, give or take
/// ten, and no figure for the private-intensive one.
pub(super) fn compare_baselines(_: &Options, report: &mut BenchmarkReport) -> Result<()> {
    use Strategy::{AllBatch, Minimal, Slice};
    let [batch, private, mixed] = simulate_baselines(report)?;
    let saved = |compared: &StrategyComparison, faster: Strategy, slower: Strategy| {
        let seconds = |strategy| {
            let timed = compared
                .times
                .iter()
                .find(|timed| timed.strategy == strategy);
            timed.map_or(f64::NAN, |timed| timed.seconds())
        };
        100.0 * (1.0 - seconds(faster) / seconds(slower))
    };
    for (figure, value, aim) in [
        (
            "batch_minimal_saves_slice_percent",
            saved(&batch, Minimal, Slice),
            10.0..=30.0,
        ),
        (
            "private_all_batch_saves_minimal_percent",
            saved(&private, AllBatch, Minimal),
            0.0..=100.0,
        ),
        (
            "mixed_slice_saves_all_batch_percent",
            saved(&mixed, Slice, AllBatch),
            5.0..=25.0,
        ),
        (
            "mixed_slice_saves_minimal_percent",
            saved(&mixed, Slice, Minimal),
            15.0..=35.0,
        ),
    ] {
        report.add_figure_with_target(figure, value, aim);
    }
    Ok(())
}
