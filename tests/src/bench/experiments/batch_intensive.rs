//! Fig 3.4: a batch-intensive workload whose batch volumes grow beyond what all caches hold.
//! Scaled: 16 pipelines of 4 jobs on 4 nodes with 2 slots and 64 MB of cache in all, of 64 on 16
//! with 8 GB: two processors copy for all nodes.

use anyhow::Result;
use bafs_sim::planner::NodeClass;

use super::curve_plot::CurvePlot;
use super::job_orders::{ORDERS, ensure_all_done, run_in_each_order};
use super::simulator_accuracy::{ExperimentSite, SimulationErrors};
use super::test_bed::{TestBed, TestNodeSpec, WorkflowText};
use crate::bench::{BenchmarkReport, Options};

const NODES: u64 = 4;
const DEPTH: u32 = 4;
const PRIVATE_BYTES: u64 = 128 << 10;
const CACHE_BYTES: u64 = 64_000_000;
/// The link to home is faster here, or an hour would not do.
const LINK: &str = "16MB/s";
const LINK_BYTES_PER_S: u64 = 16_000_000;

/// Where all caches together do not hold a volume, orders differ by a fifth and more: each is run
/// once.
const ALL_CACHES_PERCENT: u64 = 100;

/// Where they do not hold two, all orders do the same: each is run twice.
const TWO_CACHES_PERCENT: u64 = 50;

/// A byte that crosses the link once more than this, of all, has been fetched again.
const REFETCH_RATIO: f64 = 1.05;

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let width = 16;
    report.print_section(&format!(
        "batch: {width} pipelines of {DEPTH} jobs on {NODES} nodes with {} MB of cache in all, \
         home at {LINK} (thesis: 64, 16 nodes, 8 GB). No order starts a job whose volumes do not \
         fit, so all three are safe",
        CACHE_BYTES / 1_000_000
    ));
    // Beside its part of the cache a node needs room for its pipelines, and for the slack.
    let node = (CACHE_BYTES / NODES + 8 * PRIVATE_BYTES) * 103 / 100;
    let site = ExperimentSite {
        nodes: NodeClass::new(NODES as u32, 2, node),
        home_bytes_per_s: LINK_BYTES_PER_S,
    };
    let mut field = TestBed::start(&vec![TestNodeSpec::new(node, 2); NODES as usize], LINK)?;
    let (x, title) = ("batch volume, % of all caches", "Batch-intensive (Fig 3.4)");
    let mut plot = CurvePlot::new("batch", title, x, "seconds");
    let y = "bytes over the link to home, over the batch data";
    let mut home = CurvePlot::new("batch-home", title, x, y);
    let points = options.choose(&[12, 25, 50, 75, 95, 110][..], &[25, 75, 95, 110]);
    let points = options.select_points(points)?;
    let rounds = options.choose(3, 1);
    let (mut over_breadth, mut over_depth): (f64, f64) = (0.0, 0.0);
    let mut errors = SimulationErrors::default();
    // Real, then simulated: whether each point so far is before the knee, and the last that was.
    let mut knees = [(true, 0.0); 2];
    for percent in points {
        let batch = CACHE_BYTES * percent / 100;
        for stage in 0..DEPTH {
            field.write_home(&format!("batch{stage}/set"), batch)?;
        }
        let text = workflow_text(width, batch)?;
        let compared = run_in_each_order(
            &mut field,
            &format!("batch-{percent}"),
            &text,
            rounds_at(percent, rounds),
            &site,
        )?;
        ensure_all_done("batch", &compared)?;
        let all = (batch * u64::from(DEPTH)) as f64;
        let x = percent as f64;
        for ((_, name), found) in ORDERS.iter().zip(&compared) {
            errors.add_run(
                found.simulator_s.median(),
                found.home_bytes,
                &found.simulated,
            );
            plot.add_point(name, x, found.seconds.median());
            home.add_point(name, x, found.home_bytes / all);
            let simulated = format!("{name}, simulated");
            plot.add_point(&simulated, x, found.simulated.seconds.median());
            home.add_point(&simulated, x, found.simulated.home_bytes.median() / all);
        }
        let [ours, breadth, depth] = &compared;
        over_breadth = over_breadth.max(ours.seconds.ratio_to(&breadth.seconds).median());
        over_depth = over_depth.max(ours.seconds.ratio_to(&depth.seconds).median());
        let fetched = [ours.home_bytes, ours.simulated.home_bytes.median()];
        for ((is_before, last), bytes) in knees.iter_mut().zip(fetched) {
            *is_before &= bytes <= REFETCH_RATIO * all;
            if *is_before {
                *last = x;
            }
        }
    }
    plot.write_files(report)?;
    home.write_files(report)?;
    report.add_figure("batch_vs_breadth_first_max", over_breadth);
    report.add_figure("batch_vs_depth_first_max", over_depth);
    report.add_figure("batch_knee", knees[0].1);
    report.add_figure("batch_simulated_knee", knees[1].1);
    errors.report_errors(report, "batch");
    Ok(())
}

/// How often an order is run with a batch volume of so many percent of all caches.
fn rounds_at(percent: u64, rounds: usize) -> usize {
    match percent {
        0..=TWO_CACHES_PERCENT => rounds,
        _ if percent <= ALL_CACHES_PERCENT => rounds.min(2),
        _ => 1,
    }
}

fn workflow_text(width: u32, batch: u64) -> Result<String> {
    // A cache need not hold all of its source.
    let size = batch.min(CACHE_BYTES);
    let mut text = WorkflowText::default();
    for stage in 0..DEPTH {
        text.add_line(&format!(
            "volume b{stage} cache bafs://home/batch{stage} {size}B warm"
        ));
    }
    for i in 0..width {
        text.add_line(&format!("volume p{i} scratch {PRIVATE_BYTES}B files 10"));
        for stage in 0..DEPTH {
            let name = format!("j{i}_{stage}");
            let mut steps = vec![format!("read:/batch/set:{batch}")];
            steps.push("compute:200".to_owned());
            steps.push("write:/scratch/out:4096:4096".to_owned());
            text.add_job(&name, &steps)?;
            if stage > 0 {
                text.add_line(&format!("parent j{i}_{} child {name}", stage - 1));
            }
            text.add_line(&format!(
                "mount b{stage} {name} /batch\nmount p{i} {name} /scratch"
            ));
        }
        text.add_line(&format!("extract p{i} out bafs://home/out/{i}"));
    }
    Ok(text.0)
}
