//! Block sizes compared: what a scan and random reads cost behind a slow link, cold, by an
//! unmodified program in a job on one node.

use anyhow::Result;

use super::{MIB, Outcome, row};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, digits, seconds};
use crate::bench::shell::Shell;
use crate::bench::{Options, Report};
use crate::content::Content;
use crate::stage::{DATA_FILE, CacheCluster};

const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

const BLOCKS: [u32; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Random reads of 4 KiB, far fewer than the set has blocks.
const READS: usize = 256;
const READ_BYTES: usize = 4 << 10;

/// What one block size costs.
#[derive(Default)]
struct Costs {
    scan_time: Vec<f64>,
    scan_bytes: Vec<f64>,
    random_ms: Vec<f64>,
    random_bytes: Vec<f64>,
}

/// All sizes, in turns.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<Outcome> {
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let set = MIB * options.pick(64, 16);
    let stage = CacheCluster::start(1, "4GB", Some(LINK))?;
    stage.write_data_set("blocks", &Content::new(9, set))?;
    report.section(&format!(
        "block sizes: a cold scan of {} MiB behind {LINK}, and {READS} cold random reads of 4 KiB",
        set / MIB
    ));
    let mut costs: Vec<_> = BLOCKS.iter().map(|_| Costs::default()).collect();
    for _ in 0..options.pick(3, 1) {
        for (block_bytes, costs) in BLOCKS.iter().zip(&mut costs) {
            let scan = format!("--rw=read --bs=1M --size={set}");
            let (time, bytes) = once(&stage, set, *block_bytes, &scan)?;
            costs.scan_time.push(time * LINK_BYTES_PER_S / set as f64);
            costs.scan_bytes.push(bytes / set as f64);
            let wanted = READS * READ_BYTES;
            let random = format!("--rw=randread --bs=4k --size={set} --io_size={wanted}");
            let (time, bytes) = once(&stage, set, *block_bytes, &random)?;
            costs.random_ms.push(time * 1e3 / READS as f64);
            costs.random_bytes.push(bytes / wanted as f64);
        }
    }
    let mut rows = vec![row([
        "block",
        "scan: time / link",
        "home / set",
        "random: ms for each read",
        "home / read",
    ])];
    for (block_bytes, costs) in BLOCKS.iter().zip(costs) {
        let median = |values| digits(Samples::new(values).median());
        rows.push(row([
            &format!("{} KiB", block_bytes >> 10),
            &median(costs.scan_time),
            &median(costs.scan_bytes),
            &median(costs.random_ms),
            &median(costs.random_bytes),
        ]));
    }
    report.table(&rows);
    Ok(Outcome::default())
}

/// Reads a new, empty cache in a job: seconds, and bytes from home.
fn once(stage: &CacheCluster, set: usize, block_bytes: u32, pattern: &str) -> Result<(f64, f64)> {
    let wish = CacheSpec {
        block_bytes,
        cooperative: String::new(),
        ..CacheSpec::new("blocks", 2 * set as u64)
    };
    let volumes = stage.caches(&stage.nodes(), &wish)?;
    let mut shell = Shell::job(&stage.test_cluster, &format!("{}:/data:ro", volumes[0].id))?;
    shell.run("true")?;
    let before = stage.home_bytes()?;
    let (time, said) = seconds(|| {
        shell.run(&format!(
            "fio --name=read --filename=/data/{DATA_FILE} --readonly --invalidate=0 --ioengine=psync \
             --norandommap {pattern} >/dev/null 2>&1 || echo failed"
        ))
    })?;
    anyhow::ensure!(said.is_empty(), "fio failed in the job");
    let bytes = stage.home_bytes()? - before;
    drop(shell);
    stage.delete(&volumes)?;
    Ok((time, bytes as f64))
}
