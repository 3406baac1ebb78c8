//! The queue of a service with its directory: what users ask of it, and the facts that its
//! supervisor tells it. It starts no run.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use bafs_proto::identity::Identity;
use bafs_proto::ids::RunId;
use bafs_proto::message::Role;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::logic::records::{UserRecord, WorkflowRecord};
use bafs_queue::{
    QueueControl, QueueDecision, QueueEvent, QueueRefusal, RecordedQueue, Requester, Submission,
    UserQuota, WorkflowId, WorkflowSummary,
};
use bafs_server::clock;
use bafs_workflow::{ListedEntry, Url};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

use super::result_places::{PlaceIndex, ResultPlaces, drop_waited_for};
use super::run_files::{RunFiles, remove_directory, write_whole_file};
use super::submitted_text::parse_submission;
use super::user_rights::{check_home_rights, check_user_name, clean_home};
use super::workflow_demand::estimate_demand;
use super::workflow_view::{build_details, describe_wait};
use crate::home_view::HomeView;
use crate::init;
use crate::learned::LearnedStore;

const JOURNAL_FILE: &str = "queue.journal";
const WORKFLOWS_DIRECTORY: &str = "workflows";
const USERS_DIRECTORY: &str = "users";

/// Runs of workflows that the queue does not know, which have begun.
const UNKNOWN_DIRECTORY: &str = "unknown-workflows";

/// The file of learned values, for all users of the service.
const LEARNED_FILE: &str = "learned.redb";

/// The queue and its directory.
#[derive(Debug)]
pub(crate) struct QueueService {
    directory: PathBuf,
    identity: Identity,
    pub(super) catalog: String,
    queue: Mutex<RecordedQueue>,
    decisions: UnboundedSender<QueueDecision>,
    /// Held while a share is written.
    share_writing: Mutex<()>,
    /// What the largest node offers.
    pub(super) node_bytes: AtomicU64,
    /// Where workflows that have not ended send results. Locked after the queue.
    places: Mutex<PlaceIndex>,
    /// Why workflows that are under way have no process now.
    start_faults: Mutex<BTreeMap<WorkflowId, String>>,
    /// Why nothing can be recorded any more.
    failure: watch::Sender<Option<Error>>,
    /// Whether the last fact could not be recorded, which was said.
    is_disk_full: AtomicBool,
}

impl QueueService {
    /// Opens the queue in a directory, which nobody else uses, and removes what a crash left of
    /// submissions that nobody was told of.
    ///
    /// # Errors
    /// The journal cannot be read or written.
    pub(crate) fn open(
        directory: &Path,
        identity: Identity,
        catalog: &str,
        decisions: UnboundedSender<QueueDecision>,
    ) -> anyhow::Result<Self> {
        for part in [WORKFLOWS_DIRECTORY, USERS_DIRECTORY] {
            let part = directory.join(part);
            fs::create_dir_all(&part).with_context(|| part.display().to_string())?;
        }
        let queue = RecordedQueue::open(&directory.join(JOURNAL_FILE))?;
        let service = Self {
            directory: directory.to_owned(),
            identity,
            catalog: catalog.to_owned(),
            queue: Mutex::new(queue),
            decisions,
            share_writing: Mutex::default(),
            node_bytes: AtomicU64::new(0),
            places: Mutex::default(),
            start_faults: Mutex::default(),
            failure: watch::Sender::new(None),
            is_disk_full: AtomicBool::new(false),
        };
        service.remove_unknown_directories()?;
        service.read_places();
        Ok(service)
    }

    /// Why the service must end, once it must.
    pub(crate) fn watch_failure(&self) -> watch::Receiver<Option<Error>> {
        self.failure.subscribe()
    }

    /// The queue.
    pub(super) fn queue(&self) -> MutexGuard<'_, RecordedQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the queue a fact.
    ///
    /// # Errors
    /// `NoSpaceBytes` where the disk is full, and nothing has happened. Else it cannot be recorded:
    /// the service must end.
    pub(crate) fn record(&self, event: QueueEvent) -> Result<()> {
        self.record_in(&mut self.queue(), event)
    }

    /// Tells the queue a fact, unless the disk is full. Whoever calls tells it again then.
    ///
    /// # Errors
    /// It cannot be recorded: the service must end.
    pub(super) fn record_if_room(&self, event: QueueEvent) -> Result<bool> {
        match self.record(event) {
            Ok(()) => Ok(true),
            Err(error) if error.code == ErrorCode::NoSpaceBytes => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn record_in(&self, queue: &mut RecordedQueue, event: QueueEvent) -> Result<()> {
        let is_tick = event == QueueEvent::Ticked;
        let decisions = match queue.record(clock::now(), event) {
            Ok(decisions) => decisions,
            Err(error) if error.code == ErrorCode::NoSpaceBytes => {
                if !self.is_disk_full.swap(true, Ordering::Relaxed) {
                    tracing::error!("the queue stands still until there is room: {error}");
                }
                return Err(error);
            }
            Err(error) => {
                self.failure.send_replace(Some(error.clone()));
                return Err(error);
            }
        };
        // Nothing is written where only time has passed.
        let is_written = !is_tick || !decisions.is_empty();
        if is_written && self.is_disk_full.swap(false, Ordering::Relaxed) {
            tracing::warn!("the queue goes on: its disk has room again");
        }
        for decision in decisions {
            // Nobody listens any more when the service ends; the next one goes on.
            let _ = self.decisions.send(decision);
        }
        Ok(())
    }

    /// The files of a workflow.
    pub(super) fn run_files(&self, id: WorkflowId) -> RunFiles {
        RunFiles::new(self.workflows_directory().join(id.to_string()))
    }

    /// Tells a run what it may use now. One at a time, so that the last one tells the last share.
    pub(super) fn publish_share(&self, id: WorkflowId) -> anyhow::Result<()> {
        let turn = self.share_writing.lock();
        let _turn = turn.unwrap_or_else(PoisonError::into_inner);
        let share = {
            let queue = self.queue();
            let record = queue.state().workflows().get(&id);
            record
                .filter(|record| record.has_run)
                .map(|record| record.share)
        };
        share.map_or(Ok(()), |share| self.run_files(id).write_share(share))
    }

    /// Reads where workflows of an earlier service send results.
    fn read_places(&self) {
        let queue = self.queue();
        for (id, record) in queue.state().workflows() {
            let open = (!record.state.is_over()).then(|| self.run_files(*id).read_places());
            if let Some(places) = open.flatten() {
                self.note_places(&queue, *id, &places);
            }
        }
    }

    fn note_places(&self, queue: &RecordedQueue, id: WorkflowId, places: &ResultPlaces) {
        let mut index = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        index.insert(id, places, |id| is_open(queue, id));
    }

    /// Workflows that must end before one starts that sends results to these places.
    fn find_predecessors(&self, queue: &RecordedQueue, places: &ResultPlaces) -> Vec<WorkflowId> {
        let index = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let found = index.find_overlaps(places, |id| is_open(queue, id));
        drop_waited_for(found, |id| {
            let record = queue.state().workflows().get(&id);
            record.map_or(&[], |record| record.after.as_slice())
        })
    }

    /// Notes why a workflow has no process now; nothing if it has one.
    pub(super) fn note_start_fault(&self, id: WorkflowId, why: Option<String>) {
        let faults = self.start_faults.lock();
        let mut faults = faults.unwrap_or_else(PoisonError::into_inner);
        match why {
            Some(why) => drop(faults.insert(id, why)),
            None => drop(faults.remove(&id)),
        }
    }

    fn start_fault(&self, id: WorkflowId) -> Option<String> {
        let faults = self.start_faults.lock();
        let faults = faults.unwrap_or_else(PoisonError::into_inner);
        faults.get(&id).cloned()
    }

    /// The file of learned values.
    pub(super) fn learned_path(&self) -> PathBuf {
        self.directory.join(LEARNED_FILE)
    }

    fn workflows_directory(&self) -> PathBuf {
        self.directory.join(WORKFLOWS_DIRECTORY)
    }

    /// Removes drafts of submissions that nobody was told of, and what the queue has forgotten. A
    /// run of a number that the queue never had is put aside: the journal of the queue is older.
    fn remove_unknown_directories(&self) -> anyhow::Result<()> {
        let queue = self.queue();
        let known = queue.state().workflows();
        for entry in fs::read_dir(self.workflows_directory())? {
            let entry = entry?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.parse().ok());
            if id.is_some_and(|id| known.contains_key(&id)) {
                continue;
            }
            let is_later = id.is_some_and(|id| id >= queue.state().next_id());
            if is_later && RunFiles::new(entry.path()).has_begun() {
                self.put_aside(&entry.path(), &name)?;
            } else {
                remove_directory(&entry.path())?;
            }
        }
        Ok(())
    }

    fn put_aside(&self, directory: &Path, name: &OsStr) -> anyhow::Result<()> {
        let aside = self.directory.join(UNKNOWN_DIRECTORY);
        fs::create_dir_all(&aside)?;
        let mut place = name.to_owned();
        place.push(format!("-{}", RunId::random()));
        let place = aside.join(place);
        fs::rename(directory, &place)?;
        tracing::warn!(
            "{} is of a workflow that the queue does not have: its journal is older; it is {} now",
            directory.display(),
            place.display()
        );
        Ok(())
    }

    // ------------------------------------------------------------------------ users

    /// Adds a user, or a new generation of one; which generation that is.
    pub(super) fn add_user(
        &self,
        requester: &Requester,
        name: &str,
        homes: &[String],
        quota: UserQuota,
    ) -> Result<u64> {
        check_operator(requester)?;
        check_user_name(name)?;
        let homes: Vec<String> = match homes {
            [] => vec![String::new()],
            homes => homes
                .iter()
                .map(|path| clean_home(path))
                .collect::<Result<_>>()?,
        };
        let mut queue = self.queue();
        let user = name.to_owned();
        self.record_in(&mut queue, QueueEvent::UserAdded { user, homes, quota })?;
        let record = queue.state().users().get(name);
        Ok(record.map_or(0, |record| record.generation))
    }

    /// Users by name.
    pub(super) fn list_users(&self, requester: &Requester) -> Result<Vec<(String, UserRecord)>> {
        check_operator(requester)?;
        let queue = self.queue();
        let half_life_ms = queue.state().settings().half_life_ms;
        let users = queue.state().users().iter().map(|(name, record)| {
            let usage = record.usage.decayed(clock::now(), half_life_ms);
            let record = UserRecord {
                usage,
                ..record.clone()
            };
            (name.clone(), record)
        });
        Ok(users.collect())
    }

    /// Refuses a user from now on.
    pub(super) fn remove_user(&self, requester: &Requester, name: &str) -> Result<()> {
        check_operator(requester)?;
        let mut queue = self.queue();
        if !queue.state().users().contains_key(name) {
            let text = format!("there is no user '{name}'; `bafs user list` lists them");
            return Err(Error::new(ErrorCode::NotFound, text));
        }
        let user = name.to_owned();
        self.record_in(&mut queue, QueueEvent::UserRemoved { user })
    }

    /// The generation of a user who may ask; nothing if there is none.
    pub(super) fn active_generation(&self, name: &str) -> Option<u64> {
        let queue = self.queue();
        let record = queue.state().users().get(name)?;
        record.is_active.then_some(record.generation)
    }

    /// The directory of the identity with which the runs of a user act: it can do no more than the
    /// user may.
    pub(super) fn user_identity(&self, user: &str) -> anyhow::Result<PathBuf> {
        let record = self.queue().state().users().get(user).cloned();
        let record = record.context("the user is known")?;
        let place = format!("{user}-{}", record.generation);
        let directory = self.directory.join(USERS_DIRECTORY).join(place);
        let scheduler = init::identity_directory(&directory, Role::Scheduler);
        if scheduler.join("token").exists() {
            return Ok(directory);
        }
        let all: &[Right] = &[Right::Read, Right::Write, Right::Manage];
        let homes: Vec<Resource> = record.homes.into_iter().map(Resource::Home).collect();
        let work = [
            Resource::Volumes,
            Resource::Cooperative(String::new()),
            Resource::Jobs,
        ];
        // It grants nothing: homes see by it whose transfers these are.
        let name = [Resource::Queue(format!("{user}/{}", record.generation))];
        let granted: [(&[Resource], &[Right]); 4] = [
            (&[Resource::Catalog], &[Right::Read]),
            (&work, all),
            (&homes, &[Right::Read, Right::Write]),
            (&name, &[Right::Manage]),
        ];
        let identity = &self.identity;
        let expires = identity.verifier.expiry_of(&identity.token)?;
        let token = identity.verifier.narrow_per_resource(
            &identity.token,
            &granted,
            expires.unwrap_or(Time(i64::MAX as u64)),
        )?;
        let narrow = Identity {
            token,
            ..identity.clone()
        };
        narrow.save(&scheduler)?;
        Ok(directory)
    }

    // -------------------------------------------------------------------- workflows

    /// Lists a home with the rights of a user.
    fn list_home(
        &self,
        user: &str,
        (url, depth): (&Url, usize),
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        let homes = self.home_view(user);
        homes
            .map_err(|error| format!("{error:#}"))?
            .list(url, depth, enters)
    }

    /// The homes of the cluster with the rights of a user.
    fn home_view(&self, user: &str) -> anyhow::Result<HomeView> {
        let identity = self.user_identity(user)?;
        HomeView::of_cluster(&identity, &self.catalog, Path::new(""))
    }

    /// Writes the files of a submission where nobody looks for them yet. What cannot be written
    /// leaves nothing.
    fn write_draft(
        &self,
        submission: &Submission,
        places: &ResultPlaces,
    ) -> anyhow::Result<PathBuf> {
        let name = format!("new-{}", RunId::random());
        let draft = self.workflows_directory().join(name);
        let written = write_submission(&draft, submission);
        let written = written.and_then(|()| RunFiles::new(draft.clone()).write_places(places));
        if written.is_err() {
            let _ = remove_directory(&draft);
        }
        written.map(|()| draft)
    }

    fn steer(&self, requester: &Requester, id: WorkflowId, event: QueueEvent) -> Result<()> {
        let mut queue = self.queue();
        check_owner(requester, id, queue.state().workflows().get(&id))?;
        queue.state().check_change(id, &event)?;
        self.record_in(&mut queue, event)
    }
}

impl QueueControl for QueueService {
    fn submit(&self, requester: &Requester, submission: Submission) -> Result<WorkflowId> {
        let user = &requester.user;
        if requester.is_operator && self.active_generation(user).is_none() {
            self.add_user(requester, user, &[], UserQuota::default())?;
        }
        let (homes, known) = {
            let queue = self.queue();
            let homes = match queue.state().users().get(user) {
                Some(record) if record.is_active => record.homes.clone(),
                _ => return Err(QueueRefusal::UnknownUser(user.clone()).into()),
            };
            (homes, queue.state().find_by_key(user, &submission.key))
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let list = |url: &Url, depth: usize, enters: &dyn Fn(&str) -> bool| {
            self.list_home(user, (url, depth), enters)
        };
        let mut workflow = parse_submission(&submission, &list)?;
        check_home_rights(&workflow, &homes)?;
        LearnedStore::new(self.learned_path()).fill_unknown(&mut workflow);
        let node_bytes = self.node_bytes.load(Ordering::Relaxed);
        let demand = estimate_demand(&workflow, node_bytes);
        self.queue().state().check_submission(user, demand.needed)?;
        let places = ResultPlaces::of_workflow(&workflow, |address| {
            self.home_view(user).ok()?.name_at(address)
        });
        let draft = self
            .write_draft(&submission, &places)
            .map_err(|error| fault(&error))?;
        let mut queue = self.queue();
        if let Some(known) = queue.state().find_by_key(user, &submission.key) {
            drop(queue);
            let _ = remove_directory(&draft);
            return Ok(known);
        }
        let id = queue.state().next_id();
        let placed = || {
            queue.state().check_submission(user, demand.needed)?;
            let place = self.workflows_directory();
            let moved = fs::rename(&draft, place.join(id.to_string()));
            let moved = moved.and_then(|()| File::open(&place)?.sync_all());
            moved.map_err(|error| fault(&error.into()))
        };
        if let Err(error) = placed() {
            let _ = remove_directory(&draft);
            return Err(error);
        }
        let submitted = QueueEvent::WorkflowSubmitted {
            id,
            user: user.clone(),
            name: submission.name,
            priority: submission.priority,
            key: submission.key,
            wanted: demand.wanted,
            needed: demand.needed,
            after: self.find_predecessors(&queue, &places),
        };
        if let Err(error) = self.record_in(&mut queue, submitted) {
            if error.code == ErrorCode::NoSpaceBytes {
                // The next one gets the number.
                let _ = remove_directory(self.run_files(id).directory());
            }
            return Err(error);
        }
        self.note_places(&queue, id, &places);
        Ok(id)
    }

    fn list(&self, requester: &Requester) -> Result<Vec<WorkflowSummary>> {
        let queue = self.queue();
        let workflows = queue.state().workflows().iter();
        let summaries = workflows.filter_map(|(id, record)| {
            let is_own = requester.is_operator || record.user == requester.user;
            if !is_own && !requester.sees_others {
                return None;
            }
            Some(WorkflowSummary {
                id: *id,
                user: is_own.then(|| record.user.clone()),
                state: record.state,
                details: is_own.then(|| {
                    let waits = || describe_wait(queue.state(), requester, *id);
                    let reason = self.start_fault(*id).or_else(waits);
                    let directory = self.run_files(*id).directory().display().to_string();
                    build_details(record, reason, directory)
                }),
            })
        });
        Ok(summaries.collect())
    }

    fn hold(&self, requester: &Requester, id: WorkflowId) -> Result<()> {
        self.steer(requester, id, QueueEvent::WorkflowHeld(id))
    }

    fn release(&self, requester: &Requester, id: WorkflowId) -> Result<()> {
        self.steer(requester, id, QueueEvent::WorkflowReleased(id))
    }

    fn remove(&self, requester: &Requester, id: WorkflowId) -> Result<()> {
        self.steer(requester, id, QueueEvent::RemovalRequested(id))
    }

    fn set_priority(&self, requester: &Requester, id: WorkflowId, priority: i32) -> Result<()> {
        self.steer(requester, id, QueueEvent::PriorityChanged { id, priority })
    }
}

fn write_submission(draft: &Path, submission: &Submission) -> anyhow::Result<()> {
    fs::create_dir(draft)?;
    let workflow = (&submission.name, &submission.text);
    for (path, text) in submission.files.iter().chain([workflow]) {
        let path = draft.join(path);
        fs::create_dir_all(path.parent().context("it is in a directory")?)?;
        write_whole_file(&path, text.as_bytes(), true)?;
    }
    Ok(())
}

fn is_open(queue: &RecordedQueue, id: WorkflowId) -> bool {
    let record = queue.state().workflows().get(&id);
    record.is_some_and(|record| !record.state.is_over())
}

fn check_operator(requester: &Requester) -> Result<()> {
    match requester.is_operator {
        true => Ok(()),
        false => {
            let text = "only operators manage users: those with the identity of `bafs init`";
            Err(Error::new(ErrorCode::RightMissing, text))
        }
    }
}

fn check_owner(
    requester: &Requester,
    id: WorkflowId,
    record: Option<&WorkflowRecord>,
) -> Result<(), QueueRefusal> {
    match record {
        Some(record) if requester.is_operator || record.user == requester.user => Ok(()),
        Some(_) if requester.sees_others => Err(QueueRefusal::ForeignWorkflow(id)),
        // Whether there is one is nobody's business.
        _ => Err(QueueRefusal::UnknownWorkflow(id)),
    }
}

fn fault(error: &anyhow::Error) -> Error {
    let full = [ErrorKind::StorageFull, ErrorKind::QuotaExceeded];
    let mut causes = error
        .chain()
        .filter_map(|it| it.downcast_ref::<std::io::Error>());
    let code = match causes.any(|it| full.contains(&it.kind())) {
        true => ErrorCode::NoSpaceBytes,
        false => ErrorCode::ServerFault,
    };
    Error::new(code, format!("{error:#}"))
}
