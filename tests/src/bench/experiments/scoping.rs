//! Fig 3.3: what crosses the link to home, by how much of the input is batch data. Scaled: 12
//! pipelines of 4 jobs with 1 MiB of I/O each, of 48 with 100 MB.

use anyhow::Result;

use super::field::{Field, Text, Wish, all_done};
use super::{HOME, Plot};
use crate::bench::{Options, Report};

const DEPTH: u32 = 4;
const IO: u64 = 1 << 20;
const RESULT: u64 = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// Caches for batch data, volumes for private ones.
    Both,
    /// Batch data come from home for each job, private ones are in volumes.
    Local,
    /// Batch data are cached, private ones are at home.
    Caching,
    /// Everything is at home.
    Remote,
}

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let width = options.pick(12, 4);
    report.section(&format!(
        "scoping: {width} pipelines of {DEPTH} jobs, 1 MiB of I/O each, home at {HOME} (thesis: \
         48, 100 MB)"
    ));
    let mut field = Field::start(&vec![Wish::new(100_000_000, 2); 4], HOME)?;
    let mut plot = Plot::new(
        "scoping",
        "I/O scoping (Fig 3.3)",
        "batch share, %",
        "bytes over the link to home, MB",
    );
    let shares = options.pick(&[0, 25, 50, 75, 100][..], &[0, 50, 100]);
    let mut worst: f64 = 0.0;
    for &share in shares {
        let batch = IO * share / 100;
        for stage in 0..DEPTH {
            field.put(&format!("batch{stage}/set"), batch.max(1))?;
        }
        let minimum = batch * u64::from(DEPTH) + RESULT * u64::from(width);
        for (mode, name, more) in [
            (Mode::Both, "both", &[][..]),
            (Mode::Local, "localization only", &[][..]),
            (Mode::Caching, "caching only", &["--cache-only"][..]),
            (Mode::Remote, "remote", &["--remote-io"][..]),
        ] {
            let took = field.run(&workflow(width, batch, mode)?, more)?;
            all_done(name, &took)?;
            plot.add(name, share as f64, took.home_bytes as f64 / 1e6);
            if mode == Mode::Both {
                worst = worst.max(took.home_bytes as f64 / minimum as f64);
            }
        }
        plot.add("minimum", share as f64, minimum as f64 / 1e6);
    }
    plot.write(report)?;
    report.figure("scoping_home_vs_minimum_max", worst);
    Ok(())
}

fn workflow(width: u32, batch: u64, mode: Mode) -> Result<String> {
    let private = (IO - batch) / 2;
    let mut text = Text::default();
    let has_batch = batch > 0;
    let size = batch + (1 << 20);
    for stage in (0..DEPTH).filter(|_| has_batch && mode != Mode::Local) {
        text.line(&format!(
            "volume b{stage} cache bafs://home/batch{stage} {size}B"
        ));
    }
    for i in 0..width {
        let volume = 2 * IO + RESULT;
        text.line(&format!("volume p{i} scratch {volume}B files 20"));
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
                steps.push(format!("write:/scratch/result:{RESULT}:{RESULT}"));
            }
            text.job(&name, &steps)?;
            if stage > 0 {
                text.line(&format!("parent j{i}_{} child {name}", stage - 1));
            }
            text.line(&format!("mount p{i} {name} /scratch"));
            if has_batch && mode == Mode::Local {
                text.line(&format!(
                    "volume b{i}_{stage} scratch {size}B files 10 from bafs://home/batch{stage}"
                ));
                text.line(&format!("mount b{i}_{stage} {name} /batch ro"));
            } else if has_batch {
                text.line(&format!("mount b{stage} {name} /batch"));
            }
        }
        text.line(&format!("extract p{i} result bafs://home/out/{i}"));
    }
    Ok(text.0)
}
