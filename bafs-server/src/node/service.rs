//! Requests to a node: which right each needs, and which part answers it.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::cache::RetainedDataList;
use bafs_proto::fd_passing::HandoffTarget;
use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::{
    BlockRange, CacheRef, Counters as CounterValues, Done, OpenTree, Reply, Request, TreeRef,
    UploadEpochReply, VolumeList,
};
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::VolumeKind;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::{Node, membership};
use crate::access::RequiredRight;
use crate::storage::volume_id;

/// Most volumes in one renewal, each of which costs the check of a right.
const RENEWED_VOLUMES_MAX: usize = 4096;

type CallResult = Result<(Reply, Bytes)>;

impl Service for Node {
    fn serve(self: Arc<Self>, incoming: IncomingRequest) -> BoxFuture<'static, CallResult> {
        Box::pin(async move {
            self.counters
                .add(&format!("calls.{}", incoming.request.name()), 1);
            let needs = required_rights(&incoming.token, &incoming.request)?;
            let of_session = self.session_right(&incoming.token, &incoming.request);
            let peer = &incoming.peer.address;
            if !self.access.has_verdicts(needs.iter().chain(&of_session)) {
                let all = needs.iter().cloned().chain(of_session).collect();
                self.access.check_until_refused(peer, all).await;
            }
            for (token, resource, right) in needs {
                self.access.require(&token, resource, right)?;
            }
            self.answer(incoming).await
        })
    }
}

/// The rights that a request needs; nothing is done before they are demanded.
fn required_rights(token: &Token, request: &Request) -> Result<Vec<RequiredRight>> {
    let token = Arc::new(token.clone());
    let need = |resource, right| vec![(token.clone(), resource, right)];
    let volume = |id: VolumeId, right| need(Resource::Volume(id), right);
    let needs = match request {
        Request::CreateVolume(call) => {
            let volumes = call.base.into_iter().chain([call.spec.id]);
            volumes.flat_map(|id| volume(id, Right::Manage)).collect()
        }
        // The answer holds only what the token may see.
        Request::ListVolumes(_) => Vec::new(),
        Request::GetVolume(call) => volume(call.volume, Right::Manage),
        Request::DeleteVolume(call) => volume(call.volume, Right::Manage),
        Request::InvalidateVolume(call) => volume(call.volume, Right::Manage),
        Request::ResizeVolume(call) => volume(call.volume, Right::Manage),
        Request::ExtractFile(call) => volume(call.volume, Right::Manage),
        Request::RenewVolumes(call) => {
            if call.volumes.len() > RENEWED_VOLUMES_MAX {
                let text = format!("{} volumes are too many for one call", call.volumes.len());
                return Err(Error::new(ErrorCode::Malformed, text));
            }
            let volumes = call.volumes.iter();
            volumes.flat_map(|id| volume(*id, Right::Manage)).collect()
        }
        Request::ListVolumeTree(call) => volume(call.volume, Right::Read),
        Request::ReadVolumeFile(call) => volume(call.volume, Right::Read),
        Request::ReadVolumeFiles(call) => volume(call.volume, Right::Read),
        Request::MapVolumeFile(call) => volume(call.volume, Right::Read),
        Request::ReadManifest(call) => volume(call.volume, Right::Read),
        Request::ReadBlocks(call) => need(block_resource(&call.range), Right::Read),
        Request::Probe(call) => need(block_resource(&call.range), Right::Read),
        Request::Promote(call) => need(block_resource(&call.range), Right::Read),
        Request::Touch(call) => need(block_resource(&call.range), Right::Read),
        Request::GetCache(call) => volume(call.volume, Right::Manage),
        Request::WarmCache(call) => volume(call.volume, Right::Manage),
        Request::JoinCache(call) => {
            need(Resource::Cooperative(call.cooperative.clone()), Right::Read)
        }
        Request::OpenTree(OpenTree { tree, writable, .. }) => volume(
            volume_id(tree)?,
            if *writable { Right::Write } else { Right::Read },
        ),
        // Checked with the session, which alone knows the right that it needs.
        Request::RunFileOps(_) | Request::CloseTree(_) => Vec::new(),
        Request::GetHandoffTicket(call) => match &call.target {
            HandoffTarget::Tree { .. } => Vec::new(),
            HandoffTarget::Cache { volume: id, .. } => volume(*id, Right::Read),
        },
        Request::StartJob(_)
        | Request::WatchJobs(_)
        | Request::ReadJobOutput(_)
        | Request::FindPrograms(_)
        | Request::KillJob(_)
        | Request::SetNodeQuota(_)
        | Request::DrainNode(_) => need(Resource::Jobs, Right::Manage),
        // They tell what others read.
        Request::ListRetainedData(_) => need(Resource::Volumes, Right::Manage),
        Request::DropRetainedData(_) => need(Resource::Volumes, Right::Manage),
        Request::ReadCounters(_) => need(Resource::Catalog, Right::Read),
        Request::IssueUploadEpoch(call) => need(Resource::Home(call.path.clone()), Right::Write),
        Request::Advertise(_)
        | Request::QueryServers(_)
        | Request::ListSource(_)
        | Request::StatSource(_)
        | Request::ReadSource(_)
        | Request::ReadSources(_)
        | Request::ReadDigests(_)
        | Request::BeginPut(_)
        | Request::PutRange(_)
        | Request::CommitPut(_)
        | Request::PutFiles(_)
        | Request::CallQueue(_) => return Err(unsupported_error(request)),
    };
    Ok(needs)
}

fn block_resource(range: &BlockRange) -> Resource {
    match &range.cache {
        CacheRef::Volume(id) => Resource::Volume(*id),
        CacheRef::Cooperative(name) => Resource::Cooperative(name.clone()),
    }
}

impl Node {
    /// The right that a call of a session needs. It is demanded where the session is used.
    fn session_right(&self, token: &Token, request: &Request) -> Option<RequiredRight> {
        let (tree, epoch, lifetime_ms_min) = match request {
            Request::RunFileOps(call) => (&call.tree, call.epoch, 0),
            Request::CloseTree(call) => (&call.tree, call.epoch, call.lifetime_ms_min),
            Request::GetHandoffTicket(call) => match &call.target {
                HandoffTarget::Tree { tree, epoch } => (tree, *epoch, 0),
                HandoffTarget::Cache { .. } => return None,
            },
            _ => return None,
        };
        let resource = Resource::Volume(volume_id(tree).ok()?);
        let right = self.storage.session_right(tree, epoch, lifetime_ms_min);
        Some((Arc::new(token.clone()), resource, right))
    }

    /// The volumes of a page that a token may see.
    async fn visible_volumes(
        &self,
        token: &Token,
        peer: &str,
        ids: &[VolumeId],
    ) -> BTreeSet<VolumeId> {
        let shared = Arc::new(token.clone());
        let need = |resource| (shared.clone(), resource, Right::Read);
        // Most who list may see all of them, which is one check.
        let all = need(Resource::Volumes);
        let mut needs = vec![all.clone()];
        needs.extend(ids.iter().map(|id| need(Resource::Volume(*id))));
        if !self.access.has_verdicts(&needs[..1]) {
            self.access.check_all(peer, vec![all]).await;
        }
        let may_see = |resource| self.access.require(token, resource, Right::Read).is_ok();
        if may_see(Resource::Volumes) {
            return ids.iter().copied().collect();
        }
        if !self.access.has_verdicts(&needs) {
            self.access.check_all(peer, needs).await;
        }
        let seen = ids.iter().filter(|id| may_see(Resource::Volume(**id)));
        seen.copied().collect()
    }

    async fn answer(&self, incoming: IncomingRequest) -> CallResult {
        match incoming.request {
            Request::OpenTree(_)
            | Request::RunFileOps(_)
            | Request::CloseTree(_)
            | Request::ListVolumeTree(_)
            | Request::ReadVolumeFile(_)
            | Request::ReadVolumeFiles(_)
            | Request::MapVolumeFile(_)
            | Request::ReadManifest(_)
            | Request::JoinCache(_)
            | Request::GetCache(_)
            | Request::WarmCache(_)
            | Request::ListRetainedData(_)
            | Request::DropRetainedData(_) => self.answer_data(incoming).await,
            Request::ReadBlocks(_)
            | Request::Probe(_)
            | Request::Promote(_)
            | Request::Touch(_) => {
                self.answer_blocks(incoming.request, incoming.deadline)
                    .await
            }
            Request::StartJob(mut call) => {
                call.job.command.read_arguments_from_body(&incoming.body)?;
                reply_without_body(Reply::StartJob(self.executor.start(call)?))
            }
            Request::WatchJobs(call) => reply_without_body(Reply::WatchJobs(
                self.executor.watch(call, incoming.deadline).await?,
            )),
            Request::ReadJobOutput(call) => {
                let (output, body) = self.executor.read_output(call).await?;
                Ok((Reply::ReadJobOutput(output), body))
            }
            Request::FindPrograms(call) => reply_without_body(Reply::FindPrograms(
                self.executor.find_programs(call).await?,
            )),
            Request::KillJob(call) => reply_without_body(Reply::KillJob(self.executor.kill(call))),
            Request::GetHandoffTicket(call) => reply_without_body(Reply::GetHandoffTicket(
                self.issue_handoff_ticket(call.target, &incoming.token)?,
            )),
            Request::ReadCounters(_) => {
                self.caches.count_local_reads();
                let (server, values) = (self.store.id(), self.counters.snapshot());
                reply_without_body(Reply::ReadCounters(CounterValues { server, values }))
            }
            _ => self.answer_volumes(incoming).await,
        }
    }

    /// A node that lost its store is another server at the old address, and whoever knows only the
    /// old one would never delete what is made here.
    fn check_server_id(&self, server: Option<ServerId>) -> Result<()> {
        let own = self.store.id();
        match server.filter(|server| *server != own) {
            None => Ok(()),
            Some(meant) => {
                tracing::info!(%own, %meant, "the requested store no longer exists");
                let text = "the node restarted with an empty store";
                Err(Error::new(ErrorCode::StoreLost, text))
            }
        }
    }

    async fn answer_volumes(&self, incoming: IncomingRequest) -> CallResult {
        let IncomingRequest {
            peer,
            token,
            request,
            deadline,
            ..
        } = incoming;
        let reply = match request {
            Request::CreateVolume(call) => {
                self.check_server_id(call.server)?;
                if matches!(call.spec.kind, VolumeKind::Cache { .. }) {
                    membership::update_peers(self).await;
                }
                Reply::CreateVolume(self.storage.create(call, deadline).await?)
            }
            Request::ListVolumes(call) => {
                let (page, next) = self.storage.volume_page(call.after);
                let ids: Vec<_> = page.iter().map(|row| row.spec.id).collect();
                let visible = self.visible_volumes(&token, &peer.address, &ids).await;
                let seen = page
                    .into_iter()
                    .filter(|row| visible.contains(&row.spec.id));
                let volumes = self.storage.describe_volumes(seen).await;
                Reply::ListVolumes(VolumeList { volumes, next })
            }
            Request::GetVolume(call) => {
                Reply::GetVolume(self.storage.get_volume(call.volume).await?)
            }
            Request::DeleteVolume(call) => {
                Reply::DeleteVolume(self.storage.delete(call.volume).await?)
            }
            Request::RenewVolumes(call) => Reply::RenewVolumes(self.storage.renew(call).await?),
            Request::SetNodeQuota(call) => {
                Reply::SetNodeQuota(self.storage.set_node_quota(call, self.config.slots)?)
            }
            Request::DrainNode(_) => {
                self.departure.begin_drain();
                self.storage.evict_kept();
                Reply::DrainNode(Done)
            }
            Request::InvalidateVolume(call) => {
                Reply::InvalidateVolume(self.storage.invalidate(call, deadline).await?)
            }
            Request::ResizeVolume(call) => Reply::ResizeVolume(self.storage.resize(call).await?),
            Request::ExtractFile(call) => {
                Reply::ExtractFile(self.storage.extract(call, deadline).await?)
            }
            Request::IssueUploadEpoch(call) => {
                let epoch = self
                    .storage
                    .issue_upload_epoch(&token, call, deadline)
                    .await?;
                Reply::IssueUploadEpoch(UploadEpochReply { epoch })
            }
            other => return Err(unsupported_error(&other)),
        };
        reply_without_body(reply)
    }

    async fn answer_data(&self, incoming: IncomingRequest) -> CallResult {
        let IncomingRequest {
            token,
            request,
            body,
            deadline,
            ..
        } = incoming;
        let allow = |tree: &TreeRef| {
            let resource = volume_id(tree).map(Resource::Volume);
            move |right| self.access.require(&token, resource?, right)
        };
        match request {
            Request::OpenTree(call) => reply_without_body(Reply::OpenTree(
                self.storage.open_tree(call, deadline).await?,
            )),
            Request::RunFileOps(call) => {
                let allow = allow(&call.tree);
                let (results, data) = self.storage.run_file_ops(call, body, allow).await?;
                Ok((Reply::RunFileOps(results), data))
            }
            Request::CloseTree(call) => {
                let allow = allow(&call.tree);
                reply_without_body(Reply::CloseTree(
                    self.storage.close_tree(&call, allow).await?,
                ))
            }
            Request::ListVolumeTree(call) => {
                reply_without_body(Reply::ListVolumeTree(self.storage.list_tree(call).await?))
            }
            Request::ReadVolumeFile(call) => {
                let (digests, data) = self.storage.read_file(call).await?;
                Ok((Reply::ReadVolumeFile(digests), data))
            }
            Request::ReadVolumeFiles(call) => {
                let (digests, data) = self.storage.read_files(call).await?;
                Ok((Reply::ReadVolumeFiles(digests), data))
            }
            Request::MapVolumeFile(call) => {
                reply_without_body(Reply::MapVolumeFile(self.storage.map_file(call).await?))
            }
            Request::ReadManifest(call) => {
                self.storage.touch(call.volume)?;
                reply_without_body(Reply::ReadManifest(self.caches.read_manifest(call).await?))
            }
            Request::JoinCache(call) => {
                reply_without_body(Reply::JoinCache(self.caches.join(call)?))
            }
            Request::GetCache(call) => {
                reply_without_body(Reply::GetCache(self.caches.get_cache(call.volume)?))
            }
            Request::ListRetainedData(_) => {
                let data = self.caches.retained_sources(None);
                reply_without_body(Reply::ListRetainedData(RetainedDataList { data }))
            }
            Request::DropRetainedData(call) => {
                let data = self.caches.drop_retained(call.path.as_deref()).await;
                reply_without_body(Reply::DropRetainedData(RetainedDataList { data }))
            }
            Request::WarmCache(call) => {
                self.storage.touch(call.volume)?;
                reply_without_body(Reply::WarmCache(self.caches.warm(call).await?))
            }
            other => Err(unsupported_error(&other)),
        }
    }

    async fn answer_blocks(&self, request: Request, deadline: Deadline) -> CallResult {
        match request {
            Request::ReadBlocks(call) => {
                if let CacheRef::Volume(id) = &call.range.cache {
                    self.storage.touch(*id)?;
                }
                let (blocks, data) = self.caches.read_blocks(call, deadline).await?;
                Ok((Reply::ReadBlocks(blocks), data))
            }
            Request::Probe(call) => {
                let (blocks, data) = self.caches.probe(call, deadline).await?;
                Ok((Reply::Probe(blocks), data))
            }
            Request::Promote(call) => {
                self.caches.promote(&call)?;
                reply_without_body(Reply::Promote(Done))
            }
            Request::Touch(call) => {
                self.caches.touch(&call)?;
                reply_without_body(Reply::Touch(Done))
            }
            other => Err(unsupported_error(&other)),
        }
    }
}

fn reply_without_body(reply: Reply) -> CallResult {
    Ok((reply, Bytes::new()))
}

fn unsupported_error(request: &Request) -> Error {
    let text = format!(
        "a node does not answer {}; ask home or the catalog",
        request.name()
    );
    Error::new(ErrorCode::Unsupported, text)
}
