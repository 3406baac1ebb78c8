//! `bench root`: an environment of some hundred megabytes is the root of 32 jobs on four nodes
//! behind a link of 10 MB/s. What crosses the link, beside the blocks that the jobs touch; and how
//! long a first job takes, beside a copy of the environment to one node. Needs Python.

mod environment;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::environment::{Environment, create_environment, job_program};
use super::measure::{Stopwatch, format_number};
use super::{BenchmarkReport, Options};
use crate::api::BlockingClient;
use crate::{TestCluster, printed_text};

const SUMMARY: &[&str] = &[
    "bytes_fetched_ratio",
    "home_ratio",
    "start_s",
    "copy_s",
    "jobs_s",
    "environment_bytes",
    "fetched_bytes",
];

/// Rate of the link to home.
const LINK: &str = "10MB/s";

const NODES: usize = 4;
const JOBS: u64 = 32;

/// A block of the node's file system.
const DISK_BLOCK_BYTES: u64 = 4096;

/// A block of a cache volume (decision 0007), and a page of what a job touched.
const BLOCK_BYTES: u64 = 64 << 10;
const PAGE_BYTES: u64 = 4096;

/// Bytes that cross the link, beside those of the blocks that jobs touch.
const FETCHED_RATIO_MAX: f64 = 1.1;

/// Each byte crosses it once; the counters count whole blocks.
const HOME_RATIO_MAX: f64 = 1.005;

/// Runs it.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    if let Some(why) = crate::mount_obstacle() {
        report.add_missing("bytes_fetched_ratio", &why);
        return Ok(());
    }
    let home = tempfile::tempdir()?;
    let environment = create_environment(&home.path().join("env"), options.choose(1, 10))?;
    report.print_section(&format!(
        "{} files, {} MB, behind {LINK}",
        environment.files,
        environment.bytes / 1_000_000
    ));
    report.add_figure("environment_bytes", environment.bytes as f64);

    let cold = run_jobs(home.path(), &environment, 1, RootKind::Cache)?;
    report.add_figure("start_s", cold.seconds);
    report.print_line(&format!("a first job: {} s", format_number(cold.seconds)));

    let all = run_jobs(home.path(), &environment, JOBS, RootKind::Cache)?;
    report.add_figure("jobs_s", all.seconds);
    report.add_figure("fetched_bytes", all.home_bytes as f64);
    report.print_line(&format!(
        "{JOBS} jobs on {NODES} nodes: {} s; touched {} MB, fetched {} MB",
        format_number(all.seconds),
        format_number(all.touched_bytes as f64 / 1e6),
        format_number(all.home_bytes as f64 / 1e6),
    ));
    let ratio = |one: u64, other: u64| one as f64 / other.max(1) as f64;
    let fetched = ratio(all.unique_bytes, all.touched_bytes);
    let range = 0.0..=FETCHED_RATIO_MAX;
    report.add_figure_with_target("bytes_fetched_ratio", fetched, range);
    let home_ratio = ratio(all.home_bytes, all.unique_bytes);
    report.add_figure_with_target("home_ratio", home_ratio, 0.99..=HOME_RATIO_MAX);

    let copied = run_jobs(home.path(), &environment, 1, RootKind::Copy)?;
    report.add_figure("copy_s", copied.seconds);
    report.print_line(&format!(
        "the same with a copy of the environment on one node: {} s",
        format_number(copied.seconds)
    ));
    ensure!(
        fetched <= FETCHED_RATIO_MAX,
        "{fetched} times what is touched is fetched"
    );
    ensure!(
        home_ratio <= HOME_RATIO_MAX,
        "bytes cross the link {home_ratio} times"
    );
    Ok(())
}

/// What the jobs have as their root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RootKind {
    /// A cache volume.
    Cache,
    /// A scratch volume with all of it.
    Copy,
}

/// What a run took.
struct RootRun {
    seconds: f64,
    /// Bytes of the blocks that jobs touched.
    touched_bytes: u64,
    /// Bytes that home sent.
    home_bytes: u64,
    /// The same, each block once.
    unique_bytes: u64,
}

fn run_jobs(home: &Path, environment: &Environment, jobs: u64, kind: RootKind) -> Result<RootRun> {
    let bytes = environment.bytes * 3 / 2 + environment.files * 2 * DISK_BLOCK_BYTES;
    let size = format!("{}MB", bytes / 1_000_000 + 200);
    let world = TestCluster::start_with_spec(&[size.as_str(); NODES], |spec| {
        spec.export = home.to_owned();
        spec.home_rate = Some(LINK.to_owned());
        spec.slots = (JOBS as u32).div_ceil(NODES as u32);
    })?;
    world.wait_for_servers(NODES + 1)?;
    let path = home.join("root.bafs");
    fs::write(&path, workflow(environment, jobs, kind))?;
    let args = ["run", &path.to_string_lossy(), "--json", "--forced"];
    let watch = Stopwatch::start();
    let output = world.bafs_command(&args).output()?;
    let seconds = watch.elapsed().as_secs_f64();
    ensure!(output.status.success(), printed_text(&output));
    let told: Value = serde_json::from_slice(&output.stdout)?;
    let api = BlockingClient::new(&world.cluster.identity())?;
    let count = |server: &str, name: &str| -> Result<u64> {
        let counters = api.block_on(api.client().read_counters(server))?;
        Ok(counters.get(name).copied().unwrap_or(0))
    };
    let mut unique_bytes = 0;
    for node in 1..=NODES {
        let address = world.cluster.address(&format!("n{node}")).to_owned();
        unique_bytes += count(&address, "cache_home_unique_bytes")?;
    }
    Ok(RootRun {
        seconds,
        touched_bytes: touched_bytes(&told)?,
        home_bytes: count(world.cluster.home_address(), "home_read_bytes")?,
        unique_bytes,
    })
}

fn workflow(environment: &Environment, jobs: u64, kind: RootKind) -> String {
    let files = environment.files * 2;
    // A file takes whole blocks of the disk: half of one is lost on average, all of it at most.
    let bytes = environment.bytes + files * DISK_BLOCK_BYTES;
    let volume = match kind {
        RootKind::Cache => format!("volume env cache bafs://home/env {bytes} B files {files}\n"),
        RootKind::Copy => {
            format!("volume env scratch {bytes} B files {files} from bafs://home/env\n")
        }
    };
    let mut text = volume;
    for job in 0..jobs {
        let program = job_program(job);
        text += &format!(
            "root env j{job}\njob j{job} {{\n  interpreter = {} -B\n  \
             environment = HOME=/home/job\n  script = <<END\n{program}END\n}}\n",
            environment.python.display(),
        );
    }
    text
}

/// Bytes of the blocks that the jobs of a report touched, each once.
fn touched_bytes(report: &Value) -> Result<u64> {
    let mut blocks: BTreeMap<String, (u64, BTreeSet<u64>)> = BTreeMap::new();
    let jobs = report["jobs"].as_array().context("a report has jobs")?;
    let volumes = jobs.iter().filter_map(|job| job["volumes"].as_array());
    let files = volumes
        .flatten()
        .filter_map(|volume| volume["pages"].as_array());
    for file in files.flatten() {
        let path = file["path"].as_str().context("a path")?;
        let (size, touched) = blocks.entry(path.to_owned()).or_default();
        *size = file["size"].as_u64().context("a size")?;
        for run in file["page_runs"].as_array().context("runs")? {
            let (first, count) = (run[0].as_u64(), run[1].as_u64());
            let first = first.context("a page")? * PAGE_BYTES;
            let end = first + count.context("pages")? * PAGE_BYTES;
            touched.extend(first / BLOCK_BYTES..end.min(*size).div_ceil(BLOCK_BYTES));
        }
    }
    let of_file = |(size, touched): &(u64, BTreeSet<u64>)| -> u64 {
        let bytes = |block: &u64| BLOCK_BYTES.min(size.saturating_sub(block * BLOCK_BYTES));
        touched.iter().map(bytes).sum()
    };
    Ok(blocks.values().map(of_file).sum())
}
