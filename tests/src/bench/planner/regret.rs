//! How much longer the predicted strategy takes than the best one, over the thesis' sensitivity
//! studies and over random workloads: by the model alone, with simulated candidates where the model
//! cannot tell them apart, and in a run that plans by itself (`run --plan`). Of the random ones
//! those from [`UNSEEN_SEED_MIN`] on were not looked at while the model was made.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use bafs_sim::planner::Strategy;
use bafs_sim::simulator::study::{
    StrategyComparison, StrategyTime, StudyPoint, StudyVariable, baseline_workloads,
    compare_strategies, random_point,
};

use super::super::machine::count_processors;
use super::super::measure::Stopwatch;
use super::super::{BenchmarkReport, Options};

/// Strategies closer than this are equally good: seeds vary more.
const TIE_RATIO: f64 = 1.01;

/// The first seed of random points by which nothing was corrected.
const UNSEEN_SEED_MIN: u64 = 1_000_000;

/// Points that take longer are listed, because the whole study is slow.
const SLOW_POINT: Duration = Duration::from_secs(20);

/// Target of the choice: mean, 99th percentile and maximum.
const TARGETS: [(&str, f64); 3] = [("mean", 1.005), ("p99", 1.03), ("max", 1.05)];

struct ComparisonTask {
    label: String,
    point: StudyPoint,
    seeds: u64,
}

/// The nine studies with three workloads each.
pub(super) fn run_studies(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let (steps, seeds) = options.choose((20, 30), (6, 3));
    let mut tasks = Vec::new();
    for varied in StudyVariable::ALL {
        for (workload, base) in baseline_workloads() {
            for step in 0..steps {
                tasks.push(ComparisonTask {
                    label: format!("{}/{workload}", varied.name()),
                    point: varied.point(&base, step, steps),
                    seeds: if varied == StudyVariable::Failures {
                        seeds
                    } else {
                        1
                    },
                });
            }
        }
    }
    let found = compare_all(&tasks)?;
    report_regret(report, "regret", &found)?;
    let (mut crossovers, mut predicted) = (0, 0);
    for row in found.chunks(steps as usize) {
        let (all, seen) = count_crossovers(row, report);
        crossovers += all;
        predicted += seen;
    }
    report.add_figure("crossovers", f64::from(crossovers));
    let all = f64::from(crossovers);
    report.add_figure_with_target("crossovers_predicted", f64::from(predicted), all..=all);
    Ok(())
}

/// Workloads and machines drawn at random.
pub(super) fn run_validation(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let seeds = UNSEEN_SEED_MIN..UNSEEN_SEED_MIN + options.choose(400, 60);
    let tasks: Vec<ComparisonTask> = seeds
        .map(|seed| ComparisonTask {
            label: "random".to_owned(),
            point: random_point(seed),
            seeds: 1,
        })
        .collect();
    report_regret(report, "validation_regret", &compare_all(&tasks)?)
}

/// Compares all points, as many at once as there are processors. Tells each study when it is done,
/// as all of them take long.
fn compare_all(tasks: &[ComparisonTask]) -> Result<Vec<(&ComparisonTask, StrategyComparison)>> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..count_processors() {
            scope.spawn(|| {
                while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compared = compare_one(task);
                    if let Ok(mut found) = found.lock() {
                        found.push(compared);
                        print_finished_study(task, tasks, &found);
                    }
                }
            });
        }
    });
    let found = found
        .into_inner()
        .map_err(|_| anyhow!("a comparison panicked"))?;
    let mut found = found.into_iter().collect::<Result<Vec<_>>>()?;
    // Tasks lie in one slice: their addresses are their order.
    found.sort_by_key(|(task, _)| std::ptr::from_ref(*task) as usize);
    ensure!(found.len() == tasks.len(), "a comparison panicked");
    Ok(found)
}

fn compare_one(task: &ComparisonTask) -> Result<(&ComparisonTask, StrategyComparison)> {
    let watch = Stopwatch::start();
    let compared = compare_strategies(&task.point, task.seeds);
    let took = watch.elapsed();
    if took > SLOW_POINT {
        let seconds = took.as_secs();
        println!("  {} at {}: {seconds} s", task.label, task.point.x);
    }
    let compared =
        compared.map_err(|stuck| anyhow!("{} at {}: {stuck}", task.label, task.point.x))?;
    Ok((task, compared))
}

/// Tells of a study of which all points have been compared.
fn print_finished_study(
    task: &ComparisonTask,
    tasks: &[ComparisonTask],
    found: &[Result<(&ComparisonTask, StrategyComparison)>],
) {
    let of_study = |other: &ComparisonTask| other.label == task.label;
    let done = found.iter().flatten().filter(|(other, _)| of_study(other));
    let regrets: Vec<f64> = done
        .clone()
        .filter_map(|(_, compared)| compared.simulated_regret())
        .collect();
    if done.count() < tasks.iter().filter(|other| of_study(other)).count() {
        return;
    }
    let mean = regrets.iter().sum::<f64>() / regrets.len().max(1) as f64;
    let most = regrets.iter().copied().fold(1.0, f64::max);
    println!("  {}: mean {mean:.4}, most {most:.4}", task.label);
}

/// A point with more than one strategy.
struct RegretRow<'f> {
    task: &'f ComparisonTask,
    compared: &'f StrategyComparison,
    model_regret: f64,
    simulated_regret: f64,
    adaptive_regret: f64,
}

impl RegretRow<'_> {
    /// Of the slowest strategy that ends.
    fn worst_regret(&self) -> f64 {
        let seconds = |timed: Option<StrategyTime>| timed.map_or(1.0, |timed| timed.seconds());
        seconds(self.compared.worst()) / seconds(self.compared.best())
    }
}

fn report_regret(
    report: &mut BenchmarkReport,
    figure: &str,
    found: &[(&ComparisonTask, StrategyComparison)],
) -> Result<()> {
    let with_several = found
        .iter()
        .filter(|(_, compared)| compared.times.len() > 1);
    // Where no strategy ever ends, no choice is better than another.
    let rows = with_several.filter_map(|(task, compared)| {
        Some(RegretRow {
            task,
            compared,
            model_regret: compared.regret()?,
            simulated_regret: compared.simulated_regret()?,
            adaptive_regret: compared.adaptive_regret()?,
        })
    });
    let rows: Vec<RegretRow<'_>> = rows.collect();
    ensure!(!rows.is_empty(), "no point has two strategies");
    report.add_figure(&format!("{figure}_points"), rows.len() as f64);
    let is_endless =
        |compared: &StrategyComparison| !compared.times.is_empty() && compared.best().is_none();
    let endless = found.iter().filter(|(_, compared)| is_endless(compared));
    report.add_figure(&format!("{figure}_points_endless"), endless.count() as f64);
    let model = rows
        .iter()
        .map(|row| (row.model_regret, row.compared.model_choice));
    let (told, aimed) = (false, true);
    let name = format!("{figure}_model");
    report_summary(report, &name, &rows, model.collect(), told);
    let decided = rows
        .iter()
        .map(|row| (row.simulated_regret, row.compared.simulated_choice));
    report_summary(report, figure, &rows, decided.collect(), aimed);
    let guided = rows
        .iter()
        .map(|row| (row.adaptive_regret, row.compared.simulated_choice));
    let name = format!("{figure}_guided");
    report_summary(report, &name, &rows, guided.collect(), aimed);
    report.print_table(&regret_table(&rows));
    Ok(())
}

/// A line for each study: its means, and its point with most regret.
fn regret_table(rows: &[RegretRow<'_>]) -> Vec<Vec<String>> {
    let mut table = vec![
        [
            "study",
            "model mean",
            "max",
            "guided mean",
            "max",
            "mean",
            "max",
            "at",
            "chosen",
            "best",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for group in rows.chunk_by(|a, b| a.task.label == b.task.label) {
        let mean =
            |of: fn(&RegretRow<'_>) -> f64| group.iter().map(of).sum::<f64>() / group.len() as f64;
        let most = |of: fn(&RegretRow<'_>) -> f64| group.iter().map(of).fold(1.0, f64::max);
        let by_regret = group
            .iter()
            .max_by(|a, b| a.simulated_regret.total_cmp(&b.simulated_regret));
        if let Some(worst) = by_regret {
            let name = |strategy: Option<_>| strategy.map_or(String::new(), |s| format!("{s}"));
            table.push(vec![
                worst.task.label.clone(),
                format!("{:.4}", mean(|row| row.model_regret)),
                format!("{:.4}", most(|row| row.model_regret)),
                format!("{:.4}", mean(|row| row.adaptive_regret)),
                format!("{:.4}", most(|row| row.adaptive_regret)),
                format!("{:.4}", mean(|row| row.simulated_regret)),
                format!("{:.4}", worst.simulated_regret),
                format!("{:.4}", worst.task.point.x),
                name(worst.compared.simulated_choice),
                name(worst.compared.best().map(|best| best.strategy)),
            ]);
        }
    }
    table
}

/// Mean, tail and worst choices of one way to choose, and whether they are as they are meant to be.
fn report_summary(
    report: &mut BenchmarkReport,
    figure: &str,
    rows: &[RegretRow<'_>],
    choices: Vec<(f64, Option<Strategy>)>,
    is_aimed: bool,
) {
    let mut tell = |name: &str, found: f64, most: f64| {
        let key = format!("{figure}_{name}");
        match is_aimed {
            true => report.add_figure_with_target(&key, found, 0.0..=most),
            false => report.add_figure(&key, found),
        }
    };
    // No choice, or one that never ends, although another does: as bad as the worst that ends.
    let is_never = |regret: &f64| regret.is_infinite();
    let never = choices.iter().filter(|choice| is_never(&choice.0)).count();
    tell("never_done", never as f64, 0.0);
    let regrets = rows
        .iter()
        .zip(&choices)
        .map(|(row, (regret, _))| match is_never(regret) {
            true => row.worst_regret(),
            false => *regret,
        });
    let mut regrets: Vec<f64> = regrets.collect();
    regrets.sort_by(f64::total_cmp);
    let count = regrets.len();
    let mean = regrets.iter().sum::<f64>() / count as f64;
    let p99 = regrets[(count * 99 / 100).min(count - 1)];
    for ((name, aim), found) in TARGETS.into_iter().zip([mean, p99, regrets[count - 1]]) {
        tell(name, found, aim);
    }
    let is_worst = |(row, (regret, chosen)): &(&RegretRow<'_>, &(f64, Option<Strategy>))| {
        let worst = row.compared.worst().map(|worst| worst.strategy);
        is_never(regret) || *regret > TIE_RATIO && worst == *chosen
    };
    let worst = rows.iter().zip(&choices).filter(is_worst).count();
    tell("worst_choices", worst as f64, 0.0);
}

/// Changes of the best strategy along a study, and those that the choice makes too, at most one
/// point away. Changes between equally good strategies do not count. Says which the choice does not
/// make.
fn count_crossovers(
    row: &[(&ComparisonTask, StrategyComparison)],
    report: &mut BenchmarkReport,
) -> (u32, u32) {
    let best = |at: usize| row[at].1.best().map(|best| best.strategy);
    let chosen = |at: usize| row[at].1.simulated_choice;
    let is_clear = |at: usize, over: Option<_>| {
        let best = row[at].1.best();
        let other = row[at]
            .1
            .times
            .iter()
            .find(|timed| Some(timed.strategy) == over);
        match (best, other) {
            (Some(best), Some(other)) => other.seconds() > TIE_RATIO * best.seconds(),
            _ => true,
        }
    };
    let (mut all, mut predicted) = (0, 0);
    for at in 0..row.len().saturating_sub(1) {
        let (from, to) = (best(at), best(at + 1));
        if from == to || !is_clear(at, to) || !is_clear(at + 1, from) {
            continue;
        }
        all += 1;
        let near = at.saturating_sub(1)..(at + 2).min(row.len() - 1);
        let is_seen = near
            .into_iter()
            .any(|i| chosen(i) == from && chosen(i + 1) == to);
        predicted += u32::from(is_seen);
        if !is_seen {
            let name = |strategy: Option<Strategy>| {
                strategy.map_or_else(|| "none".to_owned(), |s| s.to_string())
            };
            let (label, x) = (&row[at].0.label, row[at].0.point.x);
            report.print_line(&format!(
                "  {label} after {x}: {} to {}, chosen {}, {}",
                name(from),
                name(to),
                name(chosen(at)),
                name(chosen(at + 1))
            ));
        }
    }
    (all, predicted)
}
