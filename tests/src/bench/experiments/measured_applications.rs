//! Fig 3.7: twins of measured applications, level by level (thesis, tables 2.1, 2.2 and 2.4), by
//! remote I/O, by independent caches, and by ours; cold and warm, home far and near.
//!
//! Scaled: bytes and computing by 1/128, so that both keep their proportion to the links, which are
//! as they were; of an application that computes for minutes then, computing is cut. Pipelines and
//! processors have their original numbers, because the cost of remote I/O grows with the pipelines.

use std::path::Path;

use anyhow::{Context, Result};
use bafs_sched::io::journal;
use bafs_sched::timeline::build_timeline;
use bafs_sim::strategy_selector::ModelSelector;

use super::curve_plot::CurvePlot;
use super::simulator_accuracy::duration_s;
use super::test_bed::{TestBed, TestNodeSpec, WorkflowText, ensure_all_done};
use crate::bench::measure::format_number;
use crate::bench::{BenchmarkReport, Options};

/// MB of traffic, and MB of distinct bytes among them.
type TrafficMb = (f64, f64);

/// A stage of an application, for one pipeline.
struct ApplicationStage {
    seconds: f64,
    /// From the output of the previous level.
    reads: TrafficMb,
    /// For the next stage; one without a next one rewrites and reads its own.
    writes: TrafficMb,
    /// From its own output.
    self_reads_mb: f64,
    batch: TrafficMb,
    /// For the user. The thesis counts accesses to such data as reads; here they are writes, which
    /// cross the same link.
    result: TrafficMb,
}

const EMPTY_STAGE: ApplicationStage = ApplicationStage {
    seconds: 0.0,
    reads: (0.0, 0.0),
    writes: (0.0, 0.0),
    self_reads_mb: 0.0,
    batch: (0.0, 0.0),
    result: (0.0, 0.0),
};

const APPLICATIONS: &[(&str, &[ApplicationStage])] = &[
    ("BLAST", &[BLASTP]),
    ("HF", &[HF_SETUP, HF_ARGOS, HF_SCF]),
    ("CMS", &[CMKIN, CMSIM]),
    ("IBIS", &[IBIS]),
    ("AMANDA", &[CORSIKA, CORAMA, MMC, AMASIM2]),
];

const BLASTP: ApplicationStage = ApplicationStage {
    seconds: 264.2,
    batch: (329.99, 323.46),
    result: (0.12, 0.12),
    ..EMPTY_STAGE
};
const HF_SETUP: ApplicationStage = ApplicationStage {
    seconds: 0.2,
    writes: (3.69, 0.26),
    self_reads_mb: 5.3,
    ..EMPTY_STAGE
};
const HF_ARGOS: ApplicationStage = ApplicationStage {
    seconds: 597.6,
    reads: (0.02, 0.02),
    writes: (661.93, 661.93),
    ..EMPTY_STAGE
};
const HF_SCF: ApplicationStage = ApplicationStage {
    seconds: 19.8,
    reads: (3_979.32, 661.93),
    writes: (4.07, 2.5),
    result: (1.96, 1.94),
    ..EMPTY_STAGE
};
const CMKIN: ApplicationStage = ApplicationStage {
    seconds: 55.4,
    writes: (7.42, 3.81),
    ..EMPTY_STAGE
};
const CMSIM: ApplicationStage = ApplicationStage {
    seconds: 15_595.0,
    reads: (5.56, 3.81),
    batch: (3_729.67, 49.04),
    result: (63.5, 63.13),
    ..EMPTY_STAGE
};
const IBIS: ApplicationStage = ApplicationStage {
    seconds: 88_024.3,
    writes: (74.14, 12.69),
    self_reads_mb: 74.13,
    batch: (7.89, 6.98),
    result: (179.92, 53.97),
    ..EMPTY_STAGE
};
const CORSIKA: ApplicationStage = ApplicationStage {
    seconds: 2_187.5,
    writes: (23.17, 23.17),
    batch: (0.75, 0.75),
    ..EMPTY_STAGE
};
const CORAMA: ApplicationStage = ApplicationStage {
    seconds: 41.9,
    reads: (23.17, 23.17),
    writes: (26.2, 26.2),
    ..EMPTY_STAGE
};
const MMC: ApplicationStage = ApplicationStage {
    seconds: 954.8,
    reads: (26.2, 26.2),
    writes: (125.43, 125.43),
    batch: (2.73, 2.73),
    ..EMPTY_STAGE
};
const AMASIM2: ApplicationStage = ApplicationStage {
    seconds: 3_601.7,
    reads: (40.0, 40.0),
    batch: (505.04, 505.04),
    result: (5.31, 5.31),
    ..EMPTY_STAGE
};

const SCALE: f64 = 128.0;
/// The most that one pipeline computes.
const COMPUTE_MS_MAX: f64 = 2_500.0;
const PIPELINES: u32 = 64;
const NODES: usize = 4;
const SLOTS: u32 = 4;
/// Far, and as near as the nodes are to each other; in bytes per second.
const LINKS: [(&str, f64); 2] = [("far", 1e6), ("near", 12e6)];
/// Pipelines with remote I/O: as many as the link carries in so many seconds, and at least two. The
/// others would take their time at the link's rate, and only that is counted for them.
const REMOTE_IO_S: f64 = 20.0;
/// Prefix of the names of jobs that fill the caches with batch data.
const WARM_JOB_PREFIX: &str = "warm";
/// So long do warmers hold their slots, in milliseconds: until all slots have one.
const WARM_JOB_MS: u32 = 1_500;

fn scaled_bytes(mb: f64) -> u64 {
    (mb * 1e6 / SCALE).round() as u64
}

/// Bytes that a pipeline transfers.
fn pipeline_bytes(stages: &[ApplicationStage]) -> u64 {
    let of =
        |s: &ApplicationStage| s.reads.0 + s.writes.0 + s.self_reads_mb + s.batch.0 + s.result.0;
    scaled_bytes(stages.iter().map(of).sum())
}

fn has_batch(stages: &[ApplicationStage]) -> bool {
    stages.iter().any(|stage| stage.batch.0 > 0.0)
}

/// Two clusters with the same link to home: nodes that share caches, and nodes that do not.
struct ClusterPair {
    cooperative: TestBed,
    independent: TestBed,
    link_bytes_per_s: f64,
}

impl ClusterPair {
    fn start(rate: f64) -> Result<Self> {
        let link = format!("{}MB/s", rate / 1e6);
        let mut specs = vec![TestNodeSpec::new(2_000_000_000, SLOTS); NODES];
        let ours = TestBed::start(&specs, &link)?;
        for (node, spec) in specs.iter_mut().enumerate() {
            spec.group = format!("alone{node}");
        }
        let alone = TestBed::start(&specs, &link)?;
        Ok(Self {
            cooperative: ours,
            independent: alone,
            link_bytes_per_s: rate,
        })
    }

    fn write_inputs(&self, name: &str, stages: &[ApplicationStage]) -> Result<()> {
        let with_batch = stages.iter().enumerate();
        for (at, stage) in with_batch.filter(|(_, stage)| stage.batch.0 > 0.0) {
            for field in [&self.cooperative, &self.independent] {
                field.write_home(&format!("{name}{at}/set"), scaled_bytes(stage.batch.1))?;
            }
        }
        Ok(())
    }

    /// The seconds of all pipelines by remote I/O.
    fn time_remote_io(&mut self, name: &str, stages: &[ApplicationStage]) -> Result<f64> {
        let carried = REMOTE_IO_S * self.link_bytes_per_s / pipeline_bytes(stages) as f64;
        let count = (carried as u32).clamp(2, PIPELINES);
        let text = workflow_text(name, stages, count, 0)?;
        let took = self.cooperative.run_workflow(&text, &["--remote-io"])?;
        ensure_all_done(name, &took)?;
        let others = f64::from(PIPELINES - count) / f64::from(count);
        let ran = duration_s(&self.cooperative.last_journal())?;
        Ok(ran + others * took.home_bytes as f64 / self.link_bytes_per_s)
    }
}

/// The seconds of all pipelines with caches, which the data are in already or are not.
fn time_with_caches(
    field: &mut TestBed,
    name: &str,
    stages: &[ApplicationStage],
    is_warm: bool,
) -> Result<f64> {
    let warmers = if is_warm { NODES as u32 * SLOTS } else { 0 };
    let took = field.run_workflow(&workflow_text(name, stages, PIPELINES, warmers)?, &[])?;
    ensure_all_done(name, &took)?;
    match is_warm {
        true => time_after_warming(&field.last_journal()),
        false => duration_s(&field.last_journal()),
    }
}

/// From the end of the last warmer to the last file at home.
fn time_after_warming(path: &Path) -> Result<f64> {
    let timeline = build_timeline(journal::read_history(path)?, &ModelSelector);
    let is_warmer = |at: usize| timeline.jobs[at].name.starts_with(WARM_JOB_PREFIX);
    let executions = timeline.executions.iter();
    let warmers = executions.filter(|execution| is_warmer(execution.job.as_usize()));
    let warm = warmers.filter_map(|execution| execution.ended_ms).max();
    let home = timeline
        .extract_attempts
        .iter()
        .filter_map(|file| file.ended_ms);
    let (from, to) = warm.zip(home.max()).context("the run has no times")?;
    Ok(to.saturating_sub(from) as f64 / 1e3)
}

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.print_section(&format!(
        "twins: {PIPELINES} pipelines on {NODES} nodes with {SLOTS} slots, bytes and computing by \
         1/{SCALE}, at most {COMPUTE_MS_MAX} ms of computing for each pipeline (thesis: 64 \
         pipelines, 16 processors); remote I/O beyond {REMOTE_IO_S} s counts as the time of its \
         bytes"
    ));
    let apps = options.choose(APPLICATIONS, &APPLICATIONS[..2]);
    let links = options.choose(&LINKS[..], &LINKS[..1]);
    let mut worst: f64 = 0.0;
    for (link, rate) in links {
        let (name, title) = match *link {
            "far" => ("twins-far", "Twins (Fig 3.7), home far"),
            _ => ("twins-near", "Twins (Fig 3.7), home near"),
        };
        let x = "application, by its place in the table";
        let mut plot = CurvePlot::new(name, title, x, "seconds");
        let mut sites = ClusterPair::start(*rate)?;
        for (at, (app, stages)) in apps.iter().enumerate() {
            sites.write_inputs(app, stages)?;
            let remote = sites.time_remote_io(app, stages)?;
            plot.add_point("remote I/O", at as f64, remote);
            for (state, is_warm) in [("cold", false), ("warm", true)] {
                if is_warm && !has_batch(stages) {
                    continue;
                }
                let ours = time_with_caches(&mut sites.cooperative, app, stages, is_warm)?;
                let alone = time_with_caches(&mut sites.independent, app, stages, is_warm)?;
                plot.add_point(&format!("ours, {state}"), at as f64, ours);
                plot.add_point(&format!("stand-alone caches, {state}"), at as f64, alone);
                worst = worst.max(ours / alone.min(remote));
                let figure = format!("twins_{}_{link}", app.to_lowercase());
                let figure = if is_warm { figure + "_warm" } else { figure };
                report.print_line(&format!(
                    "  {app}, {link}, {state}: ours over the best other {}",
                    format_number(ours / alone.min(remote))
                ));
                report.add_figure(&figure, remote / ours);
            }
        }
        plot.write_files(report)?;
    }
    report.add_figure("twins_vs_best_other_max", worst);
    Ok(())
}

/// So many pipelines, after so many jobs that read all batch data.
fn workflow_text(
    name: &str,
    stages: &[ApplicationStage],
    count: u32,
    warmers: u32,
) -> Result<String> {
    let mut text = WorkflowText::default();
    for (at, stage) in stages.iter().enumerate() {
        if stage.batch.0 > 0.0 {
            // A file takes whole pieces of 4 KiB.
            let size = scaled_bytes(stage.batch.1) + (1 << 20);
            text.add_line(&format!(
                "volume b{at} cache bafs://home/{name}{at} {size}B files 10"
            ));
        }
    }
    for i in 0..warmers {
        let (job, mut steps) = (format!("{WARM_JOB_PREFIX}{i}"), Vec::new());
        for (at, stage) in stages.iter().enumerate() {
            if stage.batch.0 > 0.0 {
                steps.push(format!(
                    "read:/batch{at}/set:{}",
                    scaled_bytes(stage.batch.1)
                ));
            }
        }
        steps.push(format!("compute:{WARM_JOB_MS}"));
        text.add_job(&job, &steps)?;
        for (at, _) in stages.iter().enumerate().filter(|(_, s)| s.batch.0 > 0.0) {
            text.add_line(&format!("mount b{at} {job} /batch{at}"));
        }
    }
    let kept: f64 = stages.iter().map(|s| s.writes.1 + s.result.1).sum();
    let size = scaled_bytes(kept) * 11 / 10 + 400_000;
    for i in 0..count {
        text.add_line(&format!("volume p{i} scratch {size}B files 20"));
        for (at, stage) in stages.iter().enumerate() {
            let job = format!("j{i}_{at}");
            text.add_job(&job, &job_steps(stages, at))?;
            text.add_line(&format!("mount p{i} {job} /scratch"));
            if stage.batch.0 > 0.0 {
                text.add_line(&format!("mount b{at} {job} /batch{at}"));
            }
            if at > 0 {
                text.add_line(&format!("parent j{i}_{} child {job}", at - 1));
            }
        }
        text.add_line(&format!("extract p{i} result bafs://home/out/{name}{i}"));
    }
    if warmers > 0 {
        let warm: Vec<String> = (0..warmers)
            .map(|i| format!("{WARM_JOB_PREFIX}{i}"))
            .collect();
        let first: Vec<String> = (0..count).map(|i| format!("j{i}_0")).collect();
        text.add_line(&format!(
            "parent {} child {}",
            warm.join(" "),
            first.join(" ")
        ));
    }
    Ok(text.0)
}

/// The program of a level's job.
fn job_steps(stages: &[ApplicationStage], at: usize) -> Vec<String> {
    let stage = &stages[at];
    let mut steps = Vec::new();
    if stage.reads.0 > 0.0 {
        let read = scaled_bytes(stage.reads.0);
        steps.push(format!("read:/scratch/data{}:{read}", at - 1));
    }
    if stage.batch.0 > 0.0 {
        // A reader that rereads the same data searches it.
        let is_random = stage.batch.0 > 2.0 * stage.batch.1;
        let how = if is_random { "random" } else { "read" };
        steps.push(format!(
            "{how}:/batch{at}/set:{}",
            scaled_bytes(stage.batch.0)
        ));
    }
    let all: f64 = stages.iter().map(|stage| stage.seconds).sum();
    let all_ms = (all * 1e3 / SCALE).min(COMPUTE_MS_MAX);
    steps.push(format!("compute:{:.0}", all_ms * stage.seconds / all));
    if stage.writes.0 > 0.0 {
        let (written, kept) = (scaled_bytes(stage.writes.0), scaled_bytes(stage.writes.1));
        steps.push(format!("write:/scratch/data{at}:{written}:{kept}"));
    }
    if stage.self_reads_mb > 0.0 {
        let read = scaled_bytes(stage.self_reads_mb);
        steps.push(format!("read:/scratch/data{at}:{read}"));
    }
    if stage.result.0 > 0.0 {
        let (written, kept) = (scaled_bytes(stage.result.0), scaled_bytes(stage.result.1));
        steps.push(format!("write:/scratch/result:{written}:{kept}"));
    }
    steps
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn twin_workflows_move_the_measured_bytes() {
        // The thesis, table 2.1: MB of traffic of one pipeline.
        let measured = [330.1, 4_656.3, 3_806.2, 336.1, 778.0];
        for ((name, stages), measured) in APPLICATIONS.iter().zip(measured) {
            let moved = pipeline_bytes(stages) as f64 * SCALE / 1e6;
            assert!((moved / measured - 1.0).abs() < 0.01, "{name}: {moved} MB");
            let text = workflow_text(name, stages, 3, 2).expect("a text");
            let none = |path: &str| Err(path.to_owned());
            let parsed = parse_workflow("twin.bafs", &text, &none);
            let workflow = parsed.expect("it is right").workflow;
            assert_eq!(workflow.jobs.len(), 3 * stages.len() + 2, "{name}");
            assert_eq!(workflow.extracts.len(), 3, "{name}");
        }
    }
}
