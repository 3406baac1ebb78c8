//! `bench slurm`: the BLAST workflow on pilots of a real Slurm, while pilots are cancelled at
//! random and one compute node is killed. What counts: complete, identical, nothing left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{BenchmarkReport, Options};
use crate::api::BlockingClient;
use crate::batch_systems::{
    ProcessTracking, SlurmCluster, SlurmOptions, slurm_obstacle, wait_until,
};
use crate::seeded_rng::SeededRng;
use crate::{TestCluster, processes_matching};

/// Compute nodes of Slurm, and pilots at most.
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
    cancelled: usize,
    report: serde_json::Value,
}

/// Runs it.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    if let Some(reason) = slurm_obstacle().or_else(crate::mount_obstacle) {
        report.add_missing("complete", &reason);
        return Ok(());
    }
    let searches = options.choose(SEARCHES.0, SEARCHES.1);
    let cluster = TestCluster::start(&[])?;
    let home = cluster.home.path().to_owned();
    let api = BlockingClient::new(&cluster.cluster.identity())?;
    let residues = options.choose(RESIDUES.0, RESIDUES.1);
    api.block_on(bafs::demo::prepare_input(&home, residues, searches, 1))?;
    let workflow = write_workflow(&home, searches)?;
    let expected = run_plainly(&home, searches)?;

    let mut slurm = SlurmCluster::start(&SlurmOptions {
        nodes: NODES,
        ..SlurmOptions::default()
    })?;
    let tracking = match slurm.tracking() {
        ProcessTracking::ControlGroup => "proctrack/cgroup",
        ProcessTracking::ProcessTree => "proctrack/linuxproc: this kernel has no control groups",
    };
    report.print_section(&format!(
        "{searches} searches on {NODES} slurmd, {tracking}"
    ));
    let cancels = options.choose(CANCELLED.0, CANCELLED.1);
    let watched = watch_run(&cluster, &mut slurm, &workflow, cancels)?;

    let unique = directory_bytes(&home.join("db"))? + directory_bytes(&home.join("queries"))?;
    let counters = api.block_on(api.client().read_counters(cluster.cluster.home_address()))?;
    let read = counters.get("home_read_bytes").copied().unwrap_or(0);
    let leftovers = count_leftovers(&slurm, &home)?;
    let is_identical = (1..=searches).all(|query| {
        let file = home.join(format!("results/q{query:02}.txt"));
        fs::read(file).ok().as_ref() == expected.get(query as usize - 1)
    });
    let jobs = watched.report["jobs"].as_array();
    let attempts = jobs
        .into_iter()
        .flatten()
        .filter_map(|job| job["attempts"].as_u64());
    let again: u64 = attempts.map(|count| count.saturating_sub(1)).sum();
    let is_complete = watched.report["outcome"] == "Complete";
    report.add_figure("complete", f64::from(u8::from(is_complete)));
    report.add_figure("identical", f64::from(u8::from(is_identical)));
    report.add_figure("leftovers", leftovers as f64);
    match watched.first_job_s {
        Some(seconds) => report.add_figure_with_target("first_job_s", seconds, 0.0..=3.0),
        None => report.add_missing("first_job_s", "the first job ended between two looks"),
    }
    report.add_figure("pilots_cancelled_busy", watched.cancelled as f64);
    report.add_figure("executions_again", again as f64);
    report.add_figure("home_read_ratio", read as f64 / unique as f64);
    ensure!(
        is_complete && is_identical && leftovers == 0,
        "the run came to no good end"
    );
    Ok(())
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
    slurm: &mut SlurmCluster,
    workflow: &Path,
    cancels: usize,
) -> Result<WatchedRun> {
    let (name, value) = slurm.environment();
    let text = workflow.display().to_string();
    let pool = format!("slurm:{NODES}");
    let arguments = [
        "--json",
        "run",
        &text,
        "--pool",
        &pool,
        "--node-size",
        "1GB",
    ];
    let output = workflow.with_extension("output");
    let mut command = cluster.bafs_command(&arguments);
    command.args(["--time-limit", "1h"]).env(name, value);
    command
        .env("HOME", cluster.home.path())
        .env_remove("XDG_STATE_HOME");
    let mut run = command
        .stdout(File::create(&output)?)
        .stderr(Stdio::inherit())
        .spawn()?;
    let watched = disturb_run(cluster, slurm, workflow, cancels, &mut run);
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

/// Cancels running pilots and kills a node. Returns the time from the start of the first pilot to
/// that of the first job, and how many pilots were cancelled.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
fn disturb_run(
    cluster: &TestCluster,
    slurm: &mut SlurmCluster,
    workflow: &Path,
    cancels: usize,
    run: &mut Child,
) -> Result<(Option<f64>, usize)> {
    wait_until(QUEUE_TIMEOUT, || Ok(!list_running(slurm)?.is_empty()))?;
    let started = Instant::now();
    let journal = workflow.display().to_string();
    let first_job = wait_until(QUEUE_TIMEOUT, || {
        let status = cluster.run_json(&["status", &journal]);
        Ok(status.is_ok_and(|status| {
            status.to_string().contains("\"jobs_running\":")
                && !status.to_string().contains("\"jobs_running\":0")
        }))
    });
    let first_job_s = first_job.is_ok().then(|| started.elapsed().as_secs_f64());
    let mut random = SeededRng::new(1);
    let mut cancelled = 0;
    for _ in 0..cancels {
        std::thread::sleep(CANCEL_PAUSE);
        let running = list_running(slurm)?;
        if running.is_empty() || run.try_wait()?.is_some() {
            break;
        }
        let index = usize::try_from(random.next_below(running.len() as u64))?;
        cancelled += usize::from(
            slurm
                .command("scancel")
                .arg(&running[index])
                .status()?
                .success(),
        );
    }
    slurm.kill_node(1);
    Ok((first_job_s, cancelled))
}

fn list_running(slurm: &SlurmCluster) -> Result<Vec<String>> {
    let output = slurm
        .command("squeue")
        .args(["-h", "-t", "RUNNING", "-o", "%i"])
        .output()?;
    Ok(String::from_utf8(output.stdout)?
        .lines()
        .map(str::to_owned)
        .collect())
}

/// Pilots in the queue, processes of the home directory, and pools.
fn count_leftovers(slurm: &SlurmCluster, home: &Path) -> Result<usize> {
    let pools = home.join(".local/state/bafs/pools");
    let marker = pools.display().to_string();
    let count = || {
        let queue = slurm.command("squeue").arg("-h").output()?;
        let queued = String::from_utf8_lossy(&queue.stdout).lines().count();
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
