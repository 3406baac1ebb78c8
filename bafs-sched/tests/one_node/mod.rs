//! A catalog and a node in memory, which answer as real ones: real calls, simulated jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_proto::allotment::{SetNodeQuota, NodeQuotaList};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, ServerId, VolumeId};
use bafs_proto::message::{
    Advert, Done, JobOutcome, JobOutput, JobReport, JobReports, JobState, MountTarget, PutReceipt,
    RenewVolumesReply, Reply, Request, ServerKind, ServerList, WatchJobs,
};
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Time;
use bafs_proto::token::Token;
use bafs_proto::volume::{VolumeSpec, VolumeState, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) volumes: BTreeSet<VolumeId>,
    /// As a real node, it never makes a volume that was deleted, also if it hears of it later.
    pub(crate) deleted: BTreeSet<VolumeId>,
    pub(crate) running: BTreeSet<ExecutionId>,
    pub(crate) reports: BTreeMap<ExecutionId, JobState>,
    pub(crate) started: BTreeMap<String, u32>,
    pub(crate) home: BTreeMap<String, u32>,
    pub(crate) codes: BTreeMap<String, Vec<i32>>,
    pub(crate) is_stuck: bool,
    /// Where the node listens, if not where the catalog does.
    pub(crate) node: Option<String>,
    /// Why the catalog does not answer, if it does not.
    pub(crate) catalog_fault: Option<ErrorCode>,
    pub(crate) renewals: u32,
    /// Why the node keeps no part of itself, if it does not, and how often it was asked for one.
    pub(crate) allot_fault: Option<ErrorCode>,
    pub(crate) allots: u32,
    /// Why volumes are reserved but cannot be filled, if so.
    pub(crate) fill_fault: Option<ErrorCode>,
    /// Why files do not come home, if they do not, and how often that was said.
    pub(crate) extract_fault: Option<ErrorCode>,
    pub(crate) extract_faults: u32,
    /// Whether the catalog does not know the home.
    pub(crate) is_home_away: bool,
    /// The last call that is answered, and whether it came.
    pub(crate) last: Option<fn(&Request) -> bool>,
    pub(crate) is_gone: bool,
    /// What calls showed.
    pub(crate) shown: Vec<(Request, Token)>,
}

/// Catalog and the only node, told apart by what they are asked.
#[derive(Default)]
pub(crate) struct Cluster(Mutex<State>);

impl Cluster {
    pub(crate) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no panic inside")
    }

    async fn answer(self: Arc<Self>, request: Request) -> Result<Reply> {
        Ok(match request {
            Request::QueryServers(_) => {
                let state = self.state();
                if let Some(code) = state.catalog_fault {
                    return Err(Error::new(code, "no list today"));
                }
                let node = state.node.clone().unwrap_or_else(|| "cluster".to_owned());
                let mut servers = adverts(&node);
                servers.retain(|it| it.kind != ServerKind::Home || !state.is_home_away);
                Reply::QueryServers(ServerList { servers })
            }
            Request::SetNodeQuota(call) => Reply::SetNodeQuota(self.allot(call)?),
            Request::CreateVolume(call) => {
                if self.state().deleted.contains(&call.spec.id) {
                    return Err(Error::new(ErrorCode::VolumeLost, "it was deleted"));
                }
                Reply::CreateVolume(self.create(call.spec))
            }
            Request::DeleteVolume(call) => {
                self.state().deleted.insert(call.volume);
                self.state().volumes.remove(&call.volume);
                Reply::DeleteVolume(Done)
            }
            Request::RenewVolumes(call) => {
                self.state().renewals += 1;
                let mut lost = call.volumes;
                lost.retain(|id| !self.state().volumes.contains(id));
                Reply::RenewVolumes(RenewVolumesReply { lost_volumes: lost })
            }
            Request::StartJob(call) => {
                self.start(call.execution, &call.job);
                Reply::StartJob(Done)
            }
            Request::WatchJobs(call) => Reply::WatchJobs(self.watch(call).await),
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
                let killed = ended(JobOutcome::Killed);
                state.reports.insert(call.execution, killed);
                Reply::KillJob(Done)
            }
            Request::ExtractFile(call) => {
                assert!(
                    self.state().volumes.contains(&call.volume),
                    "extracted after deletion"
                );
                let mut state = self.state();
                if let Some(code) = state.extract_fault {
                    state.extract_faults += 1;
                    return Err(Error::new(code, "nothing is heard of home"));
                }
                *state.home.entry(call.target_path.clone()).or_default() += 1;
                Reply::ExtractFile(PutReceipt {
                    extraction: call.extraction,
                    path: call.target_path,
                    size: 3,
                    digest: Digest::of(b""),
                })
            }
            other => return Err(Error::new(ErrorCode::Unsupported, other.name())),
        })
    }

    fn allot(&self, call: SetNodeQuota) -> Result<NodeQuotaList> {
        let mut state = self.state();
        state.allots += 1;
        // A node that is full of runs is so for a while.
        let is_over = state.allots > 2 && state.allot_fault == Some(ErrorCode::Busy);
        if let Some(code) = state.allot_fault.filter(|_| !is_over) {
            return Err(Error::new(code, "nothing for you"));
        }
        Ok(NodeQuotaList {
            granted: call.requested,
            capacity: call.requested,
            other_owners: Vec::new(),
        })
    }

    fn create(&self, spec: VolumeSpec) -> VolumeStatus {
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

    async fn watch(&self, call: WatchJobs) -> JobReports {
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

    fn start(&self, execution: ExecutionId, job: &bafs_proto::message::JobSpec) {
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
        let codes = state.codes.get_mut(&job.name);
        let code = codes.and_then(|codes| (!codes.is_empty()).then(|| codes.remove(0)));
        let outcome = JobOutcome::Exited(code.unwrap_or(0));
        if state.is_stuck {
            state.running.insert(execution);
            state.reports.insert(execution, JobState::Running);
        } else {
            state.reports.insert(execution, ended(outcome));
        }
    }
}

impl Service for Cluster {
    fn serve(self: Arc<Self>, incoming: IncomingRequest) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            let (request, token) = (incoming.request, incoming.token);
            let is_gone = {
                let mut state = self.state();
                let was_gone = state.is_gone;
                state.is_gone |= state.last.is_some_and(|is_last| is_last(&request));
                state.shown.push((request.clone(), token));
                was_gone
            };
            if is_gone {
                return Err(Error::new(ErrorCode::Unreachable, "it is gone"));
            }
            let body = match request {
                Request::ReadJobOutput(_) => "out\nerr\n",
                _ => "",
            };
            Ok((self.answer(request).await?, Bytes::from(body)))
        })
    }
}

pub(crate) fn ended(outcome: JobOutcome) -> JobState {
    let output_tail = "last words".to_owned();
    JobState::Ended(JobReport {
        outcome,
        wall_ms: 5,
        cpu_ms: 5,
        output_tail,
        volumes: Vec::new(),
    })
}

fn adverts(node: &str) -> Vec<Advert> {
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
    };
    vec![
        advert(1, ServerKind::Home, "home", "cluster", 0),
        advert(2, ServerKind::Node, "n2", node, 2),
    ]
}
