//! `bafs run`: a workflow on a cluster that exists, or on a throw-away one.

mod cluster_spec;
mod fault_check;
mod foreign_homes;
mod home_state;
mod host_files;
mod kept_work;
mod local_report;
mod outcome_text;
mod run_lock;
mod run_plan;
mod run_start;
mod sent_set;
mod service_link;
mod stop;
mod strategy_plan;
mod target_check;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use bafs_client::signals::wait_for_stop_signal;
use bafs_proto::identity::Identity;
use bafs_proto::message::Role;
use bafs_sched::driver::{self, CancelHandle, RunOptions};
use bafs_sched::earlier_work::EarlierWork;
use bafs_sched::io::homes::FileHome;
use bafs_sched::io::journal;
use bafs_sched::report::RunReport;
use bafs_sched::{
    AllocationRules, ClusterLifetime, IoMode, JobStartOrder, Outcome, Progress, RunLimit, Settings,
};
use bafs_sim::strategy_selector::ModelSelector;
use bafs_workflow::{CheckedWorkflow, JobIndex, Workflow, parse_duration};

use self::cluster_spec::{build_cluster_spec, named_cluster};
use self::fault_check::check_faults;
pub(crate) use self::outcome_text::describe_outcome;
pub(crate) use self::run_lock::is_run_locked;
use self::run_start::{RunSetting, prepare_run, serve_programs};
use self::service_link::ServiceLink;
use self::strategy_plan::{build_strategy_selector, plan_from_learned};
use crate::args::{RunArgs, StartOrder, UsageError};
use crate::client::ClusterClient;
use crate::cluster::Cluster;
use crate::home_view::HomeView;
use crate::init;
use crate::learned;
use crate::logs;
use crate::machine_check::check_machine;
use crate::metrics::{self, PublishedProgress};
use crate::output::{Printer, print_notice};
use crate::page;
use crate::pool::{PoolCluster, RunPool, RunPoolSpec, end_abandoned_pools};
use crate::progress_display::ProgressDisplay;
use crate::serve;
use crate::workflow_file;

/// Space of each node of a throw-away cluster when nobody says otherwise.
const NODE_SIZE_DEFAULT: &str = "10 GB";

/// A run waits so long for nodes that a batch system starts: longer than most queues.
const QUEUE_TIMEOUT_MS: u64 = 7 * 24 * 3_600_000;

/// How a workflow is run on a throw-away cluster.
#[derive(Debug, Clone)]
pub(crate) struct ThrowAwayRun {
    /// File of the journal.
    pub(crate) journal: PathBuf,
    /// Directory for what jobs print, if that is kept.
    pub(crate) logs: Option<PathBuf>,
    /// How it is run.
    pub(crate) settings: Settings,
    /// For people or for machines.
    pub(crate) output: Printer,
    /// Jobs after which the run kills a node.
    pub(crate) jobs_before_kill: Option<u32>,
    /// Where progress is published.
    pub(crate) published_progress: PublishedProgress,
    /// Gives the run up.
    pub(crate) cancel: CancelHandle,
    /// The batch jobs that are its nodes.
    pub(crate) pool: Option<RunPool>,
    /// What earlier runs of the workflow did.
    pub(crate) earlier_work: Option<EarlierWork>,
    /// Address of its page, if it has one.
    pub(crate) page: Option<String>,
}

/// A run that is over.
struct EndedRun {
    report: RunReport,
    /// Whether it was interrupted before, and went on.
    is_resumed: bool,
}

impl EndedRun {
    fn is_resumed_to_its_end(&self) -> bool {
        self.is_resumed && self.report.outcome == Outcome::Complete
    }
}

/// Runs the command.
pub(crate) async fn run_workflow(args: RunArgs, output: Printer) -> Result<ExitCode> {
    // Before anything is asked for or started.
    args.resource_timeout
        .as_deref()
        .map(parse_timeout_ms)
        .transpose()?;
    kept_work::parse_keep_ms(&args)?;
    let homes = home_view(&args)?;
    let checked = workflow_file::load_checked(&args.workflow, &homes)?;
    let ended = match args.has_own_cluster() {
        true => run_on_throw_away_cluster(&args, checked, output).await?,
        false => {
            let ended = run_on_existing_cluster(&args, checked.clone(), &homes, output, false);
            let ended = ended.await?;
            // What it had done before the interruption may have changed since, and its inputs.
            match ended.as_ref().is_some_and(EndedRun::is_resumed_to_its_end) {
                true => run_on_existing_cluster(&args, checked, &homes, output, true)
                    .await?
                    .or(ended),
                false => ended,
            }
        }
    };
    let Some(EndedRun { report, .. }) = ended else {
        return Ok(ExitCode::SUCCESS);
    };
    let hints =
        outcome_text::describe_logs(&args, &report) + &kept_work::describe_kept(&args, &report);
    output.print_result(&(describe_outcome(&report) + &hints), &report)?;
    Ok(if report.outcome == Outcome::Complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Where the workflow's patterns of paths look.
fn home_view(args: &RunArgs) -> Result<HomeView> {
    let cluster = args.identity.as_ref().zip(args.catalog.as_ref());
    match (args.has_own_cluster(), &args.export, cluster) {
        (true, Some(export), _) => Ok(HomeView::Directory(serve::resolve_export(export)?)),
        // What is wrong with the cluster is told when the run connects.
        (false, _, Some((identity, catalog))) => {
            HomeView::of_cluster(identity, catalog, &args.workflow)
                .or_else(|_| Ok(HomeView::beside(&args.workflow)))
        }
        _ => Ok(HomeView::beside(&args.workflow)),
    }
}

fn build_settings(args: &RunArgs, workflow: &Workflow) -> Result<Settings> {
    let usual = Settings::default();
    let queue_timeout_ms = |usual_ms| {
        if args.pool.is_some() {
            QUEUE_TIMEOUT_MS
        } else {
            usual_ms
        }
    };
    let timeout_ms = args
        .resource_timeout
        .as_deref()
        .map(parse_timeout_ms)
        .transpose()?;
    Ok(Settings {
        io: match (args.remote_io, args.cache_only) {
            (true, _) => IoMode::Remote,
            (false, true) => IoMode::CachesOnly,
            (false, false) => IoMode::Volumes,
        },
        user: args.local.is_none().then(|| user_name(args)),
        allocation_rules: order_rules(args.order),
        nodes_timeout_ms: timeout_ms.unwrap_or_else(|| queue_timeout_ms(usual.nodes_timeout_ms)),
        fleet_settle_ms: timeout_ms
            .map_or(usual.fleet_settle_ms, |ms| ms.max(usual.fleet_settle_ms)),
        space_timeout_ms: timeout_ms.unwrap_or_else(|| queue_timeout_ms(usual.space_timeout_ms)),
        keep_ms: kept_work::parse_keep_ms(args)?,
        extract_timeout_ms: timeout_ms.unwrap_or(usual.extract_timeout_ms),
        strategy_selector: args
            .plan
            .as_deref()
            .map(|path| build_strategy_selector(path, workflow))
            .transpose()?,
        policies: args.policies.over(usual.policies.clone())?,
        cluster: match args.local {
            Some(_) => ClusterLifetime::OneRun,
            None => ClusterLifetime::BeyondRun,
        },
        ..usual
    })
}

fn parse_timeout_ms(text: &str) -> Result<u64> {
    match parse_duration(text) {
        Ok(seconds) => Ok(seconds.saturating_mul(1000)),
        Err(error) => Err(UsageError::from_reason(format!(
            "--resource-timeout is invalid: {error}"
        ))),
    }
}

/// Whose run it is.
fn user_name(args: &RunArgs) -> String {
    let named = |name| std::env::var(name).ok().filter(|user| !user.is_empty());
    let user = args.user.clone();
    let user = user.or_else(|| named("USER")).or_else(|| named("LOGNAME"));
    user.unwrap_or_else(|| "nobody".to_owned())
}

fn order_rules(order: StartOrder) -> Option<AllocationRules> {
    AllocationRules::with_order(match order {
        StartOrder::Need => JobStartOrder::Need,
        StartOrder::BreadthFirst => JobStartOrder::BreadthFirst,
        StartOrder::DepthFirst => JobStartOrder::DepthFirst,
    })
}

async fn run_on_throw_away_cluster(
    args: &RunArgs,
    checked: CheckedWorkflow,
    output: Printer,
) -> Result<Option<EndedRun>> {
    let workflow = &checked.workflow;
    local_report::check_home_names(workflow)?;
    let spec = build_cluster_spec(args, args.local.unwrap_or(0))?;
    let homes = HomeView::Directory(spec.export.clone());
    let journal = local_report::choose_journal(args.journal_path(), &spec.export, workflow);
    let start = match &journal {
        None => {
            let all = (0u32..).take(workflow.jobs.len()).map(JobIndex).collect();
            check_faults(args, &checked, &homes, &all, &BTreeMap::new())?;
            None
        }
        Some(journal) => {
            let setting = RunSetting {
                journal,
                homes: &homes,
                cluster: None,
                follows_resumed: false,
            };
            let Some(start) = prepare_run(args, &checked, setting, output).await? else {
                return Ok(None);
            };
            Some(start)
        }
    };
    if args.keep.is_some() {
        print_notice("--keep has no effect: the nodes of the temporary cluster end with the run");
    }
    if args.local.is_some() {
        tokio::task::block_in_place(check_machine)?;
    }
    let asked = wait_for_stop_signal();
    let mut cluster = tokio::task::block_in_place(|| Cluster::start(&spec))?;
    let mut way = ThrowAwayRun {
        journal: journal.unwrap_or_else(|| cluster.directory().join("journal")),
        logs: local_report::choose_logs_directory(
            logs::logs_directory(&args.journal_path()),
            &spec.export,
            workflow,
        ),
        settings: tokio::task::block_in_place(|| build_settings(args, workflow))?,
        output,
        jobs_before_kill: None,
        published_progress: publish_progress(args)?,
        cancel: CancelHandle::default(),
        pool: None,
        earlier_work: start.as_ref().and_then(|start| start.work.clone()),
        page: args.page.page.clone(),
    };
    way.pool = start_own_pool(args, workflow, &cluster, &way.cancel).await?;
    let run = run_on_cluster(checked.workflow, &mut cluster, &way);
    let hear = |_| {
        print_notice(
            "stopping the jobs and the temporary cluster; press Ctrl-C again to end at once and \
             lose all results that are not at home",
        );
    };
    let ended = stop::run_until_stopped(run, &way.cancel, asked, hear).await;
    close_pool(way.pool.as_ref()).await;
    let Some(report) = ended else {
        bail!("interrupted; the temporary cluster was removed");
    };
    let mut report = report?;
    learned::learn_from_run(&args.learned, None, &way.journal, &report);
    keep_unsent_results(&mut report, &mut cluster);
    Ok(Some(EndedRun {
        report,
        is_resumed: false,
    }))
}

/// Leaves the directory of the cluster where it is if results are only there, and says so.
fn keep_unsent_results(report: &mut RunReport, cluster: &mut Cluster) {
    let places = local_report::unsent_result_paths(report, cluster.directory());
    let is_kept = !places.is_empty() && cluster.keep_files().is_ok();
    let kept = is_kept.then(|| cluster.directory());
    if let Some(kept) = kept {
        print_notice(&local_report::describe_kept_results(&places, kept));
    }
    local_report::rewrite_report(report, kept);
}

/// The pool that a run asks for, for the cluster with an identity and a catalog.
async fn start_pool(
    args: &RunArgs,
    workflow: &Workflow,
    cluster: PoolCluster<'_>,
    journal: &Path,
    run: &CancelHandle,
) -> Result<Option<RunPool>> {
    let Some(size) = args.pool else {
        return Ok(None);
    };
    let spec = RunPoolSpec {
        size,
        node_size: args.node_size.as_deref().unwrap_or(NODE_SIZE_DEFAULT),
        pilots: &args.pilots,
        cluster,
        journal,
    };
    end_abandoned_pools().await;
    RunPool::start(spec, workflow, run.clone()).map(Some)
}

/// The pool of a cluster that does not outlive its run; so neither does the pool.
async fn start_own_pool(
    args: &RunArgs,
    workflow: &Workflow,
    cluster: &Cluster,
    run: &CancelHandle,
) -> Result<Option<RunPool>> {
    let journal = args.journal.clone();
    let journal = journal.unwrap_or_else(|| cluster.directory().join("journal"));
    let identity = cluster.identity();
    let cluster = PoolCluster::temporary(&identity, cluster.catalog_address());
    start_pool(args, workflow, cluster, &journal, run).await
}

/// The run is over; pilots that cannot be ended are no failure of it.
async fn close_pool(pool: Option<&RunPool>) {
    if let Some(pool) = pool
        && let Err(error) = pool.close().await
    {
        print_notice(&format!("{error:#}"));
    }
}

/// Publishes the progress of a run, if it shall be.
fn publish_progress(args: &RunArgs) -> Result<PublishedProgress> {
    let shown = PublishedProgress::default();
    if let Some(at) = &args.metrics {
        let at = metrics::start_endpoint(at, shown.read_figures())?;
        eprintln!("metrics at http://{at}/metrics");
    }
    Ok(shown)
}

/// Runs a workflow on a throw-away cluster.
pub(crate) async fn run_on_cluster(
    workflow: Workflow,
    cluster: &mut Cluster,
    way: &ThrowAwayRun,
) -> Result<RunReport> {
    let client = ClusterClient::connect(&cluster.identity(), cluster.catalog_address())?;
    let root = cluster.export().to_string_lossy().into_owned();
    let options = RunOptions {
        catalog: cluster.catalog_address().to_owned(),
        identity: client.identity.clone(),
        journal: way.journal.clone(),
        log_directory: way.logs.clone(),
        settings: way.settings.clone(),
        file_home: Some(FileHome {
            address: cluster.home_address().to_owned(),
            root,
        }),
        strategy_selector: Arc::new(ModelSelector),
        earlier_work: way.earlier_work.clone(),
        cancel_handle: way.cancel.clone(),
        limit: RunLimit::default(),
    };
    let page = page::show_own_run(way.page.as_deref(), &options, client.clone())?;
    let display = ProgressDisplay::start(way.output, client);
    let mut jobs_until_kill = way.jobs_before_kill.map(u64::from);
    let progress = |progress: &Progress| {
        display.show_progress(progress);
        way.published_progress.publish(progress);
        if let Some(pool) = &way.pool {
            pool.report_progress(progress);
        }
        if jobs_until_kill.is_some_and(|jobs| progress.jobs_done >= jobs) {
            jobs_until_kill = None;
            kill_one_node(cluster);
        }
    };
    let report = driver::run_workflow(workflow, options, progress).await?;
    page::finish_page(page.as_ref()).await;
    Ok(report)
}

/// Kills the second node, or the only one: what `bafs demo --kill-node-after` promises.
fn kill_one_node(cluster: &mut Cluster) {
    let name = if cluster.address("n2").is_empty() {
        "n1"
    } else {
        "n2"
    };
    match cluster.kill(name) {
        Ok(()) => eprintln!("killed node {name} (SIGKILL)"),
        Err(error) => eprintln!("could not kill node {name}: {error:#}"),
    }
}

/// The settings of a run on a cluster that stays, with a plan from learned values if it begins.
async fn plan_settings(
    args: &RunArgs,
    workflow: &Workflow,
    cluster: (&Path, &str),
    begins: bool,
) -> Result<Settings> {
    let mut settings = tokio::task::block_in_place(|| build_settings(args, workflow))?;
    if args.plan.is_some() {
        return Ok(settings);
    }
    settings.strategy_selector = match begins {
        true => plan_from_learned(args, workflow, cluster).await,
        // A run that goes on keeps its plan.
        false => {
            let header = journal::read_header(&args.journal_path())?;
            header.settings.strategy_selector
        }
    };
    Ok(settings)
}

/// Runs a workflow, with a home for its programs for as long as that lasts. `follows_resumed` says
/// that the same run went on before, and that this one is for what changed meanwhile.
async fn run_on_existing_cluster(
    args: &RunArgs,
    checked: CheckedWorkflow,
    homes: &HomeView,
    output: Printer,
    follows_resumed: bool,
) -> Result<Option<EndedRun>> {
    let programs = serve_programs(homes, args, named_cluster(args)?).await?;
    let ended = run_with_programs(args, checked, homes, output, follows_resumed).await;
    if let Some(programs) = programs {
        programs.leave().await;
    }
    ended
}

async fn run_with_programs(
    args: &RunArgs,
    checked: CheckedWorkflow,
    homes: &HomeView,
    output: Printer,
    follows_resumed: bool,
) -> Result<Option<EndedRun>> {
    let cluster = named_cluster(args)?;
    let (identity_dir, catalog) = cluster;
    let identity: Identity = init::load_identity(identity_dir, Role::Scheduler)?;
    let journal = args.journal_path();
    let setting = RunSetting {
        journal: &journal,
        homes,
        cluster: Some(cluster),
        follows_resumed,
    };
    let Some(start) = prepare_run(args, &checked, setting, output).await? else {
        if !args.dry_run {
            service_link::tell_nothing_to_run(args.service_directory.as_deref());
        }
        return Ok(None);
    };
    let workflow = checked.workflow;
    let settings = plan_settings(args, &workflow, cluster, start.work.is_some()).await?;
    let asked = wait_for_stop_signal();
    let link = service_link::open_service_link(args.service_directory.as_deref())?;
    let cancel = CancelHandle::default();
    let options = RunOptions {
        catalog: catalog.to_owned(),
        identity,
        log_directory: Some(logs::logs_directory(&journal)),
        journal,
        settings,
        file_home: None,
        strategy_selector: Arc::new(ModelSelector),
        earlier_work: start.work.clone(),
        cancel_handle: cancel.clone(),
        limit: link.as_ref().map(ServiceLink::limit).unwrap_or_default(),
    };
    let of_pool = PoolCluster::lasting(identity_dir, catalog);
    let pool = start_pool(args, &workflow, of_pool, &options.journal, &cancel).await?;
    let client = ClusterClient::connect(identity_dir, catalog)?;
    let page = page::show_own_run(args.page.page.as_deref(), &options, client.clone())?;
    let display = ProgressDisplay::start(output, client);
    let left_ms = stop::volume_lifetime_left_ms(&options.settings);
    let shown = publish_progress(args)?;
    let progress = |progress: &Progress| {
        display.show_progress(progress);
        shown.publish(progress);
        if let Some(link) = &link {
            link.report_progress(progress);
        }
        if let Some(pool) = &pool {
            pool.report_progress(progress);
        }
    };
    let run = driver::run_workflow(workflow, options, progress);
    let hear = |asked| stop::tell_of_stop(asked, left_ms);
    let ended = stop::run_until_stopped(run, &cancel, asked, hear).await;
    close_pool(pool.as_ref()).await;
    let Some(report) = ended else {
        std::process::exit(130);
    };
    page::finish_page(page.as_ref()).await;
    let ended = EndedRun {
        report: report?,
        is_resumed: start.work.is_none(),
    };
    tell_end(args, catalog, link.as_ref(), &ended)?;
    Ok(Some(ended))
}

/// Tells the learned values and the service how a run ended.
fn tell_end(
    args: &RunArgs,
    catalog: &str,
    link: Option<&ServiceLink>,
    ended: &EndedRun,
) -> Result<()> {
    let report = &ended.report;
    learned::learn_from_run(&args.learned, Some(catalog), &args.journal_path(), report);
    // After a run that went on another one may follow, for what changed meanwhile.
    match link.filter(|_| !ended.is_resumed_to_its_end()) {
        Some(link) => link.report_outcome(report),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    /// Options of `bafs run`, as the command line understands them.
    fn parse_run_args(options: &[&str]) -> RunArgs {
        let words = [&["bafs", "run", "a.bafs"], options].concat();
        match Cli::try_parse_from(words)
            .expect("it is understood")
            .command
        {
            CliCommand::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn timeout_option_covers_nodes_space_and_results() {
        let text = "job a {\nexecutable = x\n}\n";
        let none = |_: &str| Err("no files".to_owned());
        let parsed = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = parsed.expect("a workflow").workflow;
        let waits = |options: &[&str]| {
            let settings = build_settings(&parse_run_args(options), &workflow).expect("settings");
            [
                settings.nodes_timeout_ms,
                settings.fleet_settle_ms,
                settings.space_timeout_ms,
                settings.extract_timeout_ms,
            ]
        };
        assert_eq!(waits(&["--resource-timeout", "2h"]), [7_200_000; 4]);
        assert_eq!(waits(&[]), [60_000, 5_000, 30_000, 12 * 3_600_000]);
        assert!(
            build_settings(&parse_run_args(&["--resource-timeout", "long"]), &workflow).is_err()
        );
    }

    /// What README says, too.
    #[test]
    fn abandoned_run_is_resumable_for_seven_minutes() {
        assert_eq!(
            stop::volume_lifetime_left_ms(&Settings::default()) / 60_000,
            7
        );
    }

    /// The environment may name a cluster while a throw-away one is asked for.
    #[test]
    fn local_option_is_accepted_beside_a_cluster() {
        let args = parse_run_args(&["--local", "4", "--identity", "x", "--catalog", "y:1"]);
        assert_eq!(args.local, Some(4));
    }
}
