//! Calls to servers on behalf of a run, each answered as an event. Decides nothing but how often
//! one and the same call is repeated.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::allotment::{SetNodeQuota, NodeQuotaList};
use bafs_proto::bearer::Bearer;
use bafs_proto::cache::{CacheStatus, Pinning, GetCache, WarmCache};
use bafs_proto::command::too_long_message;
use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, ServerId, VolumeId};
use bafs_proto::limits::BLOCK_BYTES_DEFAULT;
use bafs_proto::message::{
    Advert, Call, CreateVolume, DeleteVolume, JobCommand, JobOutcome, JobReport, JobSpec, KillJob,
    MountSpec, MountTarget, QueryServers, RenewVolumes, Request, StartJob,
};
use bafs_proto::net::pool::Pool;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::{Deadline, KeepaliveDeadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::{
    ReplacementPolicy, VolumeSource, VolumeKind as Kind, VolumeSpec, VolumeState, VolumeStatus,
};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::contact::Contact;
use super::homes::{HomePath, Homes};
use super::remote_io;
use crate::driver::{now, tick};
use crate::logic::{Event, MountedVolume, Settings, Space};
use crate::workflow::{CachePolicy, JobIndex, VolumeIndex, VolumeKind, Workflow};

/// One call is repeated for so long, in milliseconds.
pub(super) const CALL_MS: u64 = 20_000;

/// A node says within so long what it keeps for the run, in milliseconds; it is asked again.
const ALLOT_MS: u64 = 3_000;

/// A home may take so long to appear in the catalog before its name counts as wrong, in
/// milliseconds: adverts come every second and vanish after four.
const HOME_MS: u64 = 6_000;

/// A call that nobody answers is made again so often because no node answered meanwhile.
const DOUBTS_MAX: u32 = 3;

/// A node shows within so long what a cache keeps, in milliseconds; it is not asked again.
const LOOK_MS: u64 = 3_000;

/// A volume may take so long to be filled, in milliseconds.
const FILL_MS_MAX: u64 = 12 * 3_600_000;

/// Answers of a server that fills a volume may be late so often in a row, on a slow link.
const SILENCES_MAX: u32 = 2;

/// Before what fails is tried again.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// A token given to a job is good for so long, in milliseconds.
const TOKEN_MS: u64 = 7 * 24 * 3_600_000;

/// The cluster as this run sees it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Servers {
    pub(crate) pool: Pool,
    pub(crate) bearer: Arc<Bearer>,
    pub(crate) homes: Arc<Mutex<Homes>>,
    /// Who answers.
    pub(crate) contact: Arc<Mutex<Contact>>,
    pub(crate) workflow: Arc<Workflow>,
    pub(crate) run: RunId,
    pub(crate) settings: Arc<Settings>,
    /// Whether an earlier scheduler began the run.
    pub(crate) is_resumed: bool,
}

/// Where a server is.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) server: ServerId,
    pub(crate) address: String,
}

impl Servers {
    pub(crate) async fn query(&self, catalog: &str, deadline: Deadline) -> Result<Vec<Advert>> {
        let list = self
            .once(catalog, QueryServers::default(), deadline)
            .await?;
        let told = self
            .homes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .learn(&list.servers);
        for text in told {
            tracing::warn!("{text}");
        }
        Ok(list.servers)
    }

    /// Homes that the workflow names and that were listed for the first time.
    pub(crate) fn new_homes(&self) -> Vec<Event> {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.take_unkept()
    }

    /// Whether an error comes of a home being away, of which the user was told.
    pub(crate) fn is_told(&self, error: &Error) -> bool {
        let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.is_told(error)
    }

    /// Owner of all volumes of the run.
    pub(crate) fn owner(&self) -> String {
        format!("{} (run {})", self.workflow.name, self.run)
    }

    /// Asks a node to keep a part of itself for the run.
    pub(crate) async fn allot(&self, address: &str, call: SetNodeQuota) -> Result<NodeQuotaList> {
        let deadline = Deadline::after_ms(ALLOT_MS);
        self.once(address, call, deadline).await
    }

    pub(crate) async fn create(
        &self,
        now: Time,
        id: VolumeId,
        volume: VolumeIndex,
        place: &Place,
        size: Space,
    ) -> Vec<Event> {
        match self.try_create(now, id, volume, place, size).await {
            Ok(status) => made(status.warnings, id, Event::VolumeCreated { volume: id }),
            Err(error) => vec![Event::VolumeCreateFailed { volume: id, error }],
        }
    }

    async fn try_create(
        &self,
        now: Time,
        id: VolumeId,
        volume: VolumeIndex,
        place: &Place,
        size: Space,
    ) -> Result<VolumeStatus> {
        let spec = self.workflow.volume(volume);
        let (kind, source_token) = match &spec.kind {
            VolumeKind::Scratch { fill: None } => (Kind::Scratch { fill: None }, Token::none()),
            VolumeKind::Scratch { fill: Some(url) } => {
                let home = self.resolve(url).await?;
                let token = self.narrow_home(now, &home.path, &[Right::Read])?;
                (
                    Kind::Scratch {
                        fill: Some(source(home)),
                    },
                    token,
                )
            }
            VolumeKind::Cache {
                source: url,
                policy,
                ..
            } => {
                let home = self.resolve(url).await?;
                let token = self.narrow_home(now, &home.path, &[Right::Read])?;
                let kind = Kind::Cache {
                    source: source(home),
                    cooperative: format!("{}-{}", self.run, spec.name),
                    replacement: match policy {
                        CachePolicy::Lru => ReplacementPolicy::Lru,
                        CachePolicy::Mru => ReplacementPolicy::Mru,
                    },
                    block_bytes: BLOCK_BYTES_DEFAULT,
                };
                (kind, token)
            }
        };
        let spec = self.spec(id, volume, size, kind);
        let call = CreateVolume {
            spec,
            server: Some(place.server),
            base: None,
            source_token,
        };
        self.make(place, call).await
    }

    pub(super) fn spec(
        &self,
        id: VolumeId,
        volume: VolumeIndex,
        size: Space,
        kind: Kind,
    ) -> VolumeSpec {
        let declared = self.workflow.volume(volume);
        let (size_bytes, size_files) = declared.limit.limit_for_reservation(size.bytes, size.files);
        VolumeSpec {
            id,
            name: declared.name.clone(),
            owner: self.owner(),
            kind,
            size_bytes,
            size_files,
            limit: declared.limit,
            lifetime_ms: self.settings.volume_lifetime_ms,
        }
    }

    pub(super) async fn make(&self, place: &Place, call: CreateVolume) -> Result<VolumeStatus> {
        let mut status = self.fill(&place.address, call).await?;
        status.error.take().map_or(Ok(status), Err)
    }

    /// Asks again while the server is busy filling the volume. A server answers before the call's
    /// deadline that it is not done yet, so one that stays silent does not fill it.
    async fn fill(&self, address: &str, call: CreateVolume) -> Result<VolumeStatus> {
        let end = Deadline::after_ms(FILL_MS_MAX);
        let mut silences = 0;
        loop {
            match self.until(address, call.clone(), CALL_MS).await {
                Ok(status) if status.state == VolumeState::Creating => silences = 0,
                Err(error)
                    if error.code == ErrorCode::DeadlineExceeded && silences < SILENCES_MAX =>
                {
                    silences += 1;
                }
                answer => return answer,
            }
            if end.remaining().is_zero() {
                let text = format!(
                    "filling it took longer than {} hours",
                    FILL_MS_MAX / 3_600_000
                );
                return Err(Error::new(ErrorCode::ServerFault, text));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Has a cache fetch what it lacks. Where that does not work jobs fetch what they read.
    pub(crate) async fn warm(&self, volume: VolumeId, place: &Place) {
        let call = WarmCache {
            volume,
            path: String::new(),
            pinning: Pinning::FetchOnly,
        };
        if let Err(error) = self.until(&place.address, call, CALL_MS).await {
            tracing::debug!(%volume, %error, "the cache comes with its readers");
        }
    }

    /// What a part of a cache keeps, and what it got once more.
    pub(crate) async fn look_at_cache(&self, volume: VolumeId, place: &Place) -> Result<Event> {
        let deadline = Deadline::after_ms(LOOK_MS);
        let status = self.once(&place.address, GetCache { volume }, deadline);
        let status = status.await?;
        Ok(Event::CacheSeen {
            volume,
            kept_bytes: kept_bytes(&status),
            again_bytes: again_bytes(&status),
        })
    }

    /// Deletes a volume; one that is not there is deleted.
    pub(crate) async fn delete(&self, volume: VolumeId, place: &Place) -> Result<()> {
        let call = DeleteVolume { volume };
        match self.until(&place.address, call, self.silence_ms()).await {
            Err(error) if error.code != ErrorCode::VolumeLost => {
                tracing::debug!(%volume, %error, "volume not deleted yet");
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Asks for volumes and thereby keeps them alive; from now on, if nobody asks any more, for at
    /// least `lifetime_ms`. Answers those that are gone.
    pub(crate) async fn renew(
        &self,
        place: &Place,
        volumes: Vec<VolumeId>,
        lifetime_ms: u64,
    ) -> Result<Vec<VolumeId>> {
        let call = RenewVolumes {
            volumes,
            lifetime_ms,
        };
        let renewed = self.until(&place.address, call, self.silence_ms()).await;
        renewed.map(|renewed| renewed.lost_volumes)
    }

    /// A small call is repeated for so long, in milliseconds: a server that has not answered it
    /// then may be given up.
    fn silence_ms(&self) -> u64 {
        (CALL_MS / 4).max(self.settings.lost_after_ms + 1_000)
    }

    pub(crate) async fn start(
        &self,
        now: Time,
        execution: ExecutionId,
        job: JobIndex,
        place: &Place,
        volumes: Vec<(MountedVolume, Option<Place>)>,
        results: &[VolumeIndex],
    ) -> Event {
        let mut spec = match self.job_spec(now, job, volumes, results).await {
            Ok(spec) => spec,
            Err(error) => return Event::JobStartFailed { execution, error },
        };
        let Ok(words) = spec.command.move_arguments_to_body() else {
            // No node could start it: it ends as one that Linux refuses.
            let report = not_started(too_long_message(&spec.command.executable));
            return Event::JobEnded { execution, report };
        };
        let call = StartJob {
            execution,
            job: spec,
        };
        let address = &place.address;
        match self.until_with_body(address, call, words, CALL_MS).await {
            Ok(_) => Event::JobStarted { execution },
            Err(error) => Event::JobStartFailed { execution, error },
        }
    }

    async fn job_spec(
        &self,
        now: Time,
        job: JobIndex,
        volumes: Vec<(MountedVolume, Option<Place>)>,
        results: &[VolumeIndex],
    ) -> Result<JobSpec> {
        let job = self.workflow.job(job);
        let mut mounts = Vec::new();
        for (mount, (mounted, place)) in job.mounts.iter().zip(volumes) {
            let spec = self.workflow.volume(mount.volume);
            let rights: &[Right] = if mount.writable {
                &[Right::Read, Right::Write]
            } else {
                &[Right::Read]
            };
            let (target, resource) = match place {
                None => {
                    let home = self.home_of(mount.volume, mounted.id).await?;
                    if home.address.contains("://") {
                        let text = format!(
                            "remote I/O needs a home server, but {} is none: export the data \
                             with `bafs home`, or run with volumes",
                            home.address
                        );
                        return Err(Error::new(ErrorCode::Unsupported, text));
                    }
                    let resource = Resource::Home(home.path.clone());
                    (
                        MountTarget::Home {
                            server: home.address,
                            path: home.path,
                        },
                        resource,
                    )
                }
                Some(place) => {
                    let (server, volume) = (place.address, mounted.id);
                    let target = match spec.kind {
                        VolumeKind::Scratch { .. } => MountTarget::Scratch { server, volume },
                        VolumeKind::Cache { .. } => MountTarget::Cache { server, volume },
                    };
                    (target, Resource::Volume(volume))
                }
            };
            let token = self.give(now, resource, rights)?;
            mounts.push(MountSpec {
                name: spec.name.clone(),
                path: mount.path.clone(),
                target,
                writable: mount.writable,
                write_back: mount.write_back,
                token,
                lifetime_ms_min: match results.contains(&mount.volume) {
                    true => self.settings.result_lifetime_ms,
                    false => 0,
                },
            });
        }
        let command = &job.command;
        Ok(JobSpec {
            name: job.name.clone(),
            command: JobCommand {
                executable: command.executable.clone(),
                arguments: command.arguments.clone(),
                environment: command.environment.iter().cloned().collect(),
                directory: command.directory.clone(),
                stdout: command.stdout.clone(),
                stderr: command.stderr.clone(),
                shared_directories: command.share.clone(),
            },
            mounts,
            op_deadline_ms: self.settings.op_deadline_ms,
        })
    }

    /// Asks a node to kill an execution, until it hears it; `Ok` when it did, a transient error
    /// when it is silent.
    pub(crate) async fn kill(&self, execution: ExecutionId, place: &Place) -> Result<()> {
        loop {
            let answer = self
                .until(&place.address, KillJob { execution }, CALL_MS)
                .await;
            match answer {
                // It lives, and is asked again.
                Err(error) if error.is_transient() && !is_silence(&error) => {}
                answer => return answer.map(|_| ()),
            }
        }
    }

    /// Where a volume is at home when nothing is cached.
    pub(super) async fn home_of(&self, volume: VolumeIndex, id: VolumeId) -> Result<HomePath> {
        match &self.workflow.volume(volume).kind {
            VolumeKind::Cache { source: url, .. } => self.resolve(url).await,
            VolumeKind::Scratch { fill: Some(url) } => {
                remote_io::filled(self, self.resolve(url).await?, ExtractionId(id.0)).await
            }
            VolumeKind::Scratch { fill: None } => {
                let url = remote_io::any_home(&self.workflow).ok_or_else(|| {
                    let text = "remote I/O needs a home, but the workflow names none";
                    Error::new(ErrorCode::Unsupported, text)
                })?;
                let home = self.resolve(url).await?;
                let path = format!("{}/{id}", remote_io::directory(self.run));
                Ok(HomePath { path, ..home })
            }
        }
    }

    /// The place of a URL; waits a while for its home to appear in the catalog.
    pub(crate) async fn resolve(&self, url: &crate::workflow::Url) -> Result<HomePath> {
        let end = Deadline::after_ms(CALL_MS);
        let mut patience: Option<Deadline> = None;
        loop {
            let (found, is_listed) = {
                let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
                (homes.resolve(url), homes.is_listed())
            };
            let error = match found {
                Err(error) if error.is_transient() && !end.remaining().is_zero() => error,
                // Not the fault of who asks: it is away, as when a node says so.
                Err(error) if error.is_transient() && self.is_resumed => {
                    return Err(Error::new(ErrorCode::HomeUnreachable, error.detail));
                }
                found => return found,
            };
            // Its jobs ran, so the names in the workflow were right once: their homes come back.
            if is_listed && !self.is_resumed {
                let until = *patience.get_or_insert_with(|| Deadline::after_ms(HOME_MS));
                if until.remaining().is_zero() {
                    // A home that never appears is a mistake in the workflow.
                    return Err(Error::new(ErrorCode::NotFound, error.detail));
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    pub(super) fn narrow_home(&self, now: Time, path: &str, rights: &[Right]) -> Result<Token> {
        self.give(now, Resource::Home(path.to_owned()), rights)
    }

    /// A token for others to use, for as long as jobs may take.
    pub(super) fn give(&self, now: Time, resource: Resource, rights: &[Right]) -> Result<Token> {
        self.bearer.delegate_token(resource, rights, now.plus_ms(TOKEN_MS))
    }

    /// Makes a call once.
    pub(crate) async fn once<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        deadline: Deadline,
    ) -> Result<C::Reply> {
        let token = self.show(address, call.clone().into(), deadline.remaining_ms().into())?;
        let answer = self.pool.call(address, &token, call, deadline).await;
        // One call may be late for other reasons: silence begins with its end.
        self.note_contact(address, tick(), &answer);
        answer
    }

    /// The token that a call shows: good for nothing else, and at no other node.
    pub(super) fn show(&self, address: &str, request: Request, ms: u64) -> Result<Token> {
        self.bearer.token_for_call(address, &request, now(), ms)
    }

    pub(crate) async fn until<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        ms: u64,
    ) -> Result<C::Reply> {
        self.until_with_body(address, call, Bytes::new(), ms).await
    }

    async fn until_with_body<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        body: Bytes,
        ms: u64,
    ) -> Result<C::Reply> {
        let mut doubts = 0;
        loop {
            let (since, deadline) = (tick(), Deadline::after_ms(ms));
            let token = self.show(address, call.clone().into(), KeepaliveDeadline::total_ms_max(ms))?;
            let (call, body) = (call.clone(), body.clone());
            let asked = self.pool.call_with_retries(address, &token, call, body, deadline);
            let answer = asked.await.map(|(reply, _)| reply);
            self.note_contact(address, since, &answer);
            match &answer {
                Err(error) if is_silence(error) && doubts < DOUBTS_MAX => {
                    doubts += 1;
                    if !self.was_cut_off_since(since).await {
                        return answer;
                    }
                }
                _ => return answer,
            }
        }
    }
}

fn not_started(why: String) -> JobReport {
    JobReport {
        outcome: JobOutcome::NotStarted(why),
        wall_ms: 0,
        cpu_ms: 0,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}

/// What a part of a cache keeps as the primary. One that had to give some of it up has asked home
/// for more than it could keep.
fn kept_bytes(status: &CacheStatus) -> u64 {
    let count = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    let kept = status.primary_bytes.saturating_add(status.pinned_bytes);
    match count("cache_evicted_primary") {
        0 => kept,
        _ => kept.max(count("cache_kept_bytes").saturating_add(count("cache_wanted_bytes"))),
    }
}

/// What home sent a part of a cache once more as it had no room to keep it, in bytes.
fn again_bytes(status: &CacheStatus) -> u64 {
    let count = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    match count("cache_evicted_primary") {
        0 => 0,
        _ => count("cache_home_bytes").saturating_sub(count("cache_wanted_bytes")),
    }
}

/// Whether a call failed because nobody answered it.
pub(crate) fn is_silence(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::Unreachable | ErrorCode::DeadlineExceeded
    )
}

/// The facts of a volume that is made: first what it does not have, so that nobody uses it before
/// that is told.
pub(super) fn made(warnings: SourceWarnings, volume: VolumeId, made: Event) -> Vec<Event> {
    let warned = (!warnings.is_empty()).then_some(Event::VolumeWarned { volume, warnings });
    warned.into_iter().chain([made]).collect()
}

fn source(home: HomePath) -> VolumeSource {
    VolumeSource::Home {
        address: home.address,
        path: home.path,
        id: home.id,
    }
}
