//! `bench slurm` and `bench grid-engine`: the BLAST workflow on pilots of a real batch system,
//! while busy pilots are cancelled at random and a daemon of Slurm is killed. What counts:
//! complete, identical, nothing left, and no finished job runs again because of a cancelled pilot.

mod batch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use self::batch::Batch;
use super::{BenchmarkReport, Options};
use crate::api::BlockingClient;
use crate::batch_systems::{grid_engine_obstacle, slurm_obstacle, wait_until};
use crate::fault_injection::read_executions;
use crate::seeded_rng::SeededRng;
use crate::{TestCluster, processes_matching};

/// Compute nodes, and pilots at most.
const NODES: usize = 8;

/// Searches, and residues of the database, of a full and of a quick run.
const SEARCHES: (u32, u32) = (16, 6);
const RESIDUES: (usize, usize) = (25 << 20, 4 << 20);

/// Pilots that are cancelled while they run, and the pause before each.
const CANCELLED: (usize, usize) = (3, 1);
const CANCEL_PAUSE: Duration = Duration::from_secs(6);

/// Time for the whole run, and for the queue to be empty after it.
const RUN_TIMEOUT: Duration = Duration::from_secs(900);
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);

/// A run as it was watched from outside.
struct WatchedRun {
    first_job_s: Option<f64>,
    /// Names of the pilots that were cancelled while jobs ran there.
    cancelled: BTreeSet<String>,
    report: serde_json::Value,
}

/// Runs it on Slurm.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    if let Some(reason) = slurm_obstacle().or_else(crate::mount_obstacle) {
        report.add_missing("complete", &reason);
        return Ok(());
    }
    run_on(options, report, || Batch::start_slurm(NODES))
}

/// Runs it on Grid Engine.
pub(super) fn run_on_grid_engine(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    if let Some(reason) = grid_engine_obstacle().or_else(crate::mount_obstacle) {
        report.add_missing("complete", &reason);
        return Ok(());
    }
    run_on(options, report, || Batch::start_grid_engine(NODES))
}

fn run_on(
    options: &Options,
    report: &mut BenchmarkReport,
    start: impl FnOnce() -> Result<Batch>,
) -> Result<()> {
    let searches = options.choose(SEARCHES.0, SEARCHES.1);
    let cluster = TestCluster::start(&[])?;
    let home = cluster.home.path().to_owned();
    let api = BlockingClient::new(&cluster.cluster.identity())?;
    let residues = options.choose(RESIDUES.0, RESIDUES.1);
    api.block_on(bafs::demo::prepare_input(&home, residues, searches, 1))?;
    let workflow = write_workflow(&home, searches)?;
    let expected = run_plainly(&home, searches)?;

    let mut batch = start()?;
    report.print_section(&format!("{searches} searches on {}", batch.describe()));
    let cancels = options.choose(CANCELLED.0, CANCELLED.1);
    let watched = watch_run(&cluster, &mut batch, &workflow, cancels)?;

    let unique = directory_bytes(&home.join("db"))? + directory_bytes(&home.join("queries"))?;
    let counters = api.block_on(api.client().read_counters(cluster.cluster.home_address()))?;
    let read = counters.get("home_read_bytes").copied().unwrap_or(0);
    let leftovers = count_leftovers(&batch, &home)?;
    let is_identical = (1..=searches).all(|query| {
        let file = home.join(format!("results/q{query:02}.txt"));
        fs::read(file).ok().as_ref() == expected.get(query as usize - 1)
    });
    let is_complete = watched.report["outcome"] == "Complete";
    let (again, lost) = count_reruns(&journal_of(&workflow), &watched.cancelled)?;
    report.add_figure("complete", f64::from(u8::from(is_complete)));
    report.add_figure("identical", f64::from(u8::from(is_identical)));
    report.add_figure("leftovers", leftovers as f64);
    match watched.first_job_s {
        Some(seconds) => report.add_figure_with_target("first_job_s", seconds, 0.0..=3.0),
        None => report.add_missing("first_job_s", "the first job ended between two looks"),
    }
    report.add_figure("pilots_cancelled_busy", watched.cancelled.len() as f64);
    report.add_figure("executions_again", again as f64);
    report.add_figure_with_target("jobs_lost_to_sigterm", lost as f64, 0.0..=0.0);
    report.add_figure("home_read_ratio", read as f64 / unique as f64);
    ensure!(
        is_complete && is_identical && leftovers == 0,
        "the run came to no good end"
    );
    Ok(())
}

fn journal_of(workflow: &Path) -> PathBuf {
    workflow.with_extension("bafs.journal")
}

/// Executions that repeat a job, and those of them that repeat a finished job whose volumes were on
/// a cancelled pilot.
fn count_reruns(journal: &Path, cancelled: &BTreeSet<String>) -> Result<(usize, usize)> {
    let executions = read_executions(journal)?;
    let begun = executions.iter().filter(|one| one.has_begun);
    let (mut last, mut again, mut lost) = (BTreeMap::new(), 0, 0);
    for execution in begun {
        let Some(before) = last.insert(execution.job, execution) else {
            continue;
        };
        again += 1;
        let was_there = !before.volumes.is_disjoint(cancelled);
        lost += usize::from(before.has_succeeded && was_there);
    }
    Ok((again, lost))
}

fn write_workflow(home: &Path, searches: u32) -> Result<PathBuf> {
    let text = include_str!("../../../../examples/blast/blast.bafs");
    let path = home.join("blast.bafs");
    fs::write(
        &path,
        text.replace("for i in 1..16", &format!("for i in 1..{searches}")),
    )?;
    Ok(path)
}

/// Results of the same programs in plain directories.
fn run_plainly(home: &Path, searches: u32) -> Result<Vec<Vec<u8>>> {
    let search = |query: u32| {
        let script = format!(
            "blastp -db db/proteins -query queries/q{query:02}.fa -outfmt 6 -evalue 1e-3 \
             -num_threads 1 | LC_ALL=C sort -k12,12gr -k2,2 | \
             awk '{{ print $1, $2, $3, $11, $12 }}' | head -n 50"
        );
        let output = Command::new("/bin/sh")
            .args(["-c", &script])
            .current_dir(home)
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output.stdout)
    };
    (1..=searches).map(search).collect()
}

fn watch_run(
    cluster: &TestCluster,
    batch: &mut Batch,
    workflow: &Path,
    cancels: usize,
) -> Result<WatchedRun> {
    let text = workflow.display().to_string();
    let pool = format!("{}:{NODES}", batch.engine_name());
    let arguments = [
        "--json",
        "run",
        &text,
        "--pool",
        &pool,
        "--node-size",
        "1GB",
        "--time-limit",
        "1h",
    ];
    let output = workflow.with_extension("output");
    let mut run = pool_command(cluster, batch, &arguments)
        .stdout(File::create(&output)?)
        .stderr(Stdio::inherit())
        .spawn()?;
    let watched = disturb_run(cluster, batch, workflow, cancels, &mut run);
    let ended = wait_until(RUN_TIMEOUT, || Ok(run.try_wait()?.is_some()));
    if ended.is_err() {
        run.kill()?;
        run.wait()?;
    }
    ended.context("the run ends")?;
    let (first_job_s, cancelled) = watched?;
    let report = fs::read_to_string(output)?;
    Ok(WatchedRun {
        first_job_s,
        cancelled,
        report: serde_json::from_str(report.trim()).context(report)?,
    })
}

fn pool_command(cluster: &TestCluster, batch: &Batch, arguments: &[&str]) -> Command {
    let mut command = cluster.bafs_command(arguments);
    command
        .envs(batch.environment())
        .env("HOME", cluster.home.path())
        .env_remove("XDG_STATE_HOME");
    command
}

/// Cancels busy pilots and kills a daemon. Returns the time from the start of the first pilot to
/// that of the first job, and which pilots were cancelled.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
fn disturb_run(
    cluster: &TestCluster,
    batch: &mut Batch,
    workflow: &Path,
    cancels: usize,
    run: &mut Child,
) -> Result<(Option<f64>, BTreeSet<String>)> {
    wait_until(QUEUE_TIMEOUT, || {
        Ok(!list_pilots(cluster, batch)?.is_empty())
    })?;
    let started = Instant::now();
    let journal = workflow.display().to_string();
    let first_job = wait_until(QUEUE_TIMEOUT, || {
        let status = cluster.run_json(&["status", &journal]);
        let count = |status: &serde_json::Value| status["progress"]["executions"].as_u64();
        Ok(status.is_ok_and(|status| count(&status).unwrap_or(0) > 0))
    });
    let first_job_s = first_job.is_ok().then(|| started.elapsed().as_secs_f64());
    let mut random = SeededRng::new(1);
    let mut cancelled = BTreeSet::new();
    for _ in 0..cancels {
        std::thread::sleep(CANCEL_PAUSE);
        if run.try_wait()?.is_some() {
            break;
        }
        let busy = list_busy_nodes(cluster)?;
        let mut pilots = list_pilots(cluster, batch)?;
        pilots.retain(|(name, _)| busy.contains(name) && !cancelled.contains(name));
        if pilots.is_empty() {
            continue;
        }
        let index = usize::try_from(random.next_below(pilots.len() as u64))?;
        let (name, id) = pilots.swap_remove(index);
        if batch.cancel(&id)? {
            cancelled.insert(name);
        }
    }
    batch.kill_daemon();
    Ok((first_job_s, cancelled))
}

/// Names and ids of the pilots that run.
fn list_pilots(cluster: &TestCluster, batch: &Batch) -> Result<Vec<(String, String)>> {
    let output = pool_command(cluster, batch, &["--json", "pool", "list"]).output()?;
    let pools: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let mut pilots = Vec::new();
    for pool in pools.as_array().into_iter().flatten() {
        let name = pool["name"].as_str().unwrap_or_default();
        for pilot in pool["pilots"].as_array().into_iter().flatten() {
            if let (Some(id), "running") = (
                pilot["id"].as_str(),
                pilot["state"].as_str().unwrap_or_default(),
            ) {
                pilots.push((format!("bafs-{name}-{}", pilot["pilot"]), id.to_owned()));
            }
        }
    }
    Ok(pilots)
}

/// Names of nodes that run jobs.
fn list_busy_nodes(cluster: &TestCluster) -> Result<BTreeSet<String>> {
    let servers = cluster.run_json(&["servers"])?;
    let nodes = servers.as_array().into_iter().flatten();
    let busy = nodes.filter(|node| node["jobs"].as_u64().unwrap_or(0) > 0);
    Ok(busy
        .filter_map(|node| Some(node["name"].as_str()?.to_owned()))
        .collect())
}

/// Pilots in the queue, processes of the home directory, and pools.
fn count_leftovers(batch: &Batch, home: &Path) -> Result<usize> {
    let pools = home.join(".local/state/bafs/pools");
    let marker = pools.display().to_string();
    let count = || {
        let queued = batch.count_jobs()?;
        let left = fs::read_dir(&pools).map_or(0, Iterator::count);
        Ok::<usize, anyhow::Error>(queued + processes_matching(&marker).len() + left)
    };
    let _ = wait_until(QUEUE_TIMEOUT, || Ok(count()? == 0));
    count()
}

fn directory_bytes(directory: &Path) -> Result<u64> {
    let sizes = fs::read_dir(directory)?.map(|entry| Ok(entry?.metadata()?.len()));
    sizes.sum()
}
