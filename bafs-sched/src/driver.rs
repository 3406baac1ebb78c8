//! Runs a workflow on a real cluster: collects events, journals them, steps the core, obeys it.
//!
//! [`run_workflow`] opens the journal and loops until the core has an outcome:
//!
//! ```text
//!  tasks ─ DriverMessage ─▶ receive_batch ─▶ Scheduler::step ─▶ Journal::append ─▶ actions
//!    ▲                                                                               │
//!    └── one task for each action: a call, repeated until its timeout ◀──────────────┘
//! ```
//!
//! * A batch has up to 256 events of one time. The core is told them, and what it decides and
//!   writes is one frame of the journal with them. Only when that is synced to disk the actions
//!   are performed. A crash before loses events of which nobody saw an effect. While a batch is
//!   written, the core decides the next one.
//! * `execute_action` spawns a task, and never waits. [`crate::io`] has the calls.
//! * One task for each node waits for the ends of its executions (long polling).
//! * Timer tasks ask the catalog each second, look for silent nodes and commands of users, and
//!   renew volumes.
//! * The core names the time of its next timer. If nothing else comes before, the driver sends a
//!   tick.
//!
//! **Recovery.** If the journal exists, the rows of its last snapshot and of the steps after it are
//! put back. Nothing is decided again, so a journal of other rules is continued. Then actions
//! without a recorded answer are repeated, and running executions are watched again. All actions
//! are safe to repeat. Events that the crash lost come again: calls are repeated or probed, nodes
//! report ends of executions until they are told to forget them, and commands of users stay in
//! their file. Settings in the journal take precedence over those of the command line.
//!
//! **Another run.** [`EarlierRun`] is what a journal tells of the runs before. With
//! [`RunOptions::earlier_work`] a run begins behind them in the same journal, and does only what
//! has changed since.
//!
//! **Errors.** [`run_workflow`] fails if the journal cannot be used, belongs to another workflow
//! (`Conflict`), or another scheduler has it. It fails if the catalog refuses the run before any
//! node was seen. A journal that cannot be written ends the run at once, because nothing may happen
//! unrecorded. Failed calls are events. Failed jobs are part of the [`RunReport`].
//!
//! **Concurrency.** The loop owns the scheduler and the journal, and nothing else touches them.
//! Tasks get what they need by value, or share `Servers`. Journal writes run on a blocking thread,
//! one batch at a time.
//!
//! **Time.** `clock.rs` gives one time that never goes back, even if the clock of the machine does.
//!
//! [`CancelHandle`] stops a run: its jobs are killed, its volumes deleted, and it ends as
//! cancelled.

mod clock;
mod earlier_run;
mod ended_attempt;
mod failure_messages;
mod followed_jobs;
mod journal_opening;
mod journal_writing;
mod maintenance;
pub(crate) mod message;
mod output_collector;
mod run_options;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_proto::bearer::Bearer;
use bafs_proto::ids::{ExecutionId, RunId, ServerId};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{JobIndex, VolumeIndex, Workflow};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

use self::clock::RunClock;
use self::ended_attempt::find_ended_attempt;
use self::journal_opening::{RecoveredRun, open_journal, recover_run};
use self::message::{DriverMessage, send_event};
use self::output_collector::OutputCollector;
pub use earlier_run::EarlierRun;
pub use run_options::{CancelHandle, RunOptions};

use crate::io::connectivity::Connectivity;
use crate::io::homes::Homes;
use crate::io::job_logs::EndedAttempt;
use crate::io::job_watch::{WatchList, WatchListSender, watch_node};
use crate::io::journal::PipelinedJournal;
use crate::io::listing_tracker::ListingTracker;
use crate::io::node_quotas::NodeQuotas;
use crate::io::remote_io;
use crate::io::servers::{ServerAddress, Servers};
use crate::io::volume_copy::CopyRequest;
use crate::report::{RunReport, RunReportBuilder};
use crate::{Action, Event, MountedVolume, Progress, RunWarning, Scheduler};

pub(crate) use self::clock::{monotonic_now, wall_time_now};

/// How often the catalog is asked, in milliseconds.
const CATALOG_POLL_INTERVAL_MS: u64 = 1_000;

/// Facts that are journaled and applied together at most.
const EVENT_BATCH_MAX: usize = 256;

/// Warnings after the first `logged` that are logged at once. Those of the last step are not: the
/// report follows them, and tells them all.
fn warnings_to_log(scheduler: &Scheduler, logged: usize) -> &[RunWarning] {
    match scheduler.outcome() {
        None => &scheduler.warnings()[logged..],
        Some(_) => &[],
    }
}

/// Runs a workflow to its end, or goes on with it if its journal exists. `progress` is called
/// after every batch of facts.
///
/// # Errors
/// When the run cannot go on: the journal cannot be used or belongs to another workflow, the
/// identity is not usable, or the catalog refuses it before any node was seen. That jobs fail is
/// no error but part of the report.
pub async fn run_workflow(
    workflow: impl Into<Arc<Workflow>>,
    options: RunOptions,
    progress: impl FnMut(&Progress),
) -> Result<RunReport> {
    let pool = Pool::new(Arc::new(Dialer::new(&options.identity)?));
    run_with_connections(pool, workflow, options, progress).await
}

/// As `run`, over connections that are given.
///
/// # Errors
/// As `run`.
pub async fn run_with_connections(
    pool: Pool,
    workflow: impl Into<Arc<Workflow>>,
    options: RunOptions,
    mut progress: impl FnMut(&Progress),
) -> Result<RunReport> {
    let workflow = workflow.into();
    if options.settings.has_private_data_at_home()
        && let Some(refusal) = remote_io::why_unsupported(&workflow, &options.settings)
    {
        return Err(Error::new(ErrorCode::Unsupported, refusal));
    }
    let (mut driver, mut notes) = Driver::open(pool, workflow, &options)?;
    driver.resume_run();
    driver.spawn_background_tasks(&options);
    progress(&driver.scheduler.progress());
    if driver.scheduler.outcome().is_none() {
        // The core's patience begins with its first fact, and a catalog may never bring one.
        let first = if driver.is_resumed {
            let series = (RunId::random().0 >> 32) as u32;
            Event::SchedulerResumed { id_prefix: series }
        } else {
            let work = options.earlier_work.clone();
            work.map_or(Event::Tick, |work| Event::EarlierWorkFound(Box::new(work)))
        };
        driver.apply_events(vec![first]).await?;
    }
    while driver.scheduler.outcome().is_none() {
        let batch = driver
            .receive_batch(&mut notes, &options.cancel_handle)
            .await?;
        if let Some(error) = driver.rejection.take() {
            return Err(error);
        }
        driver.apply_events(batch).await?;
        driver.request_quotas().await?;
        if let Some(error) = driver.catalog_refusal.take()
            && driver.scheduler.progress().nodes == 0
        {
            return Err(error.context(format_args!("catalog {}", options.catalog)));
        }
        if let Some(error) = driver.quota_refusal.take() {
            return Err(error);
        }
        progress(&driver.scheduler.progress());
    }
    driver.finish_write().await?;
    driver.finish_run().await
}

struct Driver {
    servers: Servers,
    clock: RunClock,
    scheduler: Scheduler,
    journal: PipelinedJournal,
    report_builder: RunReportBuilder,
    /// Whether the journal has steps that the builder was not told.
    is_report_partial: bool,
    tasks: JoinSet<()>,
    messages: mpsc::Sender<DriverMessage>,
    watch_lists: BTreeMap<ServerId, WatchListSender>,
    /// Nodes that are back and are asked for volumes.
    volume_searches: BTreeMap<ServerId, AbortHandle>,
    listing_tracker: ListingTracker,
    /// Why the catalog refuses this run, if it does.
    catalog_refusal: Option<Error>,
    /// Why the run must not go on, if so.
    rejection: Option<Error>,
    /// Why no node will ever keep anything for this run, if so.
    quota_refusal: Option<Error>,
    /// Whether the journal told of an earlier scheduler.
    is_resumed: bool,
    /// When a failure of the environment was told last.
    failure_reported_at: Option<Time>,
    is_cancelled: bool,
    /// The journal beside which users leave wishes, and how many were read.
    command_journal: PathBuf,
    commands_read: u64,
    /// Parts of nodes, where others use them too.
    node_quotas: Option<NodeQuotas>,
    output_collector: OutputCollector,
    /// Attempts whose ends are among the steps that are being written.
    unwritten_attempts: Vec<EndedAttempt>,
    /// Answers to who follows the output of jobs, as long as they are under way.
    following: Option<tokio::task::JoinHandle<()>>,
}

impl Driver {
    fn open(
        pool: Pool,
        workflow: Arc<Workflow>,
        options: &RunOptions,
    ) -> Result<(Self, mpsc::Receiver<DriverMessage>)> {
        let (journal, tail) = open_journal(&workflow, options)?;
        let is_resumed = tail.has_steps();
        let (run, settings) = (tail.header.run, tail.header.settings.clone());
        let mut outputs = OutputCollector::open(options.log_directory.as_deref(), run);
        let mut homes = Homes::for_workflow(options.file_home.clone(), &workflow);
        let RecoveredRun {
            scheduler,
            report_builder: mut ledger,
            is_report_partial,
            ended_attempts,
        } = recover_run(tail, options, &mut homes)?;
        ended_attempts
            .into_iter()
            .for_each(|ended| outputs.note_ended(ended));
        // A run that is to stop does nothing with its settings.
        if !options.cancel_handle.is_requested() {
            ledger.warn_of_ignored_settings(&scheduler, &options.journal, &options.settings);
        }
        let (notes, receiver) = mpsc::channel(EVENT_BATCH_MAX);
        let (token, verifier) = (&options.identity.token, &options.identity.verifier);
        let connectivity = Connectivity::for_resumed_run(&scheduler, monotonic_now());
        let servers = Servers {
            pool,
            bearer: Arc::new(Bearer::new(token.clone(), verifier.clone())),
            homes: Arc::new(Mutex::new(homes)),
            upload_epochs: Arc::default(),
            connectivity: Arc::new(Mutex::new(connectivity)),
            workflow,
            run,
            settings: Arc::new(settings),
            is_resumed,
        };
        let user = servers.settings.user.clone();
        let limit = options.limit.clone();
        let shares = user.map(|user| NodeQuotas::new(user, servers.volume_owner(), limit));
        let driver = Self {
            servers,
            clock: RunClock::new(scheduler.now(), monotonic_now()),
            scheduler,
            journal: PipelinedJournal::new(journal),
            report_builder: ledger,
            is_report_partial,
            tasks: JoinSet::new(),
            messages: notes,
            watch_lists: BTreeMap::new(),
            volume_searches: BTreeMap::new(),
            listing_tracker: ListingTracker::default(),
            catalog_refusal: None,
            rejection: None,
            quota_refusal: None,
            is_resumed,
            failure_reported_at: None,
            is_cancelled: false,
            command_journal: options.journal.clone(),
            commands_read: 0,
            node_quotas: shares,
            output_collector: outputs,
            unwritten_attempts: Vec::new(),
            following: None,
        };
        Ok((driver, receiver))
    }

    /// Takes up again what was under way when the journal ended.
    fn resume_run(&mut self) {
        for action in self.scheduler.outstanding_actions() {
            self.execute_action(action);
        }
        for (execution, server) in self.scheduler.running_executions().collect::<Vec<_>>() {
            self.watch_execution(server, execution);
        }
        if self.scheduler.outcome().is_none() {
            self.collect_earlier_outputs();
        }
    }

    fn spawn_background_tasks(&mut self, options: &RunOptions) {
        let (servers, notes) = (self.servers.clone(), self.messages.clone());
        let catalog = options.catalog.clone();
        let mut first_comparison = Some(self.spawn_alias_check());
        self.tasks.spawn(async move {
            let mut was_told = false;
            loop {
                let deadline = Deadline::after_ms(2 * CATALOG_POLL_INTERVAL_MS);
                let note = match servers.query_catalog(&catalog, deadline).await {
                    Ok(adverts) => Some(DriverMessage::CatalogListed(adverts)),
                    // Running jobs do not need the catalog; it is asked again.
                    Err(error) if error.is_transient() => {
                        if !std::mem::replace(&mut was_told, true) {
                            tracing::warn!(catalog, %error, "catalog does not answer yet");
                        }
                        None
                    }
                    Err(error) => Some(DriverMessage::CatalogRefused(error)),
                };
                was_told &= note.is_none();
                if note.is_some()
                    && let Some(compared) = first_comparison.take()
                {
                    // It is never sent, but dropped when the comparison is done.
                    let _ = compared.await;
                }
                if let Some(note) = note
                    && notes.send(note).await.is_err()
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(CATALOG_POLL_INTERVAL_MS)).await;
            }
        });
        let notes = self.messages.clone();
        self.tasks.spawn(async move {
            while notes.send(DriverMessage::PeriodicCheckDue).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(CATALOG_POLL_INTERVAL_MS)).await;
            }
        });
        // Apart from the catalog: volumes must outlive its absence.
        let notes = self.messages.clone();
        let pause = Duration::from_millis(self.servers.settings.volume_lifetime_ms / 4 + 1);
        self.tasks.spawn(async move {
            while notes.send(DriverMessage::RenewalDue).await.is_ok() {
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Waits for facts and takes all that are there. May be empty, as when steps were written.
    async fn receive_batch(
        &mut self,
        notes: &mut mpsc::Receiver<DriverMessage>,
        cancel: &CancelHandle,
    ) -> Result<Vec<Event>> {
        let due_ms = match self.scheduler.next_timer() {
            Some(at) => at.ms_since(self.clock.adjusted_time(wall_time_now(), monotonic_now())),
            None => u64::from(u32::MAX),
        };
        let mut batch = Vec::new();
        tokio::select! {
            written = self.journal.wait_written(), if self.journal.is_writing() => {
                self.follow_steps(written?);
            }
            Some(note) = notes.recv() => self.handle_message(note, &mut batch),
            () = tokio::time::sleep(Duration::from_millis(due_ms)) => batch.push(Event::Tick),
            () = cancel.wait_for_request(), if !self.is_cancelled => {
                self.is_cancelled = true;
                batch.push(Event::CancelRequested);
            }
        }
        while batch.len() < EVENT_BATCH_MAX
            && let Ok(note) = notes.try_recv()
        {
            self.handle_message(note, &mut batch);
        }
        while self.tasks.try_join_next().is_some() {}
        Ok(batch)
    }

    fn handle_message(&mut self, note: DriverMessage, batch: &mut Vec<Event>) {
        match note {
            DriverMessage::Event(event) => batch.push(event),
            DriverMessage::WatchExecution(server, execution) => {
                self.watch_execution(server, execution)
            }
            DriverMessage::CatalogListed(adverts) => {
                batch.extend(self.servers.take_new_homes());
                let now = self.clock.adjusted_time(wall_time_now(), monotonic_now());
                let mut contact = self.servers.connectivity();
                contact.note_listing(adverts.iter().map(|advert| advert.id), monotonic_now());
                let is_heard =
                    |server| contact.has_recent_answer(&self.scheduler, server, monotonic_now());
                let caches = self.servers.cache_names();
                let news = self.listing_tracker.compare_listing(
                    &self.scheduler,
                    (adverts, &caches),
                    now,
                    is_heard,
                );
                batch.extend(news);
            }
            DriverMessage::RunRejected(error) => self.rejection = Some(error),
            DriverMessage::CatalogRefused(error) => self.catalog_refusal = Some(error),
            DriverMessage::RenewalDue => self.renew_volumes(),
            DriverMessage::PeriodicCheckDue => {
                self.show_followed_jobs();
                batch.extend(self.read_commands());
                batch.extend(self.check_silent_nodes());
            }
            DriverMessage::QuotaAnswered(server, answer) => {
                batch.extend(self.handle_quota_answer(server, answer))
            }
        }
    }

    /// Tells facts to the core, and begins to make them and what it decided durable. What was
    /// decided is done when that is so; the next facts may be decided meanwhile.
    async fn apply_events(&mut self, batch: Vec<Event>) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        if self.journal.is_snapshot_due() {
            self.finish_write().await?;
            self.begin_snapshot()?;
        }
        let now = self.clock.adjusted_time(wall_time_now(), monotonic_now());
        let mut ended = Vec::new();
        let mut steps = Vec::with_capacity(batch.len());
        for event in batch {
            self.report_builder.note_event(&self.scheduler, now, &event);
            ended.extend(find_ended_attempt(&self.scheduler, &event));
            self.report_failure(now, &event);
            let warned = self.scheduler.warnings().len();
            steps.push(self.scheduler.record_step(now, event));
            for warning in warnings_to_log(&self.scheduler, warned) {
                tracing::warn!("{}", warning.text);
            }
        }
        self.finish_write().await?;
        self.unwritten_attempts = ended;
        self.journal.begin_append(steps)
    }

    fn server_address(&self, server: ServerId) -> ServerAddress {
        let address = self.scheduler.node(server).map(|node| node.address.clone());
        ServerAddress {
            server,
            address: address.unwrap_or_default(),
        }
    }

    fn watch_execution(&mut self, server: ServerId, execution: ExecutionId) {
        if !self.watch_lists.contains_key(&server) {
            let place = self.server_address(server);
            let watched: WatchListSender = Arc::new(watch::Sender::new(WatchList {
                address: place.address,
                executions: BTreeSet::new(),
            }));
            let (servers, notes) = (self.servers.clone(), self.messages.clone());
            self.tasks
                .spawn(watch_node(servers, watched.clone(), notes));
            self.watch_lists.insert(server, watched);
        }
        self.watch_lists[&server].send_modify(|watched| {
            watched.executions.insert(execution);
        });
    }

    fn start_job(
        &mut self,
        execution: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: Vec<MountedVolume>,
        demand: (Vec<VolumeIndex>, u64),
    ) {
        let (servers, notes, now) = (self.servers.clone(), self.messages.clone(), wall_time_now());
        let place = self.server_address(server);
        let with_place = volumes
            .into_iter()
            .map(|v| (v, v.server.map(|server| self.server_address(server))));
        let volumes: Vec<_> = with_place.collect();
        self.tasks.spawn(async move {
            let started = servers.start_job(now, execution, job, &place, volumes, demand);
            let started = started.await;
            send_event(&notes, Some(started)).await;
        });
    }

    /// Starts to do what the core asks; the outcome returns as a fact.
    fn execute_action(&mut self, action: Action) {
        let (servers, notes, now) = (self.servers.clone(), self.messages.clone(), wall_time_now());
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => {
                let place = self.server_address(server);
                self.tasks.spawn(async move {
                    for event in servers.create_volume(now, id, volume, &place, size).await {
                        send_event(&notes, Some(event)).await;
                    }
                });
            }
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                base_copy: base,
            } => {
                let copying = CopyRequest {
                    id,
                    source,
                    source_address: source.server.map(|holder| self.server_address(holder)),
                    target_address: self.server_address(server),
                    size,
                    base_copy: base,
                };
                self.tasks.spawn(async move {
                    for event in servers.copy_volume(now, copying).await {
                        send_event(&notes, Some(event)).await;
                    }
                });
            }
            Action::WarmCache { id, server } => self.warm_volume(id, server),
            Action::InspectCache { id, server } => self.inspect_cache(id, server),
            Action::DeleteVolume { id, server } => self.delete_volume(id, server),
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                results,
                memory_bytes,
            } => {
                let demand = (results, memory_bytes);
                self.start_job(execution, job, server, volumes, demand);
            }
            Action::KillJob { execution, server } => {
                let place = self.server_address(server);
                self.tasks.spawn(async move {
                    // Whatever it says, if anything: watching tells how it is.
                    drop(servers.kill_job(execution, &place).await);
                    // The loop ended: nobody waits for this any more.
                    let _ = notes
                        .send(DriverMessage::WatchExecution(server, execution))
                        .await;
                });
            }
            Action::ExtractFile {
                extract,
                index,
                source,
            } => self.extract_file((extract, index), source),
            Action::ProbeVolumes { server, volumes } => self.renew_volumes_on(server, volumes, 0),
            Action::FindVolumes { server, volumes } => self.find_volumes(server, volumes),
            Action::Finish { .. } => {}
        }
    }

    async fn finish_run(mut self) -> Result<RunReport> {
        self.tasks.shutdown().await;
        self.output_collector.finish().await;
        self.extend_result_lifetimes().await;
        self.release_quotas().await;
        if self.scheduler.settings().has_private_data_at_home()
            && !self.scheduler.has_unsent_results()
            && let Err(error) =
                remote_io::remove_run_directory(&self.servers, self.scheduler.workflow()).await
        {
            let left = remote_io::run_directory(self.servers.run);
            tracing::warn!(%error, "cannot remove {left} at home; remove it by hand");
        }
        let over = || Error::new(ErrorCode::ServerFault, "the run is not over");
        let outcome = self.scheduler.outcome().cloned().ok_or_else(over)?;
        // A run that saw no node begins anew, whatever its journal says.
        if self.journal.has_steps_since_snapshot() && self.scheduler.nodes().next().is_some() {
            self.begin_snapshot()?;
            self.finish_write().await?;
        }
        if self.is_report_partial {
            let all = RunReportBuilder::from_journal(&self.command_journal)?;
            self.report_builder = all.with_warnings_of(self.report_builder);
        }
        Ok(self.report_builder.build_report(&self.scheduler, outcome))
    }
}
