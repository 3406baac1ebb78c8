//! Calls to servers on behalf of a run, each answered as an event. Decides nothing but how often
//! one and the same call is repeated.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::bearer::Bearer;
use bafs_proto::cache::{CacheStatus, GetCache, Pinning, WarmCache};
use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_arguments::too_long_message;
use bafs_proto::limits::BLOCK_BYTES_DEFAULT;
use bafs_proto::message::{
    Advert, CreateVolume, DeleteVolume, JobCommand, JobLimits, JobOutcome, JobReport, JobSpec,
    KillJob, MountSpec, MountTarget, QueryServers, StartJob,
};
use bafs_proto::net::pool::Pool;
use bafs_proto::node_quota::{NodeQuotaList, SetNodeQuota};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::{
    ReplacementPolicy, VolumeKind as Kind, VolumeSource, VolumeSpec, VolumeState, VolumeStatus,
};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{CachePolicy, JobIndex, ProgramSpec, VolumeIndex, VolumeKind, Workflow};

use super::calls::is_unanswered;
use super::connectivity::Connectivity;
use super::homes::{HomePath, Homes};
use super::upload_epochs::UploadEpochs;
use crate::{Event, MountedVolume, Settings, Space};

/// One call is repeated for so long, in milliseconds.
pub(super) const CALL_TIMEOUT_MS: u64 = 20_000;

/// A node says within so long what it keeps for the run, in milliseconds; it is asked again.
const QUOTA_TIMEOUT_MS: u64 = 3_000;

/// A node shows within so long what a cache keeps, in milliseconds; it is not asked again.
const CACHE_INSPECTION_TIMEOUT_MS: u64 = 3_000;

/// A volume may take so long to be filled, in milliseconds.
const FILL_TIMEOUT_MS: u64 = 12 * 3_600_000;

/// Answers of a server that fills a volume may be late so often in a row, on a slow link.
const FILL_SILENCES_MAX: u32 = 2;

/// Before what fails is tried again.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// A token given to a job is good for so long, in milliseconds.
const TOKEN_LIFETIME_MS: u64 = 7 * 24 * 3_600_000;

/// The cluster as this run sees it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Servers {
    pub(crate) pool: Pool,
    pub(crate) bearer: Arc<Bearer>,
    pub(crate) homes: Arc<Mutex<Homes>>,
    pub(crate) upload_epochs: Arc<UploadEpochs>,
    /// Who answers.
    pub(crate) connectivity: Arc<Mutex<Connectivity>>,
    pub(crate) workflow: Arc<Workflow>,
    pub(crate) run: RunId,
    pub(crate) settings: Arc<Settings>,
    /// Whether an earlier scheduler began the run.
    pub(crate) is_resumed: bool,
}

/// Where a server is.
#[derive(Debug, Clone)]
pub(crate) struct ServerAddress {
    pub(crate) server: ServerId,
    pub(crate) address: String,
}

impl Servers {
    pub(crate) async fn query_catalog(
        &self,
        catalog: &str,
        deadline: Deadline,
    ) -> Result<Vec<Advert>> {
        let list = self
            .call_once(catalog, QueryServers::default(), deadline)
            .await?;
        let told = self
            .homes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .update_from_listing(&list.servers);
        for text in told {
            tracing::warn!("{text}");
        }
        Ok(list.servers)
    }

    /// Homes that the workflow names and that were listed for the first time.
    pub(crate) fn take_new_homes(&self) -> Vec<Event> {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.take_unjournaled()
    }

    /// Whether an error comes of a home being away, of which the user was told.
    pub(crate) fn is_reported_outage(&self, error: &Error) -> bool {
        let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.is_reported_outage(error)
    }

    /// Owner of all volumes of the run.
    pub(crate) fn volume_owner(&self) -> String {
        format!("{} (run {})", self.workflow.name, self.run)
    }

    /// Asks a node to keep a part of itself for the run.
    pub(crate) async fn set_node_quota(
        &self,
        address: &str,
        call: SetNodeQuota,
    ) -> Result<NodeQuotaList> {
        let deadline = Deadline::after_ms(QUOTA_TIMEOUT_MS);
        self.call_once(address, call, deadline).await
    }

    pub(crate) async fn create_volume(
        &self,
        now: Time,
        id: VolumeId,
        volume: VolumeIndex,
        location: &ServerAddress,
        size: Space,
    ) -> Vec<Event> {
        match self
            .try_create_volume(now, id, volume, location, size)
            .await
        {
            Ok(status) => created_events(status.warnings, id, Event::VolumeCreated { volume: id }),
            Err(error) => vec![Event::VolumeCreateFailed { volume: id, error }],
        }
    }

    async fn try_create_volume(
        &self,
        now: Time,
        id: VolumeId,
        volume: VolumeIndex,
        location: &ServerAddress,
        size: Space,
    ) -> Result<VolumeStatus> {
        let spec = self.workflow.volume(volume);
        let (kind, source_token) = match &spec.kind {
            VolumeKind::Scratch { fill: None } => (Kind::Scratch { fill: None }, Token::none()),
            VolumeKind::Scratch { fill: Some(url) } => {
                let home = self.resolve_url(url).await?;
                let token = self.narrow_home_token(now, &home.path, &[Right::Read])?;
                (
                    Kind::Scratch {
                        fill: Some(home_source(home)),
                    },
                    token,
                )
            }
            VolumeKind::Cache {
                source: url,
                policy,
                ..
            } => {
                let home = self.resolve_url(url).await?;
                let token = self.narrow_home_token(now, &home.path, &[Right::Read])?;
                let kind = Kind::Cache {
                    cooperative: home.cooperative_name(),
                    source: home_source(home),
                    replacement: match policy {
                        CachePolicy::Lru => ReplacementPolicy::Lru,
                        CachePolicy::Mru => ReplacementPolicy::Mru,
                    },
                    block_bytes: BLOCK_BYTES_DEFAULT,
                };
                (kind, token)
            }
        };
        let spec = self.volume_spec(id, volume, size, kind);
        let call = CreateVolume {
            spec,
            server: Some(location.server),
            base: None,
            source_token,
        };
        self.call_create(location, call).await
    }

    pub(super) fn volume_spec(
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
            owner: self.volume_owner(),
            kind,
            size_bytes,
            size_files,
            limit: declared.limit,
            lifetime_ms: self.settings.volume_lifetime_ms,
        }
    }

    pub(super) async fn call_create(
        &self,
        location: &ServerAddress,
        call: CreateVolume,
    ) -> Result<VolumeStatus> {
        let mut status = self.fill_volume(&location.address, call).await?;
        status.error.take().map_or(Ok(status), Err)
    }

    /// Asks again while the server is busy filling the volume. A server answers before the call's
    /// deadline that it is not done yet, so one that stays silent does not fill it.
    async fn fill_volume(&self, address: &str, call: CreateVolume) -> Result<VolumeStatus> {
        let end = Deadline::after_ms(FILL_TIMEOUT_MS);
        let mut silences = 0;
        loop {
            match self
                .call_until(address, call.clone(), CALL_TIMEOUT_MS)
                .await
            {
                Ok(status) if status.state == VolumeState::Creating => silences = 0,
                Err(error)
                    if error.code == ErrorCode::DeadlineExceeded
                        && silences < FILL_SILENCES_MAX =>
                {
                    silences += 1;
                }
                answer => return answer,
            }
            if end.remaining().is_zero() {
                let text = format!(
                    "filling it took longer than {} hours",
                    FILL_TIMEOUT_MS / 3_600_000
                );
                return Err(Error::new(ErrorCode::ServerFault, text));
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Has a cache fetch what it lacks. Where that does not work jobs fetch what they read.
    pub(crate) async fn warm_cache(&self, volume: VolumeId, location: &ServerAddress) {
        let call = WarmCache {
            volume,
            path: String::new(),
            pinning: Pinning::FetchOnly,
        };
        if let Err(error) = self
            .call_until(&location.address, call, CALL_TIMEOUT_MS)
            .await
        {
            tracing::debug!(%volume, %error, "the cache is filled as its readers read");
        }
    }

    /// What a part of a cache keeps, and what it got once more.
    pub(crate) async fn inspect_cache(
        &self,
        volume: VolumeId,
        location: &ServerAddress,
    ) -> Result<Event> {
        let deadline = Deadline::after_ms(CACHE_INSPECTION_TIMEOUT_MS);
        let status = self.call_once(&location.address, GetCache { volume }, deadline);
        let status = status.await?;
        Ok(Event::CacheInspected {
            volume,
            primary_bytes: primary_bytes(&status),
            refetched_bytes: refetched_bytes(&status),
        })
    }

    /// Deletes a volume; one that is not there is deleted.
    pub(crate) async fn delete_volume(
        &self,
        volume: VolumeId,
        location: &ServerAddress,
    ) -> Result<()> {
        let call = DeleteVolume { volume };
        match self
            .call_until(&location.address, call, self.call_timeout_ms())
            .await
        {
            Err(error) if error.code != ErrorCode::VolumeLost => {
                tracing::debug!(%volume, %error, "volume not deleted yet");
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Asks a node which of these volumes it has, again and again: that it says nothing, or is
    /// busy, does not tell that it has none. One that refuses to say has none for this run.
    pub(crate) async fn find_volumes(
        &self,
        location: &ServerAddress,
        volumes: Vec<VolumeId>,
    ) -> Vec<VolumeId> {
        loop {
            match self.renew_volumes(location, volumes.clone(), 0).await {
                Ok(lost) => {
                    return volumes
                        .into_iter()
                        .filter(|id| !lost.contains(id))
                        .collect();
                }
                Err(error) if error.is_transient() => {
                    let node = &location.address;
                    tracing::debug!(node, %error, "the node does not say yet what it has");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => {
                    let node = &location.address;
                    tracing::warn!(node, %error, "the node does not say what it has");
                    return Vec::new();
                }
            }
        }
    }

    /// A small call is repeated for so long, in milliseconds: a server that has not answered it
    /// then may be given up.
    pub(super) fn call_timeout_ms(&self) -> u64 {
        (CALL_TIMEOUT_MS / 4).max(self.settings.node_timeout_ms + 1_000)
    }

    pub(crate) async fn start_job(
        &self,
        now: Time,
        execution: ExecutionId,
        job: JobIndex,
        location: &ServerAddress,
        volumes: Vec<(MountedVolume, Option<ServerAddress>)>,
        (results, memory_bytes): (Vec<VolumeIndex>, u64),
    ) -> Event {
        let mut spec = match self.build_job_spec(now, job, volumes, &results).await {
            Ok(spec) => spec,
            Err(error) => return Event::JobStartFailed { execution, error },
        };
        spec.limits.memory_bytes = (memory_bytes > 0).then_some(memory_bytes);
        let Ok(words) = spec.command.move_arguments_to_body() else {
            // No node could start it: it ends as one that Linux refuses.
            let report = start_failure_report(too_long_message(&spec.command.executable));
            return Event::JobEnded { execution, report };
        };
        let call = StartJob {
            execution,
            job: spec,
        };
        let address = &location.address;
        match self
            .call_until_with_body(address, call, words, CALL_TIMEOUT_MS)
            .await
        {
            Ok(_) => Event::JobStarted { execution },
            Err(error) => Event::JobStartFailed { execution, error },
        }
    }

    async fn build_job_spec(
        &self,
        now: Time,
        job: JobIndex,
        volumes: Vec<(MountedVolume, Option<ServerAddress>)>,
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
                    let home = self.resolve_volume_home(mount.volume, mounted.id).await?;
                    if home.address.contains("://") {
                        let text = format!(
                            "remote I/O needs a home server, but {} is not one; export the data \
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
            let token = self.issue_token(now, resource, rights)?;
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
        Ok(JobSpec {
            name: job.name.clone(),
            command: build_command(&job.command),
            mounts,
            op_deadline_ms: self.settings.operation_timeout_ms,
            limits: JobLimits {
                memory_bytes: None,
                runtime_ms: job.limits.runtime_s.map(|s| s.saturating_mul(1_000)),
                temporary_bytes: job.limits.temporary_bytes,
            },
        })
    }

    /// Asks a node to kill an execution, until it hears it; `Ok` when it did, a transient error
    /// when it is silent.
    pub(crate) async fn kill_job(
        &self,
        execution: ExecutionId,
        location: &ServerAddress,
    ) -> Result<()> {
        loop {
            let answer = self
                .call_until(&location.address, KillJob { execution }, CALL_TIMEOUT_MS)
                .await;
            match answer {
                // It lives, and is asked again.
                Err(error) if error.is_transient() && !is_unanswered(&error) => {}
                answer => return answer.map(|_| ()),
            }
        }
    }

    pub(super) fn narrow_home_token(
        &self,
        now: Time,
        path: &str,
        rights: &[Right],
    ) -> Result<Token> {
        self.issue_token(now, Resource::Home(path.to_owned()), rights)
    }

    /// A token for others to use, for as long as jobs may take.
    pub(super) fn issue_token(
        &self,
        now: Time,
        resource: Resource,
        rights: &[Right],
    ) -> Result<Token> {
        self.bearer
            .delegate_token(resource, rights, now.plus_ms(TOKEN_LIFETIME_MS))
    }
}

fn start_failure_report(why: String) -> JobReport {
    JobReport {
        outcome: JobOutcome::NotStarted(why),
        wall_ms: 0,
        cpu_ms: 0,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}

/// What a part of a cache keeps as the primary. One that had to give some of it up has asked home
/// for more than it could keep.
fn primary_bytes(status: &CacheStatus) -> u64 {
    let count = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    let kept = status.primary_bytes.saturating_add(status.pinned_bytes);
    match count("cache_evicted_primary") {
        0 => kept,
        _ => kept
            .max(count("cache_recovered_bytes").saturating_add(count("cache_home_unique_bytes"))),
    }
}

/// What home sent a part of a cache once more as it had no room to keep it, in bytes.
fn refetched_bytes(status: &CacheStatus) -> u64 {
    let count = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    match count("cache_evicted_primary") {
        0 => 0,
        _ => count("cache_home_bytes").saturating_sub(count("cache_home_unique_bytes")),
    }
}

/// The facts of a volume that is made: first what it does not have, so that nobody uses it before
/// that is told.
pub(super) fn created_events(
    warnings: SourceWarnings,
    volume: VolumeId,
    made: Event,
) -> Vec<Event> {
    let warned =
        (!warnings.is_empty()).then_some(Event::SourceWarningsReceived { volume, warnings });
    warned.into_iter().chain([made]).collect()
}

fn home_source(home: HomePath) -> VolumeSource {
    VolumeSource::Home {
        address: home.address,
        path: home.path,
        id: home.id,
    }
}

/// A program as its node takes it.
fn build_command(program: &ProgramSpec) -> JobCommand {
    JobCommand {
        executable: program.executable.clone(),
        arguments: program.arguments.clone(),
        environment: program.environment.iter().cloned().collect(),
        directory: program.directory.clone(),
        stdout: program.stdout.clone(),
        stderr: program.stderr.clone(),
        shared_directories: program.shared_directories.clone(),
        required_files: program.required_files.clone(),
        produced_files: program.produced_files.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use bafs_proto::identity::Authority;
    use bafs_proto::message::{RenewVolumesReply, Reply};
    use bafs_proto::net::memory::MemoryNetwork;
    use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
    use bytes::Bytes;

    use super::*;

    /// A node that is busy for the first calls, and then lacks nothing.
    #[derive(Default)]
    struct BusyNode(AtomicU32);

    impl Service for BusyNode {
        fn serve(
            self: Arc<Self>,
            _incoming: IncomingRequest,
        ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
            let is_busy = self.0.fetch_add(1, Ordering::Relaxed) < 3;
            Box::pin(async move {
                // Longer than a caller waits for one call.
                if is_busy {
                    tokio::time::sleep(Duration::from_secs(2)).await;
                    return Err(Error::new(ErrorCode::Busy, "it starts"));
                }
                let lost_volumes = Vec::new();
                Ok((
                    Reply::RenewVolumes(RenewVolumesReply { lost_volumes }),
                    Bytes::new(),
                ))
            })
        }
    }

    #[tokio::test]
    async fn busy_node_loses_no_volumes() {
        let network = MemoryNetwork::new();
        network.listen("node", Arc::new(BusyNode::default()));
        let authority = Authority::generate().expect("authority");
        let (signer, rights) = (authority.signer(), [Right::Manage]);
        let token = signer.grant(&[Resource::Cluster], &rights, Time(u64::MAX / 2));
        let bearer = Bearer::new(token.expect("token"), signer.verifier());
        let none = |path: &str| Err(path.to_owned());
        let workflow = "job j {\nexecutable = x\n}\n";
        let workflow = bafs_workflow::parse_workflow("w.bafs", workflow, &none);
        let servers = Servers {
            pool: Pool::new(network.dialer("scheduler")),
            bearer: Arc::new(bearer),
            homes: Arc::default(),
            upload_epochs: Arc::default(),
            connectivity: Arc::default(),
            workflow: Arc::new(workflow.expect("it is right").workflow),
            run: RunId(1),
            settings: Arc::default(),
            is_resumed: false,
        };
        let location = ServerAddress {
            server: ServerId(1),
            address: "node".to_owned(),
        };
        let found = servers.find_volumes(&location, vec![VolumeId(7)]).await;
        assert_eq!(found, [VolumeId(7)]);
    }
}
