//! `bafs plan`: shows what the planner thinks of a workload. It runs nothing.

use std::ffi::OsStr;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use bafs_sim::planner::{
    CanonicalWorkload, Environment, Plan, Shape, Shortage, Strategy, StrategyCandidate, Traversal,
    plan_workload,
};

use bafs_sim::simulator::{
    LoadModel, TrialResult, TrialScope, TrialsOutcome, build_canonical_workflow, compare_remote_io,
    decide_by_simulation,
};
use bafs_workflow::Workflow;
use serde::Serialize;

use crate::args::PlanArgs;
use crate::home_view::HomeView;
use crate::input_file;
use crate::live_environment::{self, LinkRates};
use crate::output::Printer;
use crate::units::format_bytes;
use crate::workflow_file;

/// Plans a workflow or a canonical workload, and prints the strategies and the choice.
pub(crate) async fn run_plan(args: &PlanArgs, output: Printer) -> Result<()> {
    let environment = load_machines(args).await?;
    let PlanRequest {
        shape,
        workload: work,
        mut remarks,
    } = parse_request(args)?;
    if let PlanWorkload::Workflow(workflow, _) = &work {
        check_processors(workflow, &environment)?;
    }
    if args.environment.is_none() {
        remarks.push(live_environment::describe_environment(&environment));
    }
    if !environment.is_uniform() {
        remarks.push(
            "the model ignores nodes' differences other than processors and storage, latency, hash \
             imbalance and home links of single nodes"
                .to_owned(),
        );
    }
    let mut plan = plan_workload(shape, &environment);
    let untimed = match plan.shape.why_too_wide(&environment) {
        None => "never",
        Some(why) => {
            remarks.push(format!("{why}, so no times are predicted"));
            "-"
        }
    };
    let doubts = match args.model_only {
        true => TrialsOutcome::NotNeeded,
        false => simulate_candidates(&mut plan, work, &environment)?,
    };
    let tried = match doubts {
        TrialsOutcome::Completed(tried) => tried,
        TrialsOutcome::NotNeeded => Vec::new(),
        TrialsOutcome::TooLarge => {
            remarks.push(too_many_jobs_message(&environment));
            Vec::new()
        }
    };
    remarks.extend(remote_io_remark(&plan, &tried));
    let mut text = String::new();
    for remark in &remarks {
        writeln!(text, "{remark}")?;
    }
    text.push_str(&format_table(&plan, untimed)?);
    for tried in &tried {
        text.push_str(&describe_trial(tried));
    }
    if let Some(choice) = &plan.choice {
        write!(text, "\nchoice: {}: {}", choice.strategy, choice.reason)?;
    }
    let shown = PlanOutput {
        plan: &plan,
        environment: &environment,
        remarks: &remarks,
        trials: &tried,
    };
    output.print_result(&text, &shown)?;
    match (&plan.choice, &plan.refusal) {
        (None, Some(refusal)) => bail!("no choice: {refusal}"),
        _ => Ok(()),
    }
}

/// What is said of a workload that is too large to be simulated.
fn too_many_jobs_message(environment: &Environment) -> String {
    let caveat = match environment.mtbf_s {
        None => "",
        Some(_) => "; its times ignore node failures",
    };
    format!("too many jobs, or too many nodes with caches, to simulate: the model chooses{caveat}")
}

/// What is never chosen, but may be what the user wants.
fn remote_io_remark(plan: &Plan, tried: &[TrialResult]) -> Option<String> {
    let chosen = plan.choice.as_ref()?.strategy;
    let predicted = |strategy| {
        let mut candidates = plan.candidates.iter();
        let found = candidates.find(|it| it.allocation.strategy == strategy)?;
        found.predicted_s
    };
    let simulated = |strategy| {
        let found = tried.iter().find(|tried| tried.strategy == strategy)?;
        found.simulated_s
    };
    // Times of the model and of simulations are not compared with each other.
    let (remote_s, chosen_s, source) = match simulated(chosen) {
        Some(chosen_s) => (simulated(Strategy::Remote)?, chosen_s, "in the simulation"),
        None => {
            let (remote_s, chosen_s) = (predicted(Strategy::Remote)?, predicted(chosen)?);
            (remote_s, chosen_s, "by the model")
        }
    };
    (remote_s < chosen_s).then(|| {
        format!(
            "{source} remote I/O takes {remote_s:.0} s, less than any strategy with data on nodes; \
             use `bafs run --remote-io` if the home server can serve every read"
        )
    })
}

/// Those of the file, else those that the catalog lists.
async fn load_machines(args: &PlanArgs) -> Result<Environment> {
    let Some(path) = &args.environment else {
        return live_environment::load_environment(args).await;
    };
    check_exclusive_sources(args)?;
    let declared = LinkRates::parse_rates(&args.home_rate, &args.local_rate)?;
    Ok(read_environment(path)?.with_rates(declared.home, declared.local))
}

/// Refuses arguments that name a cluster beside those that say what it is like. Variables, which
/// are for all commands, do not count.
fn check_exclusive_sources(args: &PlanArgs) -> Result<()> {
    let identity = args.identity.as_deref().map(Path::as_os_str);
    let catalog = args.catalog.as_deref().map(OsStr::new);
    for (name, variable, given) in [
        ("--identity", "BAFS_IDENTITY", identity),
        ("--catalog", "BAFS_CATALOG", catalog),
    ] {
        if given.is_some() && given != std::env::var_os(variable).as_deref() {
            bail!("--environment and {name} exclude each other; give one of them");
        }
    }
    Ok(())
}

/// What machines get.
#[derive(Serialize)]
struct PlanOutput<'p> {
    environment: &'p Environment,
    remarks: &'p [String],
    /// What was simulated, because the model alone cannot tell.
    trials: &'p [TrialResult],
    #[serde(flatten)]
    plan: &'p Plan,
}

pub(crate) fn read_environment(path: &Path) -> Result<Environment> {
    let text = input_file::read_text(path, Environment::FILE_BYTES_MAX);
    let text = text.context("the environment")?;
    Environment::parse(&text).map_err(|e| anyhow!("{}: {e}", path.display()))
}

/// Refuses a workflow of which a job fits on no node.
pub(crate) fn check_processors(workflow: &Workflow, environment: &Environment) -> Result<()> {
    match find_oversized_job(workflow, environment) {
        Some((_, why)) => bail!(why),
        None => Ok(()),
    }
}

/// The place of the first job that fits on no node, and why.
pub(crate) fn find_oversized_job(
    workflow: &Workflow,
    environment: &Environment,
) -> Option<(usize, String)> {
    let largest = environment.nodes.iter().map(|kind| kind.cpus).max();
    let largest = largest.unwrap_or(0);
    let at = workflow.jobs.iter().position(|job| job.cpus > largest)?;
    let job = &workflow.jobs[at];
    let why = format!(
        "job '{}' needs {} processors, but the largest node has {largest}",
        job.name, job.cpus
    );
    Some((at, why))
}

/// What is planned.
struct PlanRequest {
    shape: Shape,
    /// To simulate candidates with.
    workload: PlanWorkload,
    /// What there is to say about how the shape was found.
    remarks: Vec<String>,
}

enum PlanWorkload {
    /// Its workflow is made when it is needed: it may be large.
    Canonical(CanonicalWorkload),
    /// A workflow, and what its shape leaves in doubt.
    Workflow(Workflow, TrialScope),
}

fn parse_request(args: &PlanArgs) -> Result<PlanRequest> {
    let path = match (&args.canonical, &args.workflow) {
        (Some(text), _) => {
            let canonical =
                CanonicalWorkload::parse(text).map_err(|e| anyhow!("--canonical: {e}"))?;
            return Ok(PlanRequest {
                shape: canonical.shape(),
                workload: PlanWorkload::Canonical(canonical),
                remarks: Vec::new(),
            });
        }
        (None, Some(path)) => path,
        (None, None) => bail!("give a workflow file or --canonical"),
    };
    let workflow = workflow_file::load_workflow(path, &HomeView::from_environment(path))?;
    if workflow.jobs.is_empty() {
        bail!("{} has no jobs to plan", path.display());
    }
    let mut planned = request_for_workflow(workflow, args.variability);
    if let PlanWorkload::Workflow(workflow, _) = &planned.workload {
        planned.remarks.extend(unknown_sizes_remark(workflow));
    }
    Ok(planned)
}

fn request_for_workflow(workflow: Workflow, variability: f64) -> PlanRequest {
    match CanonicalWorkload::recognise(&workflow, variability) {
        Ok(canonical) => {
            let found = format!(
                "canonical: {} pipelines of {} jobs",
                canonical.width, canonical.depth
            );
            PlanRequest {
                shape: canonical.shape(),
                workload: PlanWorkload::Workflow(workflow, TrialScope::Ties),
                remarks: vec![found],
            }
        }
        Err(why) => {
            let (shape, approximations) = Shape::from_largest_levels(&workflow, variability);
            let mut remarks = vec![format!("{why}; predicted by the largest level")];
            remarks.extend(approximations);
            PlanRequest {
                shape,
                workload: PlanWorkload::Workflow(workflow, TrialScope::All),
                remarks,
            }
        }
    }
}

fn unknown_sizes_remark(workflow: &Workflow) -> Option<String> {
    /// More are not named.
    const VOLUMES_SHOWN_MAX: usize = 3;
    let unknown = workflow.volumes.iter().filter(|v| v.size_bytes == 0);
    let names = unknown
        .clone()
        .take(VOLUMES_SHOWN_MAX)
        .map(|v| format!("'{}'", v.name));
    let mut names = names.collect::<Vec<_>>().join(", ");
    let unknown = unknown.count();
    if unknown > VOLUMES_SHOWN_MAX {
        names += ", …";
    }
    (unknown > 0).then(|| {
        format!(
            "{unknown} volumes of unknown size ({names}) count as empty, so some strategies may \
             not be feasible; write a size such as 10 MB instead of 'unknown'"
        )
    })
}

/// The candidates that are in doubt, simulated, and remote I/O beside them where it is faster.
fn simulate_candidates(
    plan: &mut Plan,
    work: PlanWorkload,
    environment: &Environment,
) -> Result<TrialsOutcome> {
    let load = LoadModel::Declared {
        variability_ppm: (plan.shape.variability * 1e6).round() as u64,
    };
    let (jobs, doubt) = match &work {
        PlanWorkload::Canonical(canonical) => (canonical.jobs(), TrialScope::Ties),
        PlanWorkload::Workflow(workflow, doubt) => (workflow.jobs.len() as u64, *doubt),
    };
    let workflow = || match &work {
        PlanWorkload::Canonical(canonical) => build_canonical_workflow(canonical),
        PlanWorkload::Workflow(workflow, _) => workflow.clone(),
    };
    let doubts = decide_by_simulation(plan, doubt, (jobs, workflow), environment, &load);
    let doubts = doubts.map_err(|stuck| anyhow!("cannot simulate a strategy: {stuck}"))?;
    let TrialsOutcome::Completed(mut tried) = doubts else {
        return Ok(doubts);
    };
    let remote = compare_remote_io(plan, &tried, (jobs, workflow), environment, &load);
    tried.extend(remote);
    Ok(TrialsOutcome::Completed(tried))
}

fn describe_trial(tried: &TrialResult) -> String {
    let name = tried.strategy;
    match (tried.simulated_s, &tried.failure) {
        (Some(seconds), _) => format!("simulated {name:<11} {seconds:.0} s\n"),
        (None, Some(why)) => format!("simulated {name:<11} failed: {why}\n"),
        (None, None) => format!("simulated {name:<11} stopped early: slower than the best\n"),
    }
}

/// The strategies; `untimed` stands where no time is predicted.
fn format_table(plan: &Plan, untimed: &str) -> Result<String> {
    let mut text = String::new();
    writeln!(
        text,
        "{:<11} {:<20} {:<15} {:>11} {:>8} {:>8} {:>9} {:>12}",
        "strategy", "possible", "order", "concurrency", "running", "barriers", "refetches", "time"
    )?;
    for candidate in &plan.candidates {
        write_row(&mut text, candidate, untimed)?;
    }
    Ok(text)
}

fn write_row(text: &mut String, candidate: &StrategyCandidate, untimed: &str) -> Result<()> {
    let allocation = &candidate.allocation;
    let order = match allocation.traversal {
        Traversal::Any if allocation.strategy == Strategy::Need => "no plan",
        Traversal::Any => "any",
        Traversal::BreadthFirst => "breadth first",
        Traversal::DepthFirst => "depth first",
        Traversal::PartialSlices => "partial slices",
    };
    let possible = match allocation.shortage {
        None if allocation.strategy == Strategy::Remote => "on request".to_owned(),
        None if allocation.is_exact => "yes".to_owned(),
        None => "likely".to_owned(),
        Some(Shortage::Total { missing_bytes }) => format!("lacks {}", format_bytes(missing_bytes)),
        Some(Shortage::Node { missing_bytes }) => {
            format!("node lacks {}", format_bytes(missing_bytes))
        }
        Some(Shortage::Cluster { missing_bytes }) => {
            format!("cluster lacks {}", format_bytes(missing_bytes))
        }
        Some(Shortage::Files { batch_files }) => format!("no space for {batch_files} files"),
        Some(Shortage::Placement { missing_volumes }) => format!("{missing_volumes} do not fit"),
    };
    let possible = match allocation.shortage {
        None | Some(Shortage::Files { .. }) => possible,
        Some(_) if allocation.is_exact => possible,
        Some(Shortage::Placement { .. }) => format!("perhaps {possible}"),
        Some(_) => format!("{possible} at most"),
    };
    if !allocation.is_possible() {
        writeln!(text, "{:<11} {possible:<20} {order}", allocation.strategy)?;
        return Ok(());
    }
    // Without a plan there is a model only where everything fits.
    let untimed = match allocation.strategy {
        Strategy::Need => "-",
        _ => untimed,
    };
    let time = candidate
        .predicted_s
        .map_or_else(|| untimed.to_owned(), |seconds| format!("{seconds:.0} s"));
    writeln!(
        text,
        "{:<11} {possible:<20} {order:<15} {:>11} {:>8} {:>8} {:>9} {time:>12}",
        allocation.strategy,
        allocation.concurrency,
        candidate.running_pipelines,
        allocation.barriers,
        allocation.refetches,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    fn parse_test_workflow(text: &str) -> Workflow {
        let none = |_: &str| Err("no files".to_owned());
        let parsed = bafs_workflow::parse_workflow("w.bafs", text, &none);
        parsed.unwrap().workflow
    }

    #[test]
    fn job_wider_than_every_node_is_named() {
        let text = include_str!("../../examples/environments/thesis.toml");
        let environment = Environment::parse(text).unwrap();
        let wide = parse_test_workflow("job wide {\nexecutable = x\nrequest_cpus = 2\n}\n");
        let error = check_processors(&wide, &environment).unwrap_err();
        let expected = "job 'wide' needs 2 processors, but the largest node has 1";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn environment_file_excludes_cluster_options() {
        let check = |more: &[&str]| {
            let words = ["bafs", "plan", "w.bafs", "--environment", "e.toml"];
            let cli = Cli::try_parse_from(words.iter().chain(more)).unwrap();
            let CliCommand::Plan(args) = cli.command else {
                panic!("another command");
            };
            check_exclusive_sources(&args)
        };
        check(&[]).unwrap();
        for name in ["--identity", "--catalog"] {
            let error = check(&[name, "no-such-thing:1"]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[tokio::test]
    async fn a_plan_without_a_choice_fails() {
        let environment = tempfile::NamedTempFile::new().unwrap();
        let text = include_str!("../../examples/environments/thesis.toml");
        std::fs::write(environment.path(), text.replace("5 GB", "5 MB")).unwrap();
        let path = environment.path().to_str().unwrap();
        let canonical = "width=9,depth=2,batch=1GB,private=1GB,run=5s";
        let words = [
            "bafs",
            "plan",
            "--canonical",
            canonical,
            "--environment",
            path,
        ];
        let CliCommand::Plan(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("another command");
        };
        let error = run_plan(&args, Printer::new(false))
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("no choice: no node can hold the largest"),
            "{error}"
        );
    }

    #[test]
    fn plan_reports_unknown_sizes() {
        let text = "volume v scratch unknown\njob a {\nexecutable = x\nruntime = 9 s\n}\n\
                    mount v a /v\n";
        let told = unknown_sizes_remark(&parse_test_workflow(text)).unwrap();
        assert!(told.starts_with("1 volumes of unknown size"), "{told}");
        let known = parse_test_workflow(&text.replace("unknown", "1 MB"));
        assert_eq!(unknown_sizes_remark(&known), None);
    }

    #[test]
    fn environment_must_be_a_regular_file() {
        let error = read_environment(Path::new("/dev/zero")).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("is not a regular file"), "{error}");
    }

    #[test]
    fn failed_candidate_is_not_called_slow() {
        let tried = |failed: Option<&str>| TrialResult {
            strategy: Strategy::All,
            simulated_s: None,
            seeds: 0,
            failure: failed.map(str::to_owned),
        };
        assert!(describe_trial(&tried(Some("no node"))).contains("failed: no node"));
        assert!(describe_trial(&tried(None)).contains("slower than the best"));
    }

    #[test]
    fn faster_remote_io_is_suggested() {
        let thesis = include_str!("../../examples/environments/thesis.toml");
        let mut environment = Environment::parse(thesis).unwrap();
        let told = |environment: &Environment, text: &str| {
            let shape = CanonicalWorkload::parse(text).unwrap().shape();
            remote_io_remark(&plan_workload(shape, environment), &[])
        };
        let mixed = "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1";
        assert_eq!(told(&environment, mixed), None);
        // Room for hardly more than one database: each part of the pipelines fetches all of them.
        (
            environment.nodes[0].count,
            environment.nodes[0].storage_bytes,
        ) = (5, 3_000_000_000);
        let environment = environment.with_rates(Some(50_000_000), Some(1_000_000_000));
        let large = "width=100,depth=7,batch=13500MB,private=300MB,run=3000s,var=3";
        let told = told(&environment, large).unwrap();
        assert!(told.contains("--remote-io"), "{told}");
    }

    #[test]
    fn table_shows_possible_strategies_and_shortages() {
        let environment =
            Environment::parse(include_str!("../../examples/environments/thesis.toml"));
        let text = "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1";
        let shape = CanonicalWorkload::parse(text).unwrap().shape();
        let table = format_table(&plan_workload(shape, &environment.unwrap()), "never").unwrap();
        for (strategy, expected) in [
            ("All ", "lacks 1.025 TB"),
            ("AllBatch", "25       25        0         0"),
            ("Slice", "60       50        4         0"),
            ("Minimal", "205       50"),
            ("Remote", "on request"),
        ] {
            let line = table
                .lines()
                .find(|line| line.starts_with(strategy))
                .unwrap();
            assert!(line.contains(expected), "{line}");
        }
    }
}
