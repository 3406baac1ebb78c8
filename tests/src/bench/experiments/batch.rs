//! Fig 3.4: a batch-intensive workload whose batch volumes grow beyond what all caches hold.
//! Scaled: 16 pipelines of 4 jobs on 4 nodes with 2 slots and 64 MB of cache in all, of 64 on 16
//! with 8 GB: two processors copy for all nodes.

use anyhow::Result;

use bafs_sched::planner::NodeClass;

use super::Plot;
use super::field::{Field, Text, Wish};
use super::orders::{ORDERS, all_done, in_each_order};
use super::reality::{Errors, Site};
use crate::bench::{Options, Report};

const NODES: u64 = 4;
const DEPTH: u32 = 4;
const PRIVATE: u64 = 128 << 10;
const CACHE: u64 = 64_000_000;
/// The link to home is faster here, or an hour would not do.
const LINK: &str = "16MB/s";
const LINK_BYTES_PER_S: u64 = 16_000_000;

/// Where all caches together do not hold a volume, orders differ by a fifth and more: each is run
/// once.
const ALL_CACHES: u64 = 100;

/// Where they do not hold two, all orders do the same: each is run twice.
const TWO_CACHES: u64 = 50;

/// A byte that crosses the link once more than this, of all, has been fetched again.
const ONCE: f64 = 1.05;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let width = 16;
    report.section(&format!(
        "batch: {width} pipelines of {DEPTH} jobs on {NODES} nodes with {} MB of cache in all, \
         home at {LINK} (thesis: 64, 16 nodes, 8 GB). No order starts a job whose volumes do not \
         fit, so all three are safe",
        CACHE / 1_000_000
    ));
    // Beside its part of the cache a node needs room for its pipelines, and for the slack.
    let node = (CACHE / NODES + 8 * PRIVATE) * 103 / 100;
    let site = Site {
        nodes: NodeClass::new(NODES as u32, 2, node),
        home_bytes_per_s: LINK_BYTES_PER_S,
    };
    let mut field = Field::start(&vec![Wish::new(node, 2); NODES as usize], LINK)?;
    let (x, title) = ("batch volume, % of all caches", "Batch-intensive (Fig 3.4)");
    let mut plot = Plot::new("batch", title, x, "seconds");
    let y = "bytes over the link to home, over the batch data";
    let mut home = Plot::new("batch-home", title, x, y);
    let points = options.pick(&[12, 25, 50, 75, 95, 110][..], &[25, 75, 95, 110]);
    let points = options.points(points)?;
    let rounds = options.pick(3, 1);
    let (mut over_breadth, mut over_depth): (f64, f64) = (0.0, 0.0);
    let mut errors = Errors::default();
    // Real, then simulated: whether each point so far is before the knee, and the last that was.
    let mut knees = [(true, 0.0); 2];
    for percent in points {
        let batch = CACHE * percent / 100;
        for stage in 0..DEPTH {
            field.put(&format!("batch{stage}/set"), batch)?;
        }
        let text = workflow(width, batch)?;
        let compared = in_each_order(
            &mut field,
            &format!("batch-{percent}"),
            &text,
            match percent {
                0..=TWO_CACHES => rounds,
                _ if percent <= ALL_CACHES => rounds.min(2),
                _ => 1,
            },
            &site,
        )?;
        all_done("batch", &compared)?;
        let all = (batch * u64::from(DEPTH)) as f64;
        let x = percent as f64;
        for ((_, name), found) in ORDERS.iter().zip(&compared) {
            errors.note(found.took_s.median(), found.home_bytes, &found.simulated);
            plot.add(name, x, found.seconds.median());
            home.add(name, x, found.home_bytes / all);
            let simulated = format!("{name}, simulated");
            plot.add(&simulated, x, found.simulated.seconds.median());
            home.add(&simulated, x, found.simulated.home_bytes.median() / all);
        }
        let [ours, breadth, depth] = &compared;
        over_breadth = over_breadth.max(ours.seconds.ratio_to(&breadth.seconds).median());
        over_depth = over_depth.max(ours.seconds.ratio_to(&depth.seconds).median());
        let fetched = [ours.home_bytes, ours.simulated.home_bytes.median()];
        for ((is_before, last), bytes) in knees.iter_mut().zip(fetched) {
            *is_before &= bytes <= ONCE * all;
            if *is_before {
                *last = x;
            }
        }
    }
    plot.write(report)?;
    home.write(report)?;
    report.figure("batch_vs_breadth_first_max", over_breadth);
    report.figure("batch_vs_depth_first_max", over_depth);
    report.figure("batch_knee", knees[0].1);
    report.figure("batch_simulated_knee", knees[1].1);
    errors.tell(report, "batch");
    Ok(())
}

fn workflow(width: u32, batch: u64) -> Result<String> {
    // A cache need not hold all of its source.
    let size = batch.min(CACHE);
    let mut text = Text::default();
    for stage in 0..DEPTH {
        text.line(&format!(
            "volume b{stage} cache bafs://home/batch{stage} {size}B warm"
        ));
    }
    for i in 0..width {
        text.line(&format!("volume p{i} scratch {PRIVATE}B files 10"));
        for stage in 0..DEPTH {
            let name = format!("j{i}_{stage}");
            let mut steps = vec![format!("read:/batch/set:{batch}")];
            steps.push("compute:200".to_owned());
            steps.push("write:/scratch/out:4096:4096".to_owned());
            text.job(&name, &steps)?;
            if stage > 0 {
                text.line(&format!("parent j{i}_{} child {name}", stage - 1));
            }
            text.line(&format!(
                "mount b{stage} {name} /batch\nmount p{i} {name} /scratch"
            ));
        }
        text.line(&format!("extract p{i} out bafs://home/out/{i}"));
    }
    Ok(text.0)
}
