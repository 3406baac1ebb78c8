//! Fig 3.4: a batch-intensive workload whose batch volumes grow beyond what all caches hold.
//! Scaled: 16 pipelines of 4 jobs on 4 nodes with 2 slots and 128 MB of cache in all, of 64 on 16
//! with 8 GB. Smaller would not do: a node that has 4 MiB of a cache keeps no room beside them.

use anyhow::Result;

use bafs_sched::logic::{CheckpointPolicy, Order};
use bafs_sched::planner::NodeClass;

use super::field::{Field, Text, Wish, all_done};
use super::reality::{Errors, Model, took_s};
use super::{ORDERS, Plot};
use crate::bench::{Options, Report};

const NODES: u64 = 4;
const DEPTH: u32 = 4;
const PRIVATE: u64 = 128 << 10;
/// The link to home is faster here, or an hour would not do.
const LINK: &str = "32MB/s";
const LINK_BYTES_PER_S: u64 = 32_000_000;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let width = options.pick(16, 8);
    let cache: u64 = options.pick(128_000_000, 64_000_000);
    report.section(&format!(
        "batch: {width} pipelines of {DEPTH} jobs on {NODES} nodes with {} MB of cache in all, \
         home at {LINK} (thesis: 64, 16 nodes, 8 GB). No order starts a job whose volumes do not \
         fit, so all three are safe",
        cache / 1_000_000
    ));
    // Beside its part of the cache a node needs room for its pipelines, and for the slack.
    let node = (cache / NODES + 8 * PRIVATE) * 103 / 100;
    let mut field = Field::start(&vec![Wish::new(node, 2); NODES as usize], LINK)?;
    let mut plot = Plot::new(
        "batch",
        "Batch-intensive (Fig 3.4)",
        "batch volume, % of all caches",
        "seconds",
    );
    let mut home = Plot::new(
        "batch-home",
        "Batch-intensive (Fig 3.4), traffic",
        "batch volume, % of all caches",
        "bytes over the link to home, over the batch data",
    );
    let points = options.pick(&[12, 25, 50, 75, 95, 110, 125][..], &[25, 75]);
    let (mut over_breadth, mut over_depth, mut knee): (f64, f64, f64) = (0.0, 0.0, 0.0);
    let (mut errors, mut simulated_knee) = (Errors::default(), 0.0_f64);
    for &percent in points {
        let batch = cache * percent / 100;
        for stage in 0..DEPTH {
            field.put(&format!("batch{stage}/set"), batch)?;
        }
        let (mut seconds, mut model) = (Vec::new(), None);
        for (order, name) in ORDERS {
            let took = field.run_in(order, &workflow(width, batch)?)?;
            all_done(name, &took)?;
            let model = match &mut model {
                Some(model) => model,
                None => model.insert(Model::of(&field.journal(), nodes(node), LINK_BYTES_PER_S)?),
            };
            let again = model.run(order, CheckpointPolicy::Never, Vec::new())?;
            errors.note(took_s(&field.journal())?, &took, &again);
            plot.add(
                &format!("{name}, simulated"),
                percent as f64,
                again.seconds(),
            );
            let fetched = again.home_bytes as f64 / (batch * u64::from(DEPTH)) as f64;
            home.add(&format!("{name}, simulated"), percent as f64, fetched);
            if order == Order::Need && fetched <= 1.05 {
                simulated_knee = simulated_knee.max(percent as f64);
            }
            plot.add(name, percent as f64, took.seconds);
            let ratio = took.home_bytes as f64 / (batch * u64::from(DEPTH)) as f64;
            home.add(name, percent as f64, ratio);
            // Linear while each byte comes once.
            if order == Order::Need && ratio <= 1.05 {
                knee = knee.max(percent as f64);
            }
            seconds.push(took.seconds);
        }
        over_breadth = over_breadth.max(seconds[0] / seconds[1]);
        over_depth = over_depth.max(seconds[0] / seconds[2]);
    }
    plot.write(report)?;
    home.write(report)?;
    report.figure("batch_vs_breadth_first_max", over_breadth);
    report.figure("batch_vs_depth_first_max", over_depth);
    report.figure("batch_knee", knee);
    report.figure("batch_simulated_knee", simulated_knee);
    errors.tell(report, "batch");
    Ok(())
}

fn nodes(bytes: u64) -> NodeClass {
    NodeClass::new(NODES as u32, 2, bytes)
}

fn workflow(width: u32, batch: u64) -> Result<String> {
    let mut text = Text::default();
    for stage in 0..DEPTH {
        text.line(&format!(
            "volume b{stage} cache bafs://home/batch{stage} {batch}B"
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
