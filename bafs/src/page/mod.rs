//! The page and the API of runs: `bafs run --page` for the run of this process, `bafs page` for any
//! run by its journal. The journal is the one truth: both read it as everybody can.

mod advice;
mod connection_file;
mod followed_run;
mod job_output;
mod journal_source;
mod queue_source;
mod run_view;
mod traffic_meter;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use bafs_api::{PageServer, start_server};
use bafs_client::signals::wait_for_stop_signal;
use bafs_proto::ErrorCode;
use bafs_queue::Requester;
use bafs_sched::driver::RunOptions;
use serde_json::json;

pub(crate) use self::connection_file::ConnectionFile;
use self::connection_file::PageSubject;
use self::followed_run::{FollowedPlace, FollowedRun};
use self::journal_source::JournalSource;
pub(crate) use self::queue_source::start_queue_page;
use self::traffic_meter::TrafficMeter;
use crate::args::{PageArgs, UsageError};
use crate::client::ClusterClient;
use crate::history;
use crate::logs;
use crate::output::{Printer, print_notice};

/// Pages that are open learn of the end of a run within so long; nobody waits longer for them.
const FINISH_TIMEOUT: Duration = Duration::from_secs(4);

/// Shows a run until the user stops the program.
pub(crate) async fn show_page(args: &PageArgs, output: Printer) -> Result<()> {
    let journal = history::find_journal(&args.run)?;
    let place = FollowedPlace {
        id: None,
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

/// Shows a run of this process at an address, and says how to open it; nothing without an address.
pub(crate) fn show_own_run(
    address: Option<&str>,
    run: &RunOptions,
    client: ClusterClient,
) -> Result<Option<RunPage>> {
    let Some(address) = address else {
        return Ok(None);
    };
    let place = FollowedPlace {
        id: None,
        journal: run.journal.clone(),
        logs: run.log_directory.clone(),
        cancel: Some(run.cancel_handle.clone()),
        traffic: TrafficMeter::start(client),
    };
    let page = RunPage::start(address, place)?;
    print_notice(&page.describe(&page.create_login_link()));
    Ok(Some(page))
}

/// Pages that are open learn how the run ended.
pub(crate) async fn finish_page(page: Option<&RunPage>) {
    if let Some(page) = page {
        page.finish().await;
    }
}

/// A page that is served.
pub(crate) struct RunPage {
    server: PageServer,
    user: String,
    /// Where programs of the user find the page, as long as this lives.
    _connection: Option<ConnectionFile>,
}

impl RunPage {
    fn start(address: &str, place: FollowedPlace) -> Result<Self> {
        let user = user_name();
        let journal = std::path::absolute(&place.journal)?;
        let source = JournalSource::new(user.clone(), vec![FollowedRun::new(place)]);
        let server = start_server(address, Arc::new(source), None);
        let server = server.map_err(|error| match error.code {
            ErrorCode::Malformed => UsageError::from_reason(error.detail),
            _ => anyhow::Error::new(error),
        })?;
        let token = server.access().create_token(requester(&user));
        let url = format!("http://{}", server.address());
        let connection = announce_page(&url, &token, PageSubject::Journal(&journal));
        Ok(Self {
            server,
            user,
            _connection: connection,
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
    async fn finish(&self) {
        self.server.finish_streams(FINISH_TIMEOUT).await;
    }
}

/// Has programs of this user find the page of a service, with the rights of its operator.
pub(crate) fn announce_queue_page(
    page: &PageServer,
    operator: &Requester,
    state: &Path,
) -> Option<ConnectionFile> {
    let url = format!("http://{}", page.address());
    let token = page.access().token_of(operator);
    announce_page(&url, &token, PageSubject::State(state))
}

fn announce_page(url: &str, token: &str, subject: PageSubject<'_>) -> Option<ConnectionFile> {
    let connection = ConnectionFile::create(url, token, subject);
    let connection = connection.inspect_err(|error| {
        tracing::warn!(%error, "programs of the user do not find the page by themselves");
    });
    connection.ok()
}

fn requester(user: &str) -> Requester {
    Requester {
        user: user.to_owned(),
        is_operator: false,
        sees_others: false,
    }
}

fn user_name() -> String {
    let named = |name| std::env::var(name).ok().filter(|user| !user.is_empty());
    named("USER")
        .or_else(|| named("LOGNAME"))
        .unwrap_or_else(|| "nobody".to_owned())
}
