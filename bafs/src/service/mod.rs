//! `bafs scheduler` and the commands of its users: a queue of workflows of several users.

mod calls;
mod client_commands;
mod network;
mod queue_service;
mod result_places;
pub(crate) mod run_files;
mod submitted_text;
mod supervisor;
mod user_commands;
mod user_rights;
mod workflow_demand;
mod workflow_view;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bafs_client::signals::wait_for_stop_signal;
use bafs_proto::message::{Role, ServerKind};
use bafs_proto::net::channel::Listener;
use bafs_queue::logic::order::{ORDER_POLICIES, find_order_policy};
use bafs_queue::{QueueDecision, QueueEvent, QueueSettings, Resources, RunOutcome, WorkflowId};
use bafs_sched::Settings;
use bafs_server::counters::Metrics;
use bafs_server::serving::RunningServer;
use bafs_tree::private_directory;
use bafs_workflow::parse_duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::client_commands::run_client_command;
use self::network::{NetworkService, OPERATOR, operator};
use self::queue_service::QueueService;
use self::run_files::{remove_directory, write_whole_file};
use self::supervisor::RunSupervisor;
use crate::args::{SchedulerArgs, ServiceCommand, UsageError};
use crate::client::ClusterClient;
use crate::init;
use crate::learned::LearnedStore;
use crate::output::Printer;
use crate::page::{announce_queue_page, start_queue_page};
use crate::program_file::program_file;

/// The queue is told that time passes, and what the cluster has, so often.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// It is told what runs have used so often: each time is a write to the journal.
const USAGE_INTERVAL: Duration = Duration::from_secs(10);

const ADDRESS_FILE: &str = "address";
const LOCK_FILE: &str = "lock";

/// What is under way.
struct Supervision {
    service: Arc<QueueService>,
    program: PathBuf,
    runs: JoinSet<(WorkflowId, RunOutcome)>,
    cancels: BTreeMap<WorkflowId, watch::Sender<bool>>,
    /// Runs that ended while the queue could not be told: its disk is full.
    ended: BTreeMap<WorkflowId, RunOutcome>,
}

/// Runs the service, or a command of its users.
pub(crate) async fn run_service_command(
    command: ServiceCommand,
    output: Printer,
) -> Result<ExitCode> {
    match command {
        ServiceCommand::Scheduler(args) => run_scheduler(args, output)
            .await
            .map(|()| ExitCode::SUCCESS),
        command => run_client_command(command, output).await,
    }
}

/// Runs the service until it is told to stop; its runs go on.
async fn run_scheduler(mut args: SchedulerArgs, output: Printer) -> Result<()> {
    let settings = parse_settings(&args)?;
    let _lock = lock_state(&args.state)?;
    // Runs have working directories of their own.
    args.state = args.state.canonicalize()?;
    let asked = wait_for_stop_signal();
    let identity = init::load_identity(&args.identity, Role::Scheduler)?;
    let client = ClusterClient::connect(&args.identity, &args.catalog)?;
    let (decisions, mut decided) = mpsc::unbounded_channel();
    let service = QueueService::open(&args.state, identity.clone(), &args.catalog, decisions)?;
    let service = Arc::new(service);
    let mut supervision = Supervision {
        service: service.clone(),
        program: program_file()?.to_owned(),
        runs: JoinSet::new(),
        cancels: BTreeMap::new(),
        ended: BTreeMap::new(),
    };
    supervision.take_up_runs();
    if *service.queue().state().settings() != settings {
        service.record(QueueEvent::SettingsChanged(settings))?;
    }
    let server_identity = init::load_identity(&args.identity, Role::Server)?;
    let listener = listen(&args, &server_identity)?;
    let page = args.page.as_deref();
    let page = page.map(|address| start_queue_page(address, service.clone()));
    let page = page.transpose()?;
    let page_address = page.as_ref().map(|page| page.address().to_string());
    let _connection = page
        .as_ref()
        .and_then(|page| announce_queue_page(page, &operator(OPERATOR), &args.state));
    let network = NetworkService::new(service.clone(), identity.verifier.clone(), page);
    let figures = Arc::new(|| Metrics {
        counters: BTreeMap::new(),
        gauges: BTreeMap::new(),
    });
    let server = RunningServer::start(listener, Arc::new(network), figures)?;
    let address = server.address().to_string();
    write_whole_file(&args.state.join(ADDRESS_FILE), address.as_bytes(), true)?;
    let page_text = page_address.as_ref().map(|address| {
        format!("\npage at http://{address}; `bafs queue --page` prints a link that opens it")
    });
    output.print_result(
        &format!("listening at {address}{}", page_text.unwrap_or_default()),
        &serde_json::json!({ "listening": address, "page": page_address }),
    )?;
    let ended = supervision.serve(client, &mut decided, asked).await;
    server.stop().await;
    ended
}

fn parse_settings(args: &SchedulerArgs) -> Result<QueueSettings> {
    if find_order_policy(&args.order).is_none() {
        let names: Vec<_> = ORDER_POLICIES.iter().map(|policy| policy.name()).collect();
        let names = names.join(", ");
        let why = format!("--order {}: there are {names}", args.order);
        return Err(UsageError::from_reason(why));
    }
    let time_ms = |option: &str, text: &str| match parse_duration(text) {
        Ok(seconds) => Ok(seconds.saturating_mul(1000)),
        Err(error) => Err(UsageError::from_reason(format!("{option} {text}: {error}"))),
    };
    Ok(QueueSettings {
        order: args.order.clone(),
        half_life_ms: time_ms("--half-life", &args.half_life)?.max(1),
        history_ms: time_ms("--history", &args.history)?,
        history_max: args.history_max,
        runs_max: usize::from(args.runs),
        ..QueueSettings::default()
    })
}

/// One service at a time uses a state; the kernel gives the lock back, however the process ends.
fn lock_state(state: &Path) -> Result<File> {
    // It has the keys and texts of all users: nobody else may have prepared it.
    private_directory(state).with_context(|| format!("--state {}", state.display()))?;
    let path = state.join(LOCK_FILE);
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = options
        .open(&path)
        .with_context(|| path.display().to_string())?;
    if file.try_lock().is_err() {
        bail!(
            "another bafs scheduler uses the state {}; stop it, or name another directory",
            state.display()
        );
    }
    Ok(file)
}

/// Listens at the address of the last start where any port is fine, so that users find it again.
fn listen(args: &SchedulerArgs, identity: &bafs_proto::identity::Identity) -> Result<Listener> {
    let bind = |address: &str| Listener::bind(address, identity);
    let last = fs::read_to_string(args.state.join(ADDRESS_FILE)).ok();
    let host = args.listen.strip_suffix(":0");
    let is_alike = |last: &String| {
        let last = last.rsplit_once(':').map(|(host, _)| host);
        host.is_some() && last == host
    };
    if let Some(listener) = last.filter(is_alike).and_then(|last| bind(&last).ok()) {
        return Ok(listener);
    }
    bind(&args.listen).map_err(|error| anyhow!("--listen {}: {error}", args.listen))
}

impl Supervision {
    /// Takes up what was under way when the last service ended.
    fn take_up_runs(&mut self) {
        let runs: Vec<(WorkflowId, bool)> = {
            let queue = self.service.queue();
            let state = queue.state();
            let is_cancelled = |id: &WorkflowId| state.workflows()[id].is_cancelled;
            state.running().map(|id| (id, is_cancelled(&id))).collect()
        };
        for (id, is_cancelled) in runs {
            self.start(id);
            if is_cancelled {
                self.cancel(id);
            }
        }
    }

    async fn serve(
        &mut self,
        client: ClusterClient,
        decided: &mut mpsc::UnboundedReceiver<QueueDecision>,
        asked: impl Future,
    ) -> Result<()> {
        let mut failed = self.service.watch_failure();
        let mut tick = tokio::time::interval(TICK_INTERVAL);
        let mut usage = tokio::time::interval(USAGE_INTERVAL);
        let mut asked = std::pin::pin!(asked);
        loop {
            tokio::select! {
                _ = &mut asked => return Ok(()),
                Ok(_) = failed.changed() => {
                    let why = failed.borrow().clone();
                    return why.map_or(Ok(()), |why| Err(why.into()));
                }
                Some(decision) = decided.recv() => self.obey(&decision),
                Some(ended) = self.runs.join_next() => {
                    let (id, outcome) = ended.context("a supervisor failed")?;
                    self.ended.insert(id, outcome);
                    self.report_ends()?;
                }
                _ = tick.tick() => {
                    self.report_ends()?;
                    self.report_capacity(&client).await?;
                    self.service.record_if_room(QueueEvent::Ticked)?;
                }
                _ = usage.tick() => self.report_usage()?,
            }
        }
    }

    fn obey(&mut self, decision: &QueueDecision) {
        match decision {
            QueueDecision::Start(id) => self.start(*id),
            QueueDecision::ChangeShares(parts) => {
                for (id, _) in parts {
                    if let Err(error) = self.service.publish_share(*id) {
                        tracing::warn!(workflow = %id, "the run keeps its share: {error:#}");
                    }
                }
            }
            QueueDecision::Cancel(id) => self.cancel(*id),
            QueueDecision::Forget(id) => {
                if let Err(error) = remove_directory(self.service.run_files(*id).directory()) {
                    tracing::warn!(workflow = %id, "its directory stays: {error:#}");
                }
            }
        }
    }

    fn start(&mut self, id: WorkflowId) {
        if self.cancels.contains_key(&id) {
            return;
        }
        let (cancel, cancelled) = watch::channel(false);
        let (service, program) = (self.service.clone(), self.program.clone());
        if let Some(run) = RunSupervisor::new(service, id, program, cancelled) {
            self.cancels.insert(id, cancel);
            self.runs.spawn(async move { (id, run.drive().await) });
        }
    }

    fn cancel(&self, id: WorkflowId) {
        if let Some(cancel) = self.cancels.get(&id) {
            cancel.send_replace(true);
        }
    }

    /// Tells the queue which runs have ended, after what they used; those that find no room are
    /// told of again.
    fn report_ends(&mut self) -> Result<()> {
        if self.ended.is_empty() {
            return Ok(());
        }
        self.report_usage()?;
        for (id, outcome) in std::mem::take(&mut self.ended) {
            let event = QueueEvent::RunEnded {
                id,
                outcome: outcome.clone(),
            };
            match self.service.record_if_room(event)? {
                true => {
                    self.cancels.remove(&id);
                    self.service.note_start_fault(id, None);
                }
                false => drop(self.ended.insert(id, outcome)),
            }
        }
        Ok(())
    }

    /// Tells the queue what runs have used.
    fn report_usage(&self) -> Result<()> {
        let usages: Vec<_> = {
            let queue = self.service.queue();
            let state = queue.state();
            let runs = state.running().filter_map(|id| {
                let used = self.service.run_files(id).read_usage()?.used;
                (used != state.workflows()[&id].used).then_some((id, used))
            });
            runs.collect()
        };
        if !usages.is_empty() {
            self.service
                .record_if_room(QueueEvent::UsageReported(usages))?;
        }
        Ok(())
    }

    /// Tells the queue what the cluster has, if that has changed. A catalog that does not answer
    /// changes nothing.
    async fn report_capacity(&self, client: &ClusterClient) -> Result<()> {
        let Ok(Ok(nodes)) =
            tokio::time::timeout(TICK_INTERVAL, client.list_servers(Some(ServerKind::Node))).await
        else {
            return Ok(());
        };
        let slack = u64::from(Settings::default().slack_permille);
        let (mut found, mut node_bytes) = (Resources::default(), 0);
        for node in nodes {
            found.slots += u64::from(node.slots);
            let usable = node.capacity_bytes - node.capacity_bytes / 1000 * slack;
            found.bytes = found.bytes.saturating_add(usable);
            node_bytes = node_bytes.max(usable);
        }
        self.service.node_bytes.store(node_bytes, Ordering::Relaxed);
        let known = self.service.queue().state().capacity();
        if (known.slots, known.bytes) != (found.slots, found.bytes) {
            // Opened where something changed only: it is a file that runs use, too.
            let learned = LearnedStore::new(self.service.learned_path());
            found.home_bytes_per_s = learned.home_rate(&self.service.catalog).unwrap_or(0);
            self.service
                .record_if_room(QueueEvent::CapacityFound(found))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn state_that_others_may_write_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = directory.path().join("state");
        lock_state(&state).expect("a new state");
        fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).expect("its mode");
        let refused = format!("{:#}", lock_state(&state).expect_err("others may write"));
        assert!(
            refused.contains("other users may write to it (mode 777)"),
            "{refused}"
        );
    }
}
