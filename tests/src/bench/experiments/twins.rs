//! Fig 3.7: twins of measured applications (thesis, chapter 2, table 2.1) by remote I/O, by caches
//! that stand alone, and by ours; home far and near. Scaled: 8 pipelines, bytes and
//! computing by 1/256, computing at most 1 s; the links as they were. Cold only.

use anyhow::Result;

use super::Plot;
use super::field::{Field, Text, Wish, all_done};
use crate::bench::{Options, Report};

/// MB per pipeline, as measured: traffic, then distinct bytes.
struct App {
    name: &'static str,
    seconds: f64,
    endpoint: f64,
    pipeline: (f64, f64),
    batch: (f64, f64),
}

const APPS: &[App] = &[
    App {
        name: "BLAST",
        seconds: 264.0,
        endpoint: 0.12,
        pipeline: (0.0, 0.0),
        batch: (330.0, 323.5),
    },
    App {
        name: "CMS",
        seconds: 15_650.0,
        endpoint: 63.2,
        pipeline: (13.0, 7.6),
        batch: (3_729.7, 49.0),
    },
    App {
        name: "HF",
        seconds: 618.0,
        endpoint: 1.9,
        pipeline: (4_654.3, 664.6),
        batch: (0.0, 0.0),
    },
    App {
        name: "IBIS",
        seconds: 88_024.0,
        endpoint: 54.0,
        pipeline: (148.3, 12.7),
        batch: (7.9, 7.0),
    },
    App {
        name: "AMANDA",
        seconds: 6_786.0,
        endpoint: 5.2,
        pipeline: (264.3, 264.3),
        batch: (508.5, 508.5),
    },
];

const SCALE: f64 = 256.0;
const COMPUTE_MS_MAX: f64 = 1_000.0;
/// Far, and as near as the nodes are to each other.
const LINKS: [(&str, &str); 2] = [("far", "1MB/s"), ("near", "12MB/s")];

fn bytes(mb: f64) -> u64 {
    (mb * 1e6 / SCALE).round() as u64
}

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let width = options.pick(8, 2);
    report.section(&format!(
        "twins: {width} pipelines of one job on 4 nodes with 2 slots, bytes and computing by \
         1/{SCALE}, at most {COMPUTE_MS_MAX} ms of computing (thesis: 64 pipelines, 16 \
         processors). Warm caches are not measured: they end with their run"
    ));
    let apps = options.pick(APPS, &APPS[..3]);
    let links = options.pick(&LINKS[..], &LINKS[..1]);
    let (mut worst, mut over): (f64, Vec<(String, f64)>) = (0.0, Vec::new());
    for (link, rate) in links {
        let (name, title) = match *link {
            "far" => ("twins-far", "Twins (Fig 3.7), home far"),
            _ => ("twins-near", "Twins (Fig 3.7), home near"),
        };
        let mut plot = Plot::new(
            name,
            title,
            "application, by its place in the table",
            "seconds",
        );
        for (at, app) in apps.iter().enumerate() {
            let mut seconds = Vec::new();
            for (mode, is_alone, more) in [
                ("ours", false, &[][..]),
                ("stand-alone caches", true, &[]),
                ("remote I/O", false, &["--remote-io"]),
            ] {
                let mut wishes = vec![Wish::new(1_000_000_000, 2); 4];
                for (node, wish) in wishes.iter_mut().enumerate().filter(|_| is_alone) {
                    wish.group = format!("alone{node}");
                }
                let mut field = Field::start(&wishes, rate)?;
                field.put("batch/set", bytes(app.batch.1).max(1))?;
                let took = field.run(&workflow(width, app)?, more)?;
                all_done(app.name, &took)?;
                plot.add(mode, at as f64, took.seconds);
                seconds.push(took.seconds);
            }
            worst = worst.max(seconds[0] / seconds[1].min(seconds[2]));
            over.push((format!("{}_{link}", app.name), seconds[2] / seconds[0]));
        }
        plot.write(report)?;
    }
    report.figure("twins_vs_best_other_max", worst);
    for (app, ratio) in over {
        report.figure(&format!("twins_{}", app.to_lowercase()), ratio);
    }
    Ok(())
}

fn workflow(width: u32, app: &App) -> Result<String> {
    let mut text = Text::default();
    let (batch, batch_unique) = (bytes(app.batch.0), bytes(app.batch.1));
    let (pipeline, unique) = (bytes(app.pipeline.0), bytes(app.pipeline.1));
    let endpoint = bytes(app.endpoint).max(1_000);
    let compute = (app.seconds * 1_000.0 / SCALE).min(COMPUTE_MS_MAX);
    if batch > 0 {
        let size = batch_unique + (1 << 20);
        text.line(&format!("volume b cache bafs://home/batch {size}B"));
    }
    let size = unique * 12 / 10 + endpoint * 12 / 10 + 400_000;
    for i in 0..width {
        text.line(&format!("volume p{i} scratch {size}B files 10"));
        let mut steps = Vec::new();
        if batch > 0 {
            let how = if batch > 2 * batch_unique {
                "random"
            } else {
                "read"
            };
            steps.push(format!("{how}:/batch/set:{batch}"));
        }
        if pipeline > 0 {
            let written = (pipeline / 2).max(unique);
            steps.push(format!("write:/scratch/data:{written}:{unique}"));
            steps.push(format!(
                "read:/scratch/data:{}",
                pipeline - written.min(pipeline)
            ));
        }
        steps.push(format!("compute:{compute:.0}"));
        steps.push(format!("write:/scratch/result:{endpoint}:{endpoint}"));
        text.job(&format!("j{i}"), &steps)?;
        text.line(&format!("mount p{i} j{i} /scratch"));
        if batch > 0 {
            text.line(&format!("mount b j{i} /batch"));
        }
        text.line(&format!("extract p{i} result bafs://home/out/{i}"));
    }
    Ok(text.0)
}
