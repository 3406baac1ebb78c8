//! Fig 3.3: bytes over the link to home, by the share of batch data in the input. Scaled: 12
//! pipelines of 4 jobs with 1 MiB of I/O each, of 48 with 100 MB.

use anyhow::Result;

use super::curve_plot::CurvePlot;
use super::test_bed::{HOME_RATE, TestBed, TestNodeSpec, WorkflowText, ensure_all_done};
use crate::bench::{BenchmarkReport, Options};

const DEPTH: u32 = 4;
const IO_BYTES: u64 = 1 << 20;
const RESULT_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq)]
enum ScopingMode {
    /// Caches for batch data, volumes for private ones.
    CachesAndVolumes,
    /// Batch data come from home for each job, private ones are in volumes.
    VolumesOnly,
    /// Batch data are cached, private ones are at home.
    CachesOnly,
    /// Everything is at home.
    Remote,
}

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let width = options.choose(12, 4);
    report.print_section(&format!(
        "scoping: {width} pipelines of {DEPTH} jobs, 1 MiB of I/O each, home at {HOME_RATE} \
         (thesis: 48, 100 MB)"
    ));
    let mut field = TestBed::start(&vec![TestNodeSpec::new(100_000_000, 2); 4], HOME_RATE)?;
    let mut plot = CurvePlot::new(
        "scoping",
        "I/O scoping (Fig 3.3)",
        "batch share, %",
        "bytes over the link to home, MB",
    );
    let shares = options.choose(&[0, 25, 50, 75, 100][..], &[0, 50, 100]);
    let mut worst: f64 = 0.0;
    for &share in shares {
        let batch = IO_BYTES * share / 100;
        for stage in 0..DEPTH {
            field.write_home(&format!("batch{stage}/set"), batch.max(1))?;
        }
        let minimum = batch * u64::from(DEPTH) + RESULT_BYTES * u64::from(width);
        for (mode, name, more) in [
            (ScopingMode::CachesAndVolumes, "both", &[][..]),
            (ScopingMode::VolumesOnly, "localization only", &[][..]),
            (
                ScopingMode::CachesOnly,
                "caching only",
                &["--cache-only"][..],
            ),
            (ScopingMode::Remote, "remote", &["--remote-io"][..]),
        ] {
            let took = field.run_workflow(&workflow_text(width, batch, mode)?, more)?;
            ensure_all_done(name, &took)?;
            plot.add_point(name, share as f64, took.home_bytes as f64 / 1e6);
            if mode == ScopingMode::CachesAndVolumes {
                worst = worst.max(took.home_bytes as f64 / minimum as f64);
            }
        }
        plot.add_point("minimum", share as f64, minimum as f64 / 1e6);
    }
    plot.write_files(report)?;
    report.add_figure("scoping_home_vs_minimum_max", worst);
    Ok(())
}

fn workflow_text(width: u32, batch: u64, mode: ScopingMode) -> Result<String> {
    let private = (IO_BYTES - batch) / 2;
    let mut text = WorkflowText::default();
    let has_batch = batch > 0;
    let size = batch + (1 << 20);
    for stage in (0..DEPTH).filter(|_| has_batch && mode != ScopingMode::VolumesOnly) {
        text.add_line(&format!(
            "volume b{stage} cache bafs://home/batch{stage} {size}B"
        ));
    }
    for i in 0..width {
        let volume = 2 * IO_BYTES + RESULT_BYTES;
        text.add_line(&format!("volume p{i} scratch {volume}B files 20"));
        for stage in 0..DEPTH {
            let name = format!("j{i}_{stage}");
            let mut steps = Vec::new();
            if has_batch {
                steps.push(format!("read:/batch/set:{batch}"));
            }
            if stage > 0 && private > 0 {
                steps.push(format!("read:/scratch/{}:{private}", (stage - 1) % 2));
            }
            steps.push("compute:100".to_owned());
            if private > 0 {
                steps.push(format!("write:/scratch/{}:{private}:{private}", stage % 2));
            }
            if stage == DEPTH - 1 {
                steps.push(format!(
                    "write:/scratch/result:{RESULT_BYTES}:{RESULT_BYTES}"
                ));
            }
            text.add_job(&name, &steps)?;
            if stage > 0 {
                text.add_line(&format!("parent j{i}_{} child {name}", stage - 1));
            }
            text.add_line(&format!("mount p{i} {name} /scratch"));
            if has_batch && mode == ScopingMode::VolumesOnly {
                text.add_line(&format!(
                    "volume b{i}_{stage} scratch {size}B files 10 from bafs://home/batch{stage}"
                ));
                text.add_line(&format!("mount b{i}_{stage} {name} /batch ro"));
            } else if has_batch {
                text.add_line(&format!("mount b{stage} {name} /batch"));
            }
        }
        text.add_line(&format!("extract p{i} result bafs://home/out/{i}"));
    }
    Ok(text.0)
}
