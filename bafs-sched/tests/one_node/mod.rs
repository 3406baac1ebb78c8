//! A catalog and a node in memory, which answer as real ones: real calls, simulated jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_proto::attributes::Attributes;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, ServerId, UploadEpoch, VolumeId};
use bafs_proto::message::{
    Advert, Counters, Done, ExtractFile, JobOutcome, JobOutput, JobReport, JobReports, JobState,
    Lifetime, MountTarget, PutReceipt, RenewVolumesReply, Reply, Request, ServerKind, ServerList,
    UploadEpochReply, WatchJobs,
};
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::node_quota::{NodeQuotaList, SetNodeQuota};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Time;
use bafs_proto::token::Token;
use bafs_proto::volume::{VolumeSpec, VolumeState, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

#[derive(Default)]
pub(crate) struct ClusterState {
    pub(crate) volumes: BTreeSet<VolumeId>,
    /// As a real node, it never makes a volume that was deleted, also if it hears of it later.
    pub(crate) deleted: BTreeSet<VolumeId>,
    pub(crate) running: BTreeSet<ExecutionId>,
    pub(crate) reports: BTreeMap<ExecutionId, JobState>,
    pub(crate) started: BTreeMap<String, u32>,
    pub(crate) files_at_home: BTreeMap<String, u32>,
    pub(crate) exit_codes: BTreeMap<String, Vec<i32>>,
    pub(crate) has_unfinished_jobs: bool,
    /// Where the node listens, if not where the catalog does.
    pub(crate) node_address: Option<String>,
    /// Why the catalog does not answer, if it does not.
    pub(crate) catalog_fault: Option<ErrorCode>,
    pub(crate) renewal_count: u32,
    /// Why the node keeps no part of itself, if it does not, and how often it was asked for one.
    pub(crate) quota_fault: Option<ErrorCode>,
    pub(crate) quota_requests: u32,
    /// Why volumes are reserved but cannot be filled, if so.
    pub(crate) fill_fault: Option<ErrorCode>,
    /// Why files do not come home, if they do not, and how often that was said.
    pub(crate) extract_fault: Option<ErrorCode>,
    pub(crate) extract_fault_count: u32,
    /// Whether the catalog does not know the home.
    pub(crate) is_home_unlisted: bool,
    /// The last call that is answered, and whether it came.
    pub(crate) is_last_call: Option<fn(&Request) -> bool>,
    pub(crate) is_stopped: bool,
    /// What calls showed.
    pub(crate) shown_tokens: Vec<(Request, Token)>,
}

/// Catalog and the only node, told apart by what they are asked.
#[derive(Default)]
pub(crate) struct OneNodeCluster(Mutex<ClusterState>);

impl OneNodeCluster {
    pub(crate) fn state(&self) -> std::sync::MutexGuard<'_, ClusterState> {
        self.0.lock().expect("no panic inside")
    }

    async fn answer_request(self: Arc<Self>, request: Request) -> Result<Reply> {
        Ok(match request {
            Request::QueryServers(_) => {
                let state = self.state();
                if let Some(code) = state.catalog_fault {
                    return Err(Error::new(code, "no list today"));
                }
                let node = state
                    .node_address
                    .clone()
                    .unwrap_or_else(|| "cluster".to_owned());
                let mut servers = node_and_home_adverts(&node);
                servers.retain(|it| it.kind != ServerKind::Home || !state.is_home_unlisted);
                Reply::QueryServers(ServerList { servers })
            }
            // The home answers at an address of its own.
            Request::ReadCounters(_) => Reply::ReadCounters(Counters {
                server: ServerId(1),
                values: BTreeMap::new(),
            }),
            Request::SetNodeQuota(call) => Reply::SetNodeQuota(self.set_quota(call)?),
            Request::CreateVolume(call) => {
                if self.state().deleted.contains(&call.spec.id) {
                    return Err(Error::new(ErrorCode::VolumeLost, "it was deleted"));
                }
                Reply::CreateVolume(self.create_volume(call.spec))
            }
            Request::DeleteVolume(call) => {
                self.state().deleted.insert(call.volume);
                self.state().volumes.remove(&call.volume);
                Reply::DeleteVolume(Done)
            }
            Request::RenewVolumes(call) => {
                self.state().renewal_count += 1;
                let mut lost = call.volumes;
                lost.retain(|id| !self.state().volumes.contains(id));
                Reply::RenewVolumes(RenewVolumesReply { lost_volumes: lost })
            }
            Request::StartJob(call) => {
                self.start_job(call.execution, &call.job);
                Reply::StartJob(Done)
            }
            Request::WatchJobs(call) => Reply::WatchJobs(self.watch_jobs(call).await),
            // Only whose end was told has printed something.
            Request::ReadJobOutput(call) => {
                let state = self.state();
                if !state.reports.contains_key(&call.execution) {
                    return Err(Error::new(ErrorCode::NotFound, "it has not ended here"));
                }
                Reply::ReadJobOutput(JobOutput { stdout_bytes: 4 })
            }
            Request::KillJob(call) => {
                let mut state = self.state();
                state.running.remove(&call.execution);
                let killed = ended_state(JobOutcome::Killed);
                state.reports.insert(call.execution, killed);
                Reply::KillJob(Done)
            }
            Request::ExtractFile(call) => Reply::ExtractFile(self.extract_file(call)?),
            Request::IssueUploadEpoch(_) => {
                let epoch = UploadEpoch(1);
                Reply::IssueUploadEpoch(UploadEpochReply { epoch })
            }
            other => return Err(Error::new(ErrorCode::Unsupported, other.name())),
        })
    }

    fn extract_file(&self, call: ExtractFile) -> Result<PutReceipt> {
        assert!(
            self.state().volumes.contains(&call.volume),
            "extracted after deletion"
        );
        let mut state = self.state();
        if let Some(code) = state.extract_fault {
            state.extract_fault_count += 1;
            return Err(Error::new(code, "nothing is heard of home"));
        }
        *state
            .files_at_home
            .entry(call.target_path.clone())
            .or_default() += 1;
        Ok(PutReceipt {
            extraction: call.extraction,
            path: call.target_path,
            size: 3,
            digest: Digest::of(b""),
        })
    }

    fn set_quota(&self, call: SetNodeQuota) -> Result<NodeQuotaList> {
        let mut state = self.state();
        state.quota_requests += 1;
        // A node that is full of runs is so for a while.
        let is_over = state.quota_requests > 2 && state.quota_fault == Some(ErrorCode::Busy);
        if let Some(code) = state.quota_fault.filter(|_| !is_over) {
            return Err(Error::new(code, "nothing for you"));
        }
        Ok(NodeQuotaList {
            granted: call.requested,
            capacity: call.requested,
            other_owners: Vec::new(),
        })
    }

    fn create_volume(&self, spec: VolumeSpec) -> VolumeStatus {
        let mut state = self.state();
        state.volumes.insert(spec.id);
        let why = |code| Error::new(code, "'data' of home: no such file");
        let fault = state.fill_fault.map(why);
        VolumeStatus {
            spec,
            state: match fault {
                Some(_) => VolumeState::Failed,
                None => VolumeState::Ready,
            },
            error: fault,
            used_bytes: 0,
            used_files: 0,
            received_bytes: 0,
            manifest: None,
            warnings: SourceWarnings::default(),
            expires: Time(0),
        }
    }

    async fn watch_jobs(&self, call: WatchJobs) -> JobReports {
        for _ in 0..call.wait_ms / 10 {
            if call
                .executions
                .iter()
                .any(|id| !self.state().running.contains(id))
            {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let state = self.state();
        let reports = call
            .executions
            .iter()
            .map(|id| state.reports.get(id).cloned());
        JobReports {
            reports: reports.collect(),
        }
    }

    fn start_job(&self, execution: ExecutionId, job: &bafs_proto::message::JobSpec) {
        let mut state = self.state();
        if state.reports.contains_key(&execution) {
            return;
        }
        for mount in &job.mounts {
            match &mount.target {
                MountTarget::Scratch { volume, .. } | MountTarget::Cache { volume, .. } => {
                    assert!(
                        state.volumes.contains(volume),
                        "{} starts too early",
                        job.name
                    );
                }
                MountTarget::Home { .. } => {}
            }
        }
        *state.started.entry(job.name.clone()).or_default() += 1;
        let codes = state.exit_codes.get_mut(&job.name);
        let code = codes.and_then(|codes| (!codes.is_empty()).then(|| codes.remove(0)));
        let outcome = JobOutcome::Exited(code.unwrap_or(0));
        if state.has_unfinished_jobs {
            state.running.insert(execution);
            state.reports.insert(execution, JobState::Running);
        } else {
            state.reports.insert(execution, ended_state(outcome));
        }
    }
}

impl Service for OneNodeCluster {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            let (request, token) = (incoming.request, incoming.token);
            let is_gone = {
                let mut state = self.state();
                let was_gone = state.is_stopped;
                state.is_stopped |= state.is_last_call.is_some_and(|is_last| is_last(&request));
                state.shown_tokens.push((request.clone(), token));
                was_gone
            };
            if is_gone {
                return Err(Error::new(ErrorCode::Unreachable, "it is gone"));
            }
            let body = match request {
                Request::ReadJobOutput(_) => "out\nerr\n",
                _ => "",
            };
            Ok((self.answer_request(request).await?, Bytes::from(body)))
        })
    }
}

pub(crate) fn ended_state(outcome: JobOutcome) -> JobState {
    let output_tail = "last words".to_owned();
    JobState::Ended(JobReport {
        outcome,
        wall_ms: 5,
        cpu_ms: 5,
        memory_bytes_max: 0,
        output_tail,
        volumes: Vec::new(),
    })
}

fn node_and_home_adverts(node: &str) -> Vec<Advert> {
    let advert = |id, kind, name: &str, address: &str, slots| Advert {
        id: ServerId(id),
        kind,
        name: name.to_owned(),
        address: address.to_owned(),
        group: "g".to_owned(),
        ttl_ms: 4_000,
        capacity_bytes: 100_000_000,
        capacity_files: 100_000,
        free_bytes: 100_000_000,
        free_files: 100_000,
        slots,
        jobs: 0,
        caches: Vec::new(),
        attributes: Attributes::default(),
        lifetime: Lifetime::default(),
    };
    vec![
        advert(1, ServerKind::Home, "home", "cluster", 0),
        advert(2, ServerKind::Node, "n2", node, 2),
    ]
}
