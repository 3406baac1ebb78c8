//! Fig 3.5: a pipe-intensive workload and little storage. Scaled: 12 pipelines of 4 jobs and 16 MB
//! of storage, of 32 and 512 MB; on one node with 8 slots, as the scheduler places no scratch
//! volume on a node that only stores.

use anyhow::Result;
use bafs_sim::planner::NodeClass;

use super::curve_plot::CurvePlot;
use super::job_orders::{ORDERS, run_in_each_order};
use super::simulator_accuracy::{ExperimentSite, SimulationErrors};
use super::test_bed::{HOME_BYTES_PER_S, HOME_RATE, TestBed, TestNodeSpec, WorkflowText};
use crate::bench::{BenchmarkReport, Options};

const DEPTH: u32 = 4;
const STORAGE_BYTES: u64 = 16_000_000;

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let width = options.choose(12, 4);
    report.print_section(&format!(
        "pipe: {width} pipelines of {DEPTH} jobs on one node with 8 slots and {} MB (thesis: 32, \
         16 nodes that compute and one with 512 MB that stores: the scheduler places no scratch \
         volume on a node that only stores)",
        STORAGE_BYTES / 1_000_000
    ));
    // Offered space besides the scheduler's slack.
    let offered = STORAGE_BYTES * 1_000 / 979;
    let mut field = TestBed::start(&[TestNodeSpec::new(offered, 8)], HOME_RATE)?;
    let site = ExperimentSite {
        nodes: NodeClass::new(1, 8, offered),
        home_bytes_per_s: HOME_BYTES_PER_S,
    };
    let mut errors = SimulationErrors::default();
    let (x, title) = (
        "private volume, % of the storage",
        "Pipe-intensive (Fig 3.5)",
    );
    let mut plot = CurvePlot::new("pipe", title, x, "seconds");
    let mut busy = CurvePlot::new(
        "pipe-busy",
        "Pipe-intensive (Fig 3.5), busy",
        x,
        "jobs at once",
    );
    // Beyond a half there is one volume at a time.
    let points = options.choose(&[10, 24, 30, 40, 100][..], &[30, 100]);
    let rounds = options.choose(3, 1);
    let (mut failed, mut worst): (u64, f64) = (0, 0.0);
    for &percent in points {
        let text = workflow_text(width, STORAGE_BYTES * percent / 100)?;
        let compared =
            run_in_each_order(&mut field, &format!("pipe-{percent}"), &text, rounds, &site)?;
        let x = percent as f64;
        for ((_, name), found) in ORDERS.iter().zip(&compared) {
            errors.add_run(
                found.simulator_s.median(),
                found.home_bytes,
                &found.simulated,
            );
            plot.add_point(name, x, found.seconds.median());
            let simulated = found.simulated.seconds.median();
            plot.add_point(&format!("{name}, simulated"), x, simulated);
            busy.add_point(name, x, found.jobs_at_once);
        }
        let [ours, others @ ..] = &compared;
        failed += ours.jobs_failed;
        // An incomplete run has no time.
        for other in others.iter().filter(|other| other.jobs_failed == 0) {
            worst = worst.max(ours.seconds.ratio_to(&other.seconds).median());
        }
    }
    plot.write_files(report)?;
    busy.write_files(report)?;
    report.add_figure("pipe_failed_jobs", failed as f64);
    report.add_figure("pipe_vs_best_other_max", worst);
    errors.report_errors(report, "pipe");
    Ok(())
}

fn workflow_text(width: u32, volume: u64) -> Result<String> {
    let mut text = WorkflowText::default();
    // A file system needs some room of its own.
    let data = volume * 8 / 10;
    for i in 0..width {
        text.add_line(&format!("volume p{i} scratch {volume}B files 10"));
        for stage in 0..DEPTH {
            let name = format!("j{i}_{stage}");
            let mut steps = Vec::new();
            if stage > 0 {
                steps.push(format!("read:/scratch/data:{data}"));
            }
            steps.push("compute:400".to_owned());
            steps.push(format!("write:/scratch/data:{data}:{data}"));
            if stage == DEPTH - 1 {
                steps.push("write:/scratch/result:1000:1000".to_owned());
            }
            text.add_job(&name, &steps)?;
            if stage > 0 {
                text.add_line(&format!("parent j{i}_{} child {name}", stage - 1));
            }
            text.add_line(&format!("mount p{i} {name} /scratch"));
        }
        text.add_line(&format!("extract p{i} result bafs://home/out/{i}"));
    }
    Ok(text.0)
}
