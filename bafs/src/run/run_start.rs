//! From the command to a run that begins: one at a time, what it does, and what a run before it
//! left under way. Starts no job.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use bafs_proto::ErrorCode;
use bafs_proto::message::Role;
use bafs_sched::driver::{self, CancelHandle, EarlierRun, RunOptions};
use bafs_sched::earlier_work::EarlierWork;
use bafs_sched::{NullSelector, RunLimit, Settings};
use bafs_server::serving::RunningServer;
use bafs_workflow::{CheckedWorkflow, Workflow};

use super::run_lock::{RunLock, journals_to_lock};
use super::run_plan::{PlannedRun, RunPlace, RunPlan, describe_resumed, plan_run};
use crate::args::RunArgs;
use crate::home_view::HomeView;
use crate::init;
use crate::output::{Printer, print_notice};

/// A run that begins, or goes on.
#[derive(Debug)]
pub(super) struct RunStart {
    /// What earlier runs did; nothing when the last one goes on.
    pub(super) work: Option<EarlierWork>,
    /// Held until the run ends.
    _locks: Vec<RunLock>,
}

/// Where a run is to be.
#[derive(Clone, Copy)]
pub(super) struct RunSetting<'s> {
    pub(super) journal: &'s Path,
    pub(super) homes: &'s HomeView,
    /// Identity and catalog of a cluster that stays; none for one that ends with the run.
    pub(super) cluster: Option<(&'s Path, &'s str)>,
    /// Whether the last run, which was interrupted, has just gone on to its end.
    pub(super) follows_resumed: bool,
}

/// Prepares a run. Nothing when there is none: for want of work, or because the user wanted to know
/// only.
///
/// # Errors
/// Another process runs the workflow; see also [`plan_run`].
pub(super) async fn prepare_run(
    args: &RunArgs,
    checked: &CheckedWorkflow,
    setting: RunSetting<'_>,
    output: Printer,
) -> Result<Option<RunStart>> {
    let (locks, holder) = lock_run(args, setting)?;
    let place = RunPlace {
        journal: setting.journal,
        homes: setting.homes,
        is_temporary: setting.cluster.is_none(),
        ignores_open_runs: false,
    };
    let workflow = &checked.workflow;
    let look = |place| tokio::task::block_in_place(|| plan_run(args, checked, place));
    let mut plan = look(place)?;
    if let RunPlan::CancelFirst(open, why) = plan {
        if let (Some(cluster), false) = (setting.cluster, args.dry_run) {
            print_notice(&format!(
                "the run before was interrupted, and {why}: its jobs are stopped first"
            ));
            cancel_run(open, cluster, setting.journal).await?;
        }
        let ignores_open_runs = true;
        plan = look(RunPlace {
            ignores_open_runs,
            ..place
        })?;
    }
    let planned = match plan {
        RunPlan::Begin(planned) => planned,
        RunPlan::Resume(open) | RunPlan::CancelFirst(open, _) => {
            if args.dry_run {
                let (text, value) = describe_open_run(&open, holder);
                output.print_result(&text, &value)?;
                return Ok(None);
            }
            return Ok(Some(RunStart {
                work: None,
                _locks: locks,
            }));
        }
    };
    let is_over = args.dry_run || planned.is_nothing();
    if setting.follows_resumed && !is_over {
        print_notice(&format!(
            "changed since the interrupted run had done it: {}",
            planned.describe()
        ));
    } else if !setting.follows_resumed {
        tell_plan(args, workflow, &planned, output)?;
    }
    Ok((!is_over).then_some(RunStart {
        work: Some(planned.work),
        _locks: locks,
    }))
}

/// Locks a workflow. A dry run locks nothing, and is told who has the lock.
fn lock_run(args: &RunArgs, setting: RunSetting<'_>) -> Result<(Vec<RunLock>, Option<String>)> {
    let journals = journals_to_lock(
        &args.workflow,
        setting.journal,
        args.journal.is_some(),
        setting.cluster.is_some(),
    );
    if !args.dry_run {
        return Ok((RunLock::acquire_all(&journals)?, None));
    }
    let mut holders = journals.iter().filter_map(|it| RunLock::find_holder(it));
    let holder = holders.next();
    if let Some(holder) = &holder {
        print_notice(&format!(
            "{holder} runs this workflow now; a run that begins later finds more done than is told \
             here"
        ));
    }
    Ok((Vec::new(), holder))
}

/// What a dry run says of a run that is not over, and that a process may run now.
fn describe_open_run(open: &EarlierRun, holder: Option<String>) -> (String, serde_json::Value) {
    let (mut text, mut value) = describe_resumed(open);
    if let Some(holder) = holder {
        let (done, total) = (&value["up_to_date"], &value["jobs_total"]);
        text = format!("{holder} runs this workflow: {done} of {total} jobs are done");
        value["resumes"] = false.into();
        value["running"] = holder.into();
    }
    (text, value)
}

/// The home of the programs beside the workflow, if it names any. A dry run needs their copies
/// only.
///
/// # Errors
/// A file cannot be copied, or the home does not start.
pub(super) async fn serve_programs(
    homes: &HomeView,
    args: &RunArgs,
    (identity, catalog): (&Path, &str),
) -> Result<Option<RunningServer>> {
    let HomeView::Cluster(cluster) = homes else {
        return Ok(None);
    };
    let beside = cluster.beside();
    let has_programs = tokio::task::block_in_place(|| beside.copy_files())?;
    match has_programs && !args.dry_run {
        true => beside.serve(identity, catalog).await.map(Some),
        false => Ok(None),
    }
}

/// Says what runs and why: all of it if nothing else is wanted.
fn tell_plan(
    args: &RunArgs,
    workflow: &Workflow,
    planned: &PlannedRun,
    output: Printer,
) -> Result<()> {
    if args.dry_run {
        let text = planned.describe_jobs(workflow);
        return output.print_result(&text, &planned.to_json(workflow));
    }
    if planned.is_nothing() {
        let text = format!("{}: nothing to run: {}", workflow.name, planned.describe());
        return output.print_result(&text, &planned.empty_report(workflow));
    }
    if planned.has_earlier() {
        print_notice(&planned.describe());
    }
    Ok(())
}

/// Ends a run that was interrupted: kills its jobs, and deletes its volumes but for those that it
/// keeps.
async fn cancel_run(open: EarlierRun, cluster: (&Path, &str), journal: &Path) -> Result<()> {
    let (identity, catalog) = cluster;
    let cancel = CancelHandle::default();
    cancel.request_cancel();
    let options = RunOptions {
        catalog: catalog.to_owned(),
        identity: init::load_identity(identity, Role::Scheduler)?,
        journal: PathBuf::from(journal),
        log_directory: None,
        settings: Settings::default(),
        file_home: None,
        strategy_selector: Arc::new(NullSelector),
        earlier_work: None,
        cancel_handle: cancel,
        limit: RunLimit::default(),
    };
    match driver::run_workflow(open.workflow, options, |_| {}).await {
        // The nodes are of another cluster: nothing of the run is there.
        Err(error) if error.code == ErrorCode::PeerRefused => Ok(()),
        ended => Ok(ended.map(drop)?),
    }
}
