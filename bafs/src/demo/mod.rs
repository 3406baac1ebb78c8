//! `bafs demo`: the main job, on a throw-away cluster, beside the way without BAFS.

mod input;
mod reference_run;
mod required_bytes;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_client::signals::wait_for_stop_signal;
use bafs_proto::message::ReadCounters;
use bafs_sched::driver::CancelHandle;
use bafs_sched::{IoMode, Outcome, Settings};
use bafs_workflow::{Workflow, parse_workflow};
use serde::Serialize;

use crate::args::DemoArgs;
use crate::client::ClusterClient;
use crate::cluster::{Cluster, ClusterSpec};
use crate::locked_directory::LockedDirectory;
use crate::metrics::PublishedProgress;
use crate::output::Printer;
use crate::program_file::program_file;
use crate::run::{self, ThrowAwayRun};

pub use self::input::prepare_input;

/// The workflow of the demo: the example that a user reads, copies and changes.
const WORKFLOW: &str = include_str!("../../../examples/blast/blast.bafs");

const MIB: usize = 1 << 20;

/// Space of each node; they differ, as borrowed machines do.
const NODE_SIZES: [&str; 4] = ["600 MB", "800 MB", "700 MB", "900 MB"];

/// What was measured of one way to run the workflow.
#[derive(Debug, Clone, Serialize)]
struct DemoMeasurement {
    /// Pipelines that ran.
    pipelines: u32,
    /// Wall time of the run in seconds.
    wall_s: f64,
    /// File data that home sent.
    home_read_bytes: u64,
    /// File data that home received.
    home_written_bytes: u64,
    /// Distinct bytes of home files that the jobs needed.
    unique_bytes: u64,
}

/// One result line for machines.
#[derive(Debug, Serialize)]
struct DemoSummary {
    identical: bool,
    jobs: usize,
    home_read_bytes: u64,
    unique_bytes: u64,
    home_read_ratio: f64,
    speedup_vs_remote_io: Option<f64>,
    remote_io: Option<DemoMeasurement>,
    bafs: DemoMeasurement,
}

/// Runs the demo. Its files are gone when it returns, also when it was interrupted.
pub(crate) async fn run_demo(args: DemoArgs, output: Printer) -> Result<ExitCode> {
    let args = apply_small(args);
    ensure!(
        args.nodes > 0 && args.pipelines > 0,
        "a demo needs at least one node and one pipeline"
    );
    tokio::task::block_in_place(crate::machine_check::check_machine)?;
    let interrupted = wait_for_stop_signal();
    let directory = LockedDirectory::create("demo", false)?;
    let demo = run_demo_in(&args, directory.path(), output);
    tokio::select! {
        done = demo => done,
        _ = interrupted => bail!("interrupted; everything was removed"),
    }
}

/// The small form differs in size only.
fn apply_small(args: DemoArgs) -> DemoArgs {
    if !args.small {
        return args;
    }
    DemoArgs {
        pipelines: args.pipelines.min(4),
        remote_pipelines: args.remote_pipelines.min(1),
        database_mib: args.database_mib.min(3),
        ..args
    }
}

async fn run_demo_in(args: &DemoArgs, directory: &Path, output: Printer) -> Result<ExitCode> {
    let home = directory.join("home");
    fs::create_dir(&home)?;
    print_step(
        output,
        "preparing a protein database and queries from real sequences",
    )?;
    let residues = args.database_mib as usize * MIB;
    let queries = args.pipelines.max(args.remote_pipelines);
    prepare_input(&home, residues, queries, args.seed).await?;

    let workflow = demo_workflow(directory, "results", args.pipelines)?;
    print_step(
        output,
        "running the same commands on plain directories, for reference",
    )?;
    let reference =
        reference_run::run_reference(&workflow, &home, &directory.join("plain")).await?;

    print_step(
        output,
        &format!("running {} pipelines over BAFS", args.pipelines),
    )?;
    let bafs = measure_run(args, &home, directory, &workflow, false, output).await?;
    let mut identical = are_results_identical(&home, &reference)?;

    let remote_io = match args.remote_pipelines {
        0 => None,
        pipelines => {
            print_step(
                output,
                &format!("running {pipelines} pipelines with remote I/O"),
            )?;
            let workflow = demo_workflow(directory, "results-remote-io", pipelines)?;
            let measured = measure_run(args, &home, directory, &workflow, true, output).await?;
            let renamed = |path: &str| path.replacen("results/", "results-remote-io/", 1);
            let count = pipelines as usize;
            let reference = reference
                .iter()
                .take(count)
                .map(|(k, v)| (renamed(k), v.clone()))
                .collect();
            identical &= are_results_identical(&home, &reference)?;
            Some(measured)
        }
    };
    print_summary(&workflow, identical, bafs, remote_io, output)
}

fn print_summary(
    workflow: &Workflow,
    identical: bool,
    bafs: DemoMeasurement,
    remote_io: Option<DemoMeasurement>,
    output: Printer,
) -> Result<ExitCode> {
    let per_pipeline = |m: &DemoMeasurement| m.wall_s / f64::from(m.pipelines);
    let summary = DemoSummary {
        identical,
        jobs: workflow.jobs.len(),
        home_read_bytes: bafs.home_read_bytes,
        unique_bytes: bafs.unique_bytes,
        home_read_ratio: table::ratio(bafs.home_read_bytes, bafs.unique_bytes),
        speedup_vs_remote_io: remote_io
            .as_ref()
            .map(|r| per_pipeline(r) / per_pipeline(&bafs)),
        remote_io,
        bafs,
    };
    output.print_result(table::render_table(&summary).trim_end(), &summary)?;
    Ok(if identical {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The shipped workflow, with its results in another directory and for another number of queries.
fn demo_workflow(directory: &Path, results: &str, pipelines: u32) -> Result<Workflow> {
    let text = WORKFLOW
        .replace("bafs://home/results/", &format!("bafs://home/{results}/"))
        .replace("for i in 1..16", &format!("for i in 1..{pipelines}"));
    let file = directory.join("blast.bafs");
    let no_files = |path: &str| Err(format!("the demo has no file '{path}'"));
    match parse_workflow(&file.to_string_lossy(), &text, &no_files) {
        Ok(checked) => Ok(checked.workflow),
        Err(rejected) => bail!("the example is damaged: {rejected}"),
    }
}

async fn measure_run(
    args: &DemoArgs,
    home: &Path,
    directory: &Path,
    workflow: &Workflow,
    remote_io: bool,
    output: Printer,
) -> Result<DemoMeasurement> {
    let sizes = NODE_SIZES.iter().cycle().take(args.nodes as usize);
    let spec = ClusterSpec {
        listen_host: None,
        program: program_file()?.to_owned(),
        export: home.to_owned(),
        home_rate: Some(args.home_rate.clone()),
        node_sizes: sizes.map(|&size| size.to_owned()).collect(),
        slots: 1,
        has_metrics: false,
        is_kept: args.keep,
    };
    let mut cluster = tokio::task::block_in_place(|| Cluster::start(&spec))?;
    if args.keep {
        print_step(
            output,
            &format!(
                "the cluster's files stay in {}",
                cluster.directory().display()
            ),
        )?;
    }
    let way = ThrowAwayRun {
        journal: directory.join(if remote_io {
            "remote-io.journal"
        } else {
            "journal"
        }),
        logs: None,
        settings: Settings {
            io: if remote_io {
                IoMode::Remote
            } else {
                IoMode::Volumes
            },
            ..Settings::default()
        },
        output,
        jobs_before_kill: args.kill_node_after.filter(|_| !remote_io),
        published_progress: PublishedProgress::default(),
        cancel: CancelHandle::default(),
        page: None,
        pool: None,
        earlier_work: None,
    };
    let report = run::run_on_cluster(workflow.clone(), &mut cluster, &way).await?;
    ensure!(
        report.outcome == Outcome::Complete,
        "{}",
        run::describe_outcome(&report)
    );
    let client = ClusterClient::connect(&cluster.identity(), cluster.catalog_address())?;
    let counters = client
        .call(cluster.home_address(), ReadCounters)
        .await?
        .values;
    let counter = |name: &str| counters.get(name).copied().unwrap_or(0);
    Ok(DemoMeasurement {
        pipelines: u32::try_from(workflow.extracts.len())?,
        wall_s: Duration::from_millis(report.wall_ms).as_secs_f64(),
        home_read_bytes: counter("home_read_bytes"),
        home_written_bytes: counter("home_written_bytes"),
        unique_bytes: required_bytes::unique_bytes(&report, workflow, home)?,
    })
}

/// Whether each file came home exactly as the plain run made it; names each that did not.
fn are_results_identical(home: &Path, reference: &BTreeMap<String, PathBuf>) -> Result<bool> {
    let mut identical = true;
    for (path, plain) in reference {
        let expected = fs::read(plain).with_context(|| plain.display().to_string())?;
        if fs::read(home.join(path)).ok().as_ref() != Some(&expected) {
            eprintln!("DIFFERENT: {path} is not what a plain directory gives");
            identical = false;
        }
    }
    Ok(identical)
}

fn print_step(output: Printer, text: &str) -> Result<()> {
    output.print_remark(&format!("bafs demo: {text}"))
}
