//! The page and the API of runs: `bafs run --page` for the run of this process, `bafs page` for any
//! run by its journal. The journal is the one truth: both read it as everybody can.

mod advice;
mod connection_file;
mod followed_run;
mod job_output;
mod run_view;
mod traffic_meter;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bafs_api::{
    HistoryPage, JobDetails, LogView, MetricsView, PageServer, RunCommand, RunSource, RunSummary,
    RunView, start_server,
};
use bafs_client::signals::wait_for_stop_signal;
use bafs_proto::{Error, ErrorCode};
use bafs_queue::Requester;
use bafs_sched::driver::CancelHandle;
use serde_json::json;

use self::connection_file::ConnectionFile;
use self::followed_run::{FollowedRun, RunPlace};
use self::traffic_meter::TrafficMeter;
use crate::args::{PageArgs, UsageError};
use crate::client::ClusterClient;
use crate::history;
use crate::logs;
use crate::metrics::PublishedProgress;
use crate::output::{Printer, print_notice};

/// The run that is served first, whatever its id is.
const CURRENT_RUN: &str = "current";

/// Pages that are open learn of the end of a run within so long; nobody waits longer for them.
const FINISH_TIMEOUT: Duration = Duration::from_secs(3);

/// Shows a run until the user stops the program.
pub(crate) async fn show_page(args: &PageArgs, output: Printer) -> Result<()> {
    let journal = history::find_journal(&args.run)?;
    let place = RunPlace {
        logs: Some(logs::logs_directory(&journal)).filter(|logs| logs.is_dir()),
        journal,
        cancel: None,
        traffic: TrafficMeter::default(),
    };
    let page = RunPage::start(&args.address, place)?;
    let link = page.create_login_link();
    output.print_result(&page.describe(&link), &json!({"page": link}))?;
    wait_for_stop_signal().await;
    Ok(())
}

/// What a run needs to be shown by its own process.
pub(crate) struct OwnRun<'r> {
    /// Its journal, which need not exist yet.
    pub(crate) journal: &'r Path,
    /// Directory of what its jobs print.
    pub(crate) logs: Option<&'r Path>,
    /// Cancels it.
    pub(crate) cancel: CancelHandle,
    /// The cluster that it uses.
    pub(crate) client: ClusterClient,
}

/// Shows a run of this process at an address, and says how to open it; nothing without an address.
pub(crate) fn show_own_run(address: Option<&str>, run: OwnRun<'_>) -> Result<Option<RunPage>> {
    let Some(address) = address else {
        return Ok(None);
    };
    let place = RunPlace {
        journal: run.journal.to_owned(),
        logs: run.logs.map(Path::to_owned),
        cancel: Some(run.cancel),
        traffic: TrafficMeter::start(run.client),
    };
    let page = RunPage::start(address, place)?;
    print_notice(&page.describe(&page.create_login_link()));
    Ok(Some(page))
}

/// A page that is served.
pub(crate) struct RunPage {
    server: PageServer,
    user: String,
    /// Where programs of the user find the page, as long as this lives.
    _connection: Option<ConnectionFile>,
}

impl RunPage {
    fn start(address: &str, place: RunPlace) -> Result<Self> {
        let user = user_name();
        let journal = std::path::absolute(&place.journal)?;
        let source = JournalSource {
            user: user.clone(),
            runs: vec![FollowedRun::new(place)],
        };
        let server = start_server(address, Arc::new(source), None);
        let server = server.map_err(|error| match error.code {
            ErrorCode::Malformed => UsageError::from_reason(error.detail),
            _ => anyhow::Error::new(error),
        })?;
        let token = server.access().create_token(requester(&user));
        let url = format!("http://{}", server.address());
        let connection = ConnectionFile::create(&url, &token, &journal);
        let connection = connection.inspect_err(|error| {
            tracing::warn!(%error, "programs of the user do not find the page by themselves");
        });
        Ok(Self {
            server,
            user,
            _connection: connection.ok(),
        })
    }

    fn create_login_link(&self) -> String {
        let access = self.server.access();
        access.create_login_link(requester(&self.user)).to_string()
    }

    fn describe(&self, link: &str) -> String {
        format!("the page of the run opens once by this link: {link}")
    }

    /// Waits until pages that are open know the end of the run.
    pub(crate) async fn finish(&self) {
        self.server.finish_streams(FINISH_TIMEOUT).await;
    }
}

fn requester(user: &str) -> Requester {
    Requester {
        user: user.to_owned(),
        is_operator: false,
    }
}

fn user_name() -> String {
    let named = |name| std::env::var(name).ok().filter(|user| !user.is_empty());
    named("USER")
        .or_else(|| named("LOGNAME"))
        .unwrap_or_else(|| "nobody".to_owned())
}

/// Runs of one user, each by its journal.
struct JournalSource {
    user: String,
    runs: Vec<FollowedRun>,
}

impl JournalSource {
    fn find(&self, requester: &Requester, run: &str) -> bafs_proto::Result<&FollowedRun> {
        let unknown = || Error::new(ErrorCode::NotFound, format!("there is no run '{run}'"));
        if requester.user != self.user && !requester.is_operator {
            return Err(unknown());
        }
        if run == CURRENT_RUN {
            return self.runs.first().ok_or_else(unknown);
        }
        let is_it = |it: &&FollowedRun| it.summary().is_ok_and(|summary| summary.id == run);
        self.runs.iter().find(is_it).ok_or_else(unknown)
    }
}

impl RunSource for JournalSource {
    fn list_runs(&self, requester: &Requester) -> bafs_proto::Result<Vec<RunSummary>> {
        match requester.user == self.user || requester.is_operator {
            true => self.runs.iter().map(FollowedRun::summary).collect(),
            false => Ok(Vec::new()),
        }
    }

    fn view_run(&self, requester: &Requester, run: &str) -> bafs_proto::Result<Arc<RunView>> {
        self.find(requester, run)?.view()
    }

    fn describe_job(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
    ) -> bafs_proto::Result<JobDetails> {
        self.find(requester, run)?.describe_job(job)
    }

    fn explain_jobs(
        &self,
        requester: &Requester,
        run: &str,
        jobs: &[u32],
    ) -> bafs_proto::Result<Vec<Option<String>>> {
        self.find(requester, run)?.explain_jobs(jobs)
    }

    fn read_log(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
        attempt: Option<u32>,
    ) -> bafs_proto::Result<LogView> {
        self.find(requester, run)?.read_log(job, attempt)
    }

    fn read_history(
        &self,
        requester: &Requester,
        run: &str,
        from: u64,
        limit: usize,
    ) -> bafs_proto::Result<HistoryPage> {
        self.find(requester, run)?.read_history(from, limit)
    }

    fn send_command(
        &self,
        requester: &Requester,
        run: &str,
        command: RunCommand,
    ) -> bafs_proto::Result<()> {
        self.find(requester, run)?.send_command(command)
    }

    fn read_metrics(&self, requester: &Requester) -> bafs_proto::Result<MetricsView> {
        let progress = self.find(requester, CURRENT_RUN)?.progress()?;
        let published = PublishedProgress::default();
        published.publish(&progress);
        let figures = published.read_figures()();
        let named = |figures: std::collections::BTreeMap<_, u64>| {
            let named = figures.into_iter();
            named
                .map(|(name, value): (&str, u64)| (name.to_owned(), value))
                .collect()
        };
        Ok(MetricsView {
            counters: figures.counters,
            gauges: named(figures.gauges),
        })
    }
}

/// The directory where programs of a user find each other, which nobody else may use.
fn runtime_directory() -> Result<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
    let directory = match named {
        Some(named) => PathBuf::from(named).join("bafs"),
        None => std::env::temp_dir().join(format!("bafs-{}", nix::unistd::getuid())),
    };
    connection_file::create_private_directory(&directory)
        .with_context(|| format!("cannot use {}", directory.display()))?;
    Ok(directory)
}
