//! Runs a workflow: select a fact, journal it, step, do what the core asks. Decides nothing.

mod clock;
mod output;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_proto::allotment::NodeQuotaList;
use bafs_proto::bearer::Bearer;
use bafs_proto::identity::Identity;
use bafs_proto::ids::{ExecutionId, RunId, ServerId};
use bafs_proto::message::{Advert, JobOutcome};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::clock::Clock;
use self::output::Outputs;
use crate::io::contact::Contact;
use crate::io::copying::Copying;
use crate::io::homes::{FileHome, Homes};
use crate::io::journal::{Header, Journal, Record};
use crate::io::listing::Listing;
use crate::io::remote_io;
use crate::io::servers::{Place, Servers};
use crate::io::shares::Shares;
use crate::io::watch::{WatchList, Watched, watch as watch_node};
use crate::logic::{Action, Event, MountedVolume, Progress, Scheduler, Settings};
use crate::report::{Ledger, RunReport};
use crate::workflow::{JobIndex, VolumeIndex, Workflow};

pub(crate) use self::clock::{now, tick};

/// How often the catalog is asked, in milliseconds.
const POLL_MS: u64 = 1_000;

/// Failures of the environment are told at most once in so long, in milliseconds: when a home is
/// away, every job has one. Once it was told that the home is away, none of these is.
const TELL_MS: u64 = 5_000;

/// Facts that are journaled and applied together at most.
const BATCH_MAX: usize = 256;

/// What a run needs to know beside the workflow.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Address of the catalog, `host:port`.
    pub catalog: String,
    /// Who runs it; its token must grant what the run does.
    pub identity: Identity,
    /// The journal. If it exists, the run that it tells of goes on.
    pub journal: PathBuf,
    /// The directory that takes what jobs print, if that is to be kept.
    pub logs: Option<PathBuf>,
    /// How it is run; those in an existing journal win.
    pub settings: Settings,
    /// The home that stands for `file:///…`, if there is one.
    pub file_home: Option<FileHome>,
    /// Stops the run.
    pub cancel: Cancel,
}

/// A handle that stops a run: jobs are killed, volumes deleted, and the run ends as cancelled.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Default for Cancel {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Cancel {
    /// Asks the run to stop; asking again is harmless.
    pub fn request(&self) {
        self.0.send_replace(true);
    }

    async fn requested(&self) {
        let mut receiver = self.0.subscribe();
        // The sender lives as long as this handle, so waiting cannot fail.
        let _ = receiver.wait_for(|is_requested| *is_requested).await;
    }
}

/// What the tasks of a run tell its loop.
#[derive(Debug)]
pub(crate) enum Note {
    /// A fact.
    Event(Event),
    /// An execution whose end must be waited for.
    Watch(ServerId, ExecutionId),
    /// A listing of the catalog.
    Listing(Vec<Advert>),
    /// The catalog will never answer this run.
    Refused(Error),
    /// Volumes must be kept alive.
    RenewDue,
    /// Users may have wished something, and nodes may be silent.
    SecondDue,
    /// What a node keeps for the run, or why it does not.
    Allotted(ServerId, Result<NodeQuotaList>),
}

/// Runs a workflow to its end, or goes on with it if its journal exists. `progress` is called
/// after every batch of facts.
///
/// # Errors
/// When the run cannot go on: the journal cannot be used or belongs to another workflow, the
/// identity is not usable, or the catalog refuses it before any node was seen. That jobs fail is
/// no error but part of the report.
pub async fn run(
    workflow: Workflow,
    options: RunOptions,
    progress: impl FnMut(&Progress),
) -> Result<RunReport> {
    let pool = Pool::new(Arc::new(Dialer::new(&options.identity)?));
    run_over(pool, workflow, options, progress).await
}

/// As [`run`], over connections that are given.
///
/// # Errors
/// As [`run`].
pub async fn run_over(
    pool: Pool,
    workflow: Workflow,
    options: RunOptions,
    mut progress: impl FnMut(&Progress),
) -> Result<RunReport> {
    if options.settings.is_private_at_home()
        && let Some(refusal) = remote_io::refusal(&workflow)
    {
        return Err(Error::new(ErrorCode::Unsupported, refusal));
    }
    let (mut driver, mut notes) = Driver::open(pool, workflow, &options)?;
    driver.resume();
    driver.spawn_background(&options);
    progress(&driver.scheduler.progress());
    if driver.scheduler.outcome().is_none() {
        // The core's patience begins with its first fact, and a catalog may never bring one.
        let first = if driver.is_resumed {
            let series = (RunId::random().0 >> 32) as u32;
            Event::Resumed { series }
        } else {
            Event::Tick
        };
        driver.take(vec![first]).await?;
    }
    while driver.scheduler.outcome().is_none() {
        let batch = driver.next_batch(&mut notes, &options.cancel).await;
        driver.take(batch).await?;
        driver.share().await?;
        if let Some(error) = driver.refusal.take()
            && driver.scheduler.progress().nodes == 0
        {
            return Err(error.context(format_args!("catalog {}", options.catalog)));
        }
        if let Some(error) = driver.no_part.take() {
            return Err(error);
        }
        progress(&driver.scheduler.progress());
    }
    driver.finish().await
}

struct Driver {
    servers: Servers,
    clock: Clock,
    scheduler: Scheduler,
    journal: Option<Journal>,
    ledger: Ledger,
    tasks: JoinSet<()>,
    notes: mpsc::Sender<Note>,
    watched: BTreeMap<ServerId, Watched>,
    listing: Listing,
    /// Why the catalog refuses this run, if it does.
    refusal: Option<Error>,
    /// Why no node will ever keep anything for this run, if so.
    no_part: Option<Error>,
    /// Whether the journal told of an earlier scheduler.
    is_resumed: bool,
    /// When a failure of the environment was told last.
    told: Option<Time>,
    is_cancelled: bool,
    /// The journal beside which users leave wishes, and how many were read.
    wishes_of: PathBuf,
    read_wishes: u64,
    /// Parts of nodes, where others use them too.
    shares: Option<Shares>,
    outputs: Outputs,
}

impl Driver {
    fn open(
        pool: Pool,
        workflow: Workflow,
        options: &RunOptions,
    ) -> Result<(Self, mpsc::Receiver<Note>)> {
        let (journal, history) = Journal::open(&options.journal, || Header {
            run: RunId::random(),
            workflow: workflow.clone(),
            settings: options.settings.clone(),
        })?;
        let header = history.header;
        if header.workflow != workflow {
            let text = format!(
                "the journal {} tells of another workflow (or of an earlier text of this one): \
                 choose another journal, or remove it to start afresh",
                options.journal.display()
            );
            return Err(Error::new(ErrorCode::Conflict, text));
        }
        let mut scheduler = Scheduler::new(header.run, header.workflow, header.settings.clone());
        let mut ledger = Ledger::default();
        let last = history.records.last().map_or(Time(0), |(at, _)| *at);
        let is_resumed = !history.records.is_empty();
        let mut outputs = Outputs::open(options.logs.as_deref(), header.run);
        let mut homes = Homes::of(options.file_home.clone(), &workflow);
        for (now, event) in history.records {
            homes.keep(&event);
            ledger.note(&scheduler, now, &event);
            outputs.recall(&scheduler, &ledger, &event);
            scheduler.step(now, event, &mut Vec::new());
        }
        ledger.resumed(&scheduler, &options.journal, &options.settings);
        let (notes, receiver) = mpsc::channel(BATCH_MAX);
        let (token, verifier) = (&options.identity.token, &options.identity.verifier);
        let bearer = Bearer::new(token.clone(), verifier.clone());
        let servers = Servers {
            pool,
            bearer: Arc::new(bearer),
            homes: Arc::new(Mutex::new(homes)),
            contact: Arc::new(Mutex::new(Contact::resumed(&scheduler, tick()))),
            workflow: Arc::new(workflow),
            run: header.run,
            settings: Arc::new(header.settings),
            is_resumed,
        };
        let user = servers.settings.user.clone();
        let shares = user.map(|user| Shares::new(user, servers.owner()));
        let driver = Self {
            servers,
            clock: Clock::new(last, tick()),
            scheduler,
            journal: Some(journal),
            ledger,
            tasks: JoinSet::new(),
            notes,
            watched: BTreeMap::new(),
            listing: Listing::default(),
            refusal: None,
            no_part: None,
            is_resumed,
            told: None,
            is_cancelled: false,
            wishes_of: options.journal.clone(),
            read_wishes: 0,
            shares,
            outputs,
        };
        Ok((driver, receiver))
    }

    /// Takes up again what was under way when the journal ended.
    fn resume(&mut self) {
        for action in self.scheduler.outstanding() {
            self.execute(action);
        }
        for (execution, server) in self.scheduler.running().collect::<Vec<_>>() {
            self.watch(server, execution);
        }
        if self.scheduler.outcome().is_none() {
            self.keep_earlier_outputs();
        }
    }

    fn spawn_background(&mut self, options: &RunOptions) {
        let (servers, notes) = (self.servers.clone(), self.notes.clone());
        let catalog = options.catalog.clone();
        self.tasks.spawn(async move {
            let mut was_told = false;
            loop {
                let deadline = Deadline::after_ms(2 * POLL_MS);
                let note = match servers.query(&catalog, deadline).await {
                    Ok(adverts) => Some(Note::Listing(adverts)),
                    // Running jobs do not need the catalog; it is asked again.
                    Err(error) if error.is_transient() => {
                        if !std::mem::replace(&mut was_told, true) {
                            tracing::warn!(catalog, %error, "catalog does not answer yet");
                        }
                        None
                    }
                    Err(error) => Some(Note::Refused(error)),
                };
                was_told &= note.is_none();
                if let Some(note) = note
                    && notes.send(note).await.is_err()
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(POLL_MS)).await;
            }
        });
        let notes = self.notes.clone();
        self.tasks.spawn(async move {
            while notes.send(Note::SecondDue).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(POLL_MS)).await;
            }
        });
        // Apart from the catalog: volumes must outlive its absence.
        let notes = self.notes.clone();
        let pause = Duration::from_millis(self.servers.settings.volume_lifetime_ms / 4 + 1);
        self.tasks.spawn(async move {
            while notes.send(Note::RenewDue).await.is_ok() {
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Waits for facts and takes all that are there. May be empty.
    async fn next_batch(
        &mut self,
        notes: &mut mpsc::Receiver<Note>,
        cancel: &Cancel,
    ) -> Vec<Event> {
        let due_ms = match self.scheduler.next_timer() {
            Some(at) => at.ms_since(self.clock.time(now(), tick())),
            None => u64::from(u32::MAX),
        };
        let mut batch = Vec::new();
        tokio::select! {
            Some(note) = notes.recv() => self.sort(note, &mut batch),
            () = tokio::time::sleep(Duration::from_millis(due_ms)) => batch.push(Event::Tick),
            () = cancel.requested(), if !self.is_cancelled => {
                self.is_cancelled = true;
                batch.push(Event::CancelRequested);
            }
        }
        while batch.len() < BATCH_MAX
            && let Ok(note) = notes.try_recv()
        {
            self.sort(note, &mut batch);
        }
        while self.tasks.try_join_next().is_some() {}
        batch
    }

    fn sort(&mut self, note: Note, batch: &mut Vec<Event>) {
        match note {
            Note::Event(event) => batch.push(event),
            Note::Watch(server, execution) => self.watch(server, execution),
            Note::Listing(adverts) => {
                batch.extend(self.servers.new_homes());
                let mut contact = self.servers.contact();
                contact.listed(adverts.iter().map(|advert| advert.id), tick());
                let is_heard = |server| contact.is_heard(&self.scheduler, server, tick());
                let news = self.listing.compare(&self.scheduler, adverts, is_heard);
                batch.extend(news);
            }
            Note::Refused(error) => self.refusal = Some(error),
            Note::RenewDue => self.renew(),
            Note::SecondDue => {
                batch.extend(self.wishes());
                batch.extend(self.judge_silence());
            }
            Note::Allotted(server, answer) => batch.extend(self.allotted(server, answer)),
        }
    }

    /// Makes facts durable, tells them to the core, and does what it asks.
    async fn take(&mut self, batch: Vec<Event>) -> Result<()> {
        let now = self.clock.time(now(), tick());
        let records: Vec<Record> = batch.into_iter().map(|event| (now, event)).collect();
        if records.is_empty() {
            return Ok(());
        }
        let gone = || Error::new(ErrorCode::ServerFault, "the journal is not usable any more");
        let mut journal = self.journal.take().ok_or_else(gone)?;
        let written = tokio::task::spawn_blocking(move || {
            journal.append(&records).map(|()| (journal, records))
        });
        let (journal, records) = written.await.map_err(|_| gone())??;
        self.journal = Some(journal);
        let mut actions = Vec::new();
        for (now, event) in records {
            self.ledger.note(&self.scheduler, now, &event);
            self.keep_output(&event);
            self.tell_failure(now, &event);
            let started = match &event {
                Event::JobStarted { execution } => Some(*execution),
                _ => None,
            };
            let is_listing = matches!(event, Event::ServersSeen { .. });
            if let Event::ServerSilent { server } = &event {
                self.watch_no_more(*server);
            }
            let warned = self.scheduler.warnings().len();
            self.scheduler.step(now, event, &mut actions);
            for warning in &self.scheduler.warnings()[warned..] {
                tracing::warn!("{}", warning.text);
            }
            if is_listing {
                self.follow_addresses();
            }
            if let Some(execution) = started
                && let Some((_, server)) = self.scheduler.execution(execution)
            {
                self.watch(server, execution);
            }
        }
        for action in actions {
            self.execute(action);
        }
        Ok(())
    }

    /// Says why nothing seems to happen while something is tried again.
    fn tell_failure(&mut self, now: Time, event: &Event) {
        let error = match event {
            Event::JobEnded { report, .. } => match &report.outcome {
                JobOutcome::EnvironmentFailed(error) => error,
                _ => return,
            },
            Event::VolumeCreateFailed { error, .. } | Event::JobStartFailed { error, .. } => error,
            // Of a file that no job wrote the core tells.
            Event::ExtractFailed { error, .. } if error.code != ErrorCode::NotFound => error,
            _ => return,
        };
        let is_due = self.told.is_none_or(|told| now.ms_since(told) >= TELL_MS);
        if is_due && !self.servers.is_told(error) {
            self.told = Some(now);
            let what = self.scheduler.describe_call(event);
            tracing::warn!(%error, "{what} failed; what can help is tried");
        }
    }

    fn place(&self, server: ServerId) -> Place {
        let address = self.scheduler.node(server).map(|node| node.address.clone());
        Place {
            server,
            address: address.unwrap_or_default(),
        }
    }

    fn watch(&mut self, server: ServerId, execution: ExecutionId) {
        if !self.watched.contains_key(&server) {
            let place = self.place(server);
            let watched: Watched = Arc::new(watch::Sender::new(WatchList {
                address: place.address,
                executions: BTreeSet::new(),
            }));
            let (servers, notes) = (self.servers.clone(), self.notes.clone());
            self.tasks
                .spawn(watch_node(servers, watched.clone(), notes));
            self.watched.insert(server, watched);
        }
        self.watched[&server].send_modify(|watched| {
            watched.executions.insert(execution);
        });
    }

    fn start(
        &mut self,
        execution: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: Vec<MountedVolume>,
        results: Vec<VolumeIndex>,
    ) {
        let (servers, notes, now) = (self.servers.clone(), self.notes.clone(), now());
        let place = self.place(server);
        let with_place = volumes
            .into_iter()
            .map(|v| (v, v.server.map(|server| self.place(server))));
        let volumes: Vec<_> = with_place.collect();
        self.tasks.spawn(async move {
            let started = servers.start(now, execution, job, &place, volumes, &results);
            let started = started.await;
            send(&notes, Some(started)).await;
        });
    }

    /// Starts to do what the core asks; the outcome returns as a fact.
    fn execute(&mut self, action: Action) {
        let (servers, notes, now) = (self.servers.clone(), self.notes.clone(), now());
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => {
                let place = self.place(server);
                self.tasks.spawn(async move {
                    for event in servers.create(now, id, volume, &place, size).await {
                        send(&notes, Some(event)).await;
                    }
                });
            }
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                base,
            } => {
                let copying = Copying {
                    id,
                    source,
                    holder: source.server.map(|holder| self.place(holder)),
                    place: self.place(server),
                    size,
                    base,
                };
                self.tasks.spawn(async move {
                    for event in servers.copy(now, copying).await {
                        send(&notes, Some(event)).await;
                    }
                });
            }
            Action::WarmVolume { id, server } => self.warm(id, server),
            Action::LookAtCache { id, server } => self.look_at_cache(id, server),
            Action::DeleteVolume { id, server } => self.delete(id, server),
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                results,
            } => self.start(execution, job, server, volumes, results),
            Action::KillJob { execution, server } => {
                let place = self.place(server);
                self.tasks.spawn(async move {
                    // Whatever it says, if anything: watching tells how it is.
                    drop(servers.kill(execution, &place).await);
                    // The loop ended: nobody waits for this any more.
                    let _ = notes.send(Note::Watch(server, execution)).await;
                });
            }
            Action::ExtractFile {
                extract,
                index,
                source,
            } => self.send_home((extract, index), source),
            Action::ProbeVolumes { server, volumes } => self.renew_on(server, volumes, 0),
            Action::FindVolumes { server, volumes } => self.find(server, volumes),
            Action::Finish { .. } => {}
        }
    }

    async fn finish(mut self) -> Result<RunReport> {
        self.tasks.shutdown().await;
        self.outputs.finish().await;
        self.leave_results().await;
        self.unshare().await;
        if self.scheduler.settings().is_private_at_home()
            && !self.scheduler.keeps_results()
            && let Err(error) = remote_io::clean(&self.servers, self.scheduler.workflow()).await
        {
            let left = remote_io::directory(self.servers.run);
            tracing::warn!(%error, "could not remove {left} at home; remove it by hand");
        }
        let over = || Error::new(ErrorCode::ServerFault, "the run is not over");
        let outcome = self.scheduler.outcome().cloned().ok_or_else(over)?;
        Ok(self.ledger.report(&self.scheduler, outcome))
    }
}

async fn send(notes: &mpsc::Sender<Note>, event: Option<Event>) {
    if let Some(event) = event {
        // The loop ended: nobody waits for this any more.
        let _ = notes.send(Note::Event(event)).await;
    }
}
