//! Block sizes compared: the cost of a scan and of random reads behind a slow link, cold, by an
//! unmodified program in a job on one node.

use anyhow::Result;

use super::part_outcome::{MIB, PartOutcome};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, format_number, table_row, time_seconds};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, DATA_FILE};
use crate::content::Content;

const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

const BLOCK_SIZES: [u32; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Random reads of 4 KiB, far fewer than the set has blocks.
const RANDOM_READS: usize = 256;
const READ_BYTES: usize = 4 << 10;

/// The cost of one block size.
#[derive(Default)]
struct BlockSizeCosts {
    scan_time: Vec<f64>,
    scan_bytes: Vec<f64>,
    random_ms: Vec<f64>,
    random_bytes: Vec<f64>,
}

/// All sizes, in turns.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let set = MIB * options.choose(64, 16);
    let stage = CacheCluster::start(1, "4GB", Some(LINK))?;
    stage.write_data_set("blocks", &Content::new(9, set))?;
    report.print_section(&format!(
        "block sizes: a cold scan of {} MiB behind {LINK}, and {RANDOM_READS} cold random reads of \
         4 KiB",
        set / MIB
    ));
    let mut costs: Vec<_> = BLOCK_SIZES
        .iter()
        .map(|_| BlockSizeCosts::default())
        .collect();
    for _ in 0..options.choose(3, 1) {
        for (block_bytes, costs) in BLOCK_SIZES.iter().zip(&mut costs) {
            let scan = format!("--rw=read --bs=1M --size={set}");
            let (time, bytes) = read_once(&stage, set, *block_bytes, &scan)?;
            costs.scan_time.push(time * LINK_BYTES_PER_S / set as f64);
            costs.scan_bytes.push(bytes / set as f64);
            let wanted = RANDOM_READS * READ_BYTES;
            let random = format!("--rw=randread --bs=4k --size={set} --io_size={wanted}");
            let (time, bytes) = read_once(&stage, set, *block_bytes, &random)?;
            costs.random_ms.push(time * 1e3 / RANDOM_READS as f64);
            costs.random_bytes.push(bytes / wanted as f64);
        }
    }
    let mut rows = vec![table_row([
        "block",
        "scan: time / link",
        "home / set",
        "random: ms for each read",
        "home / read",
    ])];
    for (block_bytes, costs) in BLOCK_SIZES.iter().zip(costs) {
        let median = |values| format_number(Samples::new(values).median());
        rows.push(table_row([
            &format!("{} KiB", block_bytes >> 10),
            &median(costs.scan_time),
            &median(costs.scan_bytes),
            &median(costs.random_ms),
            &median(costs.random_bytes),
        ]));
    }
    report.print_table(&rows);
    Ok(PartOutcome::default())
}

/// Reads a new, empty cache in a job: seconds, and bytes from home.
fn read_once(
    stage: &CacheCluster,
    set: usize,
    block_bytes: u32,
    pattern: &str,
) -> Result<(f64, f64)> {
    let spec = CacheSpec {
        block_bytes,
        cooperative: String::new(),
        ..CacheSpec::new("blocks", 2 * set as u64)
    };
    let volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
    let mut shell =
        Shell::start_in_job(&stage.test_cluster, &format!("{}:/data:ro", volumes[0].id))?;
    shell.run_line("true")?;
    let before = stage.read_home_bytes()?;
    let (time, said) = time_seconds(|| {
        shell.run_line(&format!(
            "fio --name=read --filename=/data/{DATA_FILE} --readonly --invalidate=0 \
             --ioengine=psync --norandommap {pattern} >/dev/null 2>&1 || echo failed"
        ))
    })?;
    anyhow::ensure!(said.is_empty(), "fio failed in the job");
    let bytes = stage.read_home_bytes()? - before;
    drop(shell);
    stage.delete_volumes(&volumes)?;
    Ok((time, bytes as f64))
}
